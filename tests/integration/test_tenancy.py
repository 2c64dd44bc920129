"""Two teams and a namespace of nobody, on an operator with the ServiceAccount, the rights and the policies of the chart."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException

from fixtures.operator_processes.jobs import PREPARED, TRAINED, job
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.registry import GATES, Registry
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import World
from integration.chart import CHART, KUBE_VERSION, helm
from support.api import Api
from support.http_server import Answer, Request, serving
from support.manifests import parse
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, metric
from support.process import Process, running
from support.waiting import wait_for

Json = dict[str, Any]
TEMPLATES = ("rbac", "serviceaccount", "tenancy", "admissionpolicy", "approvalpolicy")
# What a change of the file may take until it counts, without the kubelet.
RELOAD_SECONDS = 15.0


@dataclass(frozen=True)
class Installation:
    """An operator for two teams.

    Attributes:
        release: the namespace of the release, which also has its name.
        file: what the operator reads as the mounted ConfigMap.
        account: the API server, as the ServiceAccount of the operator.
        owner: the namespace of the team that owns the models `owned-*`.
        other: the namespace of another team. It sorts before `owner`.
        privileged: the namespace of a tenant with pods: Any.
        stranger: the namespace of no tenant.
    """

    api: Api
    mlflow: Mlflow
    operator: Process
    release: str
    file: Path
    account: Api
    owner: str
    other: str
    privileged: str
    stranger: str

    def world(self, namespace: str) -> World:
        """One of the namespaces."""
        return World(self.api, self.mlflow, namespace)

    def write_file(self, *more_servers: str) -> None:
        """Write the tenancy, with more MLflow servers of the owner, as the kubelet does: in one step."""
        new_file = self.file.with_suffix(".new")
        new_file.write_text(json.dumps(tenancy(self, more_servers)), encoding="utf-8")
        new_file.replace(self.file)


def tenancy(installation: Installation, more_servers: tuple[str, ...] = ()) -> Json:
    servers = [
        {"uri": uri, "credentials": "Installation"} for uri in (installation.mlflow.uri, *more_servers)
    ]
    owner = {
        "namespaces": [installation.owner],
        "models": ["owned-*", f"tuned-{installation.owner}"],
        "aliases": ["candidate", "champion"],
        "approvals": [{"alias": "champion", "models": ["owned-guarded", "tuned-*"], "count": 2}],
        "tracking": servers,
    }
    other = {
        "namespaces": [installation.other],
        "models": ["other-*"],
        "aliases": ["champion"],
        "tracking": servers[:1],
    }
    return {"tenants": [owner, other, {"namespaces": [installation.privileged], "pods": "Any"}]}


@pytest.fixture(scope="module")
def installation(
    api: Api, plane: Plane, mlflow_server: Mlflow, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """The objects of the chart but its Deployment, and the operator as a process that uses them."""
    folder = tmp_path_factory.mktemp("tenancy")
    release = new_namespace(api)
    other, owner, privileged, stranger = sorted(new_namespace(api) for _ in range(4))
    account_kubeconfig = folder / "kubeconfig"
    operator = forked_operator(
        account_kubeconfig,
        folder / "operator.log",
        {
            "FINETUNE_NAMESPACE": release,
            # NB: without them the operator would refuse the resources of the other tests.
            "FINETUNE_NAMESPACES": f"{other},{owner},{privileged},{stranger}",
            "FINETUNE_TRACKING_URI": mlflow_server.uri,
            "FINETUNE_TENANCY_FILE": str(folder / "tenancy.yaml"),
            "FINETUNE_RESYNC_SECONDS": "1",
        },
    )
    namespaces = {"owner": owner, "other": other, "privileged": privileged, "stranger": stranger}
    file = folder / "tenancy.yaml"
    # NB: `account` is replaced below: the token exists after the chart is installed.
    draft = Installation(api, mlflow_server, operator, release, file, api, **namespaces)
    with installed(plane, release, tenancy(draft)) as config_map:
        file.write_text(config_map, encoding="utf-8")
        account_kubeconfig.write_text(log_in(plane, release), encoding="utf-8")
        with running(operator):
            yield replace(draft, account=Api(account_kubeconfig))
    print((folder / "operator.log").read_text(encoding="utf-8"))


@contextmanager
def installed(plane: Plane, release: str, rules: Json) -> Iterator[str]:
    """Install the objects of the chart for the time of a block; yields the file of the ConfigMap."""
    shown = [word for name in TEMPLATES for word in ("--show-only", f"templates/{name}.yaml")]
    where = ["--namespace", release, "--kube-version", KUBE_VERSION]
    values = ["--set", f"fullnameOverride={release}", "--set-json", f"tenancy={json.dumps(rules)}"]
    done = helm("template", release, str(CHART), *where, *shown, *values)
    assert done.returncode == 0, done.stderr
    objects = parse(done.stdout)
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig)]
    create, delete = ([*kubectl, verb, "--filename", "-"] for verb in ("create", "delete"))
    subprocess.run(create, input=done.stdout, check=True, capture_output=True, text=True)
    try:
        yield next(item["data"]["tenancy.yaml"] for item in objects if item["kind"] == "ConfigMap")
    finally:
        subprocess.run(delete, input=done.stdout, check=True, capture_output=True, text=True)


def log_in(plane: Plane, release: str) -> str:
    """A kubeconfig of the operator's ServiceAccount."""
    config: Json = yaml.safe_load(plane.kubeconfig.read_text(encoding="utf-8"))
    config["users"][0]["user"] = {"token": plane.run_kubectl(release, "create", "token", release)}
    return str(yaml.safe_dump(config))


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A server that a spec names; yields its address and the requests that it gets."""
    requests: list[str] = []

    def respond(request: Request) -> Answer:
        requests.append(request.target)
        return Answer(503)

    with serving(respond) as uri:
        yield uri, requests


def list_children(world: World) -> list[str]:
    """The objects in a namespace that the operator creates for jobs."""
    kinds = ("Job", "Pod", "Service", "ConfigMap", "Lease")
    names = [item["metadata"]["name"] for kind in kinds for item in world.api.list(kind, world.namespace)]
    return [name for name in names if name != "kube-root-ca.crt"]


def test_resources_in_a_namespace_of_no_tenant_reach_no_server(installation: Installation) -> None:
    world = installation.world(installation.stranger)
    registry = Registry(installation.api, installation.mlflow, world.namespace, "owned-by-nobody")
    with listening() as (uri, requests):
        world.submit(job(tracking={"uri": uri}))
        registry.apply(tracking={"uri": uri})
        condition = world.wait_condition("tune", "Accepted", "NotPermitted")
        wait_for("the promotion is refused", lambda: registry.condition("Accepted"))
    message = f"namespace {world.namespace} belongs to no tenant: ask the platform team to add the namespace to tenancy.tenants of the chart"
    assert (condition["message"], registry.condition("Accepted")["message"]) == (message, message)
    assert (requests, list_children(world)) == ([], [])


def test_a_change_of_the_file_permits_a_server_without_a_restart(installation: Installation) -> None:
    world = installation.world(installation.owner)
    with listening() as (uri, requests):
        world.submit(job("elsewhere", tracking={"uri": uri}))
        condition = world.wait_condition("elsewhere", "Accepted", "NotPermitted")
        assert (
            f"spec.tracking.uri {uri} is not permitted by tenancy.tenants[0].tracking" in condition["message"]
        )
        assert requests == []
        installation.write_file(uri)
        wait_for(
            "the server is asked",
            lambda: requests,
            RELOAD_SECONDS,
            installation.operator,
            instead=lambda: world.status("elsewhere"),
        )
        world.wait_condition("elsewhere", "Tracked", "MlflowUnreachable")
        assert world.condition("elsewhere", "Accepted")["status"] == "True"
        installation.write_file()
        world.wait_condition("elsewhere", "Accepted", "NotPermitted")
        # A request that has begun may end.
        wait_for_passes(installation, 3)
        before = len(requests)
        wait_for_passes(installation, 6)
        assert len(requests) == before
    world.delete_all()


def wait_for_passes(installation: Installation, count: int) -> None:
    """Wait until the operator has made more passes over FineTuneJobs."""

    def read_count() -> float:
        return metric(installation.operator, "finetune_operator_reconcile_seconds_count", kind="FineTuneJob")

    end = read_count() + count
    wait_for(f"{count} passes", lambda: read_count() >= end)


def test_an_older_promotion_of_another_team_neither_moves_nor_blocks_an_alias(
    installation: Installation,
) -> None:
    model = f"owned-{installation.owner}"
    squatter, registry = (
        Registry(installation.api, installation.mlflow, namespace, model)
        for namespace in (installation.other, installation.owner)
    )
    version = registry.version(2.0)
    registry.point("staging", version)
    squatter.apply(onDelete="RemoveAlias")
    wait_for("it is refused", lambda: squatter.condition("Accepted").get("reason") == "NotPermitted")
    message = squatter.condition("Accepted")["message"]
    assert f"spec.model {model} is not permitted by tenancy.tenants[1].models" in message
    assert registry.alias("champion") is None
    registry.apply(gates=GATES)
    registry.wait("Promoted", version)
    installation.api.delete("ModelPromotion", squatter.namespace, "champion")
    wait_for("it is deleted", lambda: not squatter.get())
    assert registry.alias("champion") == version
    installation.world(installation.owner).delete_all()


def test_an_alias_that_needs_approvals_moves_only_by_a_promotion_with_those_of_two_people(
    installation: Installation, plane: Plane
) -> None:
    world = installation.world(installation.owner)
    registry = Registry(installation.api, installation.mlflow, world.namespace, "owned-guarded")
    first, second = registry.version(2.2), registry.version(2.0)
    world.submit(job(register={"aliases": ["champion"]}))
    refusal = world.wait_condition("tune", "Accepted", "NotPermitted")["message"]
    what = "spec.register.aliases champion, which only a ModelPromotion may move,"
    assert f"{what} is not permitted by tenancy.tenants[0].approvals" in refusal
    registry.point("champion", first)
    registry.apply(source={"type": "Version", "version": second}, onDelete="RemoveAlias")
    registry.wait("AwaitingApproval", first)
    entries = [{"version": int(second), "by": person} for person in ("ana", "ben")]
    approve(plane, world.namespace, "ana", "/spec/approvals", entries[:1])
    progress = "1 of 2, by ana; another person adds"
    wait_for("one approved", lambda: progress in registry.condition("Approved")["message"])
    approve(plane, world.namespace, "ben", "/spec/approvals/-", entries[1])
    status = registry.wait("Promoted", second)
    assert [item["by"] for item in status["history"]] == ["ana and ben"]
    # The policy leaves the finalizer to the operator.
    installation.api.delete("ModelPromotion", world.namespace, "champion")
    wait_for("it is deleted", lambda: not registry.get())
    assert registry.alias("champion") is None
    world.delete_all()


def approve(plane: Plane, namespace: str, person: str, path: str, value: Json | list[Json]) -> None:
    """Add to the list of approvals, as a person who may do everything."""
    patch = json.dumps([{"op": "add", "path": path, "value": value}])
    identity = ("--as", person, "--as-group", "system:masters")
    plane.run_kubectl(namespace, "patch", "mprom", "champion", "--type=json", f"--patch={patch}", *identity)


def test_the_rights_in_the_namespace_of_a_tenant_suffice_for_a_job(installation: Installation) -> None:
    world = installation.world(installation.owner)
    world.submit(job())
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [0], [PREPARED])
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    wait_for("the training has ended", lambda: world.condition("tune", "Trained").get("status") == "True")
    log = installation.operator.log.read_text(encoding="utf-8")
    assert [line for line in log.splitlines() if "forbidden" in line.lower()] == []


def container(**context: Any) -> Json:
    return {"name": "main", "image": "a:1", **({"securityContext": context} if context else {})}


def pod(**spec: Any) -> Json:
    return {"restartPolicy": "Never", "containers": [container()], **spec}


PODS: dict[str, tuple[Json, str]] = {
    "a host path": (pod(volumes=[{"name": "root", "hostPath": {"path": "/"}}]), "a hostPath volume"),
    "the processes of the node": (pod(hostPID=True), "hostPID"),
    "the shared memory of the node": (pod(hostIPC=True), "hostIPC"),
    "the network of the node": (pod(hostNetwork=True), "hostNetwork"),
    "a privileged container": (pod(containers=[container(privileged=True)]), "a container with privileged"),
    "a privileged init container": (
        pod(initContainers=[container(privileged=True) | {"name": "first"}]),
        "a container with privileged",
    ),
    "more rights in the container": (
        pod(containers=[container(), container(allowPrivilegeEscalation=True) | {"name": "second"}]),
        "a container with allowPrivilegeEscalation",
    ),
    "a capability": (
        pod(containers=[container(capabilities={"add": ["SYS_ADMIN"]})]),
        "a container with an added capability",
    ),
    "a priority of the system": (
        pod(priorityClassName="system-node-critical"),
        "a priorityClassName that begins with system-",
    ),
    "none of these": (
        pod(
            containers=[container(privileged=False, capabilities={"drop": ["ALL"]})],
            volumes=[{"name": "tmp", "emptyDir": {}}],
        ),
        "",
    ),
}


def forbid(api: Api, kind: str, namespace: str, pod_spec: Json) -> str:
    """Create a Job or a Pod in a dry run, and return why it is forbidden."""
    body: Json = {"kind": kind, "metadata": {"name": "tried", "namespace": namespace}}
    if kind == "Job":
        body |= {"apiVersion": "batch/v1", "spec": {"template": {"spec": pod_spec}}}
    else:
        body |= {"apiVersion": "v1", "spec": pod_spec}
    try:
        api.create(body, dry_run=True)
    except ApiException as error:
        return str(json.loads(error.body)["message"])
    return ""


@pytest.mark.parametrize("kind", ["Job", "Pod"])
def test_the_policy_keeps_the_operator_from_the_node(installation: Installation, kind: str) -> None:
    account, namespace = installation.account, installation.owner
    first, _ = PODS["a host path"]
    # The API server reads a new policy within seconds.
    wait_for("the policy counts", lambda: forbid(account, kind, namespace, first))
    rule = "is permitted only in namespaces of tenants with pods Any (tenancy.tenants of the chart)"
    refusals = {name: forbid(account, kind, namespace, spec) for name, (spec, _) in PODS.items()}
    assert {name: message.partition("denied request: ")[2] for name, message in refusals.items()} == {
        name: f"{what} {rule}" if what else "" for name, (_, what) in PODS.items()
    }
    assert (refusals["none of these"], forbid(account, kind, installation.privileged, first)) == ("", "")
    # Not of others: the namespace's Pod Security level is for them.
    assert forbid(installation.api, kind, namespace, first) == ""


def test_outside_of_the_namespaces_of_tenants_the_operator_may_only_watch(installation: Installation) -> None:
    account = installation.account
    allowed, _ = PODS["none of these"]
    assert "cannot create resource" in forbid(account, "Job", installation.stranger, allowed)
    assert account.list("ConfigMap", installation.stranger) != []
    for namespace, status in ((installation.owner, 404), (installation.stranger, 403)):
        with pytest.raises(ApiException) as refused:
            account._of("Secret").get(name="hub", namespace=namespace)
        assert refused.value.status == status


@pytest.mark.parametrize("resource", ["jobs", "pods", "approvals"])
def test_the_api_server_finds_no_mistake_in_the_types_of_the_policy(
    installation: Installation, resource: str
) -> None:
    policy = f"{installation.release}-{resource}"

    def read_status() -> Json | None:
        body = installation.api.get("ValidatingAdmissionPolicy", "", policy)
        status = (body or {}).get("status") or {}
        return status if "observedGeneration" in status else None

    assert wait_for("the types are checked", read_status)["typeChecking"] == {}
