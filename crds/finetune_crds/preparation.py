"""The digest of a preparation's settings: equal for preparations that make the same rows from the same sources."""

from __future__ import annotations

import hashlib
import json
import re

from finetune_crds import tables
from finetune_crds.base import Json
from finetune_crds.data import Data
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, OBJECTIVES_OF_COLUMNS, Objective
from finetune_crds.spark import Spark
from finetune_crds.training import Model

_DIGEST_LENGTH = 12
# By preference objective: the first objective that requires the same columns, for example DPO for ORPO. If the spec names no columns,
# they are detected in the same way for all objectives that require the same columns, so these objectives share one name in the digest.
_DETECTION_OBJECTIVES = {
    name: OBJECTIVES_OF_COLUMNS[columns][0] for name, columns in COLUMNS_OF_OBJECTIVE.items()
}
# Fields of Prepare that do not change the rows: the outputs, the compute, and the report. All other fields are in the digest.
_IGNORED_FIELDS = {"output", "split_tables", "reuse", "report_samples", "spark"}
# Fields that select the version of a source. The digest leaves them out; `status.data.digest` covers the versions that were read.
_VERSION_FIELDS = {"version", "version_time", "revision"}
# A version of a registered model by its alias or number. The digest has the model alone: what changes the rows is the content of the
# tokenizer, which `status.data.digest` covers.
_MODEL_VERSION = re.compile(r"(models:/[^/@]+)(@[^/]+|/[0-9]+(?=/|$))")
# The Secret with the token of a Unity Catalog server is not in the digest. The Secret of a workspace is: it selects the
# workspace.
_LOGIN_FIELDS = {"secret_ref"}
# Spark settings that change how files are read, or which rows a filter keeps.
_ROW_SETTING = re.compile(
    r"spark[.]sql[.]((files|json|csv|parquet|orc)[.].+|caseSensitive|session[.]timeZone)"
)


def digest_of(*parts: object) -> str:
    """Return a short SHA-256 of values that JSON can represent."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def settings_digest(data: Data, model: Model, objective: Objective) -> str:
    """Return a digest of the settings that decide the rows of a preparation, without the versions of its sources and of its registered model.

    The settings are the sources, the columns, the steps and the tokenizer in the spec. Defaults are left out, so that a field
    which a later version adds does not change the digest.
    """
    # pydantic's notation for every item of a list.
    excluded_by_source = {"__all__": _VERSION_FIELDS}
    excluded_by_prepare: Json = {
        "decontaminate": {"sources": excluded_by_source},
        "catalog": {"unity_catalog": _LOGIN_FIELDS},
    }
    excluded_by_prepare |= dict.fromkeys(_IGNORED_FIELDS, True)
    if not any(tables.list_sources(data)):
        # Without tables to read, the catalog decides only where splits are saved.
        excluded_by_prepare["catalog"] = True
    settings: Json = data.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={"source", "columns", "prepare"},
        exclude={
            "source": dict.fromkeys(_VERSION_FIELDS, True)
            | {"sources": excluded_by_source, "feedback": _VERSION_FIELDS},
            "prepare": excluded_by_prepare,
        },
    )
    # All settings of the model that can change its tokenizer.
    unversioned_model = model.model_copy(update={"base": _MODEL_VERSION.sub(r"\1", model.base, count=1)})
    tokenizer = unversioned_model.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"cache", "adapter"}
    )
    spark = data.prepare.spark if data.prepare else Spark()
    # NB: in another workspace, the same table name or volume folder is other data.
    login = spark.databricks.secret_ref if spark.databricks else None
    workspace = [spark.mode == "Databricks", login.name if login else None]
    row_settings = {name: value for name, value in spark.conf.items() if _ROW_SETTING.fullmatch(name)}
    detection_objective = "" if data.columns else _DETECTION_OBJECTIVES.get(objective.type, "")
    return digest_of(settings, tokenizer, workspace, row_settings, detection_objective)
