"""Data sets of the Hub, from a stand-in that the real clients talk to."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.prep.source import hub
from fixtures.fake_hub import Hub, Repository, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def parquet(*texts: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), file)
    return file.getvalue()


CONFIGS = b"""---
configs:
- config_name: en
  data_files: en/*.parquet
- config_name: de
  data_files: [{split: train, path: de/one.parquet}, {split: validation, path: de/two.parquet}]
---
"""
SPLITS_OF_JSON = b"""---
configs:
- config_name: default
  data_files: [{split: train, path: a.jsonl}, {split: train_sft, path: b.jsonl}]
---
"""
DATASETS = {
    "org/splits": Repository(
        {
            "data/train-00000-of-00002.parquet": parquet("a"),
            "data/train-00001-of-00002.parquet": parquet("b"),
            "data/test-00000-of-00001.parquet": parquet("t"),
            "README.md": b"",
        }
    ),
    "org/configs": Repository(
        {
            "README.md": CONFIGS,
            "en/one.parquet": parquet("en"),
            "de/one.parquet": parquet("de"),
            "de/two.parquet": parquet("v"),
        }
    ),
    "org/list": Repository({"alpaca.json": json.dumps([{"text": "a"}, {"text": "b"}]).encode()}),
    "org/table": Repository({"validation.csv": b"text\na\n", "test.csv": b"text\nt\n"}),
    "org/likely": Repository(
        {"README.md": SPLITS_OF_JSON, "a.jsonl": b'{"text": "a"}', "b.jsonl": b'{"text": "b"}'}
    ),
    "org/script": Repository({"script.py": b"raise SystemExit", "a.parquet": parquet("a")}),
    "org/gated": Repository({"a.parquet": parquet("a")}, gated=True),
    "org/empty": Repository({"README.md": b""}),
    "org/broken": Repository({"a.jsonl": b'{"text": "a"}\n{"text":'}),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running(monkeypatch, tmp_path / "cache", DATASETS) as hub:
        yield hub


def fetched(folder: Path, **of: str) -> tuple[list[str], str]:
    """The texts of a data set, and the commit that they are of."""
    paths, commit = hub.fetch(Source.model_validate({"type": "Hub", **of}), folder, "data.source")
    return [text for path in paths for text in pq.read_table(path)["text"].to_pylist()], commit


LOADED: list[tuple[str, dict[str, str], list[str]]] = [
    ("the split train", {"dataset": "org/splits"}, ["a", "b"]),
    ("another split", {"dataset": "org/splits", "split": "test"}, ["t"]),
    ("a configuration with one split", {"dataset": "org/configs", "config": "en"}, ["en"]),
    (
        "a configuration and a split",
        {"dataset": "org/configs", "config": "de", "split": "validation"},
        ["v"],
    ),
    ("a file of JSON that is one list", {"dataset": "org/list"}, ["a", "b"]),
    ("a split whose name begins another's", {"dataset": "org/likely", "split": "train"}, ["a"]),
    ("a split of CSV", {"dataset": "org/table", "split": "validation"}, ["a"]),
]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("of", "texts"), [row[1:] for row in LOADED], ids=[row[0] for row in LOADED])
def test_a_data_set_is_loaded_as_load_dataset_does(
    tmp_path: Path, of: dict[str, str], texts: list[str]
) -> None:
    commit = DATASETS[of["dataset"]].commit
    assert fetched(tmp_path, **of) == (texts, commit)
    assert fetched(tmp_path / "again", **of, revision=commit) == (texts, commit)


def test_only_the_split_that_is_read_is_downloaded(server: Hub, tmp_path: Path) -> None:
    fetched(tmp_path, dataset="org/splits", split="test")
    got = [line for line in server.requests if line.startswith("GET /datasets/")]
    assert [line.rpartition("/")[2] for line in got if line.endswith(".parquet")] == [
        "test-00000-of-00001.parquet"
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("../../../evil-train.parquet", "has files outside of the data set"),
        ("data/train-..\\evil.parquet", "has a file 'data/train-..\\\\evil.parquet', which has a backslash"),
    ],
)
def test_a_file_with_a_path_out_of_the_data_set_is_not_downloaded(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    unsafe = Repository({"data/train.parquet": parquet("a"), name: parquet("evil")})
    monkeypatch.setitem(server.datasets, "org/unsafe", unsafe)
    with pytest.raises(PodFailure) as caught:
        fetched(tmp_path / "a" / "b" / "c", dataset="org/unsafe", split="train")
    assert (caught.value.exit_code, caught.value.reason) == (65, "UnsafeSource")
    assert caught.value.message.startswith(f"data.source.dataset org/unsafe {problem}")
    assert not [*tmp_path.rglob("*evil*.parquet")]


def test_main_is_resolved_once(server: Hub, tmp_path: Path) -> None:
    """What is downloaded belongs to the commit that the result names, also where main moves meanwhile."""
    fetched(tmp_path, dataset="org/splits")
    assert [line for line in server.requests if line.endswith("/main") or "/main/" in line] == []
    assert [line for line in server.requests if line.endswith("/api/datasets/org/splits")] == [
        "GET /api/datasets/org/splits"
    ]


def test_a_gated_data_set_needs_the_token(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert fetched(tmp_path, dataset="org/gated")[0] == ["a"]


TOKEN = "in envFrom of spec.pods.prepare or spec.pods.all, name a Secret whose HF_TOKEN may read the data set"
REFUSED: list[tuple[str, dict[str, str], int, str, str]] = [
    (
        "missing",
        {"dataset": "org/none"},
        65,
        "MissingSource",
        f"org/none does not exist: correct data.source.dataset; if the data set is private, {TOKEN}",
    ),
    (
        "no id",
        {"dataset": "a/b/c"},
        65,
        "MissingSource",
        "a/b/c is not a valid id of a data set: use the form org/name",
    ),
    (
        "revision",
        {"dataset": "org/splits", "revision": "v9"},
        65,
        "MissingSource",
        "org/splits has no revision v9: correct data.source.revision",
    ),
    (
        "gated",
        {"dataset": "org/gated"},
        65,
        "AccessDenied",
        f"org/gated is gated: accept the terms of the data set on the Hub, and {TOKEN}",
    ),
    (
        "no configuration of that name",
        {"dataset": "org/configs", "config": "fr"},
        65,
        "MissingSource",
        "org/configs has no config fr: set data.source.config to one of en, de",
    ),
    (
        "no configuration named",
        {"dataset": "org/configs"},
        65,
        "MissingSource",
        "org/configs has no default config: set data.source.config to one of en, de",
    ),
    (
        "no configuration of that name beside the only one",
        {"dataset": "org/splits", "config": "fr"},
        65,
        "MissingSource",
        "org/splits has no config fr: set data.source.config to default",
    ),
    (
        "no split of that name",
        {"dataset": "org/splits", "split": "dev"},
        65,
        "MissingSource",
        "org/splits has no split dev: set data.source.split to one of train, test",
    ),
    (
        "no split named",
        {"dataset": "org/table"},
        65,
        "MissingSource",
        "org/table has no default split: set data.source.split to one of validation, test",
    ),
    (
        "a script",
        {"dataset": "org/script"},
        64,
        "RecipeRefused",
        "org/script is loaded by its script script.py, and scripts of data sets are not run: set data.source.revision to "
        "refs/convert/parquet, or name a copy of the data set in Parquet",
    ),
    (
        "no files",
        {"dataset": "org/empty"},
        65,
        "EmptySource",
        "org/empty has no files that can be read as rows",
    ),
    (
        "a line that was cut",
        {"dataset": "org/broken"},
        65,
        "UnreadableSource",
        "org/broken cannot be read: JSON parse error: Invalid value. in row 1",
    ),
]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("of", "code", "reason", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_data_set_that_cannot_be_read(
    tmp_path: Path, of: dict[str, str], code: int, reason: str, sentence: str
) -> None:
    with pytest.raises(PodFailure) as failed:
        fetched(tmp_path, **of)
    failure = (failed.value.exit_code, failed.value.reason, failed.value.message)
    assert failure == (code, reason, f"data.source.dataset {sentence}")


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_that_does_not_answer_is_tried_again(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    server.away = True
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    with pytest.raises(PodFailure) as failed:
        fetched(tmp_path, dataset="org/splits")
    assert (failed.value.exit_code, failed.value.reason, failed.value.message) == (
        1,
        "HubUnreachable",
        "data.source.dataset org/splits cannot be downloaded because the Hub does not respond: allow egress from the pod, or set "
        "HF_ENDPOINT to a mirror of the Hub",
    )


def test_the_rows_and_the_commit_reach_the_result(server: Hub, spark: Any, tmp_path: Path) -> None:
    from finetune_trainer.prep.source import reader

    corpus = reader.read(spark, Source(type="Hub", dataset="org/splits"), tmp_path)
    assert sorted(row["text"] for row in corpus.frame.collect()) == ["a", "b"]
    assert corpus.at == f" at commit {DATASETS['org/splits'].commit}"
