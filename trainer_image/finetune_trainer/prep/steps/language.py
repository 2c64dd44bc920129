"""Flags examples that are certainly not in the languages of the recipe.

The detector is py3langid: its model comes with the package, and the same text has the same language everywhere.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, StructField, StructType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from finetune_crds.cleaning import Language

# Columns in addition to the columns of the source.
FOREIGN, _TEXT = "__finetune_foreign", "__finetune_said"
# The language of a text is uncertain below this probability.
_MIN_PROBABILITY = 0.5
# The detector reads about 1 MB of text a second; more of an example does not change its language.
_MAX_CHARS = 2_000
# Code between fences, and addresses of the web.
_CODE_OR_URL = re.compile(r"```.*?(?:```|\Z)|https?://\S+", re.DOTALL)
# The detector's codes of languages that count as another language.
_PART_OF = {"ary": "ar", "arz": "ar", "nn": "no", "sdh": "ku", "uzs": "uz", "wuu": "zh", "yue": "zh"}


def with_foreign(frame: DataFrame, text: Column, languages: Sequence[Language]) -> DataFrame:
    """Add the column FOREIGN: whether a text is certainly in none of the languages."""
    schema = StructType([*frame.schema.fields, StructField(FOREIGN, BooleanType(), nullable=False)])
    # NB: not every Databricks Runtime has functions of Arrow arrays (arrow_udf), so the function gets whole batches. Each text has up to
    # twice the characters that the detector reads, because `detect` first removes code and addresses.
    with_text = frame.withColumn(_TEXT, sf.substring(text, 1, 2 * _MAX_CHARS))
    return with_text.mapInArrow(partial(_flag_batches, languages=frozenset(languages)), schema)


def _flag_batches(
    batches: Iterable[pa.RecordBatch], *, languages: frozenset[str]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        codes = [detect(text or "") for text in batch.column(_TEXT).to_pylist()]
        foreign = pa.array([code is not None and code not in languages for code in codes])
        names = [name for name in batch.schema.names if name != _TEXT]
        columns = [*(batch.column(name) for name in names), foreign]
        yield pa.RecordBatch.from_arrays(columns, [*names, FOREIGN])


def detect(text: str) -> str | None:
    """Return the code of a text's language, or None if it is uncertain, as for a short text, code, numbers or names.

    Code between fences and addresses of the web are left out.
    """
    prose = _CODE_OR_URL.sub(" ", text)[:_MAX_CHARS]
    shares: dict[str, float] = {}
    for code, share in _load_detector().rank(prose):
        language = _PART_OF.get(code, code)
        shares[language] = shares.get(language, 0.0) + share
    best = max(shares, key=lambda code: shares[code])
    # zxx is the detector's code for text without language.
    return best if shares[best] >= _MIN_PROBABILITY and best != "zxx" else None


@cache
def _load_detector() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
