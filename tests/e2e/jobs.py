"""FineTuneJobs of the e2e tier: small ones, made from the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event
from typing import Any

import yaml

from demo.follow import ENDS, complaints, failure, line
from demo.install import NAMESPACE, SAMPLES, Installation
from demo.kubectl import Json, Kubectl
from demo.promotions import STUCK, current, why
from support.api import Api
from support.waiting import wait_for

SPLITS = "s3://finetune/splits/docstrings"
STEPS = 90
_JOB_SECONDS = 1800
_PAUSE = 0.3


def quickstart(**training: Any) -> Json:
    """The quickstart, with other hyperparameters."""
    job = sample("quickstart")
    job["spec"]["training"] |= training
    return job


def on_prepared_splits(name: str, **training: Any) -> Json:
    """A job that trains on the quickstart's splits at once, on one rank a node: ranks take long to start."""
    job = quickstart(**training)
    job["metadata"]["name"] = name
    job["spec"]["data"] = {
        "columns": {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
        "splits": {"type": "Delta", "path": SPLITS},
    }
    job["spec"]["distributed"]["processesPerNode"] = 1
    del job["spec"]["register"]
    return job


def sample(name: str) -> Json:
    """The FineTuneJob of a sample."""
    parts = yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))
    return next(part for part in parts if part["kind"] == "FineTuneJob")


@dataclass(frozen=True)
class Jobs:
    """FineTuneJobs of the tier's cluster, and what their promotions say.

    NB: what is looked at again and again is read without kubectl, each call of which costs a tenth of a second of a core.
    """

    installation: Installation
    api: Api
    cancelled: Event = field(default_factory=Event, repr=False)
    """Set at the end of the tier: what still follows a job fails."""

    @property
    def kubectl(self) -> Kubectl:
        """Kubectl on the tier's cluster."""
        return self.installation.place.kubectl

    def apply(self, *manifests: Json) -> str:
        """Apply manifests, one of them a FineTuneJob; return its name. One of that name, of a cluster that was kept, goes first."""
        name = next(str(each["metadata"]["name"]) for each in manifests if each["kind"] == "FineTuneJob")
        if self.api.get("FineTuneJob", NAMESPACE, name):
            self.installation.delete("finetunejob", name)
        self.installation.apply(yaml.safe_dump_all(manifests))
        return name

    def get(self, name: str) -> Json:
        """The job as it is now."""
        assert not self.cancelled.is_set(), f"the tests ended while {name} was followed"
        job = self.api.get("FineTuneJob", NAMESPACE, name)
        assert job is not None, f"{name} does not exist"
        return job

    def follow(self, name: str, on_read: Callable[[Json], None] = lambda _: None) -> Json:
        """Follow a job to its success, and show each of its phases."""
        shown: list[str] = []

        def succeeded() -> Json | None:
            job = self.get(name)
            on_read(job)
            phase = job.get("status", {}).get("phase") or "Pending"
            for text in [phase, *complaints(job)]:
                if text not in shown:
                    shown.append(text)
                    self.installation.terminal.detail(f"{name}: {text}")
            assert phase != "Failed", failure(job)
            return job if phase == "Succeeded" else None

        return wait_for(
            f"{name} succeeds", succeeded, _JOB_SECONDS, instead=lambda: line(self.get(name)), pause=_PAUSE
        )

    def until(self, name: str, what: str, check: Callable[[Json], Any], *, seconds: float = 300) -> Json:
        """The job as soon as `check` holds for its status; it must not end before."""

        def reached() -> Json | None:
            job = self.get(name)
            status = job.get("status", {})
            if check(status):
                return job
            assert status.get("phase") not in ENDS, f"{name} ended before {what}: {status}"
            return None

        return wait_for(
            f"{name}: {what}", reached, seconds, instead=lambda: line(self.get(name)), pause=_PAUSE
        )

    def ended(self, name: str, *, seconds: float = 300) -> Json:
        """The status of a job that has succeeded or failed."""

        def ended() -> Json | None:
            status: Json = self.get(name).get("status", {})
            return status if status.get("phase") in ENDS else None

        return wait_for(
            f"the end of {name}", ended, seconds, instead=lambda: line(self.get(name)), pause=_PAUSE
        )

    def promotion(
        self, name: str, reached: Callable[[Json], bool], *, stuck: tuple[str, ...] = STUCK
    ) -> Json:
        """The status of a ModelPromotion as soon as it is of the present spec and as expected.

        Args:
            name: its name.
            reached: whether a status is as expected.
            stuck: phases that end the wait, with a failure.
        """

        def expected() -> Json | None:
            promotion = self.api.get("ModelPromotion", NAMESPACE, name)
            assert promotion is not None, f"{name} does not exist"
            if not current(promotion):
                return None
            status: Json = promotion["status"]
            if reached(status):
                return status
            assert status.get("phase") not in stuck, f"{name} is {status['phase']}: {why(promotion)}"
            return None

        def instead() -> str:
            return str(self.api.get("ModelPromotion", NAMESPACE, name))

        return wait_for(f"the ModelPromotion {name}", expected, instead=instead, pause=_PAUSE)

    def pods(self, name: str, component: str = "train") -> list[str]:
        """The pods of a job that exist, of one component."""
        label = f"finetune.dev/job={name},finetune.dev/component={component}"
        return [pod["metadata"]["name"] for pod in self.api.list("Pod", NAMESPACE, label)]

    def children(self, name: str) -> list[str]:
        """What exists of a job besides itself: kind/name of each."""
        return [
            f"{kind}/{child['metadata']['name']}"
            for kind in ("Job", "Pod", "Service", "ConfigMap", "NetworkPolicy")
            for child in self.api.list(kind, NAMESPACE, f"finetune.dev/job={name}")
        ]

    def suspend(self, name: str, *, value: bool) -> None:
        """Suspend a job, or let it go on."""
        self.installation.patch("finetunejob", name, {"suspend": value})

    def logs(self, name: str, attempt: int = 1) -> str:
        """What every training pod of an attempt printed."""
        label = f"finetune.dev/job={name},finetune.dev/component=train,finetune.dev/attempt={attempt}"
        return self.kubectl("logs", "--namespace", NAMESPACE, "--selector", label, "--tail=-1")

    def delete(self, name: str) -> None:
        """Delete a job, and wait for nothing."""
        self.kubectl("delete", "finetunejob", name, "--namespace", NAMESPACE, "--wait=false")


@dataclass
class Run:
    """A job that succeeded, and what its status said on the way."""

    job: Json
    statuses: list[Json] = field(default_factory=list)

    @property
    def status(self) -> Json:
        """What it says at the end."""
        status: Json = self.job["status"]
        return status

    def over_time(self, field_: str) -> list[Any]:
        """The values that a field of progress went through."""
        values = [(status.get("progress") or {}).get(field_) for status in self.statuses]
        return [after for before, after in pairwise([None, *values]) if after is not None and after != before]


def steps(log: str) -> list[int]:
    """The steps that a log reports: `step 7/40 ...`."""
    return [int(line.split()[1].split("/")[0]) for line in log.splitlines() if line.startswith("step ")]


def condition(status: Json, kind: str) -> Json:
    """A condition by its type; empty when there is none."""
    return next((item for item in status.get("conditions", []) if item["type"] == kind), {})
