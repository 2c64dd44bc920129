"""Dry runs of the training Job and of one of its pods: what the API server would say when they are created."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_operator.finetunejob.model import Rehearsal
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# The sentences are the API server's: the RBAC authorizer's, and that of admission for webhooks with side effects.
_UNCHECKED = re.compile(r'cannot create resource "pods"|does not support dry run')
_QUOTA = re.compile(r"exceeded quota|status unknown for quota")
# NB: kube-controller-manager creates the default service account of a new namespace only after the namespace.
_NO_ACCOUNT = "error looking up service account"
# Reasons by the status of a refusal: a policy, and a template that is no template.
_REASONS = {
    403: ConditionReason.POD_REJECTED,
    400: ConditionReason.POD_TEMPLATE_INVALID,
    422: ConditionReason.POD_TEMPLATE_INVALID,
}


async def rehearse(kube: Kube, bodies: Sequence[Json]) -> Rehearsal:
    """Create objects as dry runs; the first refusal counts.

    Raises:
        KubeError: the API server could not be reached, or failed; or the service account does not exist yet.
    """
    for body in bodies:
        try:
            await kube.create(body, dry_run=True)
        except KubeError as error:
            if error.status == 409:
                continue
            if error.status not in _REASONS or _NO_ACCOUNT in str(error):
                raise
            return _refusal(body, error)
    return Rehearsal(
        admitted=True,
        reason=ConditionReason.PODS_ADMITTED,
        message="the API server would create the training pods",
    )


def _refusal(body: Json, error: KubeError) -> Rehearsal:
    what = f"{body['kind']} {body['metadata']['name']}"
    if _UNCHECKED.search(str(error)):
        log.warning("%s/%s is not checked by a dry run: %s", body["metadata"]["namespace"], what, error)
        message = f"the training pods are not checked before they are created: {error}"
        return Rehearsal(admitted=None, reason=ConditionReason.NOT_CHECKED, message=message)
    if error.status == 403 and _QUOTA.search(str(error)):
        message = f"{what} would be refused now: {error}; the preparation goes on, and the pods are created after it"
        return Rehearsal(admitted=False, reason=ConditionReason.QUOTA_EXCEEDED, message=message)
    message = f"{what} would be refused: {error}: correct spec.podTemplate, and the job goes on"
    return Rehearsal(admitted=False, reason=_REASONS[error.status], message=message)
