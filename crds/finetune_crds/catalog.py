"""`spec.data.prepare.catalog`: the catalog in which Spark in this cluster looks up tables by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, Name, Rule, Uri, list_splits, rules, value_or_empty
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
    """Secret with the login of a Databricks workspace, see tracking.secretRef. Default: the Databricks login of the
    pods, or else a token of their ServiceAccount for databricks.host of the chart."""


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
                "has(self.unityCatalog) == (self.type == 'UnityCatalog') && has(self.hive) == (self.type == 'Hive') && "
                "(!has(self.databricks) || self.type == 'Databricks')",
                "type UnityCatalog requires unityCatalog, type Hive requires hive, and type Databricks allows databricks: set no other "
                "of these fields",
            ),
        )
    )

    type: CatalogType
    """A server of the open-source Unity Catalog (UnityCatalog), the Unity Catalog of a Databricks workspace
    (Databricks), or a Hive metastore (Hive). The Unity Catalogs issue credentials for the files of a table in s3://.
    With Hive, the pods read the files with their own credentials."""
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


# CEL on Data with a preparation and a source: the tables of its sources, its feedback and its evaluation sets. A source without a
# table has an empty text.
_TABLES = (
    f"([{value_or_empty('self.source.table')}, has(self.source.feedback) && {value_or_empty('self.source.feedback.table')}] + "
    f"(has(self.source.sources) ? self.source.sources.map(part, {value_or_empty('part.table')}) : []) + "
    f"(has(self.prepare.decontaminate) ? self.prepare.decontaminate.sources.map(part, {value_or_empty('part.table')}) : []))"
)
# CEL: a rule that begins with this holds for data without a catalog or without a source.
_NO_CATALOG_OR = "!has(self.prepare) || !has(self.prepare.catalog) || !has(self.source) || "
DATA_RULES = (
    Rule(
        f"{_NO_CATALOG_OR}has(self.prepare.splitTables) || {_TABLES}.exists(table, table != '')",
        "prepare.catalog applies only to sources with table, and to splitTables: set table in a source, or remove prepare.catalog",
        ".prepare.catalog",
    ),
    Rule(
        f"{_NO_CATALOG_OR}{_TABLES}.all(table, table == '' || (self.prepare.catalog.type == 'Hive' ? table.{_HAS_TWO_LEVELS} "
        f": table.{_HAS_THREE_LEVELS}))",
        "table must be catalog.schema.table, or database.table when prepare.catalog.type is Hive",
        ".source",
    ),
)
"""Rules of Data."""


# CEL on Prepare with splitTables: the names of the tables; an empty text for a split without a table.
_SPLIT_TABLES = list_splits("self.splitTables")


PREPARE_RULES = (
    Rule(
        "!has(self.catalog) || self.spark.mode != 'Databricks'",
        "catalog must not be set when spark.mode is Databricks",
        ".catalog",
    ),
    Rule(
        f"!has(self.splitTables) || {_SPLIT_TABLES}.all(table, table == '' || (self.spark.mode == 'Databricks' "
        f"? table.{_HAS_THREE_LEVELS} : !has(self.catalog) || self.catalog.type == 'Hive' && table.{_HAS_TWO_LEVELS}))",
        "splitTables requires spark.mode Databricks and names like catalog.schema.table, or catalog.type Hive and names like database.table",
        ".splitTables",
    ),
)
"""Rules of Prepare."""
