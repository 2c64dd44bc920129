"""Two real MLflow servers with models and versions of the same names, and a promotion that is led from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from finetune_operator.registry.mlflow import MlflowRegistry
from fixtures.operator_in_memory.promotions import MODEL, World, back_to
from support.mlflow_server import Mlflow, serving_here

# NB: MLflow's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mlflow, Mlflow]]:
    """Two servers."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(serving_here(tmp_path_factory.mktemp(f"mlflow-{number}")))
            for number in (1, 2)
        )
        yield first, second


def register(server: Mlflow, model: str, versions: int) -> MlflowRegistry:
    """A model with versions, each made by a run of its own."""
    for _ in range(versions):
        run = server.post("runs/create", {"experiment_id": "0"})["run"]["info"]["run_id"]
        server.register(model, str(run))
    return MlflowRegistry(server.uri, server.uri)


async def promoted(registry: MlflowRegistry) -> World:
    """Champion is version 2 of three."""
    simulation = World()
    simulation.registry = registry  # type: ignore[assignment]
    simulation.submit(source={"type": "Version", "version": "2"})
    await simulation.settle()
    assert simulation.status().phase == "Promoted"
    return simulation


def aliases(registry: MlflowRegistry) -> dict[str, str]:
    registered = registry.model(MODEL)
    return dict(registered.aliases) if registered else {}


async def test_a_promotion_is_led_to_another_server_and_back(servers: tuple[Mlflow, Mlflow]) -> None:
    first, second = (register(server, MODEL, 3) for server in servers)
    second.set_alias(MODEL, "champion", "1")
    simulation = await promoted(first)
    simulation.registry = second  # type: ignore[assignment]
    for rollback in (None, back_to("3")):
        simulation.edit(rollbackTo=rollback)
        await simulation.settle()
        condition = simulation.says("RegistryReady")
        assert condition
        assert (condition[0], aliases(second)) == ("RegistryChanged", {"champion": "1"})
    assert [getattr(second.version(MODEL, number), "tags", None) for number in ("1", "2", "3")] == [
        {},
        {},
        {},
    ]
    simulation.registry = first  # type: ignore[assignment]
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    assert (simulation.status().phase, aliases(first)) == ("Promoted", {"champion": "2"})
