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
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

INSTALL, RUN = "install", "run"
FOLDER = Path(os.environ.get("FINETUNE_DEPENDENCIES_PATH", "/var/run/finetune/dependencies"))
TERMINATION = Path(os.environ.get("FINETUNE_TERMINATION_PATH", "/dev/termination-log"))
REASON = "DependenciesFailed"
# Exit codes: no other attempt can succeed; a server did not answer, or refused the login; another attempt may succeed.
NEVER, UNAVAILABLE, AGAIN = 64, 69, 1
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
# Settings of pip that would send the packages elsewhere.
_ELSEWHERE = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER")
# In pip's log: a page that an index did not give, other than one that it does not have; and that an index answered.
_NO_PAGE = re.compile(r"(Could not fetch URL (?!.*: (?:404|410) Client Error).*?)(?: - skipping)?$")
_ANSWERED = re.compile(r"\s(?:Collecting|Downloading|Processing) ")
# In pip's log: the time before each line, a command that begins, and one that failed.
_TIME = re.compile(r"^\d{4}-\S+ ")
_BEGINS = re.compile(r"\s*Running command (.+)$")
_FAILED = re.compile(r"\s*ERROR: (?:\[present-rich\] )?(.+) exited with -?\d+$")
# The command that is pip itself: it installs what a build needs.
_NEEDED = re.compile(r"install(?:ing)? \w+ dependencies")
# What pip shows before it asks again, and of pages that another index may have: it tells of the end in other words or in the log.
_NOT_THE_END = re.compile(r"Retrying \(Retry\(|Could not fetch URL |Credentials not correct for ")
# git's words for a server that may answer later. NB: the trainer's checkout has the same, and can import nothing of this file.
_AWAY = (
    r"Could not resolve|Failed (?:to )?connect to|Empty reply from server|Connection (?:timed out|reset|refused)|"
    r"Operation too slow|RPC failed; curl|early EOF|[Rr]ecv error|non-properly terminated|unexpected disconnect|"
    r"SSL_ERROR_SYSCALL|unexpected eof|[Ee]rror in the pull function|was not closed cleanly|SSL connection timeout|"
    r"Broken pipe|Resolving timed out|CONNECT aborted|"
    r"error: (?:408|429|5\d\d)\b|HTTP (?:429|5\d\d)\b|(?:response|HTTP code) 5\d\d\b"
)
# An error that pip did not expect: a traceback follows.
_UNEXPECTED = "ERROR: Exception:"
_REFUSED = "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL ({})"
_PASSWORD = re.compile(r"//[^/@\s]*@")
_MAX_MESSAGE_CHARS = 400


class _Meaning(NamedTuple):
    """What pip says, and what that means."""

    pattern: str
    code: int
    sentence: str  # with what was found in its braces
    of_requirement: bool = (
        False  # to be said of an address that a requirement names, not of what an index lists
    )
    of_build: bool = False  # a build may say it too


