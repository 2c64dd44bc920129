"""The source of a copy: downloads the files of a version, and reads its tags and its run."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from finetune_trainer.models.download import list_mlflow_files
from finetune_trainer.models.unsafe_files import check_names
from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.pod.mlflow_retries import call_with_retries
from finetune_trainer.registry_copy.source_version import SourceVersion, find_files, hash_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

T = TypeVar("T")
_FIELD = "spec.source.registry"
_MISSING = "RESOURCE_DOES_NOT_EXIST"


def download(uri: str, folder: Path) -> None:
    """Download a version into the shared folder, with a record of its lineage.

    Args:
        uri: the version, as models:/name/number.
        folder: the folder that the containers share.

    Raises:
        RecipeRefusedError: the server refuses the version, or the version has no files or a file whose path leads out of its folder.
        TrainingError: the server does not answer.
    """
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    model, _, number = uri.removeprefix("models:/").rpartition("/")
    client = mlflow_run.create_client()
    version = _read(lambda: client.get_model_version(model, number))
    repository = _read(lambda: ModelsArtifactRepository(uri))
    names = _read(lambda: sorted(list_mlflow_files(repository, "")))
    if not names:
        raise RecipeRefusedError(
            f"{_FIELD} version {number} of {model} has no files: name another version", reason="CopyRefused"
        )
    check_names(uri, names, field=_FIELD)
    files = find_files(folder)
    # What an earlier start of this container left.
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    print(f"downloading {len(names)} files of version {number} of {model}", flush=True)
    for name in names:
        _read(partial(repository.download_artifacts, name, str(files)))
    record = _build_record(client, version, {name: hash_file(files / name) for name in names})
    record.write(folder)
    size_bytes = sum((files / name).stat().st_size for name in names)
    print(f"downloaded {size_bytes} bytes with the digest {record.compute_digest()}", flush=True)


def _read(call: Callable[[], T]) -> T:
    """Read from the source, with retries while it is unreachable.

    Raises:
        RecipeRefusedError: the server refused the call.
        TrainingError: the server was unreachable for too long.
    """
    return call_with_retries(
        call,
        purpose="to read the version",
        refused=f"the server of {_FIELD} refused the version",
        refusal_reason="CopyRefused",
        unreachable=f"the server of {_FIELD}",
    )


def _build_record(client: MlflowClient, version: ModelVersion, files: dict[str, str]) -> SourceVersion:
    run = _find_run(client, version.run_id) if version.run_id else None
    return SourceVersion(
        model=version.name,
        version=str(version.version),
        description=version.description or "",
        tags=dict(version.tags),
        run_id=version.run_id or None,
        metrics=dict(run.data.metrics) if run else {},
        params=dict(run.data.params) if run else {},
        run_tags=dict(run.data.tags) if run else {},
        files=files,
    )


def _find_run(client: MlflowClient, run_id: str) -> Any:
    """Return the run of the version; None if it does not exist any more."""
    from mlflow.exceptions import MlflowException

    def get_run() -> Any:
        try:
            return client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != _MISSING:
                raise
            return None

    return _read(get_run)
