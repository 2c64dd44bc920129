"""The script that installs trainer.dependencies, as a process, with packages made here and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune_crds import contract
from finetune_operator.finetunejob import installer
from support.ports import free_port
from support.wheels import wheel


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of wheels."""
    folder = tmp_path / "packages"
    folder.mkdir()
    # What is asked for from the image: torch must not be installed a second time.
    for version in ("1.0", "2.0"):
        wheel(folder, "tiny", version, requires=["torch", "packaging"], program=True)
    wheel(folder, "aged", "1.0", requires=["torch<1"])
    wheel(folder, "torch", "0.4.1")
    return folder


class Ended(NamedTuple):
    """How the process ended: its exit code, and the reason and the sentence of its error."""

    code: int
    reason: str = ""
    message: str = ""


def environment(folder: Path, packages: Path, **more: str) -> dict[str, str]:
    here = {
        "FINETUNE_DEPENDENCIES_PATH": str(folder / "installed"),
        "FINETUNE_TERMINATION_PATH": str(folder / "said"),
    }
    given = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "PIP_USER": "1", "PYTHONWARNINGS": ""}
    return {**os.environ, **here, **given, **more}


def install(
    folder: Path, packages: Path, *requirements: str, python: str = sys.executable, **more: str
) -> Ended:
    (folder / "said").unlink(missing_ok=True)
    ended = subprocess.run(
        [python, installer.__file__, installer.INSTALL, *requirements],
        env=environment(folder, packages, **more), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode == 0:
        return Ended(0)
    error = json.loads((folder / "said").read_text())["error"]
    return Ended(ended.returncode, error["reason"], error["message"])


SCRIPT = """
import json, os, shutil, sys
from pathlib import Path
import tiny, packaging, yaml
found = {
    "version": tiny.VERSION,
    "place": tiny.__file__,
    "image": [packaging.__file__, yaml.__file__],
    "program": shutil.which("tiny"),
    "path": os.environ["PYTHONPATH"].split(os.pathsep)[-1],
}
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def test_a_script_of_torchrun_finds_what_the_image_lacks(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "constraints.txt").write_text("tiny<2\n")
    assert install(tmp_path, packages, "tiny>=1", PIP_CONSTRAINT=str(tmp_path / "constraints.txt")) == Ended(
        0
    )
    site = tmp_path / f"installed/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    assert {path.name for path in site.iterdir() if not path.name.startswith("__")} == {
        "image.pth",
        "tiny.py",
        "tiny-1.0.dist-info",
    }
    script, found = tmp_path / "my_train.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    torchrun = ["torchrun", "--nproc-per-node=1", f"--master-port={free_port()}", str(script), str(found)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        [sys.executable, installer.__file__, installer.RUN, *torchrun],
        env=environment(tmp_path, packages, PATH=path, PYTHONPATH="/of/the/image"), capture_output=True, check=True,
    )  # fmt: skip
    told = json.loads(found.read_text())
    image = str(Path(sys.executable).parent.parent)
    assert all(place.startswith(image) for place in told.pop("image"))
    assert told == {
        "version": "1.0",
        "place": str(site / "tiny.py"),
        "program": str(tmp_path / "installed/bin/tiny"),
        "path": "/of/the/image",
    }


START = "trainer.dependencies cannot be installed: "
VERSION = f"Python {sys.version_info[0]}.{sys.version_info[1]}"


def test_a_requirement_that_no_index_has(tmp_path: Path, packages: Path) -> None:
    assert install(tmp_path, packages, "tiny>=99") == Ended(
        64,
        "DependenciesFailed",
        f"{START}the package index has no tiny>=99 for {VERSION}: correct the requirement, or name another index in "
        "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL",
    )


def test_a_package_gets_no_other_torch_unless_it_is_named(tmp_path: Path, packages: Path) -> None:
    ended = install(tmp_path, packages, "aged")
    assert (ended.code, ended.reason) == (64, "DependenciesFailed")
    assert ended.message.startswith(
        f"{START}the requirements contradict each other, or ask for another torch than the image has: correct them ("
    )
    assert [installer._torch([name]).partition("==")[0] for name in ("aged", "Torch [opt]<1", "torch-aged")] == [
        "torch", "", "torch",
    ]  # fmt: skip


def test_an_index_that_does_not_answer(tmp_path: Path, packages: Path) -> None:
    index = f"http://me:secret@127.0.0.1:{free_port()}/simple"
    ended = install(tmp_path, packages, "tiny==9", PIP_NO_INDEX="0", PIP_INDEX_URL=index, PIP_RETRIES="1")
    assert (ended.code, ended.reason) == (1, "DependenciesFailed")
    assert ended.message.startswith(
        f"{START}the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it (Could not fetch URL "
    )
    assert "secret" not in ended.message


def test_an_image_without_pip(tmp_path: Path, packages: Path) -> None:
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True)
    python = str(image / "bin/python")
    assert install(tmp_path, packages, "tiny", python=python, PYTHONPATH="") == Ended(
        64,
        "DependenciesFailed",
        f"{START}the image has no pip: use an image that has it, or one that has the packages already",
    )


RETRY = (
    "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after connection broken by "
    "'RemoteDisconnected('Remote end closed connection without response')': /simple/tiny/\n"
)
NO_VERSION = (
    "ERROR: Could not find a version that satisfies the requirement tiny>=99 (from versions: 1.0)\n"
    "ERROR: No matching distribution found for tiny>=99\n"
)
NO_ANSWER = "the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it ({})"
UNKNOWN_VERSION = (
    64,
    f"the package index has no tiny>=99 for {VERSION}: correct the requirement, or name another index in PIP_INDEX_URL or "
    "PIP_EXTRA_INDEX_URL",
)
TRACEBACK = (
    "Collecting tiny\nERROR: Exception:\nTraceback (most recent call last):\n"
    '  File "/usr/lib/python3/dist-packages/pip/_vendor/urllib3/response.py", line 443, in _error_catcher\n    yield\n'
)

# What pip 23 and 26 say, and what is told.
OUTPUTS: dict[str, tuple[str, tuple[int, str]]] = {
    "a login that is refused": (
        "WARNING: 401 Error, Credentials not correct for https://index/simple/tiny/\n"
        "ERROR: No matching distribution found for tiny\n",
        (
            1,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (401 Error, Credentials not correct "
            "for https://index/simple/tiny/)",
        ),
    ),
    "an index that is away for a moment": (
        "ERROR: HTTP error 503 while getting https://me:secret@index/tiny.whl\n",
        (
            1,
            "the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it (HTTP error 503 while "
            "getting https://index/tiny.whl)",
        ),
    ),
    "a package that cannot be built": (
        "  error: subprocess-exited-with-error\nERROR: Failed to build 'tiny' when getting requirements\n",
        (
            64,
            f"a package has no wheel for {VERSION} and cannot be built in this image: require another version of it "
            "(subprocess-exited-with-error)",
        ),
    ),
    "a full node after a package was built": (
        "  Getting requirements to build wheel: started\n  Getting requirements to build wheel: finished with status 'done'\n"
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        (1, "the node has no space left for the packages"),
    ),
    "a repository that does not answer": (
        "  fatal: unable to access 'https://git.example.com/a.git/': Could not resolve host: git.example.com\n"
        "  error: subprocess-exited-with-error\n",
        (
            1,
            "the server of a requirement does not answer: check its address, and that the pods may reach it (unable to access "
            "'https://git.example.com/a.git/': Could not resolve host: git.example.com)",
        ),
    ),
    "a full node": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        (1, "the node has no space left for the packages"),
    ),
    "a version that no index has, after an answer that was late": (
        RETRY + NO_VERSION,
        UNKNOWN_VERSION,
    ),
    "an index that stops amid a package, by pip 23": (
        TRACEBACK
        + "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='index', port=443): Read timed out.\n",
        (
            1,
            NO_ANSWER.format(
                "ReadTimeoutError: HTTPSConnectionPool(host='index', port=443): Read timed out."
            ),
        ),
    ),
    "an index that stops amid a package, by pip 26": (
        "  WARNING: Connection interrupted while downloading.\nerror: incomplete-download\n\n"
        "\N{MULTIPLICATION SIGN} Download failed after 6 attempts because not enough bytes were received (2.0 kB/100 kB)\n"
        "╰─> URL: https://index/tiny.whl\n\nnote: This is an issue with network connectivity, not pip.\n",
        (
            1,
            NO_ANSWER.format(
                "Download failed after 6 attempts because not enough bytes were received (2.0 kB/100 kB)"
            ),
        ),
    ),
    "anything else": (
        "Collecting tiny\nERROR: pip is confused\nnotice\n",
        (1, "pip failed: ERROR: pip is confused"),
    ),
    "an error of pip's own": (
        "ERROR: pip's dependency resolver does not take into account all packages\n"
        + TRACEBACK
        + "OSError: [Errno 5] Input/output error\n\n",
        (1, "pip failed: OSError: [Errno 5] Input/output error"),
    ),
    "an error in the form of pip 26": (
        "error: legacy-install\n\n\N{MULTIPLICATION SIGN} Encountered error while trying to install tiny.\n╰─> tiny\n\nhint: See above.\n",
        (1, "pip failed: \N{MULTIPLICATION SIGN} Encountered error while trying to install tiny."),
    ),
    "an end without an error": (
        "Collecting tiny\nSegmentation fault\n\n",
        (1, "pip failed: Segmentation fault"),
    ),
    "nothing": ("\n", (1, "pip failed: it says nothing")),
}


@pytest.mark.parametrize(("output", "expected"), OUTPUTS.values(), ids=OUTPUTS)
def test_what_pip_says(output: str, expected: tuple[int, str]) -> None:
    found = installer.explained(output)
    assert (found.code, str(found)) == expected


# What pip's log says of pages, after which pip says that no version is there; and what is told.
NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement tiny (from versions: none)\n"
    "ERROR: No matching distribution found for tiny\n"
)
PAGE = "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/{}/: {} - skipping\n"
UNANSWERED = "HTTPSConnectionPool(host='index', port=443): Max retries exceeded with url: /simple/tiny/"
NO_PACKAGE = (64, UNKNOWN_VERSION[1].replace(">=99", ""))
LOGS: dict[str, tuple[str, tuple[int, str]]] = {
    "nothing": ("", NO_PACKAGE),
    "a package that is not there": (
        PAGE.format("tiny", "404 Client Error: Not Found for url: https://index/simple/tiny/"),
        NO_PACKAGE,
    ),
    "an index without an answer": (
        PAGE.format("tiny", UNANSWERED),
        (1, NO_ANSWER.format(f"Could not fetch URL https://index/simple/tiny/: {UNANSWERED}")),
    ),
    "an index that is busy": (
        PAGE.format("tiny", "429 Client Error: Too Many Requests for url: https://index/simple/tiny/"),
        (
            1,
            NO_ANSWER.format(
                "Could not fetch URL https://index/simple/tiny/: 429 Client Error: Too Many Requests for url: "
                "https://index/simple/tiny/"
            ),
        ),
    ),
    "a login that is refused": (
        PAGE.format("tiny", "403 Client Error: Forbidden for url: https://index/simple/tiny/"),
        (
            1,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (403 Client Error: Forbidden for "
            "url: https://index/simple/tiny/)",
        ),
    ),
    "an index that answers again": (
        PAGE.format("datasets", UNANSWERED) + "2026-11-23T23:15:01,000 Collecting datasets\n",
        NO_PACKAGE,
    ),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS)
def test_a_package_is_missing_only_where_every_index_says_so(log: str, expected: tuple[int, str]) -> None:
    found = installer.explained(NOT_FOUND, log)
    assert (found.code, str(found)) == expected


class _Busy(BaseHTTPRequestHandler):
    """An index behind a proxy that is up alone."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_an_index_behind_a_proxy_that_is_up_alone(tmp_path: Path, packages: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple"
        ended = install(tmp_path, packages, "tiny==9", PIP_NO_INDEX="0", PIP_INDEX_URL=index, PIP_RETRIES="0")
        server.shutdown()
    assert (ended.code, ended.reason) == (1, "DependenciesFailed")
    assert ended.message.startswith(
        f"{START}the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it (Could not fetch URL "
    )


def test_a_pip_that_is_killed_says_by_what(tmp_path: Path, packages: Path) -> None:
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__main__.py").write_text(
        "import os, signal\nprint('Installing', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    python = str(image / "bin/python")
    assert install(tmp_path, packages, "tiny", python=python, PYTHONPATH=str(tmp_path)) == Ended(
        1,
        "DependenciesFailed",
        f"{START}pip was ended by signal 9: the container may need a higher limit of memory (Installing)",
    )


def test_the_script_knows_the_contract_that_it_cannot_import() -> None:
    assert {
        "folder": str(installer.FOLDER),
        "termination": str(installer.TERMINATION),
        "reason": installer.REASON,
        "never": installer.NEVER,
    } == {
        "folder": contract.DEPENDENCIES_PATH,
        "termination": contract.TERMINATION_PATH,
        "reason": contract.DEPENDENCIES_FAILED,
        "never": contract.EXIT_RECIPE,
    }
