"""The admission policy of the chart for approvals, on a real API server, by people with roles and groups of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.servers import Plane
from integration.approval_policy import approval_policy
from support.api import Api
from support.documents import blocks
from support.waiting import wait_for

Json = dict[str, Any]
LEADS = "ml-leads"
GIT = "system:serviceaccount:argocd:argocd-application-controller"
NAMESPACE_CONTROLLER = "system:serviceaccount:kube-system:namespace-controller"
# Of the people, eve may only edit, and cid is in no group.
GROUPS = {"ana": LEADS, "ben": LEADS, "eve": LEADS, "cid": "others", GIT: "system:serviceaccounts"}
ROLES = {"view": [*GROUPS], "edit": [*GROUPS], "approve": ["ana", "ben", "cid"]}


@dataclass(frozen=True)
class Guarded:
    """A namespace whose alias champion needs two approvals of ml-leads.

    Attributes:
        role: the ClusterRole with the verb approve.
    """

    plane: Plane
    namespace: str
    role: str

    def run(self, user: str, *arguments: str, body: Json | None = None) -> str | None:
        """Run kubectl as a person. Returns the refusal; None if the API server accepts the request."""
        identity = ["--as", user, *(["--as-group", GROUPS[user]] if user in GROUPS else [])]
        command = [*self.kubectl, *arguments, *identity]
        text = json.dumps(body) if body else None
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        return done.stderr if done.returncode else None

    @property
    def kubectl(self) -> list[str]:
        """The command in the namespace."""
        return [
            str(self.plane.kubectl),
            "--kubeconfig",
            str(self.plane.kubeconfig),
            "--namespace",
            self.namespace,
        ]


def promotion(name: str, alias: str = "champion", **spec: Any) -> Json:
    source = {"type": "Version", "version": 5}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": name},
        "spec": {"alias": alias, "model": "guarded.a", "source": source, **spec},
    }


BEN = {"version": 5, "by": "ben"}
PROMOTIONS = [
    promotion("waiting", approvals=[BEN]),
    promotion("stopped", suspend=True, rollbackTo={"type": "Previous"}),
    promotion("without-rule", alias="candidate"),
    promotion("other-model", model="guarded-a"),
]


@pytest.fixture(scope="module")
def guarded(api: Api, plane: Plane) -> Iterator[Guarded]:
    """The policy of the chart, and promotions that a GitOps account has created."""
    namespace = new_namespace(api)
    release = f"of-{namespace}"
    tenant = {
        "namespaces": [f"{namespace[:-1]}*"],
        "approvals": [
            {"alias": "cham*", "models": ["guarded.*"], "count": 2, "groups": [LEADS]},
            {"alias": "nothing"},
        ],
        "gitOpsAccounts": [GIT],
    }
    guarded = Guarded(plane, namespace, f"{release}-approve")
    with approval_policy(plane, release, [tenant]):
        for role, users in ROLES.items():
            people = [f"--user={user}" for user in users]
            binding = ["create", "rolebinding", role, f"--clusterrole={release}-{role}", *people]
            subprocess.run([*guarded.kubectl, *binding], check=True, capture_output=True)
        for body in PROMOTIONS:
            assert guarded.run(GIT, "create", "-f", "-", body=body) is None
        impostor = promotion("new", approvals=[BEN])
        arguments = ("create", "-f", "-", "--dry-run=server")
        wait_for("the policy counts", lambda: guarded.run("ana", *arguments, body=impostor))
        yield guarded


class Write(NamedTuple):
    """A change of a promotion by a person, and a part of the refusal; None if it is accepted."""

    user: str
    spec: Json
    refusal: str | None
    name: str = "waiting"


def by(*names: str, version: int = 5) -> list[Json]:
    return [{"version": version, "by": name} for name in names]


ADD = "adding to spec.approvals needs the verb approve on this ModelPromotion: ask for the ClusterRole"
IMPOSTOR = "an approval that you add to spec.approvals must have your user name in by: "
OUTSIDER = (
    f"adding to spec.approvals needs a member of {LEADS} (tenancy.tenants[0].approvals[0] of the chart)"
)
CHANGE = "changing spec.{} needs the verb approve"
PROTECTED: Json = {
    "gates": [{"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 9}}],
    "source": {"type": "Version", "version": 6},
    "onDrift": "Adopt",
    "soakSeconds": 1,
    "approval": {"bypassSoak": True},
    "windows": [{"name": "any", "schedule": "* * * * *", "durationSeconds": 3600}],
    "onRegression": {
        "action": "Rollback",
        "prometheus": {"url": "http://prometheus:9090", "query": "error_rate"},
        "max": 0.5,
        "forSeconds": 10,
        "watchSeconds": 300,
    },
}
WRITES = {
    "a second person": Write("ana", {"approvals": by("ben", "ana")}, None),
    "in the name of another person": Write("ana", {"approvals": by("ben", "kim")}, f"{IMPOSTOR}ana"),
    "the version of another person": Write("ana", {"approvals": by("ben", version=6)}, f"{IMPOSTOR}ana"),
    "without the verb": Write("eve", {"approvals": by("ben", "eve")}, ADD),
    "outside of the groups": Write("cid", {"approvals": by("ben", "cid")}, OUTSIDER),
    "another version of one's own": Write("ben", {"approvals": by("ben", version=6)}, None),
    "the same version as text": Write("eve", {"approvals": [{"version": "5", "by": "ben"}]}, None),
    "away with one's own": Write("ben", {"approvals": None}, None),
    "away with another's": Write("ana", {"approvals": None}, None),
    "away with another's, without the verb": Write(
        "eve", {"approvals": []}, "removing the approval of another person needs the verb approve"
    ),
    **{
        f"{field} without the verb": Write("eve", {field: value}, CHANGE.format(field))
        for field, value in PROTECTED.items()
    },
    "protected fields with the verb": Write("ana", PROTECTED, None),
    "stop": Write("eve", {"suspend": True}, None),
    "roll back": Write("eve", {"rollbackTo": {"type": "Version", "version": 4}}, None),
    "tags": Write("eve", {"tags": {"team": "a"}}, None),
    "resume without the verb": Write("eve", {"suspend": None}, CHANGE.format("suspend"), "stopped"),
    "end a rollback without the verb": Write(
        "eve", {"rollbackTo": None}, CHANGE.format("rollbackTo"), "stopped"
    ),
    "another rollback without the verb": Write(
        "eve", {"rollbackTo": {"type": "Version", "version": 4}}, CHANGE.format("rollbackTo"), "stopped"
    ),
    "resume with the verb": Write("cid", {"suspend": False, "rollbackTo": None}, None, "stopped"),
    "all from Git": Write(GIT, {"approvals": by("kim", "lee"), **PROTECTED}, None),
    "an alias without a rule": Write("eve", {"approvals": by("kim"), "soakSeconds": 1}, None, "without-rule"),
    "a model without a rule": Write("eve", {"approvals": by("kim")}, None, "other-model"),
}


def check(actual: str | None, expected: str | None) -> None:
    assert (actual is None) == (expected is None), actual
    assert expected is None or expected in str(actual)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_who_may_change_a_promotion_whose_alias_needs_approvals(guarded: Guarded, write: Write) -> None:
    patch = json.dumps({"spec": write.spec})
    arguments = ("patch", "mprom", write.name, "--type=merge", f"--patch={patch}", "--dry-run=server")
    check(guarded.run(write.user, *arguments), write.refusal)


def test_an_owner_whose_absence_deletes_the_promotion_needs_the_verb(guarded: Guarded) -> None:
    owner = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "none",
        "uid": "00000000-0000-0000-0000-000000000000",
    }
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    refusal = guarded.run(
        "eve", "patch", "mprom", "waiting", "--type=merge", f"--patch={patch}", "--dry-run=server"
    )
    check(refusal, "changing metadata.ownerReferences needs the verb approve")


CREATIONS: dict[str, tuple[str, Json, str | None]] = {
    "without an approval": ("eve", promotion("new"), None),
    "with an approval of another person": ("ana", promotion("new", approvals=[BEN]), f"{IMPOSTOR}ana"),
    "with an approval without the verb": ("eve", promotion("new", approvals=by("eve")), ADD),
    "with one's own approval": ("ana", promotion("new", approvals=by("ana")), None),
    "named as the model": ("eve", promotion("guarded.a", model=None, approvals=by("eve")), ADD),
    "from Git": (GIT, promotion("new", approvals=[BEN]), None),
}


@pytest.mark.parametrize(("user", "body", "refusal"), CREATIONS.values(), ids=CREATIONS.keys())
def test_who_may_create_a_promotion_with_approvals(
    guarded: Guarded, user: str, body: Json, refusal: str | None
) -> None:
    spec = {field: value for field, value in body["spec"].items() if value is not None}
    check(guarded.run(user, "create", "-f", "-", "--dry-run=server", body={**body, "spec": spec}), refusal)


DELETIONS = {
    "eve": "deleting a ModelPromotion of an alias that needs approvals needs the verb approve",
    "ana": None,
    GIT: None,
    NAMESPACE_CONTROLLER: None,
}


@pytest.mark.parametrize(("user", "refusal"), DELETIONS.items(), ids=DELETIONS.keys())
def test_who_may_delete_a_promotion_whose_alias_needs_approvals(
    guarded: Guarded, user: str, refusal: str | None
) -> None:
    check(guarded.run(user, "delete", "mprom", "waiting", "--dry-run=server"), refusal)
    check(guarded.run(user, "delete", "mprom", "--all", "--dry-run=server"), refusal)
    check(guarded.run("eve", "delete", "mprom", "without-rule", "--dry-run=server"), None)


def documented_command() -> str:
    """The command of the documentation with which each person adds an approval to those of others."""
    page = [block for block in blocks("console") if block.page == "docs/modelpromotion/index.md"]
    (command,) = [block.text for block in page if "--server-side" in block.text]
    return command.strip().removeprefix("$ ").replace("\\\n", " ")


def test_people_add_their_approvals_with_the_command_of_the_documentation(
    guarded: Guarded, tmp_path: Path
) -> None:
    assert guarded.run(GIT, "create", "-f", "-", body=promotion("champion")) is None
    config = yaml.safe_load(guarded.plane.kubeconfig.read_text(encoding="utf-8"))
    for context in config["contexts"]:
        context["context"]["namespace"] = guarded.namespace
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{guarded.plane.kubectl.parent}:{os.environ['PATH']}",
    }
    for person in ("ana", "ben"):
        command = re.sub(r"\bana\b", person, documented_command())
        subprocess.run(
            ["bash", "-c", f"{command} --as {person} --as-group {LEADS}"],
            env=environment,
            check=True,
            timeout=60,
        )
    get = [*guarded.kubectl, "get", "mprom", "champion", "-o", "jsonpath={.spec.approvals[*].by}"]
    names = subprocess.run(get, capture_output=True, text=True, check=True).stdout
    assert sorted(names.split()) == ["ana", "ben"]
