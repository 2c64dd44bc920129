"""The reference of an adapter to its base: the address of the base, and a digest of its files.

An adapter has megabytes and its base gigabytes, so a version of an adapter does not contain its base. Instead,
`finetune_base.json` next to the weights of the adapter names the base: its address, the commit on the Hub, and a digest of its files.
A job that starts from the adapter fetches the base from this address, and fails if the base is gone or has changed: on another base,
the output of the adapter would be arbitrary.
"""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from finetune_trainer.pod.exit_status import RecipeRefusedError

_REFERENCE_FILE = "finetune_base.json"
_CONFIG = "config.json"
_SAFE = ".safetensors"
# The ends of the names of files with weights.
WEIGHTS = (_SAFE, ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# The number of files that are read at the same time; SHA-256 takes one core for each.
_MAX_THREADS = 4


@dataclass(frozen=True)
class Origin:
    """The address that a base was fetched from.

    uri: absolute path, s3://bucket/folder, models:/name/version/folder, or a Hub id.
    revision: the commit of a Hub model; None for any other address.
    digest: the digest of the base's files; None if it was not computed.
    """

    uri: str
    revision: str | None = None
    digest: str | None = None


def read_reference(adapter: Path) -> Origin | None:
    """Return the reference of the adapter in a folder; None if an earlier release or another tool wrote the adapter.

    Raises:
        RecipeRefusedError: the content of the reference file is not valid.
    """
    path = adapter / _REFERENCE_FILE
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Origin(stored["uri"], stored.get("revision"), stored.get("digest"))
    except (ValueError, TypeError, KeyError) as error:
        raise RecipeRefusedError(
            f"{_REFERENCE_FILE} of the adapter, which names its base, is not valid: write the adapter again, or start from another model",
            reason="ModelNotLoadable",
        ) from error


def write_reference(base: Origin, adapter: Path) -> None:
    """Write an adapter's reference to its base into the adapter's folder."""
    (adapter / _REFERENCE_FILE).write_text(json.dumps(asdict(base), indent=2) + "\n", encoding="utf-8")


def is_weights(name: str) -> bool:
    """Return whether a file of a model contains weights."""
    return PurePosixPath(name).suffix in WEIGHTS


def compute_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a model's weights and config, as `sha256:<hex>`.

    The weights of a Hub model are not read: the Hub's client names them by their digests. Reading any other file costs little: a
    download is still in the memory of the machine, and a file on a volume stays in memory until the model is loaded.
    """
    files = _list_files(folder)
    with ThreadPoolExecutor(_MAX_THREADS) as readers:
        contents = list(readers.map(_hash_file, files))
    entries = [[path.name, content] for path, content in zip(files, contents, strict=True)]
    return f"sha256:{hashlib.sha256(json.dumps(entries).encode()).hexdigest()}"


def _list_files(folder: Path) -> list[Path]:
    """Return the config and the weights of a model, by name: only safetensors if there are any, since these are loaded."""
    present = sorted(path for path in folder.iterdir() if path.is_file())
    safe = [path for path in present if path.suffix == _SAFE]
    weights = safe or [path for path in present if is_weights(path.name)]
    return [path for path in present if path.name == _CONFIG or path in weights]


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    content = path.resolve()
    # The Hub's client names the blob of a large file by its SHA-256, and any other blob by its Git object id.
    if content.parent.name == "blobs" and _SHA256.fullmatch(content.name):
        return content.name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
