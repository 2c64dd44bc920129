"""Jobs whose run and version are in a Databricks workspace: what is wrong with them, and how their pods log in."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.pods.workspace import pod_login, workspace_mistakes
from finetune_operator.settings import Settings

Json = dict[str, Any]
AT_DATABRICKS: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
BY_DEFAULT = Settings(
    tracking_uri="databricks",
    databricks_host="https://w.example.com",
    databricks_token_audience="databricks",
    databricks_client_id="the-operator",
    databricks_token_file="/var/run/token",
)
MODEL: Json = {"register": {"model": "main.llm.support"}}
NO_PATH = (
    "{field} {path} is a folder of a Databricks workspace, which the training pods cannot read: use the object storage "
    "behind it, or mount a volume in spec.pods"
)


def spec(**parts: Any) -> FineTuneJobSpec:
    data = {"source": {"type": "Parquet", "path": "/data"}, "prepare": {"output": "/splits"}}
    return FineTuneJobSpec.model_validate({"model": {"base": "m"}, "data": data} | parts)


TABLES: Json = {"data": {"splits": {"type": "Tables", "train": "main.support.chat_train"}}}
TEACHER: Json = {"type": "Distillation", "distillation": {"teacher": "models:/large@prod"}}

MISTAKES: dict[str, tuple[Json, Settings, list[str]]] = {
    "none, by the spec": (MODEL | {"tracking": AT_DATABRICKS}, Settings(), []),
    "none, by the workspace alone": (MODEL | {"tracking": {"uri": "databricks"}}, Settings(), []),
    "none, by the installation": (MODEL, BY_DEFAULT, []),
    "none, without a model": ({}, BY_DEFAULT, []),
    "an MLflow server": (
        {"register": {"model": "m", "tags": {"a.b": "c"}}},
        Settings(tracking_uri="http://m"),
        [],
    ),
    "a run elsewhere": (
        MODEL,
        Settings(tracking_uri="http://m", registry_uri="databricks-uc"),
        [
            "the run would be tracked at http://m and the model registered at databricks-uc: set spec.tracking.uri to databricks and "
            "spec.tracking.registryUri to databricks-uc, or remove both"
        ],
    ),
    "one name": (
        {"register": {"model": "support"}},
        BY_DEFAULT,
        ["spec.register.model support must be catalog.schema.name in Unity Catalog"],
    ),
    "aliases of one name": (
        {"model": {"base": "models:/support@champion"}, "objective": TEACHER},
        BY_DEFAULT,
        [
            "spec.model.base models:/support@champion must be models:/catalog.schema.name@champion in Unity Catalog",
            "spec.objective.distillation.teacher models:/large@prod must be models:/catalog.schema.name@prod in Unity Catalog",
        ],
    ),
    "aliases of one name, on an MLflow server": (
        {"model": {"base": "models:/support@champion"}, "objective": TEACHER},
        Settings(tracking_uri="http://m"),
        [],
    ),
    "an alias of three names": ({"model": {"base": "models:/main.llm.support@champion"}}, BY_DEFAULT, []),
    "no signature, and tags of another registry": (
        {
            "register": {
                "model": "main.llm.support",
                "signature": False,
                "tags": {"a.b": "1", "ok_1": "2", "x:y": "3"},
            }
        },
        BY_DEFAULT,
        [
            "spec.register.signature must be true for a model in Unity Catalog",
            "Unity Catalog does not allow . , - = / : in the key of a tag, or a space at its start or end: rename 'a.b', 'x:y' in spec.register.tags",
        ],
    ),
    "an experiment that is no path": (
        {"tracking": {"experiment": "support"}},
        BY_DEFAULT,
        [
            "spec.tracking.experiment support is not a path: in a workspace, use a path such as /Shared/support"
        ],
    ),
    "folders of a workspace": (
        {
            "data": {
                "source": {"type": "Parquet", "path": "/data"},
                "prepare": {"output": "/Volumes/main/llm/splits"},
            },
            "checkpoint": {"uri": "dbfs:/checkpoints"},
        },
        Settings(),
        [
            NO_PATH.format(field="spec.data.prepare.output", path="/Volumes/main/llm/splits"),
            "spec.checkpoint.uri dbfs:/checkpoints is in DBFS, which the training pods cannot reach: use a volume of Unity "
            "Catalog, or object storage",
        ],
    ),
    "checkpoints in a volume, and runs elsewhere": (
        {"checkpoint": {"uri": "/Volumes/main/llm/work"}},
        Settings(tracking_uri="http://m"),
        [
            "spec.checkpoint.uri /Volumes/main/llm/work is in a Databricks workspace, which the training pods reach with the "
            "login of spec.tracking: set spec.tracking.uri to databricks, or use the object storage behind it"
        ],
    ),
    "tables, and runs elsewhere": (
        TABLES | {"tracking": {"registryUri": "databricks-uc"}},
        Settings(tracking_uri="http://m"),
        [
            "spec.data.splits names tables of a Databricks workspace, which the training pods find with the login of spec.tracking: set "
            "spec.tracking.uri to databricks, or use type Delta with the path of a table"
        ],
    ),
    "tables": (TABLES, BY_DEFAULT, []),
    "checkpoints in a volume": ({"checkpoint": {"uri": "/Volumes/main/llm/work"}}, BY_DEFAULT, []),
}


@pytest.mark.parametrize(("parts", "settings", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(parts: Json, settings: Settings, expected: list[str]) -> None:
    assert [*workspace_mistakes(spec(**parts), settings)] == expected


def from_secret(name: str) -> Json:
    """The four keys of a Secret, as far as it has them."""
    keys = ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
    env = [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}
        for key in keys
    ]
    return {"spec": {"containers": [{"name": "trainer", "env": env}]}}


FEDERATED: Json = {
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "env": [
                    {"name": "DATABRICKS_HOST", "value": "https://w.example.com"},
                    {"name": "DATABRICKS_AUTH_TYPE", "value": "file-oidc"},
                    {
                        "name": "DATABRICKS_OIDC_TOKEN_FILEPATH",
                        "value": "/var/run/secrets/finetune.dev/databricks/token",
                    },
                ],
                "volumeMounts": [
                    {
                        "name": "databricks",
                        "mountPath": "/var/run/secrets/finetune.dev/databricks",
                        "readOnly": True,
                    }
                ],
            }
        ],
        "volumes": [
            {
                "name": "databricks",
                "projected": {
                    "sources": [
                        {
                            "serviceAccountToken": {
                                "audience": "databricks",
                                "expirationSeconds": 3600,
                                "path": "token",
                            }
                        }
                    ]
                },
            }
        ],
    }
}
LOGINS: dict[str, tuple[Json, Settings, Json]] = {
    "an MLflow server": ({"secretRef": {"name": "s"}}, Settings(tracking_uri="http://m"), {}),
    "a Secret": (AT_DATABRICKS | {"secretRef": {"name": "s"}}, Settings(), from_secret("s")),
    "a narrower Secret": (
        AT_DATABRICKS | {"secretRef": {"name": "s"}, "trainerSecretRef": {"name": "t"}},
        Settings(),
        from_secret("t"),
    ),
    "a narrower Secret, and the installation's workspace": (
        {"trainerSecretRef": {"name": "t"}},
        BY_DEFAULT,
        from_secret("t"),
    ),
    "the token of the pod's own ServiceAccount": ({}, BY_DEFAULT, FEDERATED),
}


@pytest.mark.parametrize(("tracking", "settings", "expected"), LOGINS.values(), ids=LOGINS)
def test_logins(tracking: Json, settings: Settings, expected: Json) -> None:
    assert pod_login(spec(tracking=tracking), settings, "trainer") == expected
