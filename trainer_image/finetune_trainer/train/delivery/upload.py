"""Applies register.upload: whether the files of a model are uploaded directly to the artifact store, or through the MLflow server (Proxy).

For Direct, the server signs URLs of its object store, to which the client uploads a large file in parts. Since MLflow 3.17 the client
does so by default if the server supports it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError
from finetune_trainer.pod.library_variables import HTTP_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.tracking import Upload

_ENABLED_VARIABLE = "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD"
_MIN_BYTES_VARIABLE = "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE"
# Two of MLflow's parts. With MLflow's default minimum of 500 MiB, files of small models would be uploaded through the server.
_MIN_MULTIPART_BYTES = 20 * 2**20
# The server answers only when the store has the complete file: 4 GB at 1 MB/s.
_UPLOAD_TIMEOUT_SECONDS = 4000
_PROBE = "upload-probe"
# Answers of a server that does not create signed URLs.
_UNSUPPORTED_STATUSES = (400, 404, 501)


def configure_client(mode: Upload | None) -> None:
    """Set the upload mode of MLflow's client in this process, in which no thread runs yet; None: the server decides."""
    if mode is not None:
        os.environ[_ENABLED_VARIABLE] = str(mode == "Direct").lower()
    if mode == "Direct":
        os.environ.setdefault(_MIN_BYTES_VARIABLE, str(_MIN_MULTIPART_BYTES))


@contextmanager
def allow_slow_uploads() -> Iterator[None]:
    """While inside, MLflow's client waits for the server to write a large file to its store.

    NB: the client's usual timeout is shorter, and an upload that times out starts again.
    """
    # NB: the process has set the variable at its start, so this adds none beside other threads.
    usual_timeout = os.environ[HTTP_TIMEOUT]
    os.environ[HTTP_TIMEOUT] = str(max(_UPLOAD_TIMEOUT_SECONDS, int(usual_timeout)))
    try:
        yield
    finally:
        os.environ[HTTP_TIMEOUT] = usual_timeout


def check(mode: Upload | None, run_id: str) -> None:
    """Check before training that the server supports the upload mode. If the server is unreachable, training continues.

    Raises:
        RecipeRefusedError: the server does not support the upload mode.
    """
    try:
        require(mode, run_id)
    except PodFailure:
        raise
    except Exception as error:  # noqa: BLE001 - any error; the upload checks again
        print(
            f"cannot check whether the MLflow server supports register.upload {mode}: {mlflow_run.first_line(error)}",
            flush=True,
        )


def require(mode: Upload | None, run_id: str) -> None:
    """Check that the server supports the upload mode; `register` calls this again immediately before the upload.

    NB: if the server does not, MLflow's client silently sends files of any size to the server.

    Raises:
        RecipeRefusedError: the server does not support the upload mode.
        Exception: an error of MLflow's client, for example because the server does not answer.
    """
    mistake = _find_mistake(mode, run_id) if mode is not None else None
    if mistake:
        raise RecipeRefusedError(mistake, reason="UploadRefused")


def _find_mistake(mode: Upload, run_id: str) -> str | None:
    """Return why the server does not support the upload mode, and the remedy; None if it does."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
    from requests import HTTPError

    uri = mlflow_run.create_client().get_run(run_id).info.artifact_uri
    repository = get_artifact_repository(uri)
    if not isinstance(repository, HttpArtifactRepository):
        if mode == "Direct":
            return None
        return f"register.upload Proxy requires an MLflow server that serves artifacts, but pods write to {uri} directly: remove the field"
    if mode == "Proxy":
        return None
    try:
        upload = repository.create_multipart_upload(_PROBE)
    except HTTPError as error:
        if error.response is None or error.response.status_code not in _UNSUPPORTED_STATUSES:
            raise
        return (
            "register.upload Direct requires an MLflow server that creates signed URLs for its artifact store, which must be S3, Google "
            "Cloud Storage or Azure Blob Storage: set Proxy, or remove the field"
        )
    repository.abort_multipart_upload(_PROBE, upload.upload_id)
    return None
