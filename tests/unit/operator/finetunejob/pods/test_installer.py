"""The script that installs trainer.dependencies, as a process, with packages made here and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune_crds import contract
from finetune_operator.finetunejob.pods import installer
from fixtures.git_server import GitServer, git_server
from support.http_server import Answer, Request, serving
from support.ports import free_port
from support.wheels import sdist, wheel


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
    variables = {
        "FINETUNE_DEPENDENCIES_PATH": str(folder / "installed"),
        "FINETUNE_TERMINATION_PATH": str(folder / "said"),
        # NB: torchrun leaves its logs there.
        "TMPDIR": str(folder),
    }
    pip_variables = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(packages),
        "PIP_USER": "1",
        "PYTHONWARNINGS": "",
    }
    return {**os.environ, **variables, **pip_variables, **more}


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
    script, report_file = tmp_path / "my_train.py", tmp_path / "found.json"
    script.write_text(SCRIPT)
    torchrun = [
        "torchrun",
        "--nproc-per-node=1",
        f"--master-port={free_port()}",
        str(script),
        str(report_file),
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        [sys.executable, installer.__file__, installer.RUN, *torchrun],
        env=environment(tmp_path, packages, PATH=path, PYTHONPATH="/of/the/image"), capture_output=True, check=True,
    )  # fmt: skip
    message = json.loads(report_file.read_text())
    image = str(Path(sys.executable).parent.parent)
    assert all(place.startswith(image) for place in message.pop("image"))
    assert message == {
        "version": "1.0",
        "place": str(site / "tiny.py"),
        "program": str(tmp_path / "installed/bin/tiny"),
        "path": "/of/the/image",
    }


START = "trainer.dependencies cannot be installed: "
NO_ANSWER = "a server does not respond: check PIP_INDEX_URL and the addresses in the requirements, and whether the pods can reach them ("
VERSION = f"Python {sys.version_info[0]}.{sys.version_info[1]}"


def test_a_requirement_that_no_index_has(tmp_path: Path, packages: Path) -> None:
    assert install(tmp_path, packages, "tiny>=99") == Ended(
        64,
        "DependenciesFailed",
        f"{START}the package index has no matching version for {VERSION}: correct the requirement, or set PIP_INDEX_URL or "
        "PIP_EXTRA_INDEX_URL to another index (No matching distribution found for tiny>=99)",
    )


def test_a_package_gets_no_other_torch_unless_it_is_named(tmp_path: Path, packages: Path) -> None:
    ended = install(tmp_path, packages, "aged")
    assert (ended.code, ended.reason) == (64, "DependenciesFailed")
    assert ended.message.startswith(
        f"{START}the requirements conflict with each other, or with the torch version of the image: correct the "
        "requirements ("
    )
    assert [installer._torch_constraint([name]).partition("==")[0] for name in ("aged", "Torch [opt]<1", "torch-aged")] == [
        "torch", "", "torch",
    ]  # fmt: skip


def test_an_index_that_does_not_answer(tmp_path: Path, packages: Path) -> None:
    index = f"http://me:secret@127.0.0.1:{free_port()}/simple"
    ended = install(tmp_path, packages, "tiny==9", PIP_NO_INDEX="0", PIP_INDEX_URL=index, PIP_RETRIES="1")
    assert (ended.code, ended.reason) == (69, "DependenciesFailed")
    assert ended.message.startswith(f"{START}{NO_ANSWER}Could not fetch URL ")
    assert "secret" not in ended.message


def test_an_image_without_pip(tmp_path: Path, packages: Path) -> None:
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True)
    python = str(image / "bin/python")
    assert install(tmp_path, packages, "tiny", python=python, PYTHONPATH="") == Ended(
        64,
        "DependenciesFailed",
        f"{START}the image has no pip: use an image with pip, or one that already contains the packages ({tmp_path}/installed/bin/python: "
        "No module named pip)",
    )


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
    assert (ended.code, ended.reason) == (69, "DependenciesFailed")
    assert ended.message.startswith(f"{START}{NO_ANSWER}Could not fetch URL ")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, GitServer]]:
    """The address of files, of which there are two, and a server of Git with one repository."""
    folder = tmp_path_factory.mktemp("servers")
    wheel(folder, "tiny", "1.0")
    wheel(folder, "newer", "1.0", python=">=3.99")

    def respond(request: Request) -> Answer:
        path = folder / request.target.strip("/")
        return Answer(200, path.read_bytes()) if path.is_file() else Answer(404)

    with serving(respond) as address, git_server(folder / "git") as git:
        git.create("code")
        git.commit("code", {"train.py": "1"})
        yield address, git


# A requirement with the address of the files and that of the repositories, the exit code, and the start of the sentence.
WRONG: dict[str, tuple[str, int, str]] = {
    "nothing is there": (
        "tiny @ {files}/tiny-2.0-py3-none-any.whl",
        64,
        "the address of a requirement has no Python package, or the requested branch, tag or commit does not exist there: correct the requirement (HTTP "
        "error 404 while getting http",
    ),
    "another platform": (
        "tiny @ {files}/tiny-1.0-cp27-cp27m-win32.whl",
        64,
        f"a package does not support {VERSION} or the platform of the image: require another version of the "
        "package, or use another image (tiny-1.0-cp27",
    ),
    "another Python": (
        "newer @ {files}/newer-1.0-py3-none-any.whl",
        64,
        f"a package does not support {VERSION} or the platform of the image: require another version of the "
        "package, or use another image (Package 'newer' ",
    ),
    "no file": (
        "tiny @ file:///nowhere/tiny-1.0-py3-none-any.whl",
        64,
        "the address of a requirement has no Python package, or the requested branch, tag or commit does not exist there: correct the requirement (Could "
        "not install packages due ",
    ),
    "another digest": (
        f"tiny @ {{files}}/tiny-1.0-py3-none-any.whl#sha256={'0' * 64}",
        1,
        "a file of a package is missing, truncated, or does not match its hash: wait until the index is repaired, or require another "
        "version (THESE PACKAGES DO NOT MATCH THE HASHES",
    ),
    "a mistyped repository": (
        "tiny @ git+{git}/typo.git@v1",
        1,
        "a package or repository does not exist, or requires credentials: correct the requirement, or configure credentials for pip or "
        "git (fatal: repository 'https://127.0.0.1:",
    ),
    "a mistyped tag": (
        "tiny @ git+{git}/code.git@v1",
        64,
        "the address of a requirement has no Python package, or the requested branch, tag or commit does not exist there: correct the requirement (error: "
        "pathspec 'v1' did not ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_requirement_with_an_address_that_is_wrong(
    tmp_path: Path, packages: Path, servers: tuple[str, GitServer], wrong: tuple[str, int, str]
) -> None:
    requirement, code, message = wrong
    files, git = servers
    address = requirement.format(files=files, git=git.address)
    ended = install(tmp_path, packages, address, GIT_SSL_CAINFO=str(git.authority))
    assert (ended.code, ended.reason) == (code, "DependenciesFailed")
    assert ended.message.startswith(f"{START}{message}")


def test_an_address_on_a_server_that_is_away(tmp_path: Path, packages: Path) -> None:
    ended = install(
        tmp_path,
        packages,
        f"tiny @ http://127.0.0.1:{free_port()}/tiny-1.0-py3-none-any.whl",
        PIP_RETRIES="0",
    )
    assert (ended.code, ended.reason) == (69, "DependenciesFailed")
    assert ended.message.startswith(f"{START}{NO_ANSWER}")


def test_an_index_that_lists_metadata_which_it_does_not_have(tmp_path: Path, packages: Path) -> None:
    name = "tiny-9.0-py3-none-any.whl"
    page = f'<a href="/{name}" data-core-metadata="true" data-dist-info-metadata="true">{name}</a>'

    def respond(request: Request) -> Answer:
        listed = request.target == "/simple/tiny/"
        return Answer(200, page, {"Content-Type": "text/html"}) if listed else Answer(404)

    with serving(respond) as address:
        index = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"{address}/simple"}
        ended = install(tmp_path, packages, "tiny==9", **index)
    assert ended == Ended(
        1,
        "DependenciesFailed",
        f"{START}a file of a package is missing, truncated, or does not match its hash: wait until the index is repaired, or require "
        f"another version (HTTP error 404 while getting {address}/{name}.metadata)",
    )


NEEDS = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
TOOLS = "setuptools-99.0-py3-none-any.whl"
LISTED = Answer(200, f'<a href="/{TOOLS}">{TOOLS}</a>', {"Content-Type": "text/html"})
# What an index answers of the page and of the file of setuptools, which a build needs, and what is told.
TOOLS_OF_A_BUILD: dict[str, tuple[Answer, Answer, tuple[int, str]]] = {
    "no page for a moment": (
        Answer(503),
        Answer(503),
        (69, f"{START}{NO_ANSWER}Could not fetch URL http://127.0.0.1:PORT/simple/setuptools/: "),
    ),
    "no file for a moment": (
        LISTED,
        Answer(503),
        (69, f"{START}{NO_ANSWER}pip._vendor.urllib3.exceptions.MaxRetryError: "),
    ),
    "none at all": (
        Answer(404),
        Answer(404),
        (64, f"{START}the package index has no matching version for {VERSION}: correct the requirement, or "),
    ),
}


@pytest.mark.parametrize(("page", "file", "expected"), TOOLS_OF_A_BUILD.values(), ids=TOOLS_OF_A_BUILD)
def test_an_index_without_what_a_build_needs(
    tmp_path: Path, packages: Path, page: Answer, file: Answer, expected: tuple[int, str]
) -> None:
    name = "built-1.0.tar.gz"
    answers = {
        "/simple/built/": Answer(200, f'<a href="/{name}">{name}</a>', {"Content-Type": "text/html"}),
        f"/{name}": Answer(200, sdist("built", "1.0", {"pyproject.toml": NEEDS})),
        "/simple/setuptools/": page,
        f"/{TOOLS}": file,
    }
    with serving(lambda request: answers.get(request.target, Answer(404))) as address:
        index = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": f"{address}/simple", "PIP_RETRIES": "0"}
        ended = install(tmp_path, packages, "built", **index)
    message = ended.message.replace(address, "http://127.0.0.1:PORT")
    assert (ended.code, message[: len(expected[1])]) == expected


BACKEND = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
UNBUILT = f"a package has no wheel for {VERSION} and cannot be built in this image: require another version of the package ({{}})"
PYTHON = "Cannot install on Python version 3.12.1; only versions >=3.7,<3.10 are supported."
NO_SPACE = "cc1: fatal error: /tmp/a.s: No space left on device"
KILLED = "gcc: fatal error: Killed signal terminated program cc1plus"
NO_DOWNLOAD = "a build could not download what it needs: allow the pods to reach the server, or require a version that has a wheel"
# The statement of a build that fails, and what is told.
BUILDS: dict[str, tuple[str, tuple[int, str]]] = {
    "a download that fails": (
        "urllib.request.urlopen('http://127.0.0.1:1/x')",
        (
            1,
            f"{NO_DOWNLOAD} (urllib.error.URLError: <urlopen error [Errno 111] Connection refused>)",
        ),
    ),
    "a build that is killed": (
        "import os; os.kill(os.getpid(), 9)",
        (1, "a build was killed: raise the memory limit of the container main in spec.pods.train.template ("),
    ),
}


@pytest.mark.parametrize(("statement", "expected"), BUILDS.values(), ids=BUILDS)
def test_a_build_that_fails(
    tmp_path: Path, packages: Path, statement: str, expected: tuple[int, str]
) -> None:
    save_package(packages, statement)
    ended = install(tmp_path, packages, "built")
    assert (ended.code, ended.reason) == (expected[0], "DependenciesFailed")
    assert ended.message.startswith(f"{START}{expected[1]}")


def save_package(folder: Path, statement: str) -> None:
    """A source distribution whose build is a statement."""
    backend = f"import sys, urllib.request\ndef build_wheel(*_):\n    {statement}\n"
    files = {"pyproject.toml": BACKEND, "backend.py": backend}
    (folder / "built-1.0.tar.gz").write_bytes(sdist("built", "1.0", files))


BUILD_ERROR = "an error of the build"


@pytest.fixture(scope="module")
def failed_build(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pip logs of a build that ends with BUILD_ERROR."""
    folder = tmp_path_factory.mktemp("build")
    save_package(folder, f"sys.exit({BUILD_ERROR!r})")
    subprocess.run(
        [sys.executable, installer.__file__, installer.INSTALL, "built"],
        env=environment(folder, folder), capture_output=True, check=False,
    )  # fmt: skip
    log = (folder / "installed/pip.log").read_text("utf-8")
    assert BUILD_ERROR in log
    return log


