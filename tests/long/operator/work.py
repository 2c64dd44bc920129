"""FineTuneJobs and promotions whose course is known in advance, however often the operator or a server is away.

Each round of work is done by threads that play the kubelets, the trainer and the people; the operator does the rest.
What must be there at the end of a round is compared with what these threads did.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_crds.contract import EXIT_PREEMPTED
from finetune_operator import names
from fixtures.operator_processes.jobs import PREPARED, TRAINED, error, job, splits_given
from fixtures.operator_processes.registry import GATES, Registry
from fixtures.operator_processes.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.waiting import PATIENCE, wait_for

Json = dict[str, Any]
# NB: an operator may be killed many times meanwhile, and a Lease that it held then expires after a minute.
_SECONDS = 8 * PATIENCE
ALIASES = ("champion", "shadow")
GOOD, BAD = 2.0, 3.0


@dataclass(frozen=True)
class Course:
    """What a FineTuneJob must have come to.

    Attributes:
        name: of the FineTuneJob.
        phase: its last one.
        attempts: gangs that were started.
        restarts: of these, the ones that count.
        jobs: the child Jobs that are left: a suspended gang's is deleted.
        versions: registered from its run.
    """

    name: str
    phase: str
    attempts: int
    restarts: int
    jobs: frozenset[str]
    versions: tuple[str, ...]


@dataclass
class Work:
    """A namespace with promotions, and rounds of FineTuneJobs in it."""

    kubeconfig: Path
    mlflow: Mlflow
    namespace: str
    dice: random.Random
    moves: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """What the history of every promotion must be, oldest first: reason, from, to."""
    round: int = 0

    def __post_init__(self) -> None:
        self.world, self.registry = self._world(), self._registry()

    def begin(self) -> None:
        """Create the promotions, and wait until an operator has moved every alias for the first time."""
        for alias in ALIASES:
            self.registry.apply(alias, gates=GATES)
        self.promote(GOOD)

    @contextmanager
    def one_round(self) -> Iterator[list[Future[Course | None]]]:
        """Let work go on for the time of a block; yields what it will have come to."""
        self.round += 1
        courses = [self.plain, self.failing, self.suspended, self.deleted]
        round_ended = threading.Event()
        with ThreadPoolExecutor(len(courses) + 2) as threads:
            kubelets = threads.submit(self._remove_pods, round_ended)
            try:
                yield [
                    *(threads.submit(course, f"{course.__name__}-{self.round}") for course in courses),
                    threads.submit(self.promote, self.dice.choice((GOOD, GOOD, BAD))),
                ]
            finally:
                round_ended.set()
        kubelets.result()

    # FineTuneJobs. Each thread has its own connections.

    def plain(self, name: str) -> Course:
        """A job that is prepared, trained and registered."""
        world = self._world()
        world.submit(job(name))
        world.run_pods(f"{name}-prep", 1)
        world.end_pods(f"{name}-prep", [0], [PREPARED])
        version = self._train(world, name, 1, register=True)
        return self._end(world, name, ["prep", "train-1"], attempts=1, versions=(version,))

    def failing(self, name: str) -> Course:
        """A job whose first gang fails and whose second one is preempted."""
        world = self._world()
        world.submit(splits_given(name))
        world.run_pods(f"{name}-train-1", 2)
        world.end_pods(f"{name}-train-1", [1, 1], [error("PeerLost", "rank 2 is gone"), error("Boom", "!")])
        world.run_pods(f"{name}-train-2", 2)
        world.end_pods(f"{name}-train-2", [EXIT_PREEMPTED, EXIT_PREEMPTED], [None, None])
        version = self._train(world, name, 3, register=True)
        gangs = ["train-1", "train-2", "train-3"]
        return self._end(world, name, gangs, attempts=3, restarts=1, versions=(version,))

    def suspended(self, name: str) -> Course:
        """A job that people suspend while it trains, and resume."""
        world = self._world()
        world.submit(splits_given(name, register=None))
        world.run_pods(f"{name}-train-1", 2)
        world.wait_phase(name, "Training")
        world.api.patch("FineTuneJob", self.namespace, name, {"spec": {"suspend": True}})
        world.wait_phase(name, "Suspended")
        wait_for("the gang is gone", lambda: not self._pods(world, name))
        world.api.patch("FineTuneJob", self.namespace, name, {"spec": {"suspend": False}})
        self._train(world, name, 2, register=False)
        return self._end(world, name, ["train-2"], attempts=2)

    def deleted(self, name: str) -> None:
        """A job that people delete while it trains: nothing of it is left."""
        world = self._world()
        world.submit(splits_given(name))
        world.run_pods(f"{name}-train-1", 2)
        world.api.delete("FineTuneJob", self.namespace, name)
        kinds, selector = ("Job", "Pod", "Service", "ConfigMap", "NetworkPolicy"), f"{names.LABEL_JOB}={name}"
        wait_for(
            "nothing is left",
            lambda: not any(world.api.list(kind, self.namespace, selector) for kind in kinds),
            _SECONDS,
        )

    def _train(self, world: World, name: str, attempt: int, *, register: bool) -> str:
        """Play the trainer; the version that it registered."""
        pods = world.run_pods(f"{name}-train-{attempt}", 2)
        environment = {item["name"]: item.get("value") for item in pods[0]["spec"]["containers"][0]["env"]}
        run_id = str(environment["MLFLOW_RUN_ID"])
        version = self.mlflow.register(world.model, run_id) if register else ""
        world.end_pods(f"{name}-train-{attempt}", [0, 0], [TRAINED, None])
        return version

    def _end(
        self,
        world: World,
        name: str,
        children: list[str],
        *,
        attempts: int,
        restarts: int = 0,
        versions: tuple[str, ...] = (),
    ) -> Course:
        world.wait_phase(name, "Succeeded")
        world.wait_condition(name, "Tracked", "RunFinished")
        jobs = frozenset(f"{name}-{child}" for child in children)
        return Course(name, "Succeeded", attempts, restarts, jobs, versions)

    # Promotions.

    def promote(self, loss: float) -> None:
        """A version is staged: every alias is moved to it once, or to none that does not pass."""
        registry = self._registry()
        holder = self.moves[-1][2] if self.moves else None
        version = self._stage(loss)
        if loss == GOOD:
            self.moves.append(("Promoted", holder, version))
        expected = ("Promoted", version) if loss == GOOD else ("Refused", holder)
        for alias in ALIASES:
            registry.wait(*expected, alias, seconds=_SECONDS)

    def _stage(self, loss: float) -> str:
        version = self.registry.version(loss)
        self.registry.point("staging", version)
        return version

    # What must hold.

    def check_no_two_gangs(self) -> None:
        """At no time do pods of two attempts of a job run."""
        gangs: dict[str, set[str]] = {}
        for pod in self.world.api.list("Pod", self.namespace):
            labels = pod["metadata"]["labels"]
            trains = labels.get(names.LABEL_COMPONENT) == names.TRAIN
            if trains and pod.get("status", {}).get("phase") in ("Pending", "Running"):
                gangs.setdefault(labels[names.LABEL_JOB], set()).add(labels["batch.kubernetes.io/job-name"])
        assert all(len(attempts) == 1 for attempts in gangs.values()), gangs

    def check(self, courses: list[Course | None]) -> None:
        """Every job and every promotion came to what it had to come to, and to nothing more."""
        expected = [course for course in courses if course]
        assert [self._course(course.name) for course in expected] == expected
        for course in expected:
            runs = self.mlflow.runs_of(self.world.job(course.name)["metadata"]["uid"])
            assert [run["info"]["status"] for run in runs] == ["FINISHED"], course.name
        for alias in ALIASES:
            assert self.registry.moves(alias) == self.moves[-20:]
            assert self.registry.alias(alias) == self.moves[-1][2]

    def _course(self, name: str) -> Course:
        status = self.world.status(name)
        selector = f"{names.LABEL_JOB}={name}"
        jobs = self.world.api.list("Job", self.namespace, selector)
        version = status.get("model", {}).get("version")
        return Course(
            name,
            status["phase"],
            status["attempt"],
            status["restarts"],
            frozenset(item["metadata"]["name"] for item in jobs),
            (version,) if version else (),
        )

    def clear(self) -> None:
        """Delete the round's jobs."""
        for item in self.world.api.list("FineTuneJob", self.namespace):
            self.world.api.delete("FineTuneJob", self.namespace, item["metadata"]["name"])

    # Connections.

    def _world(self) -> World:
        return World(Api(self.kubeconfig), self.mlflow, self.namespace, patience=_SECONDS)

    def _registry(self) -> Registry:
        return Registry(Api(self.kubeconfig), self.mlflow, self.namespace, f"model-{self.namespace}")

    def _pods(self, world: World, name: str) -> list[Json]:
        return world.api.list("Pod", self.namespace, f"{names.LABEL_JOB}={name}")

    def _remove_pods(self, round_ended: threading.Event) -> None:
        """Play the kubelets: what is to be deleted stops soon."""
        world = self._world()
        while not round_ended.wait(0.2):
            world.remaining_pods()
