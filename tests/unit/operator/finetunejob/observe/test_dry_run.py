"""What the API server's answer to a dry run means."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.finetunejob.model import DryRunAnswer, FineTuneJob
from finetune_operator.finetunejob.observe.dry_run import DryRunner, run_dry_runs
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import ftj

Json = dict[str, Any]
BODIES: list[Json] = [
    {"kind": "Job", "metadata": {"name": "tune-train-1", "namespace": "team"}},
    {"kind": "Pod", "metadata": {"name": "tune-train-1-0", "namespace": "team"}},
]
JOB = ftj()
ADMITTED = DryRunAnswer(True, ConditionReason.PODS_ADMITTED, "the API server would create the training pods")
TYPO = (
    'Job in version "v1" cannot be handled as a Job: strict decoding error: unknown field '
    '"spec.template.spec.containers[0].resource"'
)
QUOTA = 'pods "tune-train-1-0" is forbidden: exceeded quota: gpus, requested: pods=1, used: pods=4, limited: pods=4'
POLICY = 'pods "tune-train-1-0" is forbidden: violates PodSecurity "restricted:latest": privileged'
NO_RIGHT = (
    'pods is forbidden: User "system:serviceaccount:fs:op" cannot create resource "pods" in API group "" in the '
    'namespace "team"'
)
WEBHOOK = 'admission webhook "w.example.org" does not support dry run'
ACCOUNT = 'pods "tune-train-1-0" is forbidden: error looking up service account team/default: not found'

REFUSALS: dict[str, tuple[str, KubeError, DryRunAnswer]] = {
    "a typo": (
        "Job",
        KubeError(400, TYPO),
        DryRunAnswer(
            False,
            ConditionReason.POD_TEMPLATE_INVALID,
            f"the API server would reject Job tune-train-1: {TYPO}",
        ),
    ),
    "a value that cannot be": (
        "Job",
        KubeError(422, "Invalid value"),
        DryRunAnswer(
            False,
            ConditionReason.POD_TEMPLATE_INVALID,
            "the API server would reject Job tune-train-1: Invalid value",
        ),
    ),
    "a quota": (
        "Pod",
        KubeError(403, QUOTA),
        DryRunAnswer(
            False,
            ConditionReason.QUOTA_EXCEEDED,
            f"the API server would reject Pod tune-train-1-0 now: {QUOTA}; the preparation continues, and the pods "
            "are created after the preparation",
        ),
    ),
    "a policy": (
        "Pod",
        KubeError(403, POLICY),
        DryRunAnswer(
            False,
            ConditionReason.POD_REJECTED,
            f"the API server would reject Pod tune-train-1-0: {POLICY}",
        ),
    ),
    "no right to create pods": (
        "Pod",
        KubeError(403, NO_RIGHT),
        DryRunAnswer(
            None,
            ConditionReason.NOT_CHECKED,
            f"the training pods are not checked before they are created: {NO_RIGHT}",
        ),
    ),
    "a webhook that knows no dry run": (
        "Pod",
        KubeError(400, WEBHOOK),
        DryRunAnswer(
            None,
            ConditionReason.NOT_CHECKED,
            f"the training pods are not checked before they are created: {WEBHOOK}",
        ),
    ),
    "a Job that exists": ("Job", KubeError(409, "already exists"), ADMITTED),
}


async def test_the_job_and_a_pod_are_asked_about_and_neither_is_created() -> None:
    kube = StandIn()
    assert await run_dry_runs(kube, BODIES) == ADMITTED
    assert (kube.done("rehearse"), kube.objects) == (["Job/tune-train-1", "Pod/tune-train-1-0"], {})


@pytest.mark.parametrize(("kind", "error", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal(kind: str, error: KubeError, expected: DryRunAnswer) -> None:
    kube = StandIn()
    kube.refuse["rehearse", kind] = error
    assert await run_dry_runs(kube, BODIES) == expected


async def test_a_refusal_of_the_evaluation_says_that_it_is_about_it() -> None:
    labels = {"finetune.dev/component": "evaluate"}
    body = {"kind": "Job", "metadata": {"name": "tune-evaluate", "namespace": "team", "labels": labels}}
    kube = StandIn()
    kube.refuse["rehearse", "Job"] = KubeError(422, "no")
    message = "the API server would reject Job tune-evaluate: no"
    expected = DryRunAnswer(False, ConditionReason.POD_TEMPLATE_INVALID, message, component="evaluate")
    assert await run_dry_runs(kube, [body]) == expected


@pytest.mark.parametrize(
    "error",
    [KubeError(0, "away"), KubeError(500, "failed calling webhook"), KubeError(403, ACCOUNT)],
    ids=lambda item: str(item.status),
)
async def test_a_dry_run_that_cannot_be_made(error: KubeError, caplog: pytest.LogCaptureFixture) -> None:
    kube = StandIn()
    kube.refuse["rehearse", "Pod"] = error
    message = f"a dry run cannot check Pod tune-train-1-0: {error}: retrying"
    assert await run_dry_runs(kube, BODIES) == DryRunAnswer(None, ConditionReason.CHECK_FAILED, message)
    assert [record.getMessage() for record in caplog.records] == [
        f"team/Pod tune-train-1-0 cannot be checked by a dry run: {error}"
    ]


async def test_a_queue_is_looked_for_before_the_pods_are_asked_about() -> None:
    kube = StandIn()
    kube.refuse = {("list", kind): KubeError(404, "not found") for kind in ("LocalQueue", "LocalQueueBeta1")}
    job, pod = BODIES
    queue_state = {**job, "metadata": {**job["metadata"], "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
    assert await run_dry_runs(kube, [queue_state, pod]) == DryRunAnswer(
        False,
        ConditionReason.QUEUE_INADMISSIBLE,
        "queue gpus cannot admit the job, because Kueue is not installed in this cluster",
    )
    assert kube.done("rehearse") == []


@dataclass
class Asked:
    """Dry runs of one job on a stand-in for the API server, with a clock."""

    kube: StandIn = field(default_factory=StandIn)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.dry_runner = DryRunner(self.kube, lambda: self.seconds)

    async def look(self, of: FineTuneJob = JOB) -> tuple[DryRunAnswer, int]:
        """The answer, and how many dry runs it took."""
        self.kube.asked.clear()
        answer = await self.dry_runner.run(of, BODIES)
        return answer, len(self.kube.asked)


MAY_CHANGE = {
    "a policy": KubeError(403, POLICY),
    "a typo": KubeError(400, TYPO),
    "a webhook that fails": KubeError(500, "failed calling webhook"),
}


@pytest.mark.parametrize("error", MAY_CHANGE.values(), ids=MAY_CHANGE)
async def test_a_refused_dry_run_is_repeated_with_growing_delays(error: KubeError) -> None:
    world = Asked()
    world.kube.refuse["rehearse", "Job"] = error
    delays = []
    for _ in range(9):
        answer, is_asked = await world.look()
        assert is_asked == 1
        delays.append(answer.retry_seconds or 0)
        world.seconds += delays[-1] / 2
        again = replace(answer, retry_seconds=delays[-1] / 2)
        assert await world.look() == (again, 0)
        world.seconds += delays[-1] / 2
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    del world.kube.refuse["rehearse", "Job"]
    assert await world.look() == (ADMITTED, 2)


async def test_an_accepted_dry_run_is_repeated_only_when_the_spec_changes() -> None:
    world = Asked()
    assert await world.look() == (ADMITTED, 2)
    assert await world.look() == (ADMITTED, 0)
    assert await world.look(replace(JOB, generation=2)) == (ADMITTED, 2)
    assert await world.look(replace(JOB, uid="other")) == (ADMITTED, 2)


async def test_a_changed_spec_and_other_jobs_are_asked_about_at_once() -> None:
    world = Asked()
    world.kube.refuse["rehearse", "Job"] = KubeError(400, TYPO)
    await world.look()
    world.seconds = 1
    answer, _ = await world.look()
    assert answer.retry_seconds == 2
    answer, is_asked = await world.look(replace(JOB, generation=2))
    assert (answer.retry_seconds, is_asked) == (1, 1)
    assert (await world.look(replace(JOB, uid="other")))[1] == 1


NEVER_AGAIN = {
    "a quota": KubeError(403, QUOTA),
    "no right to create pods": KubeError(403, NO_RIGHT),
}


@pytest.mark.parametrize("error", NEVER_AGAIN.values(), ids=NEVER_AGAIN)
async def test_an_answer_that_keeps_no_job_from_starting_is_not_asked_for_again(error: KubeError) -> None:
    world = Asked()
    world.kube.refuse["rehearse", "Pod"] = error
    assert (await world.look())[0].retry_seconds is None
    assert world.dry_runner.has_checked(JOB)


async def test_a_generation_is_checked_when_the_api_server_has_answered() -> None:
    world = Asked()
    assert not world.dry_runner.has_checked(JOB)
    await world.look()
    assert world.dry_runner.has_checked(JOB)
    assert not world.dry_runner.has_checked(replace(JOB, generation=2))
    world.dry_runner.forget(JOB)
    assert not world.dry_runner.has_checked(JOB)


async def test_pods_that_are_not_checked_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    kube = StandIn()
    kube.refuse["rehearse", "Pod"] = KubeError(403, NO_RIGHT)
    await run_dry_runs(kube, BODIES)
    assert [record.getMessage() for record in caplog.records] == [
        f"team/Pod tune-train-1-0 is not checked by a dry run: {NO_RIGHT}"
    ]


REVIEW: Json = {
    "kind": "LocalSubjectAccessReview",
    "metadata": {"namespace": "team"},
    "spec": {"user": "system:serviceaccount:team:finetune-spark"},
}
FORBIDDEN = DryRunAnswer(
    False,
    ConditionReason.EXECUTORS_FORBIDDEN,
    "ServiceAccount finetune-spark is not allowed to create pods in namespace team, which Spark's driver must do: "
    "add the namespace to spark.namespaces of the chart, bind a Role to the account, or set "
    "spec.pods.prepare.serviceAccountName to another account, and the job continues",
)


@pytest.mark.parametrize(("allowed", "expected"), [(True, ADMITTED), (False, FORBIDDEN)])
async def test_an_account_that_may_not_create_pods(allowed: bool, expected: DryRunAnswer) -> None:
    answered = {**REVIEW, "status": {"allowed": allowed}}
    assert await run_dry_runs(StandIn(), [*BODIES, answered]) == expected


async def test_a_review_that_the_operator_may_not_ask_for_checks_nothing() -> None:
    kube = StandIn()
    refused = KubeError(403, NO_RIGHT.replace('"pods"', '"localsubjectaccessreviews"'))
    kube.refuse["rehearse", "LocalSubjectAccessReview"] = refused
    assert (await run_dry_runs(kube, [*BODIES, REVIEW])).reason == ConditionReason.NOT_CHECKED
