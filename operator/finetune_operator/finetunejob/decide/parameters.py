"""Finds paths and secrets of a Databricks workspace in arguments and parameters: a pod cannot resolve such a path or secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.pods import MAIN_CONTAINER
from finetune_operator.databricks import secret_scopes
from finetune_operator.template_merge import is_below, mounts

# A workspace path, at the beginning of a value or after the equals sign of an option.
_PATH = re.compile(r"(?:^|=)((?:/Volumes/|/dbfs/|dbfs:/)\S+)")
# Paths beyond this number are only counted in the warning.
_MAX_PATHS = 3


class _Text(NamedTuple):
    """A string in args or parameters.

    Attributes:
        field: its path below spec, for example trainer.args[0].
        template: the template of the pods that get the string.
    """

    field: str
    text: str
    template: Json | None


def unreadable_secrets(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake for each reference to a workspace secret: a command would receive the reference, not the secret."""
    for item in _texts(spec):
        if secret_scopes.is_reference(item.text):
            yield (
                f"spec.{item.field} references a secret of a Databricks workspace, which pods cannot read: set a variable from a Kubernetes "
                "Secret with valueFrom or envFrom, and read that variable in the command"
            )


def unmounted_paths(spec: FineTuneJobSpec) -> list[str]:
    """The first workspace paths at which the pod mounts no volume, and the number of the others, as parts of a warning.

    NB: a warning, not a mistake, since a command may read the path in another way.
    """
    unmounted = [
        f"spec.{item.field} has {path}"
        for item in _texts(spec)
        for path in _PATH.findall(item.text)
        if not _is_mounted(path, item.template)
    ]
    more = [f"{len(unmounted) - _MAX_PATHS} more"] if len(unmounted) > _MAX_PATHS else []
    return [*unmounted[:_MAX_PATHS], *more]


def _is_mounted(path: str, template: Json | None) -> bool:
    # Volumes of every kind count.
    return any(is_below(path, mount) for mount in mounts(template, MAIN_CONTAINER, but=()))


def _texts(spec: FineTuneJobSpec) -> Iterator[_Text]:
    """Each string in the args and parameters of the training and the evaluation."""
    trainer, train_template = spec.trainer, spec.pods.train.template
    yield from _texts_in("trainer.args", trainer.args, train_template)
    yield from _texts_in("trainer.parameters", trainer.parameters, train_template)
    if spec.evaluation:
        evaluate_template = spec.pods.evaluate.template
        yield from _texts_in("evaluation.args", spec.evaluation.args, evaluate_template)
        yield from _texts_in("evaluation.parameters", spec.evaluation.parameters, evaluate_template)


def _texts_in(field: str, value: Any, template: Json | None) -> Iterator[_Text]:
    """The strings in a JSON value."""
    if isinstance(value, str):
        yield _Text(field, value, template)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts_in(f"{field}.{name}", part, template)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts_in(f"{field}[{index}]", part, template)
