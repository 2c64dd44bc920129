"""Runs of two ranks that end before their last step, and what they leave for the next attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from finetune_crds.contract import EXIT_PREEMPTED
from support.forks import ForkedPod, children, kill_pod
from support.pods import Outcome, Pod, save_base_model, save_table, tiny_recipe
from support.waiting import wait_for

T = TypeVar("T")
Signal = Literal["TERM", "KILL"]
RANKS = 2
EVERY_STEPS = 3
# The longest time that a pod of the tests takes to end.
_PATIENCE = 300


def tiny_gang(folder: Path, *, steps: int) -> Pod:
    """A pod of two ranks that train a tiny model with dropout and noise, and save every third step while they go on."""
    save_base_model(folder / "base", attention_dropout=0.1)
    save_table(folder / "corpus")
    return Pod(folder, tiny_recipe(folder / "base", folder / "corpus"), forked=True).but(
        {
            "distributed.processesPerNode": RANKS,
            "training.perDeviceBatchSize": 2,
            "training.maxSteps": steps,
            "training.neftuneAlpha": 5,
            "checkpoint": {"uri": str(folder / "checkpoints"), "everySteps": EVERY_STEPS},
        }
    )


def in_folder(pod: Pod, folder: Path, changes: dict[str, Any] | None = None) -> Pod:
    """The same pod with a folder of its own."""
    folder.mkdir()
    moved_pod = pod.but({"checkpoint.uri": str(folder / "checkpoints"), **(changes or {})})
    moved_pod.folder = folder
    return moved_pod


@dataclass
class Attempt:
    """A started pod, whose output is read only as far as a test needs it."""

    pod: Pod
    process: subprocess.Popen[str] | ForkedPod
    read: str = ""
    began: float = field(default_factory=time.time)

    @classmethod
    def start(cls, pod: Pod) -> Attempt:
        """Start a pod; it handles SIGTERM when this returns."""
        began = time.time()
        attempt = cls(pod, pod.start(), began=began)
        try:
            attempt._wait("the launcher handles SIGTERM", lambda: attempt._catches(signal.SIGTERM))
        except BaseException:
            attempt.kill()
            raise
        return attempt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the launcher and its ranks if they still run, as they do after a failed test."""
        if self.process.poll() is not None:
            return
        kill_pod(self.process.pid)
        self.process.wait(timeout=_PATIENCE)

    def run_to_step(self, count: int) -> None:
        """Read the output until it reports `count` steps."""
        for _ in range(count):
            self.run_to("step ")

    def run_to(self, start: str) -> None:
        """Read the output to the next line with this start."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.read += line
            if line.startswith(start):
                return
        pytest.fail(f"the run ended before the test ended it:\n{self.read}")

    def run_for(self, seconds: float) -> None:
        """Let the pod run for some time, or to its end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)

    def ranks(self) -> list[int]:
        """Process ids of the ranks in their order, once all of them have started."""
        return self._wait("the ranks start", lambda: pids if len(pids := self._workers()) == RANKS else [])

    @contextmanager
    def frozen_in_a_save(self) -> Iterator[int]:
        """Stop all ranks while a checkpoint of this attempt is partly written; yields its step.

        The ranks are stopped as soon as the checkpoint's folder appears. If the checkpoint was published before they
        stopped, they continue, and the next checkpoint is tried.
        """
        ranks = self.ranks()
        try:
            while True:
                self._wait("a save begins", lambda: self._unpublished() is not None, pause=0.0005)
                for rank in ranks:
                    os.kill(rank, signal.SIGSTOP)
                self._wait("the ranks are stopped", lambda: all(_is_stopped(rank) for rank in ranks))
                step = self._unpublished()
                if step is not None:
                    break
                _continue(ranks)
            yield step
        finally:
            _continue(ranks)

    def send(self, what: Signal, rank: int = 0) -> None:
        """End the pod as Kubernetes does with SIGTERM, or one of its ranks as a full memory does with SIGKILL."""
        if what == "TERM":
            self.process.send_signal(signal.SIGTERM)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.ranks()[rank], signal.SIGKILL)

    def wait_signalled(self) -> None:
        """Wait until SIGTERM is pending for ranks that are stopped."""
        ranks = self.ranks()
        self._wait("SIGTERM reaches the ranks", lambda: all(_pending(rank, signal.SIGTERM) for rank in ranks))

    def end(self) -> Outcome:
        """How it ends."""
        return self.pod.wait(self.process, self.read)

    def _unpublished(self) -> int | None:
        """The step of the checkpoint that this attempt is writing and has not published."""
        published, begun = 0, []
        for save in self.pod.folder.glob("checkpoints/*/step-*/*"):
            with suppress(FileNotFoundError):
                if (save / "COMPLETE").exists():
                    published = max(published, _step(save.parent))
                elif save.stat().st_mtime > self.began:
                    begun.append(_step(save.parent))
        # NB: an old checkpoint that is being removed has no marker either.
        return next((step for step in begun if step > published), None)

    def _workers(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if _is_worker(pid)]

    def _catches(self, number: int) -> bool:
        return bool(_mask(self.process.pid, "SigCgt") >> (number - 1) & 1)

    def _wait(self, what: str, condition: Callable[[], T], *, pause: float = 0.01) -> T:
        def check() -> T:
            condition_value = condition()
            assert condition_value or self.process.poll() is None, f"{what}: {self.process.communicate()[0]}"
            return condition_value

        return wait_for(what, check, _PATIENCE, pause=pause)


