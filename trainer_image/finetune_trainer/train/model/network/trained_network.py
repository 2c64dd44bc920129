"""The network that the loop trains: a model and an objective, from a batch to a loss."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from finetune_trainer.train.model.network import attention, neftune, task
from finetune_trainer.train.model.network.lm_head import Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedModel

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.data.feed import Collator, Examples
    from finetune_trainer.train.data.pack import Batch

    Computation = Callable[["Network", Batch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """The computation of a forward pass from a batch and its hidden states, as those of `Objective`: two tensors."""


class Objective(Protocol):
    """Computes and counts the losses of a batch: the loop divides their sum by the global count."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """MLflow names of the metrics that are reported in addition to the loss."""
    sums: ClassVar[int | None] = None
    """The number of sums that a batch has for the metrics; None for one per metric."""
    cross_entropy: ClassVar[bool] = False
    """Whether the mean loss is a cross-entropy in nats, so that exp(loss) is a perplexity."""
    has_reference: ClassVar[bool] = False
    """Whether `prepare` computes the reference of a split."""

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums for the metrics, fp32 [sums].

        Args:
            network: the network, whose head is gathered.
            batch: the batch.
            hidden: last hidden states at the targets of the batch [targets, width]; those of a reward model are at the last token of
                each document [documents, width].
        """

    def count(self, batch: Batch) -> int:
        """Return the number of losses in a batch: by default one per target."""
        return batch.targets_count

    def count_sums(self) -> int:
        """Return the number of sums that a batch has for the metrics."""
        return len(self.metrics) if self.sums is None else self.sums

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the metrics of some batches: by default each sum divided by `count`.

        Args:
            sums: the sums of the batches of all ranks.
            count: number of losses in these batches.
        """
        return {name: total / max(count, 1.0) for name, total in zip(self.metrics, sums, strict=True)}

    def prepare(self, network: Network, examples: Examples, collator: Collator, batch_size: int) -> Split:
        """Return the split, with what the loss needs from the model before its first step.

        All ranks call this together. By default the loss needs nothing.

        Args:
            network: the model before its first step.
            examples: the split, and the sequences of it that the run still needs.
            collator: makes this rank's batches.
            batch_size: sequences in a batch.
        """
        del network, collator, batch_size
        return examples.split


class Network(nn.Module):
    """A model and its objective in one forward pass.

    It is the root FSDP module: its forward pass computes the loss too.

    Args:
        model: a language model or a reward model, with or without peft's adapters.
        objective: computes the loss of a batch.
        neftune_alpha: scale of the noise on embeddings in training; None: no noise.
    """

    def __init__(self, model: nn.Module, objective: Objective, neftune_alpha: float | None = None) -> None:
        super().__init__()
        # NB: the model comes first: a module with two names, like the output layer, is listed under the first.
        self.model = model
        self.head = Head(self.base)
        self.objective = objective
        self.neftune_alpha = neftune_alpha
        self._computation: Computation | None = None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the objective's loss and metrics of a batch, or what `no_grad_forward` computes instead."""
        computation = self._computation or self.objective
        states = self.compute_hidden_states(batch)
        hidden = batch.at_last_tokens(states) if self.head.is_score else batch.at_targets(states)
        outputs: tuple[torch.Tensor, torch.Tensor] = self.head(
            hidden, lambda states: computation(self, batch, states)
        )
        return outputs

    @contextmanager
    def no_grad_forward(self, computation: Computation | None = None) -> Iterator[None]:
        """Within this context, forward passes are in evaluation mode and without gradients.

        They compute `computation` or, if it is None, the objective.

        The network stays in evaluation mode; `loop.take_step` returns it to training mode.

        NB: code that expects sharded parameters fails where they are gathered, so they are sharded again at the end.
        """
        self._computation = computation
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._computation = None
            self.free_gathered_weights()

    @property
    def base(self) -> PreTrainedModel:
        """The model without peft's wrapper; its layers keep their adapters."""
        return base_of(self.model)

    @property
    def tied(self) -> bool:
        """Whether the embedding and the output layer share a weight."""
        embedding_ids = {id(weight) for weight in self.base.get_input_embeddings().parameters()}
        return any(id(weight) in embedding_ids for weight in self.head.parameters())

    def compute_hidden_states(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states of a batch [rows, length, width]."""
        decoder = decoder_of(self.base)
        prompt = self._soft_prompt(len(batch.input_ids))
        if prompt is None:
            with self._add_noise(batch):
                return decoder(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    use_cache=False,
                    **self._attention_arguments(batch),
                ).last_hidden_state
        # With virtual tokens, the recipe has neither noise nor packing: each row is one document.
        if isinstance(prompt, torch.Tensor):
            words = self.base.get_input_embeddings()(batch.input_ids)
            states = decoder(inputs_embeds=torch.cat([prompt.to(words.dtype), words], dim=1), use_cache=False)
            return states.last_hidden_state[:, prompt.shape[1] :]
        # NB: without position ids the positions continue after the prefix, as in generation.
        states = decoder(input_ids=batch.input_ids, past_key_values=prompt, use_cache=False)
        return states.last_hidden_state

    def compute_model_outputs(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the model's own forward pass [rows, length, vocabulary]; each row must be one document.

        Of a reward model, return the last hidden states [rows, length, width].

        NB: call this only within the forward pass of the network, in which the output layer is gathered.
        """
        model: Any = self.model
        arguments = {"input_ids": batch.input_ids, "use_cache": False, **self._attention_arguments(batch)}
        if self.head.is_score:
            return model(**arguments, output_hidden_states=True).hidden_states[-1]
        return model(**arguments).logits

    def free_gathered_weights(self) -> None:
        """Free the weights that stay gathered after a forward pass without a backward pass: the output layer and the root's group."""
        for module in (self, self.head):
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def _add_noise(self, batch: Batch) -> Iterator[None]:
        """Add noise to the embeddings of a batch in training."""
        if self.neftune_alpha is None or not self.training:
            yield
            return
        alpha, embedding = self.neftune_alpha, self.base.get_input_embeddings()
        hook = embedding.register_forward_hook(
            lambda _module, _ids, words: neftune.add_noise(words, batch, alpha)
        )
        try:
            yield
        finally:
            hook.remove()

    def _attention_arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of isolated attention; other implementations derive documents from the position ids."""
        isolated = self.base.config._attn_implementation in attention.NAMES  # noqa: SLF001
        return {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen} if isolated else {}

    def _soft_prompt(self, rows: int) -> Any:
        """Return the embeddings of prompt tuning [rows, tokens, width], the cache of prefix tuning, or None."""
        config = getattr(self.model, "peft_config", {}).get("default")
        if config is None or not config.is_prompt_learning:
            return None
        model: Any = self.model
        if config.peft_type == "PREFIX_TUNING":
            return model.get_prompt(rows)
        return model.prompt_encoder["default"].embedding.weight.unsqueeze(0).expand(rows, -1, -1)


def replace_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer of a model that has this name."""
    module_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module_name), attribute, tensor)


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return a model without peft's wrapper."""
    wrapped: Any = model
    return wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped


