"""Which preparations are the same: those that make the same rows of the same sources."""

from __future__ import annotations

import hashlib
import json
import re

from finetune_crds.base import Json
from finetune_crds.data import Data
from finetune_crds.objective import COLUMNS_OF_OBJECTIVE, OBJECTIVES_OF_COLUMNS, Objective
from finetune_crds.spark import Spark
from finetune_crds.training import Model

_DIGEST_LENGTH = 12
# For which objective columns are found, where it is not SFT: the first of those with the same columns.
_DETECTION_OBJECTIVES = {
    name: OBJECTIVES_OF_COLUMNS[columns][0] for name, columns in COLUMNS_OF_OBJECTIVE.items()
}
# What a preparation writes to, what it runs on, and what it only reports. A field that is not here counts.
_FIELDS_WITHOUT_ROWS = {"output", "reuse", "report_samples", "spark"}
# What a source is pinned at. The rows have the digest of what was read; this one is of all versions of a source.
_VERSION_FIELDS = {"version", "version_time", "revision"}
# The name of a Secret with the token of a server. That of a workspace counts: it says which workspace it is.
_LOGIN_FIELDS = {"secret_ref"}
# Settings of Spark that change how files are read and what a filter says of a row.
_ROW_SETTING = re.compile(
    r"spark[.]sql[.]((files|json|csv|parquet|orc)[.].+|caseSensitive|session[.]timeZone)"
)


def digest_of(*parts: object) -> str:
    """The beginning of the SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def settings_digest(data: Data, model: Model, objective: Objective) -> str:
    """A digest of what decides the rows of a preparation, but for the versions of what it reads.

    These are the sources, the columns, the steps and the tokenizer, as the spec names them. Defaults are left out, so that a
    field which a later version adds does not change the digest.
    """
    excluded_by_source = {"__all__": _VERSION_FIELDS}
    settings: Json = data.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        include={"source", "columns", "prepare"},
        exclude={
            "source": dict.fromkeys(_VERSION_FIELDS, True) | {"sources": excluded_by_source},
            "prepare": dict.fromkeys(_FIELDS_WITHOUT_ROWS, True)
            | {"decontaminate": {"sources": excluded_by_source}, "catalog": {"unity_catalog": _LOGIN_FIELDS}},
        },
    )
    tokenizer = model.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"cache", "adapter"}
    )
    spark = data.prepare.spark if data.prepare else Spark()
    # NB: a name of a table, or a folder of a volume, is another one in another workspace.
    login = spark.databricks.secret_ref if spark.databricks else None
    workspace = [spark.mode == "Databricks", login.name if login else None]
    return digest_of(
        settings,
        tokenizer,
        workspace,
        {name: value for name, value in spark.conf.items() if _ROW_SETTING.fullmatch(name)},
        "" if data.columns else _DETECTION_OBJECTIVES.get(objective.type, ""),
    )
