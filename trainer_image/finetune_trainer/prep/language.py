"""Drops examples that are certainly in another language than those that are wanted.

The detector is py3langid: its model comes with the package, and the same text has the same language everywhere.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

# NB: Spark reads the types of a function's arguments, so they must be there when it runs.
import pyarrow as pa
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

    from finetune_crds.cleaning import Language

# The language of a text is uncertain below this probability.
_CERTAIN = 0.5
# The detector reads about 1 MB of text a second; more of an example does not change its language.
_MOST_CHARS = 2_000
# Code between fences, and addresses of the web.
_NO_LANGUAGE = re.compile(r"```.*?(?:```|\Z)|https?://\S+", re.DOTALL)
# Languages of ISO 639-3 that are part of one of ISO 639-1.
_PART_OF = {"ary": "ar", "arz": "ar", "nn": "no", "sdh": "ku", "uzs": "uz", "wuu": "zh", "yue": "zh"}


def foreign(text: Column, wanted: Sequence[Language]) -> Column:
    """Return whether a text is certainly in another language than those that are wanted."""
    detect = sf.arrow_udf(_detected, "string")
    found = detect(sf.substring(text, 1, 2 * _MOST_CHARS))
    return ~sf.coalesce(found, sf.lit(wanted[0])).isin(*wanted)


def _detected(texts: pa.Array) -> pa.Array:
    return pa.array([detected(text or "") for text in texts.to_pylist()], pa.string())


def detected(text: str) -> str | None:
    """Return the code of a text's language, or None where it is not certain: a short text, code, numbers or names.

    Code between fences and addresses of the web are left out.
    """
    said = _NO_LANGUAGE.sub(" ", text)[:_MOST_CHARS]
    shares: dict[str, float] = {}
    for code, share in _detector().rank(said):
        language = _PART_OF.get(code, code)
        shares[language] = shares.get(language, 0.0) + share
    best = max(shares, key=lambda code: shares[code])
    return best if shares[best] >= _CERTAIN and best != "zxx" else None


@cache
def _detector() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
