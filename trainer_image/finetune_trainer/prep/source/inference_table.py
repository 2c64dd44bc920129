"""Joins the logged answers of a served model, in an inference table of Databricks' AI Gateway, with feedback on them.

Databricks documents two schemas (read on November 27, 2026):

- Tables of model serving endpoints have `databricks_request_id`, `client_request_id`, `request_time`, `status_code`, `request`,
  `response`, `logging_error_codes` and others. A request or a response of more than 1 MiB is null, and `logging_error_codes` says
  so. Source: docs.databricks.com/aws/en/ai-gateway/inference-tables-serving-endpoints
- Tables of model services of the Unity AI Gateway have `request_id`, `event_time`, `status_code`, `request`, `response`,
  `logging_error_codes` and others, and a limit of 10 MiB. Source: docs.databricks.com/aws/en/ai-gateway/inference-tables

The tables of `auto_capture_config`, with `timestamp_ms` and without `logging_error_codes`, ended on March 20, 2026. Source:
docs.databricks.com/aws/en/machine-learning/model-serving/inference-tables
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from pyspark.sql import Window
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    IntegralType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from finetune_crds.base import join_names
from finetune_crds.preparation import digest_of
from finetune_trainer.examples.chat_messages import WEIGHT
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import labels
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.plan import CHOSEN, COMPLETION, LABEL, MESSAGES, PROMPT, REJECTED
from finetune_trainer.prep.source.logged_exchange import Message, Reason, UnusableError, parse_exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column, DataFrame

    from finetune_crds.source import Feedback

# Columns with the reason why a row is no example, null for an example, and with the beginning of its request and response.
LEFT_OUT, LEFT_OUT_TEXT = "__finetune_left_out", "__finetune_left_out_text"
REASONS = (
    "unknownRequest",  # feedback on a request that is not in the inference table
    "severalFeedbacks",  # feedback that later feedback replaces or that repeats other feedback; a request whose feedback disagrees
    "repeatedRequest",  # different requests have this id
    "noFeedback",  # neither a rating nor a correction
    "status",  # the request failed
    "truncated",  # the request or the response is too large to be logged
    "noCorrection",  # an answer that is not good has no correction; for preferences, any answer
    *get_args(Reason),
    "emptyAnswer",
    "unfinished",  # a good answer was cut off
)
"""The reasons why a row is no example, in the order in which they are checked."""

# A column and the types that it may have.
_Typed = tuple[str, tuple[type[DataType], ...]]
_REQUEST, _RESPONSE, _STATUS, _ERRORS = "request", "response", "status_code", "logging_error_codes"
_LOGGED_TYPES: list[_Typed] = [
    (_REQUEST, (StringType,)),
    (_RESPONSE, (StringType,)),
    (_STATUS, (IntegralType,)),
    (_ERRORS, (ArrayType,)),
]
_RATING_TYPES = (BooleanType, NumericType, StringType)
_TIME_TYPES = (TimestampType, TimestampNTZType, DateType, NumericType)
# The columns with the id that Databricks gives a request, by schema.
_IDS = ("databricks_request_id", "request_id")
_FIRST_SUCCESS, _LAST_SUCCESS = 200, 299
# The characters of a request and its response that a report shows, as `samples` shows them of an example.
_SAMPLE_CHARS = 600
_HAS_TEXT = r"(?U)\S"

# Columns of the join.
_ID, _TIME, _OPINION = "__finetune_request_id", "__finetune_time", "__finetune_opinion"
_FEEDBACKS, _IS_CONTESTED = "__finetune_feedbacks", "__finetune_is_contested"
_CONTENT, _IS_LOGGED, _IS_REPEATED = (
    "__finetune_content",
    "__finetune_is_logged",
    "__finetune_is_repeated",
)
_EXCHANGE = "__finetune_exchange"

_EXCHANGE_TYPE = "struct<reason: string, prompt: array<struct<role: string, content: string>>, answer: string, is_finished: boolean>"


def join_feedback(
    inference_rows: DataFrame, feedback_rows: DataFrame, feedback: Feedback, columns_type: str, field: str
) -> DataFrame:
    """Return a row for each logged request, and for each feedback that decides about no request.

    The rows have the columns of an example with their default names, LEFT_OUT, LEFT_OUT_TEXT, and the columns of the inference table
    other than request and response. A row with a reason in LEFT_OUT has no example.

    Args:
        inference_rows: the inference table.
        feedback_rows: the table of feedback.
        feedback: names the columns of both tables.
        columns_type: the kind of example, as in `Columns`. Messages: a conversation that ends with a good or a corrected answer;
            earlier answers have weight 0. Preference: a correction, and the answer that it replaces. Unpaired: an answer and its label;
            an answer with a correction and no rating is bad.
        field: the recipe's field that holds the source, for messages.

    Raises:
        DataError: a column is missing or has another type.
    """
    logged_id = _find_logged_id(inference_rows, feedback, field)
    _require_types(inference_rows, _LOGGED_TYPES, field)
    opinions = _summarize(_select_opinions(feedback_rows, feedback, f"{field}.feedback"))
    requests = inference_rows.withColumn(_ID, sf.col(quoted(logged_id)).cast("string"))
    opinions = opinions.join(_find_repeated(requests, opinions), _ID, "left")
    rows = _with_exchanges(requests.join(opinions, _ID, "left"), columns_type)
    examples = _build_examples(columns_type)
    kept = [name for name in inference_rows.columns if name not in (_REQUEST, _RESPONSE, *examples)]
    text = sf.substring(sf.concat_ws("\n", _REQUEST, _RESPONSE), 1, _SAMPLE_CHARS)
    return rows.select(
        *map(quoted, kept),
        *(sf.when(sf.col(LEFT_OUT).isNull(), column).alias(name) for name, column in examples.items()),
        LEFT_OUT,
        text.alias(LEFT_OUT_TEXT),
    ).unionByName(_list_surplus(opinions), allowMissingColumns=True)


def identify_rated_requests(
    inference_rows: DataFrame, feedback_rows: DataFrame, feedback: Feedback, field: str
) -> str:
    """Return a digest of the logged requests that have feedback.

    A served model logs requests all the time, and those without feedback make no examples.

    Args and errors: as in `join_feedback`.
    """
    logged_id = _find_logged_id(inference_rows, feedback, field)
    _require_columns(feedback_rows, [feedback.request_id_column], f"{field}.feedback")
    rated_ids = feedback_rows.select(sf.col(quoted(feedback.request_id_column)).cast("string").alias(_ID))
    # NB: Spark cannot hash maps, so a row is hashed as JSON. A sum does not depend on the order of the rows.
    content = sf.xxhash64(sf.to_json(sf.struct(*map(quoted, inference_rows.columns))))
    rated_requests = inference_rows.select(
        sf.col(quoted(logged_id)).cast("string").alias(_ID), content.cast("decimal(20,0)").alias(_CONTENT)
    ).join(rated_ids, _ID, "left_semi")
    (row,) = rated_requests.agg(sf.count(sf.lit(1)), sf.sum(_CONTENT)).collect()
    return digest_of(*map(str, row))


def _find_logged_id(inference_rows: DataFrame, feedback: Feedback, field: str) -> str:
    """Return the column of the inference table with the id of the request."""
    name = feedback.logged_id_column or next(filter(inference_rows.columns.__contains__, _IDS), _IDS[0])
    _require_columns(inference_rows, [name], field)
    return name


def _require_types(frame: DataFrame, types: Sequence[_Typed], field: str) -> None:
    """Check the columns of a table and their types."""
    _require_columns(frame, [name for name, _ in types], field)
    for name, expected in types:
        kind = frame.schema[name].dataType
        if not isinstance(kind, expected):
            names = [item.__name__.removesuffix("Type").lower() for item in expected]
            raise DataError(
                "WrongColumnType",
                f"column {name} of {field} holds {kind.simpleString()}: it must be {join_names(names, 'or')}",
            )


def _require_columns(frame: DataFrame, names: list[str], field: str) -> None:
    missing = [name for name in names if name not in frame.columns]
    if missing:
        advice = (
            "name its columns in data.source.feedback"
            if field.endswith("feedback")
            else "name an inference table of the AI Gateway; tables of auto_capture_config, which ended in March 2026, have other columns"
        )
        raise DataError(
            "MissingColumn",
            f"the table of {field} has no column {join_names(missing, 'or')}, it has {join_names(sorted(frame.columns))}: {advice}",
        )


def _select_opinions(feedback_rows: DataFrame, feedback: Feedback, field: str) -> DataFrame:
    """Return the id of the request, the opinion and the time of each feedback that has a rating or a correction."""
    types = [
        (feedback.rating_column, _RATING_TYPES),
        (feedback.correction_column, (StringType,)),
        (feedback.time_column, _TIME_TYPES),
    ]
    _require_columns(feedback_rows, [feedback.request_id_column], field)
    _require_types(feedback_rows, [(name, kinds) for name, kinds in types if name], field)
    correction = sf.lit(None).cast("string")
    if feedback.correction_column:
        text = sf.col(quoted(feedback.correction_column))
        correction = sf.when(text.rlike(_HAS_TEXT), text)
    opinion = sf.struct(_rate(feedback_rows, feedback).alias("is_good"), correction.alias("correction"))
    time = sf.col(quoted(feedback.time_column)) if feedback.time_column else sf.lit(0)
    return feedback_rows.select(
        sf.col(quoted(feedback.request_id_column)).cast("string").alias(_ID),
        opinion.alias(_OPINION),
        time.alias(_TIME),
    ).where(sf.col(f"{_OPINION}.is_good").isNotNull() | sf.col(f"{_OPINION}.correction").isNotNull())


def _rate(feedback_rows: DataFrame, feedback: Feedback) -> Column:
    """Return whether the feedback calls the answer good; null without a valid rating."""
    if feedback.rating_column is None:
        return sf.lit(None).cast("boolean")
    if feedback.min_rating is None:
        return labels.as_boolean(feedback_rows, feedback.rating_column)
    rating = sf.expr(f"try_cast({quoted(feedback.rating_column)} AS double)")
    # NB: for Spark, NaN is greater than every number.
    return sf.when(~sf.isnan(rating), rating >= feedback.min_rating)


def _summarize(opinions: DataFrame) -> DataFrame:
    """Return the latest opinion on each request, the number of feedbacks on it, and whether the latest opinions differ."""
    latest = sf.max(_TIME).over(Window.partitionBy(_ID))
    current = sf.when(sf.col(_TIME).eqNullSafe(latest), sf.col(_OPINION))
    return (
        opinions.withColumn(_OPINION, current)
        .groupBy(_ID)
        .agg(
            sf.count(sf.lit(1)).alias(_FEEDBACKS),
            sf.min(_OPINION).alias(_OPINION),
            (sf.min(_OPINION) != sf.max(_OPINION)).alias(_IS_CONTESTED),
        )
    )


def _find_repeated(requests: DataFrame, opinions: DataFrame) -> DataFrame:
    """Return the logged requests among those with feedback, and whether the id stands for several requests.

    A request that was logged twice is one request: exact duplicates are removed later.
    """
    content = sf.xxhash64(_REQUEST, _RESPONSE)
    return (
        requests.select(_ID, content.alias(_CONTENT))
        .join(opinions.select(_ID), _ID, "left_semi")
        .groupBy(_ID)
        .agg((sf.min(_CONTENT) != sf.max(_CONTENT)).alias(_IS_REPEATED), sf.lit(True).alias(_IS_LOGGED))
    )


def _list_surplus(opinions: DataFrame) -> DataFrame:
    """Return a row with its reason for each feedback that decides about no request."""
    is_unknown = sf.col(_IS_LOGGED).isNull()
    reason = sf.when(is_unknown, sf.lit("unknownRequest")).otherwise("severalFeedbacks")
    number = sf.when(is_unknown, sf.col(_FEEDBACKS)).otherwise(sf.col(_FEEDBACKS) - 1)
    return opinions.select(sf.explode(sf.array_repeat(reason, number.cast("int"))).alias(LEFT_OUT))


def _with_exchanges(rows: DataFrame, columns_type: str) -> DataFrame:
    """Add the column _EXCHANGE, and the column LEFT_OUT with the reason why a request is no example."""
    status, errors = sf.col(_STATUS), sf.size(_ERRORS)
    is_good, correction = sf.col(f"{_OPINION}.is_good"), sf.col(f"{_OPINION}.correction")
    answer, is_finished = sf.col(f"{_EXCHANGE}.answer"), sf.col(f"{_EXCHANGE}.is_finished")
    is_corrected = correction.isNotNull()
    is_answer_left_out = {
        "Messages": ~is_corrected & ~sf.coalesce(is_good, sf.lit(False)),
        "Preference": ~is_corrected,
        "Unpaired": sf.lit(False),
    }[columns_type]
    # Whether the answer of the model is in the example, and whether the model learns to repeat it.
    is_answer_used = ~is_corrected if columns_type == "Messages" else sf.lit(True)
    is_answer_learned = {
        "Messages": ~is_corrected,
        "Preference": sf.lit(False),
        "Unpaired": sf.coalesce(is_good, sf.lit(False)),
    }[columns_type]
    is_unchanged = sf.trim(correction) == sf.trim(answer)
    before_parsing = {
        "severalFeedbacks": sf.col(_IS_CONTESTED),
        "repeatedRequest": sf.col(_IS_REPEATED),
        "noFeedback": sf.col(_FEEDBACKS).isNull(),
        "status": ~sf.coalesce(status.between(_FIRST_SUCCESS, _LAST_SUCCESS), sf.lit(False)),
        "truncated": (errors > 0) | sf.col(_REQUEST).isNull() | sf.col(_RESPONSE).isNull(),
        "noCorrection": is_answer_left_out,
    }
    after_parsing = {
        "emptyAnswer": is_answer_used & ~answer.rlike(_HAS_TEXT),
        "noCorrection": is_unchanged if columns_type == "Preference" else sf.lit(False),
        "unfinished": is_answer_learned & ~is_finished,
    }
    # NB: without `useArrow`, Spark looks for Arrow's types in the hints of the function, and warns.
    parse = sf.udf(_parse, _EXCHANGE_TYPE, useArrow=False)
    is_parsed = sf.col(LEFT_OUT).isNull()
    rows = rows.withColumn(LEFT_OUT, _choose_reason(before_parsing))
    # NB: Spark calls a function in Python for every row, whatever condition surrounds the call.
    rows = rows.withColumn(
        _EXCHANGE, parse(sf.when(is_parsed, sf.col(_REQUEST)), sf.when(is_parsed, sf.col(_RESPONSE)))
    )
    reasons = [sf.col(LEFT_OUT), sf.col(f"{_EXCHANGE}.reason"), _choose_reason(after_parsing)]
    return rows.withColumn(LEFT_OUT, sf.coalesce(*reasons))


def _choose_reason(conditions: Mapping[str, Column]) -> Column:
    """Return the first reason whose condition is true, or null."""
    return sf.coalesce(*(sf.when(condition, sf.lit(reason)) for reason, condition in conditions.items()))


def _parse(
    request: str | None, response: str | None
) -> tuple[str | None, list[Message] | None, str | None, bool | None] | None:
    """Return the fields of _EXCHANGE_TYPE; None without a request."""
    if request is None or response is None:
        return None
    try:
        return (None, *parse_exchange(request, response))
    except UnusableError as error:
        return (error.reason, None, None, None)


def _build_examples(columns_type: str) -> dict[str, Column]:
    """Return the columns of an example, by their default names."""
    prompt, answer = sf.col(f"{_EXCHANGE}.prompt"), sf.col(f"{_EXCHANGE}.answer")
    is_good, correction = sf.col(f"{_OPINION}.is_good"), sf.col(f"{_OPINION}.correction")
    if columns_type == "Preference":
        return {PROMPT: prompt, CHOSEN: _answer(correction), REJECTED: _answer(answer)}
    if columns_type == "Unpaired":
        return {PROMPT: prompt, COMPLETION: _answer(answer), LABEL: sf.coalesce(is_good, sf.lit(False))}
    # Nobody judged the earlier answers of the conversation.
    earlier = sf.transform(
        prompt,
        lambda message: sf.struct(
            message["role"].alias("role"),
            message["content"].alias("content"),
            sf.when(message["role"] == "assistant", sf.lit(0)).alias(WEIGHT),
        ),
    )
    # An answer without a weight is learned.
    no_weight = sf.lit(None).cast("int").alias(WEIGHT)
    return {MESSAGES: sf.concat(earlier, _answer(sf.coalesce(correction, answer), no_weight))}


def _answer(text: Column, *fields: Column) -> Column:
    """Return a conversation that is only an answer."""
    return sf.array(sf.struct(sf.lit("assistant").alias("role"), text.alias("content"), *fields))
