"""Compares the logits of training, or the hidden states of a reward model, with those of the model's own forward pass, before the first step.

The model's own forward pass gets each document alone, with eager attention. Training gets the same documents,
arranged as in every step: in one packed row, or in padded rows, with the attention of the run.
"""

from __future__ import annotations

import math
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_trainer.pod.exit_status import RecipeRefusedError, first_line
from finetune_trainer.train.model.checks import probe
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.trained_network import decoder_layers
from finetune_trainer.train.runtime.explain import explain_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data import pack
    from finetune_trainer.train.model.network.trained_network import Network

# Tokens that training gets of the second document.
_SECOND_TOKENS = 6
# The tolerance is this multiple of the measured rounding noise, but not below or above these shares of the logits.
_NOISE_FACTOR, _MIN_TOLERANCE, _MAX_TOLERANCE = 3.0, 1e-3, 0.3
# Errors of a model's code that does not support the inputs of training.
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Subject:
    """A model in error messages, and what to do if it cannot be used."""

    address: str
    field: str = "model.base"
    """The field of the recipe that has the address."""
    remedy: str = "choose another model, or train it with your own script"
    packing_remedy: str | None = None
    """The remedy if only rows of several documents are wrong; None if each row has one document."""
    overflow_remedy: str | None = None
    """The remedy if the model overflows in FP16; None if it does not compute in FP16."""

    @classmethod
    def of(cls, recipe: Recipe) -> Subject:
        """Return the base model of a recipe."""
        is_fp16 = recipe.training.precision == "FP16"
        return cls(
            recipe.model.base,
            packing_remedy=packing_remedy(recipe),
            overflow_remedy="set training.precision to BF16 or FP32" if is_fp16 else None,
        )

    def __str__(self) -> str:
        return f"{self.field} {self.address}"


@dataclass(frozen=True)
class Comparison:
    """Differences between logits [tokens, vocabulary]: the upper quartile over the tokens of a document; of two documents, the maximum.

    At a token, two vectors of logits differ by |first - second| / |second|. The mean of each vector is subtracted first, because a
    constant does not change probabilities.
    """

    reference: float
    """Between training's logits and the logits of the model's own forward pass."""
    context: float
    """Between training's logits of the second document, and its logits after another first document and with another last token."""
    look_ahead: float
    """Between the model's own logits of a document with two different last tokens, at the tokens before the last."""
    noise: float
    """Between the model's own logits with and without rounding noise in the embeddings."""
    precision: float
    """The relative rounding error of the type that the model computes in."""

    @property
    def tolerance(self) -> float:
        """The difference that rounding explains."""
        # At least four rounding errors, even if the measured noise is smaller.
        noise = _NOISE_FACTOR * self.noise
        return min(max(_MIN_TOLERANCE, 4 * self.precision, noise), _MAX_TOLERANCE)

    @property
    def is_finite(self) -> bool:
        """Whether all logits are finite."""
        return all(
            math.isfinite(value) for value in (self.reference, self.context, self.look_ahead, self.noise)
        )


def packing_remedy(recipe: Recipe) -> str | None:
    """Return what to do if a model cannot separate the documents of a row; None: a row of this recipe has one document."""
    # If an objective compares answers, a row has both answers of an example, whatever training.packing is.
    if recipe.objective.type in COLUMNS_OF_OBJECTIVE:
        return "choose another model"
    return "set training.packing to false" if recipe.training.packing else None


