"""The tenancy of the chart: the file, the rights of the operator, the admission policies and the notes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.patterns import matches
from finetune_operator.tenancy.model import SYSTEM_NAMESPACES, Tenancy
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.servers import Plane
from integration.chart import allowed_by, notes_of, parts
from integration.chart_without_crds import environment, objects, operator, pod
from support.api import Api

Json = dict[str, Any]
NAME = "finetune-operator"
TWO_TEAMS = (
    "tenancy.tenants[0].namespaces={research,kube-system,fs}",
    "tenancy.tenants[0].models={research.*}",
    "tenancy.tenants[0].maxGpus=1000000",
    "tenancy.tenants[1].namespaces={products,research}",
    "tenancy.tenants[1].pods=Any",
)
PATTERN = ("tenancy.tenants[0].namespaces={team-*}",)
NOBODY = ("tenancy.tenants=[]",)


def read_file(*values: str) -> Json:
    """What the operator reads as its tenancy."""
    return dict(yaml.safe_load(objects(*values)["ConfigMap", f"{NAME}-tenancy"]["data"]["tenancy.yaml"]))


def test_without_tenants_there_is_neither_a_file_nor_a_policy() -> None:
    assert [key for key in objects() if "tenan" in key[1] or "Policy" in key[0]] == []
    assert "FINETUNE_TENANCY_FILE" not in environment()


def test_the_operator_reads_what_the_values_say() -> None:
    assert read_file(*TWO_TEAMS) == {
        "tenants": [
            {"namespaces": ["research", "kube-system", "fs"], "models": ["research.*"], "maxGpus": 1000000},
            {"namespaces": ["products", "research"], "pods": "Any"},
        ]
    }
    assert Tenancy.model_validate(read_file(*TWO_TEAMS)).tenants[0].max_gpus == 1000000
    assert read_file(*NOBODY) == {"tenants": []}


def test_the_file_is_mounted_so_that_the_kubelet_updates_it() -> None:
    file = Path(environment(*NOBODY)["FINETUNE_TENANCY_FILE"])
    mount = next(item for item in pod(*NOBODY)["containers"][0]["volumeMounts"] if item["name"] == "tenancy")
    volume = next(item for item in pod(*NOBODY)["volumes"] if item["name"] == "tenancy")
    assert file.name == "tenancy.yaml"
    assert mount == {"name": "tenancy", "mountPath": str(file.parent), "readOnly": True}
    assert volume["configMap"] == {"name": f"{NAME}-tenancy"}


def test_a_change_of_the_tenants_restarts_nothing() -> None:
    assert operator(*NOBODY) == operator(*TWO_TEAMS)


WATCHED = {
    *(
        (f"finetune.dev/{name}", verb)
        for name in ("finetunejobs", "modelpromotions")
        for verb in ("get", "patch")
    ),
    *(
        (name, verb)
        for name in (
            "finetune.dev/finetunejobs",
            "finetune.dev/modelpromotions",
            "finetune.dev/finetuneschedules",
            "batch/jobs",
            "pods",
            "services",
            "configmaps",
            "networking.k8s.io/networkpolicies",
        )
        for verb in ("list", "watch")
    ),
    *(
        (f"finetune.dev/{name}/status", "patch")
        for name in ("finetunejobs", "modelpromotions", "finetuneschedules")
    ),
    ("events", "create"),
    ("nodes", "get"),
    ("nodes", "list"),
}


def test_with_names_the_operator_watches_everywhere_and_has_all_else_in_the_namespaces_of_tenants() -> None:
    everything = allowed_by(objects()["ClusterRole", NAME])
    chart_objects = objects(*TWO_TEAMS)
    assert allowed_by(chart_objects["ClusterRole", NAME]) == WATCHED
    assert allowed_by(chart_objects["ClusterRole", f"{NAME}-tenant"]) == everything - WATCHED
    assert list_bindings(*TWO_TEAMS) == [
        ("ClusterRoleBinding", None, NAME),
        # Neither in the namespace of the system nor in that of the release.
        ("RoleBinding", "fs", f"{NAME}-leases"),
        ("RoleBinding", "products", f"{NAME}-tenant"),
        ("RoleBinding", "research", f"{NAME}-tenant"),
    ]
    assert [key for key in list_bindings(*NOBODY) if key[2] == f"{NAME}-tenant"] == []


def chart_parts(*values: str) -> list[Json]:
    """The manifests without the CRDs."""
    return parts("crds.enabled=false", *values)


def list_bindings(*values: str) -> list[tuple[str, str | None, str]]:
    """Kind, namespace and role of each binding of the operator's account."""
    bindings = [part for part in chart_parts(*values) if part["kind"].endswith("RoleBinding")]
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": "fs"}
    assert [part["subjects"] for part in bindings] == [[subject]] * len(bindings)
    return sorted(
        (part["kind"], part["metadata"].get("namespace"), part["roleRef"]["name"]) for part in bindings
    )