def check_end(outcome: Outcome, how: Signal, step_before: int, newest: int) -> None:
    """Check one end: its code, where the attempt started from, and that no more than the save in flight is lost.

    Args:
        outcome: of the attempt.
        how: it was ended.
        step_before: step of the newest checkpoint before the attempt; 0: there was none.
        newest: the same after it.
    """
    assert outcome.message is not None, outcome.output
    assert outcome.message.error is not None, outcome.output
    last = max(outcome.losses, default=step_before)
    if outcome.losses:
        assert min(outcome.losses) == step_before + 1, outcome.output
        assert (
            f"resuming from the checkpoint of step {step_before}\n" in outcome.output or step_before == 0
        ), outcome.output
    if how == "KILL":
        assert outcome.code == 128 + signal.SIGKILL, outcome.output
        assert outcome.message.error.reason == "WorkerKilled", outcome.output
        # The save in flight is lost, and the steps since the one before.
        assert newest >= max(step_before, last - 2 * EVERY_STEPS), outcome.output
        return
    assert outcome.code == EXIT_PREEMPTED, outcome.output
    assert newest == last, outcome.output
    if outcome.losses:
        # The ranks agreed on a step: there is a checkpoint of that step, and the message names it.
        assert outcome.message.checkpoint_step == last, outcome.output
        assert outcome.message.error.message == f"stopped by SIGTERM after the checkpoint of step {last}"
    else:
        assert outcome.message.checkpoint_step in (step_before, None), outcome.output


def newest_complete(pod: Pod) -> int:
    """The step of the newest checkpoint that is published; 0: there is none. Its files have the sizes it says."""
    newest = 0
    for marker in pod.folder.glob("checkpoints/*/step-*/*/COMPLETE"):
        files = json.loads(marker.read_text())["files"]
        assert {name: (marker.parent / name).stat().st_size for name in files} == files
        newest = max(newest, _step(marker.parent.parent))
    return newest


def check_like_untouched(ended: Pod, losses: dict[int, float], untouched: Pod, expected: Outcome) -> None:
    """Run `ended` to its end, and compare it with a run that nobody ended: losses, weights, optimizer state.

    Args:
        ended: the pod whose attempts were ended.
        losses: what those attempts reported, by step.
        untouched: the pod that ran through.
        expected: its outcome.
    """
    resumed_step = newest_complete(ended)
    outcome = ended.run()
    assert outcome.code == 0, outcome.output
    assert f"resuming from the checkpoint of step {resumed_step}\n" in outcome.output
    assert losses | outcome.losses == expected.losses
    steps = max(expected.losses)
    state, untouched_state = state_at(ended, steps), state_at(untouched, steps)
    assert state.keys() == untouched_state.keys()
    assert len(state) > 50
    assert [name for name in state if not torch.equal(state[name], untouched_state[name])] == []


def state_at(pod: Pod, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state in the checkpoint of a step, by path."""
    (marker,) = pod.folder.glob(f"checkpoints/*/step-{step:08d}/*/COMPLETE")
    file = pod.folder / "state.pt"
    dcp_to_torch_save(marker.parent, file)
    tensors: dict[str, torch.Tensor] = {}

    def walk(path: str, node: Any) -> None:
        if isinstance(node, dict):
            for name, part in node.items():
                walk(f"{path}/{name}", part)
        elif isinstance(node, torch.Tensor):
            tensors[path] = node

    walk("", torch.load(file))
    return tensors


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _is_worker(pid: int) -> bool:
    with suppress(OSError):
        # A rank leads a session of its own; a launcher may have other children.
        return os.getsid(pid) == pid
    return False


def _continue(ranks: list[int]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _pending(pid: int, number: int) -> bool:
    return bool((_mask(pid, "SigPnd") | _mask(pid, "ShdPnd")) >> (number - 1) & 1)


def _mask(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1], 16)
