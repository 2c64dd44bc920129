"""Makes the wheel that a preparation on Databricks runs: `python trainer_image/wheel.py FOLDER`.

It holds the API and the trainer's preparation in one, since a run gets one file. Needs nothing but Python. Equal sources make
equal bytes, and the version names them: a cluster installs another content as another version.
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
# Of the trainer, all but the training.
_PACKAGES = ((HERE.parent / "crds", "finetune_crds"), (HERE, "finetune_trainer"))
_LEFT_OUT = ("finetune_trainer/train/",)
# What Databricks Runtime has, in versions that belong together, and what only a preparation in a pod needs.
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
    # NB: a plus sign, which a local version begins with, is not safe in every path of a workspace.
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
    """The files of the packages by their names in the wheel, in one order."""
    found = [
        (path.relative_to(root).as_posix(), path)
        for root, package in _PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    return sorted(item for item in found if not item[0].startswith(_LEFT_OUT))


def _project(folder: Path) -> dict[str, object]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def _requirements() -> list[str]:
    """What the preparation needs besides Databricks Runtime."""
    trainer, crds = _project(HERE), _project(HERE.parent / "crds")
    extras = trainer["optional-dependencies"]
    assert isinstance(extras, dict)  # noqa: S101 - as the standard of pyproject.toml has it
    listed = [*_listed(crds["dependencies"]), *_listed(trainer["dependencies"]), *_listed(extras["prep"])]
    left_out = (*_PROVIDED, "finetune-crds")
    # errors.py names py4j's exceptions also where there is no JVM.
    return sorted({item for item in listed if _distribution(item) not in left_out} | {"py4j>=0.10.9"})


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
