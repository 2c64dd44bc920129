"""Lines of JSON that Python would read and no tokenizer takes."""

from __future__ import annotations

import pytest

from finetune_trainer.examples.encodings import HALF_CHARACTER, NOT_UTF8, parse_json

# A line of JSON, and its value, or why it cannot be read.
LINES: dict[str, tuple[bytes, str]] = {
    "UTF-8": ('"caf\u00e9 \U0001f600"'.encode(), "caf\u00e9 \U0001f600"),
    "with a byte order mark": ('"a"'.encode("utf-8-sig"), "a"),
    "Hangul, whose bytes begin as those of a surrogate": ('"\ud55c"'.encode(), "\ud55c"),
    "a pair": (rb'"\ud83d\ude00"', "\U0001f600"),
    "a backslash before a u": (rb'"\\ud83d"', r"\ud83d"),
    "cp1252": (b'"caf\xe9"', NOT_UTF8),
    "a first half": (rb'"\ud83d"', HALF_CHARACTER),
    "a second half in a key": (rb'{"\uDE00": 1}', HALF_CHARACTER),
    "the bytes of a half": (b'"\xed\xa0\xbd"', HALF_CHARACTER),
    "no JSON": (b'{"a":', "Expecting value: line 1 column 6 (char 5)"),
}


@pytest.mark.parametrize("case", LINES)
def test_lines_of_json(case: str) -> None:
    line, expected = LINES[case]
    try:
        value = parse_json(line)
    except ValueError as error:
        value = str(error)
    assert value == expected
