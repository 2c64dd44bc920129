"""The steps on a DataFrame: filters, deduplication, templates and limit.

Each step only extends Spark's lazy plan. Which rows a step drops never depends on partitions or order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType

from finetune_trainer.examples.chat_messages import WEIGHT
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError, first_line
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.expressions.jinja_template import REFUSAL
from finetune_trainer.prep.expressions.labels import as_boolean
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.plan import LABEL, MARGIN
from finetune_trainer.prep.source import condition, inference_table, reader
from finetune_trainer.prep.steps import conversations, decontaminate, labels, margins, near

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from finetune_trainer.prep.plan import Form, Plan

# Columns that the steps add; those of an example are described at `identify_examples`.
DROPPED_BY = "dropped_by"
ID, FINGERPRINT, GROUP, STRATUM, TOKENS, SPLIT = "id", "fingerprint", "group", "stratum", "tokens", "split"
COPIES = "copies"
_CONDITION = "__finetune_condition"
# The column with the source of a row in a mix: MIXED_FROM next to the columns of the sources, and SOURCE in the table.
MIXED_FROM, SOURCE = "__finetune_source", "source"
# Columns with the place of a row, in frames that are searched for a refused row.
FILE, BLOCK, NUMBER = PLACE = "__finetune_file", "__finetune_block", "__finetune_number"
_MAX_ROWS_IN_MEMORY = 10_000
# Runs of white space other than a single space: to replace single spaces too takes twice the time.
_WHITE_SPACE = r"(?U) ?[^\S ]\s*|  \s*"
# The same within a line, after its indentation.
_INSIDE_A_LINE = r"(?U)(?<=\S)(?: ?[^\S \n]|  )[^\S\n]*"
# White space around a text, and before line breaks.
_AROUND_LINES = r"(?U)\A\s+|\s+\z|[^\S\n]+(?=\n)"


def flag_rows(frame: DataFrame, plan: Plan) -> DataFrame:
    """Add the column `dropped_by`: the first filter that a row fails, or null. Learned values become text.

    Raises:
        RecipeRefusedError: data.prepare.filter is not an SQL condition on the columns of a row.
        DataError: data.prepare.filter names a column that the source does not have.
    """
    # NB: the filter of the recipe may compare numbers, so it is evaluated before they become text.
    frame = _with_condition(frame, plan)
    frame = plain_text.with_texts(frame, _list_learned_values(frame, plan))
    dropped_by = None
    for name, fails in _build_filters(frame, plan):
        dropped_by = sf.when(fails, name) if dropped_by is None else dropped_by.when(fails, name)
    assert dropped_by is not None  # noqa: S101 - notNull always applies
    return frame.withColumn(DROPPED_BY, dropped_by).drop(_CONDITION)


def _list_learned_values(frame: DataFrame, plan: Plan) -> list[str]:
    """Return the columns that are learned or compared as text, but are neither text nor lists nor structures."""
    form = plan.form
    as_is = reader.jinja_values(frame, plan) | {*form.spoken}
    names = dict.fromkeys([*form.content, *(plan.prepare.dedupe.columns or [])])
    return [
        name
        for name in names
        if name not in as_is
        and not isinstance(frame.schema[name].dataType, StringType)
        and not reader.is_nested(frame.schema[name].dataType)
    ]


def list_filters(plan: Plan) -> list[str]:
    """Return the filters of the recipe, in order, by field name; first, the reasons why rows of an inference table are no examples."""
    prepare = plan.prepare
    reasons = inference_table.REASONS if plan.source.feedback else ()
    is_set = dict.fromkeys(reasons, True) | {
        "notNull": True,
        "minQuality": prepare.min_quality is not None,
        "minChars": prepare.min_chars is not None,
        "maxChars": prepare.max_chars is not None,
        "minPromptChars": prepare.min_prompt_chars is not None,
        "maxPromptChars": prepare.max_prompt_chars is not None,
        "filter": prepare.filter is not None,
    }
    return [name for name, used in is_set.items() if used]


def _build_filters(frame: DataFrame, plan: Plan) -> list[tuple[str, Column]]:
    """Return the filters of the recipe, in order: the name of each, and whether a row fails it."""
    prepare, form = plan.prepare, plan.form
    characters = _count_characters(form)
    prompt = _length(form.prompt, form) if form.prompt else sf.lit(0)
    # NB: scores may be text, NaN or null; in ANSI mode a plain cast fails, and NaN is greater than every number.
    score = sf.expr(f"try_cast({quoted(prepare.quality_column)} AS double)")
    has_quality = score.isNotNull() & ~sf.isnan(score) & (score >= sf.lit(prepare.min_quality or 0.0))
    # Conditions of filters that the recipe does not set compare with null; they are not used.
    failures = {
        "notNull": _has_blank(frame, plan),
        "minQuality": ~has_quality,
        "minChars": characters < sf.lit(prepare.min_chars),
        "maxChars": characters > sf.lit(prepare.max_chars),
        "minPromptChars": prompt < sf.lit(prepare.min_prompt_chars),
        "maxPromptChars": prompt > sf.lit(prepare.max_prompt_chars),
        "filter": ~sf.coalesce(sf.col(_CONDITION), sf.lit(False)),
    }
    if inference_table.LEFT_OUT in frame.columns:
        left_out = sf.col(inference_table.LEFT_OUT)
        failures |= {reason: left_out.eqNullSafe(reason) for reason in inference_table.REASONS}
    return [(name, failures[name]) for name in list_filters(plan)]


def require_valid_text(frame: DataFrame, form: Form) -> DataFrame:
    """Fail on text that is not UTF-8 in columns of text: Spark's expressions would replace its bytes.

    Python's workers fail on such text in conversations.
    """
    text_columns = [name for name in form.content if isinstance(frame.schema[name].dataType, StringType)]
    return frame.withColumns({name: sf.validate_utf8(sf.col(quoted(name))) for name in text_columns})


def _has_blank(frame: DataFrame, plan: Plan) -> Column:
    """Return whether a column that must have a value is null, blank, or an invalid label or margin, or the tools are invalid."""
    columns = dict.fromkeys([*plan.form.required, *plan.prepare.not_null])
    is_blank = _has_invalid_tools(frame, plan.form.tools) if plan.form.tools else sf.lit(False)
    for name in columns:
        column = _get_value(frame, plan.form, name)
        is_blank = is_blank | column.isNull()
        if name in plan.form.spoken:
            is_blank = is_blank | sf.coalesce(conversations.is_blank(name, plan.form), sf.lit(True))
        elif name not in (plan.form.label, plan.form.margin) and isinstance(
            frame.schema[name].dataType, StringType
        ):
            is_blank = is_blank | ~column.rlike(r"(?U)\S")
    return is_blank


def _get_value(frame: DataFrame, form: Form, name: str) -> Column:
    """Return the values of a column; null for an invalid label or margin."""
    if name == form.label:
        return as_boolean(frame, name)
    return margins.as_number(name) if name == form.margin else sf.col(quoted(name))


def _has_invalid_tools(frame: DataFrame, name: str) -> Column:
    # In a mix, the tools have been converted already. Both conversions make invalid tools null.
    tools = sf.col(quoted(name)) if MIXED_FROM in frame.columns else conversations.tools(frame, name)
    return tools.isNull()


def _count_characters(form: Form) -> Column:
    """Return the length of an example in characters, without the text of templates, of tools and of their calls."""
    lengths = (_length(name, form) for name in form.content if name != form.tools)
    return sum(lengths, start=sf.lit(0))


def _length(name: str, form: Form) -> Column:
    return conversations.count_characters(name) if name in form.spoken else sf.length(_text(name))


def texts(form: Form) -> list[Column]:
    """Return the texts of an example."""
    return [
        conversations.conversation_text(name, form) if name in form.spoken else _text(name)
        for name in form.content
    ]


def contents(form: Form) -> Column:
    """Return the texts of an example, one after the other, without tools and without the roles of a conversation."""
    names = [name for name in form.content if name != form.tools]
    return sf.concat_ws(
        "\n", *(conversations.contents(name) if name in form.spoken else _text(name) for name in names)
    )


def spoken_texts(form: Form) -> list[Column]:
    """Return what the user and the assistant say in an example, by its columns."""
    names = [name for name in form.content if name != form.tools]
    return [conversations.spoken_text(name, form) if name in form.spoken else _text(name) for name in names]


def _text(column: str) -> Column:
    return sf.coalesce(sf.col(quoted(column)).cast("string"), sf.lit(""))


def _with_condition(frame: DataFrame, plan: Plan) -> DataFrame:
    """Add the column `_CONDITION`: whether a row fulfils the recipe's filter."""
    if not plan.prepare.filter:
        return frame.withColumn(_CONDITION, sf.lit(True))
    try:
        condition.check(frame, plan.prepare.filter)
        return frame.select("*", sf.expr(plan.prepare.filter).cast("boolean").alias(_CONDITION))
    except ParseException as error:
        raise RecipeRefusedError(
            f"data.prepare.filter `{plan.prepare.filter}` is not an SQL condition: {first_line(error)}"
        ) from error
    except AnalysisException as error:
        if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
            raise DataError(
                "MissingColumn",
                f"data.prepare.filter `{plan.prepare.filter}` names a column that {plan.source_name} does not have: "
                f"{reader.describe_columns(frame)}",
            ) from error
        raise RecipeRefusedError(
            f"the filters of data.prepare cannot run on the source: {first_line(error)}"
        ) from error


