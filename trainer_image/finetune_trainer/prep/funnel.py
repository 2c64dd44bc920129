"""The steps from rows to examples as one plan, and what each step drops."""

from __future__ import annotations

from collections import Counter as Totals
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from finetune_trainer.examples.columns import missing_weights, of_table
from finetune_trainer.examples.documents import token_columns
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import jinja_template
from finetune_trainer.prep.plan import LABEL
from finetune_trainer.prep.report import lengths
from finetune_trainer.prep.spark import keep, progress, session
from finetune_trainer.prep.spark.counter import Counter
from finetune_trainer.prep.steps import (
    conversations,
    decontaminate,
    labels,
    language,
    near,
    redact,
    samples,
    split,
    steps,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

    from finetune_crds.cleaning import RedactKind
    from finetune_crds.prepare import Prepare
    from finetune_crds.recipe import Recipe
    from finetune_trainer.examples.documents import TokenColumns
    from finetune_trainer.examples.tokenizer import Loaded
    from finetune_trainer.prep.plan import Plan
    from finetune_trainer.prep.spark.progress import Progress
    from finetune_trainer.prep.steps.decontaminate import EvaluationSet


_WEIGHED = "with weights"


@dataclass(frozen=True)
class Counts:
    """Counts of kept and dropped rows.

    examples: rows of the source. dropped: by step, in order. rows, tokens: of each split. sources: rows by source of a mix.
    redacted: values that placeholders stand for, by kind. shared: examples that share words with each evaluation set. lengths:
    examples in each bin of `lengths`, before the limits and after. weighed: rows that have the field which
    data.columns.messageWeight names, if it names one. near: near duplicates, if they were searched. samples: of what a step dropped,
    by step.
    """

    examples: int
    dropped: dict[str, int]
    rows: dict[str, int]
    tokens: dict[str, int]
    sources: dict[str, int] = field(default_factory=dict)
    redacted: dict[RedactKind, int] | None = None
    shared: dict[str, int] = field(default_factory=dict)
    lengths: tuple[list[int], list[int]] = ([], [])
    near: near.Clusters | None = None
    weighed: int | None = None
    learned: int = 0
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """What the author should look at, a sentence each."""
        return self.near.warnings if self.near else []


class Observed:
    """Row counts at places of the plan.

    near: the near duplicates, where they are removed. shared: what shares words with evaluation sets. held: ends the frames that
    are kept. told: learns which step runs. failures: those of Spark before the plan runs; None where it cannot be asked.
    """

    def __init__(self, held: ExitStack, told: Progress, evaluation: list[EvaluationSet]) -> None:
        self.held = held
        self.told = told
        self.evaluation = evaluation
        self.shared: decontaminate.Shared | None = None
        self.near: near.Clusters | None = None
        self.failures: int | None = None
        self.filtered, self.spoken, self.redacted = map(Counter, ("filtered", "spoken", "redacted"))
        self.clean, self.unique = map(Counter, ("clean", "unique"))
        self.rendered, self.short = map(Counter, ("rendered", "short"))

    def keep(self, frame: DataFrame) -> DataFrame:
        """Keep a frame that is read more than once."""
        return keep.keep(frame, self.held)


def examples(frame: DataFrame, recipe: Recipe, plan: Plan, tokenizer: Loaded, seen: Observed) -> DataFrame:
    """The plan of the whole preparation: `id`, the example's columns, its token ids, `tokens` and `split`.

    The recipe names the columns of an example.

    Near duplicates, and examples of evaluation sets, are found at once; nothing else runs.
    """
    wanted = plan.prepare
    seen.failures = session.failures(frame.sparkSession)
    frame = steps.with_valid_text(_filtered(frame, plan, seen), plan.form)
    if wanted.redact:
        frame = redact.redacted(frame, plan.form, wanted.redact)
        frame = seen.redacted.watch(frame, **redact.totals(wanted.redact))
    frame = jinja_template.rendered(frame, plan.form.jinja, drop=wanted.unrenderable == "Drop")
    frame = steps.identified(frame, plan)
    if seen.evaluation:
        seen.told.step(progress.EVALUATION_SETS)
        frame = seen.keep(frame)
        frame, seen.shared = decontaminate.removed(frame, seen.evaluation, wanted, seen.held)
        frame = seen.clean.watch(frame)
    frame = _unique(frame, plan, seen)
    seen.told.step(progress.TOKENS)
    columns = of_table(recipe.data)
    frame = tokens.with_tokens(
        frame,
        recipe.model,
        tokenizer,
        columns,
        recipe.objective,
        day=recipe.job.created,
        unrenderable=wanted.unrenderable,
    )
    documents = token_columns(columns)
    frame = _short(frame, plan, seen, documents)
    frame = steps.limited(frame, wanted.limit, wanted.split_ratios.seed)
    frame = split.with_split(frame, wanted.split_ratios)
    origin = [steps.SOURCE] if plan.source.sources else []
    label = [LABEL] if plan.form.label else []
    ids = [name for each in documents for name in each]
    return frame.select(steps.ID, *plan.form.columns, *label, *origin, *ids, steps.TOKENS, steps.SPLIT)


def _filtered(frame: DataFrame, plan: Plan, seen: Observed) -> DataFrame:
    """Drop what the filters drop, and other languages."""
    wanted, number = plan.prepare, _samples_of_source(plan.prepare)
    # NB: the filters see the tools of the source. Those of a mix are JSON text, since its sources may have other types.
    # Its conversations are parsed too.
    is_mix = steps.MIXED_FROM in frame.columns
    frame = steps.flagged(frame if is_mix else conversations.parsed(frame, plan.form), plan)
    frame = labels.with_labels(conversations.with_tools(frame, plan.form), plan.form)
    by, text = sf.col(steps.DROPPED_BY), sf.concat_ws("\n", *steps.texts(plan.form))
    found = {}
    for name in steps.filter_names(wanted):
        found[name] = sf.count_if(by == name)
        found |= samples.drawn(name, number, text, by == name)
    if plan.form.weight:
        found[_WEIGHED] = sf.count_if(conversations.has_weights(plan.form.spoken[0]))
    frame = steps.passed(seen.filtered.watch(frame, **found), plan)
    if not wanted.languages:
        return frame
    said, foreign = sf.concat_ws("\n", *steps.said(plan.form)), sf.col(language.FOREIGN)
    frame = language.with_foreign(frame, said, wanted.languages)
    drawn = samples.drawn("language", number, said, foreign)
    frame = seen.spoken.watch(frame, foreign=sf.count_if(foreign), **drawn)
    return frame.where(~foreign).drop(language.FOREIGN)


def _samples_of_source(wanted: Prepare) -> int:
    """The number of samples of a step that sees the text of the source: none where values in it are to be replaced."""
    return 0 if wanted.redact else wanted.report_samples


def _unique(frame: DataFrame, plan: Plan, seen: Observed) -> DataFrame:
    """Drop duplicates and near duplicates."""
    wanted = plan.prepare
    if wanted.dedupe.exact:
        frame = steps.without_duplicates(frame)
        copied = sf.col(steps.COPIES) > 1
        drawn = samples.drawn("dedupe", wanted.report_samples, steps.shown(plan.form), copied)
        frame = seen.unique.watch(frame, **drawn).drop(steps.COPIES)
    else:
        frame = seen.unique.watch(frame)
    if wanted.dedupe.near:
        seen.told.step(progress.NEAR_DUPLICATES)
        frame = seen.keep(frame)
        characters = samples.CHARACTERS // 2 if wanted.report_samples else 0
        origin = steps.SOURCE if plan.source.sources else None
        frame, seen.near = near.removed(frame, wanted.dedupe.near, seen.held, characters, origin)
        print(near.described(seen.near), flush=True)
    return frame


def _short(frame: DataFrame, plan: Plan, seen: Observed, documents: Sequence[TokenColumns]) -> DataFrame:
    """Drop what a template refuses, and long examples."""
    wanted, length = plan.prepare, sf.col(steps.TOKENS)
    found = {"refused": sf.count_if(length.isNull()), **lengths.bins(length)}
    for name, fails in _limits(wanted).items():
        found |= samples.drawn(name, wanted.report_samples, steps.shown(plan.form), fails)
    frame = seen.rendered.watch(frame, **found)
    for fails in _limits(wanted).values():
        frame = frame.where(~fails)
    return seen.short.watch(frame, learned=sf.count_if(_is_learned(documents)))


def _is_learned(documents: Sequence[TokenColumns]) -> Column:
    """Whether an example has a token that the loss is on, or a template that hides which these are."""
    return reduce(
        or_,
        (
            sf.coalesce(sf.exists(each.loss_mask, lambda is_target: is_target), sf.lit(True))
            for each in documents
        ),
    )


def _limits(wanted: Prepare) -> dict[str, Column]:
    """What the length in tokens drops, by step, in order; null is that of an example that a template refused."""
    length = sf.col(steps.TOKENS)
    found = {"unrenderable": length.isNull()} if wanted.unrenderable == "Drop" else {}
    return found | ({"maxTokens": length > wanted.max_tokens} if wanted.max_tokens is not None else {})


def counts(prepared: DataFrame, plan: Plan, seen: Observed) -> Counts:
    """Run the plan, and count kept and dropped rows."""
    totals = prepared.groupBy(steps.SPLIT, lengths.index(sf.col(steps.TOKENS)).alias("bin")).agg(
        sf.count(sf.lit(1)).alias("rows"), sf.sum(steps.TOKENS).alias("tokens")
    )
    rows: Totals[str] = Totals()
    held: Totals[str] = Totals()
    kept = [0] * len(lengths.EDGES)
    for row in totals.collect():
        rows[row[steps.SPLIT]] += row["rows"]
        held[row[steps.SPLIT]] += row["tokens"]
        kept[row["bin"]] += row["rows"]
    origins = prepared.groupBy(steps.SOURCE).count().collect() if plan.source.sources else []
    failures = session.failures(prepared.sparkSession)
    again = failures is None or failures != seen.failures
    if again:
        print(
            "Spark ran some tasks again, or does not say whether it did: counting the rows again", flush=True
        )
    read = _Read(plan, seen, again=again)
    return Counts(
        examples=read.filtered["all"],
        dropped=read.dropped(sum(rows.values())),
        rows=dict(rows),
        tokens=dict(held),
        sources={row[steps.SOURCE]: row["count"] for row in origins},
        redacted={kind: read.redacted[kind] for kind in plan.prepare.redact} if plan.prepare.redact else None,
        shared=seen.shared.examples if seen.shared else {},
        lengths=(lengths.counts(read.rendered), kept),
        near=seen.near,
        samples=read.samples(),
        weighed=read.filtered[_WEIGHED] if plan.form.weight else None,
        learned=int(read.short["learned"]),
    )


class _Read:
    """What was observed at each place of the plan."""

    def __init__(self, plan: Plan, seen: Observed, *, again: bool) -> None:
        self._wanted, self._seen = plan.prepare, seen
        self.filtered = seen.filtered.read(again=again)
        self.unique = seen.unique.read(again=again)
        self.rendered = seen.rendered.read(again=again)
        self.short = seen.short.read(again=again)
        self.spoken = seen.spoken.read(again=again) if self._wanted.languages else {}
        self.clean = seen.clean.read(again=again) if seen.evaluation else {}
        self.redacted = seen.redacted.read(again=again) if self._wanted.redact else {}

    def dropped(self, left: int) -> dict[str, int]:
        """What each step dropped, in order; `left`: rows that are left in the end."""
        wanted, near_found = self._wanted, self._seen.near
        found = {name: int(self.filtered[name]) for name in steps.filter_names(wanted)}
        passed = self.filtered["all"] - sum(found.values())
        if wanted.languages:
            found["language"] = self.spoken["foreign"]
            passed -= found["language"]
        if self._seen.evaluation:
            found["decontaminate"], passed = passed - self.clean["all"], self.clean["all"]
        if wanted.dedupe.exact:
            found["dedupe"], passed = passed - self.unique["all"], self.unique["all"]
        if near_found:
            found["near"] = near_found.dropped
            passed -= near_found.dropped
        if wanted.unrenderable == "Drop":
            found["unrenderable"] = self.rendered["refused"]
            passed -= found["unrenderable"]
        if wanted.max_tokens is not None:
            found["maxTokens"] = passed - self.short["all"]
        if wanted.limit is not None:
            found["limit"] = self.short["all"] - left
        return found

    def samples(self) -> dict[str, list[str]]:
        """Some of the examples that each step dropped."""
        number, of_source = self._wanted.report_samples, _samples_of_source(self._wanted)
        found = {
            name: samples.found(name, of_source, self.filtered) for name in steps.filter_names(self._wanted)
        }
        if self._wanted.languages:
            found["language"] = samples.found("language", of_source, self.spoken)
        if self._seen.shared:
            found["decontaminate"] = self._seen.shared.samples
        if self._wanted.dedupe.exact:
            found["dedupe"] = samples.found("dedupe", number, self.unique)
        if self._seen.near:
            found["near"] = [near.shown(pair) for pair in self._seen.near.pairs[:number]]
        for name in _limits(self._wanted):
            found[name] = samples.found(name, number, self.rendered)
        return {name: texts for name, texts in found.items() if texts}


def check(found: Counts, plan: Plan) -> None:
    """Check that training examples are left.

    Raises:
        DataError: no rows are left, or none for the training or validation split.
    """
    left = sum(found.rows.values())
    if not found.examples:
        raise DataError("NoRows", f"{plan.source_name} has no rows: check what was written to it")
    if found.weighed == 0:
        raise missing_weights(str(plan.form.messages), str(plan.form.weight))
    if not left:
        losses = ", ".join(f"{name} dropped {number}" for name, number in found.dropped.items() if number)
        raise DataError(
            "NoRowsLeft",
            f"none of the {found.examples} rows of {plan.source_name} is left: {losses}; loosen data.prepare",
        )
    if not found.learned:
        raise DataError(
            "NothingLearned",
            f"none of the {left} examples of {plan.source_name} has a token that the loss is on: it is on what the assistant says, "
            "so check that the roles of messages are system, user, assistant and tool, and their weights, or set objective.lossOn: "
            "All",
        )
    for name in ("train", "validation"):
        ratio = getattr(plan.prepare.split_ratios, name)
        if ratio > 0 and not found.rows.get(name):
            raise DataError(
                "EmptySplit",
                f"none of the {left} examples fell into the {name} split, whose ratio is {ratio:g}: prepare more "
                f"examples or raise data.prepare.splitRatios.{name}",
            )