def decoder_of(base: PreTrainedModel) -> nn.Module:
    """Return the decoder of a model, which computes hidden states from tokens.

    NB: get_decoder() returns `base` for Llama 4's text model, and an output layer for ModernBERT's decoder (transformers 5.23): then a
    child of `base` is the decoder.
    """
    from transformers import PreTrainedModel

    candidates: list[nn.Module] = [base.get_decoder(), *base.children()]
    return next(
        (part for part in candidates if isinstance(part, PreTrainedModel) and part is not base), candidates[0]
    )


def decoder_layers(network: Network) -> list[nn.Module]:
    """Return the layers of the decoder."""
    decoder = decoder_of(network.base)
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    # Under another name, the decoder's layers are its longest list of modules.
    lists = [list(module) for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def is_linear(module: nn.Module) -> bool:
    """Whether a layer multiplies its input by a matrix: a Linear, or the Conv1D of GPT-2, whose weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def find_towers(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that do not process text: image and audio towers and their projectors."""
    text_modules = (decoder_of(model), task.get_output_layer(model))

    def is_text_module(module: nn.Module) -> bool:
        return any(module is text_module for text_module in text_modules)

    def iterate_towers(name: str, module: nn.Module) -> Iterator[str]:
        if is_text_module(module):
            return
        if not any(is_text_module(part) for part in module.modules()):
            yield name
            return
        for child_name, child in module.named_children():
            yield from iterate_towers(f"{name}.{child_name}" if name else child_name, child)

    return [*iterate_towers("", model)]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
