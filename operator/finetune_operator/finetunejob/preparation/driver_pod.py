"""What is wrong with the pods of a preparation: judged when its job is accepted, and again when they are about to be created."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.draft import mistakes as templates
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.preparation import executors, spark_manifest


def mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    """What is wrong with spec.pods, which can be corrected."""
    yield from templates.of_preparation(spec)
    yield from executors.find_unshared_folders(spec)
    yield from executors.find_oversized_template(spec)
    yield from spark_manifest.mistakes(spec)


def wait_for_a_correction(draft: Draft) -> bool:
    """Have the preparation wait where its pods would be wrong; whether it does.

    NB: the template may have changed since the job was accepted.
    """
    wrong = "; ".join(mistakes(draft.spec))
    if wrong:
        reason = ConditionReason.POD_TEMPLATE_INVALID
        draft.set(ConditionType.PODS_HEALTHY, False, reason, wrong)
        message = "the preparation waits for a correction of spec.pods"
        draft.set(ConditionType.PREPARED, False, reason, message)
    return bool(wrong)