def check(
    network: Network,
    device: torch.device,
    subject: Subject,
    *,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
) -> None:
    """Check that training computes the logits of the model, and that tokens attend neither to later tokens nor to other documents.

    Takes three forward passes of a few tokens, and more to find the cause of a difference. All ranks of a sharded network call this
    together, and raise the same error.

    Args:
        network: the network, with its weights.
        device: where it computes.
        subject: the model.
        gather: returns the value of every rank.

    Raises:
        RecipeRefusedError: the check or a forward pass fails, or logits are NaN or infinite.
    """
    is_packed = subject.packing_remedy is not None

    def compare(**options: bool) -> Comparison:
        return _take_worst(gather(_try_to_compare(network, device, **options)), subject, network)

    comparison = compare(is_packed=is_packed, is_eager=True)
    _check_finite(comparison, subject)
    if max(comparison.reference, comparison.context, comparison.look_ahead) < comparison.tolerance:
        return
    unpacked = compare(is_packed=False, is_eager=True) if is_packed else comparison
    # In rows of one document, later tokens alone can make these differences.
    if max(unpacked.context, unpacked.look_ahead) >= unpacked.tolerance:
        raise _refusal(
            network,
            subject,
            f"whose tokens attend to later tokens, so it is not a causal language model: {subject.remedy}",
        )
    if unpacked.reference < unpacked.tolerance:
        raise _refusal(network, subject, f"whose layers mix the documents of a row: {subject.packing_remedy}")
    # If the logits agree with the same attention on both sides, the attention is the cause.
    same_attention = compare(is_packed=False, is_eager=False)
    if same_attention.reference < same_attention.tolerance:
        raise _refusal(
            network,
            subject,
            "whose attention computes different logits in training than in the model's own forward pass "
            f"(they differ by {unpacked.reference:.0%}): {subject.remedy}",
        )
    # Both sides now run the same decoder in the same way: only the LM head remains as the cause.
    raise _refusal(
        network,
        subject,
        f"which has an unsupported LM head (the logits differ by {unpacked.reference:.0%}): {subject.remedy}",
    )


def _refusal(network: Network, subject: Subject, reason: str) -> RecipeRefusedError:
    return RecipeRefusedError(
        f"{subject} is a {network.base.config.model_type}, {reason}", reason="ModelNotSupported"
    )


def _check_finite(comparison: Comparison, subject: Subject) -> None:
    if comparison.is_finite:
        return
    if subject.overflow_remedy is not None:
        raise RecipeRefusedError(
            f"{subject} computes NaN logits because it overflows in FP16 or its weights are broken: "
            f"{subject.overflow_remedy}",
            reason="ModelOverflows",
        )
    raise RecipeRefusedError(
        f"{subject} computes NaN logits: its weights are broken", reason="WeightsNotFinite"
    )


def _take_worst(results: list[Comparison | str], subject: Subject, network: Network) -> Comparison:
    """Return the greatest differences of all ranks, so that all ranks decide alike.

    Raises:
        RecipeRefusedError: the forward pass failed on a rank.
    """
    comparisons = []
    for result in results:
        if isinstance(result, str):
            raise _refusal(
                network, subject, f"whose forward pass fails in training ({result}): {subject.remedy}"
            )
        comparisons.append(result)
    # NB: max() may skip NaN; numpy's max does not.
    differences = [(each.reference, each.context, each.look_ahead, each.noise) for each in comparisons]
    reference, context, look_ahead, noise = np.max(differences, axis=0).tolist()
    return Comparison(reference, context, look_ahead, noise, comparisons[0].precision)


def _try_to_compare(
    network: Network, device: torch.device, *, is_packed: bool, is_eager: bool
) -> Comparison | str:
    """Return the comparison, or a short description of the error in the model's code."""
    try:
        return _compare(network, device, is_packed=is_packed, is_eager=is_eager)
    except _MODEL_ERRORS as error:
        # Errors that `explain_error` replaces, of memory and of other ranks, say nothing about the model, and neither do errors of GPUs.
        if explain_error(error, rank=0) is not error or "CUDA" in str(error):
            raise
        traceback.print_exc()
        return f"{type(error).__name__}: {first_line(error)}"


