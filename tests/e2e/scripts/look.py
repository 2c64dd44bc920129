"""Look at what a job left behind: `python look.py TABLE VERSION RUN_ID MODEL ALIAS`; prints JSON after LOOK."""

from __future__ import annotations

import json
import sys
from collections import Counter

from deltalake import DeltaTable
from mlflow import MlflowClient


def main(arguments: list[str]) -> int:
    """Count the table's rows at that version, and read the run's and the version's tags."""
    table, version, run_id, model, alias = arguments
    splits = DeltaTable(table, version=int(version)).to_pyarrow_table(columns=["split"])["split"].to_pylist()
    mlflow = MlflowClient()
    run = mlflow.get_run(run_id)
    registered = mlflow.get_model_version_by_alias(model, alias)
    found = {
        "rows": Counter(splits),
        "runStatus": run.info.status,
        "runTags": {name: value for name, value in run.data.tags.items() if not name.startswith("mlflow.")},
        "version": registered.version,
        "versionRun": registered.run_id,
        "versionTags": registered.tags,
    }
    print("LOOK", json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
