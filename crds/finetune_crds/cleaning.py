"""Steps of `spec.data.prepare` that inspect the text of examples: languages, redaction and decontamination."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import LIST_TYPE_SET, ApiModel, Name, Rule, list_type_map, rules, value_or_empty
from finetune_crds.source import NamedSource, SourceName

# NB: the result of the prep pod has the name and the version of each set, and must fit into a termination message.
MAX_EVALUATION_SETS = 8

# fmt: off
Language = Literal[
    "af", "am", "an", "ar", "as", "az", "ba", "be", "bg", "bn", "br", "bs", "ca", "cs", "cy", "da",
    "de", "dz", "el", "en", "eo", "es", "et", "eu", "fa", "fi", "fo", "fr", "fy", "ga", "gd", "gl",
    "gu", "ha", "he", "hi", "hr", "ht", "hu", "hy", "id", "ig", "is", "it", "ja", "jv", "ka", "kk",
    "km", "kn", "ko", "ku", "ky", "la", "lb", "lg", "ln", "lo", "lt", "lv", "mg", "mk", "ml", "mn",
    "mr", "ms", "mt", "my", "ne", "nl", "no", "oc", "om", "or", "pa", "pl", "ps", "pt", "qu", "ro",
    "ru", "rw", "sa", "se", "si", "sk", "sl", "sn", "so", "sq", "sr", "st", "sv", "sw", "ta", "te",
    "tg", "th", "tk", "tl", "tr", "tt", "ug", "uk", "ur", "uz", "vi", "vo", "wa", "xh", "yo", "zh", "zu",
]
# fmt: on
"""The ISO 639-1 code of a language that the detector supports."""

Languages = Annotated[list[Language], Field(min_length=1, max_length=32, json_schema_extra=LIST_TYPE_SET)]

RedactKind = Literal["Email", "Phone", "CardNumber", "Secret"]

Redact = Annotated[list[RedactKind], Field(min_length=1, max_length=4, json_schema_extra=LIST_TYPE_SET)]


class EvaluationSource(NamedSource):
    """An evaluation set."""

    name: SourceName
    """Name of the set, also in status.data.evaluationSets."""
    columns: (
        Annotated[list[Name], Field(min_length=1, max_length=16, json_schema_extra=LIST_TYPE_SET)] | None
    ) = None
    """Columns to compare with the examples: texts, lists of texts, or conversations. Default: all columns of these types."""


class Decontaminate(ApiModel):
    """Removal of examples that share a run of words with an evaluation set."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.minWords) || self.minWords <= self.ngram",
                "minWords must not be above ngram (default: 13): lower minWords or raise ngram",
                ".minWords",
            ),
        )
    )

    sources: Annotated[
        list[EvaluationSource],
        Field(min_length=1, max_length=MAX_EVALUATION_SETS, json_schema_extra=list_type_map("name")),
    ]
    """The evaluation sets."""
    ngram: Annotated[int, Field(ge=5, le=50)] = 13
    """Number of consecutive words that an example must not share with a set. The words are compared in lower case and
    without punctuation. Default: 13."""
    min_words: Annotated[int, Field(ge=3, le=50)] | None = None
    """Minimum number of words in a text of an evaluation set. A shorter text, such as a name, is not compared. A text with
    fewer than `ngram` words is compared as a whole. Default: 8, or `ngram` if that is less."""

    @property
    def fewest_words(self) -> int:
        """The minimum number of words that a text must have to be compared."""
        return min(8, self.ngram) if self.min_words is None else self.min_words


PREPARE_RULES = (
    Rule(
        "!has(self.decontaminate) || self.spark.mode == 'Local' || self.decontaminate.sources.all(part, part.type != 'Hub')",
        "decontaminate.sources of type Hub require spark.mode Local, which downloads data sets into the prep pod",
        ".decontaminate",
    ),
    Rule(
        "!has(self.decontaminate) || self.spark.mode != 'Databricks' || self.decontaminate.sources.all(part, !has(part.path) || "
        "!part.path.startsWith('/') || part.path.startsWith('/Volumes/'))",
        "decontaminate.sources must not have a local path when spark.mode is Databricks: use s3://bucket/folder or /Volumes",
        ".decontaminate",
    ),
    Rule(
        "!has(self.decontaminate) || !has(self.output) || self.decontaminate.sources.all(part, !has(part.path) || "
        "part.path != self.output)",
        "decontaminate.sources must not include output: use another evaluation set, or change output",
        ".decontaminate",
    ),
)
"""Rules of Prepare."""


def _identify_rows(source: str) -> str:
    """Return the CEL expression of a text that is equal for sources with the same rows, in any version."""
    return (
        f"(has({source}.path) ? {source}.path : has({source}.table) ? {source}.table : ({value_or_empty(f'{source}.dataset')}) "
        f"+ ' ' + ({value_or_empty(f'{source}.config')}) + ' ' + ({value_or_empty(f'{source}.split')}))"
    )


DATA_RULES = (
    Rule(
        "!has(self.prepare) || !has(self.prepare.decontaminate) || !has(self.source) || !self.prepare.decontaminate.sources.exists("
        f"part, {_identify_rows('part')} in (has(self.source.sources) ? self.source.sources.map(source, {_identify_rows('source')}) "
        f": [{_identify_rows('self.source')}]))",
        "prepare.decontaminate.sources must not include the source: every example would be dropped",
        ".prepare.decontaminate",
        at_creation=True,
    ),
)
"""Rules of Data."""
