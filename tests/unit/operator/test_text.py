"""Time spans, and other people's errors, as a status may show them."""

from __future__ import annotations

import time

import pytest

from finetune_operator.text import format_duration, keep_beginning, keep_last_lines, shorten

SHORT = {
    "one line": ("it\n broke\t twice ", "it broke twice"),
    "a trace of Databricks": ("is not available. [TraceId: 00-1f3a9c-00]", "is not available."),
    "a request of Databricks": ("denied [ReqId: 1f3a]", "denied"),
    "in the middle": ("denied (Request ID: 1f3a) to ann", "denied to ann"),
    "of a proxy": ("blocked (ray-id=8c1f)", "blocked"),
    "two of them": ("no [trace_id: 1][request id 2]", "no"),
    "no id of a request": (
        "no (request ideas) [id: 4] (request: 4) [Errno 111]",
        "no (request ideas) [id: 4] (request: 4) [Errno 111]",
    ),
    "one that is not closed": ("denied [TraceId: 00", "denied [TraceId: 00"),
    "cut after the id is gone": ("x" * 290 + " [ReqId: 12345678]" + "y" * 11, "x" * 290 + "y" * 10 + "..."),
}


@pytest.mark.parametrize(("text", "expected"), SHORT.values(), ids=SHORT)
def test_short(text: str, expected: str) -> None:
    assert shorten(text) == expected


def test_the_end_of_a_log_has_no_credentials() -> None:
    log = "\n".join(["a"] * 20 + ["HF_TOKEN=abcdefgh", "https://me:pa55word@host", "x"])
    assert keep_last_lines(log, lines=3) == "HF_TOKEN=***\nhttps://me:***@host\nx"


def test_a_credential_is_masked_before_the_log_is_cut() -> None:
    assert keep_last_lines(f"token hf_{'a' * 40} is refused", limit=30) == "token *** is refused"


DURATIONS = {
    "none": (0, "0s"),
    "negative": (-5, "0s"),
    "seconds": (59, "59s"),
    "minutes and seconds": (61, "1m1s"),
    "whole minutes": (120, "2m"),
    "seconds no longer matter": (659, "10m"),
    "hours and minutes": (4800, "1h20m"),
    "whole hours": (7200, "2h"),
    "days and hours": (93600, "1d2h"),
    "whole days": (172800, "2d"),
}


@pytest.mark.parametrize(("seconds", "expected"), DURATIONS.values(), ids=DURATIONS)
def test_duration(seconds: int, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_the_beginning_of_a_long_text_ends_between_words() -> None:
    assert keep_beginning("short text") == "short text"
    assert keep_beginning("one two three", 9) == "one two"
    assert keep_beginning("x" * 20, 9) == "x" * 9


def test_a_long_text_is_shortened_at_once() -> None:
    # NB: a search for the end of each request id would take minutes.
    begin = time.process_time()
    shorten("(request id " * 20_000)
    assert time.process_time() - begin < 2
