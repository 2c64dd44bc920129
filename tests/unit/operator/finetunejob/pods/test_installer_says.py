"""What pip and git say of packages that cannot be installed, and what is told of it."""

from __future__ import annotations

import sys

import pytest

from finetune_operator.finetunejob.pods import installer

VERSION = f"Python {sys.version_info[0]}.{sys.version_info[1]}"

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

UNBUILT = (
    f"a package has no wheel for {VERSION} and cannot be built in this image: require another version of it "
    "(subprocess-exited-with-error)"
)

# What pip 23 and 26 say, and what is told.
OUTPUTS: dict[str, tuple[str, tuple[int, str]]] = {
    "a login that is refused for a file of an index": (
        "WARNING: 401 Error, Credentials not correct for https://index/tiny.whl\n"
        "  ERROR: HTTP error 401 while getting https://index/tiny.whl (from https://index/simple/tiny/)\n",
        (
            69,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (HTTP error 401 while getting "
            "https://index/tiny.whl (from https://index/simple/tiny/))",
        ),
    ),
    "a package that cannot be built, beside an index that refuses the login": (
        "WARNING: 401 Error, Credentials not correct for https://other/simple/tiny/\n"
        "Could not fetch URL https://third/simple/tiny/: There was a problem confirming the ssl certificate: self-signed - skipping\n"
        "Collecting tiny\n  error: subprocess-exited-with-error\n",
        (64, UNBUILT),
    ),
    "an index that is away for a moment": (
        "ERROR: HTTP error 503 while getting https://me:secret@index/tiny.whl\n",
        (
            69,
            "the package index does not answer: check PIP_INDEX_URL, and that the pods may reach it (HTTP error 503 while "
            "getting https://index/tiny.whl)",
        ),
    ),
    "a package that cannot be built": (
        "  error: subprocess-exited-with-error\nERROR: Failed to build 'tiny' when getting requirements\n",
        (64, UNBUILT),
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
            69,
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
            69,
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
            69,
            NO_ANSWER.format(
                "Download failed after 6 attempts because not enough bytes were received (2.0 kB/100 kB)"
            ),
        ),
    ),
    "an index that breaks off a package": (
        "Collecting tiny\nERROR: Exception:\nTraceback (most recent call last):\n"
        '    raise ProtocolError(f"Connection broken: {e!r}", e) from e\n'
        "pip._vendor.urllib3.exceptions.ProtocolError: (\"Connection broken: ConnectionResetError(104, 'Connection reset by peer')\", "
        "ConnectionResetError(104, 'Connection reset by peer'))\n",
        (
            69,
            "a server broke off a download: check PIP_INDEX_URL and the addresses of requirements, and that the pods may reach them "
            "(pip._vendor.urllib3.exceptions.ProtocolError: (\"Connection broken: ConnectionResetError(104, 'Connection reset by "
            "peer')\", ConnectionResetError(104, 'Connection reset by peer')))",
        ),
    ),
    "a wheel of which a part came": (
        "Collecting tiny\n  Downloading https://index/tiny-1.0-py3-none-any.whl (1 kB)\n"
        "ERROR: Wheel 'tiny' located at /tmp/pip-unpack-xkkxjnud/tiny-1.0-py3-none-any.whl is invalid.\n",
        (1, "a wheel is damaged or was cut off: put a whole one in its place ('tiny')"),
    ),
    "requirements that contradict each other": (
        "ERROR: Cannot install a==1.0 and b==1.0 because these package versions have conflicting dependencies.\n",
        (
            64,
            "the requirements contradict each other, or ask for another torch than the image has: correct them (Cannot install "
            "a==1.0 and b==1.0 because these package versions have conflicting dependencies.)",
        ),
    ),
    "a build that is not for the Python of the image": (
        "  RuntimeError: Cannot install on Python version 3.12.1; only versions >=3.7,<3.10 are supported.\n"
        "  error: subprocess-exited-with-error\n",
        (64, UNBUILT),
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
    failure = installer.explain_failure(output)
    assert (failure.code, str(failure)) == expected


# What pip's log says of a build that fails, and what is told beside its output.
BUILD = "Preparing metadata (pyproject.toml)"
FAILS = "  error: subprocess-exited-with-error\nerror: metadata-generation-failed\n"
AT = "2026-11-23T23:15:00,921 "
BUILDS: dict[str, tuple[str, str]] = {
    "by pip 23.2": (
        f"{AT}  Running command {BUILD}\n{AT}  OSError: bad\n{AT}  ERROR: [present-rich] {BUILD} exited with 1\n"
        f"{AT}  [bold magenta]full command[/]: python3\n{AT}ERROR: [present-rich] {BUILD} exited with 1\n",
        "OSError: bad",
    ),
    "by pip 26": (
        f"{AT}  Running command {BUILD}\n{AT}  OSError: bad\n\n{AT}  ERROR: {BUILD} exited with -6\n{AT}ERROR: failed\n",
        "OSError: bad",
    ),
    "of what another build needs": (
        f"{AT}  Running command installing build dependencies for a\n{AT}  Running command {BUILD}\n{AT}    OSError: bad\n"
        f"{AT}  ERROR: {BUILD} exited with 1\n{AT}  ERROR: installing build dependencies for a exited with 1\n",
        "OSError: bad",
    ),
    "after one that did not": (
        f"{AT}  Running command {BUILD}\n{AT}  good\n{AT}  Running command {BUILD}\n{AT}  OSError: bad\n"
        f"{AT}  ERROR: {BUILD} exited with 1\n",
        "OSError: bad",
    ),
    "without a word": (
        f"{AT}  Running command {BUILD}\n{AT}  ERROR: {BUILD} exited with 1\n",
        "subprocess-exited-with-error",
    ),
    "in the words of a later pip": (
        f"{AT}  Running {BUILD}\n{AT}  OSError: bad\n{AT}{BUILD} failed\n",
        "subprocess-exited-with-error",
    ),
}


@pytest.mark.parametrize(("log", "why"), BUILDS.values(), ids=BUILDS)
def test_a_build_that_fails_is_told_in_its_own_words(log: str, why: str) -> None:
    failure = installer.explain_failure(FAILS, log)
    assert (failure.code, str(failure)) == (64, UNBUILT.replace("subprocess-exited-with-error", why))


# What pip's log says of pages, after which pip says that no version is there; and what is told.
NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement tiny (from versions: none)\n"
    "ERROR: No matching distribution found for tiny\n"
)
PAGE = "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/{}/: {} - skipping\n"
ANONYMOUS = "2026-11-23T23:15:00,920 Could not fetch URL https://extra/simple/tiny/: {} - skipping\n"
REFUSES_A_PAGE = (
    "a package index without a login refuses a page, which it may also do for what it does not have: correct the requirement, or "
    "put a login into PIP_INDEX_URL or PIP_EXTRA_INDEX_URL ({})"
)
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
        (69, NO_ANSWER.format(f"Could not fetch URL https://index/simple/tiny/: {UNANSWERED}")),
    ),
    "an index that is busy": (
        PAGE.format("tiny", "429 Client Error: Too Many Requests for url: https://index/simple/tiny/"),
        (
            69,
            NO_ANSWER.format(
                "Could not fetch URL https://index/simple/tiny/: 429 Client Error: Too Many Requests for url: "
                "https://index/simple/tiny/"
            ),
        ),
    ),
    "a login that is refused": (
        PAGE.format("tiny", "403 Client Error: Forbidden for url: https://index/simple/tiny/"),
        (
            69,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (403 Client Error: Forbidden for "
            "url: https://index/simple/tiny/)",
        ),
    ),
    "an index that refuses without a login, which some do for what they do not have": (
        ANONYMOUS.format("403 Client Error: Forbidden for url: https://extra/simple/tiny/"),
        (
            1,
            REFUSES_A_PAGE.format(
                "https://extra/simple/tiny/: 403 Client Error: Forbidden for url: https://extra/simple/tiny/"
            ),
        ),
    ),
    "such an index beside one whose login is refused": (
        ANONYMOUS.format("403 Client Error: Forbidden for url: https://extra/simple/tiny/")
        + PAGE.format("tiny", "401 Client Error: Unauthorized for url: https://index/simple/tiny/"),
        (
            69,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (401 Client Error: Unauthorized "
            "for url: https://index/simple/tiny/)",
        ),
    ),
    "such an index beside one without an answer": (
        ANONYMOUS.format("403 Client Error: Forbidden for url: https://extra/simple/tiny/")
        + PAGE.format("tiny", UNANSWERED),
        (69, NO_ANSWER.format(f"Could not fetch URL https://index/simple/tiny/: {UNANSWERED}")),
    ),
    "an index that answers again": (
        PAGE.format("datasets", UNANSWERED) + "2026-11-23T23:15:01,000 Collecting datasets\n",
        NO_PACKAGE,
    ),
    "a package that a folder has": (
        PAGE.format("datasets", UNANSWERED)
        + "2026-11-23T23:15:01,000 Processing /wheels/datasets-3.0-py3-none-any.whl\n",
        NO_PACKAGE,
    ),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS)
def test_a_package_is_missing_only_where_every_index_says_so(log: str, expected: tuple[int, str]) -> None:
    failure = installer.explain_failure(NOT_FOUND, log)
    assert (failure.code, str(failure)) == expected


# The error of an address, as pip ends with it, and what is told.
ADDRESS = "https://host/tiny-1.0-py3-none-any.whl"
FETCHED = f"Collecting tiny@ {ADDRESS}\n"
UNTRUSTED = (
    "a server shows a certificate that the image does not trust: mount that of its authority, and name the file in PIP_CERT, "
    "and in GIT_SSL_CAINFO for git ({})"
)
NO_SERVER = (
    "the server of a requirement does not answer: check its address, and that the pods may reach it ({})"
)
POOL = "HTTPSConnectionPool(host='host', port=443)"
TARGET = "/tiny-1.0-py3-none-any.whl"
ADDRESSES: dict[str, tuple[str, tuple[int, str]]] = {
    "nothing is there": (
        f"{FETCHED}  ERROR: HTTP error 404 while getting {ADDRESS}\n"
        f"ERROR: Could not install requirement tiny@ {ADDRESS} from {ADDRESS} because of HTTP error 404 Client Error: Not Found "
        f"for url: {ADDRESS} for URL {ADDRESS}\n",
        (64, f"nothing is at the address of a requirement: correct it ({ADDRESS})"),
    ),
    "an index that lists what it does not have": (
        f"Collecting tiny\n  ERROR: HTTP error 404 while getting {ADDRESS} (from https://index/simple/tiny/)\n"
        f"ERROR: Could not install requirement tiny from {ADDRESS} because of HTTP error 404 Client Error: Not Found\n",
        (
            1,
            f"the package index lists a file that it does not have: it may have it later, or require another version ({ADDRESS})",
        ),
    ),
    "an index without the metadata that it lists": (
        f"Collecting tiny\n  ERROR: HTTP error 404 while getting {ADDRESS}.metadata\n"
        f"ERROR: 404 Client Error: Not Found for url: {ADDRESS}.metadata\n",
        (
            1,
            "the package index lists a file that it does not have: it may have it later, or require another version "
            f"({ADDRESS}.metadata)",
        ),
    ),
    "an index that refuses the login for the metadata": (
        f"Collecting tiny\n  ERROR: HTTP error 403 while getting {ADDRESS}.metadata\n"
        f"ERROR: 403 Client Error: Forbidden for url: {ADDRESS}.metadata\n",
        (
            69,
            "the package index refuses the login: check PIP_INDEX_URL and PIP_EXTRA_INDEX_URL (HTTP error 403 while getting "
            f"{ADDRESS}.metadata)",
        ),
    ),
    "an index on the server of an address that is late": (
        f"Collecting other\nERROR: Could not install packages due to an OSError: {POOL}: Max retries exceeded with url: /other.whl "
        f'(Caused by ReadTimeoutError("{POOL}: Read timed out. (read timeout=15)"))\n',
        (
            69,
            NO_ANSWER.format(
                f'Max retries exceeded with url: /other.whl (Caused by ReadTimeoutError("{POOL}: Read timed out. (read timeout=15)"))'
            ),
        ),
    ),
    "an index that is busy, beside an address": (
        "Collecting tiny\nERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
        "retries exceeded with url: /other.whl.metadata (Caused by ResponseError('too many 502 error responses'))\n",
        (
            69,
            NO_ANSWER.format(
                "Max retries exceeded with url: /other.whl.metadata (Caused by ResponseError('too many 502 error responses'))"
            ),
        ),
    ),
    "a server that is busy, by pip 23": (
        f"{FETCHED}  ERROR: HTTP error 502 while getting {ADDRESS}\n"
        f"ERROR: Could not install requirement tiny@ {ADDRESS} from {ADDRESS} because of HTTP error 502 Server Error: Bad Gateway\n",
        (69, NO_SERVER.format(f"HTTP error 502 while getting {ADDRESS}")),
    ),
    "a server that is busy, by pip 26": (
        f"{FETCHED}ERROR: Could not install packages due to an OSError: {POOL}: Max retries exceeded with url: {TARGET} (Caused by "
        "ResponseError('too many 502 error responses'))\n",
        (
            69,
            NO_SERVER.format(
                f"{POOL}: Max retries exceeded with url: {TARGET} (Caused by ResponseError('too many 502 error responses'))"
            ),
        ),
    ),
    "a mistyped server, by pip 23": (
        f"{FETCHED}ERROR: Could not install packages due to an OSError: {POOL}: Max retries exceeded with url: {TARGET} (Caused by "
        "NewConnectionError('Failed to establish a new connection: [Errno -2] Name or service not known'))\n",
        (
            69,
            NO_SERVER.format(
                f"{POOL}: Max retries exceeded with url: {TARGET} (Caused by NewConnectionError('Failed to establish a new "
                "connection: [Errno -2] Name or service not known'))"
            ),
        ),
    ),
    "a mistyped server, by pip 26": (
        f"{FETCHED}error: connection-failed\n\n\N{MULTIPLICATION SIGN} Failed to connect to host while fetching {ADDRESS}\n"
        "╰─> Failed to resolve IP address for 'host' ([Errno -2] Name or service not known)\n",
        (69, NO_SERVER.format(f"Failed to connect to host while fetching {ADDRESS}")),
    ),
    "a server that stops amid a package, by pip 23": (
        f"{TRACEBACK}pip._vendor.urllib3.exceptions.ReadTimeoutError: {POOL}: Read timed out.\n",
        (69, NO_SERVER.format(f"ReadTimeoutError: {POOL}: Read timed out.")),
    ),
    "a server that stops amid a package, by pip 26": (
        "error: incomplete-download\n\n\N{MULTIPLICATION SIGN} Download failed after 6 attempts because not enough bytes were "
        f"received (0 bytes/100 bytes)\n╰─> URL: {ADDRESS}\n",
        (
            69,
            NO_SERVER.format(
                "Download failed after 6 attempts because not enough bytes were received (0 bytes/100 bytes)"
            ),
        ),
    ),
    "an address that needs a login, or is not there": (
        f"{FETCHED}  ERROR: HTTP error 403 while getting {ADDRESS}\n",
        (
            1,
            "the address of a requirement is not there, or needs a login: correct it, or name the package of an index "
            f"({ADDRESS})",
        ),
    ),
    "another platform": (
        "ERROR: tiny-1.0-cp27-cp27m-win32.whl is not a supported wheel on this platform.\n",
        (
            64,
            f"a wheel is not for {VERSION} on the platform of the image: name one that is (tiny-1.0-cp27-cp27m-win32.whl)",
        ),
    ),
    "another Python": (
        f"{FETCHED}  Downloading {ADDRESS} (780 bytes)\n"
        "ERROR: Package 'tiny' requires a different Python: 3.11.7 not in '>=3.99'\n",
        (
            64,
            "a package is not for the Python of the image: require another version of it, or use another image (Package "
            "'tiny' requires a different Python: 3.11.7 not in '>=3.99')",
        ),
    ),
    "a file that is not there": (
        "Processing /nowhere/tiny.whl\nERROR: Could not install packages due to an OSError: [Errno 2] No such file or directory: "
        "'/nowhere/tiny.whl'\n\n",
        (
            64,
            "a file of a requirement is not in the pod: correct its address, or mount it ('/nowhere/tiny.whl')",
        ),
    ),
    "a folder that is no package": (
        "ERROR: tiny@ file:///code from file:///code does not appear to be a Python project: neither 'setup.py' nor "
        "'pyproject.toml' found.\n",
        (
            64,
            "what is at the address of a requirement is no package: correct it (tiny@ file:///code from file:///code does not "
            "appear to be a Python project: neither 'setup.py' nor 'pyproject.toml' found.)",
        ),
    ),
    "another file than was pinned": (
        f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions, "
        f"please update the hashes.\n    tiny@ {ADDRESS}#sha256=00 from {ADDRESS}#sha256=00:\n        Expected sha256 00\n"
        "             Got        46\n",
        (
            64,
            "what is at the address of a requirement has another digest than the requirement: correct it (tiny@ "
            f"{ADDRESS}#sha256=00 from {ADDRESS}#sha256=00:)",
        ),
    ),
    "another file than the index says, which may be a part of it": (
        f"ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n    tiny from {ADDRESS}#sha256=00:\n"
        "        Expected sha256 00\n             Got        46\n",
        (1, "pip failed: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."),
    ),
    "a certificate that nobody trusts, by pip 23": (
        f"{FETCHED}ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max retries "
        "exceeded with url: /tiny.whl (Caused by SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] "
        "certificate verify failed: self-signed certificate (_ssl.c:1006)')))\n",
        (1, UNTRUSTED.format("certificate verify failed: self-signed certificate (_ssl.c:1006)')))")),
    ),
    "a certificate that nobody trusts, by pip 26": (
        f"error: ssl-verification-failed\n\n\N{MULTIPLICATION SIGN} Failed to establish a secure connection to host while fetching "
        f"{ADDRESS}\n╰─> [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)\n",
        (1, UNTRUSTED.format("certificate verify failed: self-signed certificate (_ssl.c:1006)")),
    ),
    "a server that closes the connection, by pip 26": (
        f"error: connection-failed\n\n\N{MULTIPLICATION SIGN} Failed to connect to host while fetching {ADDRESS}\n"
        "╰─> the connection was closed without a reply from the server.\n\nhint: Are you connected to the Internet?\n",
        (69, NO_SERVER.format(f"Failed to connect to host while fetching {ADDRESS}")),
    ),
    "a server that is late, by pip 26": (
        f"error: connection-timeout\n\n\N{MULTIPLICATION SIGN} Unable to fetch {ADDRESS}\n╰─> host didn't respond within 15 seconds\n",
        (69, NO_SERVER.format(f"Unable to fetch {ADDRESS}")),
    ),
}


@pytest.mark.parametrize(("output", "expected"), ADDRESSES.values(), ids=ADDRESSES)
def test_what_pip_says_of_an_address(output: str, expected: tuple[int, str]) -> None:
    requirements = ["datasets>=3", f"tiny[all] @ {ADDRESS}#sha256=00 ; python_version > '3'"]
    failure = installer.explain_failure(output, requirements=requirements)
    assert (failure.code, str(failure)) == expected


def test_an_address_with_a_port_and_a_name() -> None:
    requirements = ["tiny @ http://me@host:8080/a%20b/tiny.whl?x=1"]
    refused = "HTTPConnectionPool(host='host', port={}): Max retries exceeded with url: /a%20b/tiny.whl?x=1 (Caused by {})"
    for port, expected in (("8080", NO_SERVER), ("80", NO_ANSWER)):
        line = refused.format(port, "NewConnectionError('Connection refused')")
        failure = installer.explain_failure(f"ERROR: {line}\n", requirements=requirements)
        assert (failure.code, str(failure)) == (
            69,
            expected.format(line[line.index("Max") if expected is NO_ANSWER else 0 :]),
        )
    missing_url = "http://****@host:8080/a%20b/tiny.whl?x=1"
    failure = installer.explain_failure(
        f"  ERROR: HTTP error 404 while getting {missing_url}\n", requirements=requirements
    )
    assert failure.code == 64
