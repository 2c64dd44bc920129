"""What pip, git and builds say of packages that cannot be installed, and what is told of it."""

from __future__ import annotations

import sys

import pytest

from finetune_operator.finetunejob.pods import installer

VERSION = f"Python {sys.version_info[0]}.{sys.version_info[1]}"

NO_PIP = "the image has no pip: use an image with pip, or one that already contains the packages"
NO_GIT = "the image has no git, which a requirement needs: use an image with git, or require a package from an index"
NO_SPACE = "the node has no disk space left for the packages: use a node with more ephemeral storage"
KILLED = "a build was killed: raise the memory limit of the container main in spec.pods.train.template"
UNTRUSTED = (
    "the image does not trust the certificate of a server: mount the certificate of its authority, and set PIP_CERT to the file, or "
    "GIT_SSL_CAINFO for git"
)
NO_ANSWER = "a server does not respond: check PIP_INDEX_URL and the addresses in the requirements, and whether the pods can reach them"
REFUSED = (
    "a server rejects the credentials: check PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and the credentials of git"
)
FORBIDDEN = "a package or repository does not exist, or requires credentials: correct the requirement, or configure credentials for pip or git"
DAMAGED = "a file of a package is missing, truncated, or does not match its hash: wait until the index is repaired, or require another version"
NO_VERSION = (
    f"the package index has no matching version for {VERSION}: correct the requirement, or set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to "
    "another index"
)
OTHER_PYTHON = (
    f"a package does not support {VERSION} or the platform of the image: require another version of the package, or "
    "use another image"
)
CONTRADICTION = "the requirements conflict with each other, or with the torch version of the image: correct the requirements"
NOT_THERE = "the address of a requirement has no Python package, or the requested branch, tag or commit does not exist there: correct the requirement"
NO_REPOSITORY = "the repository of a requirement cannot be fetched: correct the requirement"
UNBUILT = f"a package has no wheel for {VERSION} and cannot be built in this image: require another version of the package"
FAILED = "pip failed"

NOT_FOUND = (
    "ERROR: Could not find a version that satisfies the requirement tiny (from versions: none)\n"
    "ERROR: No matching distribution found for tiny\n"
)

