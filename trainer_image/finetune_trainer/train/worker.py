"""What each rank runs: `python -m finetune_trainer.train.worker`, started by `launch`."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from finetune_crds import continuation, contract
from finetune_crds.contract import TerminationMessage, TrainResult
from finetune_trainer.examples.tokenizer import load_tokenizer, pad_id
from finetune_trainer.pod import exit_status
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.train import build
from finetune_trainer.train.checkpoint import newest
from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
from finetune_trainer.train.checkpoint.kept_reference import KeptReference
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.data import corpus
from finetune_trainer.train.data.feed import Collator, Examples, Feed
from finetune_trainer.train.delivery import export, lineage, output, signature, upload
from finetune_trainer.train.delivery.deliver import deliver
from finetune_trainer.train.evaluator import Evaluator
from finetune_trainer.train.loop import Loop
from finetune_trainer.train.model import precision
from finetune_trainer.train.model.adapters import continued
from finetune_trainer.train.model.checks import probe, recomputation
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.optimizer.schedule import Schedule
from finetune_trainer.train.model.weights import merge
from finetune_trainer.train.reporter import Reporter
from finetune_trainer.train.runtime import device, scratch, system
from finetune_trainer.train.runtime.distributed import World, joined
from finetune_trainer.train.runtime.explain import explained
from finetune_trainer.train.runtime.preemption import Preemption, on_sigterm
from finetune_trainer.train.runtime.recipe import load_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.model.network.trained_network import Network


def main() -> int:
    """Train as one rank, and leave the outcome for the launcher."""
    quiet_libraries()
    rank = int(os.environ["RANK"])
    code = exit_status.run(
        work, report=lambda code, message: scratch.write_outcome(scratch.path(), rank, code, message)
    )
    if dist.is_initialized():
        # NB: after an error on GPUs, the end of the interpreter would wait for the groups that `joined` leaves.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def quiet_libraries() -> None:
    """Silence warnings that users cannot act on, and keep libraries from downloading code during training."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft reads a property that transformers deprecates.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    # It sets the rank of experts by the names of their parameters, and looks for layers with these names.
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
    # NB: a library that can import `kernels` downloads compiled kernels from the Hub in the middle of a run. None in
    # sys.modules makes the import fail.
    sys.modules["kernels"] = None  # type: ignore[assignment]


def work() -> TerminationMessage | None:
    """Join the ranks and train; only rank 0 returns a result."""
    preemption = Preemption()
    started = time.monotonic()
    recipe = load_recipe()
    with ExitStack() as stack:
        with on_sigterm(lambda: end_in_rendezvous(preemption)):
            if preemption.requested:
                raise preemption.error()
            timeout = recipe.distributed.collective_timeout_seconds
            world = stack.enter_context(joined(timeout_seconds=timeout, preemption=preemption))
        tracker = Tracker(os.environ.get("MLFLOW_RUN_ID") if world.leads else None)
        try:
            with tracker, system_metrics(recipe, world, tracker):
                return Run(recipe, world, tracker, preemption, started).train()
        except BaseException as error:
            told = explained(error, world.rank)
            if told is error:
                raise
            # `outcome.run` prints none of an error that has a sentence.
            traceback.print_exc()
            raise told from error


@contextmanager
def system_metrics(recipe: Recipe, world: World, tracker: Tracker) -> Iterator[None]:
    """A context in which every rank logs its CPU, memory and GPU use, if the recipe enables it."""
    if not recipe.tracking.system_metrics:
        yield
        return
    with ExitStack() as stack:
        run_id = os.environ.get("MLFLOW_RUN_ID")
        own = tracker if world.leads else stack.enter_context(Tracker(run_id, quiet=True))
        stack.enter_context(system.logged(own, world.rank, world.device))
        yield


def end_in_rendezvous(preemption: Preemption) -> None:
    """End a rank that waits for the others to join: no Python signal handler runs there, and nothing can be lost."""
    code, message = exit_status.describe(preemption.error())
    scratch.write_outcome(scratch.path(), int(os.environ["RANK"]), code, message)
    os._exit(code)


