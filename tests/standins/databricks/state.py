"""What the stand-in workspace holds, and how it is told to misbehave."""

from __future__ import annotations

import base64
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from databricks.sdk.service.catalog import RegisteredModelAlias, RegisteredModelInfo
from databricks.sdk.service.ml import Metric, Run, RunData, RunInfo, RunTag

from standins.databricks.endpoints import Endpoints
from standins.databricks.files import FileRefusal, Files
from standins.databricks.jobs import Jobs
from standins.databricks.tables import Tables
from standins.databricks.tracking import Tracking
from standins.databricks.unity import (
    CREATED,
    Model,
    Refusal,
    Version,
    check_files,
    check_name,
    check_tags,
)

Json = dict[str, Any]


@dataclass
class Fault:
    """What requests are answered instead, the next `times` times; a `body` of text is sent as it is."""

    status: int
    body: Json | str = field(default_factory=dict)
    method: str = ""
    path: str = ""
    times: int = 1_000_000
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Workspace:
    """One workspace. Everything that tests set is a plain attribute.

    Attributes:
        tokens: personal access tokens.
        clients: secrets of service principals, by client id.
        federated: service-account tokens that are accepted in exchange, with the client id they stand for.
        denied: actions that are refused with 403: `<method> <start of the path>`.
        faults: what is answered in place of what was asked; the first that fits.
        asked: method and path of every request that was let in.
        metastore: metastore that it is attached to.
        workspace_id: its own id, which responses about runs carry.
        logins: grant type of every token that was given out.
    """

    uri: str = ""
    metastore: str = "metastore-1"
    workspace_id: str = "1234"
    tokens: set[str] = field(default_factory=lambda: {"dapi-good"})
    clients: dict[str, str] = field(default_factory=lambda: {"principal": "principal-secret"})
    federated: dict[str, str] = field(default_factory=dict)
    denied: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    models: dict[str, Model] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    endpoints: Endpoints = field(default_factory=Endpoints)
    tables: Tables = field(default_factory=Tables)
    asked: list[tuple[str, str]] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    folder: Path = field(default_factory=lambda: Path(mkdtemp(prefix="workspace-")))
    _issued: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.tracking = Tracking(self.folder)
        self.files = Files(self.folder / "files")
        self.jobs = Jobs(self.files, self.folder / "runs", self._issue)

    @property
    def secret(self) -> dict[str, str]:
        """A Secret with the credentials of a person."""
        return {"DATABRICKS_HOST": self.uri, "DATABRICKS_TOKEN": "dapi-good"}

    @property
    def environment(self) -> dict[str, str]:
        """What the operator tells a pod of it, and MLflow's client not to wait long for it."""
        return {
            **self.secret,
            "MLFLOW_TRACKING_URI": "databricks",
            "MLFLOW_REGISTRY_URI": "databricks-uc",
            "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "2",
        }

    def add_version(
        self,
        model: str,
        version: int,
        metrics: Mapping[str, float] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """A version of a model, made by a run of its own."""
        run_id = f"run-{model}-{version}"
        self.runs[run_id] = Run(
            info=RunInfo(run_id=run_id, status=None),
            data=RunData(
                metrics=[Metric(key=key, value=value) for key, value in (metrics or {}).items()],
                tags=[RunTag(key, value) for key, value in (tags or {}).items()],
            ),
        )
        self.models.setdefault(model, Model()).versions[version] = Version(
            run_id, workspace_id=self.workspace_id
        )

    def writes(self) -> list[tuple[str, str]]:
        """What was asked that changes something."""
        return [(method, path) for method, path in self.asked if method != "GET"]

    def fault(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets."""
        with self._lock:
            for item in self.faults:
                if item.times > 0 and item.method in ("", method) and path.startswith(item.path):
                    item.times -= 1
                    return item
        return None

    def check(self, authorization: str, method: str, path: str) -> None:
        """Let a request in.

        Raises:
            Refusal: its token is not known, or may not do this.
        """
        kind, _, token = authorization.partition(" ")
        if kind != "Bearer" or token not in self.tokens | self._issued:
            raise Refusal(401, "UNAUTHENTICATED", "Credential was not sent or was of an unsupported type")
        self.asked.append((method, path))
        if any(f"{method} {path}".startswith(item) for item in self.denied):
            raise Refusal(403, "PERMISSION_DENIED", "User does not have the permission on this object")

    def revoke(self) -> None:
        """Forget every token that was given out."""
        self._issued.clear()

    def login(self, form: Mapping[str, str], authorization: str) -> Json:
        """A token, for a client's secret or in exchange for another token.

        Raises:
            Refusal: neither is right.
        """
        grant = form.get("grant_type", "")
        if grant == "client_credentials":
            text = base64.b64decode(authorization.removeprefix("Basic ")).decode()
            name, _, secret = text.partition(":")
            good = bool(name) and self.clients.get(name) == secret
        elif grant == "urn:ietf:params:oauth:grant-type:token-exchange":
            subject = form.get("subject_token", "")
            good = subject in self.federated and self.federated[subject] == form.get("client_id", "")
        else:
            raise Refusal(400, "unsupported_grant_type", grant)
        if not good:
            raise Refusal(401, "invalid_client", "Client authentication failed")
        self.logins.append(grant)
        return {"access_token": self._issue(), "token_type": "Bearer", "expires_in": 3600}

    def _issue(self) -> str:
        token = secrets.token_hex(8)
        self._issued.add(token)
        return token

    def model(self, name: str) -> Model:
        """A model.

        Raises:
            Refusal: there is none of the name.
        """
        if name not in self.models:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Registered model '{name}' does not exist.")
        return self.models[name]

    def version(self, name: str, version: str) -> Version:
        """A version of a model.

        Raises:
            Refusal: there is no such version.
        """
        model_version = self.model(name).versions.get(int(version))
        if model_version is None:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Version {version} of '{name}' does not exist.")
        return model_version

    def describe_model(self, name: str, *, aliases: bool) -> Json:
        """A model, as the SDK's class has it."""
        catalog, schema, short = name.split(".")
        model = self.model(name)
        alias_infos = [
            RegisteredModelAlias(alias_name=key, version_num=value) for key, value in model.aliases.items()
        ]
        return RegisteredModelInfo(
            full_name=name,
            catalog_name=catalog,
            schema_name=schema,
            name=short,
            aliases=alias_infos if aliases else None,
            created_at=model.created,
        ).as_dict()

    def create_model(self, name: str) -> Json:
        """A model without versions, unless it exists.

        Raises:
            Refusal: its name has not three levels, or it exists.
        """
        check_name(name)
        if name in self.models:
            raise Refusal(400, "RESOURCE_ALREADY_EXISTS", f"Registered model '{name}' already exists.")
        self.models[name] = Model(created=CREATED)
        return {"registered_model": {"name": name, "creation_timestamp": CREATED}}

    def create_version(self, body: Json) -> Json:
        """A version whose files are yet to be uploaded."""
        name = body["name"]
        check_name(name)
        tags = {item["key"]: item.get("value", "") for item in body.get("tags") or []}
        check_tags({}, tags)
        with self._lock:
            versions = self.model(name).versions
            number = max(versions, default=0) + 1
            versions[number] = Version(
                run_id=body.get("run_id", ""),
                status="PENDING_REGISTRATION",
                tags=tags,
                source=body.get("source", ""),
                model_id=body.get("model_id", ""),
                workspace_id=body.get("run_tracking_server_id", ""),
            )
        return {"model_version": versions[number].describe(name, number)}

    def finalize_version(self, name: str, version: str) -> Json:
        """The files of a version are complete."""
        model_version = self.version(name, version)
        try:
            uploaded = self.files.read(f"/Models/{name.replace('.', '/')}/{version}/MLmodel")
        except FileRefusal:
            uploaded = None
        check_files(uploaded)
        model_version.status = "READY"
        return {"model_version": model_version.describe(name, int(version))}

    def search_versions(self, query: str) -> Json:
        """The versions of a model: other filters are refused."""
        match = re.fullmatch(r"name\s*=\s*'([^']+)'", query.strip())
        if not match:
            raise Refusal(400, "INVALID_PARAMETER_VALUE", f"Unsupported filter query: {query}")
        versions = self.models.get(match[1], Model()).versions
        return {
            "model_versions": [
                item.describe(match[1], number, search=True) for number, item in versions.items()
            ]
        }

    def set_version_tag(self, name: str, version: str, key: str, value: str) -> Json:
        """Set one tag of a version."""
        model_version = self.version(name, version)
        check_tags(model_version.tags, {key: value})
        model_version.tags[key] = value
        return {}

    def describe_version(self, name: str, version: str) -> Json:
        """A version with its tags, as MLflow's API has it."""
        return self.version(name, version).describe(name, int(version))

    def set_alias(self, name: str, alias: str, version: int) -> Json:
        """Point an alias at a version that exists."""
        model_version = self.version(name, str(version))
        if model_version.status != "READY":
            raise Refusal(400, "INVALID_STATE", f"Version {version} of '{name}' is not READY.")
        model = self.models[name]
        model.aliases[model.alias(alias)] = version
        return RegisteredModelAlias(alias_name=model.alias(alias), version_num=version).as_dict()

    def delete_alias(self, name: str, alias: str) -> Json:
        """Remove an alias that exists."""
        model = self.model(name)
        if model.aliases.pop(model.alias(alias), None) is None:
            raise Refusal(404, "RESOURCE_DOES_NOT_EXIST", f"Alias '{alias}' does not exist.")
        return {}
