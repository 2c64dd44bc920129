"""Small packages, made without a build."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    python: str = "",
    program: bool = False,
) -> None:
    """Put a wheel into a folder, of one module that has its version, and a program of the same name where wanted.

    Args:
        python: the versions of Python that it is for; empty for all.
    """
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Python: {python}"] if python else []
    files = {
        f"{name}.py": f"VERSION = {version!r}\ndef main():\n    print(VERSION)\n",
        f"{info}/METADATA": "\n".join([*metadata, *(f"Requires-Dist: {item}" for item in requires)]) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n"} if program else {}),
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


def sdist(name: str, version: str, files: Mapping[str, str]) -> bytes:
    """A source distribution with files, which a build is to make a wheel of."""
    content = io.BytesIO()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path, text in {"PKG-INFO": metadata, **files}.items():
            item = tarfile.TarInfo(f"{name}-{version}/{path}")
            item.size = len(text.encode())
            archive.addfile(item, io.BytesIO(text.encode()))
    return content.getvalue()