# The error of a build that fails, and what is told.
BUILD_ERRORS: dict[str, tuple[str, tuple[int, str]]] = {
    "a compiler that is killed": (
        f"{KILLED}\ncompilation terminated.",
        (
            1,
            f"a build was killed: raise the memory limit of the container main in spec.pods.train.template ({KILLED})",
        ),
    ),
    "a server that is busy": (
        "urllib.error.HTTPError: HTTP Error 503: Unavailable",
        (1, f"{NO_DOWNLOAD} (urllib.error.HTTPError: HTTP Error 503: Unavailable)"),
    ),
    "a full node": (
        NO_SPACE,
        (
            1,
            f"the node has no disk space left for the packages: use a node with more ephemeral storage ({NO_SPACE})",
        ),
    ),
    "another Python": (f"RuntimeError: {PYTHON}", (64, UNBUILT.format(f"RuntimeError: {PYTHON}"))),
    "a server that it cannot reach": (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='cdn', port=443): Max retries exceeded",
        (
            1,
            f"{NO_DOWNLOAD} (requests.exceptions.ConnectionError: HTTPSConnectionPool(host='cdn', port=443): Max retries exceeded)",
        ),
    ),
    # What a build says of a server or of a version is not of the index.
    **{
        what: (error, (64, UNBUILT.format(error)))
        for what, error in {
            "a page that is refused": "403 Client Error: Forbidden for url: https://host/a",
            "a version that it does not find": "RuntimeError: No matching distribution found for cuda",
            "a file that it does not find": "CMake Error: Download failed after 3 attempts",
        }.items()
    },
}


