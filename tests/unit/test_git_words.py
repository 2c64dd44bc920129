"""The pods that fetch code and those that install packages judge git's words in the same way, though neither can import the other."""

from __future__ import annotations

import pytest

from finetune_crds import contract
from finetune_operator.finetunejob.pods import installer
from finetune_trainer.pod import checkout

URL = "https://host/a.git"
AT = f"fatal: unable to access '{URL}/': "
# What git says, and whether the attempt counts: another one may find a server that answers.
SENTENCES: dict[str, tuple[str, bool]] = {
    "no such host": (f"{AT}Could not resolve host: host", False),
    "no such proxy": (f"{AT}Could not resolve proxy: proxy", False),
    "nothing listens": (
        f"{AT}Failed to connect to host port 443 after 0 ms: Couldn't connect to server",
        False,
    ),
    "no route": (f"{AT}Failed to connect to host port 443: No route to host", False),
    "no connection, by an old curl": (f"{AT}Failed connect to host:443; Operation now in progress", False),
    "no connection in time": (
        f"{AT}Failed to connect to host port 443 after 130 ms: Connection timed out",
        False,
    ),
    "a connection that is closed": (f"{AT}Empty reply from server", False),
    "a connection that is reset": (f"{AT}Recv failure: Connection reset by peer", False),
    "a server that is slow": (
        f"{AT}Operation too slow. Less than 1000 bytes/sec transferred the last 60 seconds",
        False,
    ),
    "TLS that ends early": (
        f"{AT}gnutls_handshake() failed: The TLS connection was non-properly terminated.",
        False,
    ),
    "TLS that ends early, by OpenSSL": (
        f"{AT}OpenSSL SSL_connect: SSL_ERROR_SYSCALL in connection to host:443",
        False,
    ),
    "TLS that ends early, by OpenSSL 3": (
        f"{AT}OpenSSL SSL_read: error:0A000126:SSL routines::unexpected eof while reading, errno 0",
        False,
    ),
    "TLS that breaks": (f"{AT}gnutls_handshake() failed: Error in the pull function.", False),
    "no TLS in time": (f"{AT}SSL connection timeout", False),
    "a stream that breaks": (
        f"{AT}HTTP/2 stream 5 was not closed cleanly: INTERNAL_ERROR (err 2)",
        False,
    ),
    "a request that breaks": (f"{AT}Send failure: Broken pipe", False),
    "no address in time": (f"{AT}Resolving timed out after 5000 milliseconds", False),
    "a request that was late": (f"{AT}The requested URL returned error: 408", False),
    "a tunnel that breaks": (f"{AT}Proxy CONNECT aborted", False),
    "a server that is busy": (f"{AT}The requested URL returned error: 429", False),
    "a proxy that is up alone": (f"{AT}The requested URL returned error: 503", False),
    "a tunnel that is refused": (f"{AT}CONNECT tunnel failed, response 502", False),
    "a tunnel that is refused, by an old curl": (
        f"{AT}Received HTTP code 503 from proxy after CONNECT",
        False,
    ),
    "a transfer that breaks": (
        "error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.\n"
        "fetch-pack: unexpected disconnect while reading sideband packet\nfatal: early EOF\n"
        "fatal: fetch-pack: invalid index-pack output",
        False,
    ),
    "a request that fails": (
        "error: RPC failed; HTTP 504 curl 22 The requested URL returned error: 504\nfatal: the remote end hung up unexpectedly",
        False,
    ),
    "nothing listens for ssh": (
        "ssh: connect to host host port 22: Connection refused\nfatal: Could not read from remote repository.",
        False,
    ),
    "a mistyped repository": (f"fatal: repository '{URL}/' not found", True),
    "a commit that is not there": ("fatal: remote error: upload-pack: not our ref ffff", True),
    "a certificate that nobody trusts": (
        f"{AT}server certificate verification failed. CAfile: none CRLfile: none",
        True,
    ),
    "a mistyped proxy": (f"{AT}Unsupported proxy syntax in 'host:port:1'", True),
    "a number that is no status": ("fatal: remote error: 5031 objects are missing", True),
    "a full node": ("fatal: write error: No space left on device", True),
    "nothing that is known": ("fatal: the remote end hung up unexpectedly", True),
}


@pytest.mark.parametrize(("said", "counts"), SENTENCES.values(), ids=SENTENCES)
def test_code_and_packages_wait_for_the_same_servers(said: str, counts: bool) -> None:
    of_packages = installer.explain_failure([*said.splitlines(), "error: subprocess-exited-with-error"]).code
    of_code = checkout._classify_failure(URL, said).exit_code
    assert [code != contract.EXIT_UNAVAILABLE for code in (of_packages, of_code)] == [counts, counts]


def test_a_login_that_is_sent_and_refused_is_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_GIT_PASSWORD, "wrong")
    said = f"fatal: Authentication failed for '{URL}/'"
    codes = {installer.explain_failure([said]).code, checkout._classify_failure(URL, said).exit_code}
    assert codes == {contract.EXIT_UNAVAILABLE}
