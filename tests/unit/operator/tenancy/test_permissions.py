"""Which namespaces are served, and how a refusal reads."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.settings import Settings
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.model import Refusal, Tenancy
from finetune_operator.tenancy.permissions import Permissions
from fixtures.operator_in_memory.decisions import spec

Json = dict[str, Any]
SETTINGS = Settings(namespace="finetune")
TENANTS: list[Json] = [
    {"namespaces": ["team-a", "team-a-*"]},
    {"namespaces": ["team-b", "*-b"], "trustRemoteCode": True},
    {"namespaces": ["kube-*", "finetune", "default"]},
]
ASK = "ask the platform team"


def permissions(*tenants: Json) -> Permissions:
    file = TenancyFile("tenancy.yaml")
    file.tenancy = Tenancy.model_validate({"tenants": list(tenants)})
    return Permissions(SETTINGS, file)


def no_tenant(namespace: str) -> str:
    return f"namespace {namespace} belongs to no tenant: {ASK} to add the namespace to tenancy.tenants of the chart"


NAMESPACES: dict[str, str | None] = {
    "team-a": None,
    "team-a-dev": None,
    "default": None,
    "team-ab": no_tenant("team-ab"),
    "other": no_tenant("other"),
    "kube-system": no_tenant("kube-system"),
    "kube-node-lease": no_tenant("kube-node-lease"),
    "kube-extra": None,
    "finetune": no_tenant("finetune"),
    "team-a-b": f"namespace team-a-b belongs to tenancy.tenants[0] and tenancy.tenants[1]: {ASK} to leave it in one of them",
}


@pytest.mark.parametrize(("namespace", "message"), NAMESPACES.items(), ids=NAMESPACES)
def test_which_namespaces_are_served(namespace: str, message: str | None) -> None:
    job = spec(distributed={"nodes": 1})
    refusal = permissions(*TENANTS).refuse_job(namespace, job, job)
    assert refusal == (message and Refusal(ConditionReason.NOT_PERMITTED, message))
    # Also without a spec that can be read: the namespace decides.
    assert permissions(*TENANTS).refuse_promotion(namespace, None) == refusal


def test_a_namespace_of_two_tenants_has_no_tenant() -> None:
    assert permissions(*TENANTS).find_tenant("team-a-b") is None
    tenant = permissions(*TENANTS).find_tenant("team-a-dev")
    assert tenant
    assert tenant.namespaces == ["team-a", "team-a-*"]


def test_a_refusal_names_each_use_and_its_rule() -> None:
    job = spec(
        model={"base": "a/b", "trustRemoteCode": True}, register={"model": "x", "aliases": ["champion"]}
    )
    refusal = permissions(*TENANTS).refuse_job("team-a", job, job)
    assert refusal == Refusal(
        ConditionReason.NOT_PERMITTED,
        "spec.register.model x is not permitted by tenancy.tenants[0].models; "
        "spec.register.aliases champion is not permitted by tenancy.tenants[0].aliases; "
        "spec.model.trustRemoteCode is not permitted by tenancy.tenants[0].trustRemoteCode: "
        f"change the spec, or {ASK} to permit it in the values of the chart",
    )


def test_a_refusal_has_an_end() -> None:
    labels = {f"app-{number}": "x" for number in range(20)}
    job = spec(pods={"all": {"template": {"metadata": {"labels": labels}}}})
    refusal = permissions(*TENANTS).refuse_job("team-a", job, job)
    assert refusal
    assert "app-15" in refusal.message
    assert "; 12 more fields are not permitted: change the spec" in refusal.message


def test_a_spec_that_cannot_be_checked_is_refused() -> None:
    """Pydantic cannot walk through hundreds of levels, which the API server stores."""
    affinity: Json = {}
    for _ in range(400):
        affinity = {"nested": affinity}
    job = spec(pods={"train": {"template": {"spec": {"affinity": affinity}}}})
    refusal = permissions(*TENANTS).refuse_job("team-a", job, job)
    assert refusal == Refusal(
        ConditionReason.NOT_PERMITTED,
        "the spec cannot be checked against tenancy.tenants[0] (ValueError): simplify its templates",
    )


def test_without_a_file_everything_is_permitted() -> None:
    job = spec(model={"base": "a/b", "trustRemoteCode": True})
    anything = Permissions(SETTINGS, TenancyFile())
    assert anything.refuse_job("kube-system", job, job) is None
    assert anything.find_tenant("kube-system") is None


def test_without_tenants_nobody_is_served() -> None:
    assert permissions().refuse_job("team-a", None, None) == Refusal(
        ConditionReason.NOT_PERMITTED, no_tenant("team-a")
    )
