"""Tokenized splits next to the checkpoints of a job: a later attempt reads them instead of tokenizing again."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds import contract
from finetune_trainer.storage import filesystems
from finetune_trainer.storage.relative_paths import locate_inside

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from finetune_crds.data import Splits
    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.data.encode import Encoder

_MARKER = "COMPLETE"
# Version of the format of the stored files.
_FORMAT_VERSION = 1


class TokenCache:
    """The tokenized splits of a job, in a folder named by a digest of everything that determines them.

    A storage failure never stops an attempt: the attempt tokenizes the splits itself.

    Args:
        folder: the folder of the job's checkpoints.
        digest: of the splits, their tokenizer and the rules of encoding.
        confirm: called before the files are written and before the marker is; raises SupersededError if newer pods of the job have claimed
            the folder.
    """

    def __init__(self, folder: str, digest: str, confirm: Callable[[], None] = lambda: None) -> None:
        self._folder = f"{folder.rstrip('/')}/tokens-{digest}"
        self._confirm = confirm

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        splits: Splits,
        encoder: Encoder,
        confirm: Callable[[], None] = lambda: None,
    ) -> TokenCache | None:
        """Return the cache of a job; None if the job has no checkpoints, or if its splits have no version: files can change."""
        if recipe.checkpoint is None or (splits.version is None and not splits.tables):
            return None
        job = recipe.job
        folder = contract.job_folder(
            recipe.checkpoint.uri, namespace=job.namespace, name=job.name, uid=job.uid
        )
        return cls(folder, compute_digest(splits, encoder), confirm)

    def fetch(self, name: str, target: Path) -> bool:
        """Copy a split into the folder `target`; return False, without the folder, if the stored split is missing, incomplete or unreadable."""
        try:
            return self._fetch(name, target)
        except Exception as error:
            shutil.rmtree(target, ignore_errors=True)
            # `_fetch` raises ValueError for a wrong copy; `describe_failure` returns None for an error that is not the storage's.
            reason = str(error) if isinstance(error, ValueError) else filesystems.describe_failure(error)
            if reason is None:
                raise
            print(
                f"cannot read the stored tokens of split {name}; tokenizing the split again: {reason}",
                flush=True,
            )
            return False

    def _fetch(self, name: str, target: Path) -> bool:
        """Copy a split as `fetch` does; raises ValueError for an incomplete copy, or if the marker names a file outside of the folder."""
        try:
            files, folder = self._locate(name)
            sizes: dict[str, int] = json.loads(files.cat_file(f"{folder}/{_MARKER}"))
        except FileNotFoundError:
            return False
        target.mkdir(parents=True)
        for file, size in sizes.items():
            path = locate_inside(target, file)
            try:
                files.get_file(f"{folder}/{file}", str(path))
            except FileNotFoundError as error:
                raise ValueError(f"{file} is missing") from error
            if path.stat().st_size != size:
                raise ValueError(f"{file} has {path.stat().st_size:,} bytes instead of {size:,}")
        return True

    def store(self, name: str, source: Path) -> None:
        """Copy the files of a split's folder to the storage, the marker last."""
        with filesystems.tolerate_failures(
            f"cannot store the tokens of split {name}; later attempts tokenize the split again"
        ):
            self._store(name, source)

    def _store(self, name: str, source: Path) -> None:
        self._confirm()
        files, folder = self._locate(name)
        # The marker of an earlier upload, if any, must not confirm this upload before its files are complete.
        with suppress(FileNotFoundError):
            files.rm_file(f"{folder}/{_MARKER}")
        filesystems.make_folder(files, folder)
        sizes = {file.name: file.stat().st_size for file in sorted(source.iterdir())}
        for file in sizes:
            files.put_file(str(source / file), f"{folder}/{file}")
        # Newer pods may have claimed the folder during the upload.
        self._confirm()
        files.pipe_file(f"{folder}/{_MARKER}", json.dumps(sizes).encode())

    def _locate(self, name: str) -> tuple[AbstractFileSystem, str]:
        return filesystems.open_filesystem(f"{self._folder}/{name}")


def compute_digest(splits: Splits, encoder: Encoder) -> str:
    """Return a digest of everything that determines token ids, loss masks and their order."""
    inputs = [
        _FORMAT_VERSION,
        splits.model_dump(mode="json", by_alias=True),
        encoder.documents.encoding,
        [encoder.max_length, encoder.truncation],
    ]
    return hashlib.blake2b(json.dumps(inputs, sort_keys=True).encode(), digest_size=8).hexdigest()
