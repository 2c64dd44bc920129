"""The folder that output.uri names. Its manifest, written before and after the model, records whether the model is complete."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, SupersededError, TrainingError
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from fsspec import AbstractFileSystem

    from finetune_crds.recipe import JobReference

T = TypeVar("T")
MANIFEST = "finetune_model.json"
_CONFIGS = ("adapter_config.json", "config.json")


@dataclass(frozen=True)
class Manifest:
    """The owner and the files of the model in a folder.

    job, uid: the FineTuneJob, as namespace/name, and its uid.
    attempt: the attempt that writes or wrote the model.
    files: sizes of all files, by their paths in the folder, for example {"config.json": 512}; None until all are written.
    begun: the paths of files that attempts may have written, including attempts of a deleted job of the same name; empty when all are written.
    """

    job: str
    uid: str
    attempt: int
    files: dict[str, int] | None = None
    begun: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: bytes) -> Manifest | None:
        """Return the manifest in a file; None if the file contains something else."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def content(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(asdict(self), indent=2).encode()

    def names(self) -> set[str]:
        """Return the paths of all files that jobs have written or begun to write."""
        return {*(self.files or ()), *self.begun}

    def explain_incomplete(self, sizes: Mapping[str, int]) -> str | None:
        """Return why files of these sizes are not the complete model; None if they are."""
        if self.files is None:
            return f"FineTuneJob {self.job} has not finished writing it"
        broken = [name for name, size in self.files.items() if sizes.get(name) != size]
        return f"file {broken[0]} is missing or has the wrong size" if broken else None


