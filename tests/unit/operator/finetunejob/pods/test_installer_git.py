"""What git says of a requirement's repository that cannot be had, and what is told of it."""

from __future__ import annotations

import pytest

from finetune_operator.finetunejob.pods import installer

UNTRUSTED = (
    "a server shows a certificate that the image does not trust: mount that of its authority, and name the file in PIP_CERT, "
    "and in GIT_SSL_CAINFO for git ({})"
)
CLONE = "git clone --filter=blob:none --quiet https://host/a.git /tmp/pip-install-3fpt0oav/tiny_481a"
ENDS = {
    "pip 23": (
        "error: subprocess-exited-with-error\n\n\N{MULTIPLICATION SIGN} {} did not run successfully.\n│ exit code: 128\n"
        "╰─> See above for output.\n\nnote: This error originates from a subprocess, and is likely not a problem with pip.\n"
    ),
    "pip 26": "ERROR: Failed to build 'tiny' when {}\n",
}
NO_REPOSITORY = (
    "the repository of a requirement does not exist, or needs a login that git does not have: correct its address, or "
    "name the package of an index ({})"
)
NO_REVISION = (
    "the repository of a requirement has no such branch, tag or commit: correct the requirement ({})"
)
NO_SERVER = (
    "the server of a requirement does not answer: check its address, and that the pods may reach it ({})"
)
AT = "unable to access 'https://host/a.git/': "

# What git says, the command of git that fails, and what is told.
REPOSITORIES: dict[str, tuple[str, str, tuple[int, str]]] = {
    "a mistyped one": (
        "fatal: repository 'https://host/a.git/' not found",
        CLONE,
        (1, NO_REPOSITORY.format("repository 'https://host/a.git/' not found")),
    ),
    "one that needs a login, with a terminal or without": (
        "fatal: could not read Username for 'https://host': No such device or address",
        CLONE,
        (1, NO_REPOSITORY.format("could not read Username for 'https://host': No such device or address")),
    ),
    "one that is forbidden": (
        f"fatal: {AT}The requested URL returned error: 403",
        CLONE,
        (1, NO_REPOSITORY.format(f"{AT}The requested URL returned error: 403")),
    ),
    "a folder that is none": (
        "fatal: '/nowhere/a.git' does not appear to be a git repository\n  fatal: Could not read from remote repository.",
        CLONE,
        (1, NO_REPOSITORY.format("'/nowhere/a.git' does not appear to be a git repository")),
    ),
    "a login that is refused": (
        "fatal: Authentication failed for 'https://host/a.git/'",
        CLONE,
        (
            69,
            "the server of a requirement refuses the login of git: correct it (Authentication failed for 'https://host/a.git/')",
        ),
    ),
    "a mistyped tag": (
        "error: pathspec 'nope' did not match any file(s) known to git",
        "git checkout -q nope",
        (64, NO_REVISION.format("pathspec 'nope' did not match any file(s) known to git")),
    ),
    "a commit that is not there": (
        "fatal: remote error: upload-pack: not our ref ffff",
        "git fetch -q https://host/a.git ffff",
        (64, NO_REVISION.format("not our ref ffff")),
    ),
    "a certificate that nobody trusts": (
        f"fatal: {AT}server certificate verification failed. CAfile: none CRLfile: none",
        CLONE,
        (1, UNTRUSTED.format("certificate verification failed. CAfile: none CRLfile: none")),
    ),
    "a server that cannot be reached": (
        f"fatal: {AT}Failed to connect to host port 443 after 0 ms: Couldn't connect to server",
        CLONE,
        (
            69,
            NO_SERVER.format(
                f"{AT}Failed to connect to host port 443 after 0 ms: Couldn't connect to server"
            ),
        ),
    ),
    "a server without an answer": (
        f"fatal: {AT}Empty reply from server",
        CLONE,
        (69, NO_SERVER.format(f"{AT}Empty reply from server")),
    ),
    "a server that is busy": (
        f"fatal: {AT}The requested URL returned error: 429",
        CLONE,
        (69, NO_SERVER.format(f"{AT}The requested URL returned error: 429")),
    ),
    "a proxy without an answer": (
        f"fatal: {AT}CONNECT tunnel failed, response 501",
        CLONE,
        (69, NO_SERVER.format(f"{AT}CONNECT tunnel failed, response 501")),
    ),
    "a connection that breaks": (
        "error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.\n  fatal: early EOF",
        CLONE,
        (69, NO_SERVER.format("RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.")),
    ),
    "anything else": (
        f"fatal: {AT}Unsupported proxy syntax",
        CLONE,
        (
            1,
            f"the repository of a requirement cannot be fetched: correct the requirement ({AT}Unsupported proxy syntax)",
        ),
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(("message", "command", "expected"), REPOSITORIES.values(), ids=REPOSITORIES)
def test_what_git_says_of_a_repository(
    message: str, command: str, end: str, expected: tuple[int, str]
) -> None:
    output = f"Collecting tiny@ git+https://host/a.git\n  {message}\n  error: subprocess-exited-with-error\n\n  {end.format(command)}"
    failure = installer.explain_failure(output)
    assert (failure.code, str(failure)) == expected


def test_an_image_without_git() -> None:
    output = (
        "  ERROR: Error [Errno 2] No such file or directory: 'git' while executing command git version\n"
        "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?\n"
    )
    failure = installer.explain_failure(output)
    assert (failure.code, str(failure)) == (
        64,
        "the image has no git, which a requirement needs: use an image that has it, or name the package of an index",
    )
