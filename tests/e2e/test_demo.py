"""The demo's second half, and how it is taken away, on this tier's cluster."""

from __future__ import annotations

from demo import promotions
from demo.install import NAMESPACE, SYSTEM, Installation
from e2e.hand import Hand
from e2e.jobs import Run

MODEL = "docstring-llama"
LOSS_OF_A_BAD_VERSION = 9.0


def test_promotions_tell_the_demos_story(run: Run, installation: Installation, hand: Hand) -> None:
    good = run.status["model"]["version"]
    promotions.forget(installation)  # of a cluster that was kept
    promotions.promote(installation, good)
    names = ("candidate", *promotions.NAMES)
    found = hand.aliases(MODEL)
    assert {name: found.get(name) for name in names} == dict.fromkeys(names, good)
    tags = hand.mlflow.get_model_version(MODEL, good).tags
    assert (tags["promoted_alias"], tags["promoted_by"], tags["service"]) == ("champion", "you", "docstrings")

    (worse,) = hand.register(MODEL, run.status["mlflow"]["runId"], LOSS_OF_A_BAD_VERSION)
    hand.move_alias(MODEL, "candidate", worse)
    promotions.refuse(installation, good, worse)
    promotions.overrule(installation, worse)
    promotions.roll_back(installation, good)
    found = hand.aliases(MODEL)
    assert {name: found.get(name) for name in names} == {
        "candidate": worse,
        "staging": good,
        "champion": good,
    }

    text = "\n".join(promotions.summary(installation))
    header, *rows = text.partition("The promotions\n")[2].splitlines()[:3]
    assert header.split()[:5] == ["NAME", "MODEL", "ALIAS", "PHASE", "CURRENT"]
    assert [row.split()[:5] for row in rows] == [
        ["staging", MODEL, "staging", "Refused", good],
        ["champion", MODEL, "champion", "RolledBack", good],
    ]
    history = text.partition("newest first\n")[2].splitlines()
    assert [line.split()[1:5] for line in history] == [
        [worse, "->", good, "RolledBack"],
        [good, "->", worse, "Promoted"],
        ["none", "->", good, "Promoted"],
    ]
    promotions.forget(installation)
    assert hand.aliases(MODEL) == {"candidate": worse}


def test_demo_leaves_nothing_in_a_cluster_that_stays(installation: Installation) -> None:
    installation.remove()
    kubectl = installation.place.kubectl
    left = [
        item["metadata"]["name"]
        for kind in ("namespaces", "crds", "clusterroles", "clusterrolebindings", "persistentvolumes")
        for item in kubectl.items(kind)
    ]
    ours = (NAMESPACE, SYSTEM)
    assert [name for name in left if name in ours or "finetune" in name] == []
