"""What each rank runs: `python -m finetune_trainer.train.worker`, started by `launch`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging

from finetune_crds import contract
from finetune_crds.contract import TerminationMessage, TrainResult
from finetune_trainer import artifacts, outcome
from finetune_trainer.tokenizer import load_tokenizer, pad_id
from finetune_trainer.train import build
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer, Progress
from finetune_trainer.train.data import dataset, encode, pack, read
from finetune_trainer.train.data.feed import Collator, Examples, Feed
from finetune_trainer.train.delivery import export, lineage
from finetune_trainer.train.delivery.register import Registry
from finetune_trainer.train.loop import Loop
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.network import Network
from finetune_trainer.train.model.schedule import Schedule
from finetune_trainer.train.objectives.dpo import reference_of
from finetune_trainer.train.runtime import scratch, system
from finetune_trainer.train.runtime.distributed import World, is_loss_of_peer, joined
from finetune_trainer.train.runtime.preemption import Preemption, on_sigterm_at_once
from finetune_trainer.train.runtime.recipe import load_recipe
from finetune_trainer.train.runtime.track import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.data import Splits
    from finetune_crds.recipe import Recipe

_SPLITS = ("train", "validation")
_FAREWELL_SECONDS = 5.0


def main() -> int:
    """Train as one rank; what there is to tell goes to the launcher."""
    quiet_libraries()
    rank = int(os.environ["RANK"])
    return outcome.run(work, tell=lambda code, message: scratch.say(scratch.path(), rank, code, message))


def quiet_libraries() -> None:
    """Leave the log to what people can act on, and keep libraries from fetching code while training runs."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft reads a property that transformers is about to rename.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    # NB: what can import this package downloads compiled kernels from the Hub in the middle of a run.
    sys.modules["kernels"] = None  # type: ignore[assignment] # how Python is told that there is none


def work() -> TerminationMessage | None:
    """Join the gang and train; rank 0 has a result to tell."""
    preemption = Preemption()
    started = time.monotonic()
    recipe = load_recipe()
    with ExitStack() as leaving:
        with on_sigterm_at_once(lambda: leave_rendezvous(preemption)):
            if preemption.requested:
                raise preemption.error()
            timeout = recipe.distributed.collective_timeout_seconds
            world = leaving.enter_context(joined(timeout_seconds=timeout, preemption=preemption))
        tracker = Tracker(os.environ.get("MLFLOW_RUN_ID") if world.leads else None)
        try:
            with system_metrics(recipe, world, tracker):
                message = Run(recipe, world, tracker, preemption, started).train()
        except BaseException as error:
            # An end that was not planned has little time: the grace period of the pod.
            tracker.close(_FAREWELL_SECONDS)
            if is_loss_of_peer(error):
                sentence = (
                    "another rank ended while this one waited for it: look for the rank that failed first"
                )
                raise outcome.TrainingError(scratch.PEER_LOST, sentence, rank=world.rank) from error
            raise
        tracker.close()
    return message


@contextmanager
def system_metrics(recipe: Recipe, world: World, tracker: Tracker) -> Iterator[None]:
    """While inside, every rank logs what it takes of its machine, where the recipe asks for it."""
    if not recipe.tracking.system_metrics:
        yield
        return
    own = tracker if world.leads else Tracker(os.environ.get("MLFLOW_RUN_ID"), quiet=True)
    try:
        with system.logged(own, world.rank, world.device):
            yield
    finally:
        if own is not tracker:
            own.close(_FAREWELL_SECONDS)


def leave_rendezvous(preemption: Preemption) -> None:
    """End a rank that waits for the others to join, where no handler of Python's runs and nothing is there to lose."""
    code, message = outcome.describe(preemption.error())
    scratch.say(scratch.path(), int(os.environ["RANK"]), code, message)
    os._exit(code)


