"""One run that is ended twenty times, at random moments, and is in the end the run that nobody touched."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from finetune_crds.contract import EXIT_PREEMPTED
from support.pods import Outcome, Pod, save_base_model, save_table, tiny_recipe
from support.ports import free_port

ENDS = 20
STEPS = 160
SEED = 20


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Two ranks that train a tiny model with dropout, and write a checkpoint while they take every second step."""
    folder = tmp_path_factory.mktemp("pod")
    save_base_model(folder / "base", attention_dropout=0.1)
    save_table(folder / "corpus")
    return Pod(folder, tiny_recipe(folder / "base", folder / "corpus")).but(
        {
            "distributed.processesPerNode": 2,
            "training.batchSize": 2,
            "training.maxSteps": STEPS,
            "checkpoint": {"uri": str(folder / "checkpoints"), "everySteps": 2},
        }
    )


@dataclass
class Attempt:
    """A started pod, whose output is read as far as a test needs it."""

    pod: Pod
    process: subprocess.Popen[str]
    read: str = ""

    @classmethod
    def of(cls, pod: Pod) -> Attempt:
        """Start a pod that would act on SIGTERM."""
        attempt = cls(pod, pod.start())
        attempt._wait(lambda: attempt._catches(signal.SIGTERM))
        return attempt

    def run_to_step(self, count: int) -> None:
        """Until it has told of `count` steps."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.read += line
            count -= line.startswith("step ")
            if count == 0:
                return
        pytest.fail(f"the run ended before anyone ended it:\n{self.read}")

    def run_for(self, seconds: float) -> None:
        """A moment of time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, once all have been started."""
        self._wait(lambda: len(self._workers()) == 2)
        return self._workers()

    def end(self) -> Outcome:
        """How it ends."""
        return self.pod.wait(self.process, self.read)

    def _workers(self) -> list[int]:
        children = "".join(
            path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")
        )
        return [pid for pid in map(int, children.split()) if _is_worker(pid)]

    def _catches(self, number: int) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        return bool(caught >> (number - 1) & 1)

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        return b"finetune_trainer.train.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


@dataclass
class Ends:
    """What is to happen, drawn from a seed: at which moment, and how."""

    dice: random.Random = field(default_factory=lambda: random.Random(SEED))  # noqa: S311 - a seed is the point

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        """SIGTERM and SIGKILL in turn: the step to wait for (0: none, during start-up), then seconds."""
        for end in range(ENDS):
            early = end % 5 in (0, 3)
            step = 0 if early else self.dice.randint(1, 7)
            yield "TERM" if end % 2 else "KILL", step, self.dice.uniform(0, 6.0 if early else 0.1)


def newest_complete(pod: Pod) -> int:
    """The step of the newest checkpoint on the disk that is whole; 0: there is none."""
    newest = 0
    for marker in pod.folder.glob("checkpoints/*/step-*/COMPLETE"):
        files = json.loads(marker.read_text())["files"]
        assert {name: (marker.parent / name).stat().st_size for name in files} == files
        newest = max(newest, int(marker.parent.name.removeprefix("step-")))
    return newest


def state_at_the_end(pod: Pod, folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state in the last checkpoint, by path."""
    (last,) = pod.folder.glob(f"checkpoints/*/step-{STEPS:08d}")
    dcp_to_torch_save(last, folder / "state.pt")
    found: dict[str, torch.Tensor] = {}

    def walk(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for name, part in node.items():
                walk(f"{path}/{name}", part)
        elif isinstance(node, torch.Tensor):
            found[path] = node

    walk("", torch.load(folder / "state.pt"))
    return found


def in_folder(pod: Pod, folder: Path, changes: dict[str, Any] | None = None) -> Pod:
    """The same pod with a folder of its own."""
    folder.mkdir()
    other = pod.but({"checkpoint.uri": str(folder / "checkpoints"), **(changes or {})})
    other.folder = folder
    return other


def test_a_run_that_is_ended_twenty_times_is_the_run_that_nobody_touched(pod: Pod, tmp_path: Path) -> None:
    untouched = in_folder(pod, tmp_path / "untouched")
    wanted = untouched.run()
    assert wanted.code == 0, wanted.output
    ended = in_folder(pod, tmp_path / "ended")
    dice = random.Random(SEED)  # noqa: S311
    kept = 0
    losses: dict[int, float] = {}
    for end, (how, step, seconds) in enumerate(Ends(), start=1):
        attempt = Attempt.of(ended)
        if step:
            attempt.run_to_step(step)
        attempt.run_for(seconds)
        if how == "TERM":
            attempt.process.send_signal(signal.SIGTERM)
        else:
            with suppress(ProcessLookupError):
                os.kill(dice.choice(attempt.ranks()), signal.SIGKILL)
        outcome = attempt.end()
        newest = newest_complete(ended)
        print(f"end {end}: {how} after {step} steps and {seconds:.2f} s: {outcome.code}, {kept} -> {newest}")
        _check(outcome, how, kept, newest)
        for at, loss in outcome.losses.items():
            assert losses.setdefault(at, loss) == loss, f"step {at} was another one"
        kept = newest
    outcome = ended.run()
    assert outcome.code == 0, outcome.output
    assert f"resuming from the checkpoint of step {kept}\n" in outcome.output
    assert losses | outcome.losses == wanted.losses
    state, untouched_state = state_at_the_end(ended, tmp_path), state_at_the_end(untouched, tmp_path)
    assert state.keys() == untouched_state.keys()
    assert len(state) > 50
    assert [name for name in state if not torch.equal(state[name], untouched_state[name])] == []


def _check(outcome: Outcome, how: str, kept: int, newest: int) -> None:
    """One end: its code, what it went on from, and that nothing is lost beyond the last published step."""
    assert outcome.message is not None, outcome.output
    assert outcome.message.error is not None, outcome.output
    resumed = f"resuming from the checkpoint of step {kept}\n"
    if outcome.losses:
        assert min(outcome.losses) == kept + 1, outcome.output
        assert resumed in outcome.output or kept == 0, outcome.output
    if how == "TERM":
        assert outcome.code == EXIT_PREEMPTED, outcome.output
        assert outcome.message.checkpoint_step in (newest, None), outcome.output
        assert newest == max(outcome.losses, default=kept), outcome.output
    else:
        assert outcome.code == 128 + signal.SIGKILL, outcome.output
        assert outcome.message.error.reason == "WorkerKilled", outcome.output
        # The save in flight is lost, and the steps since the one before.
        assert newest >= max(kept, max(outcome.losses, default=0) - 4), outcome.output


def test_another_number_of_ranks_goes_on_with_the_same_samples(pod: Pod, tmp_path: Path) -> None:
    save_base_model(tmp_path / "base")
    changes = {"model.base": str(tmp_path / "base"), "training.maxSteps": 12, "checkpoint.everySteps": 6}
    gang = in_folder(pod, tmp_path / "gang", changes)
    wanted = gang.run()
    assert wanted.code == 0, wanted.output
    (last,) = gang.folder.glob("checkpoints/*/step-00000012")
    shutil.rmtree(last)
    gang.env["PET_NPROC_PER_NODE"] = "1"
    outcome = gang.run()
    assert outcome.code == 0, outcome.output
    assert "resuming from the checkpoint of step 6\n" in outcome.output
    assert " on 1 rank\n" in outcome.output
    assert outcome.losses == pytest.approx({step: wanted.losses[step] for step in range(7, 13)}, abs=2e-4)


def test_sigterm_to_one_pod_stops_all_ranks_after_the_same_step(pod: Pod, tmp_path: Path) -> None:
    pod = pod.but(
        {
            "distributed": {"nodes": 2, "processesPerNode": 1},
            "training.maxSteps": 2000,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 1000},
        }
    )
    port, gang = str(free_port()), []
    for rank in range(2):
        member = pod.but({})
        member.folder = tmp_path / str(rank)
        member.folder.mkdir()
        member.env = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": port,
        }
        gang.append(member)
    first, second = (member.start() for member in gang)
    assert first.stdout is not None
    read = ""
    for line in first.stdout:
        read += line
        if line.startswith("step 3/"):
            second.send_signal(signal.SIGTERM)
            break
    outcomes = gang[0].wait(first, read), gang[1].wait(second)
    (step,) = {outcome.message.checkpoint_step for outcome in outcomes if outcome.message is not None}
    assert step == max(outcomes[0].losses)
    for outcome in outcomes:
        assert outcome.code == EXIT_PREEMPTED, outcome.output
        assert outcome.message is not None
        assert outcome.message.error is not None
        assert outcome.message.error.message == f"stopped by SIGTERM after the checkpoint of step {step}"
    markers = [path.parent.name for path in tmp_path.glob("checkpoints/*/*/COMPLETE")]
    assert markers == [f"step-{step:08d}"]
