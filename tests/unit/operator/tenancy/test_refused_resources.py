"""Jobs, promotions and schedules that the tenancy does not permit: nothing is read or written for them but their status."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.controller.store import Store
from finetune_operator.finetuneschedule.decide import decide
from finetune_operator.finetuneschedule.observe import FineTuneScheduleObserver
from finetune_operator.owners import find_owner
from finetune_operator.settings import Settings
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.model import Tenancy
from finetune_operator.tenancy.permissions import Permissions
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import NO_MLFLOW, NOW, SETTINGS, UID
from fixtures.operator_in_memory.parts import parts
from fixtures.operator_in_memory.schedules import TEMPLATE, schedule
from unit.operator.modelpromotion.champion import world

Json = dict[str, Any]
KEY = ("FineTuneJob", "team", "tune")
JOB: Json = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
    "spec": {
        "model": {"base": "/m"},
        "data": {
            "columns": {"type": "PromptResponse", "prompt": "prompt", "response": "response"},
            "splits": {"type": "Delta", "path": "/data/splits", "version": 3},
        },
        "tracking": {"uri": "http://10.0.0.1", "secretRef": {"name": "of-somebody"}},
    },
}
NO_TENANT = "namespace team belongs to no tenant: ask the platform team to add the namespace to tenancy.tenants of the chart"


def permissions(*tenants: Json, settings: Settings = SETTINGS) -> Permissions:
    file = TenancyFile("tenancy.yaml")
    file.tenancy = Tenancy.model_validate({"tenants": list(tenants)})
    return Permissions(settings, file)


def for_others() -> Permissions:
    return permissions({"namespaces": ["other"]})


async def pass_over(body: Json, allowed: Permissions) -> StandIn:
    """What the API server was asked in one pass, and what it has then."""
    kube = StandIn(body)
    store, _, reconciler = parts(kube, SETTINGS, lambda: 0.0)
    reconciler.permissions = allowed
    store.replace("FineTuneJob", [kube.objects[KEY]], kube.version)
    await reconciler.handle("team/tune")
    return kube


async def test_of_a_refused_job_only_the_status_is_written() -> None:
    kube = await pass_over(JOB, for_others())
    assert kube.asked == [("create", "Event", kube.asked[0][2]), ("status", "FineTuneJob", "tune")]
    status = kube.objects[KEY]["status"]
    said = {item["type"]: (item["status"], item["reason"], item["message"]) for item in status["conditions"]}
    assert (status["phase"], said) == (
        "Pending",
        {
            "Accepted": ("False", "NotPermitted", NO_TENANT),
            "Ready": ("False", "NotPermitted", NO_TENANT),
            "Stalled": ("True", "NotPermitted", NO_TENANT),
        },
    )


async def test_a_job_that_is_not_permitted_any_longer_keeps_its_children() -> None:
    """Nothing is started, registered or deleted for it; its pods run to their end."""
    kube = StandIn(JOB | {"spec": {**JOB["spec"], "tracking": {}}})
    store, _, reconciler = parts(kube, NO_MLFLOW, lambda: 0.0)
    store.replace("FineTuneJob", [kube.objects[KEY]], kube.version)
    reconciler.permissions = permissions({"namespaces": ["team"]}, settings=NO_MLFLOW)
    await reconciler.handle("team/tune")
    assert "Job/tune-train-1" in kube.done("create")
    reconciler.permissions = for_others()
    kube.asked.clear()
    await reconciler.handle("team/tune")
    assert [(verb, kind) for verb, kind, _ in kube.asked] == [("create", "Event"), ("status", "FineTuneJob")]
    assert (kube.objects[KEY]["status"]["phase"], accepted(kube)) == ("Starting", "False")
    reconciler.permissions = permissions({"namespaces": ["team"]}, settings=NO_MLFLOW)
    await reconciler.handle("team/tune")
    assert (kube.objects[KEY]["status"]["phase"], accepted(kube)) == ("Starting", "True")


async def test_the_suspension_of_a_job_that_is_not_permitted_any_longer_stops_its_pods() -> None:
    body = JOB | {"spec": {**JOB["spec"], "tracking": {}}}
    kube = StandIn(body)
    store, _, reconciler = parts(kube, NO_MLFLOW, lambda: 0.0)
    permitted = permissions({"namespaces": ["team"]}, settings=NO_MLFLOW)

    async def pass_with(allowed: Permissions, *, is_suspended: bool) -> tuple[str, str, list[str]]:
        """The phase, the message of Suspended, and the names of the Jobs that exist then."""
        kube.keep(kube.objects[KEY] | {"spec": {**body["spec"], "suspend": is_suspended}})
        for kind in ("FineTuneJob", "Job"):
            objects = [item for key, item in kube.objects.items() if key[0] == kind]
            store.replace(kind, objects, kube.version)
        reconciler.permissions = allowed
        await reconciler.handle("team/tune")
        status = kube.objects[KEY]["status"]
        messages = {item["type"]: item["message"] for item in status["conditions"]}
        return (
            status["phase"],
            messages.get("Suspended", ""),
            [key[2] for key in kube.objects if key[0] == "Job"],
        )

    resumes = "no pod runs; set suspend to false to resume"
    assert [
        await pass_with(permitted, is_suspended=False),
        await pass_with(for_others(), is_suspended=True),
        await pass_with(for_others(), is_suspended=False),
        await pass_with(permitted, is_suspended=False),
    ] == [
        ("Starting", "", ["tune-train-1"]),
        ("Suspended", resumes, []),
        ("Starting", "the job resumes as soon as it is permitted", []),
        ("Starting", "the job starts from the beginning: spec.checkpoint is not set", ["tune-train-2"]),
    ]


async def test_the_suspension_of_a_job_that_was_never_permitted_reads_nothing() -> None:
    kube = await pass_over(JOB | {"spec": {**JOB["spec"], "suspend": True}}, for_others())
    assert kube.asked == [("create", "Event", kube.asked[0][2]), ("status", "FineTuneJob", "tune")]


def accepted(kube: StandIn) -> str:
    conditions = {item["type"]: item["status"] for item in kube.objects[KEY]["status"]["conditions"]}
    return str(conditions["Accepted"])


async def test_the_status_of_a_finished_job_stays() -> None:
    ended = {
        "phase": "Succeeded",
        "conditions": [
            {
                "type": kind,
                "status": "True",
                "reason": "Succeeded",
                "message": "done",
                "lastTransitionTime": "2026-08-01T12:00:00Z",
                "observedGeneration": 1,
            }
            for kind in ("Succeeded", "Ready", "Finished")
        ],
        "observedGeneration": 1,
        "phaseTime": "2026-08-01T12:00:00Z",
    }
    kube = await pass_over(JOB | {"status": ended}, for_others())
    assert kube.asked == []


async def test_a_finalizer_that_somebody_set_asks_nobody_else() -> None:
    """The release of a job cancels its Databricks run, with the login that its spec names."""
    meta = {"finalizers": [names.RUN_FINALIZER], "deletionTimestamp": "2026-08-01T12:00:00Z"}
    spec = JOB["spec"] | {"tracking": {"uri": "databricks", "registryUri": "databricks-uc"}}
    kube = await pass_over(JOB | {"metadata": JOB["metadata"] | meta, "spec": spec}, for_others())
    assert kube.asked == [("apply", "FineTuneJob", "tune")]


async def test_a_refused_promotion_moves_nothing_and_does_not_hold_the_alias() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    simulation.operator.reconciler.permissions = for_others()
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Blocked: NotPermitted",
        {"staging": "2"},
    )
    assert simulation.says("Accepted") == ("NotPermitted", NO_TENANT)
    assert not simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"].get("finalizers")
    # The younger promotion of the same alias is not blocked by the one that is not permitted.
    simulation.operator.reconciler.permissions = permissions(
        {
            "namespaces": ["team"],
            "tracking": [{"uri": SETTINGS.tracking_uri, "credentials": "Installation"}],
            "models": ["support-*"],
            "aliases": ["champion"],
        }
    )
    judge = {"image": "judge", "template": {"spec": {"hostPID": True}}}
    simulation.edit(gates=[{"name": "judge", "type": "Job", "job": judge}])
    simulation.submit("other", alias="champion", source={"type": "Version", "version": 1})
    objects = simulation.kube.objects["ModelPromotion", "team", "other"]
    objects["metadata"]["creationTimestamp"] = "2026-08-01T12:00:01Z"
    await simulation.settle()
    assert (simulation.status("other").phase, simulation.registry.aliases["champion"]) == ("Promoted", "1")


async def test_a_promotion_that_is_not_permitted_any_longer_removes_no_alias() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "2"
    simulation.operator.reconciler.permissions = for_others()
    simulation.remove()
    await simulation.settle()
    assert (simulation.names(), simulation.registry.aliases["champion"]) == ([], "2")


TEMPLATES: dict[str, tuple[Json, str | None]] = {
    "as permitted": ({}, None),
    "a model named like the job": ({"register": {"aliases": []}}, None),
    "another model": (
        {"register": {"model": "prod", "aliases": []}},
        "spec.register.model prod is not permitted by tenancy.tenants[0].models",
    ),
    "a template that cannot be read": ({"model": 3}, None),
}


@pytest.mark.parametrize("case", TEMPLATES.values(), ids=TEMPLATES)
def test_a_schedule_whose_jobs_are_not_permitted_creates_none(case: tuple[Json, str | None]) -> None:
    parts_of_job, message = case
    allowed = permissions(
        {
            "namespaces": ["team"],
            "tracking": [{"uri": SETTINGS.tracking_uri, "credentials": "Installation"}],
            "models": ["nightly-*"],
        }
    )
    nightly = schedule(jobTemplate=TEMPLATE | {"spec": TEMPLATE["spec"] | parts_of_job})
    observed = FineTuneScheduleObserver(StandIn(), Store(find_owner), allowed).observe(nightly)
    if message is None:
        assert observed.refusal is None
        return
    decision = decide(nightly, observed, NOW)
    accepted = next(item for item in decision.status.conditions if item.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", ConditionReason.NOT_PERMITTED)
    assert accepted.message.startswith(message)
    assert (decision.created, decision.dry_run) == (None, None)


def test_a_schedule_in_a_namespace_of_no_tenant_is_refused() -> None:
    observed = FineTuneScheduleObserver(StandIn(), Store(find_owner), for_others()).observe(schedule())
    assert observed.refusal == (ConditionReason.NOT_PERMITTED, NO_TENANT)
