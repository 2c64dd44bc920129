"""The file of the platform team: which namespaces are served, and what each tenant may use. What no rule names is not permitted."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from finetune_crds.approvals import MAX_APPROVALS
from finetune_crds.base import ApiModel, NonNegative, Positive, Uri
from finetune_crds.conditions import ConditionReason
from finetune_operator.patterns import Pattern, matches

SYSTEM_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})
"""Namespaces that no tenant can have. The namespace of the release is another."""

_Namespace = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9*]([a-z0-9*-]*[a-z0-9*])?$")]


class Refusal(NamedTuple):
    """Why a resource must not be reconciled: the reason and the message of a condition."""

    reason: ConditionReason
    message: str


class TrackingServer(ApiModel):
    """An MLflow server, or a Databricks workspace."""

    uri: Uri
    """Address, as in spec.tracking, or databricks."""
    credentials: Literal["Own", "Installation"]
    """Own: only with a Secret of the namespace. Installation: also with the credentials of the operator."""


class DatabricksAccess(ApiModel):
    """The use of Databricks workspaces."""

    principal: Literal["Own", "Installation"] = "Own"
    """Own: only with a Secret of the namespace. Installation: also as the service principal of the chart."""
    secret_scopes: list[Pattern] = Field(default_factory=list)
    """Scopes of the secrets that specs refer to."""
    clusters: list[Pattern] = Field(default_factory=list)
    """Ids of existing clusters. A new cluster needs an instance pool or a cluster policy whose id is here."""


class ApprovalRule(ApiModel):
    """The approvals that a version needs before the operator gives it an alias. If several rules match, all of them apply."""

    alias: Pattern
    """The alias."""
    models: Annotated[list[Pattern], Field(min_length=1)] = Field(default_factory=lambda: ["*"])
    """The registered models."""
    count: Annotated[int, Field(ge=1, le=MAX_APPROVALS)] = 1
    """How many people must approve the version."""
    endpoints: list[Pattern] = Field(default_factory=list)
    """Serving endpoints that only promotions of the alias may name. Default: none."""
    groups: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Groups of users, one of which a person who approves must be in. The admission policy of the chart checks it. Default: no group."""


class Tenant(ApiModel):
    """The namespaces of a tenant, and what their resources may use."""

    namespaces: Annotated[list[_Namespace], Field(min_length=1)]
    """Names or patterns of namespaces."""
    tracking: list[TrackingServer] = Field(default_factory=list)
    """MLflow servers and registries."""
    models: list[Pattern] = Field(default_factory=list)
    """Registered models to create versions of and to move aliases of; for inference tables, catalog.schema."""
    aliases: list[Pattern] = Field(default_factory=list)
    """Aliases to move."""
    approvals: list[ApprovalRule] = Field(default_factory=list)
    """The aliases that need approvals. Only promotions move them; jobs do not."""
    git_ops_accounts: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Names of the users that apply what was reviewed in Git. The admission policy of the chart lets them write the approvals of others."""
    experiments: list[Pattern] = Field(default_factory=list)
    """Experiments for the runs of jobs besides that of the namespace."""
    endpoints: list[Pattern] = Field(default_factory=list)
    """Serving endpoints."""
    prometheus: list[Uri] = Field(default_factory=list)
    """Addresses of Prometheus servers that promotions may read."""
    databricks: DatabricksAccess | None = None
    """Databricks workspaces. Default: none may be used."""
    repositories: list[Pattern] = Field(default_factory=list)
    """Addresses of Git repositories with training code."""
    service_accounts: list[Pattern] = Field(default_factory=list)
    """ServiceAccounts that pods may have besides those of the chart."""
    priority_classes: list[Pattern] = Field(default_factory=list)
    """Priority classes that pods may have besides those of the chart."""
    pods: Literal["Scheduling", "Any"] = "Scheduling"
    """Scheduling: templates may set resources, node selection, tolerations, and volumes of the namespace. Any: everything."""
    trust_remote_code: bool = False
    """Whether jobs may run the code of a model's repository."""
    max_nodes: Positive | None = None
    """Limit of the pods of one training. Default: no limit."""
    max_gpus: NonNegative | None = None
    """Limit of the GPUs of all jobs that are in progress. Default: no limit."""


class Tenancy(ApiModel):
    """All tenants."""

    tenants: list[Tenant]
    """The tenants. A namespace belongs to at most one."""

    def find_tenants(self, namespace: str) -> list[int]:
        """Return the indexes of the tenants that have a namespace."""
        return [index for index, tenant in enumerate(self.tenants) if matches(namespace, tenant.namespaces)]