# In the order in which they count.
# NB: where an index refuses a page or does not answer, pip says "No matching distribution", and why in its log alone.
_MEANINGS = (
    _Meaning(
        r"No module named pip$",
        NEVER,
        "the image has no pip: use an image that has it, or one that has the packages already",
    ),
    _Meaning(
        r"Cannot find command 'git'",
        NEVER,
        "the image has no git, which a requirement needs: use an image that has it, or name the package of an index",
    ),
    _Meaning(
        r"certificate verif(?:y|ication) failed.*|SSL certificate problem.*",
        AGAIN,
        "a server shows a certificate that the image does not trust: mount that of its authority, and name the file in PIP_CERT, "
        "and in GIT_SSL_CAINFO for git ({})",
    ),
    _Meaning(
        r"HTTP error (?:404|410) while getting (\S+)$",
        NEVER,
        "nothing is at the address of a requirement: correct it ({})",
        of_requirement=True,
    ),
    _Meaning(
        r"HTTP error 40[13] while getting (\S+)$",
        AGAIN,
        "the address of a requirement is not there, or needs a login: correct it, or name the package of an index ({})",
        of_requirement=True,
    ),
    _Meaning(
        r"HTTPS?ConnectionPool\(.*Max retries exceeded.*|ReadTimeoutError.*|HTTP error (?:429|5\d\d) while getting \S+$|"
        r"(?:Failed to connect to|Failed to establish a secure connection to) .* while fetching .*|Unable to fetch .*|"
        r"(Download failed after .*)\n.*URL: .*",
        UNAVAILABLE,
        "the server of a requirement does not answer: check its address, and that the pods may reach it ({})",
        of_requirement=True,
    ),
    # A mirror may be behind.
    _Meaning(
        r"HTTP error (?:404|410) while getting (\S+).*",
        AGAIN,
        "the package index lists a file that it does not have: it may have it later, or require another version ({})",
    ),
    _Meaning(
        r"Could not fetch URL (?!\S+: 40[13] Client Error).*|Max retries exceeded.*|HTTP error (?:429|5\d\d).*|ReadTimeoutError.*|"
        r"Download failed after .*|(?:Failed to connect to|Failed to establish a secure connection to) .* while fetching .*|Unable to fetch .*",
        UNAVAILABLE,
        "the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it ({})",
    ),
    # NB: not a line of the traceback before it.
    _Meaning(
        r"^\S*ProtocolError: .*Connection broken: .*",
        UNAVAILABLE,
        "a server broke off a download: check PIP_INDEX_URL and the addresses of requirements, and that the pods may reach them ({})",
    ),
    _Meaning(
        r"Wheel (\S+) located at .* is invalid",
        AGAIN,
        "a wheel is damaged or was cut off: put a whole one in its place ({})",
    ),
    # NB: pip shows a login as me:****@, and some indexes without one also refuse what they do not have.
    _Meaning(
        r"Could not fetch URL https?://[^/@\s]+@\S+: (40[13] Client Error.*)|HTTP error 40[13].*",
        UNAVAILABLE,
        _REFUSED,
    ),
    _Meaning(
        r"Could not fetch URL (\S+: 40[13] Client Error.*)",
        AGAIN,
        "a package index without a login refuses a page, which it may also do for what it does not have: correct the requirement, "
        "or put a login into PIP_INDEX_URL or PIP_EXTRA_INDEX_URL ({})",
    ),
    _Meaning(r"(?:401|403) (?:Client )?Error.*", UNAVAILABLE, _REFUSED),
    _Meaning(
        r"(?<=No matching distribution found for )[^\n(]+",
        NEVER,
        f"the package index has no {{}} for Python {_VERSION}: correct the requirement, or name another index in "
        "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL",
    ),
    _Meaning(
        r"Cannot install .* because .*|ResolutionImpossible.*",
        NEVER,
        "the requirements contradict each other, or ask for another torch than the image has: correct them ({})",
    ),
    _Meaning(
        r"(\S+) is not a supported wheel on this platform",
        NEVER,
        f"a wheel is not for Python {_VERSION} on the platform of the image: name one that is ({{}})",
    ),
    _Meaning(
        r"Package .* requires a different Python.*",
        NEVER,
        "a package is not for the Python of the image: require another version of it, or use another image ({})",
    ),
    _Meaning(
        r"ERROR: Could not install packages due to an OSError: \[Errno 2\] No such file or directory: (.*)",
        NEVER,
        "a file of a requirement is not in the pod: correct its address, or mount it ({})",
    ),
    _Meaning(
        r"(?<=ERROR: ).* does not appear to be a Python project.*",
        NEVER,
        "what is at the address of a requirement is no package: correct it ({})",
    ),
    # NB: a digest of the index is of a package alone, and that of a part of the file differs too.
    _Meaning(
        r"DO NOT MATCH THE HASHES[^\n]*\n +([^\n]+ ?@ .*)",
        NEVER,
        "what is at the address of a requirement has another digest than the requirement: correct it ({})",
    ),
    _Meaning(r"No space left on device", AGAIN, "the node has no space left for the packages", of_build=True),
    _Meaning(
        r"pathspec .* did not match.*|not our ref .*|unadvertised object.*|couldn't find remote ref.*|reference is not a tree.*",
        NEVER,
        "the repository of a requirement has no such branch, tag or commit: correct the requirement ({})",
    ),
    _Meaning(
        r"(?<=fatal: )Authentication failed.*",
        UNAVAILABLE,
        "the server of a requirement refuses the login of git: correct it ({})",
    ),
    _Meaning(
        r"(?<=fatal: )(?:repository .* not found|could not read (?:Username|Password).*|.* does not appear to be a git repository|"
        r"unable to access .* error: 40[13])",
        AGAIN,
        "the repository of a requirement does not exist, or needs a login that git does not have: correct its address, or "
        "name the package of an index ({})",
    ),
    _Meaning(
        rf"(?:fatal|error|ssh): (.*(?:{_AWAY}).*)|(Could not resolve host.*)",
        UNAVAILABLE,
        "the server of a requirement does not answer: check its address, and that the pods may reach it ({})",
    ),
    _Meaning(
        r"(?<=fatal: )unable to access .*|git (?:clone|fetch|checkout|submodule) .* did not run successfully|"
        r"Failed to build .* when git .*",
        AGAIN,
        "the repository of a requirement cannot be fetched: correct the requirement ({})",
    ),
    # NB: the container that installs has the limits of the container trainer.
    _Meaning(
        r"\S.*(?:Killed signal terminated program|unable to execute command: Killed|signal: 9, SIGKILL).*|exit code: -9$",
        AGAIN,
        "a build was killed: raise the memory limit of the container trainer ({})",
        of_build=True,
    ),
    _Meaning(
        r"\S.*(?:URLError: <urlopen error |HTTPError: HTTP Error (?:429|5\d\d)).*",
        AGAIN,
        "a build could not download what it needs: let the pods reach it, or require a version that has a wheel ({})",
        of_build=True,
    ),
)
# What pip says of a build that fails, where that says nothing of the above.
_UNBUILT = re.compile(r"Failed to build .*|Failed building wheel .*|subprocess-exited-with-error")


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
    constraints.write_text(_torch_constraint(requirements), encoding="utf-8")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    log = folder / "pip.log"
    options = ["--no-cache-dir", "--constraint", str(constraints)]
    # NB: a variable, so that the pip which installs what a build needs writes to it too.
    code, output = _run([*pip, "install", *options, "--", *requirements], PIP_LOG=str(log))
    if code < 0:
        why = f"pip was ended by signal {-code}: the container may need a higher limit of memory"
        raise Failure(AGAIN, f"{why} ({_shorten(_last_words(output.splitlines()))})")
    if code:
        written = log.read_text("utf-8", "replace") if log.is_file() else ""
        command, words = _failed_command(written)
        # NB: where pip has a log, it writes what a build says to the log alone, and says "See above".
        if words and not _NEEDED.search(command) and words[-1].strip() not in output:
            print(f"{command} failed, and said:", *words, sep="\n", flush=True)
        raise explain_failure(output, written, requirements)


