"""From files to a registered version: uploaded and registered once for each run, for any number of attempts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from finetune_trainer.outcome import TrainingError
from finetune_trainer.train.runtime import track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

T = TypeVar("T")
LOGGED_MODEL_NAME = "model"
_PATIENCE_SECONDS = 600.0
_LONGEST_PAUSE_SECONDS = 15.0


class Registry:
    """The MLflow run's model and the version made from it.

    Aliases and promotion are the operator's: nothing here sets them.
    """

    def __init__(
        self,
        run_id: str,
        *,
        connect: Callable[[], MlflowClient] = track.client,
        patience_seconds: float | None = None,
    ) -> None:
        self._run_id = run_id
        self._connect = connect
        self._patience = patience_seconds or track.patience_seconds(_PATIENCE_SECONDS)

    def version_of_run(self, model: str) -> str | None:
        """The version of `model` that an earlier attempt of the same run registered."""
        return self._patiently(lambda mlflow: self._find_version(mlflow, model))

    def upload(self, folder: Path) -> str:
        """Upload the exported folder as the run's logged model and return its id; done already: the same id."""
        return self._patiently(lambda mlflow: self._log(mlflow, folder))

    def register(self, model: str, model_id: str, tags: Mapping[str, str]) -> str:
        """Register the logged model as a version of `model` with tags, and return the version's number."""
        return self._patiently(
            lambda mlflow: self._find_version(mlflow, model) or self._create(mlflow, model, model_id, tags)
        )

    def _patiently(self, call: Callable[[MlflowClient], T]) -> T:
        """Call MLflow, again and again while it is away.

        Raises:
            TrainingError: it refused, or stayed away too long.
        """
        deadline = time.monotonic() + self._patience
        pause, told = 0.5, False
        while True:
            try:
                return call(self._connect())
            except Exception as error:
                line = track.first_line(error)
                if track.is_final(error):
                    raise TrainingError("RegistrationRefused", f"MLflow refused the model: {line}") from error
                if time.monotonic() + pause > deadline:
                    raise TrainingError(
                        "MlflowUnreachable",
                        f"the model is trained but MLflow was not reachable for {self._patience:.0f} s: {line}",
                    ) from error
                if not told:
                    print(f"waiting for MLflow to register the model: {line}", flush=True)
                    told = True
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _find_version(self, mlflow: MlflowClient, model: str) -> str | None:
        # NB: Unity Catalog can filter by name alone, so the run is compared here.
        versions = _all(lambda token: mlflow.search_model_versions(f"name='{model}'", page_token=token))
        return next((str(found.version) for found in versions if found.run_id == self._run_id), None)

    def _find_logged(self, mlflow: MlflowClient, experiment: str) -> LoggedModel | None:
        # NB: Databricks cannot filter by run yet.
        by_name = f"name='{LOGGED_MODEL_NAME}'"
        models = _all(
            lambda token: mlflow.search_logged_models([experiment], filter_string=by_name, page_token=token)
        )
        return next((found for found in models if found.source_run_id == self._run_id), None)

    def _log(self, mlflow: MlflowClient, folder: Path) -> str:
        """Upload the folder, unless it is there; what an interrupted upload left is taken up again."""
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        experiment = mlflow.get_run(self._run_id).info.experiment_id
        logged = self._find_logged(mlflow, experiment) or mlflow.create_logged_model(
            experiment, LOGGED_MODEL_NAME, source_run_id=self._run_id
        )
        if logged.status != LoggedModelStatus.READY:
            mlflow.log_model_artifacts(logged.model_id, str(folder))
            mlflow.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
            mlflow.log_outputs(self._run_id, [LoggedModelOutput(logged.model_id, step=0)])
        return str(logged.model_id)

    def _create(self, mlflow: MlflowClient, model: str, model_id: str, tags: Mapping[str, str]) -> str:
        from mlflow.exceptions import MlflowException

        try:
            mlflow.create_registered_model(model)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise
        version = mlflow.create_model_version(
            model, source=f"models:/{model_id}", run_id=self._run_id, tags=dict(tags), model_id=model_id
        )
        return str(version.version)


def _all(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Every result of a search that answers in pages."""
    token: str | None = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
