"""The chart with a Databricks workspace: the operator gets a token for it, and for nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from fixtures.operator_processes.servers import Plane
from integration.chart import environment, objects, rendered

WORKSPACE = (
    "databricks.host=https://example.cloud.databricks.com",
    "databricks.clientId=principal",
    "databricks.tokenAudience=account",
    "databricks.namespaces={research,support}",
)


def pod(*values: str) -> Any:
    return objects(*values)["Deployment", "finetune-operator"]["spec"]["template"]["spec"]


def test_none_by_default() -> None:
    assert [name for name in environment() if "DATABRICKS" in name] == []
    assert [volume["name"] for volume in pod()["volumes"]] == ["tmp", "defaults"]


def test_a_workspace() -> None:
    variables = {name: value for name, value in environment(*WORKSPACE).items() if "DATABRICKS" in name}
    assert variables == {
        "FINETUNE_DATABRICKS_HOST": "https://example.cloud.databricks.com",
        "FINETUNE_DATABRICKS_CLIENT_ID": "principal",
        "FINETUNE_DATABRICKS_TOKEN_AUDIENCE": "account",
        "FINETUNE_DATABRICKS_TOKEN_FILE": "/var/run/secrets/databricks/token",
        "FINETUNE_DATABRICKS_NAMESPACES": "research,support",
    }
    token = {"audience": "account", "expirationSeconds": 3600, "path": "token"}
    assert pod(*WORKSPACE)["volumes"][2:] == [
        {"name": "databricks", "projected": {"sources": [{"serviceAccountToken": token}]}}
    ]
    assert pod(*WORKSPACE)["containers"][0]["volumeMounts"][2:] == [
        {"name": "databricks", "mountPath": "/var/run/secrets/databricks", "readOnly": True}
    ]


def test_the_api_server_accepts_it(plane: Plane, kubeconfig: Path) -> None:
    kubectl = [str(plane.kubectl), "--kubeconfig", str(kubeconfig)]
    subprocess.run([*kubectl, "create", "namespace", "fs"], capture_output=True, check=False)
    apply = [*kubectl, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename", "-"]
    done = subprocess.run(apply, input=rendered(*WORKSPACE), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
