"""GitOps on the real cluster: Argo CD syncs a job and the promotions that carry its version, and commits steer them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.argocd import ArgoCD
from cluster.gitops import GitOps, Repository, teach_health
from demo import place
from demo.install import NAMESPACE, Installation
from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Jobs, Run, on_prepared_splits
from support.api import Api
from support.process import running
from support.waiting import wait_for

JOB = "delivered"
MODEL = f"{JOB}-{uuid.uuid4().hex[:6]}"  # its first version is 1, also on a cluster that was kept
SECONDS_OF_TRAINING = 900
KNOWS_NOTHING, NOBODY_REACHES = 9.0, 0.1
BETTER = 4.0


@pytest.fixture
def gitops(run: Run, installation: Installation, tmp_path: Path) -> Iterator[GitOps]:
    """Argo CD, and an Application for the namespace in which the quickstart has run; its repository is empty."""
    if not place.is_ours():
        pytest.skip("Argo CD is not put into a cluster that people use")
    kubeconfig = installation.place.kubectl.kubeconfig
    with running(ArgoCD(kubeconfig, tmp_path / "argocd")) as argocd:
        teach_health(kubeconfig)
        flow = GitOps(Api(kubeconfig), NAMESPACE, argocd, Repository(tmp_path / "repository", "finetune"))
        yield flow
        if flow.application():
            flow.delete()
            wait_for("the Application is gone", lambda: not flow.application(), 120)


def test_commits_train_approve_roll_back_and_prune(gitops: GitOps, jobs: Jobs, run: Run, hand: Hand) -> None:
    job = on_prepared_splits(JOB, maxSteps=10, evalEverySteps=10, logEverySteps=2)
    job["spec"]["register"] = {"model": MODEL, "aliases": []}
    candidate = promotion("candidate", source={"type": "FineTuneJob", "fineTuneJobRef": {"name": JOB}})
    staging = promotion(
        "staging", source={"type": "Alias", "alias": "candidate"}, gates=[at_most(KNOWS_NOTHING)]
    )
    first = gitops.repository.commit("Train, and promote what comes", job, candidate, staging, champion("1"))
    gitops.create()
    gitops.wait_synced(first)
    gitops.wait_health(
        "FineTuneJob", JOB, "Progressing", "attempt 1 runs on 2 pods", seconds=SECONDS_OF_TRAINING
    )
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Progressing")
    gitops.wait_application("Progressing")

    gitops.wait_health("FineTuneJob", JOB, "Healthy", f"{MODEL} version 1", seconds=SECONDS_OF_TRAINING)
    gitops.wait_health("ModelPromotion", f"{JOB}-candidate", "Healthy", "candidate is version 1")
    gitops.wait_health("ModelPromotion", f"{JOB}-staging", "Healthy", "staging is version 1")
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Suspended", "add {version: 1, by: NAME}")
    gitops.wait_application("Suspended")
    assert hand.aliases(MODEL) == {"candidate": "1", "staging": "1"}

    gitops.wait_synced(gitops.repository.commit("Approve 1", champion("1", approved="1")))
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Healthy", "champion is version 1")
    gitops.wait_application("Healthy")

    run_id = run.status["mlflow"]["runId"]
    assert hand.register(MODEL, run_id, BETTER) == ["2"]
    gitops.wait_synced(gitops.repository.commit("Champion 2", champion("2", approved="2")))
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Healthy", "champion is version 2")
    assert hand.aliases(MODEL) == {"candidate": "1", "staging": "1", "champion": "2"}

    gitops.wait_synced(gitops.repository.revert())
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Healthy", "version 1")
    assert hand.aliases(MODEL) == {"candidate": "1", "staging": "1", "champion": "1"}

    strict = champion("2", approved="2", loss=NOBODY_REACHES)
    gitops.wait_synced(gitops.repository.commit("Champion 2, if it is perfect", strict))
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Healthy", str(NOBODY_REACHES))
    gitops.wait_application("Healthy")
    gitops.wait_synced(gitops.repository.revert())
    gitops.wait_health("ModelPromotion", f"{JOB}-champion", "Healthy", "version 1")
    gitops.wait_application("Healthy")
    gitops.look()
    assert (set(gitops.syncs_seen), gitops.operations()) == ({"Synced"}, 0)

    gitops.delete()
    wait_for("nothing is left", lambda: not left(gitops, jobs), 120)
    assert hand.aliases(MODEL) == {"candidate": "1", "staging": "1", "champion": "1"}


def promotion(alias: str, **spec: Any) -> Json:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "ModelPromotion",
        "metadata": {"name": f"{JOB}-{alias}"},
        "spec": {"model": MODEL, "alias": alias, **spec},
    }


def champion(version: str, approved: str | None = None, loss: float = KNOWS_NOTHING) -> Json:
    """The champion's promotion, as it is in a commit."""
    source = {"type": "Version", "version": version}
    approvals = [{"version": approved, "by": "ann"}] if approved else []
    return promotion("champion", source=source, gates=[at_most(loss)], approval={}, approvals=approvals)


def at_most(loss: float) -> Json:
    return {"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": loss}}


def left(gitops: GitOps, jobs: Jobs) -> list[str]:
    """What the Application's deletion has not taken away yet."""
    objects = [*jobs.api.list("ModelPromotion", NAMESPACE), *jobs.api.list("FineTuneJob", NAMESPACE)]
    names = [item["metadata"]["name"] for item in objects]
    return [
        *(name for name in names if name.startswith(JOB)),
        *jobs.children(JOB),
        *([gitops.name] if gitops.application() else []),
    ]
