"""Runs a preparation: reads the sources, runs the steps, and writes the report and the table."""

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
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.status import SplitCounts
from finetune_crds.status_parts import SourceRows
from finetune_trainer.examples import chat_templates, columns
from finetune_trainer.examples.tokenizer import Loaded
from finetune_trainer.models import download
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod.mlflow_run import Tracker
from finetune_trainer.prep import funnel, identity, output, refused_row, spark_errors, split_tables
from finetune_trainer.prep.counts import Counts, require_examples
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.report import report
from finetune_trainer.prep.source import reader, text_files
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.keep import keep
from finetune_trainer.prep.spark.progress import READING, WRITING, Progress, Show, SparkTasks, show_in_run
from finetune_trainer.prep.steps import chat, decontaminate, example_steps, mix, near

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.data import Columns
    from finetune_crds.recipe import Recipe
    from finetune_trainer.prep.plan import Plan, Request
    from finetune_trainer.prep.steps.decontaminate import EvaluationSet


# Maximum time to wait at the end until the MLflow run has the last progress: the wait delays the start of training.
_MLFLOW_CLOSE_TIMEOUT_SECONDS = 5.0


def run(
    recipe: Recipe, request: Request, *, reports: Path | None = None, show: Show | None = None
) -> PrepResult:
    """Run the preparation of a recipe in a new Spark session.

    Args:
        reports: folder for the report, which is also logged to the MLflow run, if there is one.
        show: shows the progress. Default: in the MLflow run, if there is one.

    Raises:
        RecipeRefusedError: the recipe, its filter, its templates or its tokenizer are wrong.
        DataError: the source, a column or a field of messages is missing, or too few rows remain.
    """
    session.set_variables(request.prepare.spark)
    run_id = os.environ.get("MLFLOW_RUN_ID")
    with (
        fetch_tokenizer(recipe) as folder,
        tempfile.TemporaryDirectory(prefix="finetune-report-") as scratch,
        Tracker(run_id, patience=_MLFLOW_CLOSE_TIMEOUT_SECONDS) as tracker,
        ThreadPoolExecutor(1) as background,
    ):
        # The tokenizer is loaded while the JVM starts: each of the two takes a core for seconds.
        loading = background.submit(Loaded.of, recipe.model, folder)
        if request.prepare.spark.executor_pods:
            # The tokenizer may be refused: this must happen before Spark creates pods.
            loading.result()
        with _start_spark(request) as spark:
            tokenizer = loading.result()
            log(f"tokenizer of {recipe.model.base}")
            progress = Progress(show or partial(show_in_run, tracker), SparkTasks(spark.sparkContext))
            write = partial(report.publish, tracker=tracker, folder=reports or Path(scratch))
            with progress.running():
                # NB: the report is drawn while Spark writes the table; closing `background` waits for the report.
                publish = partial(background.submit, write)
                return prepare(spark, recipe, request, tokenizer, progress, publish=publish)


def prepare(
    spark: SparkSession,
    recipe: Recipe,
    request: Request,
    tokenizer: Loaded,
    progress: Progress,
    *,
    publish: Callable[[report.Facts], object] = lambda _: None,
) -> PrepResult:
    """Write the table of a recipe, or return a version that this job, or another job from the same data, already wrote.

    The splits of that version are also saved as the tables that the recipe names.

    Args:
        tokenizer: the tokenizer of the model.
        progress: shows which step runs.
        publish: receives what the report shows, even if too few rows remain for a table.
    """
    progress.step(READING)
    with (
        spark_errors.translate_errors(request),
        tempfile.TemporaryDirectory(prefix="finetune-source-") as scratch,
    ):
        split_tables.check(spark, request.prepare)
        versions = output.list_versions(spark, recipe, request.prepare.output)
        result = output.find_own_result(versions, recipe, request.prepare.output)
        if result is not None:
            log(
                f"{result.path} version {result.version} was already written by this job: skipping the preparation"
            )
        else:
            corpus = _read(spark, recipe, request, Path(scratch))
            # The date is part of the digest only if the chat template writes the date.
            writes_date = corpus.plan.form.has_turns and chat_templates.writes_date(tokenizer.tokenizer)
            day = recipe.job.created if writes_date else None
            digest = identity.digest(recipe, corpus.identities, tokenizer.folder, day)
            result = _find_reusable_result(spark, recipe, request, versions, digest)
            if result is None:
                _check_lines(spark, corpus)
                result = _write_table(
                    corpus, recipe, request, tokenizer, progress, digest=digest, publish=publish
                )
        for message in split_tables.save(spark, request.prepare, result):
            log(message)
    log_result(result)
    return result


