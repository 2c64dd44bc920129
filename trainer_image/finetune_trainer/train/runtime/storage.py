"""Folders on a volume or in an object store."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlparse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsspec import AbstractFileSystem

# Clients of object stores raise errors that are not OSError.
_CLIENTS = frozenset({"aiobotocore", "aiohttp", "botocore", "s3fs"})


def filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URI, and the path in it.

    Object stores use AWS_ENDPOINT_URL, AWS_REGION and the AWS credentials of the environment.
    """
    import fsspec

    # NB: s3fs caches listings, and other ranks, pods and attempts write here too.
    options = {"use_listings_cache": False, "skip_instance_cache": True} if is_object_store(uri) else {}
    found, path = fsspec.url_to_fs(uri, **options)
    return found, path


def is_object_store(uri: str) -> bool:
    """Whether a URI names an object store rather than a path."""
    return urlparse(uri).scheme in ("s3", "s3a")


def delta_options(uri: str) -> dict[str, str]:
    """Storage options with which deltalake reads a table of the same object store."""
    if not is_object_store(uri):
        return {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {}


def failure(error: BaseException) -> str | None:
    """Return the message of a storage error (no space, no permission, no connection); None for any other error.

    Causes count: torch's archives raise an error of their own when a file cannot be written.
    """
    for found in _chain(error):
        if isinstance(found, OSError):
            return found.strerror or _first_line(found)
        if type(found).__module__.split(".")[0] in _CLIENTS:
            return _first_line(found)
    return None


@contextmanager
def tolerated(consequence: str) -> Iterator[None]:
    """Print a storage error inside, after what follows from it, and go on; any other error is raised."""
    try:
        yield
    except Exception as error:
        reason = failure(error)
        if reason is None:
            raise
        print(f"{consequence}: {reason}", flush=True)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
