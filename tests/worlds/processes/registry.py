"""A registered model on a real MLflow server, and the promotions of its aliases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.api import Api, Json
from support.mlflow_server import Mlflow
from support.waiting import PATIENCE, wait_for

GATES = [{"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.5}}]
DATA = "finetune_eval_data"
NO_WORSE = {
    "name": "no-worse",
    "type": "Comparison",
    "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
}


@dataclass
class Registry:
    """A registered model, and the promotions in a namespace that keep its aliases."""

    api: Api
    mlflow: Mlflow
    namespace: str
    model: str

    def version(self, loss: float, data: str = "d1") -> str:
        """A version whose run has this evaluation loss."""
        experiment = self.mlflow.post("experiments/search", {"max_results": 1})["experiments"][0]
        body = {"experiment_id": experiment["experiment_id"], "tags": [{"key": DATA, "value": data}]}
        run_id = self.mlflow.post("runs/create", body)["run"]["info"]["run_id"]
        self.mlflow.log_metrics(run_id, eval_loss=loss)
        return self.mlflow.register(self.model, run_id)

    def point(self, alias: str, version: str) -> None:
        """Set an alias by hand."""
        self.mlflow.post("registered-models/alias", {"name": self.model, "alias": alias, "version": version})

    def alias(self, alias: str) -> str | None:
        """The version that an alias points at."""
        model = self.mlflow.get("registered-models/get", name=self.model)["registered_model"]
        return {item["alias"]: str(item["version"]) for item in model.get("aliases", [])}.get(alias)

    def apply(self, alias: str = "champion", **spec: Any) -> None:
        """Create a promotion of this alias, from staging unless told otherwise."""
        self.api.create(
            {
                "apiVersion": "finetune.dev/v1alpha1",
                "kind": "ModelPromotion",
                "metadata": {"name": alias, "namespace": self.namespace},
                "spec": {"model": self.model, "alias": alias, "source": {"type": "Alias", "alias": "staging"}}
                | spec,
            }
        )

    def patch(self, alias: str = "champion", **spec: Any) -> None:
        self.api.patch("ModelPromotion", self.namespace, alias, {"spec": spec})

    def get(self, alias: str = "champion") -> Json:
        return self.api.get("ModelPromotion", self.namespace, alias) or {}

    def status(self, alias: str = "champion") -> Json:
        return dict(self.get(alias).get("status") or {})

    def wait(
        self, phase: str, current: str | None, alias: str = "champion", seconds: float = PATIENCE
    ) -> Json:
        def seen() -> Json | None:
            status = self.status(alias)
            return status if (status.get("phase"), status.get("current")) == (phase, current) else None

        return wait_for(f"{alias} is {phase} at {current}", seen, seconds, instead=lambda: self.status(alias))

    def condition(self, kind: str, alias: str = "champion") -> Json:
        conditions = [item for item in self.status(alias).get("conditions", []) if item["type"] == kind]
        return conditions[0] if conditions else {}

    def moves(self, alias: str = "champion") -> list[tuple[str, str | None, str | None]]:
        """The history, oldest first: reason, from, to."""
        history = reversed(self.status(alias).get("history", []))
        return [(item["reason"], item.get("fromVersion"), item.get("toVersion")) for item in history]