def _find_reusable_result(
    spark: SparkSession, recipe: Recipe, request: Request, versions: list[output.Version], digest: str
) -> PrepResult | None:
    """Return the result of a job that wrote the same rows, if there is one and the recipe allows its use."""
    if request.prepare.reuse == "Never":
        return None
    result = output.find_reusable_result(spark, versions, recipe, request.prepare.output, digest)
    if result is not None:
        writer = f"FineTuneJob {result.written_by}" if result.written_by else "this job"
        log(
            f"{result.path} version {result.version} was already written by {writer} from the same data with the same "
            "settings: reusing it"
        )
    return result


@dataclass(frozen=True)
class Corpus:
    """The rows to prepare, of one source or of the sources of a mix.

    get_rows: returns the rows; its argument is a function that changes the rows of each source. For a mix, the call counts the rows of
        each source.
    columns: the columns of an example, which the recipe names or which were detected.
    plan: the preparation of these columns.
    sources: in the order of the recipe.
    evaluation: evaluation sets; examples that share words with them are dropped.
    """

    get_rows: Callable[[Callable[[DataFrame], DataFrame]], DataFrame]
    columns: Columns
    plan: Plan
    sources: list[reader.Corpus]
    evaluation: list[EvaluationSet] = field(default_factory=list)

    @property
    def identities(self) -> list[str]:
        """The identities of the inputs: of the sources, then of the evaluation sets."""
        return [source.identity for source in self.inputs]

    @property
    def inputs(self) -> list[reader.Corpus]:
        """The sources, then the evaluation sets."""
        return [*self.sources, *(evaluation_set.corpus for evaluation_set in self.evaluation)]


def _read(spark: SparkSession, recipe: Recipe, request: Request, scratch: Path) -> Corpus:
    """Read the source and the evaluation sets, each at one version."""
    corpus = _read_sources(spark, recipe, request, scratch)
    sets = decontaminate.read(spark, request.evaluation, scratch / "evaluation", request.prepare.catalog)
    for evaluation_set in sets:
        log(decontaminate.describe(evaluation_set))
    return replace(corpus, evaluation=sets)


def _read_sources(spark: SparkSession, recipe: Recipe, request: Request, scratch: Path) -> Corpus:
    """Read the source, or the sources of a mix, and check that they have the columns that the recipe names."""
    if request.source.sources is None:
        source = reader.read(
            spark,
            request.source,
            scratch,
            catalog=request.prepare.catalog,
            columns_type=COLUMNS_OF_OBJECTIVE.get(recipe.objective.type, "Messages"),
        )
        log(f"source {request.source_name}{source.at}")
        with text_files.checking_on_failure(spark, source.texts):
            example_columns = recipe.data.columns or _find_columns(
                source.frame, recipe, request, request.source_name
            )
            conversations = reader.find_conversations(source.frame, example_columns.message_weight)
            plan = build_plan(_complete(recipe, example_columns), conversations)
            reader.check(source.frame, plan, request.source_name)
        return Corpus(lambda change: change(source.frame), example_columns, plan, [source])
    parts, sources = [], []
    for named_source in request.source.sources:
        name, address = named_source.name, named_source.address
        source_field = f"data.source.sources[{name}]"
        source = reader.read(spark, named_source, scratch / name, source_field, request.prepare.catalog)
        log(f"source {name}: {address}{source.at}")
        with text_files.checking_on_failure(spark, source.texts):
            example_columns = recipe.data.columns or _find_columns(source.frame, recipe, request, address)
        parts.append(mix.Part(named_source, source.frame, example_columns))
        sources.append(source)
    parts, example_columns = mix.unify_columns(parts, request.templates)
    plan = build_plan(_complete(recipe, example_columns), mix.find_conversations(parts, example_columns))
    for part, source in zip(parts, sources, strict=True):
        with text_files.checking_on_failure(spark, source.texts):
            reader.check(part.frame, plan, part.source.address)

    def get_rows(change: Callable[[DataFrame], DataFrame]) -> DataFrame:
        changed_parts = [replace(part, frame=change(part.frame)) for part in parts]
        return mix.mix_parts(changed_parts, plan.form, plan.prepare.split_ratios.seed)

    return Corpus(get_rows, example_columns, plan, sources)


