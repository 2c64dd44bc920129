"""What an attempt begins with: its own checkpoints, or those of the job that it carries on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.train.checkpoint.claim import MANIFEST
from finetune_trainer.train.checkpoint.folder import MARKER
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.runtime.distributed import World
from support.checkpoints import Run, same, save_of
from support.pod_failures import refusal

Json = dict[str, Any]


@pytest.fixture
def first(tmp_path: Path, world: World) -> Run:
    """The job that is carried on: steps 2 and 3, of which 2 is the best."""
    run = Run(tmp_path, world, {"keep": 2})
    run.progress = replace(
        run.progress, data_version=0, examples="e1", eval_data="v1", productive_seconds=9.0, evals_without_gain=2,
        skipped_steps=1, base_eval_loss=2.0, best_eval_loss=1.0,
    )  # fmt: skip
    run.train_and_save(3, best=2)
    return run


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def begun(run: Run, *, eval_data: str = "v1", max_steps: int = 9) -> Progress:
    progress = run.resume()
    return run.checkpointer.begin_on(progress, examples="e1", eval_data=eval_data, max_steps=max_steps)


def test_a_job_carries_another_one_on_and_writes_its_own_folder(first: Run) -> None:
    before = files(first.steps)
    second = first.next_job(first.steps)
    progress = begun(second)
    assert asdict(progress) == asdict(first.progress) | {
        "recipe": progress.recipe,
        "best_step": 2,
        "best_step_loss": 1.0,
        "best_in": str(first.steps),
        "resumed_from": f"{first.steps}/step-00000003",
        "productive_seconds": 0.0,
        "evals_without_gain": 0,
        "skipped_steps": 0,
    }
    assert same(second.state(), first.state())
    assert (second.checkpointer.published, second.checkpointer.best_step) == (None, 2)
    second.progress = progress
    second.train_and_save(3)
    assert sorted(path.name for path in second.steps.iterdir()) == [
        MANIFEST,
        "step-00000005",
        "step-00000006",
    ]
    assert files(first.steps) == before

    later = first.next_job(first.steps)
    again = begun(later)
    assert (again.step, again.resumed_from, later.checkpointer.published) == (6, progress.resumed_from, 6)
    assert same(later.state(), second.state())
    # The best weights are still those of the other job.
    later.checkpointer.load_weights(2, later.model)
    assert not same(later.state(), second.state())
    for step in (2, 3):
        (save_of(first.steps, step) / MARKER).unlink()
    without = begun(first.next_job(first.steps))
    # The next evaluation has no best one to be compared with, so its weights are kept.
    assert (without.best_step, without.best_step_loss, without.best_eval_loss) == (None, None, None)


def test_a_best_loss_without_its_checkpoint_is_not_carried_on(tmp_path: Path, world: World) -> None:
    run = Run(tmp_path, world)
    run.progress = replace(run.progress, best_eval_loss=1.0)
    run.train_and_save(1)
    assert Run(tmp_path, world).resume().best_eval_loss == 1.0
    assert run.next_job(run.steps).resume().best_eval_loss is None


def test_the_best_weights_may_be_those_of_the_job_before_the_one_that_is_carried_on(first: Run) -> None:
    second = first.next_job(first.steps)
    second.progress = begun(second)
    second.train_and_save(1)
    resume_from = {"resumeFrom": {"type": "Uri", "uri": str(second.steps)}}
    for step in (4, 5):
        third = Run(first.folder, first.world, {**first.options, **resume_from}, job="third")
        progress = begun(third)
        assert (progress.step, progress.best_step, progress.best_in) == (step, 2, str(first.steps))
        third.checkpointer.load_weights(2, third.model)
        third.train_and_save(1)


def test_a_step_of_the_other_job_that_has_the_same_number_is_not_the_best(first: Run) -> None:
    second = first.next_job(first.steps)
    second.progress = begun(second)
    second.train_and_save(3, best=4)
    first.train_and_save(2)
    assert [path.name for path in first.steps.glob("step-*4")] == ["step-00000004"]
    (save_of(second.steps, 4) / MARKER).unlink()
    assert begun(first.next_job(first.steps)).best_step is None


def test_the_step_that_is_carried_on_is_copied_when_it_is_saved(first: Run) -> None:
    second = first.next_job(first.steps)
    second.resume()
    second.save()
    assert (second.checkpointer.published, second.published) == (3, [3])
    assert begun(first.next_job(first.steps)).step == 3


def test_a_uri_may_name_one_of_the_checkpoints(first: Run) -> None:
    second = first.next_job(f"{first.steps}/step-00000002/")
    assert second.resume().step == 2
    assert not same(second.state(), first.state())


def test_more_steps_ranks_and_reports_are_no_other_run(first: Run) -> None:
    second = first.next_job(
        first.steps,
        training={"maxSteps": 99, "perDeviceBatchSize": 1, "logEverySteps": 1},
        distributed={"nodes": 2, "processesPerNode": 2, "strategy": "DDP"},
    )
    assert second.resume().step == 3


REFUSED: dict[str, tuple[Json, str]] = {
    "settings": (
        {"training": {"learningRate": 1e-3, "seed": 7}},
        "the checkpoint {steps}/step-00000003 belongs to a run with other settings (training.learningRate 2e-05 -> 0.001; "
        "training.seed 42 -> 7): create the job with the values of that run, or without checkpoint.resumeFrom",
    ),
    "a global batch": (
        {"distributed": {"nodes": 2}},
        "the checkpoint {steps}/step-00000003 belongs to a run with other settings (sequences per step 4 -> 8 "
        "(training.perDeviceBatchSize x gradientAccumulation x ranks; for 2 ranks, set perDeviceBatchSize to 2 and "
        "gradientAccumulation to 1)): create the job with the values of that run, or without checkpoint.resumeFrom",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "message"), REFUSED.values(), ids=REFUSED)
def test_another_run_is_refused_with_what_differs(first: Run, parts: Json, message: str) -> None:
    assert refusal(first.next_job(first.steps, **parts).checkpointer.find_newest) == (
        64, "ForeignCheckpoint", message.format(steps=first.steps),
    )  # fmt: skip


def test_a_folder_without_a_checkpoint_is_refused(first: Run) -> None:
    for place in (first.steps / "elsewhere", first.steps / "step-00000009"):
        assert refusal(first.next_job(place).checkpointer.find_newest) == (
            64,
            "CheckpointNotFound",
            f"checkpoint.resumeFrom: {place} has no complete checkpoint: set resumeFrom to "
            "the status.checkpoint.uri of a job, or remove it",
        )


def test_a_damaged_checkpoint_of_another_job_is_not_to_be_deleted(first: Run) -> None:
    for step in (2, 3):
        (save_of(first.steps, step) / ".metadata").unlink()
    code, reason, message = refusal(first.next_job(first.steps).checkpointer.find_newest)
    assert (code, reason) == (64, "CheckpointDamaged")
    assert message.endswith(
        " and there is no older checkpoint: restore its files, or set checkpoint.resumeFrom to another checkpoint"
    )


def test_a_damaged_checkpoint_that_is_named_does_not_speak_of_older_ones(first: Run) -> None:
    (save_of(first.steps, 3) / ".metadata").unlink()
    uri = first.steps / "step-00000003"
    assert refusal(first.next_job(uri).checkpointer.find_newest) == (
        64,
        "CheckpointDamaged",
        f"the checkpoint {uri} is damaged (its file .metadata is missing): restore its files, or set "
        "checkpoint.resumeFrom to another checkpoint",
    )


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_checkpoint_that_another_job_deletes_meanwhile_is_looked_for_again(first: Run, name: str) -> None:
    second = first.next_job(first.steps)
    progress = second.checkpointer.find_newest()
    assert progress is not None
    (save_of(first.steps, 3) / name).unlink()
    assert refusal(lambda: second.checkpointer.load(progress, second.model, second.optimizers)) == (
        1,
        "CheckpointUnreadable",
        f"the checkpoint {first.steps}/step-00000003 of another job was deleted before it was read: the next attempt "
        "looks for another one",
    )
    assert first.next_job(first.steps).resume().step == 2


def test_other_examples_are_refused_with_what_may_explain_them(first: Run) -> None:
    data = {
        "columns": {"type": "Text", "text": "text"},
        "splits": {"type": "Delta", "path": "/corpus", "version": 1},
    }
    second = first.next_job(first.steps, data=data)
    progress = second.resume()
    assert progress.data_version == 1
    begin = f"the checkpoint {first.steps}/step-00000003 was written for other training examples "
    changed = "the files of the splits, the tokenizer or the image of the trainer have changed"
    for run, cause in ((second, "data.splits.version 0 -> 1"), (first.next_job(first.steps), changed)):
        run.resume()
        begin_on = partial(run.checkpointer.begin_on, progress, examples="e2", eval_data="v1", max_steps=9)
        error = refusal(begin_on)
        remedy = "restore the examples, or create the job without checkpoint.resumeFrom"
        assert error == (64, "ForeignCheckpoint", f"{begin}({cause}): {remedy}")
    same_job = Run(first.folder, first.world, first.options)
    message = refusal(
        partial(same_job.checkpointer.begin_on, same_job.resume(), examples="e2", eval_data="v1", max_steps=9)
    )[2]
    assert message.endswith(
        f"({changed}): restore the examples, or delete the folder {first.steps} to start over"
    )


def test_a_job_that_carries_another_one_on_starts_from_that_again(first: Run) -> None:
    second = first.next_job(first.steps)
    second.progress = begun(second)
    second.train_and_save(1)
    newest = save_of(second.steps, 4)
    start_over = f"delete the folder {second.steps} to start from checkpoint.resumeFrom again"
    begin_on = partial(second.checkpointer.begin_on, second.resume(), eval_data="v1", max_steps=9)
    assert refusal(partial(begin_on, examples="e2"))[2].endswith(f"): restore the examples, or {start_over}")
    metadata = newest / ".metadata"
    metadata.write_bytes(bytes(metadata.stat().st_size))
    assert refusal(first.next_job(first.steps).resume)[2].endswith(
        "): delete this folder to resume from an older checkpoint, or from checkpoint.resumeFrom if no older one exists"
    )
    metadata.unlink()
    assert refusal(first.next_job(first.steps).resume)[2].endswith(f"restore its files, or {start_over}")


def test_splits_without_a_version_are_those_of_the_run_unless_they_are_elsewhere(first: Run) -> None:
    for path, version in (("/corpus", 0), ("/copied", None)):
        data = {"columns": {"type": "Text", "text": "text"}, "splits": {"type": "Delta", "path": path}}
        assert first.next_job(first.steps, data=data).resume().data_version == version


def test_tables_of_splits_are_read_at_the_versions_of_the_run_unless_they_are_others(
    tmp_path: Path, world: World
) -> None:
    def data(**names: str) -> Json:
        splits = {"type": "Tables", "train": "a.b.train", "test": "a.b.test", **names}
        return {"columns": {"type": "Text", "text": "text"}, "splits": splits}

    run = Run(tmp_path, world, {"keep": 2}, parts={"data": data()})
    run.progress = replace(run.progress, table_versions="train=3,test=0")
    run.train_and_save(1)
    assert run.resume().table_versions == "train=3,test=0"
    others = {"train": "a.b.new", "test": "a.b.other"}
    for names, versions in (({}, "train=3,test=0"), ({"test": "a.b.other"}, "train=3"), (others, "")):
        assert run.next_job(run.steps, data=data(**names)).resume().table_versions == versions
    files = {"columns": {"type": "Text", "text": "text"}, "splits": {"type": "Parquet", "train": "/corpus"}}
    assert run.next_job(run.steps, data=files).resume().table_versions == ""


def test_evaluations_on_other_data_are_not_compared(first: Run) -> None:
    second = first.next_job(first.steps)
    progress = begun(second, eval_data="v2")
    assert (progress.eval_data, progress.best_eval_loss, progress.base_eval_loss, progress.best_step) == (
        "v2",
        *3 * [None],
    )
    assert second.checkpointer.best_step is None


def test_a_run_that_has_more_steps_already_is_refused(first: Run) -> None:
    assert refusal(lambda: begun(first.next_job(first.steps), max_steps=2)) == (
        64,
        "ForeignCheckpoint",
        f"the checkpoint {first.steps}/step-00000003 is at step 3, but this run has only 2 steps: raise training.epochs or "
        "training.maxSteps, or resume from an earlier checkpoint",
    )


def test_a_checkpoint_of_an_earlier_release_is_its_own_jobs(first: Run) -> None:
    # That release had one folder for each step, and no claim.
    save = save_of(first.steps, 3)
    for file in save.iterdir():
        file.rename(save.parent / file.name)
    save.rmdir()
    (first.steps / MANIFEST).unlink()
    marker = save.parent / MARKER
    written = json.loads(marker.read_text())
    assert written.pop("settings") == {
        "data.columns.text": "text", "data.columns.type": "Text", "data.splits.path": "/corpus", "data.splits.type": "Delta",
        "data.splits.version": 0, "globalBatch": 4, "model.base": "/models/tiny",
    }  # fmt: skip
    for newer in ("best_in", "examples", "eval_data", "resumed_from"):
        del written["progress"][newer]
    marker.write_text(json.dumps(written))
    same_job = Run(first.folder, first.world, first.options)
    progress = same_job.resume()
    begun = same_job.checkpointer.begin_on(progress, examples="e1", eval_data="v1", max_steps=9)
    assert (begun.step, begun.examples, begun.eval_data, begun.best_eval_loss) == (3, "e1", "v1", 1.0)
    assert same(same_job.state(), first.state())
    assert refusal(first.next_job(first.steps).checkpointer.find_newest) == (
        64,
        "ForeignCheckpoint",
        f"the checkpoint {first.steps}/step-00000003 was written by an earlier release, which did not record the settings of the "
        "run: resume that job with this release until it writes a new checkpoint and use that one, or create this "
        "job without checkpoint.resumeFrom",
    )
    # Its evaluation says that it is the best one: the marker is written again, where it is.
    same_job.save(best=True)
    assert json.loads(marker.read_text())["progress"]["best_step"] == 3
    same_job.train_and_save(2)
    kept = [path.relative_to(first.steps) for path in first.steps.glob("step-*/**/*") if path.name == MARKER]
    assert sorted(path.parts[0] for path in kept) == [f"step-0000000{step}" for step in (3, 4, 5)]
    same_job.train_and_save(1, best=6)
    assert not save.parent.exists()


def test_what_a_later_release_keeps_in_a_checkpoint_is_no_damage(first: Run) -> None:
    marker = save_of(first.steps, 3) / MARKER
    written = json.loads(marker.read_text())
    written["progress"]["later"] = 1
    marker.write_text(json.dumps(written))
    assert (
        asdict(Run(first.folder, first.world, first.options).resume()) | {"later": 1} == written["progress"]
    )