# The end of the log of pip 23 or 26, and what is told: the exit code, what to do, and the line that says it.
LOGS: dict[str, tuple[str, tuple[int, str, str]]] = {
    "a login that is refused for a file of an index": (
        "WARNING: 401 Error, Credentials not correct for https://index/tiny.whl\n"
        "  ERROR: HTTP error 401 while getting https://index/tiny.whl (from https://index/simple/tiny/)\n",
        (
            69,
            REFUSED,
            "HTTP error 401 while getting https://index/tiny.whl (from https://index/simple/tiny/)",
        ),
    ),
    "a package that cannot be built, beside an index that refuses the login": (
        "WARNING: 401 Error, Credentials not correct for https://other/simple/tiny/\n"
        "Could not fetch URL https://third/simple/tiny/: There was a problem confirming the ssl certificate: "
        "self-signed - skipping\n"
        "Collecting tiny\n"
        "  error: subprocess-exited-with-error\n",
        (64, UNBUILT, "error: subprocess-exited-with-error"),
    ),
    "an index that is away for a moment": (
        "ERROR: HTTP error 503 while getting https://me:secret@index/tiny.whl\n",
        (69, NO_ANSWER, "HTTP error 503 while getting https://index/tiny.whl"),
    ),
    "a package that cannot be built": (
        "  error: subprocess-exited-with-error\nERROR: Failed to build 'tiny' when getting requirements\n",
        (64, UNBUILT, "error: subprocess-exited-with-error"),
    ),
    "a full node after a package was built": (
        "  Getting requirements to build wheel: started\n"
        "  Getting requirements to build wheel: finished with status 'done'\n"
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        (1, NO_SPACE, "Could not install packages due to an OSError: [Errno 28] No space left on device"),
    ),
    "a repository that does not answer": (
        "  fatal: unable to access 'https://git.example.com/a.git/': Could not resolve host: git.example.com\n"
        "  error: subprocess-exited-with-error\n",
        (
            69,
            NO_ANSWER,
            "fatal: unable to access 'https://git.example.com/a.git/': Could not resolve host: git.example.com",
        ),
    ),
    "a full node": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        (1, NO_SPACE, "Could not install packages due to an OSError: [Errno 28] No space left on device"),
    ),
    "a version that no index has, after an answer that was late": (
        "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after "
        "connection broken by 'RemoteDisconnected('Remote end closed connection without response')': "
        "/simple/tiny/\n"
        "ERROR: Could not find a version that satisfies the requirement tiny>=99 (from versions: 1.0)\n"
        "ERROR: No matching distribution found for tiny>=99\n",
        (64, NO_VERSION, "No matching distribution found for tiny>=99"),
    ),
    "an index that stops amid a package, by pip 23": (
        "Collecting tiny\n"
        "ERROR: Exception:\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/dist-packages/pip/_vendor/urllib3/response.py", line 443, in '
        "_error_catcher\n"
        "    yield\n"
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='index', port=443): Read "
        "timed out.\n",
        (
            69,
            NO_ANSWER,
            "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='index', port=443): Read "
            "timed out.",
        ),
    ),
    "an index that stops amid a package, by pip 26": (
        "  WARNING: Connection interrupted while downloading.\n"
        "error: incomplete-download\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Download failed after 6 attempts because not enough bytes were received (2.0 kB/100 kB)\n"
        "╰─> URL: https://index/tiny.whl\n"
        "\n"
        "note: This is an issue with network connectivity, not pip.\n",
        (
            69,
            NO_ANSWER,
            "Download failed after 6 attempts because not enough bytes were received (2.0 kB/100 kB)",
        ),
    ),
    "an index that breaks off a package": (
        "Collecting tiny\n"
        "ERROR: Exception:\n"
        "Traceback (most recent call last):\n"
        '    raise ProtocolError(f"Connection broken: {e!r}", e) from e\n'
        'pip._vendor.urllib3.exceptions.ProtocolError: ("Connection broken: ConnectionResetError(104, '
        "'Connection reset by peer')\", ConnectionResetError(104, 'Connection reset by peer'))\n",
        (
            69,
            NO_ANSWER,
            'pip._vendor.urllib3.exceptions.ProtocolError: ("Connection broken: ConnectionResetError(104, '
            "'Connection reset by peer')\", ConnectionResetError(104, 'Connection reset by peer'))",
        ),
    ),
    "a wheel of which a part came": (
        "Collecting tiny\n"
        "  Downloading https://index/tiny-1.0-py3-none-any.whl (1 kB)\n"
        "ERROR: Wheel 'tiny' located at /tmp/pip-unpack-xkkxjnud/tiny-1.0-py3-none-any.whl is invalid.\n",
        (
            1,
            DAMAGED,
            "Wheel 'tiny' located at /tmp/pip-unpack-xkkxjnud/tiny-1.0-py3-none-any.whl is invalid.",
        ),
    ),
    "requirements that contradict each other": (
        "ERROR: Cannot install a==1.0 and b==1.0 because these package versions have conflicting "
        "dependencies.\n",
        (
            64,
            CONTRADICTION,
            "Cannot install a==1.0 and b==1.0 because these package versions have conflicting dependencies.",
        ),
    ),
    "a build that is not for the Python of the image": (
        "  RuntimeError: Cannot install on Python version 3.12.1; only versions >=3.7,<3.10 are supported.\n"
        "  error: subprocess-exited-with-error\n",
        (64, UNBUILT, "error: subprocess-exited-with-error"),
    ),
    "anything else": ("Collecting tiny\nERROR: pip is confused\nnotice\n", (1, FAILED, "pip is confused")),
    "an error of pip's own": (
        "ERROR: pip's dependency resolver does not take into account all packages\n"
        "Collecting tiny\n"
        "ERROR: Exception:\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/dist-packages/pip/_vendor/urllib3/response.py", line 443, in '
        "_error_catcher\n"
        "    yield\n"
        "OSError: [Errno 5] Input/output error\n"
        "\n",
        (1, FAILED, "OSError: [Errno 5] Input/output error"),
    ),
    "an error in the form of pip 26": (
        "error: legacy-install\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Encountered error while trying to install tiny.\n"
        "╰─> tiny\n"
        "\n"
        "hint: See above.\n",
        (1, FAILED, "Encountered error while trying to install tiny."),
    ),
    "an end without an error": ("Collecting tiny\nSegmentation fault\n\n", (1, FAILED, "Segmentation fault")),
    "nothing": ("\n", (1, FAILED, "it wrote no output")),
    "a build that fails, by pip 23.2": (
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   OSError: bad\n"
        "2026-11-23T23:15:00,921   ERROR: [present-rich] Preparing metadata (pyproject.toml) exited with 1\n"
        "2026-11-23T23:15:00,921   [bold magenta]full command[/]: python3\n"
        "2026-11-23T23:15:00,921 ERROR: [present-rich] Preparing metadata (pyproject.toml) exited with 1\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "OSError: bad"),
    ),
    "a build that fails, by pip 26": (
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   OSError: bad\n"
        "\n"
        "2026-11-23T23:15:00,921   ERROR: Preparing metadata (pyproject.toml) exited with -6\n"
        "2026-11-23T23:15:00,921 ERROR: failed\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "OSError: bad"),
    ),
    "a build that fails, of what another build needs": (
        "2026-11-23T23:15:00,921   Running command installing build dependencies for a\n"
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921     OSError: bad\n"
        "2026-11-23T23:15:00,921   ERROR: Preparing metadata (pyproject.toml) exited with 1\n"
        "2026-11-23T23:15:00,921   ERROR: installing build dependencies for a exited with 1\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "OSError: bad"),
    ),
    "a build that fails, after one that did not": (
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   good\n"
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   OSError: bad\n"
        "2026-11-23T23:15:00,921   ERROR: Preparing metadata (pyproject.toml) exited with 1\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "OSError: bad"),
    ),
    "a build that fails, without a word": (
        "2026-11-23T23:15:00,921   Running command Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   ERROR: Preparing metadata (pyproject.toml) exited with 1\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "Preparing metadata (pyproject.toml) exited with 1"),
    ),
    "a build that fails, in the words of a later pip": (
        "2026-11-23T23:15:00,921   Running Preparing metadata (pyproject.toml)\n"
        "2026-11-23T23:15:00,921   OSError: bad\n"
        "2026-11-23T23:15:00,921 Preparing metadata (pyproject.toml) failed\n"
        "  error: subprocess-exited-with-error\n"
        "error: metadata-generation-failed\n",
        (64, UNBUILT, "error: subprocess-exited-with-error"),
    ),
    "no version: nothing": (
        NOT_FOUND,
        (64, NO_VERSION, "No matching distribution found for tiny"),
    ),
    "no version: a package that is not there": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: 404 Client Error: "
        "Not Found for url: https://index/simple/tiny/ - skipping\n" + NOT_FOUND,
        (64, NO_VERSION, "No matching distribution found for tiny"),
    ),
    "no version: an index without an answer": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: "
        "HTTPSConnectionPool(host='index', port=443): Max retries exceeded with url: /simple/tiny/ - "
        "skipping\n" + NOT_FOUND,
        (
            69,
            NO_ANSWER,
            "Could not fetch URL https://index/simple/tiny/: HTTPSConnectionPool(host='index', port=443): Max "
            "retries exceeded with url: /simple/tiny/ - skipping",
        ),
    ),
    "no version: an index that is busy": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: 429 Client Error: "
        "Too Many Requests for url: https://index/simple/tiny/ - skipping\n" + NOT_FOUND,
        (
            69,
            NO_ANSWER,
            "Could not fetch URL https://index/simple/tiny/: 429 Client Error: Too Many Requests for url: "
            "https://index/simple/tiny/ - skipping",
        ),
    ),
    "no version: a login that is refused": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: 403 Client Error: "
        "Forbidden for url: https://index/simple/tiny/ - skipping\n" + NOT_FOUND,
        (
            69,
            REFUSED,
            "Could not fetch URL https://index/simple/tiny/: 403 Client Error: Forbidden for url: "
            "https://index/simple/tiny/ - skipping",
        ),
    ),
    "no version: an index that refuses without a login, which some do for what they do not have": (
        "2026-11-23T23:15:00,920 Could not fetch URL https://extra/simple/tiny/: 403 Client Error: Forbidden "
        "for url: https://extra/simple/tiny/ - skipping\n" + NOT_FOUND,
        (
            1,
            FORBIDDEN,
            "Could not fetch URL https://extra/simple/tiny/: 403 Client Error: Forbidden for url: "
            "https://extra/simple/tiny/ - skipping",
        ),
    ),
    "no version: such an index beside one whose login is refused": (
        "2026-11-23T23:15:00,920 Could not fetch URL https://extra/simple/tiny/: 403 Client Error: Forbidden "
        "for url: https://extra/simple/tiny/ - skipping\n"
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: 401 Client Error: "
        "Unauthorized for url: https://index/simple/tiny/ - skipping\n" + NOT_FOUND,
        (
            69,
            REFUSED,
            "Could not fetch URL https://index/simple/tiny/: 401 Client Error: Unauthorized for url: "
            "https://index/simple/tiny/ - skipping",
        ),
    ),
    "no version: such an index beside one without an answer": (
        "2026-11-23T23:15:00,920 Could not fetch URL https://extra/simple/tiny/: 403 Client Error: Forbidden "
        "for url: https://extra/simple/tiny/ - skipping\n"
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/tiny/: "
        "HTTPSConnectionPool(host='index', port=443): Max retries exceeded with url: /simple/tiny/ - "
        "skipping\n" + NOT_FOUND,
        (
            69,
            NO_ANSWER,
            "Could not fetch URL https://index/simple/tiny/: HTTPSConnectionPool(host='index', port=443): Max "
            "retries exceeded with url: /simple/tiny/ - skipping",
        ),
    ),
    "no version: an index that answers again": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/datasets/: "
        "HTTPSConnectionPool(host='index', port=443): Max retries exceeded with url: /simple/tiny/ - "
        "skipping\n"
        "2026-11-23T23:15:01,000 Collecting datasets\n" + NOT_FOUND,
        (64, NO_VERSION, "No matching distribution found for tiny"),
    ),
    "no version: a package that a folder has": (
        "2026-11-23T23:15:00,921 Could not fetch URL https://me:****@index/simple/datasets/: "
        "HTTPSConnectionPool(host='index', port=443): Max retries exceeded with url: /simple/tiny/ - "
        "skipping\n"
        "2026-11-23T23:15:01,000 Processing /wheels/datasets-3.0-py3-none-any.whl\n" + NOT_FOUND,
        (64, NO_VERSION, "No matching distribution found for tiny"),
    ),
    "an address: nothing is there": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "  ERROR: HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl\n"
        "ERROR: Could not install requirement tiny@ https://host/tiny-1.0-py3-none-any.whl from "
        "https://host/tiny-1.0-py3-none-any.whl because of HTTP error 404 Client Error: Not Found for url: "
        "https://host/tiny-1.0-py3-none-any.whl for URL https://host/tiny-1.0-py3-none-any.whl\n",
        (64, NOT_THERE, "HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "an address: an index that lists what it does not have": (
        "Collecting tiny\n"
        "  ERROR: HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl (from "
        "https://index/simple/tiny/)\n"
        "ERROR: Could not install requirement tiny from https://host/tiny-1.0-py3-none-any.whl because of "
        "HTTP error 404 Client Error: Not Found\n",
        (
            1,
            DAMAGED,
            "HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl (from "
            "https://index/simple/tiny/)",
        ),
    ),
    "an address: an index without the metadata that it lists": (
        "Collecting tiny\n"
        "  ERROR: HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl.metadata\n"
        "ERROR: 404 Client Error: Not Found for url: https://host/tiny-1.0-py3-none-any.whl.metadata\n",
        (1, DAMAGED, "HTTP error 404 while getting https://host/tiny-1.0-py3-none-any.whl.metadata"),
    ),
    "an address: an index that refuses the login for the metadata": (
        "Collecting tiny\n"
        "  ERROR: HTTP error 403 while getting https://host/tiny-1.0-py3-none-any.whl.metadata\n"
        "ERROR: 403 Client Error: Forbidden for url: https://host/tiny-1.0-py3-none-any.whl.metadata\n",
        (1, FORBIDDEN, "HTTP error 403 while getting https://host/tiny-1.0-py3-none-any.whl.metadata"),
    ),
    "an address: an index on the server of an address that is late": (
        "Collecting other\n"
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): "
        "Max retries exceeded with url: /other.whl (Caused by "
        "ReadTimeoutError(\"HTTPSConnectionPool(host='host', port=443): Read timed out. (read timeout=15)\"))\n",
        (
            69,
            NO_ANSWER,
            "Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
            "retries exceeded with url: /other.whl (Caused by ReadTimeoutError(\"HTTPSConnectionPool(host='host', "
            'port=443): Read timed out. (read timeout=15)"))',
        ),
    ),
    "an address: an index that is busy, beside an address": (
        "Collecting tiny\n"
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): "
        "Max retries exceeded with url: /other.whl.metadata (Caused by ResponseError('too many 502 error "
        "responses'))\n",
        (
            69,
            NO_ANSWER,
            "Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
            "retries exceeded with url: /other.whl.metadata (Caused by ResponseError('too many 502 error "
            "responses'))",
        ),
    ),
    "an address: a server that is busy, by pip 23": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "  ERROR: HTTP error 502 while getting https://host/tiny-1.0-py3-none-any.whl\n"
        "ERROR: Could not install requirement tiny@ https://host/tiny-1.0-py3-none-any.whl from "
        "https://host/tiny-1.0-py3-none-any.whl because of HTTP error 502 Server Error: Bad Gateway\n",
        (69, NO_ANSWER, "HTTP error 502 while getting https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "an address: a server that is busy, by pip 26": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): "
        "Max retries exceeded with url: /tiny-1.0-py3-none-any.whl (Caused by ResponseError('too many 502 "
        "error responses'))\n",
        (
            69,
            NO_ANSWER,
            "Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
            "retries exceeded with url: /tiny-1.0-py3-none-any.whl (Caused by ResponseError('too many 502 error "
            "responses'))",
        ),
    ),
    "an address: a mistyped server, by pip 23": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): "
        "Max retries exceeded with url: /tiny-1.0-py3-none-any.whl (Caused by NewConnectionError('Failed to "
        "establish a new connection: [Errno -2] Name or service not known'))\n",
        (
            69,
            NO_ANSWER,
            "Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
            "retries exceeded with url: /tiny-1.0-py3-none-any.whl (Caused by NewConnectionError('Failed to "
            "establish a new connection: [Errno -2] Name or service not known'))",
        ),
    ),
    "an address: a mistyped server, by pip 26": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "error: connection-failed\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Failed to connect to host while fetching https://host/tiny-1.0-py3-none-any.whl\n"
        "╰─> Failed to resolve IP address for 'host' ([Errno -2] Name or service not known)\n",
        (69, NO_ANSWER, "Failed to connect to host while fetching https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "an address: a server that stops amid a package, by pip 23": (
        "Collecting tiny\n"
        "ERROR: Exception:\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/dist-packages/pip/_vendor/urllib3/response.py", line 443, in '
        "_error_catcher\n"
        "    yield\n"
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='host', port=443): Read "
        "timed out.\n",
        (
            69,
            NO_ANSWER,
            "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='host', port=443): Read "
            "timed out.",
        ),
    ),
    "an address: a server that stops amid a package, by pip 26": (
        "error: incomplete-download\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Download failed after 6 attempts because not enough bytes were received (0 bytes/100 bytes)\n"
        "╰─> URL: https://host/tiny-1.0-py3-none-any.whl\n",
        (
            69,
            NO_ANSWER,
            "Download failed after 6 attempts because not enough bytes were received (0 bytes/100 bytes)",
        ),
    ),
    "an address: an address that needs a login, or is not there": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "  ERROR: HTTP error 403 while getting https://host/tiny-1.0-py3-none-any.whl\n",
        (1, FORBIDDEN, "HTTP error 403 while getting https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "an address: another platform": (
        "ERROR: tiny-1.0-cp27-cp27m-win32.whl is not a supported wheel on this platform.\n",
        (64, OTHER_PYTHON, "tiny-1.0-cp27-cp27m-win32.whl is not a supported wheel on this platform."),
    ),
    "an address: another Python": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "  Downloading https://host/tiny-1.0-py3-none-any.whl (780 bytes)\n"
        "ERROR: Package 'tiny' requires a different Python: 3.11.7 not in '>=3.99'\n",
        (64, OTHER_PYTHON, "Package 'tiny' requires a different Python: 3.11.7 not in '>=3.99'"),
    ),
    "an address: a file that is not there": (
        "Processing /nowhere/tiny.whl\n"
        "ERROR: Could not install packages due to an OSError: [Errno 2] No such file or directory: "
        "'/nowhere/tiny.whl'\n"
        "\n",
        (
            64,
            NOT_THERE,
            "Could not install packages due to an OSError: [Errno 2] No such file or directory: "
            "'/nowhere/tiny.whl'",
        ),
    ),
    "an address: a folder that is no package": (
        "ERROR: tiny@ file:///code from file:///code does not appear to be a Python project: neither "
        "'setup.py' nor 'pyproject.toml' found.\n",
        (
            64,
            NOT_THERE,
            "tiny@ file:///code from file:///code does not appear to be a Python project: neither 'setup.py' nor "
            "'pyproject.toml' found.",
        ),
    ),
    "an address: another file than was pinned": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the "
        "package versions, please update the hashes.\n"
        "    tiny@ https://host/tiny-1.0-py3-none-any.whl#sha256=00 from "
        "https://host/tiny-1.0-py3-none-any.whl#sha256=00:\n"
        "        Expected sha256 00\n"
        "             Got        46\n",
        (
            1,
            DAMAGED,
            "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package "
            "versions, please update the hashes.",
        ),
    ),
    "an address: another file than the index says, which may be a part of it": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n"
        "    tiny from https://host/tiny-1.0-py3-none-any.whl#sha256=00:\n"
        "        Expected sha256 00\n"
        "             Got        46\n",
        (1, DAMAGED, "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."),
    ),
    "an address: a certificate that nobody trusts, by pip 23": (
        "Collecting tiny@ https://host/tiny-1.0-py3-none-any.whl\n"
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): "
        "Max retries exceeded with url: /tiny.whl (Caused by SSLError(SSLCertVerificationError(1, '[SSL: "
        "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)')))\n",
        (
            1,
            UNTRUSTED,
            "Could not install packages due to an OSError: HTTPSConnectionPool(host='host', port=443): Max "
            "retries exceeded with url: /tiny.whl (Caused by SSLError(SSLCertVerificationError(1, '[SSL: "
            "CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)')))",
        ),
    ),
    "an address: a certificate that nobody trusts, by pip 26": (
        "error: ssl-verification-failed\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Failed to establish a secure connection to host while fetching "
        "https://host/tiny-1.0-py3-none-any.whl\n"
        "╰─> [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate "
        "(_ssl.c:1006)\n",
        (
            1,
            UNTRUSTED,
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)",
        ),
    ),
    "an address: a server that closes the connection, by pip 26": (
        "error: connection-failed\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Failed to connect to host while fetching https://host/tiny-1.0-py3-none-any.whl\n"
        "╰─> the connection was closed without a reply from the server.\n"
        "\n"
        "hint: Are you connected to the Internet?\n",
        (69, NO_ANSWER, "Failed to connect to host while fetching https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "an address: a server that is late, by pip 26": (
        "error: connection-timeout\n"
        "\n"
        "\N{MULTIPLICATION SIGN} Unable to fetch https://host/tiny-1.0-py3-none-any.whl\n"
        "╰─> host didn't respond within 15 seconds\n",
        (69, NO_ANSWER, "Unable to fetch https://host/tiny-1.0-py3-none-any.whl"),
    ),
    "a repository: a mistyped one": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: repository 'https://host/a.git/' not found\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (1, FORBIDDEN, "fatal: repository 'https://host/a.git/' not found"),
    ),
    "a repository: one that needs a login, with a terminal or without": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: could not read Username for 'https://host': No such device or address\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (1, FORBIDDEN, "fatal: could not read Username for 'https://host': No such device or address"),
    ),
    "a repository: one that is forbidden": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': The requested URL returned error: 403\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (
            1,
            FORBIDDEN,
            "fatal: unable to access 'https://host/a.git/': The requested URL returned error: 403",
        ),
    ),
    "a repository: a folder that is none": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: '/nowhere/a.git' does not appear to be a git repository\n"
        "  fatal: Could not read from remote repository.\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (1, FORBIDDEN, "fatal: '/nowhere/a.git' does not appear to be a git repository"),
    ),
    "a repository: a login that is refused": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: Authentication failed for 'https://host/a.git/'\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (69, REFUSED, "fatal: Authentication failed for 'https://host/a.git/'"),
    ),
    "a repository: a mistyped tag": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  error: pathspec 'nope' did not match any file(s) known to git\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git checkout -q nope\n",
        (64, NOT_THERE, "error: pathspec 'nope' did not match any file(s) known to git"),
    ),
    "a repository: a commit that is not there": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: remote error: upload-pack: not our ref ffff\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git fetch -q https://host/a.git ffff\n",
        (64, NOT_THERE, "fatal: remote error: upload-pack: not our ref ffff"),
    ),
    "a repository: a certificate that nobody trusts": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': server certificate verification failed. CAfile: "
        "none CRLfile: none\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (
            1,
            UNTRUSTED,
            "fatal: unable to access 'https://host/a.git/': server certificate verification failed. CAfile: none "
            "CRLfile: none",
        ),
    ),
    "a repository: a server that cannot be reached": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': Failed to connect to host port 443 after 0 ms: "
        "Couldn't connect to server\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (
            69,
            NO_ANSWER,
            "fatal: unable to access 'https://host/a.git/': Failed to connect to host port 443 after 0 ms: "
            "Couldn't connect to server",
        ),
    ),
    "a repository: a server without an answer": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': Empty reply from server\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (69, NO_ANSWER, "fatal: unable to access 'https://host/a.git/': Empty reply from server"),
    ),
    "a repository: a server that is busy": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': The requested URL returned error: 429\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (
            69,
            NO_ANSWER,
            "fatal: unable to access 'https://host/a.git/': The requested URL returned error: 429",
        ),
    ),
    "a repository: a proxy without an answer": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': CONNECT tunnel failed, response 501\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (69, NO_ANSWER, "fatal: unable to access 'https://host/a.git/': CONNECT tunnel failed, response 501"),
    ),
    "a repository: a connection that breaks": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.\n"
        "  fatal: early EOF\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (69, NO_ANSWER, "error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function."),
    ),
    "a repository: anything else": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': Unsupported proxy syntax\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  ERROR: Failed to build 'tiny' when git clone --filter=blob:none --quiet https://host/a.git "
        "/tmp/pip-install-3fpt0oav/tiny_481a\n",
        (1, NO_REPOSITORY, "fatal: unable to access 'https://host/a.git/': Unsupported proxy syntax"),
    ),
    "an image without git": (
        "  ERROR: Error [Errno 2] No such file or directory: 'git' while executing command git version\n"
        "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?\n",
        (64, NO_GIT, "Cannot find command 'git' - do you have 'git' installed and in your PATH?"),
    ),
    "a repository that cannot be fetched, by pip 23": (
        "Collecting tiny@ git+https://host/a.git\n"
        "  fatal: unable to access 'https://host/a.git/': Unsupported proxy syntax\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "  error: subprocess-exited-with-error\n"
        "\n"
        "\N{MULTIPLICATION SIGN} git clone --filter=blob:none --quiet https://host/a.git /tmp/pip-install-3fpt0oav/tiny_481a did "
        "not run successfully.\n"
        "│ exit code: 128\n"
        "╰─> See above for output.\n"
        "\n"
        "note: This error originates from a subprocess, and is likely not a problem with pip.\n",
        (1, NO_REPOSITORY, "fatal: unable to access 'https://host/a.git/': Unsupported proxy syntax"),
    ),
}


@pytest.mark.parametrize(("log", "expected"), LOGS.values(), ids=LOGS)
def test_what_is_told_of_the_end_of_a_log(log: str, expected: tuple[int, str, str]) -> None:
    code, advice, line = expected
    failure = installer.explain_failure(installer.find_last_lines(log))
    message = f"{advice}: {line}" if advice is FAILED else f"{advice} ({line})"
    assert (failure.code, str(failure)) == (code, message)
