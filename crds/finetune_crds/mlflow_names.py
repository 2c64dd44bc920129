"""Names of models, aliases and tags that MLflow accepts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finetune_crds.base import Rule, StringMap, rules

Alias = Annotated[
    str,
    Field(
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9_-]+$",
        json_schema_extra=rules(
            (
                "!self.matches('(?i)^(latest|v[0-9]+)$')",
                "MLflow reserves the aliases latest and v<number>: choose another alias",
            ),
        ),
    ),
]
THREE_LEVELS = "^[^.]{1,255}[.][^.]{1,255}[.][^.]{1,255}$"
"""Pattern of a model's name in Unity Catalog: catalog.schema.name."""
ModelName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=768,
        json_schema_extra=rules(
            Rule(
                "!self.matches('[/:]|^[.][.]|^[.]$|^ *$')",
                "MLflow does not allow slashes, colons or leading dots in the name of a model: remove them",
                at_creation=True,
            ),
            Rule(
                f"size(self) <= 256 || self.matches('{THREE_LEVELS}')",
                "MLflow allows at most 256 characters in the name of a model, and Unity Catalog 255 in each of the three parts: "
                "shorten the name",
                at_creation=True,
            ),
        ),
    ),
]
"""Name of a registered model. Sources: MLflow, utils/validation.py, `_validate_model_name`, and store/model_registry/dbmodels,
`SqlRegisteredModel.name`; https://docs.databricks.com/aws/en/sql/language-manual/sql-ref-names."""
Tags = Annotated[
    StringMap,
    Field(
        json_schema_extra=rules(
            Rule(
                "self.all(key, size(key) <= 250 && key.matches('^[\\\\pL\\\\pN_/. :-]+$') && !key.matches('^[.][.]|(^|/)[.]{0,2}(/|$)'))",
                "MLflow allows up to 250 letters, digits, spaces and _ / . : - in the key of a tag, and no relative "
                "path: rename the tag",
                at_creation=True,
            )
        )
    ),
]
"""Tags in MLflow. Source: MLflow, utils/validation.py, `_validate_tag_name`."""
NOT_IN_UNITY_TAGS = "[.,=/:-]|^ | $"
"""Pattern of what Unity Catalog forbids in the key of a tag, for CEL and for Python.

Source: https://docs.databricks.com/aws/en/database-objects/tags, Constraints.
"""
UNITY_TAGS_MESSAGE = (
    "Unity Catalog does not allow . , - = / : in the key of a tag, or a space at its start or end"
)
