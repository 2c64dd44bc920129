"""Tables by their names: what is wrong with them, and how the prep pod logs in to their catalog."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.decide.accept import mistakes_of_fixed_fields, obstacles
from finetune_operator.finetunejob.pods.workspace import federated_login
from finetune_operator.finetunejob.preparation import catalog
from finetune_operator.settings import Settings

ITS = ", the catalog of the job or of the chart: create a job that names the table in this form, or that sets data.prepare.catalog"
Json = dict[str, Any]
UNITY: Json = {"type": "UnityCatalog", "unityCatalog": {"uri": "http://unity:8080"}}
HIVE: Json = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}
INSTALLED = Settings(databricks_host="https://w.example.com", databricks_token_audience="databricks")
DELTA: Json = {"type": "Delta", "table": "main.support.chats"}
FIELD = "spec.data.source.table main.support.chats"


def spec(source: Json = DELTA, catalog_json: Json | None = None, **parts: Any) -> FineTuneJobSpec:
    prepare = {
        "output": "/splits",
        **({"catalog": catalog_json} if catalog_json else {}),
        **parts.pop("prepare", {}),
    }
    return FineTuneJobSpec.model_validate(
        {"model": {"base": "m"}, "data": {"source": source, "prepare": prepare}} | parts
    )


NO_CATALOG = (
    f"{FIELD} requires a catalog: install the chart with defaults.catalog, or create a FineTuneJob with another "
    "name and spec.data.prepare.catalog, or with a path instead of a table"
)
NO_WORKSPACE = (
    "spec.data.prepare.catalog of type Databricks has no workspace: install the chart with databricks.host, or "
    "create a FineTuneJob with another name and a Secret with DATABRICKS_HOST in "
    "spec.data.prepare.catalog.databricks.secretRef"
)
RUN: Json = {
    "output": "s3://b/c",
    "spark": {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}},
}
FILES: Json = {"type": "Parquet", "path": "/chats"}


def saved(*splits: str, **fields: Any) -> Json:
    """Fields of prepare."""
    return {"splitTables": {split: f"support.chat_{split}" for split in splits or ("train",)}} | fields


OBSTACLES: dict[str, tuple[FineTuneJobSpec, Settings, list[tuple[ConditionReason, str]]]] = {
    "a path": (spec({"type": "Delta", "path": "/chats"}), Settings(), []),
    "no catalog": (spec(), Settings(), [(ConditionReason.CATALOG_NOT_CONFIGURED, NO_CATALOG)]),
    "split tables without a catalog": (
        spec(FILES, prepare=saved()),
        Settings(),
        [
            (
                ConditionReason.CATALOG_NOT_CONFIGURED,
                "spec.data.prepare.splitTables.train support.chat_train requires a catalog of type Hive or a Databricks run: install the "
                "chart with defaults.catalog of type Hive, or create a FineTuneJob with another name and spec.data.prepare.catalog of type "
                "Hive, or with spec.data.prepare.spark.mode Databricks",
            )
        ],
    ),
    "split tables of a Databricks run": (
        spec(FILES | {"path": "s3://b/a"}, prepare=saved(**RUN)),
        Settings(prep_wheels="/wheels", databricks_namespaces=("team",)),
        [],
    ),
    "a Databricks run": (
        spec(prepare=RUN),
        Settings(prep_wheels="/wheels", databricks_namespaces=("team",)),
        [],
    ),
    "a server of Unity Catalog": (spec(catalog_json=UNITY), Settings(), []),
    "the workspace of the installation": (spec(catalog_json={"type": "Databricks"}), INSTALLED, []),
    "no workspace": (
        spec(catalog_json={"type": "Databricks"}),
        Settings(),
        [(ConditionReason.DATABRICKS_NOT_CONFIGURED, NO_WORKSPACE)],
    ),
    "the workspace of a Secret": (
        spec(catalog_json={"type": "Databricks", "databricks": {"secretRef": {"name": "d"}}}),
        Settings(),
        [],
    ),
}


@pytest.mark.parametrize(("job_spec", "settings", "expected"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_a_job_waits_for(
    job_spec: FineTuneJobSpec, settings: Settings, expected: list[tuple[ConditionReason, str]]
) -> None:
    assert [*obstacles(job_spec, settings, "team")] == expected


MISNAMED: dict[str, tuple[FineTuneJobSpec, list[str]]] = {
    "a name of three levels": (spec(catalog_json=UNITY), []),
    "two names in Unity Catalog": (
        spec({"type": "Delta", "table": "support.chats"}, UNITY),
        ["spec.data.source.table support.chats must be catalog.schema.table in Unity Catalog" + ITS],
    ),
    "three names in a Hive metastore, in a mix and in an evaluation set": (
        spec(
            {"type": "Mix", "sources": [{"name": "a", **DELTA}, {"name": "b", "type": "CSV", "path": "/b"}]},
            HIVE,
            prepare={"decontaminate": {"sources": [{"name": "c", "type": "Parquet", "table": "tests"}]}},
        ),
        [
            "spec.data.source.sources[a].table main.support.chats must be database.table in a Hive metastore"
            + ITS,
            "spec.data.prepare.decontaminate.sources[c].table tests must be database.table in a Hive metastore"
            + ITS,
        ],
    ),
    "the table of feedback": (
        spec(
            DELTA
            | {
                "type": "InferenceTable",
                "feedback": {"table": "thumbs", "requestIdColumn": "id", "ratingColumn": "up"},
            },
            UNITY,
        ),
        ["spec.data.source.feedback.table thumbs must be catalog.schema.table in Unity Catalog" + ITS],
    ),
    "split tables in a Hive metastore": (spec(FILES, HIVE, prepare=saved("train", "test")), []),
    "split tables in Unity Catalog": (
        spec(FILES, UNITY, prepare=saved()),
        [
            "spec.data.prepare.splitTables cannot be saved in Unity Catalog by a preparation in this cluster: create a job with "
            "data.prepare.spark.mode Databricks, or without data.prepare.splitTables"
        ],
    ),
    "a split table that is the source, and two that differ in case": (
        spec(
            {"type": "Delta", "table": "support.chats"},
            HIVE,
            prepare={
                "splitTables": {"train": "Support.Chats", "validation": "a.held_out", "test": "a.Held_Out"}
            },
        ),
        [
            "spec.data.prepare.splitTables.train Support.Chats is the table of data.source.table: create a job that names another table",
            "spec.data.prepare.splitTables.test a.Held_Out is the table of data.prepare.splitTables.validation: create a job that names "
            "another table",
        ],
    ),
    "three names in a Hive metastore, of a split": (
        spec(FILES, HIVE, prepare={"splitTables": {"train": "main.a.b"}}),
        ["spec.data.prepare.splitTables.train main.a.b must be database.table in a Hive metastore" + ITS],
    ),
}


@pytest.mark.parametrize(("job_spec", "expected"), MISNAMED.values(), ids=MISNAMED)
def test_names_of_another_catalog(job_spec: FineTuneJobSpec, expected: list[str]) -> None:
    assert [*mistakes_of_fixed_fields(job_spec, Settings())] == expected


def from_secret(name: str, *keys: str, prefix: str = "", optional: bool = True) -> Json:
    env = [
        {
            "name": f"{prefix}{key}",
            "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": optional}},
        }
        for key in keys
    ]
    return {"spec": {"containers": [{"name": "prep", "env": env}]}}


WORKSPACE = ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
TRACKED: Json = {"tracking": {"uri": "databricks", "secretRef": {"name": "run"}}}
LOGINS: dict[str, tuple[FineTuneJobSpec, Settings, Json]] = {
    "no catalog": (spec(), INSTALLED, {}),
    "a server without logins": (spec(catalog_json=UNITY), INSTALLED, {}),
    "a Hive metastore": (spec(catalog_json=HIVE), INSTALLED, {}),
    "a server with a token": (
        spec(catalog_json={**UNITY, "unityCatalog": {"uri": "http://unity", "secretRef": {"name": "u"}}}),
        INSTALLED,
        from_secret("u", "UNITY_CATALOG_TOKEN", optional=False),
    ),
    "the Secret of a workspace, beside that of the run": (
        spec(catalog_json={"type": "Databricks", "databricks": {"secretRef": {"name": "d"}}}, **TRACKED),
        INSTALLED,
        from_secret("d", *WORKSPACE, prefix="FINETUNE_CATALOG_"),
    ),
    "the login of the run": (spec(catalog_json={"type": "Databricks"}, **TRACKED), INSTALLED, {}),
    "the pod's ServiceAccount": (
        spec(catalog_json={"type": "Databricks"}),
        INSTALLED,
        federated_login(INSTALLED, "prep"),
    ),
}


@pytest.mark.parametrize(("job_spec", "settings", "expected"), LOGINS.values(), ids=LOGINS)
def test_the_login_of_the_prep_pod(job_spec: FineTuneJobSpec, settings: Settings, expected: Json) -> None:
    assert catalog.login(job_spec, settings, "prep") == expected
