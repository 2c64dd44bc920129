"""Splits in tables of a workspace's Unity Catalog, through the real SDK, with files in an S3 that checks temporary credentials."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from databricks.sdk.service.catalog import DataSourceFormat, TableRowFilter, TableType
from deltalake import CommitProperties, write_deltalake

from finetune_crds.catalog import Catalog
from finetune_crds.data import Splits
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.prep.source import unity_catalog
from finetune_trainer.storage import unity_tables
from finetune_trainer.train.data import delta_table, read, row_places
from fixtures import fake_databricks, fake_s3
from fixtures.fake_databricks.tables import Tables
from fixtures.fake_databricks.unity import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fixtures.fake_databricks import Workspace
    from fixtures.fake_s3 import Store

ROWS = {"train": ["a", "b"], "validation": ["c"], "test": ["d", "e", "f"]}
SPLITS = Splits.model_validate({"type": "Tables"} | {split: f"main.support.chat_{split}" for split in ROWS})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store with a Delta table for each split, and with credentials of the pod that open nothing."""
    for split, texts in ROWS.items():
        write(tmp_path, split, texts)
    with fake_s3.running(fake_s3.Store(tmp_path)) as running_store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running_store.uri)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-pod")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-pod")
        yield running_store


@pytest.fixture
def workspace(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A workspace with the tables, and the login of the pod to it."""
    tables = Tables(store=store)
    for split in ROWS:
        tables.add(f"main.support.chat_{split}", f"s3://lake/{split}")
    with fake_databricks.running(fake_databricks.Workspace(tables=tables)) as running_workspace:
        for name, value in running_workspace.secret.items():
            monkeypatch.setenv(name, value)
        yield running_workspace


@pytest.fixture
def local_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables in local folders. NB: deltalake reads a table's history with Python's lock, which a server in this process needs."""
    for split, texts in ROWS.items():
        write(tmp_path, split, texts)

    def locate(table: str, _field: str) -> unity_tables.TableFiles:
        return unity_tables.TableFiles(str(tmp_path / "lake" / table.removeprefix("main.support.chat_")), {})

    monkeypatch.setattr(unity_tables, "locate", locate)


def write(folder: Path, split: str, texts: list[str], *, output: tuple[str, int] | None = None) -> None:
    """Write a version of a table, as a preparation whose `output` has this path and version does."""
    # Rows of a table have a column of the name that marks splits elsewhere.
    rows = pa.table({"text": texts, "split": ["other"] * len(texts)})
    properties = None
    if output is not None:
        path, version = output
        origin = json.dumps({"splitOf": {"path": path, "version": version, "split": split}})
        properties = CommitProperties(custom_metadata={"userMetadata": origin})
    write_deltalake(folder / "lake" / split, rows, mode="overwrite", commit_properties=properties)


def texts_of(splits: Splits) -> dict[str, list[str]]:
    return {
        split: [text for rows in read.read(splits, split, ["text"]) for text in rows["text"]]
        for split in ROWS
    }


@pytest.mark.usefixtures("workspace")
def test_each_split_is_read_with_the_credentials_of_its_table(store: Store) -> None:
    assert texts_of(SPLITS) == ROWS
    assert [column.name for column in read.read_schema(SPLITS)] == ["text", "split"]
    assert read.has_token_ids(SPLITS, "any") is False
    opened = {grant.opens for key, grant in store.grants.items() for _, by in store.reads if by == key}
    assert opened == {f"lake/{split}" for split in ROWS}


@pytest.mark.usefixtures("local_tables")
def test_a_run_reads_the_versions_that_were_the_newest_when_it_began(tmp_path: Path) -> None:
    named = SPLITS.model_copy(update={"test": "main.support.chat_test@v0"})
    write(tmp_path, "test", ["later"])
    write(tmp_path, "validation", ["second"])
    pinned = read.pin_versions(named)
    write(tmp_path, "train", ["later"])
    write(tmp_path, "validation", ["third"])
    assert texts_of(pinned) == ROWS | {"validation": ["second"]}
    assert (pinned.address, pinned.versions) == ("main.support.chat_train", "train=0,validation=1,test=0")
    assert SPLITS.pin(pinned.versions) == pinned
    # What the recipe names counts, and a split without a table has no version.
    other = Splits.model_validate({"type": "Tables", "train": "main.support.chat_train@v1"})
    assert other.pin(pinned.versions) == other
    assert texts_of(other) == {"train": ["later"], "validation": [], "test": []}


@pytest.mark.usefixtures("local_tables")
def test_tables_that_a_preparation_is_saving_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, "train", ["new"], output=("s3://b/splits", 8))
    write(tmp_path, "validation", ["old"], output=("s3://b/splits", 7))
    with pytest.raises(PodFailure) as failed:
        read.pin_versions(SPLITS)
    assert (failed.value.exit_code, failed.value.reason, failed.value.message) == (
        1,
        "MixedPreparations",
        "data.splits.train main.support.chat_train is of version 8 of s3://b/splits, and data.splits.validation "
        "main.support.chat_validation of version 7 of s3://b/splits: wait until the preparation has saved its tables, or name the "
        "versions to read with @v",
    )
    # A version in the recipe, and a table that no preparation saved, are not compared.
    named = SPLITS.model_copy(update={"validation": "main.support.chat_validation@v1"})
    assert read.pin_versions(named).versions == "train=1,validation=1,test=0"
    write(tmp_path, "validation", ["new"], output=("s3://b/splits", 8))
    assert read.pin_versions(SPLITS).versions == "train=1,validation=2,test=0"
    write(tmp_path, "test", ["new"], output=("s3://b/other", 8))
    with pytest.raises(PodFailure, match="of version 8 of s3://b/other"):
        read.pin_versions(SPLITS)


