"""Models on a volume that the pods of many jobs share; an entry is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, Timeout

from finetune_crds import contract
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_crds.training import Model

_FILES, _MANIFEST = "files", "manifest.json"
# Seconds between attempts to take a lock that another pod holds.
_POLL_SECONDS = 0.5
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOTSUP)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Cache:
    """The models on a claim.

    `models/<digest of the key>` is an entry: the files of a model, and a manifest with their sizes. `hub` is a cache
    of the Hub's client. `locks` has the locks of entries that are being written.
    """

    root: Path
    claim: str

    @classmethod
    def of(cls, model: Model) -> Cache | None:
        """Return the cache of a recipe's model, mounted in the pod; None if the recipe names no cache."""
        return cls(Path(contract.MODEL_CACHE_PATH), model.cache.claim_name) if model.cache else None

    @property
    def hub(self) -> Path:
        """Folder of the Hub's client, which locks and completes what it writes there."""
        return self.root / contract.MODEL_CACHE_HUB

    def find(self, key: Any) -> Path | None:
        """Return the files of an entry; None if it is missing or broken."""
        entry = self._entry(key)
        return entry / _FILES if _is_complete(entry) else None

    def get(self, key: Any, fill: Callable[[Path], None]) -> Path:
        """Return the files of an entry, and write it first if it is missing or broken.

        Pods that ask at the same time wait for the first of them. An entry gets its final name after its last file is written, so a pod
        that ends before that creates no entry.

        Args:
            key: what the content depends on, as JSON.
            fill: writes the files into an empty folder.

        Raises:
            RecipeRefusedError: the claim cannot be written to.
            TrainingError: the claim is full.
        """
        files = self.find(key)
        if files is None:
            entry = self._entry(key)
            with self.translating_errors(), self._holding_lock(entry.name) as alone:
                # Another pod may have written the entry while this one waited for the lock.
                files = self.find(key) or _write(entry, key, fill, alone=alone)
        return files

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translate errors of the volume into errors of the pod.

        Raises:
            RecipeRefusedError: the claim cannot be written to.
            TrainingError: the claim is full.
        """
        try:
            yield
        except OSError as error:
            if error.errno in _FULL_ERRNOS:
                raise TrainingError(
                    "ModelCacheFull",
                    f"the claim {self.claim} of model.cache is full: enlarge the claim, or delete models in it",
                ) from error
            if error.errno in _FORBIDDEN_ERRNOS and str(error.filename).startswith(str(self.root)):
                raise RecipeRefusedError(
                    f"the pod cannot write to the claim {self.claim} of model.cache ({error.strerror}): give its user "
                    "access, for example with securityContext.fsGroup in the template of spec.pods.all",
                    reason="ModelCacheForbidden",
                ) from error
            raise

    def _entry(self, key: Any) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.root / "models" / digest[:40]

    @contextmanager
    def _holding_lock(self, name: str) -> Iterator[bool]:
        """Hold the lock of an entry, and yield True; yield False on a volume without locks, where several pods may write at once."""
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        # Pods of any user may take the lock. NB: a soft lock, a plain file, would outlive a pod that is killed.
        lock = FileLock(folder / f"{name}.lock", mode=0o666, fallback_to_soft=False)
        is_locked = _acquire(lock)
        try:
            yield is_locked
        finally:
            lock.release()


def _acquire(lock: BaseFileLock) -> bool:
    """Wait for a lock; return False if the volume has no locks."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("waiting for another pod that is downloading the model to the cache", flush=True)
        lock.acquire(poll_interval=_POLL_SECONDS)
    except NotImplementedError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRNOS:
            raise
        return False
    return True


def _write(entry: Path, key: Any, fill: Callable[[Path], None], *, alone: bool) -> Path:
    """Write an entry under another name, and rename it when it is complete.

    alone: no other pod is writing the entry, so the partial folders of ended pods are removed.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    if alone:
        for folder in entry.parent.glob(f".{entry.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        files = partial / _FILES
        files.mkdir()
        fill(files)
        manifest = {"key": key, "files": _read_sizes(files)}
        (partial / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        _sync(partial)
        # `mkdtemp` makes a folder that only its owner can read.
        partial.chmod(0o755)
        _rename(partial, entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entry / _FILES


def _rename(partial: Path, entry: Path) -> None:
    """Give a complete entry its name. Only now remove a broken entry, since another pod may have read its files meanwhile."""
    broken = partial.with_name(f"{partial.name}-broken")
    # Mostly, there is no broken entry.
    with suppress(FileNotFoundError):
        if not _is_complete(entry):
            entry.rename(broken)
            shutil.rmtree(broken, ignore_errors=True)
    try:
        partial.rename(entry)
    except OSError:
        # Without locks, another pod may have completed the entry first; then that entry is used.
        if not _is_complete(entry):
            raise


def _is_complete(entry: Path) -> bool:
    """Return whether an entry has all files of its manifest, with their sizes; other files are ignored."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["files"]) and manifest["files"].items() <= _read_sizes(entry / _FILES).items()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files in a folder, by relative name."""
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }


def _sync(folder: Path) -> None:
    """Wait until the files of a folder are on the volume, so that an entry never gets its name before its content."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
