"""FineTuneJobs of the e2e tier: small ones, made from the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml

from demo.follow import ENDS, follow, line
from demo.install import NAMESPACE, SAMPLES, Installation
from demo.kubectl import Json, Kubectl
from support.waiting import wait_for

SPLITS = "s3://finetune/splits/docstrings"
STEPS = 90


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


@dataclass
class Jobs:
    """The jobs that a test applied."""

    installation: Installation
    names: list[str] = field(default_factory=list)

    @property
    def kubectl(self) -> Kubectl:
        """Kubectl on the tier's cluster."""
        return self.installation.place.kubectl

    def apply(self, *manifests: Json) -> str:
        """Apply manifests, one of them a FineTuneJob; return its name."""
        name = self.installation.apply_job(yaml.safe_dump_all(manifests))
        self.names.append(name)
        self.installation.terminal.say(f"\n        {name}")
        return name

    def follow(self, name: str, seen: Callable[[Json], None] = lambda _: None) -> Json:
        """Follow a job to its success."""
        return follow(self.kubectl, name, NAMESPACE, self.installation.terminal, timeout=1800, seen=seen)

    def get(self, name: str) -> Json:
        """The job as it is now."""
        found = self.kubectl.get("finetunejob", name, "--namespace", NAMESPACE)
        assert found is not None, f"{name} does not exist"
        return found

    def until(self, name: str, what: str, check: Callable[[Json], Any], *, seconds: float = 300) -> Json:
        """The job as soon as `check` holds for its status; it must not end before."""

        def reached() -> Json | None:
            job = self.get(name)
            status = job.get("status", {})
            if check(status):
                return job
            assert status.get("phase") not in ENDS, f"{name} ended before {what}: {status}"
            return None

        return wait_for(f"{name}: {what}", reached, seconds, instead=lambda: line(self.get(name)), pause=1)

    def ended(self, name: str, *, seconds: float = 300) -> Json:
        """The status of a job that has succeeded or failed."""

        def ended() -> Json | None:
            status: Json = self.get(name).get("status", {})
            return status if status.get("phase") in ENDS else None

        return wait_for(f"the end of {name}", ended, seconds, instead=lambda: line(self.get(name)), pause=1)

    def children(self, name: str) -> list[str]:
        """What exists of a job besides itself: kind/name of each."""
        kinds = "jobs,pods,services,configmaps"
        label = f"finetune.dev/job={name}"
        text = self.kubectl("get", kinds, "--namespace", NAMESPACE, "--selector", label, "--output", "name")
        return text.split()

    def logs(self, name: str, attempt: int = 1) -> str:
        """What every training pod of an attempt printed."""
        label = f"finetune.dev/job={name},finetune.dev/component=train,finetune.dev/attempt={attempt}"
        return self.kubectl("logs", "--namespace", NAMESPACE, "--selector", label, "--tail=-1")

    def remove(self) -> None:
        """Delete what was applied, and wait until it is gone."""
        if self.names:
            where = ("--namespace", NAMESPACE, "--ignore-not-found", "--cascade=foreground")
            self.kubectl("delete", "finetunejob", *self.names, *where, timeout=300)


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
