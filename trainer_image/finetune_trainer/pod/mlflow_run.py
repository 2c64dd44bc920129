"""The MLflow run: metrics, parameters and lineage, logged from a background thread.

Tracking never blocks a step and never stops training. While MLflow is unreachable, entries are queued; they keep their
timestamps.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from finetune_trainer.pod import exit_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.data.meta_dataset import MetaDataset

_MAX_QUEUED_METRICS = 20_000
_METRICS_PER_CALL = 500
# The pause between retries doubles from the first to the longest.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 15.0
# How long a rank that ends with an error waits for MLflow; the wait must fit into the pod's grace period.
_CLOSE_SECONDS = 5.0
# MLflow's classes of data sources, by the scheme of an address.
_STORE_SOURCES = {
    "s3": "S3ArtifactDatasetSource",
    "gs": "GCSArtifactDatasetSource",
    "abfss": "AzureDataLakeArtifactDatasetSource",
}
# Error codes for which a retry cannot succeed.
_FINAL_CODES = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "RESOURCE_DOES_NOT_EXIST",
        "BAD_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "INVALID_STATE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
    }
)

# The query of an address in a text. NB: urllib3 logs addresses without their hosts, so no host is required.
_QUERY = re.compile(r"\?[^\s'\"<>()]*=[^\s'\"<>()]*")
# Loggers that print the signed addresses to which large files are uploaded.
_NAMING_ADDRESSES = ("mlflow.store.artifact.http_artifact_repo", "urllib3.connectionpool")

Entry = tuple[str, float, int, int]
"""The name, the value, the time in milliseconds since the epoch, and the step."""
Call = Callable[["MlflowClient"], object]


def create_client(tracking_uri: str | None = None) -> MlflowClient:
    """Return a client of a tracking server, by default the environment's. With the variables of `library_variables`, it fails fast and does not retry."""
    for name in _NAMING_ADDRESSES:
        logging.getLogger(name).addFilter(_strip_record)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def get_patience_seconds(default: float) -> float:
    """Return how long to wait for an unreachable MLflow: FINETUNE_MLFLOW_PATIENCE_SECONDS, or `default`."""
    return float(os.environ.get("FINETUNE_MLFLOW_PATIENCE_SECONDS", default))


def is_final(error: Exception) -> bool:
    """Whether a retry of the request cannot succeed."""
    return getattr(error, "error_code", None) in _FINAL_CODES


