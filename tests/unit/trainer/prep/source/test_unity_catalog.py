"""Tables of Unity Catalog by their names, through the real SDK, with files in an S3 that checks temporary credentials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from databricks.sdk.service.catalog import (
    ColumnInfo,
    ColumnMask,
    DataSourceFormat,
    TableRowFilter,
    TableType,
)
from deltalake import write_deltalake

from finetune_crds import FineTuneJob
from finetune_crds.catalog import Catalog
from finetune_crds.data import Columns
from finetune_crds.recipe import JobReference, Recipe
from finetune_crds.reference import SAMPLES
from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import DataError, PodFailure, TrainingError
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.source import reader, unity_catalog
from finetune_trainer.storage import unity_tables
from fixtures import fake_databricks, fake_s3, fake_unity_catalog
from fixtures.fake_databricks.tables import Tables
from unit.trainer.prep.recipes import prepare_quickly, recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from fixtures.fake_databricks import Workspace
    from fixtures.fake_s3 import Store
    from unit.trainer.prep.recipes import Preparer

TABLE = "main.support.chats"
FIELD = f"data.source.table {TABLE}"
ROWS = [{"question": f"What is in hall {number}?", "answer": f"Table {number}."} for number in range(20)]
TASKS = "main.evaluation.tasks"
TASK = "which of the two old tables beside the window is the higher one"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Store]:
    """A store whose bucket `lake` has a Delta table of two versions, another one, tasks, and Parquet files."""
    folder = tmp_path_factory.mktemp("store")
    tables = folder / "lake" / "tables"
    write_deltalake(tables / "chats", pa.Table.from_pylist(ROWS[:5]))
    write_deltalake(tables / "chats", pa.Table.from_pylist(ROWS[5:]), mode="append")
    write_deltalake(tables / "other", pa.Table.from_pylist([{"question": "Who?", "answer": "They."}]))
    write_deltalake(tables / "tasks", pa.table({"task": ["too short"]}))
    write_deltalake(tables / "tasks", pa.table({"task": [TASK]}), mode="overwrite")
    (tables / "files").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tables / "files" / "a.parquet")
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    with fake_s3.running(fake_s3.Store(folder)) as running_store:
        settings = {
            "endpoint": running_store.uri,
            "path.style.access": "true",
            "endpoint.region": "us-east-1",
            "connection.ssl.enabled": "false",
        }
        for name, value in settings.items():
            configuration.set(f"fs.s3a.bucket.lake.{name}", value)
        yield running_store


@pytest.fixture
def tables(store: Store) -> Tables:
    """The tables of a catalog."""
    catalog_tables = Tables(store=store)
    catalog_tables.add(TABLE, "s3://lake/tables/chats")
    catalog_tables.add("main.support.other", "s3://lake/tables/other")
    catalog_tables.add(TASKS, "s3://lake/tables/tasks")
    catalog_tables.add(
        "main.support.files", "s3://lake/tables/files", data_source_format=DataSourceFormat.PARQUET
    )
    return catalog_tables


@pytest.fixture
def catalog(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """An open-source server that wants a token, and has it."""
    monkeypatch.setenv("UNITY_CATALOG_TOKEN", "good")
    with fake_unity_catalog.running(tables, "good") as address:
        yield at(address)


def at(address: str) -> Catalog:
    return Catalog.model_validate({"type": "UnityCatalog", "unityCatalog": {"uri": address}})


def test_a_table_is_prepared_at_its_version_with_its_own_credentials(
    prepare: Preparer, catalog: Catalog, store: Store
) -> None:
    before = set(store.grants)
    source = {"type": "Delta", "table": TABLE}
    result = prepare([{"unused": 1}], source=source, catalog=catalog.to_json())
    assert (result.source_version, len(table_of(result))) == (1, 20)
    (key,) = set(store.grants) - before
    read = {path for path, by in store.reads if by == key}
    assert {path.split("/")[2] for path in read} == {"chats"}
    assert any(path.endswith(".parquet") for path in read)


def test_an_evaluation_set_is_a_table(
    prepare: Preparer, catalog: Catalog, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(store.grants)
    sets = {"sources": [{"name": "tasks", "type": "Delta", "table": TASKS}]}
    rows = [*ROWS[:3], {"question": f"Say {TASK}.", "answer": "The left one."}]
    result = prepare(rows, decontaminate=sets, catalog=catalog.to_json())
    assert sorted(row["prompt"] for row in table_of(result)) == [row["question"] for row in ROWS[:3]]
    assert result.dropped == {"notNull": 0, "decontaminate": 1, "dedupe": 0}
    assert [evaluation_set.to_json() for evaluation_set in result.evaluation_sets or []] == [
        {"name": "tasks", "examples": 1, "version": 1}
    ]
    assert f"evaluation set tasks: {TASKS} version 1, columns task\n" in capsys.readouterr().out
    read = {path.split("/")[2] for path, by in store.reads if by in set(store.grants) - before}
    assert read == {"tasks"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"table": "main.evaluation.nowhere"},
            "data.prepare.decontaminate.sources[tasks].table main.evaluation.nowhere is not in Unity Catalog at "
            "{host}, or the principal of data.prepare.catalog has no access to it: correct the name, or grant USE "
            "CATALOG, USE SCHEMA and SELECT (Table 'main.evaluation.nowhere' does not exist.)",
        ),
        (
            {"type": "Parquet"},
            f"data.prepare.decontaminate.sources[tasks].table {TASKS} is in the format DELTA, and "
            "data.prepare.decontaminate.sources[tasks].type is Parquet: correct the type, or name a Parquet table",
        ),
    ],
    ids=["no such table", "another format"],
)
def test_an_evaluation_set_that_is_no_such_table_is_said(
    prepare: Preparer, catalog: Catalog, changes: dict[str, Any], sentence: str
) -> None:
    source = {"name": "tasks", "type": "Delta", "table": TASKS, **changes}
    with pytest.raises(DataError) as failed:
        prepare(ROWS[:1], decontaminate={"sources": [source]}, catalog=catalog.to_json())
    assert catalog.unity_catalog
    assert failed.value.message == sentence.replace("{host}", catalog.unity_catalog.uri)


def test_the_sample(
    spark: SparkSession, tables: Tables, catalog: Catalog, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """The sample unity-catalog, with the address of this server, another tokenizer, and a folder as output."""
    (body,) = yaml.safe_load_all((SAMPLES / "unity-catalog.yaml").read_text(encoding="utf-8"))
    data = body["spec"]["data"]
    assert tables.store
    turns = [
        {
            "messages": [
                {"role": "user", "content": f"{row['question']} Say it {times} times."},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in ROWS
        for times in range(10)
    ]
    write_deltalake(tables.store.folder / "lake" / "sample", pa.Table.from_pylist(turns))
    tables.add(data["source"]["table"], "s3://lake/sample")
    assert catalog.unity_catalog
    data["prepare"]["catalog"]["unityCatalog"]["uri"] = catalog.unity_catalog.uri
    data["prepare"]["output"] = str(tmp_path / "out")
    body["spec"]["model"]["base"] = str(tokenizer_folder)
    reference = JobReference(name=body["metadata"]["name"], namespace="default", uid="uid-1")
    result = prepare_quickly(spark, Recipe.of(reference, FineTuneJob.model_validate(body).spec))
    assert (result.source_version, len(table_of(result)), result.columns) == (
        0,
        200,
        Columns.model_validate(data["columns"]),
    )


def test_an_old_version_and_parquet_files(spark: SparkSession, catalog: Catalog, tmp_path: Path) -> None:
    old = Source.model_validate({"type": "Delta", "table": TABLE, "version": 0})
    corpus = reader.read(spark, old, tmp_path, catalog=catalog)
    assert (corpus.version, corpus.frame.count()) == (0, 5)
    files = Source.model_validate({"type": "Parquet", "table": "main.support.files"})
    first, again = (reader.read(spark, files, tmp_path, catalog=catalog) for _ in range(2))
    assert first.frame.count() == 20
    # Each reading has other credentials; what is read is the same.
    assert first.identity == again.identity
    assert first.frame.inputFiles()[0] != again.frame.inputFiles()[0]


def test_two_tables_of_one_bucket_are_read_each_with_its_credentials(
    spark: SparkSession, catalog: Catalog, tmp_path: Path
) -> None:
    sources = [
        Source.model_validate({"type": "Delta", "table": f"main.support.{name}"})
        for name in ("chats", "other")
    ]
    first, second = (reader.read(spark, source, tmp_path, catalog=catalog).frame for source in sources)
    assert first.union(second).count() == 21
    assert first.count() == 20


def test_credentials_that_expire_are_said(
    spark: SparkSession, catalog: Catalog, store: Store, tmp_path: Path
) -> None:
    before = set(store.grants)
    source = Source.model_validate({"type": "Delta", "table": TABLE})
    frame = reader.read(spark, source, tmp_path, catalog=catalog).frame
    store.expired |= set(store.grants) - before
    with pytest.raises(TrainingError) as failed, spark_errors.translate_errors(build_plan(recipe())):
        frame.collect()
    assert failed.value.reason == "CredentialsExpired"
    assert failed.value.message.startswith("the credentials from Unity Catalog for s3://lake/tables/chats/")


LOGINS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "a token in the Secret of the catalog": (
        {"databricks": {"secretRef": {"name": "d"}}},
        {"FINETUNE_CATALOG_DATABRICKS_HOST": "{host}", "FINETUNE_CATALOG_DATABRICKS_TOKEN": "dapi-good"},
    ),
    "a service principal in the Secret of the catalog, beside another login": (
        {"databricks": {"secretRef": {"name": "d"}}},
        {
            "FINETUNE_CATALOG_DATABRICKS_HOST": "{host}",
            "FINETUNE_CATALOG_DATABRICKS_CLIENT_ID": "principal",
            "FINETUNE_CATALOG_DATABRICKS_CLIENT_SECRET": "principal-secret",
            "DATABRICKS_HOST": "http://127.0.0.1:1",
            "DATABRICKS_TOKEN": "of-the-run",
        },
    ),
    "that of the pod": ({}, {"DATABRICKS_HOST": "{host}", "DATABRICKS_TOKEN": "dapi-good"}),
    "the pod's ServiceAccount": (
        {},
        {
            "DATABRICKS_HOST": "{host}",
            "DATABRICKS_AUTH_TYPE": "file-oidc",
            "DATABRICKS_OIDC_TOKEN_FILEPATH": "{folder}/token",
            "DATABRICKS_CLIENT_ID": "principal",
        },
    ),
}


@pytest.mark.parametrize(
    "variables",
    [{}, {"DATABRICKS_TOKEN": "dapi"}, {"DATABRICKS_HOST": "https://a", "DATABRICKS_CLIENT_ID": "b"}],
)
def test_a_secret_that_is_not_whole_is_not_completed_from_the_environment(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("DATABRICKS_TOKEN", "of-the-run")
    for name, value in variables.items():
        monkeypatch.setenv(f"FINETUNE_CATALOG_{name}", value)
    databricks_catalog = Catalog.model_validate(
        {"type": "Databricks", "databricks": {"secretRef": {"name": "d"}}}
    )
    with pytest.raises(DataError) as refused:
        unity_catalog.locate(TABLE, "Delta", "data.source.table", databricks_catalog)
    assert refused.value.message == (
        "the login to Unity Catalog fails: Secret d of data.prepare.catalog needs DATABRICKS_HOST, and DATABRICKS_TOKEN or "
        "DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET"
    )


@pytest.fixture
def workspace(tables: Tables) -> Iterator[Workspace]:
    running_workspace = fake_databricks.Workspace(tables=tables, federated={"projected": "principal"})
    with fake_databricks.running(running_workspace):
        yield running_workspace


@pytest.mark.parametrize(("spec", "environment"), LOGINS.values(), ids=LOGINS)
def test_a_workspace_is_logged_in_to(
    spec: dict[str, Any],
    environment: dict[str, str],
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "token").write_text("projected")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("{host}", workspace.uri).replace("{folder}", str(tmp_path)))
    place = unity_catalog.locate(
        TABLE, "Delta", "data.source.table", Catalog.model_validate({"type": "Databricks", **spec})
    )
    assert place.path.endswith("://lake/tables/chats")
    assert workspace.asked == [
        ("GET", f"/api/2.1/unity-catalog/tables/{TABLE}"),
        ("POST", "/api/2.0/unity-catalog/temporary-table-credentials"),
    ]


def test_a_server_without_logins_is_asked_without_one(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of the run, which is not for this server.
    monkeypatch.setenv("DATABRICKS_TOKEN", "of-the-run")
    with fake_unity_catalog.running(tables) as address:
        assert unity_catalog.locate(TABLE, "Delta", "data.source.table", at(address)).options


def no_grant(tables: Tables) -> None:
    tables.external.clear()


def closed(tables: Tables) -> None:
    tables.closed.add(TABLE)


def no_store(tables: Tables) -> None:
    tables.store = None


ELSEWHERE = "use data.prepare.spark.mode Databricks"
MOVE = (
    "but a preparation in this cluster reads Unity Catalog tables only from s3://: move the table, or use path with your own "
    "credentials"
)
GRANT = (
    f"issues no credentials for the files of {FIELD}: grant SELECT on the table and EXTERNAL USE "
    "SCHEMA on main.support, and allow external data access in the metastore"
)
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no such table": (
        lambda tables: tables.by_name.clear(),
        "MissingSource",
        f"{FIELD} is not in Unity Catalog at {{host}}, or the principal of data.prepare.catalog has no access to it: "
        f"correct the name, or grant USE CATALOG, USE SCHEMA and SELECT (Table '{TABLE}' does not exist.)",
    ),
    "a table that is closed": (
        closed,
        "MissingSource",
        f"{FIELD} is not in Unity Catalog at {{host}}, or the principal of data.prepare.catalog has no access to it: "
        "correct the name, or grant USE CATALOG, USE SCHEMA and SELECT (User does not have USE SCHEMA on Schema "
        "'main.support'.)",
    ),
    "no right to the files": (
        no_grant,
        "CatalogForbidden",
        f"Unity Catalog at {{host}} {GRANT} (User does not have EXTERNAL USE SCHEMA on Schema 'main.support'.)",
    ),
    "no credentials in the answer": (
        no_store,
        "CatalogForbidden",
        f"Unity Catalog at {{host}} {GRANT} (the answer has no credentials for S3)",
    ),
    "files of the server": (
        lambda tables: tables.add(TABLE, "file:///var/unity/chats"),
        "UnreadableSource",
        f"the files of {FIELD} are at file:///var/unity/chats, a folder of the server, {MOVE}",
    ),
    "another storage": (
        lambda tables: tables.add(TABLE, "gs://lake/chats"),
        "UnreadableSource",
        f"the files of {FIELD} are at gs://lake/chats, in another storage, {MOVE}",
    ),
    "a view": (
        lambda tables: tables.add(TABLE, "", table_type=TableType.VIEW),
        "UnreadableSource",
        f"{FIELD} is a VIEW, which has no files: {ELSEWHERE}",
    ),
    "a row filter": (
        lambda tables: tables.add(TABLE, "s3://lake/chats", row_filter=TableRowFilter("f", [])),
        "UnreadableSource",
        f"{FIELD} has a row filter or a column mask, which only the workspace applies: {ELSEWHERE}",
    ),
    "a column mask": (
        lambda tables: tables.add(
            TABLE, "s3://lake/chats", columns=[ColumnInfo(name="question", mask=ColumnMask("f"))]
        ),
        "UnreadableSource",
        f"{FIELD} has a row filter or a column mask, which only the workspace applies: {ELSEWHERE}",
    ),
    "a table that its catalog manages": (
        lambda tables: tables.add(
            TABLE, "s3://lake/chats", properties={"delta.feature.catalogManaged": "supported"}
        ),
        "UnreadableSource",
        f"{FIELD} is a catalog-managed table, whose newest version only its catalog knows: {ELSEWHERE}",
    ),
    "another format": (
        lambda tables: tables.add(TABLE, "s3://lake/chats", data_source_format=DataSourceFormat.PARQUET),
        "UnreadableSource",
        f"{FIELD} is in the format PARQUET, and data.source.type is Delta: correct the type, or name a Delta table",
    ),
}


@pytest.mark.parametrize(("change", "reason", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_table_that_cannot_be_read_is_said(
    change: Any, reason: str, sentence: str, tables: Tables, catalog: Catalog
) -> None:
    change(tables)
    with pytest.raises(PodFailure) as failed:
        unity_catalog.locate(TABLE, "Delta", "data.source.table", catalog)
    assert catalog.unity_catalog
    expected = sentence.replace("{host}", catalog.unity_catalog.uri)
    assert (failed.value.reason, failed.value.message, failed.value.exit_code) == (reason, expected, 65)


def test_a_login_that_is_refused_is_said(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITY_CATALOG_TOKEN", "stale")
    with fake_unity_catalog.running(tables, "good") as address, pytest.raises(PodFailure) as failed:
        unity_catalog.locate(TABLE, "Delta", "data.source.table", at(address))
    assert (failed.value.exit_code, failed.value.message) == (
        65,
        (
            f"Unity Catalog at {address} rejects the credentials of data.prepare.catalog: correct its Secret (No "
            "authorization found.)"
        ),
    )


def test_a_workspace_without_a_login_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(PodFailure) as failed:
        unity_catalog.locate(TABLE, "Delta", "data.source.table", Catalog(type="Databricks"))
    assert failed.value.reason == "CatalogForbidden"
    assert failed.value.message.startswith("the login to Unity Catalog fails: ")


def test_a_server_that_does_not_answer_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unity_tables, "_RETRY_TIMEOUT_SECONDS", 1)
    with pytest.raises(TrainingError) as failed:
        unity_catalog.locate(TABLE, "Delta", "data.source.table", at("http://127.0.0.1:9"))
    assert (failed.value.reason, failed.value.exit_code) == ("CatalogUnreachable", 1)
    assert failed.value.message.startswith(
        f"Unity Catalog at http://127.0.0.1:9 does not respond to the request for {FIELD}: "
    )
