"""Which moves of a promotion are announced, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_operator.text import format_time
from unit.operator.modelpromotion.champion import world

if TYPE_CHECKING:
    from finetune_operator.notifications.model import Notice

SOURCE = "/apis/finetune.dev/v1alpha1/namespaces/team/modelpromotions/champion"


async def test_each_move_is_announced_once() -> None:
    simulation = world(onDelete="RemoveAlias")
    notices: list[Notice] = []
    simulation.operator.reconciler.applier.announce = notices.append
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.edit(rollbackTo={"type": "Previous"}, by="alice")
    await simulation.settle()
    ids = [notice.id for notice in notices]
    assert [notice.text.partition(" (")[0] for notice in notices] == [
        "support-llama@champion: no version -> version 2 by ModelPromotion team/champion",
        "support-llama@champion: version 2 -> version 3 by ModelPromotion team/champion",
        "support-llama@champion: version 3 -> version 2 by alice",
    ]
    assert len({*ids}) == 3
    (_, _, rolled_back) = notices
    assert (rolled_back.source, rolled_back.subject) == (SOURCE, "support-llama@champion")
    assert rolled_back.text.endswith("ModelPromotion team/champion")
    data = dict(rolled_back.data)
    del data["message"]
    assert data == {
        "namespace": "team",
        "name": "champion",
        "model": "support-llama",
        "alias": "champion",
        "fromVersion": "3",
        "toVersion": "2",
        "reason": "RolledBack",
        "by": "alice",
        "time": data["time"],
    }


async def test_a_status_without_a_new_move_announces_nothing() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    notices: list[Notice] = []
    simulation.operator.reconciler.applier.announce = notices.append
    simulation.edit(suspend=True)
    await simulation.settle()
    simulation.edit(suspend=False)
    await simulation.settle()
    assert notices == []


async def test_the_removal_of_an_alias_with_its_promotion_is_announced_once() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    notices: list[Notice] = []
    simulation.operator.reconciler.applier.announce = notices.append
    uid = simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"]["uid"]
    simulation.remove()
    await simulation.settle()
    assert "champion" not in simulation.registry.aliases
    (removal,) = notices
    assert (removal.id, removal.source, removal.text) == (
        f"{uid}-removed",
        SOURCE,
        "support-llama@champion: version 2 -> no version by ModelPromotion team/champion "
        "(Removed: the ModelPromotion is deleted), ModelPromotion team/champion",
    )
    assert removal.data == {
        "namespace": "team",
        "name": "champion",
        "model": "support-llama",
        "alias": "champion",
        "fromVersion": "2",
        "reason": "Removed",
        "message": "the ModelPromotion is deleted",
        "by": "ModelPromotion team/champion",
        "time": format_time(removal.time),
    }
