"""Which commit a branch or a tag of a repository is at: Git's protocol over HTTPS, version 2 or 0.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/protocol-v2
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason
from finetune_operator.bounded import ANONYMOUS, Login, Response, UnansweredError, fetch
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.git import packets

_SERVICE = "git-upload-pack"
_VERSION_2 = {"Git-Protocol": "version=2"}
# Servers of version 0 send all their refs: those of the largest public repositories are some MB.
_MOST_BYTES = 32 * 2**20
_HEADS, _TAGS = "refs/heads/", "refs/tags/"
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_BRANCH = re.compile(r"refs/heads/[A-Za-z0-9._/+@-]{1,253}")
_SHORT_COMMIT = re.compile(r"[0-9a-fA-F]{7,39}")


@dataclass(frozen=True)
class Resolved:
    """A commit, and the branch that was asked for, where it was one."""

    commit: str
    branch: str | None = None


@dataclass(frozen=True)
class _Ref:
    """A name and what it is at; `peeled` is the commit of an annotated tag; `target` is the branch that HEAD names."""

    name: str
    commit: str
    peeled: str = ""
    target: str = ""


@dataclass(frozen=True)
class Repository:
    """A repository and how to log in."""

    url: str
    login: Login = ANONYMOUS

    async def resolve(self, revision: str) -> Resolved:
        """The commit of a branch or a tag; of both of one name that of the branch, as `git clone --branch` takes it.

        Raises:
            ExternalError: the server cannot be reached, does not let the operator in, or knows no such revision.
        """
        refs = {ref.name: ref for ref in await self._refs(revision)}
        for name in _candidates(revision):
            ref = refs.get(name)
            if ref:
                return Resolved(ref.peeled or ref.commit, _branch(ref.target or name))
        hint = ": a commit needs all its digits" if _SHORT_COMMIT.fullmatch(revision) else ""
        remedy = "push it, or create the job with another spec.trainer.code.git.revision"
        raise self._problem(
            ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag {revision}{hint}: {remedy}"
        )

    async def _refs(self, revision: str) -> list[_Ref]:
        first = await self._ask(f"/info/refs?service={_SERVICE}")
        try:
            lines = [*packets.lines(first)]
            if "version 2" not in lines:
                return [*_of_version_0(lines)]
            arguments = ["peel", "symrefs", *(f"ref-prefix {name}" for name in _candidates(revision))]
            answer = await self._ask(f"/{_SERVICE}", packets.request(["command=ls-refs"], arguments))
            return [*_of_version_2(packets.lines(answer))]
        except ValueError:
            raise self._problem(
                ConditionReason.GIT_ERROR, "answers, but not as a Git server: check the address"
            ) from None

    async def _ask(self, path: str, body: bytes | None = None) -> bytes:
        headers = dict(_VERSION_2)
        if body is not None:
            headers["Content-Type"] = f"application/x-{_SERVICE}-request"
        url = self.url.rstrip("/") + path
        try:
            response = await fetch(url, headers=headers, login=self.login, body=body, most_bytes=_MOST_BYTES)
        except UnansweredError as error:
            raise self._problem(ConditionReason.GIT_UNREACHABLE, f"cannot be reached: {error}") from None
        return self._accepted(response)

    def _accepted(self, response: Response) -> bytes:
        """The body of a response, if it is one of a Git server."""
        status = response.status
        if status == 200:
            return response.body
        if status in (401, 403, 404):
            # Servers say of a private repository that it does not exist.
            given = "check the Secret in" if self.login.password else "name a Secret in"
            raise self._problem(
                ConditionReason.GIT_FORBIDDEN,
                f"does not exist, or needs another login: check the address, and {given} spec.trainer.code.git.secretRef "
                f"(HTTP {status})",
            )
        if 300 <= status < 400:
            raise self._problem(
                ConditionReason.GIT_ERROR,
                f"is at another address, which usually ends in .git: create the job with that one (HTTP {status})",
            )
        if status == 429 or status >= 500:
            raise self._problem(ConditionReason.GIT_UNREACHABLE, f"cannot be reached: HTTP {status}")
        raise self._problem(
            ConditionReason.GIT_ERROR, f"answers, but not as a Git server: check the address (HTTP {status})"
        )

    def _problem(self, reason: ConditionReason, what: str) -> ExternalError:
        return ExternalError(Problem(reason, f"the repository {self.url} {what}"))


def _candidates(revision: str) -> list[str]:
    """The full names that a revision may stand for, the first first."""
    if revision == "HEAD" or revision.startswith("refs/"):
        return [revision]
    return [f"{_HEADS}{revision}", f"{_TAGS}{revision}"]


def _branch(name: str) -> str | None:
    """The branch of a ref, None where it is of something else, or of a name that nobody would choose."""
    return name.removeprefix(_HEADS) if _BRANCH.fullmatch(name) else None


def _of_version_2(lines: Iterator[str]) -> Iterator[_Ref]:
    """The refs of a response to ls-refs: object, name, and attributes."""
    for line in lines:
        commit, name, *attributes = line.split(" ")
        known = dict(item.split(":", 1) for item in attributes if ":" in item)
        if _COMMIT.fullmatch(commit):
            yield _Ref(name, commit, _commit(known.get("peeled", "")), known.get("symref-target", ""))


def _of_version_0(lines: list[str]) -> Iterator[_Ref]:
    """The refs that a server lists unasked. The first has the capabilities behind a NUL; `^{}` follows the name of a tag's commit.

    Raises:
        ValueError: it is no such list.
    """
    if not lines or not lines[0].startswith("# service="):
        raise ValueError("no list of refs")
    capabilities = lines[1].partition("\0")[2].split(" ") if len(lines) > 1 else []
    symbolic = dict(
        item.removeprefix("symref=").split(":", 1) for item in capabilities if item.startswith("symref=")
    )
    found: dict[str, _Ref] = {}
    for line in lines[1:]:
        commit, _, name = line.partition("\0")[0].partition(" ")
        if not _COMMIT.fullmatch(commit):
            raise ValueError("no ref")
        tag = found.get(name.removesuffix("^{}"))
        if name.endswith("^{}") and tag:
            found[tag.name] = _Ref(tag.name, tag.commit, commit)
        else:
            found[name] = _Ref(name, commit, target=symbolic.get(name, ""))
    yield from found.values()


def _commit(text: str) -> str:
    return text if _COMMIT.fullmatch(text) else ""