def _torch_constraint(requirements: list[str]) -> str:
    """A constraint: the image's torch fits the driver and what was built for it, so only who names torch gets another."""
    names = {re.split(r"[^A-Za-z0-9._-]", item.strip(), maxsplit=1)[0].lower() for item in requirements}
    try:
        return "" if "torch" in names else f"torch=={metadata.version('torch')}\n"
    except metadata.PackageNotFoundError:
        return ""


def explain_failure(output: str, log: str = "", requirements: Sequence[str] = ()) -> Failure:
    """What pip's output and its log amount to."""
    command, words = _failed_command(log)
    lines = [*output.splitlines(), *(words if _NEEDED.search(command) else ())]
    final = (line for line in lines if not _NOT_THE_END.search(line))
    last_lines = "\n".join([*_missing_pages(log), *final])
    addresses = [
        _strip_login(url) for text in requirements for url in re.findall(r"@\s*(https?://\S+)", text)[:1]
    ]
    with_build = "\n".join([last_lines, *words])
    for meaning in _MEANINGS:
        for match in re.finditer(
            meaning.pattern, with_build if meaning.of_build else last_lines, re.MULTILINE
        ):
            if not meaning.of_requirement or _mentions(match[0], addresses):
                return Failure(meaning.code, meaning.sentence.format(_shorten(match[match.lastindex or 0])))
    unbuilt = _UNBUILT.search(last_lines)
    if unbuilt:
        why = f"a package has no wheel for Python {_VERSION} and cannot be built in this image: require another version of it"
        return Failure(NEVER, f"{why} ({_shorten(_last_words(words) if words else unbuilt[0])})")
    return Failure(AGAIN, f"pip failed: {_shorten(_last_words(output.splitlines()))}")


