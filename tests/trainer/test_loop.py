"""What the loop does when training goes wrong, or well, and what it costs."""

from __future__ import annotations

import errno
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake

from finetune_crds import contract
from finetune_crds.training import Training
from finetune_trainer.train import loop as training_loop
from finetune_trainer.train.checkpoint.folder import CheckpointFolder
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.data import pack
from finetune_trainer.train.loop import Loop
from finetune_trainer.train.model import precision
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.optimizer import compact_adamw, loss_scale
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.optimizer.schedule import Schedule
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.reporter import Reporter
from support import networks
from support.checkpoints import complete_steps
from support.pods import examples
from support.training import error_of, eval_loss_of, history, validation_loss

if TYPE_CHECKING:
    from support.pods import Outcome, Pod
    from support.training import Mlflow

EVALUATION = re.compile(r"evaluation at step (\d+): loss ([\d.]+)")


def breaking_at(monkeypatch: pytest.MonkeyPatch, step: int, rate: float) -> None:
    """Have the learning rate jump after so many steps."""
    before = Schedule.at
    monkeypatch.setattr(Schedule, "at", lambda self, at: before(self, at) if at < step else rate)


def evaluations(outcome: Outcome) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in EVALUATION.findall(outcome.output)}


def kept(pod: Pod) -> list[int]:
    """Steps of the complete checkpoints."""
    return complete_steps(pod.folder / "checkpoints")


def test_the_weights_with_the_least_evaluation_loss_are_registered(
    pod: Pod, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `keep: 1` too: the best stays beside the newest."""
    from transformers import AutoModelForCausalLM

    breaking_at(monkeypatch, 6, 1.0)
    pod = pod.but(
        {
            "training.maxSteps": 12,
            "training.evalEverySteps": 2,
            "training.logEverySteps": 100,
            "training.select": "Best",
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 1, "keep": 1},
            "register": {"model": "best"},
        }
    )
    pod.env |= mlflow.env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome
    losses = evaluations(outcome)
    best = min(losses, key=lambda step: losses[step])
    assert (best, list(losses)) == (6, [2, 4, 6, 8, 10, 12])
    assert losses[12] > losses[6] + 0.1
    assert f"loaded the best weights, of step 6: loss {losses[6]:.4f}" in outcome.output
    assert kept(pod) == [6, 12]
    assert eval_loss_of(outcome) == pytest.approx(losses[6], abs=1e-4)
    assert history(mlflow, contract.METRIC_FINAL_EVAL_LOSS) == {12: pytest.approx(losses[6], abs=1e-4)}
    (version,) = mlflow.client().search_model_versions("name='best'")
    assert float(version.tags[contract.TAG_EVAL_LOSS]) == pytest.approx(losses[6], abs=1e-4)
    (config,) = pod.folder.glob("artifacts/models/*/artifacts/model/config.json")
    registered = AutoModelForCausalLM.from_pretrained(config.parent)
    assert validation_loss(registered, pod) == pytest.approx(eval_loss_of(outcome), rel=1e-5)
    assert ": the weights after step 6 of 12, which have" in (config.parent / "README.md").read_text()

    # The next attempt, after the end, finds the same weights again.
    again = pod.run_here(capsys)
    assert (again.code, again.losses) == (0, {})
    assert eval_loss_of(again) == pytest.approx(losses[6], abs=1e-4)


def test_a_loss_that_runs_away_ends_the_attempt_and_the_last_good_checkpoint_stays(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking_at(monkeypatch, 5, 5.0)
    outcome = pod.but(
        {
            "training.maxSteps": 100,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 4, "keep": 1},
        }
    ).run_here(capsys)
    error = error_of(outcome)
    assert (outcome.code, error.reason) == (1, "DivergingLoss"), outcome.output
    best = min(outcome.losses.values())
    step, loss = max(outcome.losses.items())
    assert error.message == (
        f"the loss diverged to {loss:.2f} at step {step}, from a minimum of {best:.2f}: lower training.learningRate, or use "
        "a longer warm-up"
    )
    last = (step - 1) // 4 * 4
    assert kept(pod) == [last]
    assert outcome.losses[last] < best + 0.5


def out_of_memory_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Have the step with this number, from 0, run out of the memory of a GPU."""
    take_step: Any = training_loop.take_step

    def fails(*args: Any, **options: Any) -> Any:
        if options["step"] == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return take_step(*args, **options)

    monkeypatch.setattr(training_loop, "take_step", fails)


def test_smaller_passes_and_recomputation_carry_on_the_same_run(
    pod: Pod, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator has the attempt after one that ran out of memory use less. Here, the passes of a step differ in their tokens."""
    rows = [{**row, "response": row["response"] * (1 + number % 5)} for number, row in enumerate(examples())]
    write_deltalake(str(tmp_path / "corpus"), pa.Table.from_pylist(rows))
    pod = pod.but({"data.splits.path": str(tmp_path / "corpus"), "training.packing": False})
    expected = pod.run_here(capsys).losses
    pod = pod.but({"checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 1, "mode": "Sync"}})
    with pytest.MonkeyPatch.context() as patch:
        out_of_memory_at(patch, 2)
        outcome = pod.run_here(capsys)
    assert (outcome.code, error_of(outcome).reason) == (1, "OutOfMemory")
    losses = outcome.losses
    less = {"perDeviceBatchSize": 1, "gradientAccumulation": 4, "activationCheckpointing": "Full"}
    outcome = pod.but({f"training.{name}": value for name, value in less.items()}).run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert "resuming from the checkpoint of step 2\n" in outcome.output
    assert losses | outcome.losses == pytest.approx(expected, abs=2e-4)


def test_the_run_says_while_checkpoints_cannot_be_written(
    pod: Pod, mlflow: Mlflow, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = pod.but(
        {
            "training.maxSteps": 3,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 1},
        }
    )
    pod.env |= mlflow.env

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def read_checkpoint_error() -> str:
        tags = mlflow.client().get_run(mlflow.run_id).data.tags
        return str(tags[contract.TAG_CHECKPOINT_ERROR])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "publish", full)
        outcome = pod.run_here(capsys)
    assert (outcome.code, kept(pod)) == (0, [])
    assert "the checkpoint of step 3 could not be written" in read_checkpoint_error()
    assert "No space left on device" in read_checkpoint_error()
    outcome = pod.run_here(capsys)
    assert (outcome.code, kept(pod)) == (0, [2, 3])
    assert read_checkpoint_error() == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_never_waits_for_the_gpu(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step: Any = Loop._train_step

    def watched(loop: Loop) -> bool:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return bool(step(loop))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Loop, "_train_step", watched)
    # The attention of documents in FP32 is that of transformers, which looks at the values of its mask.
    changes = {"training.maxSteps": 3, "training.gradientAccumulation": 2, "training.precision": "BF16"}
    outcome = pod.but(changes).run_here(capsys)
    assert outcome.code == 0, outcome


class Alone:
    """Stands for the ranks: one, without a process group."""

    rank, size, leads, device = 0, 1, True, torch.device("cpu")

    def sum_over_ranks(self, *values: float) -> list[float]:
        return [float(value) for value in values]


class Batches:
    """Stands for the feed: the same batches in each step."""

    def __init__(self, batches: list[pack.Batch]) -> None:
        self.batches, self.max_steps = batches, 10

    def of_step(self, _step: int) -> list[pack.Batch]:
        return self.batches


def one_document(states: list[torch.Tensor], *_: Any) -> torch.Tensor:
    """Attention over flat rows as a GPU's kernel computes it, which reads no lengths on the host."""
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in states)
    attention = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return attention[0].transpose(0, 1)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"optimizer": {"type": "AdamW8bit", "weights": "BF16"}},
        {"optimizer": {"type": "Muon"}, "precision": "FP16"},
    ],
)
def test_a_step_reads_no_value_of_a_tensor(
    base_model: Path, training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no values: what would wait for a GPU to read one fails here without a GPU."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(attention, "_attend_on_cpu", one_document)
    for signed in (True, False):
        # bitsandbytes makes these once, of tensors.
        compact_adamw.compute_code_values(signed=signed)
    # Wide enough for moments of 8 bits.
    config = AutoConfig.from_pretrained(base_model, hidden_size=64, head_dim=16)
    collated = pack.collate(networks.random_split(examples=4, vocabulary=200), [[0, 1], [2, 3]], pad_id=0)
    unused: Any = None
    world: Any = Alone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        dtype = precision.trained_dtype(Training.model_validate(training))
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.register(), dtype=dtype
        )
        network = Network(model, Sft())
        values = {name: value for name, value in vars(collated).items() if isinstance(value, torch.Tensor)}
        batch = replace(collated, **{name: mode.from_tensor(value) for name, value in values.items()})
        feed: Any = Batches([batch, batch])
        progress = Progress()
        loop = Loop(
            world=world,
            network=network,
            optimizer=Optimizer(network, Training.model_validate(training), 10),
            feed=feed,
            evaluator=unused,
            reporter=Reporter(
                world=world,
                network=network,
                tracker=unused,
                sinks=unused,
                max_steps=10,
                log_steps=1,
                progress=progress,
                started=0.0,
            ),
            checkpointer=None,
            preemption=SimpleNamespace(requested=False),  # type: ignore[arg-type]
            progress=progress,
            seed=1,
            max_skipped_steps=0,
        )
        assert [loop._train_step() for _ in range(2)] == [False, False]
        assert loop.progress.step == 2
        with pytest.raises(DataDependentOutputException):
            loop.optimizer.read_grad_norm()


