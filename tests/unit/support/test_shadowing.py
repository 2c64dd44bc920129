from __future__ import annotations

from pathlib import Path

import pytest

from support.shadowing import Shadow, find_shadows, main

SHADOWED = {
    "an import": ("import json\ndef f():\n    json = 1\n", [Shadow(3, "f", "json")]),
    "an import under another name": ("import a.b as c\ndef f(c): ...\n", [Shadow(2, "f", "c")]),
    "an import for type checkers": (
        "if TYPE_CHECKING:\n    from a import b\ndef f(b): ...\n",
        [Shadow(3, "f", "b")],
    ),
    "a function, by a parameter": (
        "def read(): ...\nasync def f(*, read=1): ...\n",
        [Shadow(2, "f", "read")],
    ),
    "a function, by a loop": (
        "def item(): ...\ndef f(x):\n    for item in x: ...\n",
        [Shadow(3, "f", "item")],
    ),
    "a function, by a comprehension": (
        "def item(): ...\ndef f(x):\n    return [item for item in x]\n",
        [Shadow(3, "f", "item")],
    ),
    "a function, by an error": (
        "def error(): ...\ndef f():\n    try: ...\n    except E as error: ...\n",
        [Shadow(4, "f", "error")],
    ),
    "a function, by a pattern": (
        "def x(): ...\ndef f(a):\n    match a:\n        case [x, *_]: ...\n",
        [Shadow(4, "f", "x")],
    ),
    "a function, by one within": ("def x(): ...\ndef f():\n    def x(): ...\n", [Shadow(3, "f", "x")]),
    "in a method": (
        "def x(): ...\nclass A:\n    def f(self, x): ...\n",
        [Shadow(3, "f", "x")],
    ),
    "once, in the function within": (
        "def x(): ...\ndef f():\n    def g():\n        x = 1\n",
        [Shadow(4, "g", "x")],
    ),
}


@pytest.mark.parametrize(("source", "expected"), SHADOWED.values(), ids=SHADOWED)
def test_what_shadows(source: str, expected: list[Shadow]) -> None:
    assert find_shadows(source) == expected


FREE = {
    "a method of the name": "def read(): ...\nclass A:\n    def read(self): ...\n",
    "a field of the name": "def read(): ...\nclass A:\n    read: int = 1\n",
    "a keyword of the name": "def read(): ...\ndef f():\n    g(read=1)\n",
    "an attribute of the name": "def read(): ...\ndef f(a):\n    a.read = 1\n",
    "an import in the function": "import a\ndef f():\n    import a\n",
    "a name that is not used": "from gettext import gettext as _\ndef f(x):\n    a, _ = x\n",
    "a feature of Python": "from __future__ import annotations\ndef f(annotations): ...\n",
    "a constant": "X = 1\ndef f():\n    X = 2\n",
}


@pytest.mark.parametrize("source", FREE.values(), ids=FREE)
def test_what_does_not_shadow(source: str) -> None:
    assert find_shadows(source) == []


def test_the_exit_code_says_whether_there_are_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "pkg/module.py"
    module.parent.mkdir()
    module.write_text("import json\n")
    assert (main([str(tmp_path)]), capsys.readouterr().out) == (0, "")
    module.write_text("import json\ndef f(json): ...\n")
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        f"{module}:2: json in f shadows a name of the module\n"
        "1 local names shadow an import or a function of their module: rename them\n"
    )
