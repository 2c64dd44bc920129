"""GitOps, for real: Argo CD keeps a namespace as a Git repository says, and knows how our resources are."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import argocd, binaries
from cluster.argocd import ArgoCD
from cluster.gitops import CHART, SAMPLE, GitOps, Repository, teach_health
from finetune_crds.resources import RESOURCES
from finetune_operator.names import scheduled_job_name
from finetune_operator.text import format_time
from fixtures.operator_processes.jobs import TRAINED, error, job, splits_given
from fixtures.operator_processes.registry import Registry
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import World
from integration.approval_policy import approval_policy
from support.api import Api
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
# Argo CD uses the kubeconfig of the administrator here.
ARGOCD_USER = "kubernetes-admin"
KEYS = [f"resource.customizations.health.finetune.dev_{kind.KIND}" for kind in RESOURCES]


@pytest.fixture(scope="module")
def running_argocd(plane: Plane, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArgoCD]:
    """Argo CD with our health scripts, put in as the chart's notes say."""
    with running(ArgoCD(plane.kubeconfig, tmp_path_factory.mktemp("argocd"))) as argo_cd:
        teach_health(plane.kubeconfig)
        yield argo_cd


@pytest.fixture
def gitops(world: World, running_argocd: ArgoCD, tmp_path: Path) -> Iterator[GitOps]:
    """An Application for the test's namespace, and its repository, empty as yet."""
    flow = GitOps(world.api, world.namespace, running_argocd, Repository(tmp_path / "repository", "finetune"))
    yield flow
    if flow.application():
        flow.delete()
        wait_for("the Application is gone", lambda: not world.remaining_pods() and not flow.application())


def test_the_scripts_of_the_notes_are_beside_what_was_there(running_argocd: ArgoCD, api: Api) -> None:
    data = (api.get("ConfigMap", argocd.NAMESPACE, "argocd-cm") or {})["data"]
    scripts = {
        key: (CHART / "argocd" / "finetune.dev" / key.rpartition("_")[2] / "health.lua").read_text("utf-8")
        for key in KEYS
    }
    assert {key: data[key] for key in KEYS} == scripts
    assert "resource.exclusions" in data


def test_argocd_takes_the_sample_and_the_chart_its_values(running_argocd: ArgoCD, plane: Plane) -> None:
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "create", "--dry-run=server"]
    done = subprocess.run(
        [*kubectl, "--validate=strict", "--filename", str(SAMPLE)],
        capture_output=True,
        text=True,
        check=False,
    )
    # NB: the API server warns of Argo CD's own finalizer, whose name has no path.
    assert done.returncode == 0, done.stderr
    source = next(yaml.safe_load_all(SAMPLE.read_text(encoding="utf-8")))["spec"]["source"]
    chart = CHART.parents[1] / source["path"]
    render = [
        str(binaries.path("helm")),
        "template",
        "x",
        str(chart),
        "--values",
        "-",
        "--kube-version",
        "1.37",
    ]
    values = yaml.safe_dump(source["helm"]["valuesObject"])
    done = subprocess.run(render, input=values, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_in_git_is_followed_to_its_end_and_never_out_of_sync(world: World, gitops: GitOps) -> None:
    first = gitops.repository.commit("Train", splits_given(suspend=False, register={"model": world.model}))
    gitops.create()
    gitops.wait_synced(first)
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1: ")
    world.run_pods("tune-train-1", 2)
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1 runs on 2 pods")
    gitops.wait_application("Progressing")

    run_id = world.status("tune")["mlflow"]["runId"]
    world.mlflow.log_metrics(run_id, step=40, max_steps=100, loss=3.25)
    wait_for("progress", lambda: world.status("tune").get("progress"))
    version = world.mlflow.register(world.model, run_id)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    gitops.wait_health("FineTuneJob", "tune", "Healthy", f"{world.model} version {version}, now candidate")
    gitops.wait_application("Healthy")

    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)


def test_self_heal_undoes_what_was_changed_by_hand_and_rests(world: World, gitops: GitOps) -> None:
    gitops.wait_synced(_commit_and_create(gitops, splits_given(suspend=True)))
    gitops.wait_health("FineTuneJob", "tune", "Suspended", "set suspend to false to resume")
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": False}})
    wait_for("Argo CD writes", lambda: gitops.operations() > 0)
    wait_for("it is suspended again", lambda: world.job("tune")["spec"]["suspend"])
    gitops.wait_health("FineTuneJob", "tune", "Suspended")
    gitops.look()
    healed = gitops.operations()
    gitops.look()
    assert gitops.operations() == healed


def test_a_job_suspended_in_git_goes_on_by_a_commit_and_fails_as_degraded(
    world: World, gitops: GitOps
) -> None:
    gitops.wait_synced(_commit_and_create(gitops, splits_given(suspend=True)))
    gitops.wait_health("FineTuneJob", "tune", "Suspended", "set suspend to false to resume")
    gitops.wait_application("Suspended")

    gitops.wait_synced(gitops.repository.commit("Go on", splits_given(suspend=False)))
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1: ")
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [65, 65], [error("DataWrong", "the column answer is empty"), None])
    gitops.wait_health("FineTuneJob", "tune", "Degraded", "the column answer is empty")
    gitops.wait_application("Degraded")

    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)


