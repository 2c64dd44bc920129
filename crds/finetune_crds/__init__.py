"""The finetune.dev API: the resources FineTuneJob, ModelPromotion and FineTuneSchedule, and the recipe that the pods of a job read."""

from finetune_crds.base import API_VERSION, GROUP, VERSION
from finetune_crds.finetunejob import FineTuneJob, FineTuneJobSpec
from finetune_crds.finetuneschedule import FineTuneSchedule, FineTuneScheduleSpec
from finetune_crds.modelpromotion import ModelPromotion, ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.recipe import JobRecipe, JobReference, Recipe, RecipeError
from finetune_crds.schedule_status import FineTuneScheduleStatus
from finetune_crds.status import FineTuneJobStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "FineTuneJob",
    "FineTuneJobSpec",
    "FineTuneJobStatus",
    "FineTuneSchedule",
    "FineTuneScheduleSpec",
    "FineTuneScheduleStatus",
    "JobRecipe",
    "JobReference",
    "ModelPromotion",
    "ModelPromotionSpec",
    "ModelPromotionStatus",
    "Recipe",
    "RecipeError",
]