@pytest.mark.parametrize("values", [(), ("watchNamespaces={research}",)], ids=["a pattern", "watched"])
def test_with_a_pattern_or_watched_namespaces_the_rights_stay_as_without_tenants(
    values: tuple[str, ...],
) -> None:
    kinds = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")

    def list_rights(*values: str) -> list[Json]:
        return [part for part in chart_parts(*values) if part["kind"] in kinds]

    tenants = TWO_TEAMS if values else PATTERN
    assert list_rights(*values, *tenants) == list_rights(*values)


def policies(*values: str) -> dict[str, Json]:
    """The specs of the policies, by the resource that they are about."""
    return {
        part["spec"]["matchConstraints"]["resourceRules"][0]["resources"][0]: part["spec"]
        for (kind, _), part in objects(*values).items()
        if kind == "ValidatingAdmissionPolicy"
    }


def test_policies_hold_only_the_account_of_the_operator() -> None:
    specs = policies(*TWO_TEAMS, "serviceAccount.name=mine", "rbac.sparkApplications=true")
    assert [*specs] == ["jobs", "pods", "sparkapplications"]
    assert [*policies(*NOBODY)] == ["jobs", "pods"]
    assert policies(*TWO_TEAMS, "tenancy.admissionPolicy=false") == {}
    for spec in specs.values():
        assert spec["failurePolicy"] == "Fail"
        assert (
            spec["matchConditions"][0]["expression"]
            == 'request.userInfo.username == "system:serviceaccount:fs:mine"'
        )


def test_each_policy_is_bound_and_denies() -> None:
    chart_objects = objects(*TWO_TEAMS)
    bound = {
        part["spec"]["policyName"]: part["spec"]["validationActions"]
        for (kind, _), part in chart_objects.items()
        if kind == "ValidatingAdmissionPolicyBinding"
    }
    assert bound == {name: ["Deny"] for kind, name in chart_objects if kind == "ValidatingAdmissionPolicy"}


def test_policies_leave_out_the_namespaces_of_tenants_with_any_pods() -> None:
    values = (
        "tenancy.tenants[0].namespaces={infra-*,web}",
        "tenancy.tenants[0].pods=Any",
        "tenancy.tenants[1].namespaces={*-secure}",
    )
    tenants = Tenancy.model_validate(read_file(*values)).tenants
    (expression,) = (
        condition["expression"]
        for condition in policies(*values)["jobs"]["matchConditions"]
        if condition["name"] == "not-of-a-tenant-with-any-pods"
    )
    any_pods, scheduling = re.findall(r'request\.namespace\.matches\("([^"]+)"\)', expression)
    pattern = 'request.namespace.matches("{}")'
    assert expression == f"!{pattern.format(any_pods)} || {pattern.format(scheduling)}"
    namespaces = ("infra-", "infra-a", "infra", "web", "web-a", "a-web", "infra-secure", "secure")
    for regex, tenant in ((any_pods, tenants[0]), (scheduling, tenants[1])):
        assert {name: re.search(regex, name) is not None for name in namespaces} == {
            name: matches(name, tenant.namespaces) for name in namespaces
        }
    assert len(policies(*PATTERN)["jobs"]["matchConditions"]) == 2


def test_policies_permit_what_the_defaults_of_the_chart_have() -> None:
    template = "defaults.pods.train.template.spec"
    values = (
        *PATTERN,
        f"{template}.volumes[0].name=shared",
        f"{template}.volumes[0].hostPath.path=/dev/shm",
        f"{template}.hostNetwork=true",
        f"{template}.priorityClassName=system-node-critical",
        f"{template}.initContainers[0].name=first",
        f"{template}.initContainers[0].securityContext.capabilities.add={{IPC_LOCK}}",
        f"{template}.initContainers[0].securityContext.privileged=true",
    )
    strict, permissive = (
        {item["expression"] for item in policies(*each)["jobs"]["validations"]} for each in (PATTERN, values)
    )
    volumes = (
        "variables.pods.all(pod, pod.?volumes.orValue([]).all(v, !has(v.hostPath) || v.hostPath.path in {}))"
    )
    capabilities = (
        "variables.contexts.all(list, list.all(c, c.?capabilities.?add.orValue([]).all(name, name in {})))"
    )
    classes = (
        'variables.pods.all(pod, !pod.?priorityClassName.orValue("").startsWith("system-") || '
        "pod.priorityClassName in {})"
    )
    assert permissive - strict == {
        volumes.format('["/dev/shm"]'),
        capabilities.format('["IPC_LOCK"]'),
        classes.format('["system-node-critical"]'),
    }
    assert strict - permissive == {
        *(rule.format("[]") for rule in (volumes, capabilities, classes)),
        "variables.pods.all(pod, !pod.?hostNetwork.orValue(false))",
        "variables.contexts.all(list, list.all(c, !c.?privileged.orValue(false)))",
    }


APPROVALS = (
    *PATTERN,
    "tenancy.tenants[0].approvals[0].alias=champion",
    "tenancy.tenants[0].approvals[0].count=2",
    "tenancy.tenants[0].approvals[0].models={team_a.*,b(c}",
    "tenancy.tenants[0].approvals[0].endpoints={team-a-chat}",
    "tenancy.tenants[0].gitOpsAccounts={argo}",
)


