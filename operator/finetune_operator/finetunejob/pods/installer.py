"""Installs the packages of `trainer.dependencies`, and runs a command that finds them. The pods run this file unchanged.

It runs with the Python of any image, 3.8 or later, and uses only the standard library. Packages of the image are treated as installed.
Missing packages are installed into a virtual environment on a volume. They take precedence over the image's packages.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

INSTALL, RUN = "install", "run"
FOLDER = Path(os.environ.get("FINETUNE_DEPENDENCIES_PATH", "/var/run/finetune/dependencies"))
TERMINATION = Path(os.environ.get("FINETUNE_TERMINATION_PATH", "/dev/termination-log"))
REASON = "DependenciesFailed"
# Exit codes. NEVER: no other attempt can succeed. UNAVAILABLE: a server did not answer, or refused the login, which can be corrected
# in its Secret; the attempt does not count as a restart. AGAIN: another attempt may succeed.
NEVER, UNAVAILABLE, AGAIN = 64, 69, 1
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Settings of pip that would install the packages elsewhere. They are removed from its environment.
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")
# Patterns of git's messages about a server that may answer later. NB: the trainer's checkout has a copy, since it cannot import this file.
_AWAY = (
    r"Could not resolve|Failed (?:to )?connect to|Empty reply from server|Connection (?:timed out|reset|refused)|"
    r"Operation too slow|RPC failed; curl|early EOF|[Rr]ecv error|non-properly terminated|unexpected disconnect|"
    r"SSL_ERROR_SYSCALL|unexpected eof|[Ee]rror in the pull function|was not closed cleanly|SSL connection timeout|"
    r"Broken pipe|Resolving timed out|CONNECT aborted|"
    r"error: (?:408|429|5\d\d)\b|HTTP (?:429|5\d\d)\b|(?:response|HTTP code) 5\d\d\b"
)
# The time before each line of pip's log.
_TIME = re.compile(r"^\d{4}-\S+ ")
# A line at which a build starts. NB: pip also runs git and itself; these commands are not builds.
_BUILD_BEGINS = re.compile(r"\s*Running command (?!git |.*install(?:ing)? \w+ dependencies)")
# The line at which a build has failed.
_BUILD_FAILED = re.compile(r"ERROR: .+ exited with -?\d+$")
# A line about a package that pip found.
_FOUND = re.compile(r"\s*(?:Collecting|Downloading|Processing) ")
# Lines after which pip tries again, or tries another index.
_NOT_THE_END = re.compile(
    r"Retrying \(Retry\(|Credentials not correct for |Could not fetch URL .*: (?:404|410) Client Error"
)
# An error that pip did not expect: a traceback follows.
_UNEXPECTED = "ERROR: Exception:"
# Removed from quoted lines: the prefix of an error, and the login in an address.
_PREFIX = re.compile("^(?:ERROR: |\N{MULTIPLICATION SIGN} |╰─> )")
_PASSWORD = re.compile(r"//[^/@\s]*@")
_MAX_MESSAGE_CHARS = 400
_UNBUILT = f"a package has no wheel for Python {_VERSION} and cannot be built in this image: require another version of the package"

# The meaning of a line in the output: a pattern of the line; the exit code; what to do.
_NO_SPACE = (
    r"No space left on device",
    AGAIN,
    "the node has no disk space left for the packages: use a node with more ephemeral storage",
)
# NB: the container that installs copies the limits of the container trainer, which templates call main.
_KILLED = (
    r"Killed signal terminated program|unable to execute command: Killed|signal: 9, SIGKILL|exited with -9$",
    AGAIN,
    "a build was killed: raise the memory limit of the container main in spec.pods.train.template",
)
# The meanings for the output of a build. Such output says nothing about an index, so _MEANINGS does not apply to it.
_MEANINGS_OF_BUILDS = (
    _NO_SPACE,
    _KILLED,
    (
        r"URLError: <urlopen error |HTTPError: HTTP Error (?:429|5\d\d)|HTTPS?ConnectionPool\(|Could not resolve host",
        AGAIN,
        "a build could not download what it needs: allow the pods to reach the server, or require a version that has a wheel",
    ),
)
# The meanings for the output of pip or git. The first pattern that matches applies.
# NB: if an index does not answer, pip ends with "No matching distribution", so the patterns about servers come before that pattern.
_MEANINGS = (
    (
        r"No module named pip$",
        NEVER,
        "the image has no pip: use an image with pip, or one that already contains the packages",
    ),
    (
        r"Cannot find command 'git'",
        NEVER,
        "the image has no git, which a requirement needs: use an image with git, or require a package from an index",
    ),
    _NO_SPACE,
    _KILLED,
    (
        r"certificate verif(?:y|ication) failed|SSL certificate problem",
        AGAIN,
        "the image does not trust the certificate of a server: mount the certificate of its authority, and set PIP_CERT to the file, or "
        "GIT_SSL_CAINFO for git",
    ),
    (
        rf"HTTPS?ConnectionPool\(|ReadTimeoutError|HTTP error (?:429|5\d\d)|Could not fetch URL \S+: (?!40[13] Client Error)|"
        r"while fetching |Unable to fetch |Download failed after |ProtocolError: |"
        rf"(?:fatal|error|ssh): .*(?:{_AWAY})|Could not resolve host",
        UNAVAILABLE,
        "a server does not respond: check PIP_INDEX_URL and the addresses in the requirements, and whether the pods can reach them",
    ),
    # NB: pip shows a login as me:****@. Without a login in the address, a refusal does not mean wrong credentials: some indexes also
    # refuse packages that they do not have.
    (
        r"https?://[^/@\s]+@\S+: 40[13] Client Error|HTTP error 401 |fatal: Authentication failed",
        UNAVAILABLE,
        "a server rejects the credentials: check PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and the credentials of git",
    ),
    (
        r"40[13] Client Error|HTTP error 403 |fatal: .*error: 40[13]|could not read (?:Username|Password)|fatal: repository .* not found|"
        r"does not appear to be a git repository",
        AGAIN,
        "a package or repository does not exist, or requires credentials: correct the requirement, or configure credentials for pip or git",
    ),
    # Another attempt may succeed, since a mirror may be behind.
    (
        r"HTTP error (?:404|410) while getting \S+(?:\.metadata| \(from )|Wheel \S+ located at .* is invalid|DO NOT MATCH THE HASHES",
        AGAIN,
        "a file of a package is missing, truncated, or does not match its hash: wait until the index is repaired, or require another "
        "version",
    ),
    (
        r"No matching distribution found for ",
        NEVER,
        f"the package index has no matching version for Python {_VERSION}: correct the requirement, or set PIP_INDEX_URL or "
        "PIP_EXTRA_INDEX_URL to another index",
    ),
    (
        r"is not a supported wheel on this platform|requires a different Python",
        NEVER,
        (
            f"a package does not support Python {_VERSION} or the platform of the image: require another version of the "
            "package, or use another image"
        ),
    ),
    (
        r"Cannot install .* because |ResolutionImpossible",
        NEVER,
        "the requirements conflict with each other, or with the torch version of the image: correct the requirements",
    ),
    (
        r"HTTP error (?:404|410) |OSError: \[Errno 2\] No such file or directory|does not appear to be a Python project|"
        r"pathspec .* did not match|not our ref |unadvertised object|couldn't find remote ref|reference is not a tree",
        NEVER,
        "the address of a requirement has no Python package, or the requested branch, tag or commit does not exist there: correct the requirement",
    ),
    (
        r"fatal: unable to access|git (?:clone|fetch|checkout|submodule) .* did not run successfully|Failed to build .* when git ",
        AGAIN,
        "the repository of a requirement cannot be fetched: correct the requirement",
    ),
    (
        r"ERROR: .+ exited with -?\d+$|Failed to build |Failed building wheel |subprocess-exited-with-error",
        NEVER,
        _UNBUILT,
    ),
)


class Failure(Exception):  # noqa: N818 - an outcome of the pod
    """The reason why the packages cannot be installed, in one sentence, and the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def install(requirements: list[str], folder: Path = FOLDER) -> None:
    """Create the virtual environment, and install into it the requirements that the image lacks.

    Raises:
        Failure: the packages cannot be installed.
    """
    code, _ = _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    if code:
        raise Failure(
            NEVER,
            "the Python of the image cannot create a virtual environment: use an image whose Python has the module venv",
        )
    # NB: image.pth instead of --system-site-packages, which shows no packages if the image's Python is itself in a virtual environment.
    paths = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
    (_packages(folder) / "image.pth").write_text(lines, encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text(_torch_constraint(requirements), encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    log = folder / "pip.log"
    options = ["--no-cache-dir", "--constraint", str(constraints)]
    # NB: PIP_LOG is passed as a variable, so that the pip that installs the dependencies of a build writes to it too.
    code, output = _run([*pip, "install", *options, "--", *requirements], PIP_LOG=str(log))
    if code < 0:
        why = f"signal {-code} ended pip: the container may need a higher memory limit"
        raise Failure(AGAIN, f"{why} ({_shorten(_find_error_line(output.splitlines()))})")
    if code:
        # NB: if pip has a log, it writes the output of a build only there, and prints "See above".
        last_lines = find_last_lines(log.read_text("utf-8", "replace") if log.is_file() else output)
        build_output = find_words_of_build(last_lines)
        if build_output:
            print("A build failed with this output:", *build_output, sep="\n", flush=True)
        raise explain_failure(last_lines, output.splitlines())


def _torch_constraint(requirements: list[str]) -> str:
    """A constraint that keeps the torch of the image, which fits the driver; empty if the image has no torch, or a requirement names torch."""
    names = {re.split(r"[^A-Za-z0-9._-]", item.strip(), maxsplit=1)[0].lower() for item in requirements}
    try:
        return "" if "torch" in names else f"torch=={metadata.version('torch')}\n"
    except metadata.PackageNotFoundError:
        return ""


def find_last_lines(log: str) -> list[str]:
    """Return the lines of pip's log with the reason of the failure: the lines after the last package that pip found, without retries."""
    lines = [line for entry in log.splitlines() if (line := _TIME.sub("", entry).rstrip())]
    found_packages = [number for number, line in enumerate(lines) if _FOUND.match(line)]
    start = found_packages[-1] + 1 if found_packages else 0
    return [line for line in lines[start:] if not _NOT_THE_END.search(line)]


def explain_failure(last_lines: Sequence[str], output: Sequence[str] = ()) -> Failure:
    """The failure that the last lines of pip's log describe; if no pattern matches, the last error in pip's output."""
    build_output = find_words_of_build(last_lines)
    other_lines = [line for line in last_lines if line not in build_output]
    for meanings, lines in ((_MEANINGS_OF_BUILDS, build_output), (_MEANINGS, other_lines)):
        for pattern, code, advice in meanings:
            for line in lines:
                if re.search(pattern, line):
                    # A line about a failed build names no cause; the last line of the build's output does.
                    quoted = build_output[-1] if build_output and advice is _UNBUILT else line
                    return Failure(code, f"{advice} ({_shorten(quoted)})")
    return Failure(AGAIN, f"pip failed: {_shorten(_find_error_line(output or last_lines))}")


def find_words_of_build(lines: Sequence[str]) -> list[str]:
    """The output of the first build that failed; empty if no build failed."""
    end = next((number for number, line in enumerate(lines) if _BUILD_FAILED.search(line)), 0)
    begins = [number for number, line in enumerate(lines[:end]) if _BUILD_BEGINS.match(line)]
    return [*lines[begins[-1] + 1 : end]] if begins else []


def _find_error_line(output: Sequence[str]) -> str:
    """Return the line with pip's reason for the failure: its last error, the last line of a traceback, or else the last line."""
    lines = [line.strip() for line in output if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "\N{MULTIPLICATION SIGN} "))]
    if errors and errors[-1] != _UNEXPECTED:
        return errors[-1]
    return lines[-1] if lines else "it wrote no output"


