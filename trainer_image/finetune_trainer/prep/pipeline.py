"""The preparation, from source to table."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from finetune_crds.contract import PrepResult
from finetune_crds.status import SplitCounts
from finetune_crds.status_parts import SourceRows
from finetune_trainer import artifacts, columns
from finetune_trainer.cache import Cache
from finetune_trainer.outcome import DataError
from finetune_trainer.prep import errors, keep, mix, near, output, progress, session, source, steps, tokens
from finetune_trainer.prep.counter import Counter
from finetune_trainer.prep.plan import plan as planned
from finetune_trainer.prep.progress import Progress, SparkTasks
from finetune_trainer.tokenizer import load_tokenizer
from finetune_trainer.track import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.data import Columns
    from finetune_crds.recipe import Recipe
    from finetune_trainer.prep.plan import Plan, Request


# What the run misses of a preparation is a last percent, for which training does not wait.
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Counts:
    """Counts of kept and dropped rows.

    examples: rows of the source. dropped: by step, in order. rows, tokens: of each split. sources: rows by source of a mix.
    """

    examples: int
    dropped: dict[str, int]
    rows: dict[str, int]
    tokens: dict[str, int]
    sources: dict[str, int] = field(default_factory=dict)


def run(recipe: Recipe, asked: Request) -> PrepResult:
    """Run the preparation of a recipe in a new Spark session.

    Raises:
        RecipeRefusedError: the recipe, its filter, its templates or its tokenizer are wrong.
        DataError: the source or a column is missing, or too little is left.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID")
    with (
        fetched_tokenizer(recipe) as tokenizer,
        Tracker(run_id, patience=_PATIENCE_SECONDS) as tracker,
        _spark(asked) as spark,
    ):
        told = Progress(tracker, SparkTasks(spark.sparkContext))
        with told.running():
            return prepare(spark, recipe, asked, tokenizer, told)


def prepare(
    spark: SparkSession, recipe: Recipe, asked: Request, tokenizer: Path, told: Progress
) -> PrepResult:
    """Write the table of a recipe, or find the version that this job already wrote.

    Args:
        tokenizer: folder with the model's tokenizer.
        told: learns which step runs.
    """
    told.step(progress.READING)
    with errors.telling(asked), tempfile.TemporaryDirectory(prefix="finetune-source-") as scratch:
        earlier = output.find(spark, recipe, asked.prepare.output)
        if earlier is not None:
            say(
                f"{earlier.path} version {earlier.version} was made by this job before: nothing is written twice"
            )
        result = earlier or _make(
            _corpus(spark, recipe, asked, Path(scratch)), recipe, asked, tokenizer, told
        )
    report(result)
    return result


@dataclass(frozen=True)
class Corpus:
    """The rows to prepare: of one source, or of the sources of a mix, each as it was read.

    columns: those that hold an example, named by the recipe or found.
    """

    frame: DataFrame
    columns: Columns
    read: list[source.Corpus]


def _corpus(spark: SparkSession, recipe: Recipe, asked: Request, scratch: Path) -> Corpus:
    """Read the source, or the sources of a mix, and check that they have the columns that the recipe names."""
    if asked.source.sources is None:
        one = source.read(spark, asked.source, scratch)
        say(f"source {asked.source_name}{one.at}")
        columns = recipe.data.columns or _found(one.frame, recipe, asked, asked.source_name)
        source.check(one.frame, planned(_with_columns(recipe, columns)), asked.source_name)
        return Corpus(one.frame, columns, [one])
    parts, read = [], []
    for part in asked.source.sources:
        made = source.read(spark, part, scratch / part.name, f"data.source.sources[{part.name}]")
        say(f"source {part.name}: {part.address}{made.at}")
        columns = recipe.data.columns or _found(made.frame, recipe, asked, part.address)
        parts.append(mix.Part(part, made.frame, columns))
        read.append(made)
    parts, columns = mix.agreed(parts, asked.templates)
    plan = planned(_with_columns(recipe, columns))
    for checked in parts:
        source.check(checked.frame, plan, checked.source.address)
    return Corpus(mix.mixed(parts, plan.form, plan.prepare.split_ratios.seed), columns, read)


