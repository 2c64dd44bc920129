"""finetune-checkout URL COMMIT FOLDER: fetch one commit of a repository into a folder, with the image's git."""

from __future__ import annotations

import base64
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from finetune_crds import contract
from finetune_trainer.pod import exit_status

# git gives up after _SLOW_SECONDS with fewer than _SLOW_BYTES received per second.
_SLOW_BYTES, _SLOW_SECONDS = 1000, 60
# What git prints if the server does not send a commit by its hash.
_NOT_SENT = re.compile(r"not our ref|unadvertised object|reference is not a tree|couldn't find remote ref")
# What git prints if the server rejects the login, or requires one.
_NO_LOGIN = re.compile(r"Authentication failed|could not read (Username|Password)|error: 40[13]\b")
# What git prints if the server does not answer.
# NB: the operator's installer of packages has a copy of this expression, since neither can import the other. Change both.
_AWAY = re.compile(
    r"Could not resolve|Failed (?:to )?connect to|Empty reply from server|Connection (?:timed out|reset|refused)|"
    r"Operation too slow|RPC failed; curl|early EOF|[Rr]ecv error|non-properly terminated|unexpected disconnect|"
    r"SSL_ERROR_SYSCALL|unexpected eof|[Ee]rror in the pull function|was not closed cleanly|SSL connection timeout|"
    r"Broken pipe|Resolving timed out|CONNECT aborted|"
    r"error: (?:408|429|5\d\d)\b|HTTP (?:429|5\d\d)\b|(?:response|HTTP code) 5\d\d\b"
)
_MAX_MESSAGE_CHARS = 300
# Seconds between attempts to reach a server that does not answer, about six minutes in all.
_RETRY_DELAYS_SECONDS = (1, 2, 4, 8, 15, *[30] * 8)
# The hash function of a repository, by the number of digits of its commits.
_FORMATS = {40: "sha1", 64: "sha256"}


class CheckoutError(exit_status.PodFailure):
    """The code cannot be fetched. Another attempt may succeed; the failure uses up a restart."""

    def __init__(self, message: str) -> None:
        super().__init__(contract.CHECKOUT_FAILED, message)


class RefusedError(CheckoutError):
    """The server rejects the login that was sent. The attempt uses up no restart, since the Secret can be corrected while the job runs."""

    exit_code = contract.EXIT_UNAVAILABLE


class NoResponseError(CheckoutError):
    """The server does not answer now, but may answer later. The attempt uses up no restart."""

    exit_code = contract.EXIT_UNAVAILABLE


class NoCommitError(CheckoutError):
    """The repository has no such commit, and will not have it."""

    exit_code = contract.EXIT_RECIPE


def checkout(url: str, commit: str, folder: Path) -> None:
    """Make the folder a working tree of a commit, without the history before it, and without submodules.

    Raises:
        NoCommitError: the repository does not have the commit.
        NoResponseError: the server does not answer.
        RefusedError: the server rejects the login.
        CheckoutError: the code cannot be fetched for another reason.
    """
    git = _Git(folder, _build_git_config(url))
    # NB: the kubelet may run an init container again, and a run that was killed leaves lock files in .git.
    shutil.rmtree(folder / ".git", ignore_errors=True)
    git("init", "--quiet", f"--object-format={_FORMATS[len(commit)]}")
    git("remote", "add", "origin", url)
    _fetch(git, url, commit)
    # The call returns a text only if git fails: then the commit does not exist.
    if git("cat-file", "-e", f"{commit}^{{commit}}", may_fail=True):
        message = f"the repository {url} does not have commit {commit}: create the job with a commit that exists, a branch or a tag"
        raise NoCommitError(message)
    git("checkout", "--quiet", "--force", "--detach", commit)
    _grant_access(folder)


