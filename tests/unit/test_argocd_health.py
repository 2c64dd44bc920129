"""The health scripts for Argo CD: run as Argo CD runs them, over their own test data and over every phase there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from lupa.lua51 import LuaRuntime, lua_type

from finetune_crds.conditions import ConditionType
from finetune_crds.promotion_status import PromotionPhase
from finetune_crds.schedule_status import SchedulePhase
from finetune_crds.status_parts import Phase
from finetune_operator.finetunejob.decide.ready import OBSTACLES

FOLDER = Path(__file__).parents[2] / "charts" / "finetune-operator" / "argocd" / "finetune.dev"
PHASES = {
    "FineTuneJob": get_args(Phase),
    "ModelPromotion": get_args(PromotionPhase),
    "FineTuneSchedule": get_args(SchedulePhase),
}
# The libraries and functions that Argo CD opens for a script out of argocd-cm; of os, it opens time functions alone.
OPENED = {
    "_G",
    "_VERSION",
    "obj",
    "ipairs",
    "pairs",
    "next",
    "tostring",
    "tonumber",
    "type",
    "select",
    "unpack",
}
OPENED |= {
    "pcall",
    "error",
    "assert",
    "table",
    "setmetatable",
    "getmetatable",
    "rawget",
    "rawset",
    "rawequal",
}
Json = dict[str, Any]


def health(kind: str, body: Json) -> Json:
    """What the script of `kind` says of an object."""
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    script = (FOLDER / kind / "health.lua").read_text(encoding="utf-8")
    # NB: the functions of strings are also reached as methods of a string.
    lua.execute('debug.setmetatable("", nil)')
    lua.globals()["obj"] = lua.table_from(body, recursive=True)
    for name in list(lua.globals()):
        if name not in OPENED:
            lua.globals()[name] = None
    found = lua.execute(script)
    assert lua_type(found) == "table"
    return dict(found)


def listed(kind: str) -> list[Json]:
    """What argo-cd's own test would run."""
    found = yaml.safe_load((FOLDER / kind / "health_test.yaml").read_text(encoding="utf-8"))
    return list(found["tests"])


def loaded(kind: str, path: str) -> Json:
    return dict(yaml.safe_load((FOLDER / kind / path).read_text(encoding="utf-8")))


CASES = {f"{kind}/{test['inputPath']}": (kind, test) for kind in PHASES for test in listed(kind)}


@pytest.mark.parametrize(("kind", "test"), CASES.values(), ids=CASES)
def test_health_is_as_the_test_data_says(kind: str, test: Json) -> None:
    assert health(kind, loaded(kind, test["inputPath"])) == test["healthStatus"]


@pytest.mark.parametrize("kind", PHASES)
def test_no_test_data_is_left_out(kind: str) -> None:
    paths = [test["inputPath"] for test in listed(kind)]
    assert sorted(paths) == sorted(f"testdata/{file.name}" for file in (FOLDER / kind / "testdata").iterdir())


# A phase that no obstacle explains by itself.
TRAINS = {"type": "Trained", "status": "False", "message": "Trained"}


def explained(*conditions: Json) -> str:
    """What a FineTuneJob with these conditions waits for, or is at."""
    body = of_phase("Training")
    body["status"]["conditions"] = [TRAINS, *conditions]
    return str(health("FineTuneJob", body)["message"])


@pytest.mark.parametrize("kind", [kind for kind in ConditionType if kind not in ("Trained", "Stalled")])
def test_what_keeps_a_job_from_going_on_is_what_the_operator_says_of_it(kind: ConditionType) -> None:
    item = {"type": kind.value, "status": "False", "message": kind.value}
    assert explained(item) == (kind.value if kind in OBSTACLES else "Trained")
    assert explained(item | {"status": "True"}) == "Trained"


def test_of_several_obstacles_the_one_that_the_operator_names_counts() -> None:
    items = [{"type": kind.value, "status": "False", "message": kind.value} for kind in OBSTACLES]
    assert [explained(*items[first:]) for first in range(len(items))] == [kind.value for kind in OBSTACLES]


HEALTH = {
    "FineTuneJob": {
        "Pending": "Progressing",
        "Queued": "Progressing",
        "Preparing": "Progressing",
        "Starting": "Progressing",
        "Training": "Progressing",
        "Evaluating": "Progressing",
        "Registering": "Progressing",
        "Suspended": "Suspended",
        "Succeeded": "Healthy",
        "Failed": "Degraded",
    },
    "ModelPromotion": {
        "Pending": "Progressing",
        "AwaitingApproval": "Suspended",
        "Soaking": "Progressing",
        "Promoting": "Progressing",
        "Promoted": "Healthy",
        "Refused": "Degraded",
        "Blocked": "Degraded",
        "Suspended": "Suspended",
    },
    "FineTuneSchedule": {
        "Pending": "Progressing",
        "Scheduled": "Healthy",
        "Suspended": "Suspended",
        "Blocked": "Degraded",
    },
}


@pytest.mark.parametrize("kind", PHASES)
def test_every_phase_of_the_api_has_a_health_and_test_data(kind: str) -> None:
    found = {phase: health(kind, of_phase(phase)) for phase in PHASES[kind]}
    assert found == {phase: {"status": said, "message": phase} for phase, said in HEALTH[kind].items()}
    statuses = [loaded(kind, test["inputPath"]).get("status", {}) for test in listed(kind)]
    assert set(PHASES[kind]) <= {status.get("phase") for status in statuses}


def of_phase(phase: str) -> Json:
    """An object in a phase for which no condition says why."""
    return {"metadata": {"generation": 3}, "status": {"observedGeneration": 3, "phase": phase}}


@pytest.mark.parametrize("kind", PHASES)
def test_an_older_generation_counts_for_nothing_in_any_phase(kind: str) -> None:
    waiting = {"status": "Progressing", "message": "waiting for the operator to reconcile generation 4"}
    for phase in PHASES[kind]:
        assert health(kind, of_phase(phase) | {"metadata": {"generation": 4}}) == waiting


@pytest.mark.parametrize("kind", PHASES)
def test_what_is_being_deleted_is_progressing_in_any_phase(kind: str) -> None:
    metadata = {"generation": 3, "deletionTimestamp": "2026-08-03T09:00:00Z"}
    for phase in PHASES[kind]:
        found = health(kind, of_phase(phase) | {"metadata": metadata})
        assert found == {"status": "Progressing", "message": "being deleted"}
