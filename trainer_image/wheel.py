"""Builds the wheel that a preparation on Databricks runs: `python trainer_image/wheel.py FOLDER`.

The wheel contains the API and the trainer's preparation, because a run gets one file. The build needs only Python. Equal sources
give equal bytes, and the version contains a digest of them: a cluster installs changed content as another version.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NAME = "finetune-prep"
ENTRY = "finetune-prep-databricks"
# The trainer without its training.
_PACKAGES = ((HERE.parent / "crds", "finetune_crds"), (HERE, "finetune_trainer"))
_LEFT_OUT = ("finetune_trainer/train/",)
# Requirements to omit: Databricks Runtime has them in versions that fit each other, or only a pod needs them.
_PROVIDED = (
    "pyspark",
    "delta-spark",
    "pandas",
    "pyarrow",
    "boto3",
    "databricks-sdk",
    "s3fs",
    "gcsfs",
    "adlfs",
    "datasets",
    "mlflow-skinny",
    "fsspec",
    "matplotlib",
    "tqdm",
)
_TIME = (2020, 1, 1, 0, 0, 0)


def build(folder: Path) -> Path:
    """Write the wheel into a folder, and return its path."""
    files = {name: path.read_bytes() for name, path in _sources()}
    metadata = _metadata("0")
    digest = hashlib.sha256()
    for name, content in {**files, **metadata}.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    # NB: not a local version: its plus sign is not safe in every workspace path.
    version = f"{_project(HERE)['version']}.post{int(digest.hexdigest()[:8], 16)}"
    place = f"{NAME.replace('-', '_')}-{version}"
    files |= {f"{place}.dist-info/{name}": content for name, content in _metadata(version).items()}
    record = f"{place}.dist-info/RECORD"
    lines = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{place}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def _sources() -> list[tuple[str, Path]]:
    """Return the name in the wheel and the path of each file of the packages, sorted."""
    files = [
        (path.relative_to(root).as_posix(), path)
        for root, package in _PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    return sorted(item for item in files if not item[0].startswith(_LEFT_OUT))


def _project(folder: Path) -> dict[str, object]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def _requirements() -> list[str]:
    """Return the requirements of the preparation that Databricks Runtime does not have."""
    trainer, crds = _project(HERE), _project(HERE.parent / "crds")
    extras = trainer["optional-dependencies"]
    assert isinstance(extras, dict)  # noqa: S101 - pyproject.toml defines a table
    listed = [*_listed(crds["dependencies"]), *_listed(trainer["dependencies"]), *_listed(extras["prep"])]
    excluded = (*_PROVIDED, "finetune-crds")
    # errors.py refers to py4j's exceptions even without a JVM.
    return sorted({item for item in listed if _distribution(item) not in excluded} | {"py4j>=0.10.9"})


def _listed(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _metadata(version: str) -> dict[str, bytes]:
    python = _project(HERE)["requires-python"]
    about = [
        "Metadata-Version: 2.1",
        f"Name: {NAME}",
        f"Version: {version}",
        f"Requires-Python: {python}",
        *(f"Requires-Dist: {item}" for item in _requirements()),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: finetune", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    entry = ["[console_scripts]", f"{ENTRY} = finetune_trainer.prep.databricks:main"]
    named = {"METADATA": about, "WHEEL": wheel, "entry_points.txt": entry}
    return {name: "\n".join([*lines, ""]).encode() for name, lines in named.items()}


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
