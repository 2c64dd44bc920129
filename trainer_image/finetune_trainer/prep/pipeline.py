"""The preparation, from source to table."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_crds.contract import PrepResult
from finetune_crds.status import SplitCounts
from finetune_crds.status_parts import SourceRows
from finetune_trainer.examples import chat_templates, columns
from finetune_trainer.examples.tokenizer import Loaded
from finetune_trainer.models import download
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.prep import funnel, identity, output, spark_errors
from finetune_trainer.prep.plan import plan as planned
from finetune_trainer.prep.report import report
from finetune_trainer.prep.source import reader, text_files
from finetune_trainer.prep.spark import progress, session
from finetune_trainer.prep.spark.progress import Progress, SparkTasks
from finetune_trainer.prep.steps import chat, decontaminate, mix, near

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.data import Columns
    from finetune_crds.recipe import Recipe
    from finetune_trainer.prep.plan import Plan, Request
    from finetune_trainer.prep.steps.decontaminate import EvaluationSet


# What the run misses of a preparation is a last percent, for which training does not wait.
_PATIENCE_SECONDS = 5.0


def run(
    recipe: Recipe, asked: Request, *, reports: Path | None = None, show: progress.Show | None = None
) -> PrepResult:
    """Run the preparation of a recipe in a new Spark session.

    Args:
        reports: folder for the report. It is logged to the MLflow run, if there is one.
        show: shows the progress. Default: in the MLflow run, if there is one.

    Raises:
        RecipeRefusedError: the recipe, its filter, its templates or its tokenizer are wrong.
        DataError: the source, a column or a field of messages is missing, or too little is left.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID")
    with (
        fetched_tokenizer(recipe) as folder,
        tempfile.TemporaryDirectory(prefix="finetune-report-") as scratch,
        Tracker(run_id, patience=_PATIENCE_SECONDS) as tracker,
        ThreadPoolExecutor(1) as beside,
    ):
        # Both need a core for seconds: what loads tokenizers is imported while the JVM starts.
        loads = beside.submit(Loaded.of, recipe.model, folder)
        if asked.prepare.spark.executor_pods:
            # No pods are created for a recipe that is refused.
            loads.result()
        with _spark(asked) as spark:
            tokenizer = loads.result()
            say(f"tokenizer of {recipe.model.base}")
            told = Progress(show or partial(progress.to_run, tracker), SparkTasks(spark.sparkContext))
            write = partial(report.publish, tracker=tracker, folder=reports or Path(scratch))
            with told.running():
                # NB: the report is drawn while Spark writes the table; the end of `beside` waits for it.
                publish = partial(beside.submit, write)
                return prepare(spark, recipe, asked, tokenizer, told, publish=publish)


def prepare(
    spark: SparkSession,
    recipe: Recipe,
    asked: Request,
    tokenizer: Loaded,
    told: Progress,
    *,
    publish: Callable[[report.Facts], object] = lambda _: None,
) -> PrepResult:
    """Write the table of a recipe, or find the version that this job already wrote, or another one from the same data.

    Args:
        tokenizer: the model's.
        told: learns which step runs.
        publish: gets what a report shows, also where too little is left for a table.
    """
    told.step(progress.READING)
    with spark_errors.telling(asked), tempfile.TemporaryDirectory(prefix="finetune-source-") as scratch:
        known = output.versions(spark, recipe, asked.prepare.output)
        result = output.own(known, recipe, asked.prepare.output)
        if result is not None:
            say(
                f"{result.path} version {result.version} was made by this job before: nothing is written twice"
            )
        else:
            corpus = _read(spark, recipe, asked, Path(scratch))
            writes_date = corpus.plan.form.has_turns and chat_templates.writes_date(tokenizer.tokenizer)
            day = recipe.job.created if writes_date else None
            digest = identity.digest(recipe, corpus.identities, tokenizer.folder, day)
            result = _reused(spark, recipe, asked, known, digest)
            if result is None:
                _check_lines(spark, corpus)
                result = _make(corpus, recipe, asked, tokenizer, told, digest=digest, publish=publish)
    tell(result)
    return result


