"""The sizes of a model that the estimate of its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from finetune_trainer.train.model.adapters import pissa
from finetune_trainer.train.model.adapters.new_tokens import at_ends
from finetune_trainer.train.model.checks import recomputation
from finetune_trainer.train.model.network import experts
from finetune_trainer.train.model.network.trained_network import is_linear
from finetune_trainer.train.model.optimizer import muon
from finetune_trainer.train.model.optimizer.compact_adamw import find_embeddings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune_trainer.train.model.network.trained_network import Network

_FOUR_BITS = 4.5 / 8


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that an estimate depends on."""

    parameters: int
    trained: int
    whole: int
    """Parameters that are not sharded: a four-bit base."""
    whole_bytes: float
    teacher: int
    """Parameters of the teacher on a rank: its shard, with two layers and the output layer gathered."""
    layers: int
    width: int
    feed_forward: int
    """Numbers of a token between the products of a feed-forward layer."""
    embedding: int
    """Parameters of the embedding; with those of an output layer that is tied to it."""
    embedding_trained: int = 0
    """Those of them that are trained."""
    output: int = 0
    """Parameters of an output layer that is not tied."""
    output_trained: int = 0
    """Those of them that are trained."""
    tied: bool = False
    """Whether the embedding is gathered from the beginning of a step to its end, since it is the output layer too."""
    copied: int = 0
    """Numbers of a copy of the embedding, into which peft puts the trained rows of new tokens, and of its gradient."""
    head: int = 0
    """Parameters of the output layer, tied or not, where it is trained."""
    vocabulary: int = 0
    matrices: int = 0
    """Trained parameters in matrices of the layers, which Muon takes."""
    embeddings: int = 0
    """Trained parameters of all embeddings, whose moments AdamW8bit keeps in fp32."""
    initial: int = 0
    """Numbers of what layers of PiSSA began as, in fp32."""
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

        packed = _packed(network) if quantized else set()
        config = network.base.config.get_text_config()
        sizes = experts.fields(config)
        frozen = [weight for weight in network.base.parameters() if not weight.requires_grad]
        embedding, tied = network.base.get_input_embeddings(), network.tied
        first = at_ends(network.base) if tied else list(embedding.parameters())
        last = [] if tied else list(network.head.parameters())
        return cls(
            parameters=sum(weight.numel() for weight in network.parameters()),
            trained=sum(weight.numel() for weight in network.parameters() if weight.requires_grad),
            whole=sum(weight.numel() for weight in frozen) if quantized else 0,
            whole_bytes=_stored_bytes(network, packed) if quantized else 0,
            four_bits=_numbers(packed),
            teacher=0 if teacher is None else _held_of_teacher(teacher, ranks),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            feed_forward=experts.width(sizes),
            embedding=_numbers(first),
            embedding_trained=_numbers(first, trained=True),
            output=_numbers(last),
            output_trained=_numbers(last, trained=True),
            tied=tied,
            copied=2 * embedding.token_adapter.base_layer.weight.numel()
            if hasattr(embedding, "token_adapter")
            else 0,
            head=_numbers(network.head.parameters(), trained=True),
            vocabulary=network.head.vocabulary,
            matrices=sum(weight.numel() for weight in muon.matrices(network)),
            embeddings=_numbers(find_embeddings(network)),
            initial=pissa.size(network.model),
            copies=experts.of_a_token(sizes),
            can_recompute=recomputation.is_supported(network.model),
            adapted_experts=sum(
                module.get_param().numel() for module in network.modules() if isinstance(module, ParamWrapper)
            ),
        )


def _numbers(weights: Iterable[nn.Parameter], *, trained: bool = False) -> int:
    """The numbers in some parameters, or in those of them that are trained."""
    return sum(weight.numel() for weight in weights if weight.requires_grad or not trained)


def _held_of_teacher(teacher: Network, ranks: int) -> int:
    """The numbers of a teacher that a rank holds: its shard, and what is gathered of two layers or of the output layer."""
    parameters = _numbers(teacher.parameters())
    layers: int = teacher.base.config.get_text_config().num_hidden_layers
    a_layer = (parameters - _numbers(at_ends(teacher.base))) // max(1, layers)
    return parameters // ranks + 2 * a_layer + _numbers(teacher.head.parameters())


def _packed(network: Network) -> set[nn.Parameter]:
    """Return the frozen weights of a base on the meta device that will be packed into four bits.

    These are the weights of linear layers. The embedding and the output layer are not packed, nor experts that a model keeps in one
    tensor, which are no linear layers.
    """
    weights: set[nn.Parameter] = {module.weight for module in network.base.modules() if is_linear(module)}
    return {
        weight
        for weight in weights - {*network.head.parameters()}
        if weight.is_meta and not weight.requires_grad
    }


def _stored_bytes(network: Network, packed: set[nn.Parameter]) -> float:
    """Return the bytes of a frozen base in four bits, before and after its weights are packed.

    Four bits a number and an fp32 constant every 64, which double quantization makes less (Dettmers et al.,
    arXiv:2305.14314, section 3).
    """
    stored = 0.0
    for weight in network.base.parameters():
        if not weight.requires_grad:
            stored += weight.numel() * (_FOUR_BITS if weight in packed else weight.element_size())
    return stored
