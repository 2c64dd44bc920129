"""Detects invalid text in files of texts, for every reader."""

from __future__ import annotations

import json
import re
from typing import Any

from finetune_trainer.examples.plain_text import WrittenFloat

NOT_UTF8 = "it is not UTF-8"
HALF_CHARACTER = "it contains an unpaired surrogate"
TOO_DEEP = "the JSON is nested too deeply"
"""Reasons why a line or a value cannot be read."""

# A surrogate, written as an escape or as bytes.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def load_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of JSON text.

    Args:
        options: of `json.loads`.

    Raises:
        ValueError: the text is not JSON, or is nested more deeply than Python can read.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error


def parse_json(line: bytes) -> Any:
    """Return the value of a line of JSON; a number with a point or an exponent is a `WrittenFloat`.

    Raises:
        ValueError: the line is not JSON, not UTF-8, or has an unpaired surrogate, which Python accepts but tokenizers do not.
    """
    try:
        value = load_json(line, parse_float=WrittenFloat)
        # A surrogate that is not half of a pair cannot be encoded.
        if _SURROGATE.search(line):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UTF8) from error
    except UnicodeEncodeError as error:
        raise ValueError(HALF_CHARACTER) from error
    return value