def _reused(
    spark: SparkSession, recipe: Recipe, asked: Request, known: list[output.Version], digest: str
) -> PrepResult | None:
    """The version with the same rows that another job wrote, if there is one and it may be used."""
    if asked.prepare.reuse == "Never":
        return None
    found = output.same(spark, known, recipe, asked.prepare.output, digest)
    if found is not None:
        by = f"FineTuneJob {found.written_by}" if found.written_by else "this job"
        say(
            f"{found.path} version {found.version} was written by {by} from the same data with the same settings: nothing is "
            "written"
        )
    return found


@dataclass(frozen=True)
class Corpus:
    """The rows to prepare: of one source, or of the sources of a mix, each as it was read.

    get_rows: returns the rows; of a mix, it counts those of each part. plan: the preparation, with the columns that hold an example, named by the recipe or found. evaluation: sets that examples
    may share no words with.
    """

    get_rows: Callable[[], DataFrame]
    columns: Columns
    plan: Plan
    read: list[reader.Corpus]
    evaluation: list[EvaluationSet] = field(default_factory=list)

    @property
    def identities(self) -> list[str]:
        """What was read, at its versions: the sources, then the evaluation sets."""
        return [corpus.identity for corpus in self.sources]

    @property
    def sources(self) -> list[reader.Corpus]:
        """What was read: the sources, then the evaluation sets."""
        return [*self.read, *(evaluation.corpus for evaluation in self.evaluation)]


def _read(spark: SparkSession, recipe: Recipe, asked: Request, scratch: Path) -> Corpus:
    """Read the source and the evaluation sets, each at one version."""
    corpus = _corpus(spark, recipe, asked, scratch)
    sets = decontaminate.read(spark, asked.evaluation, scratch / "evaluation", asked.prepare.catalog)
    for one in sets:
        say(decontaminate.described(one))
    return replace(corpus, evaluation=sets)


def _corpus(spark: SparkSession, recipe: Recipe, asked: Request, scratch: Path) -> Corpus:
    """Read the source, or the sources of a mix, and check that they have the columns that the recipe names."""
    if asked.source.sources is None:
        one = reader.read(spark, asked.source, scratch, catalog=asked.prepare.catalog)
        say(f"source {asked.source_name}{one.at}")
        with text_files.checking_on_failure(spark, one.texts):
            columns = recipe.data.columns or _found(one.frame, recipe, asked, asked.source_name)
            known = reader.conversations(one.frame, columns.message_weight)
            plan = planned(_with_columns(recipe, columns), known)
            reader.check(one.frame, plan, asked.source_name)
        return Corpus(lambda: one.frame, columns, plan, [one])
    parts, read = [], []
    for part in asked.source.sources:
        field = f"data.source.sources[{part.name}]"
        made = reader.read(spark, part, scratch / part.name, field, asked.prepare.catalog)
        say(f"source {part.name}: {part.address}{made.at}")
        with text_files.checking_on_failure(spark, made.texts):
            columns = recipe.data.columns or _found(made.frame, recipe, asked, part.address)
        parts.append(mix.Part(part, made.frame, columns))
        read.append(made)
    parts, columns = mix.agreed(parts, asked.templates)
    plan = planned(_with_columns(recipe, columns), mix.conversations(parts, columns))
    for checked, made in zip(parts, read, strict=True):
        with text_files.checking_on_failure(spark, made.texts):
            reader.check(checked.frame, plan, checked.source.address)
    get_rows = partial(mix.mixed, parts, plan.form, plan.prepare.split_ratios.seed)
    return Corpus(get_rows, columns, plan, read)


def _check_lines(spark: SparkSession, corpus: Corpus) -> None:
    """Check the lines of text files, which takes a pass over them.

    Raises:
        DataError: a line cannot be read.
    """
    for texts in filter(None, (read.texts for read in corpus.sources)):
        text_files.check(spark, *texts)


