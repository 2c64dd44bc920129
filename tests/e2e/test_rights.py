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
_TTL = "a job with ttlSecondsAfterFinished has finished"
_ADMISSION = "the admission plugin OwnerReferencesPermissionEnforcement asks for it, without a request"
_GPU, _KUEUE = "a pod has or waits for a GPU", "a job is in a queue of Kueue"
# Rights that the tier may leave unused, and when the operator uses them.
RARE = {
    Right("", "configmaps", "delete"): _TTL,
    Right("", "services", "delete"): _TTL,
    Right("networking.k8s.io", "networkpolicies", "delete"): _TTL,
    Right("batch", "jobs", "get"): "a reconciliation was interrupted after it had created the Job",
    Right("", "events", "list"): "the API server rejects a pod, or a pod waits for a node or a volume",
    Right("finetune.dev", "finetunejobs", "delete"): "a schedule or a sweep has more jobs than it keeps",
    Right("finetune.dev", "finetunejobs", "get"): "a job waits for the preparation of another one",
    Right("finetune.dev", "finetunejobs/finalizers", "update"): _ADMISSION,
    Right("finetune.dev", "finetuneschedules/finalizers", "update"): _ADMISSION,
    Right("finetune.dev", "modelpromotions/finalizers", "update"): _ADMISSION,
    Right("", "nodes", "get"): _GPU,
    Right("", "nodes", "list"): _GPU,
    Right("kueue.x-k8s.io", "workloads", "list"): _KUEUE,
    Right("kueue.x-k8s.io", "localqueues", "list"): _KUEUE,
    Right("visibility.kueue.x-k8s.io", "localqueues/pendingworkloads", "get"): _KUEUE,
}


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
    rights = read_rights(installation)
    unused = rights - read_used_rights(State(CLUSTER).audit_log)
    assert unused - RARE.keys() == set()
    assert RARE.keys() - rights == set()


@pytest.mark.usefixtures("installation", "needs_whole_tier")
def test_the_operator_asks_for_nothing_that_it_has_no_right_to() -> None:
    refused = {
        request.right
        for request in audit.read_requests(State(CLUSTER).audit_log)
        if request.user == USER and not request.is_permitted
    }
    assert refused == set()
