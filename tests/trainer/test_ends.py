"""A run that is ended eight times, each time at a moment that matters, is the run that nobody touched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from finetune_crds.contract import ENV_ATTEMPT, EXIT_PREEMPTED
from finetune_trainer.train.checkpoint.claim import MANIFEST
from support.checkpoints import complete_steps
from support.ends import (
    EVERY_STEPS,
    Attempt,
    Signal,
    check_end,
    check_like_untouched,
    in_folder,
    newest_complete,
    state_at,
    tiny_gang,
)
from support.pods import Pod, save_base_model
from support.ports import free_port

STEPS = 60


@dataclass(frozen=True)
class End:
    """How an attempt ends, and when."""

    how: Signal
    when: Literal["starting", "training", "saving"]
    rank: int = 0


# NB: rank 0 publishes checkpoints, so that the one in flight is lost with it.
ENDS = (
    End("TERM", "starting"),
    End("KILL", "saving"),
    End("TERM", "saving"),
    End("KILL", "starting", rank=1),
    End("TERM", "training"),
    End("KILL", "saving"),
    End("KILL", "training", rank=1),
    End("TERM", "saving"),
)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Two ranks that train a tiny model, and write a checkpoint while they take every third step."""
    return tiny_gang(tmp_path_factory.mktemp("pod"), steps=STEPS)


def end(attempt: Attempt, wanted: End) -> int | None:
    """End an attempt at the moment that is wanted; return the step whose checkpoint was half written then."""
    if wanted.when == "saving":
        with attempt.frozen_in_a_save() as step:
            attempt.send(wanted.how, wanted.rank)
            if wanted.how == "TERM":
                attempt.wait_signalled()
        return step
    if wanted.when == "training":
        # Not a step that is saved anyway.
        attempt.run_to_step(4)
    attempt.send(wanted.how, wanted.rank)
    return None


def test_a_run_that_is_ended_eight_times_is_the_run_that_nobody_touched(pod: Pod, tmp_path: Path) -> None:
    untouched = in_folder(pod, tmp_path / "untouched")
    untouched_run = untouched.run()
    assert untouched_run.code == 0, untouched_run.output
    ended = in_folder(pod, tmp_path / "ended")
    newest_step = 0
    losses: dict[int, float] = {}
    for each in ENDS:
        with Attempt.start(ended) as attempt:
            half_written = end(attempt, each)
            outcome = attempt.end()
        newest = newest_complete(ended)
        print(f"{each}: half written {half_written}, exit code {outcome.code}, {newest_step} -> {newest}")
        check_end(outcome, each.how, newest_step, newest)
        if half_written is not None and each.how == "KILL":
            assert newest < half_written
        for at, loss in outcome.losses.items():
            assert losses.setdefault(at, loss) == loss, f"step {at} was another one"
        newest_step = newest
    check_like_untouched(ended, losses, untouched, untouched_run)


def test_pods_of_a_lost_node_that_wake_up_publish_nothing(pod: Pod, tmp_path: Path) -> None:
    """They freeze while they write a checkpoint. Meanwhile the pods of the next attempt train to the end."""
    changes = {"training.maxSteps": 18}
    untouched = in_folder(pod, tmp_path / "untouched", changes)
    untouched_run = untouched.run()
    assert untouched_run.code == 0, untouched_run.output
    older = in_folder(pod, tmp_path / "older", changes)
    older.env[ENV_ATTEMPT] = "1"
    newer = older.but({})
    newer.env[ENV_ATTEMPT] = "2"
    newer.folder = tmp_path / "newer"
    newer.folder.mkdir()
    checkpoints = older.folder / "checkpoints"
    with Attempt.start(older) as attempt:
        with attempt.frozen_in_a_save() as half_written:
            newer_run = newer.run()
            assert newer_run.code == 0, newer_run.output
            published = contents(checkpoints)
        outcome = attempt.end()
    assert outcome.code == EXIT_PREEMPTED, outcome.output
    assert outcome.message is not None
    assert outcome.message.error is not None
    assert outcome.message.error.reason == "Superseded", outcome.output
    assert outcome.message.error.message.startswith(
        f"newer pods of the job, of attempt 2, claimed the checkpoint folder {checkpoints}/"
    )
    # The older pods may have taken the steps until their next save.
    assert max(outcome.losses) <= half_written + 2 * EVERY_STEPS
    assert contents(checkpoints) == published
    assert outcome.losses | newer_run.losses == untouched_run.losses
    state, untouched_state = state_at(older, 18), state_at(untouched, 18)
    assert [name for name in untouched_state if not torch.equal(state[name], untouched_state[name])] == []


def contents(folder: Path) -> dict[str, bytes]:
    """The files that are part of a checkpoint, and the manifest."""
    saves = {marker.parent for marker in folder.rglob("COMPLETE")}
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.parent in saves or path.name == MANIFEST
    }


def test_another_number_of_ranks_goes_on_with_the_same_samples(pod: Pod, tmp_path: Path) -> None:
    """And with the same frozen weights, which PiSSA has changed."""
    save_base_model(tmp_path / "base")
    changes = {
        "model.base": str(tmp_path / "base"),
        "method": {"type": "LoRA", "lora": {"rank": 4, "init": "PiSSA"}},
        "training.maxSteps": 12,
        "checkpoint.everySteps": 6,
        # Other ranks draw other noise.
        "training.neftuneAlpha": None,
    }
    gang = in_folder(pod, tmp_path / "gang", changes)
    gang_run = gang.run()
    assert gang_run.code == 0, gang_run.output
    (last,) = gang.folder.glob("checkpoints/*/step-00000012")
    shutil.rmtree(last)
    gang.env["PET_NPROC_PER_NODE"] = "1"
    outcome = gang.run()
    assert outcome.code == 0, outcome.output
    assert "resuming from the checkpoint of step 6\n" in outcome.output
    assert "PiSSA: 14 weights are split by their singular values (" in gang_run.output
    assert "PiSSA: 14 weights are split as in the checkpoint (" in outcome.output
    assert " on 1 rank\n" in outcome.output
    assert outcome.losses == pytest.approx({step: gang_run.losses[step] for step in range(7, 13)}, abs=2e-4)


def test_sigterm_to_one_pod_stops_all_ranks_after_the_same_step(pod: Pod, tmp_path: Path) -> None:
    pod = pod.but(
        {
            "distributed": {"nodes": 2, "processesPerNode": 1},
            "training.maxSteps": 2000,
            "checkpoint": {"uri": str(tmp_path / "checkpoints"), "everySteps": 1000},
        }
    )
    port, gang = free_port(), []
    for rank in range(2):
        member = pod.in_gang(rank, port)
        member.folder = tmp_path / str(rank)
        member.folder.mkdir()
        gang.append(member)
    with Attempt.start(gang[0]) as first, Attempt.start(gang[1]) as second:
        first.run_to("step 3/")
        second.send("TERM")
        outcomes = first.end(), second.end()
    (step,) = {outcome.message.checkpoint_step for outcome in outcomes if outcome.message is not None}
    assert step == max(outcomes[0].losses)
    for outcome in outcomes:
        assert outcome.code == EXIT_PREEMPTED, outcome.output
        assert outcome.message is not None
        assert outcome.message.error is not None
        assert outcome.message.error.message == f"stopped by SIGTERM after the checkpoint of step {step}"
    assert complete_steps(tmp_path / "checkpoints") == [step]
