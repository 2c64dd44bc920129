"""Passes in half precision beside the same in FP32: what they compute, and how far that may be apart."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network.trained_network import trained_parameters
from support import networks
from support.cells import TABLE
from support.pods import save_base_model

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

EXAMPLES = 8


@dataclass(frozen=True)
class Half:
    """A pass in half precision, and how many ranks take part in it."""

    method: str
    objective: str
    """As the recipe has it, or IPO, the other loss of DPO."""
    ranks: int
    recompute: str = "None"
    whole: tuple[str, ...] = ()
    """Layers beside the low-rank ones that are trained whole."""
    precision: str = "BF16"


WHOLE_TABLE = [Half(cell.method, cell.loss or cell.objective, ranks) for cell in TABLE for ranks in (1, 2)]
"""Each method with each objective that it can have, on one rank and on two."""


# Of the base: the width of its hidden states, and the standard deviation of its weights.
WIDTH, DEVIATION = 32, 0.02
TEACHER = 20
"""How much larger the teacher's weights are."""
# Rounding to nearest errs by a share of at most u = 2^-p of a number, with p bits of significand, the first of which is not stored. The
# error is uniform within half a unit of the last bit, and significands are log-uniform in [1, 2): its root mean square is
# u / sqrt(3) x sqrt((1 - 1/4) / (2 ln 2)) = 0.42 u.
_ROOT_MEAN_SQUARE = math.sqrt((1 - 1 / 4) / (2 * math.log(2)) / 3)
ROUNDING = {"BF16": 2**-8 * _ROOT_MEAN_SQUARE, "FP16": 2**-11 * _ROOT_MEAN_SQUARE}
# Numbers on the longest way from the embedding to the logits that are rounded, each once: in a layer those after the norm (2), the
# projection of queries (1), the rotation (2), the probabilities and their sum (2), the output projection (1), the sum (1), the norm (2),
# the gate (1), its activation (1), the product (1), the projection down (1) and the sum (1); at the end the norm (2) and the logits (1).
# What follows is FP32. The weights of the base are exact in half precision, so that their cast rounds nothing: QLoRA would choose
# another level for some of those that are not, which has to do with how a base is stored and not with a pass.
_A_LAYER, _LAYERS, _END = 16, 2, 3
FORWARD = _LAYERS * _A_LAYER + _END
# The errors are independent, so they add up as a random walk does: sqrt(n) of them are as large as n. The way is the longest one, and the
# residual stream goes around most of it, so this is above what is seen: gradients err by 0.35 to 0.5 of their tolerance, and losses by
# 0.1 to 0.3.
#
# A gradient is rounded on the way there and on the way back, where each operation rounds what its own derivative needs. It has thousands of
# numbers, so the norm of its error, beside that of the gradient, is close to what is expected, and needs no factor.
GRADIENT = {precision: math.sqrt(2 * FORWARD) * each for precision, each in ROUNDING.items()}
# A loss is one number, of which there is one sample: it may be three standard deviations off.
_SIGMAS = 3


def tolerance_of_loss(objective: str, precision: str) -> float:
    """How far the mean loss may be from that in FP32.

    The base's logits have the deviation WIDTH ** 0.5 x DEVIATION, and each is off by a share of that: this is the error of the
    log-probability of a token, and independent of that of other tokens. What a loss makes of it depends on its slopes.

    Args:
        objective: as in `Half`.
        precision: BF16 or FP16.
    """
    targets, answers = _targets(1), _targets(2)
    # Targets of an answer, and the mean of independent examples.
    length, mean = answers / (2 * EXAMPLES), 1 / math.sqrt(EXAMPLES)
    beta, odds = 0.1, 0.1
    slopes = {
        # The mean over the targets.
        "SFT": 1 / math.sqrt(targets),
        # Half of the loss is the divergence from a teacher, whose logits are TEACHER times as large, and so are their errors. Its slope by
        # one of them is p x (log p / q - divergence): of a token or two in which the teacher believes, about 1/2.
        "Distillation": 0.5 * TEACHER * 0.5 / math.sqrt(targets),
        # A difference of sums over the targets of two answers, under a sigmoid of slope 1/2 where both are equally likely.
        "DPO": beta * math.sqrt(2 * length) * mean / 2,
        # A sum over an answer, less the mean of such sums, under a sigmoid of slope 1/4.
        "KTO": beta * math.sqrt(2 * length) * mean / 4,
        # (d - 1 / (2 beta))^2, d the difference of two means, which is about 0.
        "IPO": 1 / beta * math.sqrt(2 / length) * mean,
        # Of the difference of two means: 2 x sigmoid(0.5).
        "SimPO": 2 * 0.62 * math.sqrt(2 / length) * mean,
        # The mean of an answer, and of the odds of two.
        "ORPO": (1 + odds) * math.sqrt(1 / length) * mean,
        # The difference of two rewards under a sigmoid of slope 1/2. A reward is computed as a logit is, of one token.
        "RewardModel": math.sqrt(2) * mean / 2,
    }
    token = math.sqrt(FORWARD) * ROUNDING[precision] * math.sqrt(WIDTH) * DEVIATION
    return _SIGMAS * token * slopes[objective]