def select_passed(frame: DataFrame, plan: Plan) -> DataFrame:
    """Select the rows that pass the filters, with the columns that later steps read.

    Conversations, and the columns of `reader.jinja_values`, keep their types; other columns of an example become text.
    """
    content = dict.fromkeys([*plan.form.content, *(plan.prepare.dedupe.columns or [])])
    ratios = plan.prepare.split_ratios
    # NB: `redact` replaces values in the columns of an example, but the split depends on original values: it gets copies.
    split_columns = dict.fromkeys(name for name in (ratios.key, ratios.stratify_by) if name)
    origin = [name for name in (MIXED_FROM, *PLACE) if name in frame.columns]
    as_is = reader.jinja_values(frame, plan)
    unflagged = frame.where(sf.col(DROPPED_BY).isNull())
    return unflagged.select(
        *(
            sf.col(quoted(name))
            if name in plan.form.spoken or name in as_is
            else sf.col(quoted(name)).cast("string").alias(name)
            for name in content
        ),
        *(sf.col(quoted(name)).cast("string").alias(_split_column(name)) for name in split_columns),
        *([sf.col(quoted(plan.form.label)).alias(labels.COLUMN)] if plan.form.label else []),
        *([sf.col(quoted(plan.form.margin)).alias(margins.COLUMN)] if plan.form.margin else []),
        *origin,
    )


