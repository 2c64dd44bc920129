"""Reads a preparation's objects of another operator's kind, and the pods that the FineTuneJob itself controls.

Most clusters do not have the kind, so it is not watched. Each pass over a job whose preparation uses the kind lists the objects.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from http import HTTPStatus

from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.children import is_child
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.finetunejob.preparation.backend import CustomKind
from finetune_operator.kube import Kube, KubeError


@dataclass(frozen=True)
class CustomChildReader:
    """Lists the custom children of one job."""

    kube: Kube

    async def read(self, ftj: FineTuneJob) -> CustomChildren | None:
        """The objects and the pods, or a problem (`_find_problem`); None for a job without such children, or once a result exists.

        Raises:
            KubeError: the objects could not be listed for another reason, or the pods could not be listed.
        """
        kind = backends.find_kind_to_read(ftj)
        if kind is None:
            return None
        job_selector = f"{names.LABEL_UID}={ftj.uid}"
        try:
            listed = await self.kube.list(kind.name, ftj.namespace, labelSelector=job_selector)
        except KubeError as error:
            problem = _find_problem(kind, error)
            if problem is None:
                raise
            return CustomChildren(problem=problem)
        # NB: list the pods after the objects, so that the pod of an object that has ended is read in its last state.
        selector = f"{job_selector},{names.LABEL_COMPONENT}={names.PREP}"
        pods = await self.kube.list("Pod", ftj.namespace, labelSelector=selector)
        return CustomChildren(
            by_name={body["metadata"]["name"]: body for body in listed.objects if is_child(body, ftj)},
            pods=tuple(body for body in pods.objects if is_child(body, ftj)),
        )


def _find_problem(kind: CustomKind, error: KubeError) -> Problem | None:
    """Return the problem that keeps every job from having such objects; None if the error is temporary."""
    if error.status == HTTPStatus.NOT_FOUND:
        return kind.missing
    if error.status == HTTPStatus.FORBIDDEN:
        return dataclasses.replace(kind.forbidden, message=kind.forbidden.message.format(error=error))
    return None