def test_deleting_the_application_leaves_nothing_of_a_running_job(world: World, gitops: GitOps) -> None:
    gitops.wait_synced(_commit_and_create(gitops, splits_given()))
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    uid = world.job("tune")["metadata"]["uid"]
    gitops.delete()

    def left() -> list[str]:
        world.remaining_pods()
        selector = f"finetune.dev/job-uid={uid}"
        owned = [
            kind
            for kind in ("Job", "Pod", "Service", "ConfigMap", "NetworkPolicy")
            if world.api.list(kind, world.namespace, selector)
        ]
        return [*owned, *(item["kind"] for item in world.api.list("FineTuneJob", world.namespace))]

    wait_for("nothing is left", lambda: not left() and not gitops.application())
    wait_for(
        "the run is closed",
        lambda: [run["info"]["status"] for run in world.mlflow.runs_of(uid)] == ["KILLED"],
    )


def test_a_schedule_in_git_is_resumed_and_its_job_stays(world: World, gitops: GitOps) -> None:
    time = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)

    def schedule(**spec: Any) -> Json:
        fields = {
            "schedule": f"{time.minute} {time.hour} * * *",
            "onlyIfDataChanged": True,
            "jobTemplate": {"spec": job(register={"model": world.model})["spec"]},
        }
        meta = {"name": "nightly", "namespace": world.namespace}
        body = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneSchedule", "metadata": meta}
        return {**body, "spec": fields | spec}

    gitops.wait_synced(_commit_and_create(gitops, schedule(suspend=True)))
    gitops.wait_health("FineTuneSchedule", "nightly", "Suspended", "spec.suspend is true")
    gitops.wait_application("Suspended")

    # As if its start times of two days were missed.
    missed = {"lastScheduleTime": format_time(time - timedelta(days=2))}
    world.api.patch("FineTuneSchedule", world.namespace, "nightly", {"status": missed}, status=True)
    gitops.wait_synced(gitops.repository.commit("Resume", schedule(suspend=False)))
    name = scheduled_job_name("nightly", time)
    gitops.wait_health("FineTuneSchedule", "nightly", "Healthy", f"FineTuneJob {name} was created")
    gitops.wait_application("Healthy")

    wrong = {"spec": {**job()["spec"], "method": {"type": "Full", "lora": {}}}}
    gitops.wait_synced(gitops.repository.commit("Mistake", schedule(jobTemplate=wrong)))
    gitops.wait_health("FineTuneSchedule", "nightly", "Degraded", "lora for LoRA, QLoRA and DoRA")
    gitops.wait_application("Degraded")

    # What a schedule creates is not in Git, and Argo CD prunes only what it has applied itself.
    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)
    assert world.job(name)["status"]["phase"] == "Preparing"


def test_approvals_in_git_need_an_account_that_the_tenants_file_names(
    world: World, gitops: GitOps, plane: Plane
) -> None:
    registry = Registry(world.api, world.mlflow, world.namespace, f"model-{world.namespace}")
    approvals = [{"version": registry.version(1.0), "by": "ann"}]
    body = promotion(registry, source={"type": "Version", "version": approvals[0]["version"]})
    tenant = {"namespaces": [world.namespace], "approvals": [{"alias": "champion"}]}
    with approval_policy(plane, f"without-{world.namespace}", [tenant]):
        wait_for("the policy counts", lambda: is_refused(plane, with_approvals(body, approvals)))
        gitops.repository.commit("Approve", with_approvals(body, approvals))
        gitops.create()
        gitops.wait_refusal("an approval that you add to spec.approvals must have your user name in by")
        assert world.api.get("ModelPromotion", world.namespace, "champion") is None
    with approval_policy(plane, f"with-{world.namespace}", [{**tenant, "gitOpsAccounts": [ARGOCD_USER]}]):
        gitops.wait_synced(gitops.repository.commit("Wait", body))
        gitops.wait_health("ModelPromotion", "champion", "Suspended", "waits for approval")
        gitops.wait_synced(gitops.repository.commit("Approve", with_approvals(body, approvals)))
        gitops.wait_health("ModelPromotion", "champion", "Healthy", "approved by ann")


def promotion(registry: Registry, **spec: Any) -> Json:
    """The champion of a model, which needs an approval."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": "champion", "namespace": registry.namespace},
        "spec": {"alias": "champion", "model": registry.model, "approval": {}, **spec},
    }


def with_approvals(body: Json, approvals: list[Json]) -> Json:
    return {**body, "spec": {**body["spec"], "approvals": approvals}}


def is_refused(plane: Plane, body: Json) -> bool:
    """Whether the API server refuses to create an object, as the user that Argo CD is in these tests."""
    kubectl = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "create", "--dry-run=server"]
    done = subprocess.run(
        [*kubectl, "-f", "-"], input=yaml.safe_dump(body), text=True, check=False, capture_output=True
    )
    return done.returncode != 0


def _commit_and_create(gitops: GitOps, *bodies: Json) -> str:
    revision = gitops.repository.commit("Begin", *bodies)
    gitops.create()
    return revision
