"""What the API server's answer to a dry run means."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.finetunejob.model import Rehearsal
from finetune_operator.finetunejob.rehearse import rehearse
from finetune_operator.kube import KubeError
from standins.kube import StandIn

Json = dict[str, Any]
BODIES: list[Json] = [
    {"kind": "Job", "metadata": {"name": "tune-train-1", "namespace": "team"}},
    {"kind": "Pod", "metadata": {"name": "tune-train-1-0", "namespace": "team"}},
]
ADMITTED = Rehearsal(True, ConditionReason.PODS_ADMITTED, "the API server would create the training pods")
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

REFUSALS: dict[str, tuple[str, KubeError, Rehearsal]] = {
    "a typo": (
        "Job",
        KubeError(400, TYPO),
        Rehearsal(
            False,
            ConditionReason.POD_TEMPLATE_INVALID,
            f"Job tune-train-1 would be refused: {TYPO}: correct spec.podTemplate, and the job goes on",
        ),
    ),
    "a value that cannot be": (
        "Job",
        KubeError(422, "Invalid value"),
        Rehearsal(
            False,
            ConditionReason.POD_TEMPLATE_INVALID,
            "Job tune-train-1 would be refused: Invalid value: correct spec.podTemplate, and the job goes on",
        ),
    ),
    "a quota": (
        "Pod",
        KubeError(403, QUOTA),
        Rehearsal(
            False,
            ConditionReason.QUOTA_EXCEEDED,
            f"Pod tune-train-1-0 would be refused now: {QUOTA}; the preparation goes on, and the pods are created after "
            "it",
        ),
    ),
    "a policy": (
        "Pod",
        KubeError(403, POLICY),
        Rehearsal(
            False,
            ConditionReason.POD_REJECTED,
            f"Pod tune-train-1-0 would be refused: {POLICY}: correct spec.podTemplate, and the job goes on",
        ),
    ),
    "no right to create pods": (
        "Pod",
        KubeError(403, NO_RIGHT),
        Rehearsal(
            None,
            ConditionReason.NOT_CHECKED,
            f"the training pods are not checked before they are created: {NO_RIGHT}",
        ),
    ),
    "a webhook that knows no dry run": (
        "Pod",
        KubeError(400, WEBHOOK),
        Rehearsal(
            None,
            ConditionReason.NOT_CHECKED,
            f"the training pods are not checked before they are created: {WEBHOOK}",
        ),
    ),
    "a Job that exists": ("Job", KubeError(409, "already exists"), ADMITTED),
}


async def test_the_job_and_a_pod_are_asked_about_and_neither_is_created() -> None:
    kube = StandIn()
    assert await rehearse(kube, BODIES) == ADMITTED
    assert (kube.done("rehearse"), kube.objects) == (["Job/tune-train-1", "Pod/tune-train-1-0"], {})


@pytest.mark.parametrize(("kind", "error", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_a_refusal(kind: str, error: KubeError, expected: Rehearsal) -> None:
    kube = StandIn()
    kube.refuse["rehearse", kind] = error
    assert await rehearse(kube, BODIES) == expected


@pytest.mark.parametrize("error", [KubeError(0, "away"), KubeError(500, "oops"), KubeError(403, ACCOUNT)])
async def test_what_passes_by_itself_is_tried_again(error: KubeError) -> None:
    kube = StandIn()
    kube.refuse["rehearse", "Pod"] = error
    with pytest.raises(KubeError):
        await rehearse(kube, BODIES)


async def test_pods_that_are_not_checked_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    kube = StandIn()
    kube.refuse["rehearse", "Pod"] = KubeError(403, NO_RIGHT)
    await rehearse(kube, BODIES)
    assert [record.getMessage() for record in caplog.records] == [
        f"team/Pod tune-train-1-0 is not checked by a dry run: {NO_RIGHT}"
    ]
