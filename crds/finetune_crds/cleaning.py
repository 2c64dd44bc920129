"""Steps of `spec.data.prepare` that look at what an example says."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import A_SET, ApiModel, Name, Rule, by_key, rules
from finetune_crds.source import NamedSource, SourceName

# NB: a result with all names and versions must fit into a termination message.
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
"""A language by its code of ISO 639-1, of those that the detector knows."""

Languages = Annotated[list[Language], Field(min_length=1, max_length=32, json_schema_extra=A_SET)]

RedactKind = Literal["Email", "Phone", "CardNumber", "Secret"]

Redact = Annotated[list[RedactKind], Field(min_length=1, max_length=4, json_schema_extra=A_SET)]


class EvaluationSource(NamedSource):
    """An evaluation set."""

    name: SourceName
    """Name of the set; status.data.evaluationSets has it."""
    columns: Annotated[list[Name], Field(min_length=1, max_length=16, json_schema_extra=A_SET)] | None = None
    """Columns whose texts no example may share: texts, lists of texts, and conversations. Default: all columns of these types."""


class Decontaminate(ApiModel):
    """Evaluation sets with which no example may share a run of words."""

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
        Field(min_length=1, max_length=MAX_EVALUATION_SETS, json_schema_extra=by_key("name")),
    ]
    """The evaluation sets."""
    ngram: Annotated[int, Field(ge=5, le=50)] = 13
    """Words in a row which an example may not share with an evaluation set, compared in lower case and without punctuation.
    Default: 13."""
    min_words: Annotated[int, Field(ge=3, le=50)] | None = None
    """Fewest words of a text of an evaluation set that is compared. A text with this many and fewer than `ngram` words is compared
    whole; a shorter one, such as a number or a name, is left out. Default: 8, or `ngram` where that is less."""

    @property
    def fewest_words(self) -> int:
        """Fewest words of a text that is compared."""
        return min(8, self.ngram) if self.min_words is None else self.min_words


PREPARE_RULES = (
    Rule(
        "!has(self.decontaminate) || self.spark.mode == 'Local' || self.decontaminate.sources.all(part, part.type != 'Hub')",
        "decontaminate.sources of type Hub need spark.mode Local: a data set is downloaded into the prep pod",
        ".decontaminate",
    ),
    Rule(
        "!has(self.decontaminate) || self.spark.mode != 'Databricks' || self.decontaminate.sources.all(part, !has(part.path) || "
        "!part.path.startsWith('/') || part.path.startsWith('/Volumes/'))",
        "the path in decontaminate.sources is a folder of one machine: with spark.mode Databricks use s3://bucket/folder or "
        "/Volumes",
        ".decontaminate",
    ),
    Rule(
        "!has(self.decontaminate) || !has(self.output) || self.decontaminate.sources.all(part, !has(part.path) || "
        "part.path != self.output)",
        "decontaminate.sources includes the output: name another evaluation set, or write to another folder",
        ".decontaminate",
    ),
)
"""Rules of Prepare."""


def _reads_same(source: str) -> str:
    """CEL: an evaluation set and a source read the same rows, if of other versions."""
    return (
        f"has(part.path) && has({source}.path) && part.path == {source}.path || "
        f"has(part.table) && has({source}.table) && part.table == {source}.table || "
        f"has(part.dataset) && has({source}.dataset) && part.dataset == {source}.dataset && "
        f"(has(part.config) ? part.config : '') == (has({source}.config) ? {source}.config : '') && "
        f"(has(part.split) ? part.split : '') == (has({source}.split) ? {source}.split : '')"
    )


DATA_RULES = (
    Rule(
        "!has(self.prepare) || !has(self.prepare.decontaminate) || !has(self.source) || self.prepare.decontaminate.sources.all(part, "
        f"!({_reads_same('self.source')}) && (!has(self.source.sources) || !self.source.sources.exists(mixed, "
        f"{_reads_same('mixed')})))",
        "prepare.decontaminate.sources includes the source, which would drop every example: name an evaluation set",
        ".prepare.decontaminate",
        at_creation=True,
    ),
)
"""Rules of Data."""