def test_the_operator_reads_the_approvals_of_the_values() -> None:
    (tenant,) = Tenancy.model_validate(read_file(*APPROVALS)).tenants
    rules = [rule.model_dump() for rule in tenant.approvals]
    assert rules == [
        {
            "alias": "champion",
            "models": ["team_a.*", "b(c"],
            "count": 2,
            "endpoints": ["team-a-chat"],
            "groups": [],
        }
    ]
    assert tenant.git_ops_accounts == ["argo"]


def test_the_policy_and_the_role_for_approvals_come_with_a_rule() -> None:
    assert "modelpromotions" not in policies(*TWO_TEAMS)
    assert "modelpromotions" not in policies(*APPROVALS, "tenancy.admissionPolicy=false")
    role = objects(*APPROVALS)["ClusterRole", f"{NAME}-approve"]
    assert role["rules"] == [
        {"apiGroups": ["finetune.dev"], "resources": ["modelpromotions"], "verbs": ["approve"]}
    ]
    assert not [label for label in role["metadata"]["labels"] if "aggregate" in label]


def test_the_policy_for_approvals_reads_patterns_as_the_operator_does() -> None:
    conditions = policies(*APPROVALS)["modelpromotions"]["matchConditions"]
    regexes = [
        json.loads(f'"{text}"') for text in re.findall(r'matches\("([^"]+)"\)', conditions[0]["expression"])
    ]
    (tenant,) = Tenancy.model_validate(read_file(*APPROVALS)).tenants
    patterns = (tenant.namespaces, ["champion"], tenant.approvals[0].models)
    names = ("team-a", "team", "champion", "team_a.", "Team_A.chat", "team_abc", "b(c", "bc")
    for regex, allowed in zip(regexes, patterns, strict=True):
        assert {name: re.search(regex, name) is not None for name in names} == {
            name: matches(name, allowed, ignore_case=True) for name in names
        }


NOTES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no tenants": (
        (),
        ("Every namespace may use everything that this installation may: set tenancy.tenants if",),
    ),
    "names": (
        TWO_TEAMS,
        ("It serves the namespaces of tenancy.tenants: research, kube-system, fs, products.",),
    ),
    "a pattern": (
        PATTERN,
        (
            "It serves the namespaces of tenancy.tenants: team-*.",
            "Since a namespace is a pattern, the operator may read Secrets and create Jobs in every namespace.",
        ),
    ),
    "approvals": (
        APPROVALS,
        (
            "It serves the namespaces of tenancy.tenants: team-*.",
            "Since a namespace is a pattern, the operator may read Secrets and create Jobs in every namespace.",
            "Some aliases need approvals (tenancy.tenants). Bind the role of those who may approve",
        ),
    ),
    "approvals that nothing checks": (
        (*APPROVALS, "tenancy.admissionPolicy=false"),
        (
            "It serves the namespaces of tenancy.tenants: team-*.",
            "Since a namespace is a pattern, the operator may read Secrets and create Jobs in every namespace.",
            "WARNING: some aliases need approvals (tenancy.tenants), but nothing checks who gives them",
        ),
    ),
    "nobody": (NOBODY, ("It serves no namespace, because tenancy.tenants is empty",)),
}


def test_notes_say_whom_the_installation_serves(kubeconfig: Path) -> None:
    sentences = {sentence for _, group in NOTES.values() for sentence in group}
    notes = {name: notes_of(kubeconfig, *values) for name, (values, _) in NOTES.items()}
    assert {name: {item for item in sentences if item in text} for name, text in notes.items()} == {
        name: {*group} for name, (_, group) in NOTES.items()
    }


def test_notes_warn_of_namespaces_that_enforce_no_pod_security_level(
    kubeconfig: Path, api: Api, plane: Plane
) -> None:
    names = [new_namespace(api) for _ in range(3)]
    for name, level in zip(names, ("privileged", "baseline", "restricted"), strict=True):
        plane.run_kubectl(
            "default", "label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}"
        )
    unlabeled = new_namespace(api)
    listed = ",".join((*names, f"{unlabeled}*", "kube-*"))
    tenants = (f"tenancy.tenants[0].namespaces={{{listed}}}",)
    warning = "enforce neither the Pod Security level restricted nor baseline: "
    (said,) = re.findall(f"{warning}(.+)\\. People", notes_of(kubeconfig, *tenants))
    assert {*said.split(", ")} == {names[0], unlabeled}
    assert warning not in notes_of(kubeconfig, *tenants, "tenancy.tenants[0].pods=Any")


def test_namespaces_of_the_system_are_the_same_in_the_chart_and_the_operator() -> None:
    tenants = f"tenancy.tenants[0].namespaces={{{','.join((*SYSTEM_NAMESPACES, 'research'))}}}"
    bound = [namespace for _, namespace, role in list_bindings(tenants) if role == f"{NAME}-tenant"]
    assert bound == ["research"]
