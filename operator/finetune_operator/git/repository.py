"""Resolves a branch or a tag of a repository to its commit: Git's protocol over HTTPS, version 2 or 0.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/protocol-v2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason
from finetune_operator import metrics
from finetune_operator.bounded import ANONYMOUS, BodyConsumer, Login, NoResponseError, fetch
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.git import packets
from finetune_operator.git.refs import Advertisement, Listing, Ref

_SERVICE = "git-upload-pack"
_VERSION_2 = {"Git-Protocol": "version=2"}
# Servers of version 0 send all their refs, which are some MB for the largest public repositories. A request of version 2 names the
# requested prefixes, but the server may send other refs too.
_MAX_RESPONSE_BYTES = 32 * 2**20
_HEADS, _TAGS = "refs/heads/", "refs/tags/"
_BRANCH = re.compile(r"refs/heads/[A-Za-z0-9._/+@-]{1,253}")
_SHORT_COMMIT = re.compile(r"[0-9a-fA-F]{7,39}")


@dataclass(frozen=True)
class Resolved:
    """A commit, and the branch if the revision is a branch."""

    commit: str
    branch: str | None = None


@dataclass(frozen=True)
class Repository:
    """A repository and how to log in."""

    url: str
    login: Login = ANONYMOUS

    async def resolve(self, revision: str) -> Resolved:
        """The commit of a branch or a tag. A branch takes precedence over a tag of the same name, as in `git clone --branch`.

        Raises:
            ExternalError: the server cannot be reached, denies access, or has no such revision.
        """
        refs = await self._fetch_refs(revision)
        for name in _list_candidates(revision):
            ref = refs.get(name)
            if ref:
                # An annotated tag has a peeled commit, and HEAD has a branch as its target.
                return Resolved(ref.peeled or ref.commit, _parse_branch(ref.target or name))
        remedy = (
            f"if {revision} is an abbreviated commit, create a FineTuneJob with another name, and set its "
            "spec.trainer.code.git.revision to the full hash of the commit; otherwise push the revision"
            if _SHORT_COMMIT.fullmatch(revision)
            else "push the revision, or create a FineTuneJob with another name and another spec.trainer.code.git.revision"
        )
        raise self._error(ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag {revision}: {remedy}")

    async def _fetch_refs(self, revision: str) -> Mapping[str, Ref]:
        """The existing refs that the revision may name, by full name."""
        names = _list_candidates(revision)
        advertisement, listing = Advertisement(names), Listing(names)
        try:
            await self._fetch(f"/info/refs?service={_SERVICE}", advertisement.take)
            advertisement.end()
            if not advertisement.version_2:
                return advertisement.refs
            arguments = ["peel", "symrefs", *(f"ref-prefix {name}" for name in names)]
            body = packets.encode_request(["command=ls-refs"], arguments)
            await self._fetch(f"/{_SERVICE}", listing.take, body)
            listing.end()
        except packets.RefusedError:
            raise self._error(
                ConditionReason.GIT_ERROR,
                "returned an error, and the operator retries: read the log of the server, or check the address",
            ) from None
        except packets.PacketError:
            raise self._error(
                ConditionReason.GIT_ERROR, "does not respond like a Git server: check the address"
            ) from None
        return listing.refs

    async def _fetch(self, path: str, take: BodyConsumer, body: bytes | None = None) -> None:
        """Send a GET, or a POST if there is a body, and give the body of the response to `take`.

        Raises:
            ExternalError: the server cannot be reached, or its status is not 200.
        """
        headers = dict(_VERSION_2)
        if body is not None:
            headers["Content-Type"] = f"application/x-{_SERVICE}-request"
        url = self.url.rstrip("/") + path
        try:
            with metrics.measuring_request("Git") as sent:
                status = sent.status = await fetch(
                    url,
                    headers=headers,
                    login=self.login,
                    body=body,
                    max_bytes=_MAX_RESPONSE_BYTES,
                    take=take,
                )
        except NoResponseError as error:
            raise self._error(ConditionReason.GIT_UNREACHABLE, f"cannot be reached: {error}") from None
        self._check_status(status)

    def _check_status(self, status: int) -> None:
        """Raise an error for a status other than 200."""
        if status == 200:
            return
        if status in (401, 403, 404):
            # To clients without access, servers answer that a private repository does not exist.
            remedy = "check the Secret in" if self.login.password else "name a Secret in"
            raise self._error(
                ConditionReason.GIT_FORBIDDEN,
                f"does not exist, or requires other credentials: check the address, and {remedy} spec.trainer.code.git.secretRef "
                f"(HTTP {status})",
            )
        if 300 <= status < 400:
            raise self._error(
                ConditionReason.GIT_ERROR,
                "redirects requests: create a FineTuneJob with another name and the final address, which usually ends in .git "
                f"(HTTP {status})",
            )
        if status == 429 or status >= 500:
            raise self._error(ConditionReason.GIT_UNREACHABLE, f"cannot be reached: HTTP {status}")
        raise self._error(
            ConditionReason.GIT_ERROR,
            f"does not respond like a Git server: check the address (HTTP {status})",
        )

    def _error(self, reason: ConditionReason, what: str) -> ExternalError:
        return ExternalError(Problem(reason, f"the repository {self.url} {what}"))


def _list_candidates(revision: str) -> list[str]:
    """The full names of the refs that a revision may name, in order of precedence."""
    if revision == "HEAD" or revision.startswith("refs/"):
        return [revision]
    return [f"{_HEADS}{revision}", f"{_TAGS}{revision}"]


def _parse_branch(name: str) -> str | None:
    """The branch of a ref; None for other refs, and for a branch name of unusual characters or length."""
    return name.removeprefix(_HEADS) if _BRANCH.fullmatch(name) else None
