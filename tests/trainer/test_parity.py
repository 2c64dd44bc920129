"""The same training for every number of ranks, strategy and activation checkpointing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from support import networks

if TYPE_CHECKING:
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

STEPS, LEARNING_RATE = 2, 1e-2
# Ranks that share them with batches of one have as many passes as others, and one rank none in its last.
ROWS = 7
FULL, LORA, QLORA = {"type": "Full"}, {"type": "LoRA"}, {"type": "QLoRA"}
PISSA: dict[str, Any] = {"type": "LoRA", "lora": {"rank": 4, "init": "PiSSA"}}
SFT, DPO, KTO, ORPO = {"type": "SFT"}, {"type": "DPO"}, {"type": "KTO"}, {"type": "ORPO"}
IPO: dict[str, Any] = {"type": "DPO", "dpo": {"loss": "IPO"}}
SIMPO: dict[str, Any] = {"type": "SimPO"}
# The rows of a pass of all ranks together, on which the loss of KTO depends.
ROWS_OF_KTO = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained; `teacher`: by distillation from another model; `tied`: the embedding is the output layer too."""

    method: dict[str, Any]
    objective: dict[str, Any]
    teacher: bool = False
    tied: bool = False

    @property
    def name(self) -> str:
        objective = "IPO" if self.objective == IPO else self.objective["type"]
        modules_to_save = self.method.get("lora", {}).get("modulesToSave")
        parts = (
            "PiSSA" if self.method == PISSA else self.method["type"],
            "Distillation" if self.teacher else objective,
            "tied" if self.tied else "",
            " and ".join(modules_to_save or ()),
        )
        return " ".join(part for part in parts if part)


CASES = [
    *(
        Case({"type": method}, SFT)
        for method in ("Full", "LoRA", "DoRA", "QLoRA", "PromptTuning", "PrefixTuning")
    ),
    *(Case({"type": method}, DPO) for method in ("Full", "LoRA", "QLoRA")),
    *(Case({"type": method}, KTO) for method in ("Full", "LoRA")),
    Case(FULL, ORPO),
    Case(PISSA, SFT),
    *(Case(LORA, objective) for objective in (IPO, SIMPO)),
    *(Case({"type": method}, SFT, teacher=True) for method in ("Full", "LoRA")),
    *(Case(FULL, objective, tied=True) for objective in (SFT, DPO)),
    Case(FULL, SFT, teacher=True, tied=True),
    Case(LORA, ORPO, tied=True),
    # The output layer is there twice: as it was, and as it is trained.
    *(Case({"type": method, "lora": {"modulesToSave": ["lm_head"]}}, SFT) for method in ("LoRA", "QLoRA")),
]
# Case, strategy, what is recomputed.
WAYS = {
    2: [
        *((case, "FSDP", "None") for case in CASES),
        (Case(FULL, SFT), "FSDP", "Selective"),
        (Case(FULL, SFT), "FSDP", "Full"),
        (Case(LORA, DPO), "FSDP", "Selective"),
        (Case(FULL, SFT), "DDP", "None"),
        (Case(LORA, SFT), "DDP", "Full"),
        (Case(QLORA, SFT), "DDP", "Selective"),
    ],
    4: [
        *((case, "HSDP", "None") for case in CASES if case.method["type"] != "LoRA"),
        (Case(FULL, SFT), "HSDP", "Selective"),
        (Case(LORA, SFT), "HSDP", "Full"),
        (Case(FULL, SFT), "FSDP", "None"),
        (Case(FULL, DPO), "DDP", "None"),
    ],
}


# The mean loss of a step, and the gradient of each trained weight by its name.
Step = tuple[float, dict[str, torch.Tensor]]


