"""Reads the SparkApplications of a preparation, and the pods of their drivers.

They are listed in each pass over a job that has any, and not watched: most clusters have no spark-operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.children import is_child
from finetune_operator.finetunejob.model import Applications, FineTuneJob
from finetune_operator.finetunejob.preparation import spark_application
from finetune_operator.kube import Kube, KubeError

_MISSING = Problem(
    ConditionReason.SPARK_OPERATOR_MISSING,
    "data.prepare.spark.mode SparkApplication needs Kubeflow's spark-operator, and this cluster has no SparkApplications "
    "(sparkoperator.k8s.io/v1beta2): install the spark-operator, and the job continues; or create a FineTuneJob with another "
    "name and spark.mode Kubernetes, which needs none",
)


@dataclass(frozen=True)
class ApplicationReader:
    """Lists what one job has."""

    kube: Kube

    async def read(self, ftj: FineTuneJob) -> Applications | None:
        """The SparkApplications and the drivers; None for a job that has none, or whose result is known.

        Raises:
            KubeError: they could not be listed.
        """
        if not spark_application.is_followed(ftj):
            return None
        job_selector = f"{names.LABEL_UID}={ftj.uid}"
        try:
            listed = await self.kube.list("SparkApplication", ftj.namespace, labelSelector=job_selector)
        except KubeError as error:
            problem = _problem(error)
            if problem is None:
                raise
            return Applications(problem=problem)
        # NB: after the SparkApplications: the pod of one that has ended is read in its last state.
        selector = f"{job_selector},{names.LABEL_COMPONENT}={names.PREP}"
        pods = await self.kube.list("Pod", ftj.namespace, labelSelector=selector)
        return Applications(
            by_name={body["metadata"]["name"]: body for body in listed.objects if is_child(body, ftj)},
            drivers=tuple(body for body in pods.objects if is_child(body, ftj)),
        )


def _problem(error: KubeError) -> Problem | None:
    """What keeps every job from having SparkApplications; None where the error may pass."""
    if error.status == HTTPStatus.NOT_FOUND:
        return _MISSING
    if error.status == HTTPStatus.FORBIDDEN:
        message = (
            f"the operator may not read SparkApplications ({error}): install the chart with rbac.sparkApplications, and the "
            "job continues"
        )
        return Problem(ConditionReason.SPARK_OPERATOR_FORBIDDEN, message)
    return None