def _shorten(text: str) -> str:
    return _PASSWORD.sub("//", _PREFIX.sub("", text.strip()))[:_MAX_MESSAGE_CHARS]


def run(command: list[str], folder: Path = FOLDER) -> None:
    """Replace this process with the command, with the environment's programs first on PATH and its packages on PYTHONPATH.

    PYTHONPATH is for programs of the image, such as torchrun, which run with the image's Python, not the environment's.
    """
    _put_first("PATH", folder / "bin", os.defpath)
    _put_first("PYTHONPATH", _packages(folder), "")
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(
            f"the command {command[0]} cannot be started ({error.strerror}): correct trainer.command, or use an image that has the program"
        )


def _put_first(variable: str, path: Path, default: str) -> None:
    after = os.environ.get(variable) or default
    os.environ[variable] = f"{path}{os.pathsep}{after}" if after else str(path)


def _packages(folder: Path) -> Path:
    return folder / "lib" / f"python{_VERSION}" / "site-packages"


def _run(command: list[str], **more: str) -> tuple[int, str]:
    """Run a program with additional variables, print its output, and return its exit code and output."""
    environment = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environment.update(more)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        lines = []
        for line in process.stdout or ():
            lines.append(line.decode("utf-8", "replace"))
            print(lines[-1], end="", flush=True)
    return process.returncode, "".join(lines)


def main() -> None:
    """Run a command if the first argument is RUN; otherwise install. The other arguments are the command, or the requirements."""
    mode, *arguments = sys.argv[1:]
    if mode == RUN:
        run(arguments)  # does not return
    # NB: PID 1 of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        install(arguments)
    except Failure as failure:
        sentence = f"trainer.dependencies cannot be installed: {failure}"
        print(sentence, file=sys.stderr)
        if TERMINATION.parent.is_dir():
            error = {"reason": REASON, "message": sentence}
            TERMINATION.write_text(json.dumps({"error": error}), encoding="utf-8")
        sys.exit(failure.code)


if __name__ == "__main__":
    main()
