"""The resources of the API, in the order in which documentation and manifests list them."""

from __future__ import annotations

from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.finetuneschedule import FineTuneSchedule
from finetune_crds.modelpromotion import ModelPromotion

Resource = type[FineTuneJob | ModelPromotion | FineTuneSchedule]
RESOURCES: tuple[Resource, ...] = (FineTuneJob, ModelPromotion, FineTuneSchedule)
