"""One attempt of the training on one rank: the pipeline from the recipe to the registered version."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from typing import TYPE_CHECKING

from finetune_crds import continuation
from finetune_crds.contract import TerminationMessage, TrainResult
from finetune_trainer.examples.tokenizer import load_tokenizer, pad_id
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.sinks.feed import Sinks
from finetune_trainer.train import build, run_record
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
from finetune_trainer.train.runtime import scratch
from finetune_trainer.train.runtime.distributed import World
from finetune_trainer.train.runtime.preemption import Preemption

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.recipe import Recipe
    from finetune_trainer.models.download import Source
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.model.network.trained_network import Network


@dataclass(frozen=True)
class Inputs:
    """The base, the data and the starting point of an attempt.

    resumed: progress of the checkpoint that the attempt resumes from; None: it starts at step 0.
    progress: the progress that the attempt starts with: `resumed`, adapted to the data of this attempt, or step 0.
    """

    base: Source
    tokenizer: PreTrainedTokenizerBase
    data: corpus.Corpus
    checkpointer: Checkpointer | None
    resumed: Progress | None
    progress: Progress


@dataclass
class Run:
    """Runs the pipeline on one rank, from the recipe to the registered version."""

    recipe: Recipe
    world: World
    tracker: Tracker
    sinks: Sinks
    preemption: Preemption
    started: float
    """The start of this attempt, by the monotonic clock."""

    def train(self) -> TerminationMessage | None:
        """Load, train, evaluate, export and register; only rank 0 returns a result."""
        self._check_before_download()
        inputs = self._load_inputs()
        resumed_from = inputs.progress.resumed_from
        run_record.record_run(
            self.recipe, self.world, self.tracker, self.sinks, inputs.data, resumed_from=resumed_from
        )
        request_examples = self._read_request_examples(inputs.data)

        network, progress = self._build_network(inputs)
        optimizer = Optimizer(network, self.recipe.training, inputs.data.plan.max_steps)
        collator = Collator.of(self.recipe, self.world, pad_id(inputs.tokenizer))
        # NB: before a checkpoint is loaded: an objective may need the model as it was before its first step.
        data = self._prepare_examples(inputs, network, collator)
        self._load_checkpoint(inputs, network, optimizer)

        loop = self._build_loop(
            data=data,
            network=network,
            optimizer=optimizer,
            collator=collator,
            checkpointer=inputs.checkpointer,
            progress=progress,
        )
        scratch.mark_training(scratch.path())
        eval_loss = loop.run()
        loop.feed.close()
        weights = export.gather_weights(network.model, inputs.base.base, self.recipe, self.world)
        self.world.destroy_group()
        # Only rank 0 has the examples.
        if request_examples is None:
            return None
        model_lineage = self._build_lineage(data, loop, eval_loss)
        return self._deliver(inputs, network, weights, model_lineage, request_examples)

    def _check_before_download(self) -> None:
        """Check what needs neither data nor weights: the precision, and the destination of the model, hours before it is written."""
        self.world.agree(lambda: precision.check(self.recipe, self.world.card))
        self.world.agree(lambda: self._check_delivery() if self.world.leads else None)

    def _check_delivery(self) -> None:
        folder, run_id = output.folder_of(self.recipe), self.tracker.run_id
        if folder is not None:
            folder.claim()
        if self.recipe.register_ is not None and run_id is not None:
            upload.check(self.recipe.register_.upload, run_id)

    def _load_inputs(self) -> Inputs:
        """Fetch the base, find the checkpoint, and read the data; the first two may change the recipe."""
        world = self.world
        base = self._fetch_base()
        tokenizer = world.agree(lambda: load_tokenizer(self.recipe.model, base.tokenizer))
        checkpointer = self._build_checkpointer()
        resumed = self._find_checkpoint(checkpointer)
        data = self._load_corpus(tokenizer, checkpointer, resumed)
        # Refuse a schedule that does not fit the number of steps before minutes of loading.
        world.agree(lambda: Schedule.of(self.recipe.training, data.plan.max_steps))
        progress = self._start_progress(data, checkpointer, resumed)
        return Inputs(base, tokenizer, data, checkpointer, resumed, progress)

    def _fetch_base(self) -> Source:
        """Fetch the base; an adapter that is trained further sets the parameters of the method in the recipe."""
        base = merge.fetch(
            self.recipe.model,
            scratch.path() / "base",
            self.world,
            with_digest=export.has_external_base(self.recipe),
            check=lambda config: build.check_base(self.recipe, config, self.world),
        )
        adapter = base.adapter
        if adapter is not None:
            self.recipe = self.world.agree(lambda: continued.apply_adapter_config(self.recipe, adapter))
        return base

    def _build_checkpointer(self) -> Checkpointer | None:
        if self.recipe.checkpoint is None:
            return None
        return Checkpointer(
            self.recipe,
            self.world,
            on_published=partial(run_record.record_checkpoint, self.tracker),
            on_failed=partial(run_record.record_checkpoint_failure, self.tracker),
        )

    def _find_checkpoint(self, checkpointer: Checkpointer | None) -> Progress | None:
        """Return the progress of the checkpoint to resume from, if any."""
        resumed = checkpointer.find_newest() if checkpointer is not None else None
        if resumed is not None and resumed.day:
            # Chat templates may render the day of the job: examples keep the day of the job that wrote the checkpoint.
            self.recipe = self.recipe.on_day(date.fromisoformat(resumed.day))
        self.preemption.checkpoint_step = checkpointer.published if checkpointer is not None else None
        return resumed

    def _load_corpus(
        self, tokenizer: PreTrainedTokenizerBase, checkpointer: Checkpointer | None, resumed: Progress | None
    ) -> corpus.Corpus:
        return corpus.load(
            self.recipe,
            tokenizer,
            self.world,
            scratch.path() / "tokens",
            version=resumed.data_version if resumed is not None else None,
            table_versions=resumed.table_versions if resumed is not None else "",
            on_counts=lambda counts: self.tracker.metrics(0, counts),
            confirm=checkpointer.claim.confirm if checkpointer is not None else lambda: None,
        )

    def _start_progress(
        self, data: corpus.Corpus, checkpointer: Checkpointer | None, resumed: Progress | None
    ) -> Progress:
        """Return the progress that the attempt starts with, on the data that it reads."""
        progress = replace(
            resumed or Progress(),
            data_version=data.splits.version,
            table_versions=data.splits.versions if data.splits.tables else "",
            day=str(self.recipe.job.created),
        )
        if checkpointer is None:
            return progress
        return checkpointer.begin_on(
            progress,
            examples=data.train.digest,
            eval_data=lineage.identify_evaluation(self.recipe, data.validation_split),
            max_steps=data.plan.max_steps,
        )

    def _read_request_examples(self, data: corpus.Corpus) -> signature.Examples | None:
        """Read examples of requests to the served model, on rank 0 only."""

        def read() -> signature.Examples:
            prompt = signature.name_prompt(self.recipe, data.columns)
            return signature.read_examples(data.splits, data.columns, prompt)

        return self.world.agree(lambda: read() if self.world.leads else None)

    def _build_network(self, inputs: Inputs) -> tuple[Network, Progress]:
        """Return the network with its weights, and the progress with the results of the checks."""
        checkpointer, progress = inputs.checkpointer, inputs.progress
        check_key = probe.compute_key(self.recipe, self.world)
        verdicts: list[recomputation.Verdict] = []
        network = build.build_network(
            self.recipe,
            inputs.base.base,
            inputs.tokenizer,
            self.world,
            scratch.path() / "teacher",
            adapter_source=inputs.base if inputs.base.adapter is not None else None,
            load_initial=checkpointer.load_initial if checkpointer and inputs.resumed else None,
            on_plan=partial(run_record.record_plan, self.tracker),
            check_key=check_key,
            is_checked=progress.logits_checked == check_key,
            verdict=recomputation.Verdict.of(progress.recomputation),
            on_verdict=verdicts.append,
        )
        # Each later checkpoint has the results, so that a resumed attempt need not check again.
        verdict = asdict(verdicts[0]) if verdicts else None
        return network, replace(progress, logits_checked=check_key, recomputation=verdict)

    def _prepare_examples(self, inputs: Inputs, network: Network, collator: Collator) -> corpus.Corpus:
        """Let the objective compute what it needs for the remaining examples, unless an earlier attempt saved it."""
        data, training = inputs.data, self.recipe.training
        batch_size = training.per_device_eval_batch_size or training.per_device_batch_size
        references = self._open_references(inputs.checkpointer, network)

        def prepare(examples: Examples) -> Split:
            stored = references.load(examples) if references is not None else None
            if stored is not None:
                return stored
            split = network.objective.prepare(network, examples, collator, batch_size)
            if references is not None:
                references.save(split)
            return split

        first_step = inputs.resumed.step if inputs.resumed is not None else 0
        remaining = Examples(data.train, data.plan.sequences_from(first_step))
        return data.with_splits(prepare(remaining), prepare(data.validation) if data.validation else None)

    def _open_references(self, checkpointer: Checkpointer | None, network: Network) -> KeptReference | None:
        """Return the stored references; None if the objective has no reference, or the job has no checkpoints."""
        if checkpointer is None or not network.objective.has_reference:
            return None
        foreign_folder = None
        if (resume_from := newest.locate_resume_from(self.recipe)) is not None:
            foreign_folder, _step = resume_from
        return KeptReference(
            checkpointer.folder,
            continuation.digest(self.recipe),
            self.world,
            foreign_folder=foreign_folder,
            confirm=checkpointer.claim.confirm,
        )

    def _load_checkpoint(self, inputs: Inputs, network: Network, optimizer: Optimizer) -> None:
        """Load weights, optimizer state and loss scale from the checkpoint to resume from, if any."""
        checkpointer, resumed = inputs.checkpointer, inputs.resumed
        if checkpointer is None or resumed is None:
            return
        checkpointer.load(resumed, network.model, optimizer.parts)
        if optimizer.loss_scale is not None and resumed.loss_scale is not None:
            optimizer.loss_scale.load_state(resumed.loss_scale, resumed.good_steps)
        # `published` is None if another job wrote the checkpoint.
        of_job = "" if checkpointer.published else f" of another job, {resumed.resumed_from}"
        self.world.say(f"resuming from the checkpoint of step {resumed.step}{of_job}")

    def _build_loop(
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
                sinks=self.sinks,
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

    def _build_lineage(self, data: corpus.Corpus, loop: Loop, eval_loss: float | None) -> lineage.Lineage:
        result = TrainResult(
            step=loop.progress.step,
            base_eval_loss=loop.progress.base_eval_loss,
            eval_loss=eval_loss,
            perplexity=None if eval_loss is None else loop.evaluator.perplexity(eval_loss),
            goodput=loop.reporter.goodput,
            productive_seconds=loop.reporter.productive_seconds,
        )
        validation = data.validation_split
        counts = {"train": lineage.Counts.of(data.train)}
        if validation is not None:
            counts["validation"] = lineage.Counts.of(validation)
        return lineage.Lineage(
            self.recipe,
            data.splits,
            result,
            counts,
            eval_data=lineage.identify_eval_data(self.recipe, validation),
            weights_step=loop.weights_step,
            resumed_from=loop.progress.resumed_from,
        )

    def _deliver(
        self,
        inputs: Inputs,
        network: Network,
        weights: dict[str, torch.Tensor],
        model_lineage: lineage.Lineage,
        request_examples: signature.Examples,
    ) -> TerminationMessage:
        """Export, upload and register the model, on rank 0."""
        checkpointer, base = inputs.checkpointer, inputs.base
        with self._interruptible(checkpointer, model_lineage.result.step):
            result = deliver(
                model_lineage,
                self.tracker.run_id,
                scratch.path() / "export",
                lambda folder: export.write(
                    folder,
                    model=network.model,
                    state=weights,
                    tokenizer=inputs.tokenizer,
                    source=base.base,
                    base=base.origin,
                    lineage=model_lineage,
                    examples=request_examples,
                ),
                base.origin,
                say=self.world.say,
                confirm=partial(_confirm_delivery, checkpointer),
            )
        step = checkpointer.published if checkpointer is not None else None
        return TerminationMessage(train=result, checkpoint_step=step)

    def _interruptible(self, checkpointer: Checkpointer | None, step: int) -> AbstractContextManager[object]:
        """End the delivery at once on SIGTERM, if the next attempt can repeat it from the last checkpoint."""
        if checkpointer is None or checkpointer.published != step:
            return nullcontext()
        self.preemption.checkpoint_step = step
        return self.preemption.interrupt_on_sigterm(
            f"stopped by SIGTERM after the last step, {step}, before the model was delivered"
        )


def _confirm_delivery(checkpointer: Checkpointer | None) -> None:
    """Raise SupersededError if newer pods of the job have claimed the checkpoint folder."""
    if checkpointer is not None:
        # NB: if the storage fails, delivery goes on: output.uri and the registry have checks of their own.
        checkpointer.claim.try_to_confirm("the model is delivered anyway")