def _check_lines(spark: SparkSession, corpus: Corpus) -> None:
    """Check the lines of text files, which takes a pass over them.

    Raises:
        DataError: a line cannot be read.
    """
    for texts in filter(None, (source.texts for source in corpus.inputs)):
        text_files.check(spark, texts.kind, texts.paths, texts.settings)


def _write_table(
    corpus: Corpus,
    recipe: Recipe,
    request: Request,
    tokenizer: Loaded,
    progress: Progress,
    *,
    digest: str,
    publish: Callable[[report.Facts], object],
) -> PrepResult:
    """Run the steps, publish the report, and commit the table if enough rows remain."""
    plan = corpus.plan
    complete_recipe = _with_columns(recipe, corpus.columns)
    if plan.form.has_turns:
        chat.check(tokenizer.tokenizer, complete_recipe)
    with ExitStack() as kept_frames:
        steps = funnel.Funnel(
            complete_recipe, plan, tokenizer, corpus.evaluation, progress=progress, kept_frames=kept_frames
        )
        with _naming_refused_row(corpus, complete_recipe, tokenizer):
            prepared = keep(steps.apply(corpus.get_rows(_as_read)), kept_frames)
            counts = steps.count(prepared)
        publish(_collect_facts(recipe, plan, corpus, counts))
        require_examples(counts, plan)
        result = PrepResult(
            rows=SplitCounts(**counts.rows),
            tokens=SplitCounts(**counts.tokens),
            path=plan.prepare.output,
            version=0,  # `output.commit` replaces it
            **_list_versions(corpus, request, counts),
            dropped=counts.dropped,
            redacted=counts.redacted,
            warnings=counts.warnings or None,
            evaluation_sets=decontaminate.build_results(corpus.evaluation, counts.shared) or None,
            columns=corpus.columns,
            digest=digest,
        )
        progress.step(WRITING)
        log(f"writing {plan.prepare.output}")
        # NB: not `complete_recipe`: a later attempt finds the commit by the digest of the recipe that the pod was given.
        return output.commit(prepared, recipe, result)


def _as_read(frame: DataFrame) -> DataFrame:
    """Change nothing, for `Corpus.get_rows`."""
    return frame


def _naming_refused_row(corpus: Corpus, recipe: Recipe, tokenizer: Loaded) -> AbstractContextManager[None]:
    """Return `refused_row.name_refused_row` for the rows of a corpus."""

    def select_refused() -> DataFrame:
        return example_steps.select_refused(
            corpus.get_rows(refused_row.with_place), recipe, corpus.plan, tokenizer
        )

    # Only the sources of a mix have names.
    names = [part.name for part in corpus.plan.source.sources or []] or [""]
    return refused_row.name_refused_row(select_refused, dict(zip(names, corpus.sources, strict=True)))


