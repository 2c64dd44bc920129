"""Runs, metrics and logged models of the stand-in workspace: MLflow's own server behind the workspace's rules.

The requests are answered by the handlers of MLflow's server, in this process, on a SQLite database of the workspace. What a
workspace does otherwise is done here: experiments have paths, and artifacts lie in the workspace.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.mlflow_server import migrated_database

Json = dict[str, Any]
_ARTIFACTS = "dbfs:/databricks/mlflow-tracking"
# MLflow keeps the files of a logged model in another folder than a workspace does.
_LOGGED_MODEL = re.compile(rf"({_ARTIFACTS}/[^/\"]+)/models/(m-[^/\"]+)/artifacts/?")
# The handlers of MLflow's server know one store in a process.
_ONE_STORE = threading.Lock()


class TrackingRefusal(Exception):  # noqa: N818
    """A request that a workspace does not let in: HTTP status, error code, message."""


@dataclass
class Tracking:
    """MLflow's server for one workspace, in a folder.

    Attributes:
        parents: folders in which experiments can be created.
    """

    folder: Path
    parents: set[str] = field(default_factory=lambda: {"/Shared", "/Users/ana@example.com"})
    _store: Any = None
    _client: Any = None

    def ask(self, method: str, target: str, body: bytes) -> tuple[int, str]:
        """Status and body of MLflow's answer.

        Raises:
            TrackingRefusal: a workspace has another rule than MLflow.
        """
        path = target.partition("?")[0]
        if path.endswith("/experiments/create"):
            self._check_experiment(str(json.loads(body).get("name", "")))
        with _ONE_STORE:
            store = self.open()
            from mlflow.server import handlers

            handlers._tracking_store = store
            answer = self._client.open(
                target, method=method, data=body, headers={"Content-Type": "application/json"}
            )
        return answer.status_code, _LOGGED_MODEL.sub(r"\1/logged_models/\2", answer.get_data(as_text=True))

    def _check_experiment(self, name: str) -> None:
        if not name.startswith("/"):
            message = (
                f"Got an invalid experiment name '{name}'. An experiment name must be an absolute path within the "
                "Databricks workspace, e.g. '/Users/<some-username>/my-experiment'."
            )
            raise TrackingRefusal(400, "INVALID_PARAMETER_VALUE", message)
        parent = name.rpartition("/")[0]
        if parent not in self.parents:
            message = f"Parent directory {parent} does not exist."
            raise TrackingRefusal(404, "RESOURCE_DOES_NOT_EXIST", message)

    @property
    def is_open(self) -> bool:
        """Whether there was a request, or `open` was called."""
        return self._store is not None

    def open(self) -> Any:
        """MLflow's store. The first call takes seconds, longer than a client waits: make it before the first request."""
        if self._store is None:
            # NB: MLflow's modules warn about each other while they are imported.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # NB: each search of runs tries to import it, which takes seconds and fails for want of Flask-WTF.
                sys.modules.setdefault("mlflow.server.auth", None)  # type: ignore[arg-type]
                from mlflow.server import app
                from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

                database = self.folder / "mlflow.db"
                shutil.copyfile(migrated_database(), database)
                self._store = SqlAlchemyStore(f"sqlite:///{database}", _ARTIFACTS)
            self._client = app.test_client()
        return self._store
