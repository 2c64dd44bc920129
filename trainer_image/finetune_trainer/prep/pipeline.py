"""The preparation, from source to table."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from finetune_crds.contract import PrepResult
from finetune_crds.status import SplitCounts
from finetune_trainer import artifacts, columns
from finetune_trainer.cache import Cache
from finetune_trainer.outcome import DataError
from finetune_trainer.prep import errors, output, session, source, steps, tokens
from finetune_trainer.prep.counter import Counter
from finetune_trainer.prep.plan import plan as planned
from finetune_trainer.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.data import Columns
    from finetune_crds.recipe import Recipe
    from finetune_trainer.prep.plan import Plan, Request


@dataclass(frozen=True)
class Counts:
    """Counts of kept and dropped rows.

    examples: rows of the source. dropped: by step, in order. rows, tokens: of each split.
    """

    examples: int
    dropped: dict[str, int]
    rows: dict[str, int]
    tokens: dict[str, int]


def run(recipe: Recipe, asked: Request) -> PrepResult:
    """Run the preparation of a recipe in a new Spark session.

    Raises:
        RecipeRefusedError: the recipe, its filter, its templates or its tokenizer are wrong.
        DataError: the source or a column is missing, or too little is left.
    """
    with _tokenizer(recipe) as tokenizer, _spark(asked) as spark:
        return prepare(spark, recipe, asked, tokenizer)


def prepare(spark: SparkSession, recipe: Recipe, asked: Request, tokenizer: Path) -> PrepResult:
    """Write the table of a recipe, or find the version that this job already wrote.

    Args:
        tokenizer: folder with the model's tokenizer.
    """
    with errors.telling(asked):
        earlier = output.find(spark, recipe, asked.prepare.output)
        if earlier is not None:
            say(
                f"{earlier.path} version {earlier.version} was made by this job before: nothing is written twice"
            )
        result = earlier or _make(source.read(spark, asked), recipe, asked, tokenizer)
    report(result)
    return result


def _make(corpus: source.Corpus, recipe: Recipe, asked: Request, tokenizer: Path) -> PrepResult:
    at = f" version {corpus.version}" if corpus.version is not None else ""
    say(f"source {asked.source_name}{at}")
    used = recipe.data.columns or _found(corpus.frame, recipe, asked)
    plan = planned(_with_columns(recipe, used))
    source.check(corpus.frame, plan)
    seen = Observed()
    prepared = examples(corpus.frame, recipe, plan, tokenizer, seen).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        found = counts(prepared, plan, seen)
        check(found, plan)
        result = PrepResult(
            rows=SplitCounts(**found.rows),
            tokens=SplitCounts(**found.tokens),
            path=plan.prepare.output,
            version=0,
            source_version=corpus.version,
            dropped=found.dropped,
            columns=used,
        )
        say(f"writing {plan.prepare.output}")
        return output.commit(prepared, recipe, result)
    finally:
        prepared.unpersist()


def _found(frame: DataFrame, recipe: Recipe, asked: Request) -> Columns:
    """Find the columns of an example in the source's schema."""
    source.require(frame, asked.templates, asked.source_name)
    dpo = recipe.objective.type == "DPO"
    found = columns.find(source.schema(frame), asked.source_name, dpo=dpo, templates=asked.templates)
    say(f"columns {columns.described(found)}")
    return found


def _with_columns(recipe: Recipe, used: Columns) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"columns": used})})


class Observed:
    """Row counts at three places of the plan."""

    def __init__(self) -> None:
        self.filtered, self.unique, self.short = map(Counter, ("filtered", "unique", "short"))


def examples(frame: DataFrame, recipe: Recipe, plan: Plan, tokenizer: Path, seen: Observed) -> DataFrame:
    """The plan of the whole preparation: `id`, the example's columns, `tokens` and `split`."""
    wanted = plan.prepare
    frame = steps.flagged(steps.with_conversation(frame, plan.form), plan)
    by = sf.col(steps.DROPPED_BY)
    names = steps.filter_names(wanted)
    frame = seen.filtered.watch(frame, **{name: sf.count_if(by == name) for name in names})
    frame = steps.identified(frame, plan)
    if wanted.dedupe.exact:
        frame = steps.without_duplicates(frame)
    frame = seen.unique.watch(frame)
    frame = tokens.with_tokens(frame, recipe.model, tokenizer, plan.form.columns)
    if wanted.max_tokens is not None:
        frame = frame.where(sf.col(steps.TOKENS) <= wanted.max_tokens)
    frame = seen.short.watch(frame)
    frame = steps.with_split(
        steps.limited(frame, wanted.limit, wanted.split_ratios.seed), wanted.split_ratios
    )
    return frame.select(steps.ID, *plan.form.columns, steps.TOKENS, steps.SPLIT)


def counts(prepared: DataFrame, plan: Plan, seen: Observed) -> Counts:
    """Run the plan, and count kept and dropped rows."""
    totals = prepared.groupBy(steps.SPLIT).agg(
        sf.count(sf.lit(1)).alias("rows"), sf.sum(steps.TOKENS).alias("tokens")
    )
    splits = {row[steps.SPLIT]: row for row in totals.collect()}
    again = session.lost_executors(prepared.sparkSession) > 0
    if again:
        say("Spark lost an executor: counting the rows again")
    filtered = seen.filtered.read(again=again)
    unique, short = seen.unique.read(again=again)["all"], seen.short.read(again=again)["all"]
    wanted = plan.prepare
    dropped = {name: filtered[name] for name in steps.filter_names(wanted)}
    passed = filtered["all"] - sum(dropped.values())
    rows = {name: row["rows"] for name, row in splits.items()}
    if wanted.dedupe.exact:
        dropped["dedupe"] = passed - unique
    if wanted.max_tokens is not None:
        dropped["maxTokens"] = unique - short
    if wanted.limit is not None:
        dropped["limit"] = short - sum(rows.values())
    return Counts(filtered["all"], dropped, rows, {name: row["tokens"] for name, row in splits.items()})


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
def _tokenizer(recipe: Recipe) -> Iterator[Path]:
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
    say(f"{result.path} version {result.version}")


def say(line: str) -> None:
    """Print a line of the pod's log."""
    print(line, flush=True)