@pytest.mark.usefixtures("workspace")
def test_the_place_of_a_row_is_in_the_table_of_its_split() -> None:
    place = row_places.find_place(SPLITS, "test", 2)
    assert place is not None
    assert place.startswith("row 3 of part-")
    assert place.endswith(" of the Delta table main.support.chat_test")
    assert row_places.find_place(SPLITS, "test", 3) is None


def change(**about: Any) -> Callable[[Workspace], None]:
    def add(workspace: Workspace) -> None:
        workspace.tables.add("main.support.chat_train", "s3://lake/train", **about)

    return add


def remove(workspace: Workspace) -> None:
    del workspace.tables.by_name["main.support.chat_train"]


def revoke(workspace: Workspace) -> None:
    workspace.tables.external.clear()


def move(workspace: Workspace) -> None:
    workspace.tables.add("main.support.chat_train", "abfss://lake@a.dfs.core.windows.net/train")


def empty(workspace: Workspace) -> None:
    workspace.tables.add("main.support.chat_train", "s3://lake/nothing")


FIELD = "data.splits.train main.support.chat_train"
GRANT = (
    f"{FIELD} is not in Unity Catalog, or its files are not readable with the login of tracking: correct the name, or grant USE CATALOG, "
    "USE SCHEMA, SELECT and EXTERNAL USE SCHEMA "
)
OWN_FILES = "name a Delta table that has the rows in its own files"
REFUSED: dict[str, tuple[Callable[[Workspace], None], str, str]] = {
    "no such table": (remove, "MissingTable", f"{GRANT}(Table 'main.support.chat_train' does not exist.)"),
    "no grant": (
        revoke,
        "MissingTable",
        f"{GRANT}(User does not have EXTERNAL USE SCHEMA on Schema 'main.support'.)",
    ),
    "a view": (
        change(table_type=TableType.VIEW),
        "UnsupportedTable",
        f"{FIELD} is a VIEW, which has no files: {OWN_FILES}",
    ),
    "a row filter": (
        change(row_filter=TableRowFilter(function_name="f", input_column_names=[])),
        "UnsupportedTable",
        f"{FIELD} has a row filter or a column mask, which only the workspace applies: {OWN_FILES}",
    ),
    "catalog commits": (
        change(properties={"delta.feature.catalogManaged": "supported"}),
        "UnsupportedTable",
        f"{FIELD} is a catalog-managed table, whose newest version only its catalog knows: {OWN_FILES}",
    ),
    "another format": (
        change(data_source_format=DataSourceFormat.PARQUET),
        "UnsupportedTable",
        f"{FIELD} is not a Delta table: {OWN_FILES}",
    ),
    "another storage": (
        move,
        "UnsupportedTable",
        f"the files of {FIELD} are at abfss://lake@a.dfs.core.windows.net/train, but training reads tables of Unity Catalog only from "
        "s3://: use type Delta with a path",
    ),
    "no files": (empty, "MissingTable", f"{FIELD} is not a Delta table: correct the name"),
}


