"""How a pod logs in to a workspace: MLflow's own client and the SDK, with the variables that the operator gives the pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.pods.workspace import pod_login
from finetune_operator.settings import Settings
from finetune_trainer.pod import mlflow_run
from standins.databricks import Workspace

Json = dict[str, Any]
SPEC: Json = {
    "model": {"base": "m"},
    "data": {"source": {"type": "Parquet", "path": "/data"}, "prepare": {"output": "/splits"}},
}
EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
# The keys of the pod's Secret beside the host, or none for a token of its ServiceAccount; what the job sets in `env`; and the
# grant of each login.
LOGINS: dict[str, tuple[Json | None, Json, set[str]]] = {
    "a token": ({"DATABRICKS_TOKEN": "dapi-good"}, {}, set()),
    "a client's secret": (
        {"DATABRICKS_CLIENT_ID": "principal", "DATABRICKS_CLIENT_SECRET": "principal-secret"},
        {},
        {"client_credentials"},
    ),
    "a service-account token": (None, {}, {EXCHANGE}),
    "a service-account token of a service principal": (None, {"DATABRICKS_CLIENT_ID": "pods"}, {EXCHANGE}),
}
REFUSED: dict[str, tuple[Json | None, Json]] = {
    "a wrong secret": ({"DATABRICKS_CLIENT_ID": "principal", "DATABRICKS_CLIENT_SECRET": "other"}, {}),
    "a service principal without a policy": (None, {"DATABRICKS_CLIENT_ID": "other"}),
}


def variables(state: Workspace, secret: Json | None, token: Path) -> dict[str, str]:
    """The variables of a container with this Secret, or with this token of its ServiceAccount."""
    named = {"secretRef": {"name": "databricks"}} if secret is not None else {}
    spec = FineTuneJobSpec.model_validate(SPEC | {"tracking": {"uri": "databricks", **named}})
    settings = Settings(databricks_host=state.uri, databricks_token_audience="databricks")
    values = {"DATABRICKS_HOST": state.uri} | (secret or {})
    (container,) = pod_login(spec, settings, "trainer")["spec"]["containers"]
    found = {}
    for item in container["env"]:
        key = item["valueFrom"]["secretKeyRef"]["key"] if "valueFrom" in item else None
        value = values.get(key) if key else item["value"]
        if value is not None:
            found[item["name"]] = value
    if secret is None:
        (mount,) = container["volumeMounts"]
        path = found["DATABRICKS_OIDC_TOKEN_FILEPATH"]
        assert path == f"{mount['mountPath']}/{token.name}"
        found["DATABRICKS_OIDC_TOKEN_FILEPATH"] = str(token)
    return found


@pytest.fixture
def log_in(databricks: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this process the variables of a pod, and MLflow's client as a pod makes it."""
    token = tmp_path / "token"
    token.write_text("pod-token\n")

    def make(secret: Json | None, env: Json) -> Any:
        databricks.federated = {"pod-token": env.get("DATABRICKS_CLIENT_ID", "").replace("other", "pods")}
        for name, value in {**variables(databricks, secret, token), **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
        monkeypatch.setenv("MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT", "2")
        return mlflow_run.create_client()

    return make


@pytest.mark.parametrize("case", LOGINS.values(), ids=LOGINS)
def test_a_pod_logs_a_metric_and_a_file(
    log_in: Any, databricks: Workspace, tmp_path: Path, case: tuple[Json | None, Json, set[str]]
) -> None:
    secret, env, grants = case
    client = log_in(secret, env)
    experiment = client.create_experiment("/Shared/team")
    run_id = client.create_run(experiment).info.run_id
    client.log_metric(run_id, "loss", 1.5)
    (tmp_path / "report.html").write_text("the report")
    client.log_artifact(run_id, str(tmp_path / "report.html"), "preparation")
    place = (
        f"/WorkspaceInternal/Mlflow/Artifacts/{experiment}/Runs/{run_id}/artifacts/preparation/report.html"
    )
    assert (
        databricks.tracking.open().get_run(run_id).data.metrics,
        databricks.files.read(place),
        set(databricks.logins),
    ) == ({"loss": 1.5}, b"the report", grants)


@pytest.mark.parametrize(("secret", "env"), REFUSED.values(), ids=REFUSED)
def test_a_login_that_is_refused(log_in: Any, databricks: Workspace, secret: Json | None, env: Json) -> None:
    client = log_in(secret, env)
    with pytest.raises(Exception, match=r"invalid_client|Databricks authentication"):
        client.create_experiment("/Shared/team")
    assert databricks.asked == []
