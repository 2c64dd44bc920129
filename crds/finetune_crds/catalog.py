"""`spec.data.prepare.catalog`: the catalog in which Spark in this cluster looks up tables by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, Name, Rule, Uri, rules
from finetune_crds.env import LocalReference

CatalogType = Literal["UnityCatalog", "Databricks", "Hive"]
TOKEN_KEY = "UNITY_CATALOG_TOKEN"  # noqa: S105 - the key of a Secret, not its value
"""The key of the token in the Secret of a Unity Catalog server. The prep pod gets the token in a variable of the same name."""
DATABRICKS_PREFIX = "FINETUNE_CATALOG_"
"""Prefix of the prep pod's variables with the login of the catalog's workspace. The same variables without the prefix can
contain the login of another workspace, to which the pod reports the MLflow run."""

HTTP_SERVER = "https?://[^/@ ]+(/[^@ ]*)?"
METASTORES = "thrift://[^/@, ]+:[0-9]+(,thrift://[^/@, ]+:[0-9]+)*"
# CEL method calls on the name of a table.
_HAS_TWO_LEVELS = "matches('^[^. ]+[.][^. ]+$')"
_HAS_THREE_LEVELS = "matches('^[^. ]+[.][^. ]+[.][^. ]+$')"

TableName = Annotated[Name, Field(pattern=r"^[^.@` ]+([.][^.@` ]+){1,2}$")]
"""The name of a table that a preparation saves: catalog.schema.table, or database.table in a Hive metastore."""


def _address(pattern: str, sentence: str) -> Any:
    """Return a field for an address: a rule with the message `sentence` requires that its whole text matches the pattern."""
    return Field(json_schema_extra=rules((f"self.matches('^{pattern}$')", sentence)))


class UnityCatalogServer(ApiModel):
    """A server of the open-source Unity Catalog."""

    uri: Annotated[
        Uri,
        _address(
            HTTP_SERVER,
            "uri must be an http or https address without credentials: put a token into the Secret of secretRef",
        ),
    ]
    """Address of the server, such as http://unity.data.svc:8080."""
    secret_ref: LocalReference | None = None
    """Secret with the key UNITY_CATALOG_TOKEN. Default: no token."""


class DatabricksCatalog(ApiModel):
    """The Unity Catalog of a Databricks workspace."""

    secret_ref: LocalReference | None = None
    """Secret with DATABRICKS_HOST, and DATABRICKS_TOKEN or both DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. Default:
    the pods' Databricks login if MLflow is at Databricks; otherwise a token of their ServiceAccount for databricks.host of
    the chart."""


class HiveMetastore(ApiModel):
    """A Hive metastore."""

    uri: Annotated[
        Uri,
        _address(
            METASTORES,
            "uri must be thrift://host:port; separate several replicas with commas",
        ),
    ]
    """Address of the metastore, such as thrift://metastore.data.svc:9083."""


class Catalog(ApiModel):
    """The catalog in which tables are looked up by name."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'UnityCatalog' ? has(self.unityCatalog) : !has(self.unityCatalog)",
                "unityCatalog is required when type is UnityCatalog, and forbidden otherwise",
                ".unityCatalog",
            ),
            (
                "self.type == 'Databricks' || !has(self.databricks)",
                "databricks can be set only when type is Databricks",
                ".databricks",
            ),
            (
                "self.type == 'Hive' ? has(self.hive) : !has(self.hive)",
                "hive is required when type is Hive, and forbidden otherwise",
                ".hive",
            ),
        )
    )

    type: CatalogType
    """UnityCatalog: a server of the open-source Unity Catalog. Databricks: the Unity Catalog of a workspace. Both issue
    credentials for the files of a table in s3://. Hive: a Hive metastore; the pods read the files with their own
    credentials."""
    unity_catalog: UnityCatalogServer | None = None
    """The Unity Catalog server."""
    databricks: DatabricksCatalog | None = None
    """The Databricks workspace."""
    hive: HiveMetastore | None = None
    """The Hive metastore."""

    @property
    def is_unity(self) -> bool:
        """Whether the catalog is a Unity Catalog, which issues credentials for each table."""
        return self.type != "Hive"


def _fits_levels(source: str) -> str:
    """Return the CEL condition that a source has no table, or a table whose name has as many levels as the catalog requires."""
    return (
        f"(!has({source}.table) || (self.prepare.catalog.type == 'Hive' ? {source}.table.{_HAS_TWO_LEVELS} "
        f": {source}.table.{_HAS_THREE_LEVELS}))"
    )


# CEL: a rule that begins with this holds for data without a catalog or without a source.
_NO_CATALOG_OR = "!has(self.prepare) || !has(self.prepare.catalog) || !has(self.source) || "
DATA_RULES = (
    Rule(
        f"{_NO_CATALOG_OR}has(self.source.table) || (has(self.source.sources) && self.source.sources.exists(part, has(part.table))) "
        "|| (has(self.source.feedback) && has(self.source.feedback.table)) || has(self.prepare.splitTables) || (has(self.prepare.decontaminate) && self.prepare.decontaminate.sources.exists(part, has(part.table)))",
        "prepare.catalog applies only to sources with table, and to splitTables: set table in a source, or remove prepare.catalog",
        ".prepare.catalog",
    ),
    Rule(
        f"{_NO_CATALOG_OR}({_fits_levels('self.source')} && (!has(self.source.sources) || self.source.sources.all(part, {_fits_levels('part')})) "
        f"&& (!has(self.source.feedback) || {_fits_levels('self.source.feedback')}) && (!has(self.prepare.decontaminate) || self.prepare.decontaminate.sources.all(part, {_fits_levels('part')})))",
        "table must be catalog.schema.table, or database.table when prepare.catalog.type is Hive",
        ".source",
    ),
)
"""Rules of Data."""


def _have_levels(has_levels: str) -> str:
    """CEL on Prepare: whether the names of all tables of splits have a number of levels."""
    optional_splits = (f"self.splitTables.{split}" for split in ("validation", "test"))
    conditions = (f"(!has({field}) || {field}.{has_levels})" for field in optional_splits)
    return " && ".join((f"self.splitTables.train.{has_levels}", *conditions))


PREPARE_RULES = (
    Rule(
        "!has(self.catalog) || self.spark.mode != 'Databricks'",
        "catalog must not be set when spark.mode is Databricks",
        ".catalog",
    ),
    Rule(
        f"!has(self.splitTables) || (self.spark.mode == 'Databricks' ? {_have_levels(_HAS_THREE_LEVELS)} : !has(self.catalog) || "
        f"(self.catalog.type == 'Hive' && {_have_levels(_HAS_TWO_LEVELS)}))",
        "splitTables requires spark.mode Databricks and names like catalog.schema.table, or catalog.type Hive and names like database.table",
        ".splitTables",
    ),
)
"""Rules of Prepare."""
