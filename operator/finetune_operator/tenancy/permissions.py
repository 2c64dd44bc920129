"""Decides whether the tenancy permits a resource. Nothing is read or written for a resource that it does not permit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.settings import Settings
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.model import SYSTEM_NAMESPACES, Refusal, Tenant
from finetune_operator.tenancy.specs import (
    count_needed_approvals,
    find_job_breaches,
    find_promotion_breaches,
)
from finetune_operator.tenancy.templates import Breach

log = logging.getLogger(__name__)

_MAX_BREACHES = 8


@dataclass(frozen=True)
class Permissions:
    """Checks resources against the file of the platform team; without a file, everything is permitted."""

    settings: Settings
    file: TenancyFile

    def refuse_job(
        self, namespace: str, written: FineTuneJobSpec | None, spec: FineTuneJobSpec | None
    ) -> Refusal | None:
        """Return why a FineTuneJob is not permitted; None if it is.

        Args:
            written: the spec as the user wrote it; None if it cannot be read.
            spec: the same with the defaults of the chart.
        """

        def find_breaches(tenant: Tenant) -> Iterator[Breach]:
            if written and spec:
                yield from find_job_breaches(written, spec, tenant, self.settings)

        return self._refuse(namespace, find_breaches)

    def refuse_promotion(self, namespace: str, spec: ModelPromotionSpec | None) -> Refusal | None:
        """Return why a ModelPromotion is not permitted; None if it is. `spec`: None if it cannot be read."""

        def find_breaches(tenant: Tenant) -> Iterator[Breach]:
            if spec:
                yield from find_promotion_breaches(spec, tenant, self.settings)

        return self._refuse(namespace, find_breaches)

    def count_approvals(self, namespace: str, spec: ModelPromotionSpec) -> int:
        """Return the number of people who must approve a version before the promotion gives it the alias; 0 if no rule matches."""
        tenant = self.find_tenant(namespace)
        return count_needed_approvals(spec, tenant) if tenant else 0

    def find_tenant(self, namespace: str) -> Tenant | None:
        """Return the tenant of a namespace; None if there is none, or no tenancy."""
        indexes = self._find_indexes(namespace)
        tenancy = self.file.tenancy
        return tenancy.tenants[indexes[0]] if tenancy and len(indexes) == 1 else None

    def _find_indexes(self, namespace: str) -> list[int]:
        tenancy = self.file.tenancy
        is_system = namespace in SYSTEM_NAMESPACES or namespace == self.settings.namespace
        return [] if tenancy is None or is_system else tenancy.find_tenants(namespace)

    def _refuse(self, namespace: str, find_breaches: Callable[[Tenant], Iterator[Breach]]) -> Refusal | None:
        tenancy = self.file.tenancy
        if tenancy is None:
            return None
        indexes = self._find_indexes(namespace)
        if not indexes:
            return _not_permitted(
                f"namespace {namespace} belongs to no tenant: ask the platform team to add the namespace to tenancy.tenants of the chart"
            )
        if len(indexes) > 1:
            tenants = " and ".join(f"tenancy.tenants[{index}]" for index in indexes)
            return _not_permitted(
                f"namespace {namespace} belongs to {tenants}: ask the platform team to leave it in one of them"
            )
        try:
            breaches = [*dict.fromkeys(find_breaches(tenancy.tenants[indexes[0]]))]
        except Exception as error:
            # For example, pydantic refuses to walk through templates that are nested hundreds of levels deep.
            log.exception("the spec of a resource in namespace %s cannot be checked", namespace)
            return _not_permitted(
                f"the spec cannot be checked against tenancy.tenants[{indexes[0]}] ({type(error).__name__}): simplify its templates"
            )
        if not breaches:
            return None
        rule = f"tenancy.tenants[{indexes[0]}]"
        sentences = [f"{breach.what} is not permitted by {rule}.{breach.rule}" for breach in breaches]
        if len(sentences) > _MAX_BREACHES:
            sentences[_MAX_BREACHES:] = [f"{len(sentences) - _MAX_BREACHES} more fields are not permitted"]
        return _not_permitted(
            f"{'; '.join(sentences)}: change the spec, or ask the platform team to permit it in the values of the chart"
        )


def _not_permitted(message: str) -> Refusal:
    return Refusal(ConditionReason.NOT_PERMITTED, message)
