"""What a gate's Job says about a version: its verdict, and its numbers for the gates that use them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune_crds import contract
from finetune_crds.promotion_status import GateResult, GateVerdict, Verdict
from finetune_operator.registry.base import ModelVersion


@dataclass(frozen=True)
class Measurement:
    """The Job of a gate for one version.

    Attributes:
        job: the name of the Job.
        result: its result; None until it has ended.
        pending: why there is no result yet.
        is_in_progress: whether a result will come without anyone's help, as far as is known.
    """

    job: str
    result: GateResult | None
    pending: str = ""
    is_in_progress: bool = False


def judge_job(name: str, measurement: Measurement) -> GateVerdict:
    """The verdict of a gate of type Job."""
    result = measurement.result
    if result is None:
        return GateVerdict(name=name, verdict="Inconclusive", message=measurement.pending)
    if result.outcome == "Succeeded":
        numbers = ", ".join(f"{number} {float(value):.6g}" for number, value in result.metrics.items())
        reported = f" and reported {numbers}" if numbers else ""
        problem = f"; {result.message}" if result.message else ""
        message = f"Job {result.job} succeeded{reported}{problem}"
        return GateVerdict(name=name, verdict="Passed", message=message)
    verdict: Verdict = "Failed" if result.outcome == "Failed" else "Inconclusive"
    return GateVerdict(name=name, verdict=verdict, message=result.message)


def read_measured(version: ModelVersion, measurement: Measurement, number: str) -> ModelVersion | str:
    """The version with the numbers of a Job instead of its own, or why the Job has not reported a number.

    The numbers of two versions are comparable if the same Job reported them: its digest replaces that of the evaluation data.
    """
    result = measurement.result
    if result is None:
        return measurement.pending
    if result.outcome != "Succeeded":
        return result.message
    if number not in result.metrics:
        why = f": {result.message}" if result.message else ""
        return (
            f"Job {result.job} has not reported {number} of version {version.version}{why}: write the number to the file METRICS_PATH as "
            "JSON, or log it to the run MLFLOW_RUN_ID, and change the gate to run the Job again"
        )
    tags = {**result.metrics, contract.TAG_EVALUATION_DATA: result.digest}
    return replace(version, tags=tags, metrics={}, evaluated_on=result.digest, unread="")
