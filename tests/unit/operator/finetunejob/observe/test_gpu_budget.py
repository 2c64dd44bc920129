"""Which jobs of a tenant may have GPUs at the same time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.observe.gpu_budget import GpuBudget
from finetune_operator.finetunejob.observe.observer import read_finetunejob
from finetune_operator.owners import find_owner
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.model import Tenancy
from finetune_operator.tenancy.permissions import Permissions
from fixtures.operator_in_memory.decisions import SETTINGS, SPLITS

Json = dict[str, Any]
LIMIT = 8


def job(
    name: str,
    gpus: int,
    condition: str = "",
    *,
    namespace: str = "team-a",
    nodes: int = 1,
    age: int = 0,
    suspend: bool = False,
    phase: str = "",
) -> Json:
    """A job with so many GPUs a node, and a condition such as `Accepted True`; `age`: seconds before others were created."""
    conditions = []
    for text in condition.split(", ") if condition else []:
        kind, is_true, *reasons = text.split()
        reason, since = [*reasons, "Because"][0], "2026-08-01T12:00:00Z"
        conditions.append(
            {"type": kind, "status": is_true, "reason": reason, "message": "m", "lastTransitionTime": since}
        )
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": f"2026-08-01T12:00:{30 - age:02}Z",
        },
        "spec": {
            "model": {"base": "/m"},
            "data": SPLITS,
            "distributed": {"nodes": nodes, "gpusPerNode": gpus},
            "suspend": suspend,
        },
        "status": {"conditions": conditions} | ({"phase": phase} if phase else {}),
    }


def pod(job_name: str, gpus: int, phase: str = "Running") -> Json:
    """A pod of a job."""
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{job_name}-train-1-0",
            "namespace": "team-a",
            "uid": f"uid-of-pod-{job_name}",
            "resourceVersion": "1",
            "labels": {"finetune.dev/job-uid": f"uid-{job_name}"},
            "ownerReferences": [
                {"apiVersion": "batch/v1", "kind": "Job", "name": "a", "uid": "u", "controller": True}
            ],
        },
        "spec": {"containers": [{"name": "train", "resources": limits}]},
        "status": {"phase": phase},
    }


def budget(*bodies: Json) -> GpuBudget:
    store = Store(find_owner)
    for kind in ("FineTuneJob", "Pod"):
        store.replace(kind, [body for body in bodies if body["kind"] == kind], 1)
    file = TenancyFile("tenancy.yaml")
    tenants = [{"namespaces": ["team-*"], "maxGpus": LIMIT}, {"namespaces": ["free"]}]
    file.tenancy = Tenancy.model_validate({"tenants": tenants})
    return GpuBudget(store, SETTINGS, Permissions(SETTINGS, file))


def refuse(all_jobs: GpuBudget, body: Json) -> tuple[ConditionReason, str] | None:
    refusal = all_jobs.refuse(read_finetunejob(body, SETTINGS.defaults))
    return None if refusal is None else (refusal.reason, refusal.message.partition(":")[0])


def waits(gpus: int, used: int) -> tuple[ConditionReason, str]:
    sentence = (
        f"the job needs {gpus} GPUs, and older jobs of its tenant have or wait for {used} of 8 (maxGpus)"
    )
    return ConditionReason.GPU_LIMIT_REACHED, sentence


def with_template(role: str, limits: Json) -> Json:
    """A job without GPUs of its own whose pods of a role have limits."""
    body = job("new", 0)
    container = {"name": "main", "resources": {"limits": limits, "requests": limits}}
    template = {"spec": {"containers": [container]}}
    body["spec"] |= {"distributed": {"nodes": 1}, "pods": {role: {"template": template}}}
    return body


def being_deleted(body: Json) -> Json:
    body["metadata"]["deletionTimestamp"] = "2026-08-01T12:01:00Z"
    return body


WAITING = "Accepted False GpuLimitReached"
CASES: dict[str, tuple[Json, list[Json], tuple[ConditionReason, str] | None]] = {
    "alone": (job("new", 4, nodes=2), [], None),
    "more than the tenant may ever have": (
        job("new", 9),
        [],
        (
            ConditionReason.NOT_PERMITTED,
            "the job needs 9 GPUs, and the jobs of its tenant may have 8 at the same time (maxGpus)",
        ),
    ),
    "beside others that fit": (job("new", 4), [job("a", 4, "Accepted True")], None),
    "beside others, in another namespace of the tenant": (
        job("new", 4),
        [job("a", 5, "Accepted True", namespace="team-b")],
        waits(4, 5),
    ),
    "beside others of another tenant": (
        job("new", 8),
        [job("a", 8, "Accepted True", namespace="free")],
        None,
    ),
    "a tenant without a limit": (
        job("new", 80, namespace="free"),
        [job("a", 8, "Accepted True", namespace="free")],
        None,
    ),
    "beside finished ones": (
        job("new", 8),
        [job("a", 8, "Accepted True", phase="Succeeded"), job("b", 8, "Accepted True", phase="Failed")],
        None,
    ),
    "beside suspended ones": (
        job("new", 8),
        [
            job("a", 8, "Accepted True", suspend=True),
            job("b", 8, "Accepted True, Suspended True"),
        ],
        None,
    ),
    "beside one that is being deleted": (
        job("new", 8),
        [being_deleted(job("a", 8, "Accepted True")), being_deleted(job("b", 8, WAITING, age=5))],
        None,
    ),
    "beside ones that have not begun": (job("new", 8), [job("a", 8)], None),
    "behind an older one that waits": (
        job("new", 1),
        [job("a", 6, "Accepted True"), job("b", 3, WAITING, age=5)],
        waits(1, 9),
    ),
    "before a younger one that waits": (
        job("new", 2, age=5),
        [job("a", 6, "Accepted True"), job("b", 3, WAITING)],
        None,
    ),
    "one whose pods run, whatever the limit is now": (
        job("new", 9, "Accepted True"),
        [pod("new", 9), job("a", 8, "Accepted True")],
        None,
    ),
    "one that has begun and whose template has grown": (
        job("new", 6, "Accepted True"),
        [pod("new", 1), job("a", 8, "Accepted True")],
        waits(6, 8),
    ),
    "one that restarts, behind nobody who waits": (
        job("new", 4, "Accepted True"),
        [job("a", 4, "Accepted True"), job("b", 4, WAITING, age=5)],
        None,
    ),
    "beside pods of a job that is not permitted any longer": (
        job("new", 1),
        [job("a", 0, "Accepted False NotPermitted", suspend=True), pod("a", 8)],
        waits(1, 8),
    ),
    "beside pods of a job that is being deleted or does not exist": (
        job("new", 2),
        [being_deleted(job("a", 4, "Accepted True")), pod("a", 4), pod("gone", 3)],
        waits(2, 7),
    ),
    "beside a job with fewer pods than it may have": (
        job("new", 1),
        [job("a", 4, "Accepted True", nodes=2), pod("a", 4)],
        waits(1, 8),
    ),
    "beside pods that have ended": (job("new", 8), [pod("a", 8, "Succeeded")], None),
    "one that goes on after a suspension": (
        job("new", 4, "Accepted True, Suspended True"),
        [job("a", 8, "Accepted True")],
        waits(4, 8),
    ),
    "one that is suspended": (
        job("new", 4, suspend=True),
        [job("a", 8, "Accepted True")],
        None,
    ),
    "one with GPUs in parts, in its evaluation": (
        with_template("evaluate", {"nvidia.com/mig-1g.5gb": "9", "cpu": "64"}),
        [],
        (
            ConditionReason.NOT_PERMITTED,
            "the job needs 9 GPUs, and the jobs of its tenant may have 8 at the same time (maxGpus)",
        ),
    ),
    "one with GPUs of another kind in its training": (
        with_template("train", {"amd.com/gpu": 5}),
        [job("a", 4, "Accepted True")],
        waits(5, 4),
    ),
    "one without GPUs": (
        job("new", 0) | {"spec": {"model": {"base": "/m"}, "data": SPLITS}},
        [job("a", 8, "Accepted True")],
        None,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_which_jobs_wait(case: tuple[Json, list[Json], tuple[ConditionReason, str] | None]) -> None:
    body, others, expected = case
    assert refuse(budget(body, *others), body) == expected


def test_two_passes_at_the_same_time_do_not_let_both_begin() -> None:
    """The status of the first does not say yet that it has begun."""
    first, second = job("first", 8), job("second", 8)
    all_jobs = budget(first, second)
    assert refuse(all_jobs, first) is None
    assert refuse(all_jobs, second) == waits(8, 8)
    assert refuse(all_jobs, first) is None
    # The first is suspended before its status says that it was accepted.
    suspended = copy.deepcopy(first)
    suspended["spec"]["suspend"] = True
    suspended["metadata"]["resourceVersion"] = "2"
    all_jobs.store.replace("FineTuneJob", [suspended, second], 2)
    assert refuse(all_jobs, second) is None
    # It goes on only when the second has ended.
    resumed = copy.deepcopy(first)
    resumed["metadata"]["resourceVersion"] = "3"
    all_jobs.store.replace("FineTuneJob", [resumed, second], 3)
    assert refuse(all_jobs, resumed) == waits(8, 8)


def test_a_change_of_the_pods_counts() -> None:
    running, new = with_template("train", {"amd.com/gpu": 2}), job("other", 4)
    running["status"] = job("a", 0, "Accepted True")["status"]
    all_jobs = budget(running, new)
    assert refuse(all_jobs, new) is None
    all_jobs.forget(read_finetunejob(new, SETTINGS.defaults))
    changed = with_template("train", {"amd.com/gpu": 5})
    changed["status"] = running["status"]
    changed["metadata"] |= {"generation": 2, "resourceVersion": "2"}
    all_jobs.store.replace("FineTuneJob", [changed, new], 2)
    assert refuse(all_jobs, new) == waits(4, 5)


def test_a_job_that_is_not_accepted_gives_its_gpus_back() -> None:
    first, second = job("first", 8), job("second", 8)
    all_jobs = budget(first, second)
    assert refuse(all_jobs, first) is None
    wrong = job("first", 8, "Accepted False PodTemplateInvalid")
    parsed = read_finetunejob(wrong, SETTINGS.defaults)
    all_jobs.settle(parsed, parsed.status)
    assert refuse(all_jobs, second) is None


def test_a_deleted_job_gives_its_gpus_back() -> None:
    first, second = job("first", 8), job("second", 8)
    all_jobs = budget(first, second)
    assert refuse(all_jobs, first) is None
    all_jobs.store.replace("FineTuneJob", [second], 2)
    all_jobs.forget(read_finetunejob(first, SETTINGS.defaults))
    assert refuse(all_jobs, second) is None
