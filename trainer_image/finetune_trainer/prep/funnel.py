"""The steps from rows to examples as one lazy Spark plan, and what each step drops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from finetune_trainer.examples.columns import find_table_columns
from finetune_trainer.examples.token_columns import token_columns
from finetune_trainer.prep import totals
from finetune_trainer.prep.counts import Counts
from finetune_trainer.prep.plan import LABEL, MARGIN
from finetune_trainer.prep.report import lengths
from finetune_trainer.prep.source import inference_table
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.counter import Counter
from finetune_trainer.prep.spark.keep import keep
from finetune_trainer.prep.spark.progress import EVALUATION_SETS, NEAR_DUPLICATES, TOKENS
from finetune_trainer.prep.steps import (
    conversations,
    decontaminate,
    example_steps,
    language,
    near,
    redact,
    samples,
    split,
    steps,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack

    from pyspark.sql import Column, DataFrame

    from finetune_crds.prepare import Prepare
    from finetune_crds.recipe import Recipe
    from finetune_trainer.examples.token_columns import TokenColumns
    from finetune_trainer.examples.tokenizer import Loaded
    from finetune_trainer.prep.plan import Plan
    from finetune_trainer.prep.spark.progress import Progress
    from finetune_trainer.prep.steps.decontaminate import EvaluationSet

# The count of rows with weights, see `Counts.weighed`.
_WEIGHED = "with weights"
# Places in the Spark plan, in order, where a `Counter` counts all rows ("all") and rows under conditions.
_FILTERED = "filtered"  # the filters have marked the rows that they drop
_FOREIGN = "foreign"  # examples in other languages are marked
_REDACTED = "redacted"
_CLEAN = "clean"  # without the examples of evaluation sets
_UNIQUE = "unique"  # without exact duplicates
_RENDERED = "rendered"  # with token ids
_SHORT = "short"  # without examples longer than maxTokens
_SPLIT = "split"  # the rows of the table, counted without a `Counter`


def _no_rows(_: int) -> int:
    return 0


@dataclass(frozen=True)
class Step:
    """A step from rows to examples.

    NB: `counter` and `sample` read what the Spark plan counted, so it must have run.

    Attributes:
        name: the name of the step in the result and in the report; None if the step drops no rows.
        apply: adds the step to the Spark plan.
        counter: returns how many rows the step dropped; the argument is the number of rows that reached the step.
        sample: returns the beginnings of some rows that the step dropped.
    """

    name: str | None
    apply: Callable[[DataFrame], DataFrame]
    counter: Callable[[int], int] = _no_rows
    sample: Callable[[], list[str]] = list


class Funnel:
    """The steps of a preparation, in order.

    Args:
        recipe: names the columns of an example.
        plan: the preparation that the recipe requests.
        evaluation: evaluation sets; examples that share words with them are dropped.
        progress: shows which step runs.
        kept_frames: when it closes, it releases the frames that the funnel stored on disk.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        tokenizer: Loaded,
        evaluation: list[EvaluationSet],
        *,
        progress: Progress,
        kept_frames: ExitStack,
    ) -> None:
        self._recipe, self._plan, self._tokenizer = recipe, plan, tokenizer
        self._evaluation = evaluation
        self._progress, self._kept_frames = progress, kept_frames
        self._columns = find_table_columns(recipe.data)
        self._token_columns = token_columns(self._columns)
        # How many dropped rows the report shows for each step. If the recipe redacts values, a step before the redaction shows none:
        # its rows still have the values.
        self._sample_count = plan.prepare.report_samples
        self._source_sample_count = 0 if plan.prepare.redact else self._sample_count
        self._counters: dict[str, Counter] = {}
        self._observed: dict[str, dict[str, Any]] = {}
        self._shared: decontaminate.Shared | None = None
        self._near: near.Clusters | None = None
        # The number of the Spark plan's first job, and Spark's failures before it; None if Spark does not report them.
        self._first_job = 0
        self._failures: int | None = None
        self._steps = [*self._list_steps()]

    def _list_steps(self) -> Iterator[Step]:
        """Yield the steps that the recipe requests, in order."""
        prepare = self._plan.prepare
        sample_count, source_sample_count = self._sample_count, self._source_sample_count
        yield Step(None, self._flag)
        for name in steps.list_filters(self._plan):
            yield Step(
                name,
                _keep_flagged,
                partial(self._count, _FILTERED, name),
                partial(self._sample, _FILTERED, name, source_sample_count),
            )
        yield Step(None, self._drop_flagged)
        if prepare.languages:
            yield Step(
                "language",
                self._drop_foreign,
                partial(self._count, _FOREIGN, "foreign"),
                partial(self._sample, _FOREIGN, "language", source_sample_count),
            )
        yield Step(None, self._identify)
        if self._evaluation:
            yield Step(
                "decontaminate",
                self._decontaminate,
                partial(self._count_missing, _CLEAN),
                lambda: self._shared.samples if self._shared else [],
            )
        if prepare.dedupe.exact:
            yield Step(
                "dedupe",
                self._drop_duplicates,
                partial(self._count_missing, _UNIQUE),
                partial(self._sample, _UNIQUE, "dedupe", sample_count),
            )
        if prepare.dedupe.near is not None:
            yield Step("near", self._drop_near_duplicates, self._count_near_duplicates, self._sample_pairs)
        yield Step(None, self._add_tokens)
        if prepare.on_template_error == "Drop":
            yield Step(
                "onTemplateError",
                self._drop_template_errors,
                partial(self._count, _RENDERED, "refused"),
                partial(self._sample, _RENDERED, "onTemplateError", sample_count),
            )
        if prepare.max_tokens is not None:
            yield Step(
                "maxTokens",
                self._drop_long,
                partial(self._count_missing, _SHORT),
                # The dropped rows are still there when _RENDERED is counted.
                partial(self._sample, _RENDERED, "maxTokens", sample_count),
            )
        yield Step(None, self._watch_learned)
        if prepare.limit is not None:
            yield Step("limit", self._limit, partial(self._count_missing, _SPLIT))
        yield Step(None, self._split)

    def apply(self, frame: DataFrame) -> DataFrame:
        """Return the Spark plan of all steps; its columns are `id`, the example's columns, its token ids, `tokens` and `split`.

        The searches for near duplicates and for examples of evaluation sets run now, the other steps later.
        """
        self._first_job = session.find_next_job(frame.sparkSession)
        self._failures = session.count_failures(frame.sparkSession, self._first_job)
        for step in self._steps:
            frame = step.apply(frame)
        return frame

    def count(self, prepared: DataFrame) -> Counts:
        """Run the Spark plan, and count kept and dropped rows."""
        prepare, form = self._plan.prepare, self._plan.form
        table = totals.count_rows(prepared, is_mix=bool(self._plan.source.sources))
        self._read_counters(prepared)
        # The last place needs no counter: its rows are the rows of the splits.
        self._observed[_SPLIT] = {"all": sum(table.rows.values())}
        filtered = self._observed[_FILTERED]
        redacted = self._observed.get(_REDACTED, {})
        return Counts(
            examples=filtered["all"],
            dropped=self._count_dropped(),
            rows=table.rows,
            tokens=table.tokens,
            sources=table.sources,
            redacted={kind: redacted[kind] for kind in prepare.redact} if prepare.redact else None,
            shared=self._shared.examples if self._shared else {},
            lengths=(lengths.counts(self._observed[_RENDERED]), table.lengths),
            near=self._near,
            samples={step.name: texts for step in self._steps if step.name and (texts := step.sample())},
            weighed=filtered[_WEIGHED] if form.weight else None,
            learned=int(self._observed[_SHORT]["learned"]),
        )

    def _read_counters(self, prepared: DataFrame) -> None:
        failures = session.count_failures(prepared.sparkSession, self._first_job)
        # A task that runs twice counts its rows twice, see `Counter`.
        again = failures is None or failures != self._failures
        if again:
            print("Spark may have run some tasks twice: counting the rows again", flush=True)
        self._observed = {place: counter.read(again=again) for place, counter in self._counters.items()}

    def _count_dropped(self) -> dict[str, int]:
        """Count what each step dropped, in order."""
        dropped: dict[str, int] = {}
        remaining = self._observed[_FILTERED]["all"]
        for step in self._steps:
            if step.name is not None:
                dropped[step.name] = step.counter(remaining)
                remaining -= dropped[step.name]
        return dropped

    def _watch(self, place: str, frame: DataFrame, **aggregates: Column) -> DataFrame:
        """Count the rows of a frame when the Spark plan runs."""
        self._counters[place] = Counter(place)
        return self._counters[place].watch(frame, **aggregates)

    def _count(self, place: str, name: str, _: int) -> int:
        """Return the number that the counter of a place has under `name`; the number of rows that reach the step is not used."""
        return int(self._observed[place][name])

    def _count_missing(self, place: str, rows: int) -> int:
        """Return how many of the rows did not reach a place."""
        return rows - int(self._observed[place]["all"])

    def _sample(self, place: str, name: str, number: int) -> list[str]:
        return samples.read_samples(name, number, self._observed[place])

    def _flag(self, frame: DataFrame) -> DataFrame:
        """Mark each row that a filter drops with the name of the filter."""
        form = self._plan.form
        frame = example_steps.flag_rows(frame, self._plan)
        dropped_by, text = sf.col(steps.DROPPED_BY), sf.concat_ws("\n", *steps.texts(form))
        if self._plan.source.feedback:
            # A row that is left out has no example.
            text = sf.when(sf.col(inference_table.LEFT_OUT).isNull(), text).otherwise(
                sf.col(inference_table.LEFT_OUT_TEXT)
            )
        aggregates = {}
        for name in steps.list_filters(self._plan):
            aggregates[name] = sf.count_if(dropped_by == name)
            aggregates |= samples.sample_aggregates(name, self._source_sample_count, text, dropped_by == name)
        if form.weight:
            # Only the conversation in data.columns.messages has weights.
            (column,) = form.spoken
            aggregates[_WEIGHED] = sf.count_if(conversations.has_weights(column))
        return self._watch(_FILTERED, frame, **aggregates)

    def _drop_flagged(self, frame: DataFrame) -> DataFrame:
        return steps.select_passed(frame, self._plan)

    def _drop_foreign(self, frame: DataFrame) -> DataFrame:
        """Drop examples in other languages."""
        text, is_foreign = example_steps.join_spoken_texts(self._plan), sf.col(language.FOREIGN)
        frame = language.with_foreign(frame, text, self._plan.prepare.languages or [])
        aggregates = samples.sample_aggregates("language", self._source_sample_count, text, is_foreign)
        frame = self._watch(_FOREIGN, frame, foreign=sf.count_if(is_foreign), **aggregates)
        return frame.where(~is_foreign).drop(language.FOREIGN)

    def _identify(self, frame: DataFrame) -> DataFrame:
        """Turn rows into examples: redact their text, render templates, and add the columns that identify an example."""
        prepare = self._plan.prepare
        frame = example_steps.redact_texts(frame, self._plan)
        if prepare.redact:
            frame = self._watch(_REDACTED, frame, **redact.totals(prepare.redact))
        return example_steps.render(frame, self._plan)

    def _decontaminate(self, frame: DataFrame) -> DataFrame:
        """Drop examples that share words with an evaluation set."""
        self._progress.step(EVALUATION_SETS)
        frame = keep(frame, self._kept_frames)
        frame, self._shared = decontaminate.remove_contaminated(
            frame, self._evaluation, self._plan.prepare, self._kept_frames
        )
        return self._watch(_CLEAN, frame)

    def _drop_duplicates(self, frame: DataFrame) -> DataFrame:
        frame = steps.drop_duplicates(frame)
        text, has_copies = steps.display_text(self._plan.form), sf.col(steps.COPIES) > 1
        aggregates = samples.sample_aggregates("dedupe", self._sample_count, text, has_copies)
        return self._watch(_UNIQUE, frame, **aggregates).drop(steps.COPIES)

    def _drop_near_duplicates(self, frame: DataFrame) -> DataFrame:
        prepare = self._plan.prepare
        assert prepare.dedupe.near is not None  # noqa: S101 - the step is requested
        self._progress.step(NEAR_DUPLICATES)
        frame = keep(frame, self._kept_frames)
        # A sample shows both texts of a pair, each with half of the characters.
        characters = samples.CHARACTERS // 2 if self._sample_count else 0
        source_column = steps.SOURCE if self._plan.source.sources else None
        frame, self._near = near.remove_near_duplicates(
            frame, prepare.dedupe.near, self._kept_frames, characters, source_column
        )
        print(near.describe(self._near), flush=True)
        return frame

    def _count_near_duplicates(self, _: int) -> int:
        return self._near.dropped if self._near else 0

    def _sample_pairs(self) -> list[str]:
        pairs = self._near.pairs[: self._sample_count] if self._near else []
        return [near.describe_pair(pair) for pair in pairs]

    def _add_tokens(self, frame: DataFrame) -> DataFrame:
        """Add the token ids of examples, and count their lengths."""
        prepare, recipe = self._plan.prepare, self._recipe
        self._progress.step(TOKENS)
        frame = tokens.with_tokens(
            frame,
            recipe.model,
            self._tokenizer,
            self._columns,
            recipe.objective,
            day=recipe.job.created,
            on_template_error=prepare.on_template_error,
        )
        length = sf.col(steps.TOKENS)
        text = steps.display_text(self._plan.form)
        aggregates = {"refused": sf.count_if(length.isNull()), **lengths.bins(length)}
        if prepare.on_template_error == "Drop":
            aggregates |= samples.sample_aggregates(
                "onTemplateError", self._sample_count, text, length.isNull()
            )
        if prepare.max_tokens is not None:
            aggregates |= samples.sample_aggregates("maxTokens", self._sample_count, text, _is_long(prepare))
        return self._watch(_RENDERED, frame, **aggregates)

    def _drop_template_errors(self, frame: DataFrame) -> DataFrame:
        """Drop examples that a template refuses: their length is null."""
        return frame.where(sf.col(steps.TOKENS).isNotNull())

    def _drop_long(self, frame: DataFrame) -> DataFrame:
        return frame.where(~_is_long(self._plan.prepare))

    def _watch_learned(self, frame: DataFrame) -> DataFrame:
        return self._watch(_SHORT, frame, learned=sf.count_if(_is_learned(self._token_columns)))

    def _limit(self, frame: DataFrame) -> DataFrame:
        prepare = self._plan.prepare
        return steps.limit_rows(frame, prepare.limit, prepare.split_ratios.seed)

    def _split(self, frame: DataFrame) -> DataFrame:
        """Add the split, and select the columns of the table."""
        plan = self._plan
        frame = split.with_split(frame, plan.prepare.split_ratios)
        source_column = [steps.SOURCE] if plan.source.sources else []
        label = [LABEL] if plan.form.label else []
        margin = [MARGIN] if plan.form.margin else []
        ids = [name for document in self._token_columns for name in document]
        return frame.select(
            steps.ID, *plan.form.columns, *label, *margin, *source_column, *ids, steps.TOKENS, steps.SPLIT
        )


def _keep_flagged(frame: DataFrame) -> DataFrame:
    """Change nothing: `Funnel._drop_flagged` drops the rows of all filters at once."""
    return frame


def _is_long(prepare: Prepare) -> Column:
    return sf.col(steps.TOKENS) > prepare.max_tokens


def _is_learned(documents: Sequence[TokenColumns]) -> Column:
    """Return whether the loss covers a token of an example. Without a loss mask, it covers all tokens."""
    return reduce(
        or_,
        (
            sf.coalesce(sf.exists(document.loss_mask, lambda is_target: is_target), sf.lit(True))
            for document in documents
        ),
    )
