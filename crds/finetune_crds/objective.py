"""`spec.objective`: what the loss is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import NONE_FOR_ZERO, ApiModel, Fraction, Name, Uri, rules

ObjectiveType = Literal["SFT", "DPO", "KTO", "ORPO", "SimPO", "Distillation"]
COLUMNS_OF_OBJECTIVE = {"DPO": "Preference", "KTO": "Unpaired", "ORPO": "Preference", "SimPO": "Preference"}
"""Objectives that compare two documents of an example, and the type of columns that each needs."""
OBJECTIVES_OF_COLUMNS = {
    columns_type: [
        objective
        for objective, required_type in COLUMNS_OF_OBJECTIVE.items()
        if required_type == columns_type
    ]
    for columns_type in dict.fromkeys(COLUMNS_OF_OBJECTIVE.values())
}
"""The same by the type of columns."""


class Dpo(ApiModel):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290)."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.loss == 'Sigmoid' || self.labelSmoothing == 0.0",
                "labelSmoothing must be 0 unless loss is Sigmoid",
                ".labelSmoothing",
            ),
        )
    )

    loss: Literal["Sigmoid", "IPO"] = "Sigmoid"
    """IPO: identity preference optimization (Azar et al., arXiv:2310.12036), of log-probabilities per token of the answer."""
    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""
    # NB: not lt=0.5, which the API server rounds down to 0 where the value is the whole number 0, such as the default.
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Share of the pairs that people ranked the wrong way round (conservative DPO). Evaluation losses are without it."""


class Kto(ApiModel):
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""
    desirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of the losses of good answers. Where the data has many more of one kind, raise the weight of the other."""
    undesirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of the losses of bad answers."""


class Orpo(ApiModel):
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691)."""

    weight: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Weight of the odds ratio of both answers, beside the cross-entropy of the chosen one."""


class Simpo(ApiModel):
    """Simple preference optimization (Meng et al., arXiv:2405.14734)."""

    beta: Annotated[float, Field(gt=0, le=100)] = 2.0
    """Scale of the rewards, which are log-probabilities per token of the answer."""
    gamma: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Margin that the reward of the chosen answer has to have."""


class Distillation(ApiModel):
    """Training on the probabilities of a teacher model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.teacherRevision) || (!self.teacher.startsWith('/') && !self.teacher.contains(':'))",
                "teacherRevision can be set only when teacher is a Hub id",
                ".teacherRevision",
            ),
        )
    )

    teacher: Uri
    """The teacher, named like model.base: Hub id, path, folder of an object store, or models:/name@alias."""
    teacher_revision: Name | None = None
    """Git revision of a teacher from the Hub."""
    teacher_trust_remote_code: bool = False
    """Allow code from the teacher's repository to run in the pods."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Temperature of both distributions."""
    weight: Fraction = 0.5
    """Share of the teacher in the loss. The rest is cross-entropy on the data."""


class Objective(ApiModel):
    """What the loss is."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.lossOn) || self.type == 'SFT'", "lossOn can be set only when type is SFT", ".lossOn"),
            (
                "!has(self.labelSmoothing) || self.type == 'SFT'",
                "labelSmoothing can be set only when type is SFT: for DPO, set dpo.labelSmoothing",
                ".labelSmoothing",
            ),
            *(
                (
                    f"!has(self.{name.lower()}) || self.type == '{name}'",
                    f"{name.lower()} can be set only when type is {name}",
                    f".{name.lower()}",
                )
                for name in COLUMNS_OF_OBJECTIVE
            ),
            (
                "has(self.distillation) == (self.type == 'Distillation')",
                "distillation is required when type is Distillation, and forbidden otherwise",
            ),
        )
    )

    type: ObjectiveType = "SFT"
    """SFT: next-token loss. DPO: preferences. ORPO, SimPO: the same without a reference. KTO: answers that are good or bad.
    Distillation: a teacher."""
    loss_on: Literal["Answer", "LastAnswer", "All"] | None = None
    """Compute the loss on the answers only, on the last answer of a conversation, or on every token. Default: Answer where prompt
    and answer are known."""
    label_smoothing: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, NONE_FOR_ZERO] = None
    """SFT: share of each target that is spread over the whole vocabulary. Evaluation losses are without it. Default: 0."""
    dpo: Dpo | None = None
    """Parameters of DPO."""
    kto: Kto | None = None
    """Parameters of KTO."""
    orpo: Orpo | None = None
    """Parameters of ORPO."""
    simpo: Simpo | None = None
    """Parameters of SimPO."""
    distillation: Distillation | None = None
    """Parameters of Distillation."""
