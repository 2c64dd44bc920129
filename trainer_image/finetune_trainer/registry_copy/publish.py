"""The destination of a copy: uploads the files to a run, checks them, and registers the version with its lineage."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finetune_crds import contract
from finetune_trainer.pod.exit_status import TrainingError
from finetune_trainer.registry_copy.source_version import SourceVersion, find_files, hash_file
from finetune_trainer.train.delivery.register import Registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlflow import MlflowClient

T = TypeVar("T")
# Tags that say what the operator or a promotion of the source did there, and the version of the source's model that a training started from:
# the same number is another version here.
_LOCAL_TAGS = (contract.TAG_BASE_VERSION, contract.TAG_COPY)
_LOCAL_PREFIXES = ("mlflow.", "finetune.dev/", "promoted_", "finetune_copied_")
# What MLflow takes in one request.
_METRICS_PER_CALL, _PARAMS_PER_CALL, _TAGS_PER_CALL = 1000, 100, 100


@dataclass(frozen=True)
class Destination:
    """Where a copy goes.

    Attributes:
        model: the registered model.
        run_id: the run that gets the files, the metrics and the parameters.
        source: the address of the source, without a login.
        digest: the identity of the source's version, by which the operator finds the copy.
    """

    model: str
    run_id: str
    source: str
    digest: str


def publish(folder: Path, destination: Destination) -> None:
    """Upload the version in the shared folder, and register it as a version of the model, unless that is done already.

    The version exists only after its files were read back and have the digests of the source's files.

    Raises:
        RecipeRefusedError: MLflow refused the model.
        TrainingError: MLflow was unreachable for too long, or the uploaded files differ from those of the source.
    """
    version = SourceVersion.read(folder)
    registry = Registry(destination.run_id, None, done="the version is downloaded")
    number = registry.find_tagged(destination.model, contract.TAG_COPY, destination.digest)
    if number is None:
        number = _upload(folder, version, destination, registry)
    print(f"version {number} of {destination.model} is the copy", flush=True)


def _upload(folder: Path, version: SourceVersion, destination: Destination, registry: Registry) -> str:
    files = find_files(folder)
    print(f"uploading {len(version.files)} files", flush=True)
    model_id = registry.upload(files)
    for name, digest in version.files.items():
        # NB: one call for each file, since a call has one time limit for all of its retries.
        registry.call(partial(_check_file, model_id=model_id, name=name, digest=digest, folder=folder))
    registry.call(lambda mlflow: _log_lineage(mlflow, destination.run_id, version))
    tags = {**select_tags(version.tags), **_build_lineage_tags(version, destination)}
    number = registry.register(
        destination.model, model_id, files, tags, description=version.description or None
    )
    registry.call(lambda mlflow: mlflow.set_terminated(destination.run_id, "FINISHED"))
    return number


def select_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of a version or a run that are true of its copy too."""
    return {
        name: value
        for name, value in tags.items()
        if name not in _LOCAL_TAGS and not name.startswith(_LOCAL_PREFIXES)
    }


def _build_lineage_tags(version: SourceVersion, destination: Destination) -> dict[str, str]:
    tags = {
        contract.TAG_COPY: destination.digest,
        contract.TAG_COPIED_FROM: destination.source,
        contract.TAG_COPIED_MODEL: version.model,
        contract.TAG_COPIED_VERSION: version.version,
        contract.TAG_COPIED_RUN: version.run_id,
        contract.TAG_COPIED_FILES: version.compute_digest(),
    }
    return {name: value for name, value in tags.items() if value}


def _check_file(mlflow: MlflowClient, *, model_id: str, name: str, digest: str, folder: Path) -> None:
    """Read back a file that was uploaded, and compare its digest.

    Raises:
        TrainingError: the file differs. The upload is deleted then, so that the next pod starts it anew.
    """
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    repository = ModelsArtifactRepository(f"models:/{model_id}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if hash_file(Path(repository.download_artifacts(name, scratch))) == digest:
            return
    mlflow.delete_logged_model(model_id)
    raise TrainingError(
        "CopyDamaged",
        f"the file {name} of the copy differs from that of the source after the upload: check the artifact store of the MLflow server",
    )


def _log_lineage(mlflow: MlflowClient, run_id: str, version: SourceVersion) -> None:
    """Log the metrics, parameters and tags of the source's run, which gates read."""
    from mlflow.entities import Metric, Param, RunTag

    now = int(time.time() * 1000)
    logged = mlflow.get_run(run_id).data.params
    metrics = [Metric(name, value, now, 0) for name, value in version.metrics.items()]
    params = [Param(name, value) for name, value in version.params.items() if name not in logged]
    tags = [RunTag(name, value) for name, value in select_tags(version.run_tags).items()]
    for metric_batch in _split(metrics, _METRICS_PER_CALL):
        mlflow.log_batch(run_id, metrics=metric_batch)
    for param_batch in _split(params, _PARAMS_PER_CALL):
        mlflow.log_batch(run_id, params=param_batch)
    for tag_batch in _split(tags, _TAGS_PER_CALL):
        mlflow.log_batch(run_id, tags=tag_batch)


def _split(entries: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the entries in lists of at most `size`."""
    yield from (entries[start : start + size] for start in range(0, len(entries), size))