def _split_column(column: str) -> str:
    """Return the name of the copy of a column that decides on the split."""
    return f"__finetune_as_is_{column}"


def identify_examples(frame: DataFrame, plan: Plan) -> DataFrame:
    """Give the rows that passed the filters a fingerprint, and select the columns of an example.

    id: a hash of the example as it is, and of the value of splitRatios.key.
    fingerprint: equal for duplicates: a hash of the example's text, label, margin and weights, or of the text of dedupe.columns. Case and white
        space within lines make no difference; indentation does, since it matters in programs.
    group: the text that decides on the split.
    stratum: the value that has the same share in each split, if splits are stratified.
    plain: what the user and the assistant say, which is compared for near duplicates, if they are removed.
    said: the text that is compared with evaluation sets, if there are any.
    source: the source of the row, in a mix.
    """
    form, key, stratum = plan.form, plan.prepare.split_ratios.key, plan.prepare.split_ratios.stratify_by
    example = texts(form)
    structures = _structures_as_json(frame, form)
    judgement = [sf.col(labels.COLUMN).cast("string")] if form.label else []
    judgement += [sf.col(margins.COLUMN).cast("string")] if form.margin else []
    judgement += [conversations.weights(name) for name in form.spoken if WEIGHT in form.carried]
    fingerprint = _fingerprint(example + structures + judgement)
    dedupe_texts = [_text(name) for name in plan.prepare.dedupe.columns or []]
    split_key = sf.col(quoted(_split_column(key))) if key else sf.lit(None).cast("string")
    parts = example + structures + _conversations_as_json(form) + judgement
    fields = [part.alias(f"t{number}") for number, part in enumerate(parts)]
    identity = sf.sha2(sf.to_json(sf.struct(*fields, split_key.alias("key"))), 256)
    compared = [_normalize(spoken_texts(form)).alias(near.TEXT)] if plan.prepare.dedupe.near else []
    compared += [contents(form).alias(decontaminate.TEXT)] if plan.prepare.decontaminate else []
    return frame.select(
        sf.substring(identity, 1, 32).alias(ID),
        (_fingerprint(dedupe_texts) if dedupe_texts else fingerprint).alias(FINGERPRINT),
        # NB: the group does not depend on label, margin and weights, so that no text is both trained and evaluated on.
        sf.coalesce(split_key, sf.sha2(_normalize(example + structures), 256)).alias(GROUP),
        *([_text(_split_column(stratum)).alias(STRATUM)] if stratum else []),
        *compared,
        *_render_columns(form),
        *([sf.col(labels.COLUMN).alias(LABEL)] if form.label else []),
        *([sf.col(margins.COLUMN).alias(MARGIN)] if form.margin else []),
        *([sf.col(MIXED_FROM).alias(SOURCE)] if MIXED_FROM in frame.columns else []),
        *(name for name in (*PLACE, REFUSAL) if name in frame.columns),
    )


