"""The interface of a model registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable

from finetune_crds import contract
from finetune_operator.settings import UNITY_CATALOG


def is_same_name(registry: str, first: str, second: str) -> bool:
    """Whether two names of models, or of aliases of one model, are the same name in a registry. Unity Catalog ignores the case."""
    return first.casefold() == second.casefold() if registry == UNITY_CATALOG else first == second


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model, and the version that each of its aliases points at.

    `created` distinguishes the model from one of the same name in another registry; None if it is unknown. `tags`: the tags of the
    model; always empty in Unity Catalog, where they are not read. `ignores_case`: whether alias names are case-insensitive, as in Unity
    Catalog.
    """

    name: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    created: datetime | None = field(default=None, compare=False)
    tags: Mapping[str, str] = field(default_factory=dict, compare=False)
    ignores_case: bool = field(default=False, compare=False)

    def holder(self, alias: str) -> str | None:
        """The version that an alias points at; None if the alias does not exist."""
        if not self.ignores_case:
            return self.aliases.get(alias)
        folded = {name.casefold(): version for name, version in self.aliases.items()}
        return folded.get(alias.casefold())


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model.

    Attributes:
        ready: whether its files are complete.
        run_id: the run that created it, which may no longer exist; None if the version names no run.
        tags: its tags.
        metrics: newest value of each metric of the version's run; metrics of its logged model in MLflow take precedence. Values may be
            NaN or infinite.
        unread: the reason why the metrics of the version's run cannot be read; empty if they were read.
        evaluated_on: digest of the data that the run was evaluated on; None if it is not recorded.
        created: creation time; None if it is unknown.
    """

    version: str
    ready: bool = True
    run_id: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluated_on: str | None = None
    created: datetime | None = field(default=None, compare=False)
    unread: str = ""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model, its tags, and which of the requested aliases point at it."""

    name: str
    version: str
    aliases: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MoveAlias:
    """Point the alias at a version, or remove the alias, if the alias still points at the expected version.

    Attributes:
        expected: the version that the alias must point at before; None if it must not exist.
        to: the version to point at; None to remove the alias.
        source: the alias that the version came from, which must still point at the version; None for no such condition.
        tags: tags to set on the version.
        created: creation time of the model that the decision is about; None for any model of the name.
    """

    expected: str | None
    to: str | None
    source: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    created: datetime | None = None


def parse_milliseconds(stamp: object) -> datetime | None:
    """The time of a registry's timestamp, which is in milliseconds since 1970; None if it is missing."""
    return datetime.fromtimestamp(int(str(stamp)) / 1000, UTC) if stamp else None


def find_eval_digest(tags: Mapping[str, str], run_tags: Mapping[str, str]) -> str | None:
    """The digest of the evaluation data, from a version's tags or else from its run's tags; gates look up numbers in this order too."""
    return tags.get(contract.TAG_EVAL_DATA) or run_tags.get(contract.TAG_EVAL_DATA) or None


def find_comparison_tag(version: ModelVersion, number: str) -> tuple[str, str | None]:
    """The tag that has the digest of the data that a version's number was measured on, and the digest (None if it is not recorded).

    The numbers of two versions can be compared if tag and digest are equal. The tag shows whether a number comes from
    spec.evaluation, whose numbers are tags of the version, or from the training.

    Args:
        number: the name of the number.
    """
    digest = version.tags.get(contract.TAG_EVALUATION_DATA)
    if digest and number in version.tags and number not in contract.TRAINING_METRICS:
        return contract.TAG_EVALUATION_DATA, digest
    return contract.TAG_EVAL_DATA, version.evaluated_on


class Registry(Protocol):
    """A model registry, with credentials. Every method blocks; call it off the event loop.

    All methods raise ExternalError, whose problem has the error and the remedy.
    """

    @property
    def uri(self) -> str:
        """The normalized name of the registry, equal for all promotions of the same registry."""

    def model(self, name: str) -> RegisteredModel | None:
        """A registered model; None when it does not exist."""

    def version(self, name: str, version: str) -> ModelVersion | None:
        """A version with its tags and the metrics of its run; None when it does not exist."""

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Point an alias at a version, regardless of where it points now."""

    def delete_alias(self, name: str, alias: str) -> None:
        """Remove an alias. Does nothing if it does not exist."""

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""


@runtime_checkable
class TaggedRegistry(Protocol):
    """A registry that finds versions by their tags. Unity Catalog does not."""

    def find_tagged(self, name: str, tag: str, value: str) -> str | None:
        """The first complete version of a model with this tag; None if there is none."""


class JobRegistry(Registry, Protocol):
    """A registry in which a FineTuneJob finds its version."""

    def find_version(self, name: str, run_id: str, aliases: Iterable[str]) -> RegisteredVersion | None:
        """The version that a run registered, the newest if there are several, with its tags, and which of `aliases` point at it."""
