"""The pages that people open in a browser: the run, the preparation, the registered version, the chart's dashboard."""

from __future__ import annotations

from urllib.parse import quote

from finetune_crds.status_parts import Links
from finetune_crds.tracking import Tracking
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.settings import Settings
from finetune_operator.text import normalize_address

_WORKSPACE_RUNS = "/ml/experiments"


def tracking_page(settings: Settings, tracking: Tracking) -> str:
    """The address of a job's MLflow server for browsers."""
    server, _ = settings.servers(tracking)
    return (tracking.public_url or _server_page(settings, server)).rstrip("/")


def registry_page(settings: Settings, tracking: Tracking) -> str | None:
    """The address of a job's model registry for browsers; None if it is not known."""
    server, registry = (normalize_address(uri) for uri in settings.servers(tracking))
    if registry == server:
        return tracking_page(settings, tracking)
    is_installation_registry = registry == normalize_address(settings.tracking_uri)
    public_url = settings.tracking_public_url if is_installation_registry else ""
    return public_url.rstrip("/") if public_url else None


def _server_page(settings: Settings, server: str) -> str:
    """Return the address of a server for browsers: the chart's public URL for the chart's server, otherwise the address of the server."""
    is_installation_server = normalize_address(server) == normalize_address(settings.tracking_uri)
    if is_installation_server and settings.tracking_public_url:
        return settings.tracking_public_url
    return server


def run_page(
    settings: Settings, tracking: Tracking, experiment_id: str, run_id: str, server: str = ""
) -> str:
    """The page of an MLflow run.

    Args:
        server: address of the Databricks workspace of the run; unused for an MLflow server.
    """
    if settings.on_databricks(tracking):
        page = (tracking.public_url or server).rstrip("/")
        return f"{page}{_WORKSPACE_RUNS}/{experiment_id}/runs/{run_id}"
    return f"{tracking_page(settings, tracking)}/#/experiments/{experiment_id}/runs/{run_id}"


def record_links(draft: Draft) -> None:
    """Record the pages that exist by now."""
    if draft.ftj.spec is None:
        return
    mlflow = draft.status.mlflow
    links = Links(
        run=mlflow.url if mlflow else None,
        model=_model_page(draft),
        preparation=backends.find_page(draft.status),
        dashboard=_dashboard_page(draft),
    )
    draft.update(links=links if links.to_json() else None)


def _model_page(draft: Draft) -> str | None:
    """The page of the registered version; None without a version, or if the address of the registry is not known."""
    model = draft.status.model
    if model is None or model.name is None or model.version is None:
        return None
    if draft.settings.on_databricks(draft.spec.tracking):
        # The page of the run begins with the address of the workspace.
        run_url = (draft.status.mlflow.url if draft.status.mlflow else None) or ""
        if _WORKSPACE_RUNS not in run_url:
            return None
        workspace, _, _ = run_url.partition(_WORKSPACE_RUNS)
        path = "/".join(quote(part, safe="") for part in model.name.split("."))
        return f"{workspace}/explore/data/models/{path}/version/{model.version}"
    page = registry_page(draft.settings, draft.spec.tracking)
    if page is None:
        return None
    return f"{page}/#/models/{quote(model.name, safe='')}/versions/{quote(model.version, safe='')}"


def _dashboard_page(draft: Draft) -> str | None:
    """The dashboard; None without one, and while its URL depends on a run that does not exist yet."""
    url = draft.settings.dashboard_url
    run_id = draft.status.run_id
    if not url or ("{runId}" in url and run_id is None):
        return None
    values = {"namespace": draft.ftj.namespace, "name": draft.ftj.name, "runId": run_id or ""}
    for field, value in values.items():
        url = url.replace(f"{{{field}}}", quote(value, safe=""))
    return url
