"""How the parts of the operator are connected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from finetune_operator.__main__ import Operator
from finetune_operator.kube import Kube
from finetune_operator.settings import Settings

Json = dict[str, Any]
BODY: Json = {
    "metadata": {"namespace": "team", "name": "tune", "uid": "u1", "resourceVersion": "1", "labels": {}},
    "spec": {},
}
# By the kind of the event's object: what the watch calls.
EVENTS: dict[str, Callable[[Operator, str | None], Awaitable[None]]] = {
    "FineTuneJob": lambda operator, event: operator._finetunejob(event, BODY),
    "ModelPromotion": lambda operator, event: operator._modelpromotion(event, BODY),
    "Pod": lambda operator, event: operator._child("Pod", event, BODY),
}


@pytest.mark.parametrize("deliver", EVENTS.values(), ids=EVENTS)
async def test_objects_are_listed_soon_after_a_watch_begins(
    deliver: Callable[[Operator, str | None], Awaitable[None]],
) -> None:
    operator = Operator.of(Kube(), Kube(), Settings())
    await deliver(operator, "MODIFIED")
    was_listed_soon = operator.resync._is_watch_new
    # kopf delivers the objects of the list with which a watch begins, also after status 410, without a type.
    await deliver(operator, None)
    assert (was_listed_soon, operator.resync._is_watch_new) == (False, True)
