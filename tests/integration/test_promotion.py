"""Promotions on a real API server and a real MLflow: two operators that race, kills, deletion, a registry that is away."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from finetune_operator.registry.writer import build_lease_name
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.registry import DATA, GATES, NO_WORSE, Registry
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, metric, watching
from support.process import Process, running
from support.waiting import PATIENCE, wait_for


@dataclass
class Replicas:
    """Operators for the test's namespace."""

    kubeconfig: Path
    folder: Path
    namespace: str
    stack: ExitStack

    def start(self, name: str, mlflow: Mlflow) -> Process:
        log = self.folder / f"{name}.log"
        process = forked_operator(self.kubeconfig, log, watching(self.namespace, mlflow.uri))
        self.stack.enter_context(running(process))
        return process


@pytest.fixture
def registry(api: Api, mlflow_server: Mlflow, namespace: str) -> Registry:
    return Registry(api, mlflow_server, namespace, f"model-{namespace}")


@pytest.fixture
def watched(world: World) -> Registry:
    """A registry in a namespace of the operator that the worker's tests share."""
    return Registry(world.api, world.mlflow, world.namespace, f"model-{world.namespace}")


@pytest.fixture
def replicas(kubeconfig: Path, namespace: str, tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(kubeconfig, tmp_path, namespace, stack)
    for log in sorted(tmp_path.glob("*.log")):
        print(f"== {log.name}\n{log.read_text(encoding='utf-8')}")


def run_kubectl(plane: Plane, namespace: str, *arguments: str) -> str:
    """What kubectl prints."""
    command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "--namespace", namespace]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_worse_version_is_refused_and_people_see_why(watched: Registry, plane: Plane) -> None:
    good, worse = watched.version(2.0), watched.version(2.4)
    watched.point("staging", good)
    watched.apply(gates=[*GATES, NO_WORSE])
    watched.wait("Promoted", good)
    watched.point("staging", worse)
    status = watched.wait("Refused", good)
    assert [item["verdict"] for item in status["gates"]["verdicts"]] == ["Passed", "Failed"]

    kubectl = partial(run_kubectl, plane, watched.namespace)
    header, row = kubectl("get", "mprom").splitlines()
    assert header.split() == [
        *("NAME", "MODEL", "ALIAS", "PHASE", "REASON", "CURRENT", "CANDIDATE", "GATES", "AGE")
    ]
    shown = ["champion", watched.model, "champion", "Refused", "GateFailed", good, worse, "1/2"]
    assert row.split()[:8] == shown
    # The alias is still at a version that passed.
    kubectl("wait", "mprom/champion", "--for=condition=Ready", "--timeout=5s")
    events = kubectl("events", "--for", "modelpromotion/champion")
    assert (
        "eval_loss is 2.4, which does not meet <= 2.1, since version 1, which has the alias, has 2" in events
    )


def test_a_promotion_without_a_version_that_passed_is_not_ready(watched: Registry, plane: Plane) -> None:
    worse = watched.version(3.0)
    watched.point("staging", worse)
    watched.apply(gates=GATES)
    watched.wait("Refused", None)
    kubectl = partial(run_kubectl, plane, watched.namespace)
    kubectl("wait", "mprom/champion", "--for=condition=Ready=False", "--timeout=5s")
    ready, generation = watched.condition("Ready"), watched.get()["metadata"]["generation"]
    assert (ready["reason"], ready["observedGeneration"]) == ("GateFailed", generation)
    watched.patch(gates=[])
    kubectl("wait", "mprom/champion", "--for=condition=Ready", "--timeout=60s")
    assert watched.status()["current"] == worse


