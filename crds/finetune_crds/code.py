"""Your own training script: the source of its code, and its packages."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import ConfigDict, Field

from finetune_crds.base import LIST_TYPE_SET, ApiModel, Name, VolumeName, rules
from finetune_crds.env import LocalReference

FULL_COMMIT = re.compile(r"[0-9a-fA-F]{40}([0-9a-fA-F]{24})?")
"""Pattern of a full commit hash, SHA-1 or SHA-256. Such a revision needs no request to the server."""
# NB: requirements become arguments of a container, and Kubernetes expands $(NAME) in arguments. So a requirement cannot contain a $.
_PACKAGE_NAME = "[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?( *[[][A-Za-z0-9._, -]*[]])?"
_VERSIONS = "( *[(]?[<>=!~]=?[^@;$]*)?"
_ADDRESS = " *@ *(git[+])?(https|file)://[^ @$]*(@[A-Za-z0-9._/-]+)?"
_MARKER = "( *;[^$]*)?"
_REQUIREMENT = f"^{_PACKAGE_NAME}({_VERSIONS}|{_ADDRESS} ?){_MARKER}$"

Requirement = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        # The last rule accepts what an earlier rule refuses, so that the user sees only one error.
        json_schema_extra=rules(
            (
                "!self.startsWith('-')",
                "options of pip are not supported here: set variables such as PIP_INDEX_URL in pods.train.env or pods.train.envFrom",
            ),
            (
                "!self.matches('://[^/]*@')",
                "the address contains a user or a password: publish the package in an index, and set PIP_INDEX_URL with the credentials in a Secret of pods.train.envFrom",
            ),
            (
                f"self.startsWith('-') || self.matches('://[^/]*@') || self.matches('{_REQUIREMENT}')",
                "write a requirement in pip's format, such as datasets>=3 or name @ https://...",
            ),
        ),
    ),
]
"""A requirement of PEP 508."""
Dependencies = Annotated[list[Requirement], Field(max_length=64, json_schema_extra=LIST_TYPE_SET)]

GitUrl = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        # As above, the last rule accepts what an earlier rule refuses.
        json_schema_extra=rules(
            (
                "!self.matches('^https://[^/]*@')",
                "the address contains a user or a password: put them into a Secret as username and password, and set secretRef "
                "to the Secret",
            ),
            (
                "self.matches('^https://[^/@]*@|^https://[^/?# $@]+/[^?# $]+$')",
                "write the address as https://host/owner/repository, without ? and #: ssh, git and http are not supported",
            ),
        ),
    ),
]
Revision = Annotated[
    str,
    Field(
        min_length=1,
        max_length=255,
        json_schema_extra=rules(
            (
                "self.matches('^[A-Za-z0-9_][A-Za-z0-9._/+@-]*$') && !self.contains('..')",
                "revision must be a branch, a tag, or a full commit hash",
            ),
        ),
    ),
]


class Git(ApiModel):
    """A Git repository."""

    url: GitUrl
    """Address, such as https://github.com/owner/repository.git."""
    revision: Revision = "HEAD"
    """Branch, tag or full commit hash; HEAD is the default branch. The operator resolves it once: every attempt runs the
    commit in status.code."""
    secret_ref: LocalReference | None = None
    """Secret with the keys `username` and `password`. For most servers, the password is a token."""


class Code(ApiModel):
    """Your own training script."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.configMapRef), has(self.volume), has(self.git)].filter(given, given).size() == 1",
                "set exactly one of configMapRef, volume and git",
            ),
        )
    )

    config_map_ref: LocalReference | None = None
    """ConfigMap whose keys become files in mountPath."""
    volume: VolumeName | None = None
    """Volume of pods.train.template that contains the code."""
    git: Git | None = None
    """Git repository that each pod fetches into mountPath."""
    mount_path: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^/.*")] = "/workspace"
    """Folder of the code, and working directory of the command."""


class CodeStatus(ApiModel):
    """The commit that spec.trainer.code.git resolved to."""

    commit: Annotated[str, Field(min_length=40, max_length=64)]
    """The commit that every attempt runs."""
    branch: Name | None = None
    """The branch, if spec.trainer.code.git.revision names one."""
