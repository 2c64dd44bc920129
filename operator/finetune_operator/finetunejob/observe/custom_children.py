"""Reads what a backend of the preparation has made of a kind of another operator, and the pods that the job itself controls.

They are listed in each pass over a job that has any, and not watched: most clusters do not have the kind.
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
    """Lists what one job has."""

    kube: Kube

    async def read(self, ftj: FineTuneJob) -> CustomChildren | None:
        """The objects and the pods; None for a job that has none, or whose result is known.

        Raises:
            KubeError: they could not be listed.
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
        # NB: after the objects: the pod of one that has ended is read in its last state.
        selector = f"{job_selector},{names.LABEL_COMPONENT}={names.PREP}"
        pods = await self.kube.list("Pod", ftj.namespace, labelSelector=selector)
        return CustomChildren(
            by_name={body["metadata"]["name"]: body for body in listed.objects if is_child(body, ftj)},
            pods=tuple(body for body in pods.objects if is_child(body, ftj)),
        )


def _find_problem(kind: CustomKind, error: KubeError) -> Problem | None:
    """What keeps every job from having such objects; None where the error may pass."""
    if error.status == HTTPStatus.NOT_FOUND:
        return kind.missing
    if error.status == HTTPStatus.FORBIDDEN:
        return dataclasses.replace(kind.forbidden, message=kind.forbidden.message.format(error=error))
    return None