def _make(corpus: Corpus, recipe: Recipe, asked: Request, tokenizer: Path, told: Progress) -> PrepResult:
    plan = planned(_with_columns(recipe, corpus.columns))
    with ExitStack() as held:
        seen = Observed(held, told)
        prepared = examples(corpus.frame, recipe, plan, tokenizer, seen)
        prepared = seen.keep(prepared, StorageLevel.MEMORY_AND_DISK)
        found = counts(prepared, plan, seen)
        check(found, plan)
        result = PrepResult(
            rows=SplitCounts(**found.rows),
            tokens=SplitCounts(**found.tokens),
            path=plan.prepare.output,
            version=0,
            **_versions(corpus, asked, found),
            dropped=found.dropped,
            columns=corpus.columns,
        )
        told.step(progress.WRITING)
        say(f"writing {plan.prepare.output}")
        return output.commit(prepared, recipe, result)


def _versions(corpus: Corpus, asked: Request, found: Counts) -> dict[str, Any]:
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
    source.require(frame, asked.templates, where)
    dpo = recipe.objective.type == "DPO"
    found = columns.find(source.schema(frame), where, dpo=dpo, templates=asked.templates)
    say(f"columns {columns.described(found)}")
    return found


def _with_columns(recipe: Recipe, used: Columns) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": used})})


class Observed:
    """Row counts at three places of the plan.

    near: the near duplicates, where they are removed. held: ends the frames that are kept. told: learns which step runs.
    """

    def __init__(self, held: ExitStack, told: Progress) -> None:
        self.held = held
        self.told = told
        self.near: near.Clusters | None = None
        self.filtered, self.unique, self.short = map(Counter, ("filtered", "unique", "short"))

    def keep(self, frame: DataFrame, level: StorageLevel) -> DataFrame:
        """Keep a frame that is read more than once."""
        return keep.keep(frame, level, self.held)


def examples(frame: DataFrame, recipe: Recipe, plan: Plan, tokenizer: Path, seen: Observed) -> DataFrame:
    """The plan of the whole preparation: `id`, the example's columns, `tokens` and `split`.

    Near duplicates are found at once; nothing else runs.
    """
    wanted = plan.prepare
    frame = steps.flagged(steps.with_conversation(frame, plan.form), plan)
    by = sf.col(steps.DROPPED_BY)
    names = steps.filter_names(wanted)
    frame = seen.filtered.watch(frame, **{name: sf.count_if(by == name) for name in names})
    frame = steps.identified(frame, plan)
    if wanted.dedupe.exact:
        frame = steps.without_duplicates(frame)
    frame = seen.unique.watch(frame)
    if wanted.dedupe.near:
        seen.told.step(progress.NEAR_DUPLICATES)
        frame = seen.keep(frame, StorageLevel.DISK_ONLY)
        frame, seen.near = near.removed(frame, wanted.dedupe.near, seen.held)
        say(near.described(seen.near))
    seen.told.step(progress.TOKENS)
    frame = tokens.with_tokens(frame, recipe.model, tokenizer, plan.form.columns)
    if wanted.max_tokens is not None:
        frame = frame.where(sf.col(steps.TOKENS) <= wanted.max_tokens)
    frame = seen.short.watch(frame)
    frame = steps.with_split(
        steps.limited(frame, wanted.limit, wanted.split_ratios.seed), wanted.split_ratios
    )
    origin = [steps.SOURCE] if plan.source.sources else []
    return frame.select(steps.ID, *plan.form.columns, *origin, steps.TOKENS, steps.SPLIT)