def _targets(documents: int) -> int:
    """Tokens that are learned in the examples of `learned`."""
    split = networks.random_split(documents=documents, examples=EXAMPLES)
    # No token comes before the first one of a document.
    return int(split.loss_mask.sum() - split.loss_mask[split.offsets[:-1]].sum())


def save_models(folder: Path) -> tuple[Path, Path]:
    """A base and a teacher whose weights are exact in BF16 and in FP16.

    The teacher is surer of its tokens than the base, and of others: beside that, the divergence is large.
    """
    from transformers import AutoModelForCausalLM

    base, teacher = folder / "base", folder / "teacher"
    save_base_model(base, width=WIDTH)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            # NB: FP16 has fewer exponents.
            weight.copy_(weight.bfloat16().half().float().bfloat16().float())
    model.save_pretrained(base)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight.copy_((TEACHER * weight.roll(1, dims=0)).bfloat16())
    model.save_pretrained(teacher)
    load_tokenizer(networks.recipe(base).model, base).save_pretrained(teacher)
    return base, teacher


@dataclass(frozen=True)
class Found:
    """How far a pass in half precision is from that in FP32.

    loss: the difference of the mean losses.
    gradient: the norm of the difference of the gradients, as a share of that of the gradient.
    """

    loss: float
    gradient: float

    def is_rounding(self, case: Half) -> bool:
        """Whether rounding can have done this."""
        return (
            abs(self.loss) <= tolerance_of_loss(case.objective, case.precision)
            and self.gradient <= GRADIENT[case.precision]
        )


def differing(cases: Iterable[Half], ranks: int, folder: Path) -> dict[str, str]:
    """Run the cases that are for a number of ranks in both precisions, and return those that are too far apart.

    Args:
        cases: the cases.
        ranks: the number.
        folder: an empty one.
    """
    chosen = [case for case in cases if case.ranks == ranks]
    save_models(folder)
    networks.on_ranks(ranks, folder / "rendezvous", _in_both_precisions, (folder, chosen))
    differences = [Found(**each) for each in json.loads((folder / "found.json").read_text())]
    for case, each in zip(chosen, differences, strict=True):
        print(
            f"{case}: loss {each.loss:+.1e} of {tolerance_of_loss(case.objective, case.precision):.1e}, "
            f"gradient {each.gradient:.4f} of {GRADIENT[case.precision]:.4f}"
        )
    return {
        str(case): str(each)
        for case, each in zip(chosen, differences, strict=True)
        if not each.is_rounding(case)
    }


def _in_both_precisions(world: World, arguments: tuple[Path, list[Half]]) -> None:
    folder, cases = arguments
    differences = []
    for case in cases:
        (loss, slope), (expected, slopes) = (
            learned(world, folder / "base", folder / "teacher", case, precision)
            for precision in (case.precision, "FP32")
        )
        differences.append(
            {"loss": loss - expected, "gradient": ((slope - slopes).norm() / slopes.norm()).item()}
        )
    if world.leads:
        (folder / "found.json").write_text(json.dumps(differences))


def learned(
    world: World, base: Path, teacher: Path, case: Half, precision: str
) -> tuple[float, torch.Tensor]:
    """The mean loss over 8 examples, and its gradient, as one vector in FP64."""
    objective: dict[str, Any] = {"type": case.objective}
    if case.objective == "IPO":
        objective = {"type": "DPO", "dpo": {"loss": "IPO"}}
    if case.objective == "Distillation":
        objective["distillation"] = {"teacher": str(teacher)}
    recipe = networks.recipe(
        base,
        method={"type": case.method, **({"lora": {"modulesToSave": case.whole}} if case.whole else {})},
        objective=objective,
        precision=precision,
        packing="Tuning" not in case.method,
        activationCheckpointing=case.recompute,
    )
    torch.manual_seed(0)
    network = networks.build(recipe, base, world)
    split = networks.random_split(
        documents=1 if case.objective in ("SFT", "Distillation") else 2, examples=EXAMPLES
    )
    if network.objective.has_reference:
        split = replace(split, reference=of_equal_chances(split, network.head.vocabulary))
    batch = pack.collate(split, [[row] for row in range(world.rank, EXAMPLES, world.size)], pad_id=0)
    loss, _ = network.train()(batch)
    loss.backward()
    summed, count = world.sum_over_ranks(loss.item(), network.objective.count(batch))
    slopes: list[Any] = [weight.grad for weight in trained_parameters(network)]
    full_slopes = [slope.full_tensor() if isinstance(slope, DTensor) else slope for slope in slopes]
    return summed / count, torch.cat([slope.double().flatten() for slope in full_slopes]) / count


def of_equal_chances(split: Split, vocabulary: int) -> np.ndarray:
    """The reference to which all tokens are equally likely."""
    targets = np.add.reduceat(split.loss_mask, split.offsets[:-1]) - split.loss_mask[split.offsets[:-1]]
    reference: np.ndarray = -math.log(vocabulary) * targets.reshape(-1, 2).astype(np.float32)
    return reference
