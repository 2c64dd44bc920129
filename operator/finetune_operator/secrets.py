"""Secrets that people name for credentials."""

from __future__ import annotations

import base64

from finetune_crds.conditions import ConditionReason
from finetune_crds.env import LocalReference
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import Kube, KubeError

# A Secret may hold more than is read here, and need not be text there.
_OURS = ("MLFLOW_TRACKING_", "DATABRICKS_")


# Where Secrets are named, for messages.
TRACKING = "spec.tracking.secretRef"
SERVING = "spec.serving.databricks.secretRef"


async def read(
    kube: Kube, namespace: str, reference: LocalReference | None, field: str
) -> dict[str, str] | None:
    """The credentials that a Secret holds; None when none is named, or when it does not exist and need not.

    Args:
        field: where the Secret is named.

    Raises:
        ExternalError: it cannot be read, does not exist, or holds no text.
        KubeError: the API server cannot be reached.
    """
    if reference is None:
        return None
    what = f"Secret {reference.name} of {field}"
    try:
        secret = await kube.get("Secret", namespace, reference.name)
        if secret is not None:
            held = (secret.get("data") or {}).items()
            return {name: _text(value) for name, value in held if name.startswith(_OURS)}
    except ValueError:
        reason, problem = (
            ConditionReason.CREDENTIALS_UNREADABLE,
            f"{what} holds credentials that are no text: make it from text",
        )
    except KubeError as error:
        if error.status not in (400, 403):
            raise
        remedy = "install the chart with rbac.trackingSecrets" if error.status == 403 else "name another"
        reason = ConditionReason.CREDENTIALS_UNREADABLE
        problem = f"{what} cannot be read by the operator ({error}): {remedy}"
    else:
        if reference.optional:
            return None
        reason = ConditionReason.CREDENTIALS_MISSING
        problem = f"{what} does not exist in namespace {namespace}: create it"
    raise ExternalError(Problem(reason, problem))


def _text(value: str) -> str:
    # NB: files and `echo` end in a line break, which no header may hold.
    return base64.b64decode(value).decode().strip()