def test_fp16_finds_its_scale_and_keeps_it(
    pod: Pod, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that overflow on the way down are not those that maxSkippedSteps forbids."""
    monkeypatch.setattr(loss_scale, "_INITIAL_SCALE", 2.0**19)
    pod = pod.but(
        {
            "training.precision": "FP16",
            "training.optimizer": {"type": "AdamW8bit"},
            "training.maxSteps": 16,
            "training.maxSkippedSteps": 0,
            "training.logEverySteps": 8,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 8},
        }
    )
    pod.env |= mlflow.env
    outcome = pod.run_here(capsys)
    assert outcome.code == 0, outcome.output
    assert outcome.losses[16] < outcome.losses[8]
    scales = history(mlflow, contract.METRIC_LOSS_SCALE)
    assert scales == {8: pytest.approx(scales[16]), 16: scales[16]}
    assert 1.0 < scales[16] < 2.0**19
    assert set(history(mlflow, contract.METRIC_SKIPPED_STEPS).values()) == {0.0}
    # Without the scale of the checkpoint, the next attempt would skip its first steps again.
    again = pod.but({"training.maxSteps": 17, "training.logEverySteps": 1}).run_here(capsys)
    assert (again.code, [*again.losses]) == (0, [17]), again.output
    assert f"  scale {scales[16]:g}\n" in again.output


def test_compiled_kernels_are_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 14: what finds the package `kernels` downloads code from the Hub while training runs."""
    import importlib

    from finetune_trainer.train import worker

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    importlib.import_module("kernels")
    worker.quiet_libraries()
    with pytest.raises(ImportError):
        importlib.import_module("kernels")
    assert importlib.util.find_spec("kernels") is None