def _make(
    corpus: Corpus,
    recipe: Recipe,
    asked: Request,
    tokenizer: Loaded,
    told: Progress,
    *,
    digest: str,
    publish: Callable[[report.Facts], object],
) -> PrepResult:
    plan = corpus.plan
    complete = _with_columns(recipe, corpus.columns)
    if plan.form.has_turns:
        chat.check(tokenizer.tokenizer, complete)
    with ExitStack() as kept_frames:
        steps = funnel.Funnel(
            complete, plan, tokenizer, corpus.evaluation, progress=told, kept_frames=kept_frames
        )
        prepared = steps.keep(steps.apply(corpus.get_rows()))
        found = steps.count(prepared)
        publish(_facts(recipe, plan, corpus, found))
        funnel.check(found, plan)
        result = PrepResult(
            rows=SplitCounts(**found.rows),
            tokens=SplitCounts(**found.tokens),
            path=plan.prepare.output,
            version=0,
            **_versions(corpus, asked, found),
            dropped=found.dropped,
            redacted=found.redacted,
            warnings=found.warnings or None,
            evaluation_sets=decontaminate.told(corpus.evaluation, found.shared) or None,
            columns=corpus.columns,
            digest=digest,
        )
        told.step(progress.WRITING)
        say(f"writing {plan.prepare.output}")
        return output.commit(prepared, recipe, result)


def _facts(recipe: Recipe, plan: Plan, corpus: Corpus, found: funnel.Counts) -> report.Facts:
    """What the report shows."""
    read = zip(plan.source.parts, corpus.read, strict=True)
    return report.Facts(
        title=f"{recipe.job.namespace}/{recipe.job.name}",
        source=", ".join(f"{part.address}{one.at}" for part, one in read),
        output=plan.prepare.output,
        examples=found.examples,
        dropped=found.dropped,
        rows=found.rows,
        tokens=found.tokens,
        lengths=found.lengths,
        clusters=found.near.sizes if found.near else None,
        crowded=near.crowded(found.near.crowded) if found.near and found.near.crowded else "",
        pairs=found.near.pairs if found.near else [],
        warnings=found.warnings,
        samples=found.samples,
    )


def _versions(corpus: Corpus, asked: Request, found: funnel.Counts) -> dict[str, Any]:
    """What was read, as the result has it: of one source, or by source."""
    if asked.source.sources is None:
        (one,) = corpus.read
        return {"source_version": one.version, "source_revision": one.revision}
    parts = zip(asked.source.sources, corpus.read, strict=True)
    return {
        "sources": [
            SourceRows(
                name=part.name,
                rows=found.sources.get(part.name, 0),
                version=read.version,
                revision=read.revision,
            )
            for part, read in parts
        ]
    }


def _found(frame: DataFrame, recipe: Recipe, asked: Request, where: str) -> Columns:
    """Find the columns of an example in a source's schema."""
    reader.require(frame, asked.templates, where)
    objective = recipe.objective.type
    found = columns.find(reader.schema(frame), where, objective=objective, templates=asked.templates)
    say(f"columns {columns.described(found)}")
    return found


def _with_columns(recipe: Recipe, used: Columns) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": used})})


@contextmanager
def fetched_tokenizer(recipe: Recipe) -> Iterator[Path]:
    """Fetch the model's tokenizer, and return its folder."""
    model = recipe.model
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
        found = download.fetch_tokenizer(
            model.base, Path(folder), revision=model.revision, cache=Cache.of(model)
        )
        yield found


@contextmanager
def _spark(asked: Request) -> Iterator[SparkSession]:
    spark = session.start(asked.prepare.spark, asked.prepare.catalog)
    say(f"Spark {spark.version} on {spark.sparkContext.defaultParallelism} cores")
    try:
        yield spark
    finally:
        spark.stop()


def tell(result: PrepResult) -> None:
    """Print the rows after each step, and the sizes of the splits."""
    rows, held = result.rows.to_json(), result.tokens.to_json()
    left = sum(rows.values()) + sum(result.dropped.values())
    say(f"{'step':<14} {'dropped':>10} {'left':>10}")
    say(f"{'source':<14} {'':>10} {left:>10,}")
    for name, number in result.dropped.items():
        left -= number
        say(f"{name:<14} {number:>10,} {left:>10,}")
    for one in result.evaluation_sets or []:
        say(f"evaluation set {one.name}: {one.examples:,} examples share words with it")
    for kind, number in (result.redacted or {}).items():
        say(f"redacted {number:,} {kind}")
    say(f"{'split':<14} {'rows':>10} {'tokens':>10}")
    for name, number in rows.items():
        say(f"{name:<14} {number:>10,} {held[name]:>10,}")
    for part in result.sources or []:
        say(f"source {part.name}: {part.rows:,} rows")
    for warning in result.warnings or []:
        say(f"warning: {warning}")
    say(f"{result.path} version {result.version}")


def say(line: str) -> None:
    """Print a line of the pod's log."""
    print(line, flush=True)
