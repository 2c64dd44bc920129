"""The demo's promotions and its removal, step by step, with programs that record how kubectl and helm are called."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo import follow, install, place, promotions, rerun, wait
from demo.__main__ import train, up
from demo.install import CHART, CRDS, NAMESPACE, RELEASE, SYSTEM, Installation
from demo.kubectl import DemoError, Kubectl
from demo.place import Place
from demo.rerun import QUICKSTART
from demo.terminal import Terminal
from demo.wait import ProgressLimit

Json = dict[str, Any]
# Answers the nth `get` of an object with the nth line of its file, the last line for good, and records every other call.
PROGRAM = """#!/bin/sh
cd {folder}
shift 2
case "$1" in
get)
    file="$2-$3"
    [ -f "$file" ] || exit 0
    head -n 1 "$file"
    [ "$(wc -l < "$file")" -le 1 ] || sed -i 1d "$file"
    ;;
logs)
    [ ! -f log ] || cat log
    ;;
*) echo "{name} $*" >> calls ;;
esac
"""


@dataclass(frozen=True)
class Recorded:
    """An installation on a cluster that only answers."""

    folder: Path
    installation: Installation
    out: io.StringIO

    def answer(self, kind: str, name: str, *bodies: Json) -> None:
        """What the cluster answers when this object is read, one after the other."""
        lines = "".join(f"{json.dumps(body)}\n" for body in bodies)
        (self.folder / f"{kind}-{name}").write_text(lines, encoding="utf-8")

    def unread(self, kind: str, name: str) -> int:
        """How many answers are left."""
        return len((self.folder / f"{kind}-{name}").read_text(encoding="utf-8").splitlines())

    def calls(self) -> list[str]:
        """The calls that change something, in order."""
        file = self.folder / "calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


@pytest.fixture
def demo(tmp_path: Path) -> Recorded:
    for name in ("kubectl", "helm"):
        program = tmp_path / name
        program.write_text(PROGRAM.format(folder=tmp_path, name=name), encoding="utf-8")
        program.chmod(0o755)
    out = io.StringIO()
    kubectl = Kubectl(tmp_path / "kubectl", tmp_path / "kubeconfig")
    cluster = Place("demo", kubectl, tmp_path / "helm", *["image"] * 4)
    return Recorded(tmp_path, Installation(cluster, Terminal(out)), out)


def job(phase: str) -> Json:
    """A FineTuneJob, as the API server returns it."""
    return {"metadata": {"name": "quickstart"}, "status": {"phase": phase}}


def champion(phase: str, current: str, *conditions: Json, **parts: Any) -> Json:
    """The promotion champion, as the API server returns it."""
    status = {"phase": phase, "current": current, "observedGeneration": 1, "conditions": [*conditions]}
    return {"metadata": {"name": "champion", "generation": 1, **parts}, "status": status}


def test_demo_down_removes_promotions_before_the_operator(demo: Recorded) -> None:
    ours, foreign, _ = CRDS
    demo.answer("crd", ours, {"metadata": {"annotations": {"meta.helm.sh/release-name": RELEASE}}})
    demo.answer("crd", foreign, {"metadata": {"annotations": {"meta.helm.sh/release-name": "another"}}})
    demo.installation.remove()
    assert demo.calls() == [
        f"kubectl delete finetuneschedules --all --namespace {NAMESPACE}",
        f"kubectl delete modelpromotions --all --namespace {NAMESPACE}",
        f"kubectl delete finetunejobs --all --namespace {NAMESPACE}",
        f"helm uninstall {RELEASE} --namespace {SYSTEM} --ignore-not-found",
        f"kubectl delete namespace {NAMESPACE} --ignore-not-found",
        f"kubectl delete namespace {SYSTEM} --ignore-not-found",
        f"kubectl delete crd {ours}",
    ]


def test_the_chart_gets_the_images_in_the_parts_of_its_values(demo: Recorded) -> None:
    demo.installation.chart("resyncSeconds=5")
    (call,) = demo.calls()
    images = " ".join(
        f"--set-string {name}.{part}={value}"
        for name in ("image.operator", "image.prep", "image.trainer", "mlflow.image")
        for part, value in {"registry": "", "repository": "image", "tag": "latest", "digest": ""}.items()
    )
    assert call.startswith(f"helm upgrade --install {RELEASE} {CHART} --namespace {SYSTEM} {images} --set ")
    assert call.endswith(" --set resyncSeconds=5")


def test_an_earlier_promotion_is_deleted_with_its_alias(demo: Recorded) -> None:
    without, guarded = champion("Promoted", "1"), champion("Promoted", "1", finalizers=["finetune.dev/x"])
    demo.answer("modelpromotion", "champion", without, without, guarded, without)
    promotions.forget(demo.installation)
    change = json.dumps({"spec": {"onDelete": "RemoveAlias", "suspend": False}})
    assert demo.calls() == [
        f"kubectl patch modelpromotion champion --namespace {NAMESPACE} --type merge --patch {change}",
        f"kubectl delete modelpromotion champion --namespace {NAMESPACE} --ignore-not-found --cascade=foreground",
    ]
    # It waited for the finalizer: the answer that has one is read.
    assert demo.unread("modelpromotion", "champion") == 1


def test_a_rollback_is_followed_to_its_end(demo: Recorded) -> None:
    demo.answer("modelpromotion", "champion", champion("Promoting", "2"), champion("Promoted", "1"))
    promotions.roll_back(demo.installation, "1")
    change = json.dumps({"spec": {"rollbackTo": {"type": "Previous"}}})
    patch = f"kubectl patch modelpromotion champion --namespace {NAMESPACE} --type merge --patch {change}"
    assert demo.calls() == [patch]
    shown = [line.split()[2] for line in demo.out.getvalue().splitlines() if "current" in line]
    assert shown == ["Promoting", "Promoted"]


def test_a_promotion_that_fails_ends_the_demo_with_the_operators_message(demo: Recorded) -> None:
    ready = {"type": "Ready", "status": "False", "message": "no previous version is known"}
    demo.answer("modelpromotion", "champion", champion("Blocked", "2", ready))
    with pytest.raises(DemoError, match="champion is Blocked: no previous version is known"):
        promotions.roll_back(demo.installation, "1")


def test_a_promotion_that_makes_no_progress_ends_the_demo(
    demo: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotions, "SILENCE_SECONDS", 0)
    ready = {"type": "Ready", "status": "False", "message": "the registry does not respond"}
    demo.answer("modelpromotion", "champion", champion("Promoting", "2", ready))
    message = (
        "the ModelPromotion demo/champion made no progress for 0 s (Promoting: the registry does not respond): "
        "run `make demo` again, it continues where it stopped"
    )
    with pytest.raises(DemoError, match=f"^{re.escape(message)}$"):
        promotions.roll_back(demo.installation, "1")


APPLY = f"kubectl apply --namespace {NAMESPACE} --filename -"
DELETE = "kubectl delete {} {} --namespace demo --ignore-not-found --cascade=foreground"
JOBS: dict[str, tuple[list[str], list[str]]] = {
    "none is there": ([], [APPLY]),
    "one runs": (["Training"], []),
    "one has succeeded": (["Succeeded"], []),
    "one has failed": (["Failed"], [DELETE.format("finetunejob", "quickstart"), APPLY]),
}


@pytest.mark.parametrize(("phases", "calls"), JOBS.values(), ids=JOBS)
def test_a_job_that_has_not_failed_is_followed(demo: Recorded, phases: list[str], calls: list[str]) -> None:
    # An object that does not exist is an empty line.
    answers = [json.dumps(job(phase)) for phase in phases] or [""]
    lines = "".join(f"{answer}\n" for answer in [*answers, json.dumps(job("Succeeded"))])
    (demo.folder / "finetunejob-quickstart").write_text(lines, encoding="utf-8")
    assert train(demo.installation, QUICKSTART) == job("Succeeded")
    assert demo.calls() == calls


def test_a_job_that_makes_no_progress_ends_the_demo(demo: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ProgressLimit", partial(ProgressLimit, silence_seconds=0))
    demo.answer("finetunejob", "quickstart", job("Training"))
    with pytest.raises(
        DemoError,
        match=r"^the FineTuneJob demo/quickstart made no progress for 0 s \(Training\): run `make demo` again",
    ):
        train(demo.installation, QUICKSTART)


RUNNING: Json = {"status": {}}
COMPLETE: Json = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
SILENT = r"^the Job seed made no progress for 100 s \(it runs\): run `make demo` again, it continues where it stopped$"


@dataclass
class SlowJob:
    """A minute passes at each pause of the demo; in it the Job may write a line of its log."""

    log: Path
    is_silent: bool = False
    now: float = 0.0

    def pause(self, _: float) -> None:
        self.now += 60
        if not self.is_silent:
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"minute {self.now / 60:.0f}\n")


def slow_job(demo: Recorded, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool) -> None:
    (demo.folder / "log").write_text("it begins\n", encoding="utf-8")
    slow = SlowJob(demo.folder / "log", is_silent)
    monkeypatch.setattr(wait, "time", SimpleNamespace(sleep=slow.pause))
    limit = partial(ProgressLimit, silence_seconds=100, clock=lambda: slow.now)
    monkeypatch.setattr(install, "ProgressLimit", limit)


def test_a_job_whose_log_grows_may_take_long(demo: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_job(demo, monkeypatch, is_silent=False)
    demo.answer("job", "seed", *[RUNNING] * 5, COMPLETE)
    assert demo.installation.finish_script("seed").splitlines()[-1] == "minute 5"


def test_a_silent_job_ends_the_demo(demo: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_job(demo, monkeypatch, is_silent=True)
    demo.answer("job", "seed", RUNNING)
    with pytest.raises(DemoError, match=SILENT):
        demo.installation.finish_script("seed")


def test_the_installation_waits_with_reasons(demo: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment: Json = {
        "kind": "Deployment",
        "metadata": {"name": "demo-mlflow", "namespace": SYSTEM, "generation": 1},
        "spec": {"replicas": 1},
        "status": {"observedGeneration": 1, "updatedReplicas": 1},
    }
    container = {"name": "mlflow", "ready": False, "restartCount": 0, "state": {"running": {}}}
    pod = {
        "kind": "Pod",
        "metadata": {"name": "demo-mlflow-x", "namespace": SYSTEM},
        "status": {"containerStatuses": [container]},
    }
    up = {**deployment, "status": {**deployment["status"], "readyReplicas": 1}}
    demo.answer(
        "deployments,pods", "--namespace", {"items": [deployment, pod]}, {"items": []}, {"items": [up]}
    )
    monkeypatch.setattr(wait, "time", SimpleNamespace(sleep=lambda _: None))
    demo.installation.wait_ready()
    assert demo.out.getvalue() == (
        "        0:00  waiting for the installation: demo-mlflow "
        "(demo-mlflow-x: the container mlflow runs and is not ready yet)\n"
    )


def test_a_demo_that_came_to_its_end_starts_again(demo: Recorded) -> None:
    guarded = champion("Promoted", "1", finalizers=["finetune.dev/x"])
    demo.answer("finetunejob", "quickstart", job("Succeeded"))
    demo.answer("finetunejob", "quickstart-worse", job("Succeeded"))
    demo.answer("modelpromotion", "champion", {**guarded, "spec": {"rollbackTo": {"type": "Previous"}}})
    assert not rerun.clean_up(demo.installation)
    # The jobs first: a run that is interrupted between them is no unfinished demo.
    assert [call for call in demo.calls() if call.startswith("kubectl delete")] == [
        DELETE.format("finetunejob", "quickstart"),
        DELETE.format("finetunejob", "quickstart-worse"),
        DELETE.format("modelpromotion", "champion"),
    ]


def test_a_demo_that_stopped_at_its_second_job_continues_there(demo: Recorded) -> None:
    demo.answer("finetunejob", "quickstart", job("Succeeded"))
    demo.answer("finetunejob", "quickstart-worse", job("Training"))
    demo.answer("modelpromotion", "champion", {**champion("Promoted", "1"), "spec": {}})
    assert rerun.clean_up(demo.installation)
    assert demo.calls() == []


def test_the_second_half_repeats_no_job(demo: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "up", lambda *_: demo.installation.place)
    demo.answer("job", "seed", COMPLETE)
    for name, version in (("quickstart", "1"), ("quickstart-worse", "2")):
        body = {"metadata": {"name": name}, "status": {"phase": "Succeeded", "model": {"version": version}}}
        demo.answer("finetunejob", name, body)
    refused = champion("Refused", "1")
    refused["status"] |= {"candidate": "2", "gates": {"verdicts": []}}
    demo.answer("modelpromotion", "staging", refused)
    end = champion("Promoted", "1")
    end["status"]["history"] = []
    demo.answer(
        "modelpromotion",
        "champion",
        {**champion("Promoted", "1"), "spec": {}},
        champion("Promoted", "2"),
        end,
    )
    up("demo", demo.installation.terminal)
    # The installation is applied as it is; of the demo's jobs and promotions only the champion changes.
    calls = [call.split()[1:4] for call in demo.calls() if not call.startswith("kubectl apply --server-side")]
    assert calls == [
        ["upgrade", "--install", RELEASE],
        ["patch", "modelpromotion", "champion"],
        ["patch", "modelpromotion", "champion"],
    ]