def test_data_that_differ_and_metrics_that_are_missing_are_waited_for(watched: Registry) -> None:
    good, candidate = watched.version(2.0), watched.version(1.0, data="d2")
    watched.point("champion", good)
    watched.point("staging", candidate)
    watched.apply(
        gates=[NO_WORSE, {"name": "reviewed", "type": "Tag", "tag": {"name": "reviewed", "equals": "yes"}}]
    )
    watched.wait("Pending", good)
    assert watched.condition("Ready")["reason"] == "GateInconclusive"
    assert watched.condition("GatesPassed")["message"] == (
        "version 2 cannot be judged yet: no-worse: version 2 (d2) and version 1, which has the alias (d1), were "
        "evaluated on different data or with different objectives: evaluate both versions on the same data with "
        "the same objectives; reviewed: version 2 has no tag reviewed, which must be 'yes'"
    )
    for key, value in (("reviewed", "yes"), (DATA, "d1")):
        watched.mlflow.post(
            "model-versions/set-tag",
            {"name": watched.model, "version": candidate, "key": key, "value": value},
        )
    watched.wait("Promoted", candidate)


def test_an_operator_that_is_killed_again_and_again_loses_nothing(
    registry: Registry, replicas: Replicas
) -> None:
    versions = [registry.version(2.0 - number / 10) for number in range(3)]
    registry.apply(gates=[*GATES, NO_WORSE])
    operator = replicas.start("operator", registry.mlflow)
    for number, version in enumerate(versions):
        registry.point("staging", version)
        # The moment differs: before the journal, between it and the alias, and after.
        wait_for("something of the move", partial(_reached, registry, version, number))
        operator.kill()
        operator.start()
        # NB: the Lease of an operator that was killed must expire first.
        registry.wait("Promoted", version, seconds=2 * PATIENCE)
    pairs = zip([None, *versions], versions, strict=False)
    assert registry.moves() == [("Promoted", before, after) for before, after in pairs]


def _reached(registry: Registry, version: str, how_far: int) -> bool:
    status = registry.status()
    journalled = ((status.get("journal") or {}).get("move") or {}).get("toVersion") == version
    moved = registry.alias("champion") == version
    return (status.get("candidate") == version or journalled, journalled or moved, moved)[how_far]


def test_two_replicas_that_race_make_each_move_once(registry: Registry, replicas: Replicas) -> None:
    """Both are at work, and either does without the other."""
    aliases = ["champion", "shadow", "canary"]
    versions: list[str] = []
    lease = build_lease_name(registry.mlflow.uri, registry.model)
    both = [replicas.start(name, registry.mlflow) for name in ("one", "other")]
    for alias in aliases:
        registry.apply(alias, gates=GATES)

    def promote() -> None:
        versions.append(registry.version(2.0))
        registry.point("staging", versions[-1])
        for alias in aliases:
            registry.wait("Promoted", versions[-1], alias)
        wait_for("the Lease was given back", lambda: registry.api.get("Lease", "default", lease) is None)

    for _ in range(4):
        before = [_passes(replica) for replica in both]
        promote()
        wait_for("passes of both", partial(_went_on, both, before), PATIENCE, *both)
    for replica in both:
        replica.kill()
        promote()
        replica.start()
    expected = [
        ("Promoted", before, after) for before, after in zip([None, *versions], versions, strict=False)
    ]
    assert {alias: registry.moves(alias) for alias in aliases} == dict.fromkeys(aliases, expected)


def _went_on(operators: list[Process], before: list[float]) -> bool:
    """Whether each took passes since it had taken so many."""
    return all(_passes(operator) > passes for operator, passes in zip(operators, before, strict=True))


def _passes(operator: Process) -> float:
    """How many passes over promotions it has taken."""
    return metric(operator, "finetune_operator_reconcile_seconds_count", kind="ModelPromotion")


def test_deletion_with_the_alias_waits_for_a_registry_that_is_away(
    api: Api, namespace: str, replicas: Replicas, tmp_path: Path
) -> None:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    mlflow = Mlflow(folder, forked=True)
    replicas.stack.enter_context(running(mlflow))
    registry = Registry(api, mlflow, namespace, "short-lived")
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.apply(onDelete="RemoveAlias")
    replicas.start("operator", mlflow)
    registry.wait("Promoted", version)
    wait_for("the finalizer", lambda: registry.get()["metadata"].get("finalizers"))
    mlflow.stop()
    api.delete("ModelPromotion", namespace, "champion")
    wait_for(
        "it says what it waits for",
        lambda: (
            "the deletion waits until the operator can remove alias"
            in registry.condition("RegistryReady").get("message", "")
        ),
        60,
    )
    mlflow.start()
    wait_for("the resource is gone", lambda: not registry.get())
    assert (registry.alias("champion"), registry.alias("staging")) == (None, version)


