"""Settings of pods, of the chart and of resources, as pod templates."""

from __future__ import annotations

import functools

from finetune_crds.base import Json
from finetune_crds.pods import MAIN_CONTAINER, PodSettings
from finetune_operator.defaults import Defaults
from finetune_operator.template_merge import merge


def merge_templates(*templates: Json | None) -> Json | None:
    """Merge templates; a later template takes precedence."""
    return functools.reduce(merge, templates, {}) or None


def as_template(pods: PodSettings) -> Json | None:
    """Pod settings as one template. Their own template takes precedence over their variables and ServiceAccount."""
    env = {
        name: [item.to_json() for item in items]
        for name, items in (("env", pods.env), ("envFrom", pods.env_from))
        if items
    }
    pod_spec: Json = {}
    if pods.service_account_name:
        pod_spec["serviceAccountName"] = pods.service_account_name
    if env:
        pod_spec["containers"] = [{"name": MAIN_CONTAINER, **env}]
    return merge_templates({"spec": pod_spec} if pod_spec else {}, pods.template)


def build_pull_secrets(defaults: Defaults) -> Json:
    """The part of a pod template with the chart's pull secrets; empty without any."""
    secrets = [secret.to_json() for secret in defaults.image_pull_secrets]
    return {"spec": {"imagePullSecrets": secrets}} if secrets else {}
