from __future__ import annotations

from pathlib import Path

import pytest

from support.docstrings import Stale, find_stale_entries, list_classes, main

BODY = '''def f(path, *names, limit=1, **more):
    """Do it.

    Args:
        path: where.
        names: of it.
        limit: how often.
        more: options.{argument}

    Raises:
        ValueError: it is wrong.{error}
    """
'''
STALE = {
    "nothing": (BODY.format(argument="", error=""), []),
    "a parameter": (BODY.format(argument="\n        known: before.", error=""), [Stale(1, "f", "known")]),
    "an error": (BODY.format(argument="", error="\n        GoneError: ever."), [Stale(1, "f", "GoneError")]),
    "an error of the packages": (BODY.format(argument="", error="\n        OurError: ever."), []),
    "a tuple of errors": (BODY.format(argument="", error="\n        FAILURES: ever."), []),
    "words in an entry": (BODY.format(argument="\n            NB: it is long.", error=""), []),
}


@pytest.mark.parametrize(("source", "expected"), STALE.values(), ids=STALE)
def test_what_is_stale(source: str, expected: list[Stale]) -> None:
    classes = list_classes(["class OurError(Exception): ...\nFAILURES = (OurError, ValueError)\n"])
    assert find_stale_entries(source, classes) == expected


def test_the_exit_code_says_whether_there_are_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.py").write_text(BODY.format(argument="", error=""), encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    stale = BODY.format(argument="\n        known: before.", error="")
    (tmp_path / "module.py").write_text(stale, encoding="utf-8")
    assert main([str(tmp_path)]) == 1
    assert (
        capsys.readouterr().out
        == f"{tmp_path}/module.py:1: the docstring of f describes known, which is not there\n"
    )
