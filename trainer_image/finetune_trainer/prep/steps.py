"""The steps on a DataFrame: filters, deduplication, templates and limit.

Each step is a plan of the JVM's; none of them runs anything. A row's fate never depends on partitions or
order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from finetune_trainer.outcome import DataError, RecipeRefusedError
from finetune_trainer.prep import condition, decontaminate, near, source
from finetune_trainer.prep.errors import first_line
from finetune_trainer.prep.plan import MESSAGES, PROMPT, RESPONSE
from finetune_trainer.prep.template import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from finetune_crds.prepare import Prepare
    from finetune_trainer.prep.plan import Form, Plan

DROPPED_BY = "dropped_by"
ID, FINGERPRINT, GROUP, STRATUM, TOKENS, SPLIT = "id", "fingerprint", "group", "stratum", "tokens", "split"
COPIES = "copies"
# The source of a row in a mix: among the columns of the sources, and in the table.
MIXED_FROM, SOURCE = "__finetune_source", "source"
_MOST_ROWS_HELD = 100_000
# Runs of white space, but for a single space, which replacing costs twice the time.
_WHITE_SPACE = r"(?U) ?[^\S ]\s*|  \s*"
_CONVERSATION = ArrayType(
    StructType([StructField("role", StringType()), StructField("content", StringType())])
)


def with_conversation(frame: DataFrame, form: Form) -> DataFrame:
    """Parse conversations into lists of {role, content}; the source may have them as JSON text.

    Text that is no such list becomes null.

    Raises:
        DataError: the column is neither.
    """
    if form.messages is None:
        return frame
    column, kind = sf.col(quoted(form.messages)), frame.schema[form.messages].dataType
    if isinstance(kind, StringType):
        turns = sf.from_json(column, _CONVERSATION)
    elif source.is_conversation(kind):
        turns = sf.transform(
            column,
            lambda turn: sf.struct(
                turn["role"].cast("string").alias("role"), turn["content"].cast("string").alias("content")
            ),
        )
    else:
        raise DataError(
            "WrongColumnType",
            f"column {form.messages} holds {kind.simpleString()}: conversations are lists of {{role, content}}, or the "
            "same as JSON text",
        )
    return frame.withColumn(form.messages, turns)


def flagged(frame: DataFrame, plan: Plan) -> DataFrame:
    """Add the column `dropped_by`: the first filter that a row fails, or null.

    Raises:
        RecipeRefusedError: data.prepare.filter is not an SQL condition on the columns of a row.
        DataError: it names a column that the source does not have.
    """
    verdict = None
    for name, fails in _filters(frame, plan):
        verdict = sf.when(fails, name) if verdict is None else verdict.when(fails, name)
    assert verdict is not None  # noqa: S101 - notNull always applies
    return _checked(frame, plan, verdict.alias(DROPPED_BY))


def filter_names(prepare: Prepare) -> list[str]:
    """Return the filters of the recipe, in order, by field name."""
    wanted = {
        "notNull": True,
        "minQuality": prepare.min_quality is not None,
        "minChars": prepare.min_chars is not None,
        "maxChars": prepare.max_chars is not None,
        "minPromptChars": prepare.min_prompt_chars is not None,
        "maxPromptChars": prepare.max_prompt_chars is not None,
        "filter": prepare.filter is not None,
    }
    return [name for name, used in wanted.items() if used]


def _filters(frame: DataFrame, plan: Plan) -> list[tuple[str, Column]]:
    prepare, form = plan.prepare, plan.form
    characters = _characters(form)
    prompt = sf.length(sf.col(quoted(form.prompt)).cast("string")) if form.prompt else sf.lit(0)
    # NB: scores may be text, NaN or null; in ANSI mode a plain cast fails, and NaN is greater than every number.
    score = sf.expr(f"try_cast({quoted(prepare.quality_column)} AS double)")
    good = score.isNotNull() & ~sf.isnan(score) & (score >= sf.lit(prepare.min_quality or 0.0))
    wanted = sf.expr(prepare.filter) if prepare.filter else sf.lit(True)
    tests = {
        "notNull": _any_blank(frame, plan),
        "minQuality": ~good,
        "minChars": characters < sf.lit(prepare.min_chars),
        "maxChars": characters > sf.lit(prepare.max_chars),
        "minPromptChars": prompt < sf.lit(prepare.min_prompt_chars),
        "maxPromptChars": prompt > sf.lit(prepare.max_prompt_chars),
        "filter": ~sf.coalesce(wanted, sf.lit(False)),
    }
    return [(name, tests[name]) for name in filter_names(prepare)]


def _any_blank(frame: DataFrame, plan: Plan) -> Column:
    columns = dict.fromkeys([*plan.form.required, *plan.prepare.not_null])
    found = sf.lit(False)
    for name in columns:
        column = sf.col(quoted(name))
        found = found | column.isNull()
        if name == plan.form.messages:
            whole = sf.forall(column, lambda turn: turn["role"].isNotNull() & turn["content"].isNotNull())
            spoken = sf.exists(column, lambda turn: turn["content"].rlike(r"\S"))
            found = found | ~sf.coalesce(whole & spoken, sf.lit(False))
        elif isinstance(frame.schema[name].dataType, StringType):
            found = found | ~column.rlike(r"(?U)\S")
    return found


def _characters(form: Form) -> Column:
    """Return the length of an example in characters, without the text of templates."""
    if form.messages is not None:
        lengths = sf.transform(sf.col(quoted(form.messages)), lambda turn: sf.length(turn["content"]))
        return sf.aggregate(lengths, sf.lit(0), lambda total, length: total + length)
    return sum((sf.length(text) for text in texts(form)), start=sf.lit(0))


def texts(form: Form) -> list[Column]:
    """Return the texts of an example."""
    if form.messages is not None:
        turns = sf.transform(
            sf.col(quoted(form.messages)), lambda turn: sf.concat_ws("\n", turn["role"], turn["content"])
        )
        return [sf.concat_ws("\n", turns)]
    return [_text(name) for name in form.content]


def contents(form: Form) -> Column:
    """Return the texts of an example, one after the other, without the roles of a conversation."""
    if form.messages is not None:
        turns = sf.transform(sf.col(quoted(form.messages)), lambda turn: turn["content"])
        return sf.concat_ws("\n", turns)
    return sf.concat_ws("\n", *texts(form))


def _text(column: str) -> Column:
    return sf.coalesce(sf.col(quoted(column)).cast("string"), sf.lit(""))


def _checked(frame: DataFrame, plan: Plan, verdict: Column) -> DataFrame:
    try:
        if plan.prepare.filter:
            condition.check(frame, plan.prepare.filter)
        return frame.select("*", verdict)
    except ParseException as error:
        raise RecipeRefusedError(
            f"data.prepare.filter `{plan.prepare.filter}` is not an SQL condition: {first_line(error)}"
        ) from error
    except AnalysisException as error:
        if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
            raise DataError(
                "MissingColumn",
                f"data.prepare.filter `{plan.prepare.filter}` names a column that {plan.source_name} does not have: "
                f"{source.has(frame)}",
            ) from error
        raise RecipeRefusedError(
            f"the filters of data.prepare do not fit the source: {first_line(error)}"
        ) from error


def passed(frame: DataFrame, plan: Plan) -> DataFrame:
    """Select the rows that pass the filters, with the columns that later steps read: conversations, and others as text."""
    texts = dict.fromkeys([*plan.form.content, *(plan.prepare.dedupe.columns or [])])
    ratios = plan.prepare.split_ratios
    # NB: `redact` replaces values in the columns of an example; these two decide on the split as they are.
    deciding = dict.fromkeys(name for name in (ratios.key, ratios.stratify_by) if name)
    origin = [MIXED_FROM] if MIXED_FROM in frame.columns else []
    kept = frame.where(sf.col(DROPPED_BY).isNull())
    return kept.select(
        *(
            sf.col(quoted(name))
            if name == plan.form.messages
            else sf.col(quoted(name)).cast("string").alias(name)
            for name in texts
        ),
        *(sf.col(quoted(name)).cast("string").alias(_as_is(name)) for name in deciding),
        *origin,
    )


def _as_is(column: str) -> str:
    return f"__finetune_as_is_{column}"


def identified(frame: DataFrame, plan: Plan) -> DataFrame:
    """Give the rows that passed the filters a fingerprint, and select the columns of an example.

    id: a hash of the example as it is. fingerprint: what is equal for duplicates: a hash of its text, or of the text of
    dedupe.columns, but for case and white space. group: the text that decides on the split. stratum: the value whose share
    each split has, if it is stratified. plain: the text that is compared for near duplicates, if they are removed. said: the
    text that is compared with evaluation sets, if there are any. source: where the row is from, in a mix.
    """
    form, key, stratum = plan.form, plan.prepare.split_ratios.key, plan.prepare.split_ratios.stratify_by
    example = texts(form)
    fingerprint = _fingerprint(example)
    chosen = [_text(name) for name in plan.prepare.dedupe.columns or []]
    owner = sf.col(quoted(_as_is(key))) if key else sf.lit(None).cast("string")
    identity = sf.sha2(
        sf.to_json(sf.struct(*(text.alias(f"t{i}") for i, text in enumerate(example)), owner.alias("key"))),
        256,
    )
    compared = [_plain(example).alias(near.TEXT)] if plan.prepare.dedupe.near else []
    compared += [contents(form).alias(decontaminate.TEXT)] if plan.prepare.decontaminate else []
    return frame.select(
        sf.substring(identity, 1, 32).alias(ID),
        (_fingerprint(chosen) if chosen else fingerprint).alias(FINGERPRINT),
        sf.coalesce(owner, fingerprint).alias(GROUP),
        *([_text(_as_is(stratum)).alias(STRATUM)] if stratum else []),
        *compared,
        *_rendered(form),
        *([sf.col(MIXED_FROM).alias(SOURCE)] if MIXED_FROM in frame.columns else []),
    )


def _fingerprint(parts: list[Column]) -> Column:
    """Return a hash that is the same for texts that differ in case and white space only."""
    return sf.sha2(_plain(parts), 256)


def _plain(parts: list[Column]) -> Column:
    """Return texts in lower case, their white space folded, a line for each."""
    plain = [sf.lower(sf.trim(sf.regexp_replace(text, _WHITE_SPACE, " "))) for text in parts]
    return sf.concat_ws("\n", *plain)


def _rendered(form: Form) -> list[Column]:
    if form.messages is not None:
        return [sf.col(quoted(form.messages)).alias(MESSAGES)]
    rendered = {name: template.render() for name, template in form.rendered.items()}
    if form.conversation is None:
        return [text.alias(name) for name, text in rendered.items()]
    turns = [("user", rendered[PROMPT]), ("assistant", rendered[RESPONSE])]
    if form.conversation.system is not None:
        turns.insert(0, ("system", sf.lit(form.conversation.system)))
    made = [sf.struct(sf.lit(role).alias("role"), text.alias("content")) for role, text in turns]
    return [sf.array(*made).alias(MESSAGES)]


def shown(form: Form) -> Column:
    """Return the text of an example in its columns of the table, for people."""
    if form.columns != (MESSAGES,):
        return sf.concat_ws("\n", *form.columns)
    turn = sf.transform(sf.col(MESSAGES), lambda turn: sf.concat_ws(": ", turn["role"], turn["content"]))
    return sf.concat_ws("\n", turn)


def without_duplicates(frame: DataFrame) -> DataFrame:
    """Keep one example per fingerprint, the one with the least id (and source): the choice is deterministic.

    The column `copies` is the number of examples with the fingerprint.
    """
    # NB: dropDuplicates keeps an arbitrary row.
    order = [name for name in (ID, SOURCE) if name in frame.columns]
    kept = sf.min_by(sf.struct("*"), sf.struct(*order)).alias("kept")
    return frame.groupBy(FINGERPRINT).agg(kept, sf.count(sf.lit(1)).alias(COPIES)).select("kept.*", COPIES)


def limited(frame: DataFrame, limit: int | None, seed: int) -> DataFrame:
    """Keep at most `limit` examples, those with the least seeded hash."""
    if limit is None:
        return frame
    order = (hashed(seed, "limit", ID), sf.col(ID))
    # NB: orderBy with limit keeps all rows in memory, and a global sort runs its input twice.
    few = limit <= _MOST_ROWS_HELD
    ordered = frame.orderBy(*order) if few else frame.repartition(1).sortWithinPartitions(*order)
    return ordered.limit(limit)


def hashed(seed: int, purpose: str, column: str) -> Column:
    """Return the seeded hash of a column; another purpose gives another one."""
    return sf.xxhash64(sf.concat_ws("|", sf.lit(str(seed)), sf.lit(purpose), sf.col(column)))
