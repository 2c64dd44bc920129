"""The model registry of a Databricks workspace: reads and writes models, versions and aliases in Unity Catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.workspace import translate_errors
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.registry.base import (
    ModelVersion,
    RegisteredModel,
    RegisteredVersion,
    find_eval_digest,
    parse_milliseconds,
)
from finetune_operator.settings import UNITY_CATALOG

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service.ml import Run

# The SDK has no methods for tags of versions. MLflow's client uses these paths.
_VERSIONS = "/api/2.0/mlflow/unity-catalog/model-versions"
# The metastore of each workspace, by the workspace's host. A workspace stays attached to its metastore, so no entry expires.
_metastores: dict[str, str] = {}
_THREE_LEVEL_NAME = re.compile(r"[^./ ]+\.[^./ ]+\.[^./ ]+")


@dataclass(frozen=True)
class UnityRegistry:
    """The models of a workspace's Unity Catalog, as `registry.base.Registry`.

    The login must have EXECUTE to read a model, own the model to set an alias, and have APPLY TAG to set tags.

    Attributes:
        metastore: the metastore that the workspace is attached to; None when it is unknown.
    """

    workspace: WorkspaceClient
    metastore: str | None = None

    @classmethod
    def of(cls, workspace: WorkspaceClient) -> Self:
        """The models of the metastore that the workspace is attached to.

        Raises:
            ExternalError: the workspace cannot be reached.
        """
        return cls(workspace, find_metastore(workspace))

    @property
    def uri(self) -> str:
        """The URI of the metastore, which workspaces may share, or of the workspace if the metastore is unknown."""
        return f"{UNITY_CATALOG}://{self.metastore or self.workspace.config.hostname}"

    def model(self, name: str) -> RegisteredModel | None:
        """A registered model; None when it does not exist."""
        from databricks.sdk.errors import NotFound

        _check_name(name)
        with translate_errors(self.workspace, f"read the model {name}"):
            try:
                model = self.workspace.registered_models.get(name, include_aliases=True)
            except NotFound:
                return None
            aliases = {str(item.alias_name): str(item.version_num) for item in model.aliases or []}
            return RegisteredModel(name, aliases, parse_milliseconds(model.created_at), ignores_case=True)

    def version(self, name: str, version: str) -> ModelVersion | None:
        """A version with its tags and the metrics of its run; None when it does not exist."""
        _check_name(name)
        with translate_errors(self.workspace, f"read version {version} of the model {name}"):
            body = self._get_version(name, version)
            if body is None:
                return None
            tags = _read_tags(body)
            unread = self._explain_foreign_run(body)
            run = None if unread else self._get_run(body.get("run_id"))
            return ModelVersion(
                version=version,
                ready=_is_ready(body),
                run_id=body.get("run_id") or None,
                tags=tags,
                metrics=_read_metrics(run) | _read_model_metrics(body),
                evaluated_on=find_eval_digest(tags, _read_run_tags(run)),
                created=parse_milliseconds(body.get("creation_timestamp")),
                unread=unread,
            )

    def find_version(self, name: str, run_id: str, aliases: Iterable[str]) -> RegisteredVersion | None:
        """The version that a run registered, the newest if there are several, with its tags, and which of `aliases` point at it."""
        from databricks.sdk.errors import NotFound

        _check_name(name)
        with translate_errors(self.workspace, f"search the versions of the model {name}"):
            try:
                numbers = [
                    int(item["version"])
                    for item in self._list_versions(name)
                    if item.get("run_id") == run_id and _is_ready(item)
                ]
            except NotFound:
                return None
        if not numbers:
            return None
        version, model = str(max(numbers)), self.model(name)
        pointing = {alias for alias in aliases if model and model.holder(alias) == version}
        with translate_errors(self.workspace, f"read version {version} of the model {name}"):
            tags = _read_tags(self._get_version(name, version) or {})
        return RegisteredVersion(name, version, frozenset(pointing), tags)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, regardless of where it points now."""
        _check_name(name)
        with translate_errors(self.workspace, f"set the alias {alias} of the model {name}"):
            self.workspace.registered_models.set_alias(name, alias, int(version))

    def delete_alias(self, name: str, alias: str) -> None:
        """Remove an alias. Does nothing if it does not exist."""
        from databricks.sdk.errors import NotFound

        _check_name(name)
        with translate_errors(self.workspace, f"remove the alias {alias} of the model {name}"):
            try:
                self.workspace.registered_models.delete_alias(name, alias)
            except NotFound:
                return

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        _check_name(name)
        with translate_errors(self.workspace, f"set tags of version {version} of the model {name}"):
            for key, value in tags.items():
                body = {"name": name, "version": version, "key": key, "value": value}
                self._request("POST", "set-tag", body)

    def _explain_foreign_run(self, version: Mapping[str, Any]) -> str:
        """Explain why the run of a version cannot be read if the run is in another workspace; otherwise empty.

        NB: workspaces share a metastore. In this workspace, the same id can belong to another run, or to no run.
        """
        workspace_id = self.workspace.config.workspace_id
        run_workspace_id = version.get("run_workspace_id") or version.get("run_tracking_server_id")
        if not run_workspace_id or not workspace_id or str(run_workspace_id) == str(workspace_id):
            return ""
        return f"the run is in workspace {run_workspace_id}, but the credentials are for workspace {workspace_id}"

    def _get_version(self, name: str, version: str) -> dict[str, Any] | None:
        """A version with its tags; None when it does not exist."""
        from databricks.sdk.errors import NotFound

        try:
            answer = self._request("GET", "get", {"name": name, "version": version})
        except NotFound:
            return None
        body: dict[str, Any] = answer["model_version"]
        return body

    def _list_versions(self, name: str) -> Iterator[dict[str, Any]]:
        """All versions of a model, without tags: a search does not return tags, and can filter only by name."""
        token = ""
        while True:
            fields = {"filter": f"name='{name}'"} | ({"page_token": token} if token else {})
            page = self._request("GET", "search", fields)
            yield from page.get("model_versions") or []
            token = page.get("next_page_token") or ""
            if not token:
                return

    def _request(self, method: str, path: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """Send a request about versions, and return the answer."""
        workspace_id = self.workspace.config.workspace_id
        headers = {"Accept": "application/json"} | (
            {"X-Databricks-Workspace-Id": workspace_id} if workspace_id else {}
        )
        payload: dict[str, Any] = {"query" if method == "GET" else "body": dict(fields)}
        answer = self.workspace.api_client.do(method, f"{_VERSIONS}/{path}", headers=headers, **payload)
        if not isinstance(answer, dict):
            raise TypeError(f"the response of {path} is not a JSON object")
        return answer

    def _get_run(self, run_id: str | None) -> Run | None:
        from databricks.sdk.errors import NotFound

        if not run_id:
            return None
        try:
            return self.workspace.experiments.get_run(run_id).run
        except NotFound:
            return None


def find_metastore(workspace: WorkspaceClient, *, fetch: bool = True) -> str | None:
    """The metastore that a workspace is attached to; None if there is none, or if the credentials do not permit reading it.

    If `fetch` is False, only metastores that were fetched before are known.

    Raises:
        ExternalError: the workspace cannot be reached.
    """
    from databricks.sdk.errors import NotFound, PermissionDenied

    host = workspace.config.host
    if host in _metastores or not fetch:
        return _metastores.get(host)
    with translate_errors(workspace, "read which metastore the workspace is attached to"):
        try:
            metastore = workspace.metastores.current().metastore_id
        except (NotFound, PermissionDenied):
            return None
        return _metastores.setdefault(host, metastore)


def _check_name(name: str) -> None:
    if not _THREE_LEVEL_NAME.fullmatch(name):
        raise ExternalError(
            Problem(
                ConditionReason.DATABRICKS_ERROR,
                f"model {name} is not a three-level name, which Unity Catalog requires: use catalog.schema.name",
            )
        )


def _is_ready(version: Mapping[str, Any]) -> bool:
    """Whether the files of a version are complete. A version without a status counts as complete."""
    return bool(version.get("status", "READY") == "READY")


def _read_metrics(run: Run | None) -> dict[str, float]:
    metrics = (run.data.metrics if run and run.data else None) or []
    return {item.key: float(item.value) for item in metrics if item.key and item.value is not None}


def _read_model_metrics(version: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a version's logged model; for each metric, the value of the latest step."""
    metrics = sorted(version.get("model_metrics") or [], key=lambda item: int(item.get("step") or 0))
    return {item["key"]: float(item["value"]) for item in metrics if item.get("value") is not None}


def _read_tags(version: Mapping[str, Any]) -> dict[str, str]:
    return {item["key"]: item.get("value", "") for item in version.get("tags") or []}


def _read_run_tags(run: Run | None) -> dict[str, str]:
    tags = (run.data.tags if run and run.data else None) or []
    return {item.key: item.value for item in tags if item.key and item.value}
