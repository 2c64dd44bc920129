"""The MLflow run of a job: found and created by the job's uid."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.mlflow.host import ANONYMOUS, Credentials, Host
from finetune_operator.mlflow.model import Run

_USER = "finetune-operator"
_ACTIVE_ONLY = 1  # mlflow.entities.ViewType


@dataclass(frozen=True)
class Server:
    """An MLflow server and its credentials. Every method blocks: call it outside the event loop."""

    uri: str
    registry_uri: str
    credentials: Credentials = ANONYMOUS

    def find_run(self, uid: str, experiment: str, run_id: str | None = None) -> Run | None:
        """The run of a job: by its id if known, otherwise by the job's uid in its experiment.

        A run that was deleted is returned only where there is no other.
        """
        with self._host.problems():
            store = self._host.tracking()
            known = get_run(store, run_id) if run_id else None
            held = None if known and not known.is_deleted else store.get_experiment_by_name(experiment)
            if held is None:
                return known
            wanted = f"tags.`{contract.TAG_JOB_UID}` = '{uid}'"
            found = store.search_runs(
                [held.experiment_id], wanted, _ACTIVE_ONLY, 1, ["attribute.start_time ASC"]
            )
            return _run(found[0]) if found else known

    def ensure_run(self, uid: str, experiment: str, run_name: str, tags: Mapping[str, str]) -> Run:
        """The run of a job; created if there is none."""
        found = self.find_run(uid, experiment)
        if found:
            return found
        with self._host.problems():
            from mlflow.entities import RunTag

            store = self._host.tracking()
            every_tag = {**tags, "mlflow.runName": run_name, "mlflow.user": _USER}
            return _run(
                store.create_run(
                    experiment_id=_experiment(store, experiment),
                    user_id=_USER,
                    start_time=int(time.time() * 1000),
                    tags=[RunTag(key, value) for key, value in every_tag.items()],
                    run_name=run_name,
                )
            )

    def finish_run(self, run_id: str, status: str) -> None:
        """Close a run as FINISHED, FAILED or KILLED."""
        with self._host.problems():
            from mlflow.entities import RunStatus

            self._host.tracking().update_run_info(
                run_id, RunStatus.from_string(status), int(time.time() * 1000), None
            )

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of a run, of a step."""
        with self._host.problems():
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            entries = [Metric(name, value, now, step) for name, value in metrics.items()]
            self._host.tracking().log_batch(run_id, entries, [], [])

    @property
    def _host(self) -> Host:
        return Host(self.uri, self.credentials)


def _run(found: Any) -> Run:
    info, data = found.info, found.data
    planned = data.params.get(contract.PARAM_MAX_STEPS, "")
    return Run(
        run_id=info.run_id,
        experiment_id=info.experiment_id,
        status=str(info.status),
        metrics=dict(data.metrics),
        tags=dict(data.tags),
        # NB: only the list that MLflow made its mapping from has the steps.
        steps={metric.key: int(metric.step or 0) for metric in data._metric_objs},  # noqa: SLF001
        planned_steps=int(planned) if planned.isdecimal() and int(planned) else None,
        is_deleted=info.lifecycle_stage == "deleted",
    )


def get_run(store: Any, run_id: str) -> Run | None:
    """A run by its id; None when the server does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        return _run(store.get_run(run_id))
    except MlflowException as error:
        # For example because the server's database was lost.
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _experiment(store: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = store.get_experiment_by_name(name)
    if found is None:
        try:
            return str(store.create_experiment(name))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = store.get_experiment_by_name(name)
    if found.lifecycle_stage != "active":
        raise ExternalError(
            Problem(
                ConditionReason.MLFLOW_ERROR,
                f"experiment {name} was deleted in MLflow: restore it, or set spec.tracking.experiment",
            )
        )
    return str(found.experiment_id)
