"""Uploads and registers a model in MLflow, idempotent per run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.mlflow_retries import call_with_retries
from finetune_trainer.train.delivery import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

    from finetune_crds.tracking import Upload

T = TypeVar("T")
LOGGED_MODEL_NAME = "model"


class Registry:
    """The logged model of an MLflow run, and its registered version.

    Only the operator sets aliases.

    Args:
        run_id: the run.
        upload_mode: register.upload: whether files are uploaded directly to the artifact store or through the server.
        connect: creates the client for a call.
        patience_seconds: how long to retry while MLflow is unreachable.
        done: what was done before the upload, for the error about an unreachable MLflow.
    """

    def __init__(
        self,
        run_id: str,
        upload_mode: Upload | None,
        *,
        connect: Callable[[], MlflowClient] = mlflow_run.create_client,
        patience_seconds: float | None = None,
        done: str = "training finished",
    ) -> None:
        self._run_id, self._upload_mode = run_id, upload_mode
        self._connect = connect
        self._done = done
        self._patience_seconds = patience_seconds

    def find_version(self, model: str) -> str | None:
        """Return the version of `model` that an earlier attempt of this run registered, if any."""
        return self.call(lambda mlflow: self._find_version(mlflow, model))

    def find_tagged(self, model: str, tag: str, value: str) -> str | None:
        """Return the first complete version of `model` with a tag, if any. Not in Unity Catalog, which does not filter by tags."""
        return self.call(lambda mlflow: _find_tagged(mlflow, model, tag, value))

    def upload(self, folder: Path) -> str:
        """Upload the exported folder as the run's logged model, unless the run has one, and return the model's id.

        Raises:
            RecipeRefusedError: MLflow rejected the model, or does not support register.upload.
            TrainingError: MLflow was unreachable for too long.
        """
        return self.call(lambda mlflow: self._log(mlflow, folder))

    def register(
        self,
        model: str,
        model_id: str,
        folder: Path,
        tags: Mapping[str, str],
        *,
        description: str | None = None,
    ) -> str:
        """Register the logged model as a version of `model`, unless it is registered, and return the version number.

        `folder` is the uploaded folder: Unity Catalog stores its own copy of it.
        """
        return self.call(
            lambda mlflow: (
                self._find_version(mlflow, model)
                or self._create_version(mlflow, model, model_id, folder, tags, description=description)
            )
        )

    def call(self, call: Callable[[MlflowClient], T]) -> T:
        """Call MLflow, with retries while it is unreachable.

        Raises:
            RecipeRefusedError: MLflow rejected the call.
            TrainingError: MLflow was unreachable for too long.
        """
        return call_with_retries(
            lambda: call(self._connect()),
            purpose="to register the model",
            # NB: another attempt would train again, and be refused again.
            refused="MLflow refused the model",
            refusal_reason="RegistrationRefused",
            unreachable=f"{self._done}, but MLflow",
            patience_seconds=self._patience_seconds,
        )

    def _find_version(self, mlflow: MlflowClient, model: str) -> str | None:
        # NB: Unity Catalog filters only by name, so compare the run here.
        versions = _search_all_pages(
            lambda token: mlflow.search_model_versions(f"name='{model}'", page_token=token)
        )
        # NB: an earlier attempt that ended during its upload leaves an incomplete version in Unity Catalog: only complete versions count.
        complete = (version for version in versions if version.status == "READY")
        return next((str(version.version) for version in complete if version.run_id == self._run_id), None)

    def _find_logged(self, mlflow: MlflowClient, experiment: str) -> LoggedModel | None:
        # NB: Databricks cannot filter by run yet.
        by_name = f"name='{LOGGED_MODEL_NAME}'"
        models = _search_all_pages(
            lambda token: mlflow.search_logged_models([experiment], filter_string=by_name, page_token=token)
        )
        return next((model for model in models if model.source_run_id == self._run_id), None)

    def _log(self, mlflow: MlflowClient, folder: Path) -> str:
        """Upload the folder unless the run has a complete logged model; continues an interrupted upload."""
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        experiment = mlflow.get_run(self._run_id).info.experiment_id
        logged = self._find_logged(mlflow, experiment) or mlflow.create_logged_model(
            experiment, LOGGED_MODEL_NAME, source_run_id=self._run_id
        )
        if logged.status != LoggedModelStatus.READY:
            upload.require(self._upload_mode, self._run_id)
            with upload.allow_slow_uploads():
                mlflow.log_model_artifacts(logged.model_id, str(folder))
            mlflow.finalize_logged_model(logged.model_id, LoggedModelStatus.READY)
            mlflow.log_outputs(self._run_id, [LoggedModelOutput(logged.model_id, step=0)])
        return str(logged.model_id)

    def _create_version(
        self,
        mlflow: MlflowClient,
        model: str,
        model_id: str,
        folder: Path,
        tags: Mapping[str, str],
        *,
        description: str | None,
    ) -> str:
        from mlflow.exceptions import MlflowException

        try:
            mlflow.create_registered_model(model)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"):
                raise
        # NB: the public method has no `local_model_path`: it would download from the run what was just uploaded.
        version = mlflow._create_model_version(  # noqa: SLF001
            model,
            source=f"models:/{model_id}",
            run_id=self._run_id,
            tags=dict(tags),
            description=description,
            local_model_path=str(folder),
            model_id=model_id,
        )
        return str(version.version)


def _find_tagged(mlflow: MlflowClient, model: str, tag: str, value: str) -> str | None:
    versions = _search_all_pages(
        lambda token: mlflow.search_model_versions(f"tags.`{tag}` = '{value}'", page_token=token)
    )
    # NB: the grammar of filters has no quotes in names, so compare the name here.
    numbers = [int(item.version) for item in versions if item.name == model and item.status == "READY"]
    return str(min(numbers)) if numbers else None


def _search_all_pages(search: Callable[[str | None], Any]) -> Iterator[Any]:
    """Yield every result of a paginated search."""
    token: str | None = None
    while True:
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