@dataclass
class Run:
    """Runs the pipeline on one rank, from the recipe to the registered version."""

    recipe: Recipe
    world: World
    tracker: Tracker
    preemption: Preemption
    started: float
    """When this attempt started, by the monotonic clock."""

    def train(self) -> TerminationMessage | None:
        """Load, train, evaluate, export and register; only rank 0 returns a result."""
        world = self.world
        # Before anything is fetched.
        world.agree(lambda: precision.check(self.recipe, world.card))
        world.agree(lambda: self._check_delivery() if world.leads else None)
        fetched = merge.fetch(
            self.recipe.model,
            scratch.path() / "base",
            world,
            with_digest=export.names_base(self.recipe),
            check=lambda config: build.check(self.recipe, config, world),
        )
        source, adapter = fetched.base, fetched.adapter
        if adapter is not None:
            self.recipe = world.agree(lambda: continued.apply_adapter_config(self.recipe, adapter))
        recipe = self.recipe
        tokenizer = world.agree(lambda: load_tokenizer(recipe.model, fetched.tokenizer))
        checkpointer = self._checkpointer()
        resumed = checkpointer.newest() if checkpointer else None
        if resumed is not None and resumed.day:
            # Another job's checkpoint: its examples have the day of that job.
            recipe = self.recipe = recipe.on_day(date.fromisoformat(resumed.day))
        self.preemption.checkpoint_step = checkpointer.published if checkpointer else None
        data = self._load_corpus(tokenizer, resumed)
        # Before minutes of loading: how many steps there are is known from here on.
        world.agree(lambda: Schedule.of(recipe.training, data.plan.max_steps))
        progress = self._begin(data, checkpointer, resumed)
        self._describe(data, progress)
        examples = world.agree(lambda: self._read_examples(data) if world.leads else None)

        going_on = fetched if adapter is not None else None
        check_key = probe.compute_key(recipe, world)
        verdicts: list[recomputation.Verdict] = []
        network = build.network(
            recipe,
            source,
            tokenizer,
            world,
            scratch.path() / "teacher",
            going_on=going_on,
            resume=checkpointer.load_initial if checkpointer is not None and resumed is not None else None,
            on_plan=self._log_plan,
            check_key=check_key,
            is_checked=progress.logits_checked == check_key,
            verdict=recomputation.Verdict.of(progress.recomputation),
            on_verdict=verdicts.append,
        )
        # The newest checkpoint keeps the results.
        progress = replace(
            progress, logits_checked=check_key, recomputation=asdict(verdicts[0]) if verdicts else None
        )
        optimizer = Optimizer(network, recipe.training, data.plan.max_steps)
        collator = Collator.of(recipe, world, pad_id(tokenizer))
        # NB: before a checkpoint is loaded: an objective may need the model as it was before its first step.
        data = self._prepare(data, network, collator, resumed, self._kept_reference(checkpointer, network))
        if checkpointer is not None and resumed is not None:
            checkpointer.load(resumed, network.model, optimizer.parts)
            if optimizer.loss_scale is not None and resumed.loss_scale is not None:
                optimizer.loss_scale.load_state(resumed.loss_scale, resumed.good_steps)
            of = "" if checkpointer.published else f" of another job, {resumed.resumed_from}"
            world.say(f"resuming from the checkpoint of step {resumed.step}{of}")

        loop = self._loop(
            data=data,
            network=network,
            optimizer=optimizer,
            collator=collator,
            checkpointer=checkpointer,
            progress=progress,
        )
        scratch.mark_training(scratch.path())
        eval_loss = loop.run()
        loop.feed.close()
        weights = export.gather(network.model, source, recipe, world)
        world.part()
        if not world.leads:
            return None
        assert examples is not None  # noqa: S101 - rank 0 has read them
        origin = self._lineage(data, loop, eval_loss)
        with self._interruptible(checkpointer, loop.progress.step):
            result = deliver(
                origin,
                self.tracker.run_id,
                scratch.path() / "export",
                lambda folder: export.write(
                    folder,
                    model=network.model,
                    state=weights,
                    tokenizer=tokenizer,
                    source=source,
                    base=fetched.origin,
                    lineage=origin,
                    examples=examples,
                ),
                fetched.origin,
                say=self.world.say,
            )
        return TerminationMessage(
            train=result, checkpoint_step=checkpointer.published if checkpointer is not None else None
        )

    def _read_examples(self, data: corpus.Corpus) -> signature.Examples:
        """Examples of what the served model is asked."""
        prompt = signature.name_prompt(self.recipe, data.columns)
        return signature.examples(data.splits, data.columns, prompt)

    def _check_delivery(self) -> None:
        """Hours before the model is written: whether it can be."""
        folder, run_id = output.folder_of(self.recipe), self.tracker.run_id
        if folder is not None:
            folder.claim()
        if self.recipe.register_ is not None and run_id is not None:
            upload.check(self.recipe.register_.upload, run_id)
            upload.choose(self.recipe.register_.upload)

    def _checkpointer(self) -> Checkpointer | None:
        if self.recipe.checkpoint is None:
            return None
        return Checkpointer(
            self.recipe,
            self.world,
            on_published=self._log_published,
            on_failed=lambda _step, sentence: self.tracker.tags({contract.TAG_CHECKPOINT_ERROR: sentence}),
        )

    def _begin(
        self, data: corpus.Corpus, checkpointer: Checkpointer | None, resumed: Progress | None
    ) -> Progress:
        """The progress that the attempt begins with, on the data that it has read."""
        progress = replace(
            resumed or Progress(), data_version=data.splits.version, day=str(self.recipe.job.created)
        )
        if checkpointer is None:
            return progress
        return checkpointer.begin_on(
            progress,
            examples=data.train.digest,
            eval_data=lineage.eval_data(self.recipe, data.validation.split if data.validation else None),
            max_steps=data.plan.max_steps,
        )

    def _kept_reference(self, checkpointer: Checkpointer | None, network: Network) -> KeptReference | None:
        if checkpointer is None or not network.objective.has_reference:
            return None
        place = newest.resume_place(self.recipe)
        other = place[0] if place is not None else None
        return KeptReference(checkpointer.folder, continuation.digest(self.recipe), self.world, other)

    def _log_published(self, step: int) -> None:
        self.tracker.metrics(step, {contract.METRIC_CHECKPOINT_STEP: step})
        self.tracker.tags({contract.TAG_CHECKPOINT_ERROR: ""})

    def _log_plan(self, plan: contract.MemoryPlan) -> None:
        self.tracker.metrics(0, {contract.METRIC_PLAN_MEMORY: plan.memory_bytes})
        self.tracker.tags({contract.TAG_PLAN: plan.model_dump_json(exclude_none=True)})

    def _load_corpus(self, tokenizer: PreTrainedTokenizerBase, resumed: Progress | None) -> corpus.Corpus:
        return corpus.load(
            self.recipe,
            tokenizer,
            self.world,
            scratch.path() / "tokens",
            version=resumed.data_version if resumed is not None else None,
            on_counts=lambda counts: self.tracker.metrics(0, counts),
        )

    def _describe(self, data: corpus.Corpus, progress: Progress) -> None:
        """Print what is about to run, and log it to the MLflow run."""
        recipe, splits = self.recipe, data.splits
        ranks = "rank" if self.world.size == 1 else "ranks"
        self.world.say(f"{data.summary(recipe)} on {self.world.size} {ranks}")
        eval_data = lineage.eval_data(recipe, data.validation.split if data.validation is not None else None)
        tags = {
            **lineage.source_tags(recipe, splits, eval_data, progress.resumed_from),
            **lineage.preparation_tags(recipe),
            **device.tags(self.world.device),
            contract.TAG_ATTEMPT: os.environ.get("FINETUNE_ATTEMPT", "1"),
        }
        self.tracker.describe(lineage.run_params(recipe, data, progress.resumed_from), tags)
        self.tracker.dataset(
            splits.path or splits.train or "",
            name=recipe.job.name,
            version=splits.version,
            # NB: MLflow's Delta source omits version 0, so the digest names the version too.
            digest=f"{len(data.train)}-examples-{data.tokens}-tokens"
            if splits.version is None
            else f"version-{splits.version}",
        )
        for read in lineage.sources_read(recipe):
            if read.version is not None:
                self.tracker.dataset(
                    read.source.address,
                    # NB: MLflow takes datasets with the same name and digest for one.
                    name=read.source.address,
                    version=read.version,
                    digest=f"version-{read.version}",
                    use="source",
                )

    def _prepare(
        self,
        data: corpus.Corpus,
        network: Network,
        collator: Collator,
        resumed: Progress | None,
        kept: KeptReference | None,
    ) -> corpus.Corpus:
        """Let the objective compute what it needs of the examples that are still to come, unless an attempt has kept it."""
        training = self.recipe.training
        batch_size = training.per_device_eval_batch_size or training.per_device_batch_size

        def prepared(examples: Examples) -> Split:
            found = kept.found(examples) if kept is not None else None
            if found is not None:
                return found
            split = network.objective.prepare(network, examples, collator, batch_size)
            if kept is not None:
                kept.keep(split)
            return split

        rest = Examples(data.train, data.plan.rest(resumed.step if resumed else 0))
        return data.with_splits(prepared(rest), prepared(data.validation) if data.validation else None)

    def _loop(
        self,
        *,
        data: corpus.Corpus,
        network: Network,
        optimizer: Optimizer,
        collator: Collator,
        checkpointer: Checkpointer | None,
        progress: Progress,
    ) -> Loop:
        training = self.recipe.training
        return Loop(
            world=self.world,
            network=network,
            optimizer=optimizer,
            feed=Feed(collator, data.train, data.plan, training.per_device_batch_size),
            evaluator=Evaluator(self.world, network, collator, data.validation, training),
            reporter=Reporter(
                world=self.world,
                network=network,
                tracker=self.tracker,
                max_steps=data.plan.max_steps,
                log_steps=training.log_every_steps,
                progress=progress,
                started=self.started,
            ),
            checkpointer=checkpointer,
            preemption=self.preemption,
            progress=progress,
            seed=training.seed,
            max_skipped_steps=training.max_skipped_steps,
        )

    def _lineage(self, data: corpus.Corpus, loop: Loop, eval_loss: float | None) -> lineage.Lineage:
        result = TrainResult(
            step=loop.progress.step,
            base_eval_loss=loop.progress.base_eval_loss,
            eval_loss=eval_loss,
            perplexity=None if eval_loss is None else loop.evaluator.perplexity(eval_loss),
            goodput=loop.reporter.goodput,
        )
        validation = data.validation.split if data.validation is not None else None
        used = (
            {"train": data.train} if validation is None else {"train": data.train, "validation": validation}
        )
        counts = {name: lineage.Counts.of(split) for name, split in used.items()}
        eval_data = lineage.eval_data(self.recipe, validation)
        return lineage.Lineage(
            self.recipe,
            data.splits,
            result,
            counts,
            eval_data,
            loop.weights_step,
            resumed_from=loop.progress.resumed_from,
        )

    def _interruptible(self, checkpointer: Checkpointer | None, step: int) -> AbstractContextManager[object]:
        """End the delivery at once on SIGTERM, where the next attempt can repeat it from the last checkpoint."""
        if checkpointer is None or checkpointer.published != step:
            return nullcontext()
        self.preemption.checkpoint_step = step
        return self.preemption.interrupting(
            f"stopped by SIGTERM after the last step, {step}, before the model was delivered"
        )


if __name__ == "__main__":
    sys.exit(main())