def counts(prepared: DataFrame, plan: Plan, seen: Observed) -> Counts:
    """Run the plan, and count kept and dropped rows."""
    totals = prepared.groupBy(steps.SPLIT).agg(
        sf.count(sf.lit(1)).alias("rows"), sf.sum(steps.TOKENS).alias("tokens")
    )
    splits = {row[steps.SPLIT]: row for row in totals.collect()}
    origins = prepared.groupBy(steps.SOURCE).count().collect() if plan.source.sources else []
    again = session.may_have_lost_executors(prepared.sparkSession)
    if again:
        say("Spark lost an executor, or does not say whether it did: counting the rows again")
    filtered = seen.filtered.read(again=again)
    unique, short = seen.unique.read(again=again)["all"], seen.short.read(again=again)["all"]
    wanted = plan.prepare
    dropped = {name: filtered[name] for name in steps.filter_names(wanted)}
    passed = filtered["all"] - sum(dropped.values())
    rows = {name: row["rows"] for name, row in splits.items()}
    if wanted.dedupe.exact:
        dropped["dedupe"] = passed - unique
    if seen.near:
        dropped["near"] = seen.near.dropped
        unique -= seen.near.dropped
    if wanted.max_tokens is not None:
        dropped["maxTokens"] = unique - short
    if wanted.limit is not None:
        dropped["limit"] = short - sum(rows.values())
    held = {name: row["tokens"] for name, row in splits.items()}
    return Counts(filtered["all"], dropped, rows, held, {row[steps.SOURCE]: row["count"] for row in origins})


def check(found: Counts, plan: Plan) -> None:
    """Check that training examples are left.

    Raises:
        DataError: no rows are left, or none for the training or validation split.
    """
    left = sum(found.rows.values())
    if not found.examples:
        raise DataError("NoRows", f"{plan.source_name} has no rows: check what was written to it")
    if not left:
        losses = ", ".join(f"{name} dropped {number}" for name, number in found.dropped.items() if number)
        raise DataError(
            "NoRowsLeft",
            f"none of the {found.examples} rows of {plan.source_name} is left: {losses}; loosen data.prepare",
        )
    for name in ("train", "validation"):
        ratio = getattr(plan.prepare.split_ratios, name)
        if ratio > 0 and not found.rows.get(name):
            raise DataError(
                "EmptySplit",
                f"none of the {left} examples fell into the {name} split, whose ratio is {ratio:g}: prepare more "
                f"examples or raise data.prepare.splitRatios.{name}",
            )


@contextmanager
def fetched_tokenizer(recipe: Recipe) -> Iterator[Path]:
    """Fetch the model's tokenizer, check that it loads, and return its folder."""
    model = recipe.model
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
        found = artifacts.fetch_tokenizer(
            model.base, Path(folder), revision=model.revision, cache=Cache.of(model)
        )
        load_tokenizer(model, found)
        say(f"tokenizer of {model.base}")
        yield found


@contextmanager
def _spark(asked: Request) -> Iterator[SparkSession]:
    spark = session.start(asked.prepare.spark)
    say(f"Spark {spark.version} on {spark.sparkContext.defaultParallelism} cores")
    try:
        yield spark
    finally:
        spark.stop()


def report(result: PrepResult) -> None:
    """Print the rows after each step, and the sizes of the splits."""
    rows, held = result.rows.to_json(), result.tokens.to_json()
    left = sum(rows.values()) + sum(result.dropped.values())
    say(f"{'step':<12} {'dropped':>10} {'left':>10}")
    say(f"{'source':<12} {'':>10} {left:>10,}")
    for name, number in result.dropped.items():
        left -= number
        say(f"{name:<12} {number:>10,} {left:>10,}")
    say(f"{'split':<12} {'rows':>10} {'tokens':>10}")
    for name, number in rows.items():
        say(f"{name:<12} {number:>10,} {held[name]:>10,}")
    for part in result.sources or []:
        say(f"source {part.name}: {part.rows:,} rows")
    say(f"{result.path} version {result.version}")


def say(line: str) -> None:
    """Print a line of the pod's log."""
    print(line, flush=True)
