"""Records an attempt in its MLflow run, in addition to progress: parameters, tags, datasets, checkpoints and the memory plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_crds import contract
from finetune_crds.data import parse_table
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.train.delivery import lineage
from finetune_trainer.train.runtime import device

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_trainer.pod.mlflow_run import Tracker
    from finetune_trainer.sinks.feed import Sinks
    from finetune_trainer.train.data.corpus import Corpus
    from finetune_trainer.train.runtime.distributed import World


def record_run(
    recipe: Recipe, world: World, tracker: Tracker, sinks: Sinks, data: Corpus, *, resumed_from: str
) -> None:
    """Print what is about to run, and log its parameters, tags and datasets; to sinks, the parameters alone.

    Args:
        resumed_from: the checkpoint of another job that the run began with; empty: none.
    """
    ranks = "rank" if world.size == 1 else "ranks"
    world.say(f"{data.summary(recipe)} on {world.size} {ranks}")
    eval_data = lineage.identify_eval_data(recipe, data.validation_split)
    tags = {
        **lineage.build_source_tags(recipe, data.splits, eval_data, resumed_from),
        **lineage.build_preparation_tags(recipe),
        **device.tags(world.device),
        contract.TAG_ATTEMPT: str(read_attempt()),
    }
    parameters = lineage.build_run_params(recipe, data, resumed_from)
    tracker.describe(parameters, tags)
    sinks.parameters(parameters)
    _record_datasets(recipe, tracker, data)


def _record_datasets(recipe: Recipe, tracker: Tracker, data: Corpus) -> None:
    """Log the splits, and the sources that they were prepared from, as datasets of the MLflow run."""
    splits = data.splits
    if splits.tables:
        for split, name in splits.tables.items():
            table, version = parse_table(name)
            # Training never reads the test split.
            if version is not None and split != "test":
                _record_table(tracker, table, version, use="training")
    else:
        digest = f"{len(data.train)}-examples-{data.tokens}-tokens"
        if splits.version is not None:
            # NB: MLflow's Delta source omits version 0, so the digest has the version too.
            digest = f"version-{splits.version}"
        tracker.dataset(splits.address, name=recipe.job.name, version=splits.version, digest=digest)
    for read_source in lineage.list_sources(recipe):
        # Only tables: the tags name the other sources.
        if read_source.version is not None:
            _record_table(tracker, read_source.source.address, read_source.version, use="source")


def _record_table(tracker: Tracker, address: str, version: int, *, use: str) -> None:
    # NB: for MLflow, datasets with the same name and digest are the same, so the address is the name too.
    tracker.dataset(address, name=address, version=version, digest=f"version-{version}", use=use)


def record_checkpoint(tracker: Tracker, step: int) -> None:
    """Log the step of a checkpoint that was published, and clear the failure of an earlier checkpoint."""
    tracker.metrics(step, {contract.METRIC_CHECKPOINT_STEP: step})
    tracker.tags({contract.TAG_CHECKPOINT_ERROR: ""})


def record_checkpoint_failure(tracker: Tracker, _step: int, reason: str) -> None:
    """Log why a checkpoint could not be written."""
    tracker.tags({contract.TAG_CHECKPOINT_ERROR: reason})


def record_plan(tracker: Tracker, plan: contract.MemoryPlan) -> None:
    """Log the memory plan of the training."""
    tracker.metrics(0, {contract.METRIC_PLAN_MEMORY: plan.memory_bytes})
    tracker.tags({contract.TAG_PLAN: plan.model_dump_json(exclude_none=True)})
