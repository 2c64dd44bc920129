"""The FineTuneJobs of a sweep: one for each trial, and a last one that delivers the model of the best trial."""

from __future__ import annotations

import copy
from typing import Any

from finetune_crds import contract
from finetune_crds.base import API_VERSION, Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.sweep import BEST_SUFFIX
from finetune_operator import names
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.sweep.values import Values
from finetune_operator.owners import build_owner_reference

# Fields of the spec that no child has, and those that only the last one has.
_PARENT_FIELDS = ("sweep", "suspend")
_DELIVERY_FIELDS = ("register", "output", "evaluation")


def trial_name(sweep: str, number: int) -> str:
    """Name of the FineTuneJob of a trial."""
    return f"{sweep}-{number}"


def best_name(sweep: str) -> str:
    """Name of the FineTuneJob that delivers the model of the best trial."""
    return f"{sweep}-{BEST_SUFFIX}"


def delivers_model(spec: FineTuneJobSpec) -> bool:
    """Whether a sweep registers or writes a model. Without either, its trials are all that it does."""
    return spec.register_ is not None or spec.output is not None


def build_trial(ftj: FineTuneJob, number: int, values: Values) -> Json:
    """Build the FineTuneJob of a trial."""
    return _build_child(ftj, trial_name(ftj.name, number), _build_spec(ftj, values))


def build_best(ftj: FineTuneJob, number: int, values: Values, *, step: int | None) -> Json:
    """Build the FineTuneJob that delivers the model of a trial: it continues from the checkpoint of the last step of that trial.

    Args:
        number: the number of the trial.
        values: the values of the trial.
        step: the last step of the trial; None if it is not known.
    """
    spec = _build_spec(ftj, values, delivers=True)
    training = spec.get("training", {})
    if step and "earlyStopping" in training:
        # NB: a job that continues another one counts evaluations without progress anew, and would train on.
        fields = {name: training[name] for name in training if name not in ("earlyStopping", "epochs")}
        spec["training"] = {**fields, "maxSteps": step}
    if "register" in spec:
        # The default would be the name of this child.
        spec["register"] = {**spec["register"], "model": spec["register"].get("model") or ftj.name}
    resume_from = {"type": "Job", "name": trial_name(ftj.name, number)}
    spec["checkpoint"] = {**spec.get("checkpoint", {}), "resumeFrom": resume_from}
    return _build_child(ftj, best_name(ftj.name), spec)


def build_followed_fields(ftj: FineTuneJob, *, delivers: bool, is_suspended: bool) -> Json:
    """Build the fields of a child's spec that follow its parent.

    Args:
        delivers: whether the child delivers the model of the best trial.
        is_suspended: whether the child is to be suspended.
    """
    spec = _build_spec(ftj, {}, delivers=delivers)
    return {**{name: spec.get(name, {}) for name in ("runPolicy", "pods")}, "suspend": is_suspended}


def list_changes(child: Json, followed: Json) -> Json:
    """The fields of a child's spec that do not follow its parent, with their new values; empty if all do.

    Args:
        followed: the result of `build_followed_fields`.
    """
    spec = child.get("spec") or {}
    return {
        name: value
        for name, value in followed.items()
        # Most fields are equal as they are, and validation takes a while for 100 trials.
        if spec.get(name) != value and _normalize(name, spec.get(name)) != _normalize(name, value)
    }


def _normalize(name: str, value: Any) -> Any:
    """A field of a spec with its defaults: two spellings of the same settings are equal."""
    spec = FineTuneJobSpec.model_validate({name: value} if value is not None else {})
    return spec.to_json()[name]


def _build_child(ftj: FineTuneJob, name: str, spec: Json) -> Json:
    run_name = spec.get("tracking", {}).get("runName")
    tracking = {**spec.get("tracking", {})}
    if run_name:
        tracking["runName"] = f"{run_name}{name.removeprefix(ftj.name)}"
    if ftj.status.run_id:
        tracking["tags"] = {**tracking.get("tags", {}), contract.TAG_PARENT_RUN: ftj.status.run_id}
    if tracking:
        spec["tracking"] = tracking
    return {
        "apiVersion": API_VERSION,
        "kind": "FineTuneJob",
        "metadata": {
            "name": name,
            "namespace": ftj.namespace,
            "labels": {names.LABEL_MANAGED_BY: names.FIELD_MANAGER, names.LABEL_SWEEP: ftj.name},
            "ownerReferences": [build_owner_reference("FineTuneJob", ftj.name, ftj.uid)],
        },
        "spec": spec,
    }


def _build_spec(ftj: FineTuneJob, values: Values, *, delivers: bool = False) -> Json:
    """The spec of a child: that of its parent with other values. Trials deliver and evaluate no model.

    The deadline is the parent's alone. Versions that the parent has pinned replace aliases, so that all trials start from the same model.
    """
    excluded = _PARENT_FIELDS if delivers else (*_PARENT_FIELDS, *_DELIVERY_FIELDS)
    spec = {name: value for name, value in _read_spec(ftj).items() if name not in excluded}
    if "pods" in spec and not delivers:
        # The API server refuses it without an evaluation.
        spec["pods"] = {name: value for name, value in spec["pods"].items() if name != "evaluate"}
    if "runPolicy" in spec:
        policy = spec["runPolicy"]
        spec["runPolicy"] = {name: policy[name] for name in policy if name != "activeDeadlineSeconds"}
    for field, value in values.items():
        _set(spec, field, value)
    pins = ftj.status.pinned
    if pins and pins.base:
        _set(spec, "model.base", pins.base)
    if pins and pins.teacher:
        _set(spec, "objective.distillation.teacher", pins.teacher)
    return spec


def _read_spec(ftj: FineTuneJob) -> Json:
    """The spec as the API server stores it, without the defaults of the chart."""
    if ftj.written is None:
        raise ValueError(f"the spec of {ftj.key} was not accepted")
    written = ftj.written.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return copy.deepcopy(written)


def _set(spec: Json, field: str, value: Any) -> None:
    """Set a field by its path. Missing parts are added."""
    *parents, last = field.split(".")
    part = spec
    for name in parents:
        part = part.setdefault(name, {})
    part[last] = value