def _structures_as_json(frame: DataFrame, form: Form) -> list[Column]:
    """Return the lists and structures of templates as JSON: as text, values with commas could not be distinguished."""
    nested = [
        name
        for name in form.content
        if name not in form.spoken and reader.is_nested(frame.schema[name].dataType)
    ]
    return [sf.to_json(sf.struct(*map(sf.col, map(quoted, nested))))] if nested else []


def _conversations_as_json(form: Form) -> list[Column]:
    """Return the conversations as JSON: as text, the fields of a message could not be distinguished."""
    return [sf.to_json(sf.struct(*map(sf.col, map(quoted, form.spoken))))] if form.spoken else []


def _fingerprint(parts: list[Column]) -> Column:
    """Return a hash that is the same for texts that differ only in case, and in white space that is not indentation."""
    lines = [
        sf.lower(sf.regexp_replace(sf.regexp_replace(text, _AROUND_LINES, ""), _INSIDE_A_LINE, " "))
        for text in parts
    ]
    return sf.sha2(sf.concat_ws("\n", *lines), 256)


def _normalize(parts: list[Column]) -> Column:
    """Return texts in lower case, their white space folded, a line for each."""
    plain = [sf.lower(sf.trim(sf.regexp_replace(text, _WHITE_SPACE, " "))) for text in parts]
    return sf.concat_ws("\n", *plain)


def _render_columns(form: Form) -> list[Column]:
    if form.has_turns:
        return conversations.build_columns(form)
    return [template.render().alias(name) for name, template in form.rendered.items()]


def display_text(form: Form) -> Column:
    """Return the text of an example in its columns of the table, for people."""
    return conversations.display_text(form) if form.has_turns else sf.concat_ws("\n", *form.columns)


def drop_duplicates(frame: DataFrame) -> DataFrame:
    """Keep one example per fingerprint, the example with the least id (and stratum, and source): the choice is deterministic.

    The column `copies` is the number of examples with the fingerprint.
    """
    # NB: dropDuplicates keeps an arbitrary row.
    first = sf.min_by(sf.struct("*"), sf.struct(*_sort_columns(frame))).alias("kept")
    return frame.groupBy(FINGERPRINT).agg(first, sf.count(sf.lit(1)).alias(COPIES)).select("kept.*", COPIES)


def _sort_columns(frame: DataFrame) -> list[str]:
    """Return the columns that order examples uniquely: examples with one id may differ in stratum and source."""
    return [name for name in (ID, STRATUM, SOURCE) if name in frame.columns]


def limit_rows(frame: DataFrame, limit: int | None, seed: int) -> DataFrame:
    """Keep the `limit` examples whose ids have the least seeded hashes. Examples with equal ids are ordered by stratum, then by source."""
    if limit is None:
        return frame
    order = (hash_column(seed, "limit", ID), *_sort_columns(frame))
    # NB: orderBy with limit keeps `limit` rows in memory, and a global sort runs its input twice: a large limit sorts in one partition.
    fits_in_memory = limit <= _MAX_ROWS_IN_MEMORY
    ordered = frame.orderBy(*order) if fits_in_memory else frame.repartition(1).sortWithinPartitions(*order)
    return ordered.limit(limit)


def hash_column(seed: int, purpose: str, column: str) -> Column:
    """Return the seeded hash of a column; each purpose gives a different hash."""
    return sf.xxhash64(sf.concat_ws("|", sf.lit(str(seed)), sf.lit(purpose), sf.col(column)))