def steps(
    world: World, base: Path, case: Case, strategy: str, recompute: str, *, batch_size: int = 1
) -> list[Step]:
    """Two steps, the second with weights that the first has changed."""
    from finetune_trainer.train.data import pack
    from finetune_trainer.train.data.feed import Collator, Examples
    from finetune_trainer.train.model import shard
    from finetune_trainer.train.model.optimizer.optimizer import build_optimizers
    from finetune_trainer.train.runtime.recipe import row_tokens

    objective, base = case.objective, base if case.tied else base / "untied"
    if case.teacher:
        objective = {
            "type": "Distillation",
            "distillation": {"teacher": str(base / "teacher"), "temperature": 2.0},
        }
    virtual = "Tuning" in case.method["type"]
    recipe = networks.recipe(
        base,
        method=case.method,
        objective=objective,
        strategy=strategy,
        packing=not virtual,
        activationCheckpointing=recompute,
        learningRate=LEARNING_RATE,
    )
    torch.manual_seed(3)
    network = networks.build(recipe, base, world)
    split = examples(case)
    rows = pack.pack_examples(split.lengths, max_length=row_tokens(recipe), packing=not virtual)[:ROWS]
    collator = Collator(world, 0, None)
    split = network.objective.prepare(network, Examples(split, rows), collator, 1)
    if objective == KTO:
        assert split.reference is not None
        # As if the policy had learned something, of each answer something else.
        learned = np.random.default_rng(5).normal(1, 2, split.reference.shape).astype(np.float32)
        split = dataclasses.replace(split, reference=split.reference - learned)
        batch_size = ROWS_OF_KTO // world.size
    network.train()
    (optimizer,) = build_optimizers(network, recipe.training)
    taken_steps: list[Step] = []
    for _ in range(STEPS):
        batches = list(collator.batches(Examples(split, rows), batch_size))
        (count,) = world.sum_over_ranks(sum(network.objective.count(batch) for batch in batches))
        summed = 0.0
        for at, batch in enumerate(batches):
            shard.set_replica_reduction(network, is_enabled=at == len(batches) - 1)
            loss, _ = network(batch)
            (loss / count).backward()
            summed += loss.item()
        (summed,) = world.sum_over_ranks(summed)
        taken_steps.append((summed / count, gradients(network)))
        optimizer.step()
        optimizer.zero_grad()
    return taken_steps


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded gradient of each trained weight, by the weight's name."""
    slopes: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            gradient: Any = torch.zeros_like(weight) if weight.grad is None else weight.grad
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            slopes[name] = full.detach().clone()
    return slopes


def difference(actual: list[Step], expected: list[Step]) -> str | None:
    """What differs between the steps of two runs: a loss, or a gradient as a whole tensor; None: nothing does.

    Gradients of less than a thousandth of all gradients together are compared with that thousandth. AdamW amplifies
    rounding, so the gradients of the second step may differ by more.
    """
    for step, ((loss, slopes), (expected_loss, expected_slopes)) in enumerate(
        zip(actual, expected, strict=True)
    ):
        if loss != pytest.approx(expected_loss, rel=1e-4):
            return f"loss of step {step}: {loss} and {expected_loss}"
        if slopes.keys() != expected_slopes.keys():
            return f"names: {sorted(slopes.keys() ^ expected_slopes.keys())}"
        least = 1e-3 * float(torch.nn.utils.get_total_norm(list(expected_slopes.values())))
        for name, expected_slope in expected_slopes.items():
            distance = float((slopes[name] - expected_slope).norm()) / max(
                least, float(expected_slope.norm())
            )
            if distance > (1e-3, 1e-2)[step]:
                return f"gradient of {name} in step {step}: {distance:.1e} of it"
    return None


def examples(case: Case) -> Split:
    return networks.random_split(documents=1 if case.objective == SFT else 2, examples=24)


def one_rank_of_many(world: World, folder: Path) -> None:
    results = [steps(world, folder, *way) for way in WAYS[world.size]]
    if world.leads:
        torch.save(results, folder / f"found-{world.size}.pt")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, base_model: Path) -> Path:
    """The base, and in it one whose output layer is not tied; each has a teacher in it that is of another mind."""
    import shutil

    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("parity") / "base"
    torch.manual_seed(1)
    for at, tied in ((folder, True), (folder / "untied", False)):
        model = AutoModelForCausalLM.from_pretrained(base_model, tie_word_embeddings=tied)
        for to in (at, at / "teacher"):
            if not tied:
                model.lm_head.weight = torch.nn.Parameter(0.02 * torch.randn_like(model.lm_head.weight))
            shutil.copytree(base_model, to)
            model.save_pretrained(to)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.05)
    return folder


