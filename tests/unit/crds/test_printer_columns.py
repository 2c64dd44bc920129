"""The columns of `kubectl get ftj`: what fits into a terminal, and that each one is a field of the status."""

from __future__ import annotations

import re
from typing import Any

from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.modelpromotion import ModelPromotion
from finetune_crds.schema import crd

Json = dict[str, Any]
# The widest that is usual, without -o wide.
USUAL = {
    "Name": "support-chat",
    "Phase": "Succeeded",
    "Reason": "Succeeded",
    "Progress": "100%",
    "Loss": "3.2568",
    "Model": "support-chat/3",
    "Age": "5h",
}
SPACES = 3


def columns(priority: int) -> list[str]:
    return [item["name"] for item in FineTuneJob.COLUMNS if item.get("priority", 0) == priority]


def test_the_columns_fit_into_eighty_characters() -> None:
    assert ["Name", *columns(0)] == [*USUAL]
    widths = [max(len(name), len(value)) for name, value in USUAL.items()]
    assert sum(widths) + SPACES * (len(widths) - 1) <= 80


def test_the_rest_is_wide_and_the_longest_is_last() -> None:
    assert columns(1) == ["Nodes", "Device", "Attempt", "Eval", "Tokens/s", "ETA", "Run", "Message"]


def test_a_promotion_has_its_message_last_too() -> None:
    assert ModelPromotion.COLUMNS[-1] == FineTuneJob.COLUMNS[-1]


def test_every_column_is_a_field_of_the_status() -> None:
    schema: Json = crd(FineTuneJob)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    unknown = [item["jsonPath"] for item in FineTuneJob.COLUMNS if not _is_field(schema, item["jsonPath"])]
    assert unknown == [".metadata.creationTimestamp"]


def _is_field(schema: Json, path: str) -> bool:
    for part in re.findall(r"\.(\w+)(?:\[\?\(.+?\)\])?(?=\.|$)", path):
        field = schema.get("properties", {}).get(part)
        if field is None:
            return False
        schema = field.get("items", field)
    return True
