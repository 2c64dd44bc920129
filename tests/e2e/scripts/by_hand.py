"""What a person does in MLflow, by its client; prints JSON after RESULT.

python by_hand.py register MODEL RUN_ID LOSS...   a version for each evaluation loss, on the data of that run
python by_hand.py alias MODEL ALIAS VERSION       point an alias at a version; at none: take it away
python by_hand.py show MODEL                      its aliases, and the tags of its versions
"""

from __future__ import annotations

import json
import sys

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException


def main(arguments: list[str]) -> int:
    """Do it, and say what came of it."""
    verb, model, *rest = arguments
    client = MlflowClient()
    if verb == "register":
        found: object = register(client, model, rest[0], [float(loss) for loss in rest[1:]])
    elif verb == "alias":
        found = alias(client, model, *rest)
    else:
        found = show(client, model)
    print("RESULT", json.dumps(found), flush=True)
    return 0


def register(client: MlflowClient, model: str, run_id: str, losses: list[float]) -> list[str]:
    """Register versions that were evaluated on what a run was evaluated on, with these losses."""
    origin = client.get_run(run_id)
    tags = {name: value for name, value in origin.data.tags.items() if name.startswith("finetune.dev/")}
    for name in ("finetune.dev/uid", "finetune.dev/job", "finetune.dev/attempt"):
        tags.pop(name, None)
    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = []
    for loss in losses:
        run = client.create_run(origin.info.experiment_id, tags=tags)
        client.log_metric(run.info.run_id, "eval_loss", loss)
        client.set_terminated(run.info.run_id)
        made = client.create_model_version(model, f"{run.info.artifact_uri}/model", run.info.run_id)
        versions.append(str(made.version))
    return versions


def alias(client: MlflowClient, model: str, name: str, version: str) -> str:
    """Move an alias, asking nobody."""
    if version == "none":
        client.delete_registered_model_alias(model, name)
    else:
        client.set_registered_model_alias(model, name, version)
    return version


def show(client: MlflowClient, model: str) -> dict[str, object]:
    """What the registry says."""
    versions = client.search_model_versions(f"name = '{model}'")
    return {
        "aliases": {name: str(number) for name, number in client.get_registered_model(model).aliases.items()},
        "tags": {str(item.version): dict(item.tags) for item in versions},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
