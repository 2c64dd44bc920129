"""`spec.objective`: the loss of the training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import NONE_FOR_ZERO, ApiModel, Fraction, Name, Uri, join_names, rules

ObjectiveType = Literal["SFT", "DPO", "KTO", "ORPO", "SimPO", "Distillation", "RewardModel"]
COLUMNS_OF_OBJECTIVE = {
    "DPO": "Preference",
    "KTO": "Unpaired",
    "ORPO": "Preference",
    "SimPO": "Preference",
    "RewardModel": "Preference",
}
"""The type of columns that each preference objective requires."""
OBJECTIVES_OF_COLUMNS = {
    columns_type: [
        objective
        for objective, required_type in COLUMNS_OF_OBJECTIVE.items()
        if required_type == columns_type
    ]
    for columns_type in dict.fromkeys(COLUMNS_OF_OBJECTIVE.values())
}
"""The objectives that require each type of columns."""
PAIR_OBJECTIVES = OBJECTIVES_OF_COLUMNS["Preference"]
"""The objectives that learn from pairs of answers, and log how many of them are ranked correctly."""
_PARAMETER_FIELDS = {name: name.lower() for name in COLUMNS_OF_OBJECTIVE} | {"RewardModel": "rewardModel"}
"""The field with the parameters of each preference objective."""


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
    """Standard DPO (Sigmoid), or identity preference optimization (IPO, arXiv:2310.12036). IPO uses log-probabilities
    per token of the answer."""
    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""
    # NB: not lt=0.5: if the value is an integer, such as the default 0, the API server rounds the bound down to 0, and 0 < 0 is false.
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Assumed share of pairs whose answers are ranked the wrong way round (conservative DPO). Not used in evaluation losses."""


class Kto(ApiModel):
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306)."""

    beta: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How strongly the loss keeps the model close to the reference."""
    desirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of the losses of good answers. If the data has many more answers of one kind, raise the weight of the other
    kind."""
    undesirable_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Weight of the losses of bad answers."""


class Orpo(ApiModel):
    """Odds ratio preference optimization (Hong et al., arXiv:2403.07691)."""

    weight: Annotated[float, Field(gt=0, le=100)] = 0.1
    """Weight of the odds ratio loss. It is added to the cross-entropy of the chosen answer."""


class Simpo(ApiModel):
    """Simple preference optimization (Meng et al., arXiv:2405.14734)."""

    beta: Annotated[float, Field(gt=0, le=100)] = 2.0
    """Scale of the rewards, which are log-probabilities per token of the answer."""
    gamma: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Target margin between chosen and rejected rewards."""


class RewardModel(ApiModel):
    """A reward model on pairs of answers (Bradley-Terry)."""

    center_rewards_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of a loss that keeps the mean of the rewards near 0 (arXiv:2312.09244); 0.01 is usual. Not used in evaluation
    losses."""


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
    """The teacher, in a format of model.base. It is a Hub id, a path, a folder of an object store, or
    models:/name@alias."""
    teacher_revision: Name | None = None
    """Git revision of a teacher from the Hub."""
    teacher_trust_remote_code: bool = False
    """Allow code from the teacher's repository to run in the pods."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Temperature of teacher and model."""
    weight: Fraction = 0.5
    """Share of the teacher's loss. The rest is cross-entropy on the data."""


class Objective(ApiModel):
    """The loss of the training."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'SFT' || !has(self.lossOn) && !has(self.labelSmoothing)",
                "lossOn and labelSmoothing can be set only when type is SFT: for DPO, set dpo.labelSmoothing",
            ),
            (
                " && ".join(
                    (
                        "has(self.distillation) == (self.type == 'Distillation')",
                        *(
                            f"(!has(self.{field}) || self.type == '{name}')"
                            for name, field in _PARAMETER_FIELDS.items()
                        ),
                    )
                ),
                "set only the parameters of the type: "
                f"{join_names([f'{field} for {name}' for name, field in _PARAMETER_FIELDS.items()])}; distillation is required for "
                "Distillation",
            ),
        )
    )

    type: ObjectiveType = "SFT"
    """The loss: next token (SFT), pairs of answers with a reference model (DPO) or without one (ORPO, SimPO), answers
    labeled good or bad (KTO), a teacher (Distillation), or a reward instead of text (RewardModel)."""
    loss_on: Literal["Answer", "LastAnswer", "All"] | None = None
    """Tokens in the loss: those of all answers (Answer), of the last answer of a conversation (LastAnswer), or every
    token (All). Default: Answer if the data separates prompts from answers."""
    label_smoothing: Annotated[Annotated[float, Field(ge=0, lt=1)] | None, NONE_FOR_ZERO] = None
    """SFT: share of each target that is spread over the whole vocabulary. Not used in evaluation losses. Default: 0."""
    dpo: Dpo | None = None
    """Parameters of DPO."""
    kto: Kto | None = None
    """Parameters of KTO."""
    orpo: Orpo | None = None
    """Parameters of ORPO."""
    simpo: Simpo | None = None
    """Parameters of SimPO."""
    reward_model: RewardModel | None = None
    """Parameters of RewardModel."""
    distillation: Distillation | None = None
    """Parameters of Distillation."""
