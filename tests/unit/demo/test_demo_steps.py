"""The demo's promotions and its removal, step by step, with programs that record how kubectl and helm are called."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo import promotions
from demo.install import CHART, CRDS, NAMESPACE, RELEASE, SYSTEM, Installation
from demo.kubectl import DemoError, Kubectl
from demo.place import Place
from demo.terminal import Terminal

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
    place = Place("demo", kubectl, tmp_path / "helm", *["image"] * 4)
    return Recorded(tmp_path, Installation(place, Terminal(out)), out)


def champion(phase: str, current: str, *conditions: Json, **parts: Any) -> Json:
    """The promotion champion, as the API server returns it."""
    status = {"phase": phase, "current": current, "observedGeneration": 1, "conditions": [*conditions]}
    return {"metadata": {"name": "champion", "generation": 1, **parts}, "status": status}


def test_demo_down_removes_promotions_before_the_operator(demo: Recorded) -> None:
    ours, foreign = CRDS
    demo.answer("crd", ours, {"metadata": {"annotations": {"meta.helm.sh/release-name": RELEASE}}})
    demo.answer("crd", foreign, {"metadata": {"annotations": {"meta.helm.sh/release-name": "another"}}})
    demo.installation.remove()
    assert demo.calls() == [
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