def _collect_facts(recipe: Recipe, plan: Plan, corpus: Corpus, counts: Counts) -> report.Facts:
    """Return what the report shows."""
    parts = zip(plan.source.parts, corpus.sources, strict=True)
    return report.Facts(
        title=f"{recipe.job.namespace}/{recipe.job.name}",
        source=", ".join(f"{part.address}{source.at}" for part, source in parts),
        output=plan.prepare.output,
        examples=counts.examples,
        dropped=counts.dropped,
        rows=counts.rows,
        tokens=counts.tokens,
        lengths=counts.lengths,
        clusters=counts.near.sizes if counts.near else None,
        crowded=near.describe_crowd(counts.near.crowded) if counts.near and counts.near.crowded else "",
        pairs=counts.near.pairs if counts.near else [],
        warnings=counts.warnings,
        samples=counts.samples,
    )


def _list_versions(corpus: Corpus, request: Request, counts: Counts) -> dict[str, Any]:
    """Return the fields of the result with the version that was read; for a mix, the version and the rows of each source."""
    if request.source.sources is None:
        (source,) = corpus.sources
        return {
            "source_version": source.version,
            "source_revision": source.revision,
            "feedback_version": source.feedback_version,
        }
    parts = zip(request.source.sources, corpus.sources, strict=True)
    return {
        "sources": [
            SourceRows(
                name=part.name,
                rows=counts.sources.get(part.name, 0),
                version=source.version,
                revision=source.revision,
            )
            for part, source in parts
        ]
    }


def _find_columns(frame: DataFrame, recipe: Recipe, request: Request, where: str) -> Columns:
    """Find the columns of an example in a source's schema."""
    reader.require(frame, request.templates, where)
    objective = recipe.objective.type
    example_columns = columns.find_columns(
        reader.list_columns(frame), where, objective=objective, templates=request.templates
    )
    log(f"columns {columns.describe_columns(example_columns)}")
    return example_columns


def _complete(recipe: Recipe, example_columns: Columns) -> Recipe:
    """Return the recipe with the columns of an example.

    Raises:
        RecipeRefusedError: the columns were found in the data, and conflict with other fields.
    """
    complete_recipe = _with_columns(recipe, example_columns)
    if recipe.data.columns is None:
        from finetune_trainer.pod import spec_rules

        spec_rules.check_columns(recipe, complete_recipe)
    return complete_recipe


def _with_columns(recipe: Recipe, example_columns: Columns) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": example_columns})})


@contextmanager
def fetch_tokenizer(recipe: Recipe) -> Iterator[Path]:
    """Fetch the model's tokenizer, and return its folder."""
    model = recipe.model
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
        tokenizer_folder = download.fetch_tokenizer(
            model.base, Path(folder), revision=model.revision, cache=Cache.of(model)
        )
        yield tokenizer_folder


@contextmanager
def _start_spark(request: Request) -> Iterator[SparkSession]:
    spark = session.start(request.prepare.spark, request.prepare.catalog)
    log(f"Spark {spark.version} on {spark.sparkContext.defaultParallelism} cores")
    try:
        yield spark
    finally:
        spark.stop()


def log_result(result: PrepResult) -> None:
    """Print the rows after each step, and the sizes of the splits."""
    rows, tokens = result.rows.to_json(), result.tokens.to_json()
    remaining = sum(rows.values()) + sum(result.dropped.values())
    log(f"{'step':<14} {'dropped':>10} {'remaining':>10}")
    log(f"{'source':<14} {'':>10} {remaining:>10,}")
    for name, number in result.dropped.items():
        remaining -= number
        log(f"{name:<14} {number:>10,} {remaining:>10,}")
    for evaluation_set in result.evaluation_sets or []:
        log(f"evaluation set {evaluation_set.name}: {evaluation_set.examples:,} examples share words with it")
    for kind, number in (result.redacted or {}).items():
        log(f"redacted {number:,} {kind}")
    log(f"{'split':<14} {'rows':>10} {'tokens':>10}")
    for name, number in rows.items():
        log(f"{name:<14} {number:>10,} {tokens[name]:>10,}")
    for part in result.sources or []:
        log(f"source {part.name}: {part.rows:,} rows")
    for warning in result.warnings or []:
        log(f"warning: {warning}")
    log(f"{result.path} version {result.version}")


def log(line: str) -> None:
    """Print a line of the pod's log."""
    print(line, flush=True)