@pytest.mark.parametrize(("change_workspace", "reason", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_cannot_be_read_is_refused(
    workspace: Workspace, change_workspace: Callable[[Workspace], None], reason: str, sentence: str
) -> None:
    change_workspace(workspace)
    with pytest.raises(PodFailure) as failed:
        texts_of(SPLITS)
    assert (failed.value.exit_code, failed.value.reason, failed.value.message) == (65, reason, sentence)


@pytest.mark.usefixtures("workspace")
def test_a_version_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PodFailure) as failed:
        texts_of(SPLITS.model_copy(update={"train": "main.support.chat_train@v7"}))
    assert (failed.value.reason, failed.value.message) == (
        "MissingVersion",
        "the Delta table main.support.chat_train has no version 7: set an existing version",
    )


@pytest.mark.parametrize("token", ["revoked", ""], ids=["refused", "missing"])
def test_a_login_that_is_refused_or_missing_is_said(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in workspace.secret:
        monkeypatch.delenv(name)
    if token:
        monkeypatch.setenv("DATABRICKS_HOST", workspace.uri)
        monkeypatch.setenv("DATABRICKS_TOKEN", token)
    with pytest.raises(PodFailure) as failed:
        texts_of(SPLITS)
    assert (failed.value.exit_code, failed.value.reason) == (65, "CatalogForbidden")
    assert failed.value.message.startswith(f"the login of tracking cannot read {FIELD}: ")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "temporarily_unavailable", (1, "CatalogUnreachable")),
        (401, "invalid_client", (65, "CatalogForbidden")),
    ],
    ids=["fails", "refuses"],
)
def test_a_token_endpoint_that_fails_is_asked_by_the_next_attempt(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, status: int, code: str, expected: tuple[int, str]
) -> None:
    def refuse(*_: Any) -> None:
        raise Refusal(status, code, "No token.")

    monkeypatch.setattr(workspace, "login", refuse)
    for name in workspace.secret:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATABRICKS_HOST", workspace.uri)
    monkeypatch.setenv("DATABRICKS_CLIENT_ID", "client")
    monkeypatch.setenv("DATABRICKS_CLIENT_SECRET", "secret")
    with pytest.raises(PodFailure) as failed:
        texts_of(SPLITS)
    assert (failed.value.exit_code, failed.value.reason) == expected
    # The preparation has the same login.
    with pytest.raises(PodFailure) as failed:
        unity_catalog.locate(
            "main.support.chat_train", "Delta", "data.source.table", Catalog(type="Databricks")
        )
    assert (failed.value.exit_code, failed.value.reason) == expected


def test_a_workspace_that_does_not_answer_is_asked_by_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unity_tables, "_RETRY_TIMEOUT_SECONDS", 1)
    monkeypatch.setenv("DATABRICKS_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("DATABRICKS_TOKEN", "good")
    with pytest.raises(PodFailure) as failed:
        texts_of(SPLITS)
    assert (failed.value.exit_code, failed.value.reason) == (1, "CatalogUnreachable")


def append_file(folder: Path) -> None:
    """Add a file to the table of the training split."""
    rows = pa.table({"text": ["later"], "split": ["other"]})
    write_deltalake(folder / "lake" / "train", rows, mode="append")


@pytest.mark.usefixtures("workspace")
def test_credentials_that_expire_are_no_fault_of_the_data(store: Store, tmp_path: Path) -> None:
    append_file(tmp_path)
    batches = read.read(SPLITS, "train", ["text"])
    next(batches)
    store.expired |= set(store.grants)
    with pytest.raises(PodFailure) as failed:
        next(batches)
    assert (failed.value.exit_code, failed.value.reason) == (1, "CredentialsExpired")


@pytest.mark.usefixtures("workspace")
def test_credentials_are_renewed_between_files(store: Store, tmp_path: Path) -> None:
    append_file(tmp_path)
    seconds = 0.0
    batches = delta_table.read_rows(SPLITS, "train", ["text"], (), None, clock=lambda: seconds)
    texts = [*next(batches)["text"]]
    store.expired |= set(store.grants)
    # A later version has other files.
    write(tmp_path, "train", ["replaced"])
    seconds = 31 * 60.0
    texts += [text for rows in batches for text in rows["text"]]
    assert sorted(texts) == ["a", "b", "later"]
