"""The corpus script: what it finds in sources, and that there is something to filter in it."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from demo.scripts import corpus

PACKAGE = {
    "parcel/__init__.py": '"""Parcels."""\nfrom .box import Box, seal as close\nfrom .box import _hidden\n',
    "parcel/box.py": '''
class Box:
    """A box that holds things."""

    def open(self):
        """Open the box.

        Details that come after enough was said are left out, and this paragraph is long enough to be enough: it says
        nothing at all, at some length, and then it goes on saying nothing until there are a hundred and sixty letters.

        Too much.
        """

    def _inner(self):
        """Not part of the corpus."""

def seal(box):
    """Seal a box with tape."""
''',
    "parcel/tests/test_box.py": '"""Tests are no documentation."""',
    "broken.py": "def (",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of packages."""
    for name, text in PACKAGE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def test_objects_are_found_under_their_public_names_and_exports_are_duplicates(folder: Path) -> None:
    found = [(row.id, row.instruction, row.answer.split("\n")[0]) for row in corpus.rows([folder])]
    assert found == [
        ("parcel", "What is the module parcel for?", "Parcels."),
        ("parcel.box.Box", "What is parcel.Box for?", "A box that holds things."),
        ("parcel.box.Box.open", "What does parcel.Box.open do?", "Open the box."),
        ("parcel.box.seal", "What does parcel.close do?", "Seal a box with tape."),
        ("parcel:parcel.box.Box", "What is parcel.Box for?", "A box that holds things."),
        ("parcel:parcel.box.seal", "What does parcel.close do?", "Seal a box with tape."),
    ]


def test_a_row_has_its_kind_and_another_one(folder: Path) -> None:
    found = {row.id: (row.kind, row.other_kind) for row in corpus.rows([folder])}
    assert {name: kind for name, (kind, _) in found.items()} == {
        "parcel": "module",
        "parcel.box.Box": "class",
        "parcel.box.Box.open": "function",
        "parcel.box.seal": "function",
        "parcel:parcel.box.Box": "class",
        "parcel:parcel.box.seal": "function",
    }
    assert all(other in corpus.KINDS and other != kind for kind, other in found.values())


def test_answers_are_the_first_paragraphs(folder: Path) -> None:
    answer = next(row.answer for row in corpus.rows([folder]) if row.id == "parcel.box.Box.open")
    assert answer.startswith("Open the box.\n\nDetails")
    assert "Too much" not in answer


QUALITY = {
    "nothing": ("", 0.0),
    "a good sentence": ("Return the list of names in the folder at the given path.", 1.0),
    "too short, no end": ("Return it", 0.667),
    "a doctest": (">>> add(1, 2)\n3", 0.167),
    "a table": ("name | value\n---- | -----\none | 1", 0.333),
}


@pytest.mark.parametrize(("answer", "quality"), QUALITY.values(), ids=QUALITY)
def test_quality(answer: str, quality: float) -> None:
    assert corpus.quality(answer) == quality


def test_written_rows_are_read_back_in_order(folder: Path, tmp_path: Path) -> None:
    found = list(corpus.rows([folder]))
    corpus.write(found, str(tmp_path / "out"))
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert [row for file in files for row in pq.read_table(file).to_pylist()] == [vars(row) for row in found]


def test_a_preference_is_an_answer_over_its_own_words_in_another_order() -> None:
    good = "Return the list of names in the folder at the given path."
    rows = [
        corpus.Row("a", "m", "What does a do?", good, 1.0, "function", "class"),
        corpus.Row("b", "m", "What does b do?", "Return it", 1.0, "function", "class"),
        corpus.Row("c", "m", "What does c do?", good, 0.5, "function", "class"),
        corpus.Row("d", "m", "What does d do?", good * 20, 1.0, "function", "class"),
        corpus.Row("e", "m", "What does e do?", "a" * 50, 1.0, "function", "class"),
    ]
    (found,) = corpus.preferences(rows)
    assert (found.prompt, found.chosen) == ("What does a do?", good)
    assert found.rejected != good
    assert sorted(found.rejected.split()) == sorted(good.split())
    assert list(corpus.preferences(rows)) == [found]


def test_this_machine_has_enough_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "preferences"
    assert corpus.main([str(tmp_path / "all"), "--rows", "8000", "--preferences", str(pairs)]) == 0
    table = pq.read_table(pairs)
    assert (table.column_names, table.num_rows) == (["prompt", "chosen", "rejected"], corpus.PREFERENCES)
    rows = pq.read_table(tmp_path / "all").to_pylist()
    answers = [row["answer"] for row in rows]
    assert len(rows) >= 8000
    assert len({(row["instruction"], row["answer"]) for row in rows}) < len(rows) - 100
    assert sum(not answer for answer in answers) > 100
    assert sum(len(answer) > 1200 for answer in answers) > 10
    assert len({row["id"] for row in rows}) > 0.98 * len(rows)
    assert f"corpus: {len(rows)} rows" in capsys.readouterr().out
