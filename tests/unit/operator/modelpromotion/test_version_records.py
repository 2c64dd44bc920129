"""What the moves of an alias decide about its versions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_crds.promotion_status import (
    REGRESSED,
    ModelPromotionStatus,
    Move,
    MoveReason,
    RegistryIdentity,
    Withheld,
)
from finetune_operator.modelpromotion.version_records import (
    forget_moves,
    import_history,
    record_move,
    update_record,
)

Json = dict[str, Any]
NOW = datetime(2026, 8, 1, 12, tzinfo=UTC)
PASSED: Json = {"held": True, "gates": "g1", "approvedBy": "kim"}
FAILED: Json = {"bad": "d1"}
SKIPPED: Json = {"skipped": True}


def move(reason: MoveReason, before: str | None, after: str | None, minutes: int = 0, **fields: Any) -> Move:
    return Move(
        from_version=before,
        to_version=after,
        reason=reason,
        message="",
        by="kim",
        time=NOW + timedelta(minutes=minutes),
        **fields,
    )


def with_records(**records: Json) -> ModelPromotionStatus:
    """A status with records of versions; their names are v1, v2 and so on."""
    status = ModelPromotionStatus(registry=RegistryIdentity(has_decisions=True))
    names = {"approvedBy": "approved_by"}
    for version, fields in records.items():
        named = {names.get(name, name): value for name, value in fields.items()}
        status = update_record(status, version.removeprefix("v"), **named)
    return status


def read_records(status: ModelPromotionStatus) -> dict[str, Json]:
    records = status.registry.versions if status.registry else []
    contents = {item.version: item.to_json() for item in records}
    return {
        f"v{number}": {name: value for name, value in content.items() if name != "version"}
        for number, content in contents.items()
    }


# The records before; the move; the records after it.
MOVES: dict[str, tuple[dict[str, Json], Move, dict[str, Json]]] = {
    "promoted": (
        {},
        move("Promoted", "1", "2", gates="g1", approved=True),
        {"v1": {"held": True}, "v2": PASSED},
    ),
    "promoted without an approval": (
        {},
        move("Promoted", None, "2", gates="g1"),
        {"v2": {"held": True, "gates": "g1"}},
    ),
    "promoted past a skipped one": (
        {"v1": SKIPPED},
        move("Promoted", None, "2", gates="g1"),
        {"v1": {}, "v2": {"held": True, "gates": "g1"}},
    ),
    "withdrawn": (
        {"v1": PASSED, "v2": PASSED | FAILED},
        move("Withdrawn", "2", "1"),
        {"v1": PASSED, "v2": FAILED},
    ),
    "regressed": (
        {"v1": PASSED, "v2": PASSED | {"bad": REGRESSED}},
        move("Regressed", "2", "1"),
        {"v1": PASSED, "v2": {"bad": REGRESSED}},
    ),
    "rolled back to a version that regressed": (
        {"v1": {"bad": REGRESSED}, "v2": PASSED},
        move("RolledBack", "2", "1"),
        {"v1": {"held": True}, "v2": {"held": True}},
    ),
    "rolled back": (
        {"v1": PASSED, "v2": PASSED},
        move("RolledBack", "2", "1"),
        {"v1": PASSED, "v2": {"held": True}},
    ),
    "rolled back to a version that failed": (
        {"v1": FAILED, "v2": PASSED},
        move("RolledBack", "2", "1"),
        {"v1": {"held": True}, "v2": {"held": True}},
    ),
    "adopted a version that was skipped": (
        {"v1": SKIPPED, "v2": PASSED},
        move("Adopted", "2", "1"),
        {"v1": {"held": True}, "v2": PASSED},
    ),
    "repaired": ({"v1": PASSED}, move("Repaired", "3", "1"), {"v1": PASSED}),
    "overtaken": ({"v1": PASSED}, move("Overtaken", "1", "2"), {"v1": PASSED}),
    "deleted": ({"v1": PASSED}, move("VersionDeleted", "1", None), {"v1": {"held": True}}),
}


@pytest.mark.parametrize(("before", "moved", "after"), MOVES.values(), ids=MOVES)
def test_a_move_decides_about_its_versions(
    before: dict[str, Json], moved: Move, after: dict[str, Json]
) -> None:
    status = record_move(with_records(**before), moved)
    assert read_records(status) == after
    assert status.lost == (moved.from_version if moved.reason == "VersionDeleted" else None)


def test_a_repair_that_removes_the_alias_keeps_the_lost_version() -> None:
    status = record_move(with_records(v1=PASSED), move("VersionDeleted", "1", None))
    assert record_move(status, move("Repaired", "2", None)).lost == "1"
    assert record_move(status, move("Promoted", None, "2", gates="g1")).lost is None


def test_failures_outlast_another_promotion_of_the_alias() -> None:
    status = forget_moves(with_records(v1=PASSED, v2=PASSED | FAILED, v3=SKIPPED))
    assert read_records(status) == {"v1": {}, "v2": FAILED, "v3": SKIPPED}


def test_the_history_of_an_earlier_release_becomes_records() -> None:
    history = [
        move("Promoted", "2", "3", minutes=2, gates="g1"),
        # Before the promotion began to watch the alias: nobody knows whether it still counts.
        move("Promoted", "1", "2", minutes=-2, gates="g1", approved=True),
    ]
    withheld = Withheld(version="4", reason="Withdrawn", digest="d1", message="its endpoint failed")
    earlier = ModelPromotionStatus(registry=RegistryIdentity(), history=history, watch_start_time=NOW)
    earlier = earlier.model_copy(update={"journal": earlier.change_journal(withheld=withheld)})
    status = import_history(earlier)
    assert read_records(status) == {
        "v1": {"held": True},
        "v2": {"held": True},
        "v3": {"held": True, "gates": "g1"},
        "v4": FAILED,
    }
    assert import_history(status) is status