@dataclass
class Run:
    """One rank's way through the pipeline, from the recipe to the registered version."""

    recipe: Recipe
    world: World
    tracker: Tracker
    preemption: Preemption
    started: float

    def train(self) -> TerminationMessage | None:
        """Load, train, evaluate, export and register."""
        recipe, world = self.recipe, self.world
        downloads = scratch.path() / "base"
        source = world.agree_in_pod(
            lambda: artifacts.fetch(recipe.model.base, downloads, revision=recipe.model.revision)
        )
        tokenizer = world.agree(lambda: load_tokenizer(recipe.model, source))

        checkpointer = self._checkpointer()
        resumed = checkpointer.newest() if checkpointer else None
        self.preemption.checkpoint_step = resumed.step if resumed else None
        splits = self._pinned_splits(resumed)
        train, validation = self._tokenized(splits, tokenizer)
        plan = self._plan(train)
        self._describe(splits, plan, train, validation)

        network = build.network(recipe, source, tokenizer, world, scratch.path() / "teacher")
        optimizer = shard.optimizer(network, recipe.training)
        collator = self._collator(tokenizer)
        if recipe.objective.type == "DPO":
            # NB: before a checkpoint is loaded: the reference is the model as it was before its first step.
            to_come = Examples(train, plan.rest(resumed.step if resumed else 0))
            train = self._with_reference(to_come, network, collator)
            if validation is not None:
                validation = replace(validation, split=self._with_reference(validation, network, collator))
        feed = Feed(collator, train, plan, recipe.training.batch_size)
        if checkpointer is not None and resumed is not None:
            checkpointer.load(resumed, network.model, optimizer)
            world.say(f"resuming from the checkpoint of step {resumed.step}")

        loop = Loop(
            world=world,
            network=network,
            optimizer=optimizer,
            schedule=Schedule.of(recipe.training, plan.max_steps),
            plan=plan,
            feed=feed,
            collator=collator,
            validation=validation,
            training=recipe.training,
            tracker=self.tracker,
            checkpointer=checkpointer,
            progress=resumed or Progress(recipe=recipe.digest(), data_version=splits.version),
            preemption=self.preemption,
            started=self.started,
        )
        scratch.note_first_step(scratch.path())
        eval_loss = loop.run()
        feed.close()
        weights = export.gather(network.model)
        world.part()
        if not world.leads:
            return None
        result = TrainResult(
            step=loop.progress.step,
            base_eval_loss=loop.progress.base_eval_loss,
            eval_loss=eval_loss,
            perplexity=None if eval_loss is None else loop.perplexity(eval_loss),
            goodput=loop.goodput,
        )
        used = {"train": train} if validation is None else {"train": train, "validation": validation.split}
        counts = {name: lineage.Counts.of(split) for name, split in used.items()}
        eval_data = lineage.eval_data(recipe, validation.split if validation is not None else None)
        origin = lineage.Lineage(recipe, splits, result, counts, eval_data)
        with self._interruptible(checkpointer, loop.progress.step):
            result = self._deliver(
                origin,
                lambda folder: export.write(
                    folder,
                    model=network.model,
                    state=weights,
                    tokenizer=tokenizer,
                    source=source,
                    lineage=origin,
                ),
            )
        return TerminationMessage(
            train=result, checkpoint_step=checkpointer.published if checkpointer is not None else None
        )

    def _collator(self, tokenizer: PreTrainedTokenizerBase) -> Collator:
        # What is compiled is compiled for one shape.
        return Collator(
            self.world,
            pad_id(tokenizer),
            build.row_tokens(self.recipe) if self.recipe.training.compile else None,
        )

    def _with_reference(self, examples: Examples, network: Network, collator: Collator) -> dataset.Split:
        """The split with what DPO's reference says of some of its examples: the network as it is now."""
        training = self.recipe.training
        batches = collator.batches(examples, training.eval_batch_size or training.batch_size)
        found = reference_of(network, batches, self.world, len(examples.split))
        return replace(examples.split, reference=found)

    def _interruptible(self, checkpointer: Checkpointer | None, step: int) -> AbstractContextManager[object]:
        """The delivery ends at once on SIGTERM where the next attempt can do it again from the last checkpoint."""
        if checkpointer is None or checkpointer.published != step:
            return nullcontext()
        self.preemption.checkpoint_step = step
        return self.preemption.interrupting(
            f"stopped by SIGTERM after the last step, {step}, before the model was delivered"
        )

    def _checkpointer(self) -> Checkpointer | None:
        if self.recipe.checkpoint is None:
            return None
        return Checkpointer(
            self.recipe,
            self.world,
            on_published=self._tell_published,
            on_failed=lambda _step, sentence: self.tracker.tags({contract.TAG_CHECKPOINT_ERROR: sentence}),
        )

    def _tell_published(self, step: int) -> None:
        self.tracker.metrics(step, {contract.METRIC_CHECKPOINT_STEP: step})
        self.tracker.tags({contract.TAG_CHECKPOINT_ERROR: ""})

    def _pinned_splits(self, resumed: Progress | None) -> Splits:
        """The splits with the version that all ranks and all attempts read."""
        splits = self.recipe.data.splits
        assert splits is not None  # noqa: S101 - the recipe was refused otherwise
        if resumed is not None and resumed.data_version is not None:
            return splits.model_copy(update={"version": resumed.data_version})
        found = self.world.agree(lambda: read.delta_version(splits) if self.world.leads else None)
        return splits.model_copy(update={"version": self.world.broadcast(found)})

    def _tokenized(
        self, splits: Splits, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[dataset.Split, Examples | None]:
        """The training split, and the validation split where there is one; tokenised once in each pod."""
        folder = scratch.path() / "tokens"

        def tokenize() -> None:
            encoder = encode.Encoder.of(self.recipe, tokenizer)
            for name in _SPLITS:
                if dataset.tokenize(splits, name, encoder, folder / name):
                    self.world.say(f"{name}: {encoder.summary()}")
                    self.tracker.metrics(0, encoder.figures(name))

        self.world.agree_in_pod(tokenize)
        train = dataset.Split.load(folder / "train")
        if not (folder / "validation").is_dir():
            self.world.agree(self._check_evaluation_is_not_wanted)
            return train, None
        validation = dataset.Split.load(folder / "validation")
        return train, Examples(validation, self._sequences(validation))

    def _check_evaluation_is_not_wanted(self) -> None:
        training = self.recipe.training
        if training.eval_steps is not None or training.early_stopping is not None:
            raise outcome.DataError(
                "EmptySplit",
                "training.evalSteps or earlyStopping asks for evaluation, and the data has no validation split: "
                "add one, or remove them",
            )

    def _sequences(self, split: dataset.Split) -> list[list[int]]:
        packing = self.recipe.training.packing
        return pack.sequences(split.lengths, max_length=build.row_tokens(self.recipe), packing=packing)

    def _plan(self, train: dataset.Split) -> pack.Plan:
        training, gang = self.recipe.training, self.recipe.distributed
        return pack.Plan.of(
            self._sequences(train),
            # NB: of the recipe's ranks, not of those that are here: a step stays the same on another number of them.
            global_batch=training.batch_size
            * training.gradient_accumulation
            * gang.nodes
            * gang.processes_per_node,
            seed=training.seed,
            epochs=training.epochs,
            max_steps=training.max_steps,
        )

    def _describe(
        self, splits: Splits, plan: pack.Plan, train: dataset.Split, validation: Examples | None
    ) -> None:
        """Say what is about to happen, to the log and to the MLflow run."""
        recipe, training = self.recipe, self.recipe.training
        tokens = lineage.Counts.of(train).tokens
        filled = tokens / (len(plan.sequences) * build.row_tokens(recipe)) if training.packing else None
        self.world.say(
            f"{len(train):,} examples with {tokens:,} tokens in {len(plan.sequences):,} sequences"
            + (f" ({filled:.0%} full)" if filled is not None else "")
            + f"; {plan.max_steps:,} steps of {plan.global_batch} sequences on {self.world.size} "
            + ("rank" if self.world.size == 1 else "ranks")
        )
        params: dict[str, object] = {
            "base_model": recipe.model.base,
            "method": recipe.method.type,
            "objective": recipe.objective.type,
            "train_samples": len(train),
            "val_samples": len(validation.split) if validation else 0,
            "epochs": plan.total / len(plan.sequences),
            "max_steps": plan.max_steps,
            "effective_batch": plan.global_batch,
            "learning_rate": training.learning_rate,
            "scheduler": training.scheduler,
            "max_length": training.max_length,
            "packing": training.packing,
            "precision": training.precision,
            "seed": training.seed,
            "recipe": recipe.digest(),
            **lineage.method_params(recipe),
        }
        eval_data = lineage.eval_data(recipe, validation.split if validation is not None else None)
        tags = lineage.source_tags(recipe, splits, eval_data) | {
            contract.TAG_ATTEMPT: os.environ.get("FINETUNE_ATTEMPT", "1")
        }
        self.tracker.describe(params, tags)
        self.tracker.dataset(
            splits.path or splits.train or "",
            name=recipe.job.name,
            version=splits.version,
            # NB: MLflow's Delta source leaves version 0 out, so the digest names the version too.
            digest=f"{len(train)}-examples-{tokens}-tokens"
            if splits.version is None
            else f"version-{splits.version}",
        )

    def _deliver(self, origin: lineage.Lineage, write: Callable[[Path], None]) -> TrainResult:
        """Upload the model to its MLflow run and register it; done by an earlier attempt: only find it."""
        recipe, result, run_id = self.recipe, origin.result, self.tracker.run_id
        if run_id is None:
            self.world.say("there is no MLFLOW_RUN_ID: the model is neither uploaded nor registered")
            return result
        registry = Registry(run_id)
        name = recipe.register_.model if recipe.register_ else None
        version = registry.version_of_run(name) if name else None
        if version is None:
            folder = scratch.path() / "export"
            folder.mkdir()
            write(folder)
            model_id = registry.upload(folder)
            version = registry.register(name, model_id, lineage.version_tags(origin)) if name else None
        if name is None or version is None:
            return result
        self.world.say(f"registered {name} version {version}")
        return result.model_copy(update={"model_name": name, "model_version": version})


if __name__ == "__main__":
    sys.exit(main())
