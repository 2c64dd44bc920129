"""GitOps, for real: Argo CD keeps a namespace as a Git repository says, and knows how our resources are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import argocd, binaries
from cluster.argocd import ArgoCD
from cluster.controlplane import ControlPlane
from integration.gitops import SAMPLE, GitOps, Repository
from integration.jobs import TRAINED, error, splits_given
from integration.world import Api, World, wait_for

CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
Json = dict[str, Any]
KEYS = [f"resource.customizations.health.finetune.dev_{kind}" for kind in ("FineTuneJob", "ModelPromotion")]


@pytest.fixture(scope="module")
def running_argocd(
    plane: ControlPlane, api: Api, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ArgoCD]:
    """Argo CD with our health scripts, put in as the chart's notes say."""
    with ArgoCD(plane.kubeconfig, tmp_path_factory.mktemp("argocd")) as found:
        _do_as_the_notes_say(plane, api)
        yield found


def _do_as_the_notes_say(plane: ControlPlane, api: Api) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "finetune-system"}})
    environment = {
        **os.environ,
        "KUBECONFIG": str(plane.kubeconfig),
        "PATH": f"{plane.kubectl.parent}:{os.environ['PATH']}",
    }

    def run(*argv: str, given: str | None = None) -> str:
        done = subprocess.run(argv, input=given, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    chart = ["finetune-operator", str(CHART), "--namespace", "finetune-system"]
    values = ["--set", "argocd.healthConfigMap.enabled=true", "--set", "crds.enabled=false"]
    helm = str(binaries.path("helm"))
    notes = run(helm, "install", *chart, *values, "--dry-run=server").partition("NOTES:")[2].splitlines()
    rendered = run(helm, "template", *chart, *values, "--validate", "--show-only", "templates/argocd.yaml")
    run("kubectl", "apply", "--filename", "-", given=rendered)
    run("sh", "-c", next(line for line in notes if "patch configmap argocd-cm" in line))


@pytest.fixture
def gitops(world: World, running_argocd: ArgoCD, tmp_path: Path) -> Iterator[GitOps]:
    """An Application for the test's namespace, and its repository, empty as yet."""
    found = GitOps(world, running_argocd, Repository(tmp_path / "repository", "finetune"))
    yield found
    if found.application():
        found.delete()
        wait_for(
            "the Application is gone", lambda: not world.remaining_pods() and not found.application(), 60
        )


def test_the_scripts_of_the_notes_are_beside_what_was_there(running_argocd: ArgoCD, api: Api) -> None:
    data = (api.get("ConfigMap", argocd.NAMESPACE, "argocd-cm") or {})["data"]
    scripts = {
        key: (CHART / "argocd" / "finetune.dev" / key.rpartition("_")[2] / "health.lua").read_text("utf-8")
        for key in KEYS
    }
    assert {key: data[key] for key in KEYS} == scripts
    assert "resource.exclusions" in data


def test_argocd_takes_the_sample_and_the_chart_its_values(
    running_argocd: ArgoCD, plane: ControlPlane
) -> None:
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
        "1.34",
    ]
    values = yaml.safe_dump(source["helm"]["valuesObject"])
    done = subprocess.run(render, input=values, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_job_in_git_is_followed_to_its_end_and_never_out_of_sync(gitops: GitOps) -> None:
    world = gitops.world
    first = gitops.repository.commit("Train", splits_given(suspend=False))
    gitops.create()
    gitops.wait_synced(first)
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1: ")
    world.run_pods("tune-train-1", 2)
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1 runs on 2 pods")
    gitops.wait_application("Progressing")

    run_id = world.status("tune")["mlflow"]["runId"]
    world.mlflow.log_metrics(run_id, step=40, max_steps=100, loss=3.25)
    wait_for("progress", lambda: world.status("tune").get("progress"))
    version = world.mlflow.register("tuned", run_id)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    gitops.wait_health("FineTuneJob", "tune", "Healthy", f"tuned version {version}, now candidate")
    gitops.wait_application("Healthy")

    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)


def test_self_heal_undoes_what_was_changed_by_hand_and_rests(gitops: GitOps) -> None:
    world = gitops.world
    gitops.wait_synced(_commit_and_create(gitops, splits_given(suspend=True)))
    gitops.wait_health("FineTuneJob", "tune", "Suspended", "suspend: false goes on")
    world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"suspend": False}})
    wait_for("Argo CD writes", lambda: gitops.operations() > 0, 60)
    wait_for("it is suspended again", lambda: world.job("tune")["spec"]["suspend"])
    gitops.wait_health("FineTuneJob", "tune", "Suspended")
    gitops.look()
    healed = gitops.operations()
    gitops.look()
    assert gitops.operations() == healed


def test_a_job_suspended_in_git_goes_on_by_a_commit_and_fails_as_degraded(gitops: GitOps) -> None:
    world = gitops.world
    gitops.wait_synced(_commit_and_create(gitops, splits_given(suspend=True)))
    gitops.wait_health("FineTuneJob", "tune", "Suspended", "suspend: false goes on")
    gitops.wait_application("Suspended")

    gitops.wait_synced(gitops.repository.commit("Go on", splits_given(suspend=False)))
    gitops.wait_health("FineTuneJob", "tune", "Progressing", "attempt 1: ")
    world.run_pods("tune-train-1", 2)
    world.end_pods("tune-train-1", [65, 65], [error("DataWrong", "the column answer is empty"), None])
    gitops.wait_health("FineTuneJob", "tune", "Degraded", "the column answer is empty")
    gitops.wait_application("Degraded")

    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)


