"""The cache of models: whole entries, written once."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import BaseFileLock

from finetune_crds.training import Model
from finetune_trainer.models import cache as caching
from finetune_trainer.models.cache import Cache
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ["object store", "bucket/base", [["config.json", 2, "etag"]]]
WEIGHTS = "sub/model.safetensors"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", "models")


class Download:
    """Writes a model, and counts how often."""

    def __init__(self, weights: bytes = b"weights") -> None:
        self.weights, self.count = weights, 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "config.json").write_bytes(b"{}")
        (folder / "sub").mkdir()
        (folder / WEIGHTS).write_bytes(self.weights)


def names(cache: Cache) -> list[str]:
    """The folders beside the entries, and the entries."""
    return sorted(path.name for path in (cache.root / "models").iterdir())


def test_a_recipe_names_the_claim() -> None:
    assert Cache.of(Model(base="org/base")) is None
    model = Model.model_validate({"base": "org/base", "cache": {"claimName": "models"}})
    assert Cache.of(model) == Cache(Path("/var/cache/finetune"), "models")


def test_an_entry_is_written_once(cache: Cache) -> None:
    download = Download()
    assert cache.find(KEY) is None
    first, again = cache.get(KEY, download), cache.get(KEY, download)
    second = cache.get([*KEY, "other"], download)
    assert (first, again, cache.find(KEY)) == (first, first, first)
    assert (download.count, second != first, len(names(cache))) == (2, True, 2)
    assert (first / WEIGHTS).read_bytes() == b"weights"


def cut(entry: Path) -> None:
    (entry / "files" / WEIGHTS).write_bytes(b"weig")


def lose_a_file(entry: Path) -> None:
    (entry / "files/config.json").unlink()


def lose_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def garble_the_manifest(entry: Path) -> None:
    (entry / "manifest.json").write_text('{"files": ')


BREAKAGES = [cut, lose_a_file, lose_the_manifest, garble_the_manifest]


@pytest.mark.parametrize("broken", BREAKAGES, ids=[each.__name__ for each in BREAKAGES])
def test_a_broken_entry_is_written_again(cache: Cache, broken: Callable[[Path], None]) -> None:
    download = Download()
    files = cache.get(KEY, download)
    broken(files.parent)
    assert cache.find(KEY) is None
    assert cache.get(KEY, download) == files
    assert (download.count, (files / WEIGHTS).read_bytes()) == (2, b"weights")


def test_a_file_that_others_put_beside_an_entry_does_not_break_it(cache: Cache) -> None:
    files = cache.get(KEY, Download())
    (files / ".nfs0001").write_bytes(b"open elsewhere")
    assert cache.find(KEY) == files


def test_a_broken_entry_stays_until_there_is_a_whole_one(cache: Cache) -> None:
    """Another pod may still read its other files."""

    def fails(_: Path) -> None:
        raise TrainingError("Away", "the store is away")

    files = cache.get(KEY, Download())
    (files / "config.json").unlink()
    with pytest.raises(TrainingError, match="the store is away"):
        cache.get(KEY, fails)
    assert (files / WEIGHTS).read_bytes() == b"weights"
    cache.get(KEY, Download())
    assert (len(names(cache)), (files / "config.json").exists()) == (1, True)


def test_a_download_that_fails_leaves_nothing(cache: Cache) -> None:
    def fails(folder: Path) -> None:
        (folder / "config.json").write_bytes(b"{}")
        raise TrainingError("Away", "the store is away")

    with pytest.raises(TrainingError, match="the store is away"):
        cache.get(KEY, fails)
    assert names(cache) == []
    assert cache.get(KEY, Download()).is_dir()


def test_what_a_killed_pod_left_is_never_an_entry_and_goes_with_the_next(cache: Cache) -> None:
    entry = cache._entry(KEY)
    leftover = entry.with_name(f".{entry.name}-abc")
    (leftover / "files").mkdir(parents=True)
    (leftover / "files/config.json").write_bytes(b"{")
    assert cache.find(KEY) is None
    cache.get(KEY, Download())
    assert names(cache) == [entry.name]


def test_pods_at_once_download_once(cache: Cache) -> None:
    """The second asks while the first downloads."""
    writing, waiting = threading.Event(), threading.Event()
    download = Download()

    def slow(folder: Path) -> None:
        writing.set()
        assert waiting.wait(30)
        download(folder)

    def first() -> Path:
        return cache.get(KEY, slow)

    def second() -> Path:
        assert writing.wait(30)
        acquire = caching._acquire

        def noted(lock: BaseFileLock) -> bool:
            waiting.set()
            return acquire(lock)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(caching, "_acquire", noted)
            return cache.get(KEY, download)

    with ThreadPoolExecutor(2) as pods:
        folders = [pod.result(timeout=60) for pod in (pods.submit(first), pods.submit(second))]
    assert (folders[0] == folders[1], download.count, len(names(cache))) == (True, 1, 1)


def test_without_locks_the_first_whole_entry_counts(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that has no locks: another pod finishes while this one still downloads."""

    def acquire(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("finetune_trainer.models.cache.FileLock.acquire", acquire)
    faster, slower = Download(b"weights"), Download(b"weights")

    def overtaken(folder: Path) -> None:
        cache.get(KEY, faster)
        slower(folder)

    files = cache.get(KEY, overtaken)
    assert (faster.count, slower.count, cache.find(KEY), len(names(cache))) == (1, 1, files, 1)


PROBLEMS: dict[str, tuple[int, str, type[PodFailure], str]] = {
    "full": (
        errno.ENOSPC,
        "ModelCacheFull",
        TrainingError,
        "the claim models of model.cache is full: enlarge the claim, or delete models in it",
    ),
    "read-only": (
        errno.EROFS,
        "ModelCacheForbidden",
        RecipeRefusedError,
        "the pod cannot write to the claim models of model.cache (Read-only file system): give its user "
        "access, for example with securityContext.fsGroup in the template of spec.pods.all",
    ),
}


@pytest.mark.parametrize(("number", "reason", "kind", "sentence"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_claim_that_cannot_be_written_to_is_named(
    cache: Cache, number: int, reason: str, kind: type[PodFailure], sentence: str
) -> None:
    def fails(folder: Path) -> None:
        names = {errno.EROFS: "Read-only file system", errno.ENOSPC: "No space left on device"}
        raise OSError(number, names[number], str(folder / "config.json"))

    with pytest.raises(kind) as failed:
        cache.get(KEY, fails)
    assert (failed.value.reason, failed.value.message) == (reason, sentence)


def test_an_error_of_the_store_is_not_the_claims(cache: Cache) -> None:
    def forbidden(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Forbidden", "s3://bucket/base/config.json")

    with pytest.raises(PermissionError):
        cache.get(KEY, forbidden)