@pytest.fixture(scope="module")
def on_one(base: Path) -> dict[str, list[Step]]:
    """What each case gives on one rank, in one pass a step; of KTO, in passes of as many rows as on many ranks."""
    with networks.alone() as world:
        return {case.name: steps(world, base, case, "FSDP", "None", batch_size=ROWS) for case in CASES}


def test_one_rank_trains_as_plain_torch_does(base: Path, on_one: dict[str, list[Step]]) -> None:
    """The reference has no part of ours but the shares of examples: each document alone, one pass, whole logits."""
    from transformers import AutoModelForCausalLM

    from finetune_trainer.train.data import pack

    split = examples(CASES[0])
    rows = pack.pack_examples(split.lengths, max_length=64, packing=True)[:ROWS]
    model = AutoModelForCausalLM.from_pretrained(base / "untied", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    plain_steps: list[Step] = []
    for _ in range(STEPS):
        losses = []
        for example in (example for row in rows for example in row):
            part = slice(*split.offsets[example : example + 2])
            ids = torch.from_numpy(split.tokens[part]).long()
            learned = torch.from_numpy(split.loss_mask[part])[1:]
            logits = model(ids.unsqueeze(0)).logits[0, :-1]
            losses.append(
                torch.nn.functional.cross_entropy(logits[learned], ids[1:][learned], reduction="none")
            )
        loss = torch.cat(losses).mean()
        loss.backward()
        plain_steps.append(
            (loss.item(), {f"model.{name}": slope for name, slope in gradients(model).items()})
        )
        optimizer.step()
        optimizer.zero_grad()
    assert difference(on_one["Full SFT"], plain_steps) is None


@pytest.mark.parametrize("size", WAYS)
def test_many_ranks_train_as_one(
    size: int, base: Path, tmp_path: Path, on_one: dict[str, list[Step]]
) -> None:
    """Losses and gradients of two steps, by case, strategy and what is recomputed.

    Traps 1 (gloo sums where it should average), 2 (tied embeddings under a chunked loss), 3 (four-bit weights are
    not sharded) and 6 (the global count of targets; all-reduce in the last pass alone).
    """
    networks.on_ranks(size, tmp_path / "rendezvous", one_rank_of_many, base)
    results = torch.load(base / f"found-{size}.pt")
    differing = {
        f"{case.name} {strategy} {recompute}": differs
        for (case, strategy, recompute), way in zip(WAYS[size], results, strict=True)
        if (differs := difference(way, on_one[case.name]))
    }
    assert differing == {}


def test_recomputation_repeats_dropout(base: Path) -> None:
    """Trap 5: random draws are restored for the second forward pass."""
    case = Case({"type": "LoRA", "lora": {"rank": 4, "dropout": 0.3}}, SFT)
    with networks.alone() as world:
        without_recomputation = steps(world, base, case, "FSDP", "None")
        steps_by_kind = {kind: steps(world, base, case, "FSDP", kind) for kind in ("Selective", "Full")}
        without = steps(world, base, Case({"type": "LoRA", "lora": {"rank": 4}}, SFT), "FSDP", "None")
    assert {
        kind: difference(way, without_recomputation) for kind, way in steps_by_kind.items()
    } == dict.fromkeys(steps_by_kind)
    # There was dropout to repeat.
    assert difference(without, without_recomputation) is not None


def test_accumulated_passes_are_one_large_pass(base: Path, on_one: dict[str, list[Step]]) -> None:
    """Trap 6: passes differ in their number of targets, and each target counts the same."""
    with networks.alone() as world:
        steps_by_size = {
            size: steps(world, base, CASES[0], "FSDP", "None", batch_size=size) for size in (1, 2, 4)
        }
    assert {
        size: difference(way, on_one["Full SFT"]) for size, way in steps_by_size.items()
    } == dict.fromkeys(steps_by_size)
