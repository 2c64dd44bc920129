"""Who controls an object."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_operator.owners import Owner, build_owner_reference, find_owner
from fixtures.operator_in_memory.decisions import UID, controller

Json = dict[str, Any]
OWNED, OF_A_JOB = controller(API_VERSION, "FineTuneJob", UID), controller("batch/v1", "Job", "j1")
# Who controls a Job, and who a pod, that has these ownerReferences.
OWNERS: dict[str, tuple[list[Json], str | None, str | None]] = {
    "nobody": ([], None, None),
    "a FineTuneJob": ([OWNED], UID, None),
    "a FineTuneJob of a later version": ([controller("finetune.dev/v1", "FineTuneJob", UID)], UID, None),
    "a ModelPromotion": ([controller(API_VERSION, "ModelPromotion", UID)], UID, None),
    "another kind of ours": ([controller(API_VERSION, "Other", UID)], None, None),
    "a Job": ([OF_A_JOB], None, "j1"),
    "a FineTuneJob that is no controller": ([OWNED | {"controller": False}], None, None),
    "a FineTuneJob that does not say so": (
        [{key: value for key, value in OWNED.items() if key != "controller"}],
        None,
        None,
    ),
    "a FineTuneJob of another group": ([controller("example.com/v1", "FineTuneJob", UID)], None, None),
    "a Job of another group": ([controller("example.com/v1", "Job", "j1")], None, None),
    "a FineTuneJob beside another controller": ([OWNED | {"controller": False}, OF_A_JOB], None, "j1"),
}


@pytest.mark.parametrize(("references", "of_job", "of_pod"), OWNERS.values(), ids=OWNERS)
def test_the_controller_owns_a_child(references: list[Json], of_job: str | None, of_pod: str | None) -> None:
    body = {"metadata": {"name": "x", "namespace": "team", "ownerReferences": references}}
    expected = [Owner("team", uid) if uid else None for uid in (of_job, of_pod)]
    assert [find_owner(kind, body) for kind in ("Job", "Pod")] == expected


def test_the_reference_of_a_child_names_its_controller() -> None:
    meta = {
        "name": "x",
        "namespace": "team",
        "ownerReferences": [build_owner_reference("ModelPromotion", "p", "u1")],
    }
    assert find_owner("Job", {"metadata": meta}) == Owner("team", "u1")
