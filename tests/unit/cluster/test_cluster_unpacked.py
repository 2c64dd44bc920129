"""What a node begins with: links to the files of layers, and databases of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import unpacked


def test_a_node_shares_layers_and_has_its_own_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    layer, database = Path("snapshots/1/fs/file"), Path("metadata/meta.db")
    for file in (layer, database):
        (unpacked.store() / file).parent.mkdir(parents=True)
        (unpacked.store() / file).write_text("old")
    node = tmp_path / "nodes" / "one"
    unpacked.seed(node)
    (node / database).write_text("new")
    shared = [(node / file).samefile(unpacked.store() / file) for file in (layer, database)]
    assert shared == [True, False]
    assert [(unpacked.store() / file).read_text() for file in (layer, database)] == ["old", "old"]


def test_a_node_begins_with_nothing_where_nothing_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    unpacked.seed(tmp_path / "node")
    assert not (tmp_path / "node").exists()