def test_three_promotions_in_git_are_approved_reverted_and_refused_by_commits(gitops: GitOps) -> None:
    world = gitops.world
    model = f"tuned-{world.namespace}"
    pipeline = Pipeline(model)
    gitops.wait_synced(_commit_and_create(gitops, *pipeline.manifests()))
    gitops.wait_health("ModelPromotion", "candidate", "Progressing")
    gitops.wait_application("Progressing")

    run_id = _train(gitops, model)
    gitops.wait_health("FineTuneJob", "tune", "Healthy", f"{model} version 1")
    gitops.wait_health("ModelPromotion", "candidate", "Healthy", "candidate is version 1")
    gitops.wait_health("ModelPromotion", "staging", "Healthy", "staging is version 1")
    gitops.wait_health("ModelPromotion", "champion", "Suspended", "set spec.approval.version to 1")
    gitops.wait_application("Suspended")
    assert _aliases(world, model) == {"candidate": "1", "staging": "1"}

    gitops.wait_synced(gitops.repository.commit("Approve 1", pipeline.champion("1", approved="1")))
    gitops.wait_health("ModelPromotion", "champion", "Healthy", "champion is version 1")
    gitops.wait_application("Healthy")

    assert world.mlflow.register(model, run_id) == "2"
    gitops.wait_synced(gitops.repository.commit("Champion 2", pipeline.champion("2", approved="2")))
    gitops.wait_health("ModelPromotion", "champion", "Healthy", "champion is version 2")
    assert _aliases(world, model) == {"candidate": "1", "staging": "1", "champion": "2"}

    gitops.wait_synced(gitops.repository.revert())
    gitops.wait_health("ModelPromotion", "champion", "Healthy", "version 1")
    assert _aliases(world, model) == {"candidate": "1", "staging": "1", "champion": "1"}

    strict = pipeline.champion("2", approved="2", least=0.95)
    gitops.wait_synced(gitops.repository.commit("Champion 2, if it is very good", strict))
    gitops.wait_health("ModelPromotion", "champion", "Degraded", "0.95")
    gitops.wait_application("Degraded")
    gitops.wait_synced(gitops.repository.revert())
    gitops.wait_health("ModelPromotion", "champion", "Healthy", "version 1")
    gitops.wait_application("Healthy")
    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)

    gitops.delete()
    kinds = ("ModelPromotion", "FineTuneJob", "Job")
    wait_for(
        "nothing is left",
        lambda: (
            not world.remaining_pods()
            and not gitops.application()
            and not any(world.api.list(kind, world.namespace) for kind in kinds)
        ),
        60,
    )
    assert _aliases(world, model) == {"candidate": "1", "staging": "1", "champion": "1"}


@dataclass
class Pipeline:
    """A job, and the three promotions through which its version goes."""

    model: str

    def manifests(self) -> list[Json]:
        job = splits_given(register={"model": self.model, "aliases": []})
        candidate = self._promotion("candidate", source={"fineTuneJob": "tune"})
        staging = self._promotion("staging", source={"alias": "candidate"}, gates=[self._gate(0.8)])
        return [job, candidate, staging, self.champion("1")]

    def champion(self, version: str, approved: str | None = None, least: float = 0.8) -> Json:
        approval = {"required": True} | ({"version": approved, "by": "ann"} if approved else {})
        gates = [self._gate(least)]
        return self._promotion("champion", source={"version": version}, gates=gates, approval=approval)

    def _promotion(self, alias: str, **spec: Any) -> Json:
        return {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "ModelPromotion",
            "metadata": {"name": alias},
            "spec": {"model": self.model, "alias": alias, **spec},
        }

    @staticmethod
    def _gate(least: float) -> Json:
        return {"name": "accuracy", "metric": {"name": "accuracy", "min": least}}


def _train(gitops: GitOps, model: str) -> str:
    """Play the trainer to the end; the MLflow run."""
    world = gitops.world
    # NB: the operator imports MLflow when it is first needed.
    world.wait_condition("tune", "Tracked", "RunReady", 120)
    world.run_pods("tune-train-1", 2)
    run_id = str(world.wait_phase("tune", "Training")["mlflow"]["runId"])
    world.mlflow.log_metrics(run_id, accuracy=0.9)
    world.mlflow.register(model, run_id)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    return run_id


def _aliases(world: World, model: str) -> dict[str, str]:
    found = world.mlflow.get("registered-models/get", name=model)["registered_model"].get("aliases", [])
    return {item["alias"]: item["version"] for item in found}


def test_deleting_the_application_leaves_nothing_of_a_running_job(gitops: GitOps) -> None:
    world = gitops.world
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
            for kind in ("Job", "Pod", "Service", "ConfigMap")
            if world.api.list(kind, world.namespace, selector)
        ]
        return [*owned, *(item["kind"] for item in world.api.list("FineTuneJob", world.namespace))]

    wait_for("nothing is left", lambda: not left() and not gitops.application(), 60)
    wait_for(
        "the run is closed",
        lambda: [run["info"]["status"] for run in world.mlflow.runs_of(uid)] == ["KILLED"],
    )


def _commit_and_create(gitops: GitOps, *bodies: Json) -> str:
    revision = gitops.repository.commit("Begin", *bodies)
    gitops.create()
    return revision
