"""A world for promotions with an endpoint: the registry and the endpoint are in the stand-in workspace."""

from __future__ import annotations

import base64
from typing import Any

from finetune_operator.databricks.workspace import open_workspace
from finetune_operator.modelpromotion.observe import read_promotion
from finetune_operator.registry.unity import UnityRegistry
from finetune_operator.serving.model import EndpointClient
from finetune_operator.settings import Settings
from standins.databricks import Workspace
from worlds.memory.promotions import World

MODEL = "main.llm.support"
PATH = "/api/2.0/serving-endpoints"
ALIASES = f"/api/2.1/unity-catalog/models/{MODEL}/aliases"
GATE = {"name": "few-errors", "type": "Metric", "metric": {"name": "error_rate", "max": 0.01}}
STEPS = [{"percent": 10, "durationSeconds": 600}, {"percent": 50, "durationSeconds": 600}]


class Databricks(World):
    """A world whose registry is Unity Catalog, in the stand-in workspace that serves the endpoint too."""

    def __init__(self, state: Workspace, canary: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.state = state
        secret = state.secret
        self.registry = UnityRegistry(open_workspace(secret, Settings()))  # type: ignore[assignment]
        data = {name: base64.b64encode(value.encode()).decode() for name, value in secret.items()}
        self.kube.keep({"kind": "Secret", "metadata": {"name": "databricks"}, "data": data})
        reference = {"secretRef": {"name": "databricks"}}
        for version in (1, 2, 3):
            state.add_version(MODEL, version, {"error_rate": 0.001})
        serving = {"type": "Databricks", "endpoint": "support", "databricks": reference}
        self.submit(
            model=MODEL,
            tracking={"uri": "databricks", "registryUri": "databricks-uc"} | reference,
            serving=serving | ({"canary": canary} if canary else {}),
        )

    async def open_endpoint(self) -> EndpointClient:
        """The client of the promotion's endpoint, for a person who configures it."""
        promotion = read_promotion(self.held)
        assert promotion.backend
        return await self.operator.reconciler.observer.open_endpoint(promotion, promotion.backend)

    async def stage(self, version: int) -> None:
        """The version is staging's, and everything comes of it that comes at once."""
        self.state.set_alias(MODEL, "staging", version)
        await self.settle()

    async def look(self, *, minutes: int) -> None:
        """Twelve passes in this time, whether they come to rest or not."""
        for _ in range(12):
            self.seconds += 5 * minutes
            await self.operator.look("champion")

    async def later(self, minutes: float) -> None:
        self.seconds += 60 * minutes
        await self.settle()

    @property
    def held(self) -> dict[str, Any]:
        """The ModelPromotion as the API server holds it."""
        return self.kube.objects["ModelPromotion", "team", "champion"]

    @property
    def now(self) -> tuple[str | None, dict[str, int], dict[str, int]]:
        """The phase, the aliases, and who gets how much of the traffic."""
        return (
            self.status().phase,
            dict(self.state.models[MODEL].aliases),
            self.state.endpoints.routes("support"),
        )

    def configured(self) -> int:
        """How often the endpoint was written to."""
        return sum(path.startswith(PATH) for _, path in self.state.writes())