def test_a_registry_that_refuses_its_own_name_is_said_and_waited_for(
    api: Api, namespace: str, replicas: Replicas, tmp_path: Path
) -> None:
    folder = tmp_path / "mlflow"
    folder.mkdir()
    mlflow = Mlflow(folder, allowed_hosts="elsewhere.example.com", forked=True)
    open_to_all = Mlflow(folder, port=mlflow.port, forked=True)
    replicas.stack.enter_context(running(mlflow))
    registry = Registry(api, mlflow, namespace, "hidden")
    registry.apply()
    replicas.start("operator", mlflow)
    wait_for(
        "the host check is named",
        lambda: registry.condition("RegistryReady").get("reason") == "MlflowHostNotAllowed",
        60,
    )
    assert registry.status()["phase"] == "Pending"
    mlflow.stop()
    replicas.stack.enter_context(running(open_to_all))
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.wait("Promoted", version)


def test_two_installations_on_one_registry_do_not_both_move_an_alias(
    api: Api, mlflow_server: Mlflow, namespace: str, replicas: Replicas
) -> None:
    """Each has a namespace, a promotion and a Lease of its own; only the registry is shared."""
    other_namespace = new_namespace(api)
    model = f"model-{namespace}"
    one, other = (Registry(api, mlflow_server, name, model) for name in (namespace, other_namespace))
    first, second = one.version(2.0), one.version(2.0)
    one.apply(source={"type": "Version", "version": first}, tags={"team": "a"})
    other.apply(source={"type": "Version", "version": second})
    for registry in (one, other):
        settings = watching(registry.namespace, mlflow_server.uri) | {
            "FINETUNE_NAMESPACE": registry.namespace
        }
        log = replicas.folder / f"{registry.namespace}.log"
        replicas.stack.enter_context(running(forked_operator(replicas.kubeconfig, log, settings)))
    wait_for(
        "one of them has the alias, and the other says so",
        lambda: (
            sorted(registry.status().get("phase", "") for registry in (one, other)) == ["Blocked", "Promoted"]
        ),
        PATIENCE,
        instead=lambda: [one.status(), other.status()],
    )
    owner, loser = (one, other) if one.status()["phase"] == "Promoted" else (other, one)
    assert loser.condition("Accepted")["reason"] == "Conflict"
    assert (
        f"ModelPromotion {owner.namespace}/champion of installation" in loser.condition("Accepted")["message"]
    )
    # Neither moves the alias back and forth: each of ten edits of the loser's source leaves the alias where it is.
    version = owner.alias("champion")
    for source in (first, second) * 2:
        loser.patch(source={"type": "Version", "version": source})
        time.sleep(1)
        assert owner.alias("champion") == version
    assert (owner.moves(), loser.moves()) == ([("Promoted", None, version)], [])


def test_the_tags_of_an_alias_come_after_its_move(watched: Registry) -> None:
    """Two aliases of one version have tags of their own, and a version that is refused has none."""
    good, worse = watched.version(2.0), watched.version(3.0)
    watched.point("staging", good)
    for alias in ("champion", "shadow"):
        watched.apply(alias, gates=GATES)
        watched.wait("Promoted", good, alias)
    watched.point("staging", worse)
    watched.wait("Refused", good)

    def tags(version: str) -> set[str]:
        found = watched.mlflow.get("model-versions/get", name=watched.model, version=version)["model_version"]
        return {item["key"] for item in found.get("tags", [])}

    facts = ("at", "by", "from", "gates")
    assert tags(good) == {f"promoted_{alias}_{fact}" for alias in ("champion", "shadow") for fact in facts}
    assert tags(worse) == set()
