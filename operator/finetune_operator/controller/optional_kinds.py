"""Kinds that the operator does without if it has no right to list them: NetworkPolicies.

Without the right, neither the list of all objects nor the watches would succeed, and the operator would do nothing at all. The role can be older
than the operator's image, if the image alone was upgraded or the roles are kept elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from http import HTTPStatus

from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 5.0
# Reads at most one object of each namespace: the API server checks the right on every list alike.
_SELECTOR = "metadata.name=finetune-operator"


async def turn_off_forbidden_kinds(kube: Kube, settings: Settings) -> Settings:
    """The settings, without NetworkPolicies if the API server forbids to list them in one of the namespaces.

    If the API server does not answer, the settings stay. A watch that is forbidden ends the process, and its next start checks again.
    """
    if not settings.network_policies:
        return settings
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            for namespace in settings.namespaces or (None,):
                await kube.list("NetworkPolicy", namespace, metadata_only=True, fieldSelector=_SELECTOR)
    except TimeoutError:
        return settings
    except KubeError as error:
        if error.status != HTTPStatus.FORBIDDEN:
            return settings
        log.warning(
            "jobs get no NetworkPolicy until the operator is restarted with the right to list them (%s): upgrade the chart, or set "
            "networkPolicy.jobs to false",
            error,
        )
        return replace(settings, network_policies=False)
    return settings