def _fetch(git: _Git, url: str, commit: str) -> None:
    """Fetch a commit; while the server does not answer, retry in this pod, so that the gang keeps its nodes.

    Raises:
        NoResponseError: the server did not answer any attempt.
        CheckoutError: the commit cannot be fetched for another reason.
    """
    for delay in _RETRY_DELAYS_SECONDS:
        try:
            return _fetch_once(git, url, commit)
        except NoResponseError as error:
            seconds = delay * random.uniform(1, 1.5)  # noqa: S311 - so that not all pods ask at once
            print(f"{error}; retrying in {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(seconds)
    return _fetch_once(git, url, commit)


def _fetch_once(git: _Git, url: str, commit: str) -> None:
    errors = git("fetch", "--quiet", "--depth=1", "--no-tags", "origin", commit, may_fail=True)
    if _NOT_SENT.search(errors):
        # Some servers send only commits at the tips of branches and tags, so fetch all of these: their history contains the commit.
        errors = git(
            "fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*", may_fail=True
        )
    if errors:
        raise _classify_failure(url, errors)


def _classify_failure(url: str, errors: str) -> CheckoutError:
    """Return the error for what git printed."""
    line = errors.strip().splitlines()[-1][:_MAX_MESSAGE_CHARS]
    if _AWAY.search(errors):
        return NoResponseError(f"the repository {url} cannot be fetched: {line}")
    is_login_required = _NO_LOGIN.search(errors) is not None
    if is_login_required or "not found" in errors:
        # NB: many servers also ask for a login if the repository does not exist. So only a login that was sent counts as rejected.
        password = _read_password()
        error_type = RefusedError if is_login_required and password else CheckoutError
        remedy = "check the Secret in" if password else "name a Secret with credentials in"
        return error_type(
            f"the repository {url} does not exist, or requires other credentials: {remedy} spec.trainer.code.git.secretRef ({line})"
        )
    return CheckoutError(f"the repository {url} cannot be fetched: {line}")


def _read_password() -> str:
    """Return the password of the login; empty if there is none."""
    return os.environ.get(contract.ENV_GIT_PASSWORD, "").strip()


def _grant_access(folder: Path) -> None:
    """Let any user read and write the files: the container that runs the user's command may have another user."""
    # Only the owner of a file may change its mode.
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and path.stat().st_uid == os.getuid():
            path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))


def _build_git_config(url: str) -> dict[str, str]:
    """Return git's configuration as environment variables, so that the password is in no command line and in no file.

    The password is sent only to the address of the repository, and not after a redirect.
    """
    git_config = {
        # The folder is a volume of another user, which git would refuse to use.
        "safe.directory": "*",
        "http.followRedirects": "false",
        "http.lowSpeedLimit": str(_SLOW_BYTES),
        "http.lowSpeedTime": str(_SLOW_SECONDS),
        "advice.detachedHead": "false",
        "init.defaultBranch": "main",
    }
    password = _read_password()
    if password:
        name = os.environ.get(contract.ENV_GIT_USERNAME, "").strip() or "git"
        login = base64.b64encode(f"{name}:{password}".encode()).decode()
        git_config[f"http.{url}.extraHeader"] = f"Authorization: Basic {login}"
    variables = {"GIT_CONFIG_COUNT": str(len(git_config))}
    for number, (key, value) in enumerate(git_config.items()):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


@dataclass(frozen=True)
class _Git:
    """git in a folder, with its own settings: it ignores the settings of the system and of the user."""

    folder: Path
    settings: dict[str, str]

    def __call__(self, *arguments: str, may_fail: bool = False) -> str:
        """Run git; return what it prints if it fails, and an empty text otherwise.

        Raises:
            CheckoutError: git failed, and `may_fail` is not set.
        """
        variables = {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        # Python's clients read this variable, but git does not.
        if os.environ.get("SSL_CERT_FILE"):
            variables["GIT_SSL_CAINFO"] = os.environ.get("GIT_SSL_CAINFO") or os.environ["SSL_CERT_FILE"]
        hidden = (contract.ENV_GIT_USERNAME, contract.ENV_GIT_PASSWORD)
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        process = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env={**inherited, **variables, **self.settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode == 0:
            return ""
        output = process.stderr.strip() or f"git {arguments[0]} ended with exit code {process.returncode}"
        if not may_fail:
            raise CheckoutError(f"git {arguments[0]} failed: {output.splitlines()[-1][:_MAX_MESSAGE_CHARS]}")
        return output


def main() -> None:
    """Check out the commit that the command line names, and exit."""
    url, commit, folder = sys.argv[1:]
    exit_status.exit_on_sigterm()

    def fetch() -> None:
        checkout(url, commit, Path(folder))
        print(f"{folder} has commit {commit} of {url}", flush=True)

    sys.exit(exit_status.run(fetch))


if __name__ == "__main__":
    main()