class Tracker:
    """Logs to an MLflow run; without a run, discards all entries.

    As a context manager, it is closed at the end of the block; after an error, it waits only briefly for MLflow.

    Args:
        run_id: the run; None or empty: nothing is tracked.
        connect: makes the client, in the tracker's own thread.
        quiet: print nothing about an unreachable MLflow, since another rank does.
        patience: seconds that `close` waits for an unreachable MLflow, unless the environment sets them.
    """

    def __init__(
        self,
        run_id: str | None,
        connect: Callable[[], MlflowClient] = create_client,
        *,
        quiet: bool = False,
        patience: float = 60.0,
    ) -> None:
        self.run_id = run_id or None
        self._patience = patience
        self._quiet = quiet
        self._connect = connect
        self._client: MlflowClient | None = None
        self._metrics: deque[Entry] = deque(maxlen=_MAX_QUEUED_METRICS)
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
        self._away = False
        self._thread: threading.Thread | None = None
        if self.run_id:
            self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
            self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log metrics; None values are omitted."""
        now = int(time.time() * 1000)
        entries = [(name, float(value), now, step) for name, value in values.items() if value is not None]
        self._enqueue(lambda: self._metrics.extend(entries))

    def describe(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Log parameters and tags; parameters that an earlier attempt logged stay unchanged."""
        self._enqueue_call(lambda mlflow: self._log_params_and_tags(mlflow, params, tags))

    def tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; existing tags are overwritten."""
        self._enqueue_call(lambda mlflow: self._log_tags(mlflow, tags))

    def dataset(
        self, address: str, *, name: str, digest: str, version: int | None = None, use: str = "training"
    ) -> None:
        """Log data: a version of a Delta table by its path or its name, or files if `version` is None.

        Args:
            use: what the run uses the data for, which MLflow calls the context.
        """

        def log(mlflow: MlflowClient) -> None:
            self._log_dataset(mlflow, _build_dataset(address, version, name=name, digest=digest), use)

        self._enqueue_call(log)

    def artifacts(self, files: Sequence[Path], place: str) -> None:
        """Upload files to a folder of the run's artifacts; a failed upload is not repeated.

        The files must stay until the tracker is closed.
        """
        self._enqueue_call(lambda mlflow: self._log_artifacts(mlflow, files, place))

    def table(self, file: Path, place: str) -> None:
        """Upload a table of MLflow, a JSON file with columns and data, to a folder of the run's artifacts; replace a file of the same name.

        The file must stay until the tracker is closed.
        """
        self._enqueue_call(lambda mlflow: self._log_table(mlflow, file, place))

    def flush(self, seconds: float) -> bool:
        """Wait until the queue is empty; return False if it is not after `seconds`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._busy or self._metrics or self._calls), timeout=seconds
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else _CLOSE_SECONDS)

    def close(self, seconds: float | None = None) -> None:
        """Log the rest of the queue, in at most `seconds` (by default the patience), and stop."""
        if self._thread is None:
            return
        if seconds is None:
            seconds = get_patience_seconds(self._patience)
        is_complete = self.flush(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # A request may still run; the thread is a daemon, and ends with the process.
        self._thread.join(timeout=1.0)
        if not is_complete:
            self._print(f"MLflow was not reachable for {seconds:.0f} s: the last metrics are lost")

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)

    def _enqueue_call(self, call: Call) -> None:
        self._enqueue(lambda: self._calls.append(call))

    def _enqueue(self, put: Callable[[], None]) -> None:
        if self._thread is None:
            return
        with self._changed:
            put()
            self._changed.notify_all()

    def _work(self) -> None:
        while (call := self._take()) is not None:
            self._log_with_retries(call)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _take(self) -> Call | None:
        """Wait for the next entry to log and return it; None: the tracker is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._metrics or self._calls)
            if self._closing:
                return None
            self._busy = True
            if self._calls:
                return self._calls.popleft()
            entries = [self._metrics.popleft() for _ in range(min(len(self._metrics), _METRICS_PER_CALL))]
            return lambda mlflow: self._log_metrics(mlflow, entries)

    def _log_with_retries(self, call: Call) -> None:
        """Log an entry: retry while MLflow is unreachable, until the tracker is closed; drop an entry that MLflow rejects."""
        pause = FIRST_PAUSE_SECONDS
        while not self._closing:
            try:
                self._client = self._client or self._connect()
                call(self._client)
            except Exception as error:  # noqa: BLE001 - tracking never stops training
                if is_final(error):
                    self._print(f"MLflow rejected an entry; dropping it: {first_line(error)}")
                    return
                self._wait_for_mlflow(error, pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                if self._away:
                    self._away = False
                    self._print("MLflow is reachable again")
                return

    def _wait_for_mlflow(self, error: Exception, pause: float) -> None:
        if not self._away:
            self._away = True
            self._print(f"MLflow is unreachable; continuing without it: {first_line(error)}")
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=pause)

    def _log_metrics(self, mlflow: MlflowClient, entries: list[Entry]) -> None:
        from mlflow.entities import Metric

        mlflow.log_batch(self._run(), metrics=[Metric(*entry) for entry in entries])

    def _log_params_and_tags(
        self, mlflow: MlflowClient, params: Mapping[str, Any], tags: Mapping[str, str]
    ) -> None:
        from mlflow.entities import Param, RunTag

        logged = mlflow.get_run(self._run()).data.params
        mlflow.log_batch(
            self._run(),
            params=[Param(name, str(value)) for name, value in params.items() if name not in logged],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )

    def _log_artifacts(self, mlflow: MlflowClient, files: Sequence[Path], place: str) -> None:
        self._upload(mlflow, files, place)

    def _upload(self, mlflow: MlflowClient, files: Sequence[Path], place: str) -> bool:
        # NB: the pod may never have access to the store of artifacts, so a failed upload does not hold up the entries after it.
        try:
            for file in files:
                mlflow.log_artifact(self._run(), str(file), artifact_path=place)
        except Exception as error:  # noqa: BLE001 - tracking never stops training
            self._print(f"{place} was not uploaded to the run's artifacts: {first_line(error)}")
            return False
        return True

    def _log_table(self, mlflow: MlflowClient, file: Path, place: str) -> None:
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        # If MLflow is unreachable, this call fails and is retried; a failed upload is not.
        tables = json.loads(mlflow.get_run(self._run()).data.tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]"))
        entry = {"path": f"{place}/{file.name}", "type": "table"}
        if self._upload(mlflow, [file], place) and entry not in tables:
            self._log_tags(mlflow, {MLFLOW_LOGGED_ARTIFACTS: json.dumps([*tables, entry])})

    def _log_tags(self, mlflow: MlflowClient, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        mlflow.log_batch(self._run(), tags=[RunTag(name, value) for name, value in tags.items()])

    def _log_dataset(self, mlflow: MlflowClient, dataset: MetaDataset, use: str) -> None:
        from mlflow.entities import DatasetInput, InputTag

        context = InputTag("mlflow.data.context", use)
        mlflow.log_inputs(self._run(), [DatasetInput(dataset._to_mlflow_entity(), [context])])  # noqa: SLF001

    def _run(self) -> str:
        assert self.run_id is not None  # noqa: S101 - without a run, there is no thread that calls this
        return self.run_id


def _build_dataset(address: str, version: int | None, *, name: str, digest: str) -> MetaDataset:
    from mlflow.data import sources
    from mlflow.data.meta_dataset import MetaDataset

    if version is not None:
        place = {"path" if "/" in address else "delta_table_name": address}
        return MetaDataset(
            sources.DeltaDatasetSource(**place, delta_table_version=version), name=name, digest=digest
        )
    source_name = _STORE_SOURCES.get(urlsplit(address).scheme, "LocalArtifactDatasetSource")
    return MetaDataset(getattr(sources, source_name)(address), name=name, digest=digest)


def first_line(error: Exception) -> str:
    """Return the first line of an error message, without the queries of addresses."""
    return _strip_queries(exit_status.first_line(error))[:300]


def _strip_queries(text: str) -> str:
    # NB: the query of a signed address allows anybody to read or write there.
    return _QUERY.sub("", text)


def _strip_record(record: logging.LogRecord) -> bool:
    """Remove queries from a record. As the filter of a logger, it returns True: the logger keeps the record."""
    record.msg, record.args = _strip_queries(record.getMessage()), ()
    return True