def _strip_login(url: str) -> str:
    """An address without a login, which pip hides, and without a fragment, which it leaves out in places."""
    return _PASSWORD.sub("//", url).partition("#")[0]


def _mentions(text: str, addresses: Sequence[str]) -> bool:
    """Whether what pip says is of one of the addresses: it names the address, or the server with the path, or the server alone."""
    if {_strip_login(url) for url in re.findall(r"https?://\S+", text)} & {*addresses}:
        return True
    pool = re.search(r"host='([^']*)', port=(\d+)\)(?:.*? with url: (\S+))?", text)
    return pool is not None and any(pool.groups("") in _targets(url) for url in addresses)


def _targets(url: str) -> list[tuple[str, str, str]]:
    """The host, the port and the path of an address, as urllib3 names them with the path and without it."""
    scheme, _, location = url.partition("://")
    server, slash, path = location.partition("/")
    host, _, port = server.lower().partition(":")
    port = port or {"http": "80", "https": "443"}[scheme]
    return [(host, port, slash + path), (host, port, "")]


def _missing_pages(log: str) -> list[str]:
    """Pages that indexes did not give for the package that pip looked for last: for those before, it found another index."""
    pages: list[str] = []
    for line in log.splitlines():
        missing = _NO_PAGE.search(line)
        if missing:
            pages.append(missing[1])
        elif _ANSWERED.search(line):
            pages.clear()
    return pages


def _failed_command(log: str) -> tuple[str, list[str]]:
    """The command that failed, as pip names it, and what it said; of two, one in the other, the inner one."""
    lines = [_TIME.sub("", line) for line in log.splitlines()]
    begun: dict[str, int] = {}
    command, start, end = "", -1, 0
    for number, line in enumerate(lines):
        begins, failed = _BEGINS.match(line), _FAILED.match(line)
        if begins:
            begun[begins[1]] = number
        elif failed and begun.get(failed[1], -1) > start:
            command, start, end = failed[1], begun[failed[1]], number
    return command, [line for line in lines[start + 1 : end] if line.strip()]


def _last_words(output: Sequence[str]) -> str:
    """The line in which pip says why it ends: its last error, the last line of a traceback, or else the last line."""
    lines = [line.strip() for line in output if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "\N{MULTIPLICATION SIGN} "))]
    if errors and errors[-1] != _UNEXPECTED:
        return errors[-1]
    return lines[-1] if lines else "it says nothing"


def _shorten(text: str) -> str:
    return _PASSWORD.sub("//", text.strip())[:_MAX_MESSAGE_CHARS]


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


def _run(command: list[str], **more: str) -> tuple[int, str]:
    """Run a program, with more variables; its exit code, and its output, which is shown too."""
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
    """Install, or run a command, as the first argument says."""
    mode, *arguments = sys.argv[1:]
    if mode == RUN:
        run(arguments)
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
