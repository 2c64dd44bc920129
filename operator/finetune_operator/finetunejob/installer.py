"""Installs the packages of `trainer.dependencies`, and runs a command that finds them. This file runs in the pods, as it is.

It runs with the Python of any image, from 3.8 on, and uses nothing but the standard library. What the image has counts as
installed; what it lacks goes into a virtual environment on a volume, which comes before the image's packages.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

INSTALL, RUN = "install", "run"
FOLDER = Path(os.environ.get("FINETUNE_DEPENDENCIES_PATH", "/var/run/finetune/dependencies"))
TERMINATION = Path(os.environ.get("FINETUNE_TERMINATION_PATH", "/dev/termination-log"))
REASON = "DependenciesFailed"
# Exit codes: no other attempt can succeed; another one may.
NEVER, AGAIN = 64, 1
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Settings of pip that would send the packages elsewhere.
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")
_PASSWORD = re.compile(r"//[^/@\s]*@")
_LONGEST = 400
# What pip says, in the order in which it counts, and what that means: the exit code and a sentence with what was found.
# NB: where the index does not answer, pip also says "No matching distribution".
_MEANINGS = (
    (
        r"No module named pip$",
        NEVER,
        "the image has no pip: use an image that has it, or one that has the packages already",
    ),
    (
        r"(?:401|403) (?:Client )?Error.*|HTTP error 40[13].*|Credentials not correct.*",
        AGAIN,
        "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL ({})",
    ),
    (
        r"connection broken by .*|Max retries exceeded.*|Could not fetch URL .*|HTTP error (?:429|5\d\d).*",
        AGAIN,
        "the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it ({})",
    ),
    (
        r"(?<=No matching distribution found for )[^\n(]+",
        NEVER,
        f"the package index has no {{}} for Python {_VERSION}: correct the requirement, or name another index in "
        "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL",
    ),
    (
        r"Cannot install .*|ResolutionImpossible.*",
        NEVER,
        "the requirements contradict each other, or ask for another torch than the image has: correct them ({})",
    ),
    (r"No space left on device", AGAIN, "the node has no space left for the packages"),
    (
        r"Could not resolve host.*|(?<=fatal: )unable to access .*|git (?:clone|fetch) .* did not run successfully",
        AGAIN,
        "the server of a requirement does not answer: check its address, and that the pods may reach it ({})",
    ),
    (
        r"Failed to build .*|Failed building wheel .*|subprocess-exited-with-error",
        NEVER,
        f"a package has no wheel for Python {_VERSION} and cannot be built in this image: require another version of it ({{}})",
    ),
)


class Failure(Exception):  # noqa: N818 - an outcome of the pod
    """Why the packages cannot be installed, in one sentence, and the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def install(requirements: list[str], folder: Path = FOLDER) -> None:
    """Make the virtual environment, and install into it what the requirements ask for and the image lacks.

    Raises:
        Failure: that is not possible.
    """
    if _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])[0]:
        raise Failure(
            NEVER, "the Python of the image cannot make a virtual environment: use one with the module venv"
        )
    # NB: --system-site-packages shows no packages of an image whose Python is in a virtual environment itself.
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (_packages(folder) / "image.pth").write_text(lines, encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text(_torch(requirements), encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    code, output = _run(
        [*pip, "install", "--no-cache-dir", "--constraint", str(constraints), "--", *requirements]
    )
    if code:
        raise explained(output)


def _torch(requirements: list[str]) -> str:
    """A constraint: the image's torch fits the driver and what was built for it, so only who names torch gets another."""
    named = {re.split(r"[^A-Za-z0-9._-]", item.strip(), maxsplit=1)[0].lower() for item in requirements}
    try:
        return "" if "torch" in named else f"torch=={metadata.version('torch')}\n"
    except metadata.PackageNotFoundError:
        return ""


def explained(output: str) -> Failure:
    """What pip's output amounts to."""
    for pattern, code, sentence in _MEANINGS:
        found = re.search(pattern, output, re.MULTILINE)
        if found:
            return Failure(code, sentence.format(_short(found[0])))
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.split("\n")
    return Failure(AGAIN, f"pip failed: {_short(lines[-1])}")


def _short(text: str) -> str:
    return _PASSWORD.sub("//", text.strip())[:_LONGEST]


def run(command: list[str], folder: Path = FOLDER) -> None:
    """Become the command, with the environment's programs first on PATH and its packages on PYTHONPATH.

    PYTHONPATH is for programs of the image, such as torchrun: their Python is not that of the environment.
    """
    _put_first("PATH", folder / "bin", os.defpath)
    _put_first("PYTHONPATH", _packages(folder), "")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


def _put_first(variable: str, path: Path, default: str) -> None:
    after = os.environ.get(variable) or default
    os.environ[variable] = f"{path}{os.pathsep}{after}" if after else str(path)


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python{_VERSION}" / "site-packages"


def _run(command: list[str]) -> tuple[int, str]:
    """Run a program; its exit code, and its output, which is shown too."""
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line.decode("utf-8", "replace"))
            print(lines[-1], end="", flush=True)
    return process.returncode, "".join(lines)


def main() -> None:
    """Install, or run a command, as the first argument says."""
    what, *rest = sys.argv[1:]
    if what == RUN:
        run(rest)
    # NB: PID 1 of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        install(rest)
    except Failure as failure:
        sentence = f"trainer.dependencies cannot be installed: {failure}"
        print(sentence, file=sys.stderr)
        if TERMINATION.parent.is_dir():
            error = {"reason": REASON, "message": sentence}
            TERMINATION.write_text(json.dumps({"error": error}), encoding="utf-8")
        sys.exit(failure.code)


if __name__ == "__main__":
    main()
