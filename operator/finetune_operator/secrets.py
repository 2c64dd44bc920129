"""Reads the Secrets with credentials that specs name."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Mapping

from finetune_crds.conditions import ConditionReason
from finetune_crds.env import LocalReference
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import Kube, KubeError

# Beginnings of the keys to read. Other keys of a Secret are not read: their values may not be text.
_PREFIXES = ("MLFLOW_TRACKING_", "DATABRICKS_")
GIT_KEYS = ("username", "password")
"""Keys of a Secret with the login of a Git server, as Flux and Argo CD name them."""

# The fields that name a Secret, for messages.
TRACKING = "spec.tracking.secretRef"
SOURCE = "spec.source.registry.secretRef"
PROMETHEUS = "spec.onRegression.prometheus.secretRef"
GIT = "spec.trainer.code.git.secretRef"


async def read(
    kube: Kube,
    namespace: str,
    reference: LocalReference | None,
    field: str,
    prefixes: tuple[str, ...] = _PREFIXES,
) -> dict[str, str] | None:
    """The credentials in a Secret; None if the spec names no Secret, or an optional Secret does not exist.

    Args:
        field: the field that names the Secret.
        prefixes: beginnings of the keys to read.

    Raises:
        ExternalError: the Secret cannot be read, does not exist, or contains credentials that are not text.
        KubeError: the API server cannot be reached, or fails.
    """
    if reference is None:
        return None
    what = f"Secret {reference.name} of {field}"
    try:
        secret = await kube.get("Secret", namespace, reference.name)
        if secret is not None:
            entries = (secret.get("data") or {}).items()
            return {name: _decode(value) for name, value in entries if name.startswith(prefixes)}
    except ValueError:
        reason = ConditionReason.CREDENTIALS_UNREADABLE
        message = f"{what} contains credentials that are not text: recreate it from text"
    except KubeError as error:
        # 400: the API server does not accept the name.
        if error.status not in (400, 403):
            raise
        remedy = (
            "install the chart with rbac.trackingSecrets" if error.status == 403 else "name another Secret"
        )
        reason = ConditionReason.CREDENTIALS_UNREADABLE
        message = f"the operator cannot read {what} ({error}): {remedy}"
    else:
        # The Secret does not exist.
        if reference.optional:
            return None
        reason = ConditionReason.CREDENTIALS_MISSING
        message = f"{what} does not exist in namespace {namespace}: create the Secret"
    raise ExternalError(Problem(reason, message))


def build_key(secret: Mapping[str, str] | None) -> Hashable:
    """A cache key that changes when the credentials are corrected."""
    return None if secret is None else frozenset(secret.items())


def _decode(value: str) -> str:
    # NB: values from files and `echo` end in a line break, which a header must not contain.
    return base64.b64decode(value).decode().strip()
