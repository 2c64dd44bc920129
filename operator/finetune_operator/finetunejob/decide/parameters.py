"""References in arguments and parameters that a pod cannot resolve: paths and secrets of a Databricks workspace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER
from finetune_operator.databricks import secret_scopes
from finetune_operator.template_merge import is_below, mounts

# A workspace path, at the beginning of a value or after the equals sign of an option.
_PATH = re.compile(r"(?:^|=)((?:/Volumes/|/dbfs/|dbfs:/)\S+)")
_MAX_PATHS = 3


def unreadable_secrets(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake for each reference to a workspace secret, which a command would receive unresolved."""
    for field, text, _template in _strings(spec):
        if secret_scopes.is_reference(text):
            yield (
                f"spec.{field} references a secret of a Databricks workspace, which pods cannot read: set a variable from a Kubernetes "
                "Secret with valueFrom or envFrom, and read that variable in the command"
            )


def unmounted_paths(spec: FineTuneJobSpec) -> list[str]:
    """Workspace paths at which the pod mounts no volume. NB: a command may read them in another way, so this is a warning."""
    unmounted = [
        f"spec.{field} has {path}"
        for field, text, template in _strings(spec)
        for path in _PATH.findall(text)
        if not any(is_below(path, mount) for mount in mounts(template, MAIN_CONTAINER, but=()))
    ]
    more = [f"{len(unmounted) - _MAX_PATHS} more"] if len(unmounted) > _MAX_PATHS else []
    return [*unmounted[:_MAX_PATHS], *more]


def _strings(spec: FineTuneJobSpec) -> Iterator[tuple[str, str, Json | None]]:
    """Each string of args and parameters: its field, the string, and the template of the pods that get it."""
    parts: list[tuple[str, Any, Json | None]] = [
        (f"trainer.{field}", getattr(spec.trainer, field), spec.pods.train.template)
        for field in ("args", "parameters")
    ]
    if spec.evaluation:
        parts += [
            (f"evaluation.{field}", getattr(spec.evaluation, field), spec.pods.evaluate.template)
            for field in ("args", "parameters")
        ]
    for field, value, template in parts:
        for path, text in _leaves(field, value):
            yield path, text, template


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """The strings of a JSON value, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}", part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _leaves(f"{path}[{index}]", part)