def _compare(network: Network, device: torch.device, *, is_packed: bool, is_eager: bool) -> Comparison:
    """Compute the logits of two documents in training, in the model's own forward pass, and in training after a change of the documents.

    Args:
        network: the network.
        device: where it computes.
        is_packed: whether training has both documents in one row.
        is_eager: whether the model's own forward pass has eager attention, or else the attention of the run.
    """
    first_document, second_document, other_document = probe.build_documents(network.head.vocabulary)
    # Training gets the second document cut, so that rows that are not packed have padding. The model's own forward pass gets it whole, so
    # that its rows have none: in a causal model, the tokens after the cut change nothing before it.
    training_documents = [first_document, second_document[:_SECOND_TOKENS]]
    # NB: the second document's last token predicts nothing, so its change matters only to a model that looks ahead.
    changed_documents = [
        other_document,
        np.append(second_document[: _SECOND_TOKENS - 1], other_document[:1]),
    ]
    rows = [[0, 1]] if is_packed else [[0], [1]]
    changed_ending = np.append(second_document[:-1], other_document[:1])
    # Five rows of one document each: the first; the second; the second with another last token; the first and the second, with noise.
    single_documents = probe.build_batch(
        [first_document, second_document, changed_ending], [[0], [1], [2], [0], [1]], device
    )
    first_noisy_row = 3

    def compute_outputs(batch: pack.Batch, hidden: torch.Tensor) -> torch.Tensor:
        # A reward is one number of a document, which shows little: of reward models, the hidden states of all tokens are compared.
        if network.head.is_score:
            return batch.at_targets(network.compute_hidden_states(batch)).float()
        return network.head.compute_logits(hidden)

    def compute(_: Network, batch: pack.Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return compute_outputs(batch, hidden), hidden

    def compute_both(
        _: Network, batch: pack.Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with (
            attention.use_eager_attention(network.base) if is_eager else nullcontext(),
            _add_noise(network, first_noisy_row),
        ):
            reference_logits = network.compute_model_outputs(single_documents)
        # Virtual tokens precede the tokens of the rows, and training has no logits of them.
        row_length = single_documents.input_ids.shape[1]
        return compute_outputs(batch, hidden), reference_logits[:, -row_length:].float()

    # NB: some models draw random numbers in evaluation too, and the check must not change those of the training.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with network.no_grad_forward(compute_both):
            logits, reference = network(probe.build_batch(training_documents, rows, device))
        with network.no_grad_forward(compute):
            changed_logits, hidden = network(probe.build_batch(changed_documents, rows, device))
    # The last token of a document has no target.
    first_end, second_end = probe.DOCUMENT_TOKENS - 1, _SECOND_TOKENS - 1
    first, second = logits.split((first_end, second_end))
    _, changed_second = changed_logits.split((first_end, second_end))
    # The rows of `single_documents`.
    first_reference, second_reference, changed_reference, first_noisy, second_noisy = reference
    return Comparison(
        reference=max(
            _relative_difference(first, first_reference[:first_end]),
            _relative_difference(second, second_reference[:second_end]),
        ),
        context=_relative_difference(changed_second, second),
        look_ahead=_relative_difference(changed_reference[:-1], second_reference[:-1]),
        noise=max(
            _relative_difference(first_noisy, first_reference),
            _relative_difference(second_noisy, second_reference),
        ),
        precision=torch.finfo(hidden.dtype).eps,
    )


def _relative_difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    logits = logits - logits.mean(-1, keepdim=True)
    reference = reference - reference.mean(-1, keepdim=True)
    shares = (logits - reference).norm(dim=-1) / reference.norm(dim=-1)
    # Not the maximum: near-ties of a router may change the experts of single tokens. NB: with one NaN, the quantile is NaN too.
    return float(shares.quantile(0.75))


@contextmanager
def _add_noise(network: Network, first_noisy_row: int) -> Iterator[None]:
    """Add noise to the embeddings of all rows from `first_noisy_row`, as large as the rounding errors of all layers together."""
    layers = len(decoder_layers(network))

    def add(_embedding: nn.Module, _inputs: object, words: torch.Tensor) -> torch.Tensor:
        exact_words, other_words = words[:first_noisy_row], words[first_noisy_row:]
        noise = torch.randn(other_words.shape, generator=torch.Generator().manual_seed(0)).to(other_words)
        # The rounding errors of layers are independent, so that their sum grows with the square root of their number.
        noisy_words = other_words * (1 + noise * torch.finfo(words.dtype).eps * math.sqrt(layers))
        return torch.cat([exact_words, noisy_words])

    hook = network.base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
