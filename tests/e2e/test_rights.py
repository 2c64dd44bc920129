"""The operator has the rights that it uses and no others, by the audit log of everything that the tier did."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import audit, backends
from cluster.audit import Right
from cluster.paths import State
from demo.install import RELEASE, SYSTEM, Installation
from demo.kubectl import Json
from e2e.conftest import CLUSTER, ORDER

USER = f"system:serviceaccount:{SYSTEM}:{RELEASE}"
# What the tier does not reach; `make test-integration` has a test of each.
RARE: dict[Right, str] = {}


@pytest.fixture
def needs_whole_tier(request: pytest.FixtureRequest) -> None:
    """Skip where other tests of the tier were not selected: what they use would look unused."""
    modules = {item.path.stem for item in request.session.items}
    if backends.choose()[0] != "local" or not modules.issuperset(ORDER):
        pytest.skip("needs the local cluster and all tests of the tier")


def find_roles(installation: Installation) -> Iterator[Json]:
    """Yield the references to the roles that are bound to the operator's ServiceAccount."""
    account = {"kind": "ServiceAccount", "name": RELEASE, "namespace": SYSTEM}
    for binding in installation.place.kubectl.items("clusterrolebindings,rolebindings", "--all-namespaces"):
        if account in binding.get("subjects", []):
            yield binding["roleRef"] | {"namespace": binding["metadata"].get("namespace", "")}


def read_rights(installation: Installation) -> set[Right]:
    """Return the rights of the operator's ServiceAccount."""
    rights = set()
    for role in find_roles(installation):
        body = installation.place.kubectl.get(role["kind"], role["name"], "--namespace", role["namespace"])
        for rule in body["rules"] if body else ():
            rights |= {
                Right(*parts)
                for parts in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
            }
    return rights


def read_used_rights(log: Path) -> set[Right]:
    """Return the rights of the operator's requests."""
    return {request.right for request in audit.read_requests(log) if request.user == USER}


@pytest.mark.usefixtures("needs_whole_tier")
def test_the_operator_uses_each_of_its_rights(installation: Installation) -> None:
    unused = read_rights(installation) - read_used_rights(State(CLUSTER).audit_log)
    assert sorted(unused) == sorted(RARE)


@pytest.mark.usefixtures("installation", "needs_whole_tier")
def test_the_operator_asks_for_nothing_that_it_has_no_right_to() -> None:
    refused = {
        request.right
        for request in audit.read_requests(State(CLUSTER).audit_log)
        if request.user == USER and not request.is_permitted
    }
    assert refused == set()
