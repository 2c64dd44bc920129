"""Runs of the preparation in a workspace: upload the wheel and the recipe, submit the run, and read its result."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from databricks.sdk import errors
from databricks.sdk.service.compute import ClusterSpec, DataSecurityMode, Environment, Library
from databricks.sdk.service.jobs import (
    JobEnvironment,
    PythonWheelTask,
    RunLifecycleStateV2State,
    RunType,
    SubmitTask,
    TerminationCodeCode,
)

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason
from finetune_crds.contract import RunReport
from finetune_crds.databricks import Serverless
from finetune_operator.databricks.model import Run, Submission
from finetune_operator.databricks.transport import MAX_FILE_BYTES, ResponseTooLargeError
from finetune_operator.databricks.workspace import log_error, mask_credentials, translate_errors
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.text import keep_beginning, shorten

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service import jobs

    from finetune_crds.databricks import NewCluster
    from finetune_crds.status_parts import RunState

log = logging.getLogger(__name__)

_TASK = "prepare"  # the key of the run's only task, and of its environment
_Life, _Code = RunLifecycleStateV2State, TerminationCodeCode
_CANCELED_CODES = (_Code.CANCELED, _Code.USER_CANCELED)
# A retry would end in the same way: the spec or the workspace has to change.
_PERMANENT_CODES = (
    _Code.UNAUTHORIZED_ERROR,
    _Code.INVALID_CLUSTER_REQUEST,
    _Code.INVALID_RUN_CONFIGURATION,
    _Code.RESOURCE_NOT_FOUND,
    _Code.FEATURE_DISABLED,
    _Code.DISABLED,
)


class _FileTooLargeError(Exception):
    """A file of a run is larger than the operator reads; the message has its path."""


def submit(client: WorkspaceClient, submission: Submission, wheels: Path) -> str:
    """Upload the wheel and the recipe, submit the run unless it was submitted before, and return its id.

    Raises:
        ExternalError: the workspace cannot be reached, rejects the run permanently (RunRefused), or has no such volume; or the operator
            has no wheel.
    """
    wheel = _upload_wheel(client, submission.volume, wheels)
    _upload(
        client, f"{submission.folder}/{contract.RECIPE_FILE}", submission.recipe.encode(), submission.volume
    )
    with translate_errors(client, "submit a run"):
        try:
            run = client.jobs.submit(
                run_name=submission.name,
                idempotency_token=submission.token,
                tasks=[_build_task(submission, wheel, client.config.host)],
                environments=_build_environments(submission, wheel),
            )
        except errors.InvalidState:
            # NB: a subclass of BadRequest, and temporary: the cluster is starting or terminating, and accepts the run later.
            raise
        except errors.BadRequest as error:
            why = log_error(client, error, "submit a run")
            message = (
                f"Databricks rejected the run ({why}): read the log of the operator, and create a FineTuneJob with another name and "
                "a corrected spec.data.prepare.spark.databricks"
            )
            raise ExternalError(Problem(ConditionReason.RUN_REFUSED, message)) from None
    return str(run.run_id)


def read(client: WorkspaceClient, run_id: str, folder: str) -> Run:
    """The state of a run, with the progress or the report in its folder. A run that no longer exists has failed.

    Raises:
        ExternalError: the workspace cannot be reached, or does not let the operator read the run.
    """
    with translate_errors(client, f"read run {run_id}"):
        try:
            run = client.jobs.get_run(int(run_id))
        except (errors.NotFound, errors.InvalidParameterValue):
            return Run(run_id, "Failed", message=f"run {run_id} no longer exists in the workspace")
    word, url = _classify_run(run), run.run_page_url or ""
    if word == "Running":
        return Run(run_id, word, url, progress=_read_progress(client, folder))
    if word not in ("Succeeded", "Failed"):
        return Run(run_id, word, url)
    termination = run.status.termination_details if run.status else None
    is_final = termination is not None and termination.code in _PERMANENT_CODES
    try:
        report = RunReport.parse(_download(client, f"{folder}/{contract.REPORT_FILE}") or b"")
    except _FileTooLargeError as error:
        message = f"{error}, so it is not the report of a preparation: find out what writes to this folder"
        return Run(run_id, word, url, message=message, is_final=is_final)
    message = "" if report or word == "Succeeded" else _explain_failure(client, run)
    return Run(run_id, word, url, message=message, is_final=is_final, report=report)


def _read_progress(client: WorkspaceClient, folder: str) -> str:
    try:
        content = _download(client, f"{folder}/{contract.PROGRESS_FILE}")
    except _FileTooLargeError as error:
        # A run does not need its progress, so it goes on.
        return f"{error}: the operator does not read it"
    return (content or b"").decode(errors="replace")


def find(client: WorkspaceClient, name: str) -> str | None:
    """The id of the active run of this name; None if there is none.

    Raises:
        ExternalError: the workspace cannot be reached, or does not let the operator list runs.
    """
    with translate_errors(client, "list runs"):
        active = client.jobs.list_runs(active_only=True, run_type=RunType.SUBMIT_RUN)
        return next((str(item.run_id) for item in active if item.run_name == name), None)


def cancel(client: WorkspaceClient, run_id: str) -> None:
    """Request the end of a run, which takes a while. A run that no longer exists is not an error.

    Raises:
        ExternalError: the workspace cannot be reached, or does not let the operator cancel the run.
    """
    with translate_errors(client, f"cancel run {run_id}"):
        try:
            client.jobs.cancel_run(int(run_id))
        except (errors.NotFound, errors.InvalidParameterValue):
            log.info("Databricks run %s is gone: there is nothing to cancel", run_id)


def _classify_run(run: jobs.Run) -> RunState:
    """The state of a run in one word."""
    status = run.status
    life = status.state if status else None
    if life == _Life.RUNNING:
        return "Running"
    if life == _Life.TERMINATING:
        return "Canceling"
    if status is None or life != _Life.TERMINATED:
        return "Pending"
    code = status.termination_details.code if status.termination_details else None
    if code in _CANCELED_CODES:
        return "Canceled"
    return "Succeeded" if code == _Code.SUCCESS else "Failed"


def _explain_failure(client: WorkspaceClient, run: jobs.Run) -> str:
    """Explain why a run without a report failed: the error of its task, or the termination reason in the workspace."""
    status = run.status
    termination = status.termination_details if status else None
    reason = "no reason"
    if termination and termination.message:
        reason = termination.message
    elif termination and termination.code:
        reason = str(termination.code.value)
    # NB: the run itself has no output. Each of its tasks has one, under the id of the task's own run.
    for task in run.tasks or []:
        with translate_errors(client, "read the output of a run"):
            try:
                reason = client.jobs.get_run_output(task.run_id or 0).error or reason
            except (errors.NotFound, errors.BadRequest):
                continue
    return shorten(mask_credentials(client, keep_beginning(reason)))


def _build_task(submission: Submission, wheel: str, host: str) -> SubmitTask:
    """The only task of a run, with the compute of the submission."""
    compute = submission.compute
    parameters = [contract.PARAMETER_FOLDER, submission.folder]
    # A run can reach only the MLflow of its own workspace.
    if submission.mlflow_run and submission.mlflow_host == host:
        parameters += [contract.PARAMETER_MLFLOW_RUN, submission.mlflow_run]
    task = SubmitTask(
        task_key=_TASK,
        # NB: by default, serverless compute retries a failed task, even if its data are wrong.
        disable_auto_optimization=True,
        max_retries=0,
        python_wheel_task=PythonWheelTask(
            package_name=contract.PREP_WHEEL.replace("-", "_"),
            entry_point=contract.PREP_WHEEL_ENTRY,
            parameters=parameters,
        ),
    )
    if compute.type == "Serverless":
        task.environment_key = _TASK
        return task
    task.libraries = [Library(whl=wheel)]
    if compute.existing_cluster:
        task.existing_cluster_id = compute.existing_cluster.cluster_id
    if compute.new_cluster:
        task.new_cluster = _build_cluster(compute.new_cluster, dict(submission.conf))
    return task


def _build_environments(submission: Submission, wheel: str) -> list[JobEnvironment] | None:
    if submission.compute.type != "Serverless":
        return None
    serverless = submission.compute.serverless or Serverless()
    environment = Environment(environment_version=serverless.environment_version, dependencies=[wheel])
    return [JobEnvironment(_TASK, environment)]


def _build_cluster(spec: NewCluster, conf: dict[str, str]) -> ClusterSpec:
    single_node_conf = {"spark.databricks.cluster.profile": "singleNode", "spark.master": "local[*]"}
    return ClusterSpec(
        spark_version=spec.spark_version,
        node_type_id=spec.node_type,
        instance_pool_id=spec.instance_pool_id,
        policy_id=spec.policy_id,
        apply_policy_default_values=True if spec.policy_id else None,
        num_workers=spec.workers,
        # NB: only a Dedicated (SINGLE_USER) cluster lets Python reach the JVM, which parses `filter` and counts tasks.
        data_security_mode=DataSecurityMode.SINGLE_USER,
        spark_conf=(conf if spec.workers else conf | single_node_conf) or None,
        custom_tags=None if spec.workers else {"ResourceClass": "SingleNode"},
        spark_env_vars=spec.env or None,
    )


def _upload_wheel(client: WorkspaceClient, volume: str, wheels: Path) -> str:
    """Upload this version's wheel unless the volume has it, and return its path in the volume."""
    # The folder contains one wheel.
    wheel = min(wheels.glob("*.whl"), default=None)
    if wheel is None:
        message = f"the operator has no wheel in {wheels}: install an image of the operator that contains the wheel, or set FINETUNE_PREP_WHEELS"
        raise ExternalError(Problem(ConditionReason.DATABRICKS_NOT_CONFIGURED, message))
    # NB: the name contains a digest of the content, and a file appears in a volume only after its upload is complete, so an existing
    # file is this wheel.
    path = f"{volume}/wheels/{wheel.name}"
    with translate_errors(client, f"read volume {volume}"):
        try:
            client.files.get_metadata(path)
        except errors.NotFound:
            pass
        else:
            return path
    _upload(client, path, wheel.read_bytes(), volume)
    log.info("uploaded %s to %s", wheel.name, volume)
    return path


