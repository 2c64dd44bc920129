"""The sizes of a model that the estimate of its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from finetune_trainer.train.model.adapters import pissa
from finetune_trainer.train.model.adapters.new_tokens import embedding_and_head_weights
from finetune_trainer.train.model.checks import recomputation
from finetune_trainer.train.model.network import experts
from finetune_trainer.train.model.network.trained_network import is_linear
from finetune_trainer.train.model.optimizer import muon
from finetune_trainer.train.model.optimizer.compact_adamw import find_embeddings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune_trainer.train.model.network.trained_network import Network

# Four bits a number and an fp32 constant every 64 numbers, without double quantization, which makes the constants smaller (Dettmers et al.,
# arXiv:2305.14314, section 3).
_FOUR_BIT_NUMBER_BYTES = (4 + 32 / 64) / 8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that an estimate depends on."""

    parameters: int
    trained: int
    unsharded: int
    """Parameters that are not sharded: a four-bit base."""
    unsharded_bytes: float
    """The bytes of the unsharded parameters."""
    teacher: int
    """Parameters of the teacher on a rank: its shard, with two layers and the output layer gathered."""
    layers: int
    width: int
    """The hidden size."""
    feed_forward: int
    """Width of a token between the products of a feed-forward layer."""
    embedding: int
    """Parameters of the embedding, including those of a tied output layer."""
    embedding_trained: int = 0
    """The trained parameters among those of `embedding`."""
    output: int = 0
    """Parameters of an output layer that is not tied."""
    output_trained: int = 0
    """The trained parameters among those of `output`."""
    tied: bool = False
    """Whether the embedding is gathered from the beginning of a step to its end, since it is the output layer too."""
    copied: int = 0
    """Numbers in peft's copy of the embedding with the trained rows of new tokens, and in the gradient of the copy."""
    head: int = 0
    """Trained parameters of the output layer, tied or not."""
    outputs: int = 0
    """Logits per token, or 1 for a reward model."""
    matrices: int = 0
    """Trained parameters in matrices of the layers, which Muon trains."""
    embeddings: int = 0
    """Trained parameters of all embeddings, whose moments AdamW8bit keeps in fp32."""
    initial: int = 0
    """Numbers of the initial weights of PiSSA layers, in fp32."""
    copies: int = 0
    """Experts of a layer that get a copy of a token."""
    four_bits: int = 0
    """Parameters of a base on the meta device that will be packed into four bits."""
    can_recompute: bool = True
    """Whether transformers can recompute the layers."""
    adapted_experts: int = 0
    """Parameters of experts to which a forward pass adds the product of an adapter."""

    @classmethod
    def of(cls, network: Network, teacher: Network | None, *, quantized: bool, ranks: int = 1) -> Shape:
        """Return the sizes of a network before sharding, also on the meta device.

        Args:
            network: the network to train.
            teacher: of a distillation.
            quantized: whether frozen weights are in four bits, and unsharded on each rank.
            ranks: over which the teacher is sharded.
        """
        from peft.tuners.lora.layer import ParamWrapper

        packed_weights = _find_packed_weights(network) if quantized else set()
        config = network.base.config.get_text_config()
        read_field = experts.field_reader(config)
        frozen_weights = [weight for weight in network.base.parameters() if not weight.requires_grad]
        embedding, tied = network.base.get_input_embeddings(), network.tied
        embedding_weights = embedding_and_head_weights(network.base) if tied else list(embedding.parameters())
        head_weights = [] if tied else list(network.head.parameters())
        return cls(
            parameters=sum(weight.numel() for weight in network.parameters()),
            trained=sum(weight.numel() for weight in network.parameters() if weight.requires_grad),
            unsharded=sum(weight.numel() for weight in frozen_weights) if quantized else 0,
            unsharded_bytes=_compute_stored_bytes(network, packed_weights) if quantized else 0,
            four_bits=_count_numbers(packed_weights),
            teacher=0 if teacher is None else _count_teacher_numbers(teacher, ranks),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            feed_forward=experts.compute_feed_forward_width(read_field),
            embedding=_count_numbers(embedding_weights),
            embedding_trained=_count_numbers(embedding_weights, trained=True),
            output=_count_numbers(head_weights),
            output_trained=_count_numbers(head_weights, trained=True),
            tied=tied,
            copied=_count_copied_numbers(embedding),
            head=_count_numbers(network.head.parameters(), trained=True),
            outputs=network.head.outputs,
            matrices=sum(weight.numel() for weight in muon.find_muon_matrices(network)),
            embeddings=_count_numbers(find_embeddings(network)),
            initial=pissa.count_initial_numbers(network.model),
            copies=experts.count_per_token(read_field),
            can_recompute=recomputation.is_supported(network.model),
            adapted_experts=sum(
                module.get_param().numel() for module in network.modules() if isinstance(module, ParamWrapper)
            ),
        )


def _count_numbers(weights: Iterable[nn.Parameter], *, trained: bool = False) -> int:
    """Count the numbers in parameters, or only in the trained parameters."""
    return sum(weight.numel() for weight in weights if weight.requires_grad or not trained)


def _count_copied_numbers(embedding: Any) -> int:
    """Count the numbers in peft's copy of the embedding, if it has trained rows of new tokens, and in the gradient of the copy."""
    if not hasattr(embedding, "token_adapter"):
        return 0
    return 2 * int(embedding.token_adapter.base_layer.weight.numel())


def _count_teacher_numbers(teacher: Network, ranks: int) -> int:
    """Count the numbers of a teacher that a rank holds: its shard, and two gathered layers and the output layer."""
    parameters = _count_numbers(teacher.parameters())
    layers: int = teacher.base.config.get_text_config().num_hidden_layers
    layer_numbers = (parameters - _count_numbers(embedding_and_head_weights(teacher.base))) // max(1, layers)
    return parameters // ranks + 2 * layer_numbers + _count_numbers(teacher.head.parameters())


def _find_packed_weights(network: Network) -> set[nn.Parameter]:
    """Return the frozen weights of a base on the meta device that will be packed into four bits.

    These are the weights of linear layers. The embedding, the output layer, and experts that a model stores in one tensor are not
    packed.
    """
    weights: set[nn.Parameter] = {module.weight for module in network.base.modules() if is_linear(module)}
    return {
        weight
        for weight in weights - {*network.head.parameters()}
        if weight.is_meta and not weight.requires_grad
    }


def _compute_stored_bytes(network: Network, packed_weights: set[nn.Parameter]) -> float:
    """Return the bytes of a frozen base in four bits, also if `packed_weights` are on the meta device and not packed yet."""
    stored_bytes = 0.0
    for weight in network.base.parameters():
        if not weight.requires_grad:
            number_bytes = _FOUR_BIT_NUMBER_BYTES if weight in packed_weights else weight.element_size()
            stored_bytes += weight.numel() * number_bytes
    return stored_bytes
