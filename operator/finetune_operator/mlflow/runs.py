"""The MLflow run of a job: found and created by the job's uid."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.mlflow.client import (
    ANONYMOUS,
    EXISTS,
    MISSING,
    Client,
    Credentials,
    LargeAnswerError,
    RefusedError,
    read_pages,
)
from finetune_operator.mlflow.model import Run

log = logging.getLogger(__name__)

_USER = "finetune-operator"
# The ids that MLflow allows. NB: ids from a server that a user names are shown in statuses, so each id is checked.
_RUN_ID = re.compile(r"[A-Za-z0-9][\w-]{0,255}", re.ASCII)
_EXPERIMENTS_PER_PAGE = 1000
_EXPERIMENTS_PER_SEARCH = 200
# The sizes of pages to try. NB: the client refuses an answer of more than 4 MiB. Most runs have a few KiB, and some 0.5 MiB.
_RUNS_PER_PAGE = (100, 5)
_MAX_EXPERIMENT_PAGES = 100
_MAX_RUN_PAGES = 2000
_VALUES_PER_PAGE = 1000
_MAX_METRIC_PAGES = 100


@dataclass(frozen=True)
class Server:
    """An MLflow server and its credentials. Every method blocks: call it outside the event loop."""

    uri: str
    registry_uri: str
    credentials: Credentials = ANONYMOUS

    def find_run(self, uid: str, experiment: str, run_id: str | None = None) -> Run | None:
        """The run of a job: by the run's id if known, otherwise by the job's uid in the experiment.

        A deleted run is returned only if there is no other run.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        client = self._client
        recorded_run = get_run(client, run_id) if run_id else None
        if recorded_run and not recorded_run.is_deleted:
            return recorded_run
        existing = _get_experiment(client, experiment)
        run = _find_job_run(client, _experiment_id(client, existing), uid) if existing else None
        return run or recorded_run

    def find_runs(self, experiments: Mapping[str, str]) -> dict[str, Run]:
        """The runs with these ids, by id; without runs that do not exist or were deleted.

        Args:
            experiments: the experiment of each run, by the run's id.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        client, run_ids = self._client, sorted(experiments)
        quoted_ids = ",".join(f"'{run_id}'" for run_id in run_ids)
        try:
            answer = client.search(
                "runs/search",
                experiment_ids=sorted(set(experiments.values())),
                filter=f"attributes.run_id IN ({quoted_ids})",
                run_view_type="ACTIVE_ONLY",
                max_results=len(run_ids),
            )
        except LargeAnswerError:
            if len(run_ids) == 1:
                raise
            middle = len(run_ids) // 2
            first_half = {run_id: experiments[run_id] for run_id in run_ids[:middle]}
            second_half = {run_id: experiments[run_id] for run_id in run_ids[middle:]}
            return self.find_runs(first_half) | self.find_runs(second_half)
        with client.parsing_answer():
            runs = [_parse_run(item) for item in answer.get("runs") or []]
        return {run.run_id: run for run in runs if not run.is_deleted}

    def ensure_run(
        self,
        uid: str,
        experiment: str,
        run_name: str,
        tags: Mapping[str, str],
        experiment_id: str | None = None,
        *,
        tag: str = contract.TAG_JOB_UID,
    ) -> Run:
        """The run of a job, which is created if it does not exist.

        Args:
            uid: the value of `tag` that the run has.
            tag: the tag by which the run is found.
            experiment_id: the id that the experiment had a short while ago, which saves a request; None if it is not known.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        client = self._client
        if experiment_id:
            try:
                run = _find_job_run(client, experiment_id, uid, tag)
                return run or _create_run(client, experiment_id, run_name, tags)
            except RefusedError:
                # The experiment may have been deleted meanwhile, and another one may have its name.
                log.info(
                    "%s refuses a run in experiment %s: reading the experiment again", self.uri, experiment
                )
        existing = _get_experiment(client, experiment)
        run = _find_job_run(client, _experiment_id(client, existing), uid, tag) if existing else None
        return run or _create_run(client, _ensure_experiment(client, experiment, existing), run_name, tags)

    def read_run(self, run_id: str) -> Run | None:
        """A run by its id; None if it does not exist, or was deleted.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        run = get_run(self._client, run_id)
        return None if run is None or run.is_deleted else run

    def read_metric(self, run_id: str, name: str) -> dict[int, float]:
        """All values of a metric of a run, by step; the latest one of a step that was logged twice. Empty if the run does not exist.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        client = self._client
        pages = read_pages(
            partial(client.get, "metrics/get-history"),
            "metrics",
            max_pages=_MAX_METRIC_PAGES,
            run_id=run_id,
            metric_key=name,
            max_results=_VALUES_PER_PAGE,
        )
        try:
            with client.parsing_answer():
                entries = sorted(pages, key=lambda item: int(item["timestamp"]))
                # NB: in MLflow's JSON, NaN and infinity are strings.
                return {int(item.get("step") or 0): float(item.get("value") or 0.0) for item in entries}
        except RefusedError as error:
            if error.code == MISSING:
                return {}
            raise

    def finish_run(self, run_id: str, status: str) -> None:
        """Close a run. `status`: FINISHED, FAILED or KILLED.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        self._client.post("runs/update", run_id=run_id, status=status, end_time=_now_milliseconds())

    def find_open_runs(self, tag: str) -> list[Run]:
        """The runs of all experiments that have this tag and were not closed.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        client = self._client
        open_runs: list[Run] = []
        with client.parsing_answer():
            experiments = [
                str(item["experiment_id"])
                for item in read_pages(
                    partial(client.search, "experiments/search"),
                    "experiments",
                    max_pages=_MAX_EXPERIMENT_PAGES,
                    max_results=_EXPERIMENTS_PER_PAGE,
                )
            ]
            for start in range(0, len(experiments), _EXPERIMENTS_PER_SEARCH):
                open_runs += _search_open_runs(
                    client, experiments[start : start + _EXPERIMENTS_PER_SEARCH], tag
                )
        return open_runs

    def log_metrics(self, run_id: str, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step to a run.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        now = _now_milliseconds()
        entries = [
            {"key": name, "value": value, "timestamp": now, "step": step} for name, value in metrics.items()
        ]
        self._client.post("runs/log-batch", run_id=run_id, metrics=entries)

    @property
    def _client(self) -> Client:
        return Client(self.uri, self.credentials)


def get_run(client: Client, run_id: str) -> Run | None:
    """A run by its id; None when the server does not have it, for example because its database was lost.

    Raises:
        ExternalError: the server cannot be reached, or refuses.
    """
    try:
        answer = client.get("runs/get", run_id=run_id)
    except RefusedError as error:
        if error.code == MISSING:
            return None
        raise
    with client.parsing_answer():
        return _parse_run(answer["run"])


def to_mapping(entries: Iterable[Json]) -> dict[str, str]:
    """Tags or parameters by their keys."""
    return {str(item["key"]): str(item.get("value") or "") for item in entries}


def _parse_run(answer: Json) -> Run:
    """A run from its JSON. Call it in `Client.parsing_answer`, which translates its errors."""
    info, data = answer["info"], answer.get("data") or {}
    run_id, experiment = str(info["run_id"]), str(info["experiment_id"])
    if not (_RUN_ID.fullmatch(run_id) and _RUN_ID.fullmatch(experiment)):
        raise ValueError("an id that MLflow does not allow")
    metrics = data.get("metrics") or []
    planned = to_mapping(data.get("params") or []).get(contract.PARAM_MAX_STEPS, "")
    return Run(
        run_id=run_id,
        experiment_id=experiment,
        status=str(info.get("status")),
        # NB: in MLflow's JSON, NaN and infinity are strings.
        metrics={str(item["key"]): float(item.get("value") or 0.0) for item in metrics},
        tags=to_mapping(data.get("tags") or []),
        steps={str(item["key"]): int(item.get("step") or 0) for item in metrics},
        planned_steps=int(planned) if planned.isdecimal() and int(planned) else None,
        is_deleted=info.get("lifecycle_stage") == "deleted",
    )


def _search_open_runs(client: Client, experiments: list[str], tag: str) -> list[Run]:
    """The runs of some experiments that have a tag and were not closed. If a page is too large, the search starts again with smaller pages."""
    for runs_per_page in _RUNS_PER_PAGE:
        pages = read_pages(
            partial(client.search, "runs/search"),
            "runs",
            max_pages=_MAX_RUN_PAGES,
            experiment_ids=experiments,
            filter=f"attributes.status = 'RUNNING' and tags.`{tag}` LIKE '%'",
            max_results=runs_per_page,
        )
        try:
            return [_parse_run(item) for item in pages]
        except LargeAnswerError:
            if runs_per_page == _RUNS_PER_PAGE[-1]:
                raise
    return []


def _find_job_run(
    client: Client, experiment_id: str, uid: str, tag: str = contract.TAG_JOB_UID
) -> Run | None:
    """The first run of a job in an experiment: the run whose `tag` is `uid`."""
    answer = client.search(
        "runs/search",
        experiment_ids=[experiment_id],
        filter=f"tags.`{tag}` = '{uid}'",
        run_view_type="ACTIVE_ONLY",
        max_results=1,
        order_by=["attribute.start_time ASC"],
    )
    with client.parsing_answer():
        runs = [_parse_run(item) for item in answer.get("runs") or []]
    return runs[0] if runs else None


def _create_run(client: Client, experiment_id: str, run_name: str, tags: Mapping[str, str]) -> Run:
    every_tag = {**tags, "mlflow.runName": run_name, "mlflow.user": _USER}
    answer = client.post(
        "runs/create",
        experiment_id=experiment_id,
        user_id=_USER,
        start_time=_now_milliseconds(),
        tags=[{"key": key, "value": value} for key, value in every_tag.items()],
        run_name=run_name,
    )
    with client.parsing_answer():
        return _parse_run(answer["run"])


def _get_experiment(client: Client, name: str) -> Json | None:
    try:
        answer = client.get("experiments/get-by-name", experiment_name=name)
    except RefusedError as error:
        if error.code == MISSING:
            return None
        raise
    with client.parsing_answer():
        return dict(answer["experiment"])


def _experiment_id(client: Client, experiment: Json) -> str:
    with client.parsing_answer():
        return str(experiment["experiment_id"])


def _ensure_experiment(client: Client, name: str, experiment: Json | None) -> str:
    """The id of an experiment, which is created if it does not exist.

    Args:
        experiment: the experiment as MLflow has it; None if it does not exist.
    """
    if experiment is None:
        try:
            return _experiment_id(client, client.post("experiments/create", name=name))
        except RefusedError as error:
            if error.code == MISSING:
                message = (
                    f"experiment {name} cannot be created at {client.uri} because its folder does not exist: create the folder, or create "
                    "a FineTuneJob with another name and another spec.tracking.experiment"
                )
                raise ExternalError(Problem(ConditionReason.MLFLOW_ERROR, message)) from None
            if error.code != EXISTS:
                raise
            experiment = _get_experiment(client, name) or {}
    if experiment.get("lifecycle_stage") != "active":
        raise ExternalError(
            Problem(
                ConditionReason.MLFLOW_ERROR,
                f"experiment {name} was deleted in MLflow: restore the experiment, or create a FineTuneJob with another name and another "
                "spec.tracking.experiment",
            )
        )
    return _experiment_id(client, experiment)


def _now_milliseconds() -> int:
    """The current time in milliseconds since 1970, as MLflow expects it."""
    return int(time.time() * 1000)