def _upload(client: WorkspaceClient, path: str, content: bytes, volume: str) -> None:
    with translate_errors(client, f"write to volume {volume}"), _translate_missing_volume(client, volume):
        folder, _, _ = path.rpartition("/")
        client.files.create_directory(folder)
        client.files.upload(path, io.BytesIO(content), overwrite=True)


@contextmanager
def _translate_missing_volume(client: WorkspaceClient, volume: str) -> Iterator[None]:
    try:
        yield
    except errors.NotFound as error:
        message = (
            f"volume {volume} does not exist in Databricks, or is not visible to the operator: create the volume, "
            f"or grant READ VOLUME and WRITE VOLUME ({log_error(client, error, f'write to volume {volume}')})"
        )
        raise ExternalError(Problem(ConditionReason.DATABRICKS_ERROR, message)) from None


def _download(client: WorkspaceClient, path: str) -> bytes | None:
    """The content of a file; None if it does not exist.

    Raises:
        _FileTooLargeError: the file is larger than the operator reads.
        ExternalError: the workspace cannot be reached, or does not let the operator read the file.
    """
    with translate_errors(client, f"read {path}"):
        try:
            contents = client.files.download(path).contents
            return contents.read() if contents else None
        except errors.NotFound:
            return None
        except ResponseTooLargeError:
            pass
    raise _FileTooLargeError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