class ModelFolder:
    """The folder of a model that one attempt of a job writes.

    Readers find a complete model or no model: the configuration is written after all other files, then the manifest that lists them.

    Args:
        uri: the URI of the folder, on a volume or in an object store.
        job: the FineTuneJob.
        attempt: the number of the attempt.
        retry_delays_seconds: the pauses before each retry of a request that the storage failed. No retry begins later than their sum after
            the first request.
    """

    def __init__(
        self, uri: str, job: JobReference, attempt: int, *, retry_delays_seconds: Sequence[float] = ()
    ) -> None:
        self.uri = uri.rstrip("/")
        self._retry_delays_seconds = retry_delays_seconds
        # The manifest of this attempt, before any file is written.
        self._manifest = Manifest(f"{job.namespace}/{job.name}", job.uid, attempt)

    def claim(self) -> None:
        """Record that this attempt writes the folder, unless an attempt of this job has completed it.

        Raises:
            RecipeRefusedError: the folder has other files, its bucket or volume does not exist, or the pod is not allowed to write it.
            TrainingError: the storage failed.
            SupersededError: a later attempt writes the folder.
        """
        with self._translating_errors(RecipeRefusedError):
            self._retry(self._take, repeats_refusals=False)

    def _take(self) -> None:
        files, path = filesystems.open_filesystem(self.uri)
        current = self._check(claiming=True)
        if current is not None and current.files is not None:
            return
        filesystems.make_folder(files, path)
        if current is None:
            self._create()
        else:
            self._write(self._build_manifest(current))

    def is_finished(self) -> bool:
        """Return whether an attempt of this job has completed the folder.

        Raises:
            RecipeRefusedError, TrainingError, SupersededError: as `publish`.
        """
        with self._translating_errors(TrainingError):
            current = self._check()
        return current is not None and current.files is not None

    def publish(self, parts: Mapping[str, Path]) -> None:
        """Write the files of local folders, replace the files of an earlier attempt, and mark the model as complete.

        Files that no attempt has written stay as they are.

        Args:
            parts: the local folders, by the subfolder that their files are written to; "" for the folder itself.

        Raises:
            RecipeRefusedError: another job has taken the folder.
            TrainingError: the storage failed.
            SupersededError: a later attempt writes the folder.
        """
        sources = {
            (PurePosixPath(part) / file.relative_to(folder)).as_posix(): file
            for part, folder in parts.items()
            for file in folder.rglob("*")
            if file.is_file()
        }
        # Configurations last, and the model's own after all others.
        names = sorted(sources, key=lambda name: (_is_config(name), name in _CONFIGS, name))
        sizes = {name: sources[name].stat().st_size for name in names}
        # NB: `claim` was able to write to the folder, so a refusal now may be temporary: another attempt may have access again.
        with self._translating_errors(TrainingError):
            files, path = filesystems.open_filesystem(self.uri)
            manifest = self._build_manifest(self._retry(self._check))
            earlier = manifest.names()
            self._retry(lambda: self._write(replace(manifest, begun=sorted({*earlier, *names}))))
            # NB: a loader that ignores the manifest would take a folder with an old configuration for a complete model, and an old index
            # for the list of the weights, so both are deleted before anything is written.
            self._retry(
                lambda: self._remove({name for name in earlier if _is_config(name) or name not in sizes})
            )
            for name in names:
                self._retry(partial(self._put, files, sources[name], f"{path}/{name}"))
            self._retry(self._check)
            self._retry(lambda: self._write(replace(self._manifest, files=sizes)))

    def _put(self, files: AbstractFileSystem, source: Path, target: str) -> None:
        # A later attempt may have taken over the folder since the last file.
        self._check()
        filesystems.make_folder(files, str(PurePosixPath(target).parent))
        files.put_file(str(source), target)

    def _retry(self, operation: Callable[[], T], *, repeats_refusals: bool = True) -> T:
        """Call `operation`, which can be repeated; if the storage fails, call it again after a pause.

        Args:
            repeats_refusals: also call it again if the bucket or volume is missing, or the login is missing or refused.
        """
        # NB: clients of stores repeat requests themselves before they raise an error, that of Databricks for five minutes.
        deadline = time.monotonic() + sum(self._retry_delays_seconds)
        for delay_seconds in self._retry_delays_seconds:
            try:
                return operation()
            except PodFailure:
                raise
            except Exception as error:
                failure = filesystems.describe_failure(error)
                is_final = not repeats_refusals and self._refusal(error) is not None
                if failure is None or is_final or time.monotonic() >= deadline:
                    raise
                print(
                    f"output.uri {self.uri} cannot be written: {failure}; retrying in {delay_seconds:g} s",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(delay_seconds)
        return operation()

    def _check(self, *, claiming: bool = False) -> Manifest | None:
        """Return the manifest of the folder if this job may write there; None if the folder is empty.

        Args:
            claiming: also accept a folder that a deleted job of the same name has not completed.

        Raises:
            RecipeRefusedError: the folder is not this job's.
            SupersededError: a later attempt of this job writes the folder.
        """
        files, path = filesystems.open_filesystem(self.uri)
        try:
            text = files.cat_file(f"{path}/{MANIFEST}")
        except FileNotFoundError:
            text = b""
        if not text:
            if _is_empty(self.uri):
                return None
            raise self._taken_error("contains files that no FineTuneJob wrote")
        current = Manifest.read(text)
        if current is None:
            raise self._taken_error(f"contains a {MANIFEST} that no FineTuneJob wrote")
        if current.uid != self._manifest.uid:
            if claiming and current.files is None and current.job == self._manifest.job:
                return current
            raise self._taken_error(self._describe_owner(current))
        if current.attempt > self._manifest.attempt:
            raise SupersededError(
                f"attempt {current.attempt} of the job writes output.uri {self.uri}: this attempt does not publish the model"
            )
        return current

    def _describe_owner(self, manifest: Manifest) -> str:
        """Return how the folder belongs to another job, as part of a sentence."""
        job = f"FineTuneJob {manifest.job}"
        if manifest.files is None:
            return f"contains files that {job} started to write"
        earlier = "an earlier " if manifest.job == self._manifest.job else ""
        return f"is the model of {earlier}{job}"

    def _taken_error(self, why: str) -> RecipeRefusedError:
        return RecipeRefusedError(
            f"output.uri {self.uri} {why}: choose another folder, or empty it", reason="OutputTaken"
        )

    def _create(self) -> None:
        """Write the first manifest of the folder."""
        files, path = filesystems.open_filesystem(self.uri)
        try:
            filesystems.create_file(files, f"{path}/{MANIFEST}", self._manifest.content())
        except FileExistsError:
            # NB: another job was faster, so `_check` raises; or the file is this job's: clients repeat a request whose answer is lost.
            self._write(self._build_manifest(self._check()))

    def _build_manifest(self, earlier: Manifest | None) -> Manifest:
        """Return the manifest with which this attempt begins to write the folder, given the existing manifest."""
        return replace(self._manifest, begun=sorted(earlier.names()) if earlier is not None else [])

    def _remove(self, names: set[str]) -> None:
        """Delete the named files that exist, configurations first."""
        if not names:
            return
        files, path = filesystems.open_filesystem(self.uri)
        paths = {
            PurePosixPath(file_path).relative_to(path).as_posix(): file_path
            for file_path in filesystems.list_files(files, path)
        }
        for name in sorted(names & paths.keys(), key=lambda name: (not _is_config(name), name)):
            self._check()
            files.rm(paths[name])

    def _write(self, manifest: Manifest) -> None:
        files, path = filesystems.open_filesystem(self.uri)
        filesystems.write_atomically(files, f"{path}/{MANIFEST}", manifest.content())

    @contextmanager
    def _translating_errors(self, refused: type[RecipeRefusedError | TrainingError]) -> Iterator[None]:
        """Translate errors of the storage into errors of the pod.

        Args:
            refused: the class of the error if the bucket or volume is missing, or the login is missing or refused.
        """
        try:
            yield
        except PodFailure:
            raise
        except Exception as error:
            refusal = self._refusal(error)
            if refusal is not None:
                reason, why = refusal
                raise refused(message=f"output.uri {self.uri} {why}", reason=reason) from error
            failure = filesystems.describe_failure(error)
            if failure is None:
                raise
            raise TrainingError(
                "OutputUnwritable", f"output.uri {self.uri} cannot be written: {failure}"
            ) from error

    def _refusal(self, error: Exception) -> tuple[str, str] | None:
        """Return the reason and the message of an error that the spec or the pod's login causes; None for any other error."""
        if filesystems.is_missing(error):
            return (
                "OutputNotFound",
                f"does not exist: create the {filesystems.name_container(self.uri)}, or correct output.uri",
            )
        if filesystems.is_forbidden(error):
            return (
                "OutputForbidden",
                "cannot be written with the pod's credentials: grant these credentials access",
            )
        if filesystems.has_no_login(error):
            return (
                "OutputForbidden",
                f"requires credentials, but the environment has none: set {filesystems.describe_logins(self.uri)}, in a pod by envFrom",
            )
        return None


def list_model_files(uri: str, manifest: bytes, sizes: Mapping[str, int]) -> set[str]:
    """Return the files of a model that a job has written to output.uri, by their paths in the folder.

    Args:
        uri: the URI of the folder, as model.base names it.
        manifest: the content of the folder's manifest.
        sizes: the sizes of all files in the folder, by their paths in the folder.

    Raises:
        RecipeRefusedError: the model is incomplete.
    """
    parsed = Manifest.read(manifest)
    # No job wrote this manifest, so it does not limit the model to some of the files.
    if parsed is None:
        return set(sizes)
    problem = parsed.explain_incomplete(sizes)
    if problem:
        raise RecipeRefusedError(
            f"model.base {uri} is incomplete ({problem}): start this job after that job has succeeded",
            reason="ModelNotLoadable",
        )
    return set(parsed.files or ())


def _is_config(name: str) -> bool:
    """Return whether a file is the configuration of the model in the folder or in a subfolder."""
    return PurePosixPath(name).name in _CONFIGS


def _is_empty(uri: str) -> bool:
    """Return whether a folder has no files other than a manifest."""
    files, path = filesystems.open_filesystem(uri)
    try:
        file_names = filesystems.list_files(files, path)
    except FileNotFoundError:
        # NB: a missing bucket is reported when something is written to it.
        return True
    # NB: a pod that was killed or ran out of space may have left the manifest empty or half written; without other files, the folder
    # counts as empty.
    return all(_is_manifest(PurePosixPath(name).name) for name in file_names)


def _is_manifest(name: str) -> bool:
    """Whether a file is the manifest, or a part of it that `write_atomically` did not finish."""
    return name == MANIFEST or (name.startswith(f"{MANIFEST}.") and name.endswith(filesystems.PART))
