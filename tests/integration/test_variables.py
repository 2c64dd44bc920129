"""The values of variables and pod templates, of a job and of the installation, are in the specs of pods and nowhere else."""

from __future__ import annotations

from pathlib import Path

import yaml

from finetune_crds.pods import ROLES
from fixtures.operator_processes.jobs import EVALUATED, PREPARED, TRAINED, job
from fixtures.operator_processes.world import World
from support.api import Api
from support.canary import CANARY, VARIABLES, read_files, read_objects, select_leaks
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator, watching
from support.process import running


def test_values_of_variables_stay_in_the_pods(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    defaults, log = tmp_path / "defaults.yaml", tmp_path / "operator.log"
    defaults.write_text(yaml.safe_dump({"pods": {"all": {"env": VARIABLES}}}), encoding="utf-8")
    settings = {"FINETUNE_DEFAULTS": str(defaults), "FINETUNE_LOG_LEVEL": "DEBUG"}
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "TEMPLATE", "value": CANARY}]}]}}
    source = {"type": "Parquet", "path": "/data/corpus"}
    prepare = {"output": "/data/splits"}
    of_roles = {role: {"env": VARIABLES, "template": template} for role in ROLES}
    with running(forked_operator(kubeconfig, log, watching(namespace, mlflow_server.uri) | settings)):
        world = World(api, mlflow_server, namespace)
        world.submit(
            job(
                pods={"all": {"env": VARIABLES}, **of_roles},
                data={"source": source, "prepare": prepare},
                evaluation={"metrics": ["Accuracy"]},
            )
        )
        pods = world.run_pods("tune-prep", 1)
        world.end_pods("tune-prep", [0], [PREPARED])
        pods += world.run_pods("tune-train-1", 2)
        run_id = world.wait_phase("tune", "Training")["mlflow"]["runId"]
        world.mlflow.register(world.model, run_id)
        world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
        pods += world.run_pods("tune-evaluate", 1)
        world.end_pods("tune-evaluate", [0], [EVALUATED])
        world.wait_phase("tune", "Succeeded")
        objects = read_objects(api, namespace)
    assert all(str(pod["spec"]).count(CANARY) == len(("CANARY", "TEMPLATE")) for pod in pods)
    assert {"ConfigMap/tune-prep", "ConfigMap/tune-train", "ConfigMap/tune-evaluate"} <= objects.keys()
    logs = {"log of the operator": log.read_text(encoding="utf-8")}
    assert select_leaks(objects | logs | read_files(mlflow_server.folder)) == []
