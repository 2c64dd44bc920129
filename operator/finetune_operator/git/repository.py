"""Which commit a branch or a tag of a repository is at: Git's protocol over HTTPS, version 2 or 0.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/protocol-v2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason
from finetune_operator.bounded import ANONYMOUS, Login, Take, UnansweredError, fetch
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.git import packets
from finetune_operator.git.refs import Advertisement, Listing, Ref

_SERVICE = "git-upload-pack"
_VERSION_2 = {"Git-Protocol": "version=2"}
# Servers of version 0 send all their refs: those of the largest public repositories are some MB. Servers of version 2 are told
# which prefixes are wanted, but may send the others too.
_MOST_BYTES = 32 * 2**20
_HEADS, _TAGS = "refs/heads/", "refs/tags/"
_BRANCH = re.compile(r"refs/heads/[A-Za-z0-9._/+@-]{1,253}")
_SHORT_COMMIT = re.compile(r"[0-9a-fA-F]{7,39}")


@dataclass(frozen=True)
class Resolved:
    """A commit, and the branch that was asked for, where it was one."""

    commit: str
    branch: str | None = None


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
        refs = await self._refs(revision)
        for name in _candidates(revision):
            ref = refs.get(name)
            if ref:
                return Resolved(ref.peeled or ref.commit, _branch(ref.target or name))
        hint = ": a commit needs all its digits" if _SHORT_COMMIT.fullmatch(revision) else ""
        remedy = "push it, or apply a job with another name and another spec.trainer.code.git.revision"
        raise self._problem(
            ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag {revision}{hint}: {remedy}"
        )

    async def _refs(self, revision: str) -> Mapping[str, Ref]:
        """Those of the refs that the revision may stand for which exist, by their full names."""
        names = _candidates(revision)
        first, listing = Advertisement(names), Listing(names)
        try:
            await self._ask(f"/info/refs?service={_SERVICE}", first.take)
            first.end()
            if not first.version_2:
                return first.found
            arguments = ["peel", "symrefs", *(f"ref-prefix {name}" for name in names)]
            body = packets.request(["command=ls-refs"], arguments)
            await self._ask(f"/{_SERVICE}", listing.take, body)
            listing.end()
        except packets.RefusedError:
            raise self._problem(
                ConditionReason.GIT_ERROR,
                "answers with an error of its own, and is asked again: read the log of the server, or check the address",
            ) from None
        except packets.PacketError:
            raise self._problem(
                ConditionReason.GIT_ERROR, "answers, but not as a Git server: check the address"
            ) from None
        return listing.found

    async def _ask(self, path: str, take: Take, body: bytes | None = None) -> None:
        headers = dict(_VERSION_2)
        if body is not None:
            headers["Content-Type"] = f"application/x-{_SERVICE}-request"
        url = self.url.rstrip("/") + path
        try:
            status = await fetch(
                url, headers=headers, login=self.login, body=body, most_bytes=_MOST_BYTES, take=take
            )
        except UnansweredError as error:
            raise self._problem(ConditionReason.GIT_UNREACHABLE, f"cannot be reached: {error}") from None
        self._check(status)

    def _check(self, status: int) -> None:
        """Raise what a status other than 200 means."""
        if status == 200:
            return
        if status in (401, 403, 404):
            # Servers say of a private repository that it does not exist.
            remedy = "check the Secret in" if self.login.password else "name a Secret in"
            raise self._problem(
                ConditionReason.GIT_FORBIDDEN,
                f"does not exist, or needs another login: check the address, and {remedy} spec.trainer.code.git.secretRef "
                f"(HTTP {status})",
            )
        if 300 <= status < 400:
            raise self._problem(
                ConditionReason.GIT_ERROR,
                f"is at another address, which usually ends in .git: apply a job with that one and another name (HTTP {status})",
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
