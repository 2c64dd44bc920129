"""Two real MLflow servers with models and versions of the same names, and a promotion that is led from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from finetune_operator.registry.mlflow import MlflowRegistry
from support.mlflow_server import Mlflow, serving_here
from worlds.memory.promotions import MODEL, World, back_to

# NB: MLflow's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mlflow, Mlflow]]:
    """Two servers."""
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(serving_here(tmp_path_factory.mktemp(f"mlflow-{number}")))
            for number in (1, 2)
        )
        yield one, other


def register(server: Mlflow, model: str, versions: int) -> MlflowRegistry:
    """A model with versions, each made by a run of its own."""
    for _ in range(versions):
        run = server.post("runs/create", {"experiment_id": "0"})["run"]["info"]["run_id"]
        server.register(model, str(run))
    return MlflowRegistry(server.uri, server.uri)


async def promoted(registry: MlflowRegistry) -> World:
    """Champion is version 2 of three."""
    there = World()
    there.registry = registry  # type: ignore[assignment]
    there.submit(source={"type": "Version", "version": "2"})
    await there.settle()
    assert there.status().phase == "Promoted"
    return there


def aliases(registry: MlflowRegistry) -> dict[str, str]:
    held = registry.model(MODEL)
    return dict(held.aliases) if held else {}


async def test_a_promotion_is_led_to_another_server_and_back(servers: tuple[Mlflow, Mlflow]) -> None:
    one, other = (register(server, MODEL, 3) for server in servers)
    other.set_alias(MODEL, "champion", "1")
    there = await promoted(one)
    there.registry = other  # type: ignore[assignment]
    for rollback in (None, back_to("3")):
        there.edit(rollbackTo=rollback)
        await there.settle()
        said = there.says("RegistryReady")
        assert said
        assert (said[0], aliases(other)) == ("RegistryChanged", {"champion": "1"})
    assert [getattr(other.version(MODEL, number), "tags", None) for number in ("1", "2", "3")] == [{}, {}, {}]
    there.registry = one  # type: ignore[assignment]
    there.edit(rollbackTo=None)
    await there.settle()
    assert (there.status().phase, aliases(one)) == ("Promoted", {"champion": "2"})