@pytest.mark.parametrize(("error", "expected"), BUILD_ERRORS.values(), ids=BUILD_ERRORS)
def test_an_error_of_a_build(failed_build: str, error: str, expected: tuple[int, str]) -> None:
    failure = installer.explain_failure(installer.find_last_lines(failed_build.replace(BUILD_ERROR, error)))
    assert (failure.code, str(failure)) == expected


def test_what_a_build_said_is_shown(tmp_path: Path, packages: Path) -> None:
    files = {
        "pyproject.toml": BACKEND,
        "backend.py": "def build_wheel(*_):\n    raise SystemExit('a reason\\n\\n')\n",
    }
    (packages / "built-1.0.tar.gz").write_bytes(sdist("built", "1.0", files))
    ended = subprocess.run(
        [sys.executable, installer.__file__, installer.INSTALL, "built"],
        env=environment(tmp_path, packages), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout.splitlines()[-2:] == ["A build failed with this output:", "  a reason"]


def test_a_repository_on_a_server_that_is_away(tmp_path: Path, packages: Path) -> None:
    ended = install(tmp_path, packages, f"tiny @ git+https://127.0.0.1:{free_port()}/a.git")
    assert (ended.code, ended.reason) == (69, "DependenciesFailed")
    assert ended.message.startswith(f"{START}{NO_ANSWER}")


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
        f"{START}signal 9 ended pip: the container may need a higher memory limit (Installing)",
    )


def test_the_script_knows_the_contract_that_it_cannot_import() -> None:
    assert {
        "folder": str(installer.FOLDER),
        "termination": str(installer.TERMINATION),
        "reason": installer.REASON,
        "never": installer.NEVER,
        "unavailable": installer.UNAVAILABLE,
    } == {
        "folder": contract.DEPENDENCIES_PATH,
        "termination": contract.TERMINATION_PATH,
        "reason": contract.DEPENDENCIES_FAILED,
        "never": contract.EXIT_RECIPE,
        "unavailable": contract.EXIT_UNAVAILABLE,
    }
