"""`spec.data.prepare.catalog`: where Spark in this cluster finds tables by their names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, Rule, Uri, rules
from finetune_crds.env import LocalReference

CatalogType = Literal["UnityCatalog", "Databricks", "Hive"]
TOKEN_KEY = "UNITY_CATALOG_TOKEN"  # noqa: S105 - the key of a Secret, not its value
"""Key of the Secret of a server of Unity Catalog, and variable of the prep pod."""
DATABRICKS_PREFIX = "FINETUNE_CATALOG_"
"""Prefix of the keys of a workspace's Secret as variables of the prep pod, which may log in to another workspace for its MLflow run."""

HTTP_SERVER = "https?://[^/@ ]+(/[^@ ]*)?"
METASTORES = "thrift://[^/@, ]+:[0-9]+(,thrift://[^/@, ]+:[0-9]+)*"
_HAS_TWO_NAMES = "matches('^[^. ]+[.][^. ]+$')"
_HAS_THREE_NAMES = "matches('^[^. ]+[.][^. ]+[.][^. ]+$')"


def _address(pattern: str, sentence: str) -> Any:
    """The field of an address that matches a pattern as a whole."""
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
    """Secret with UNITY_CATALOG_TOKEN. Default: no token, for a server that asks for none."""


class DatabricksCatalog(ApiModel):
    """Unity Catalog of a Databricks workspace."""

    secret_ref: LocalReference | None = None
    """Secret with DATABRICKS_HOST and DATABRICKS_TOKEN, or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. Default: the login of
    the pods if the run is tracked at Databricks, else a token of their ServiceAccount for the workspace that the operator is
    installed with."""


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
    """Where tables are found by their names."""

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
    """UnityCatalog: a server of the open-source Unity Catalog. Databricks: Unity Catalog of a workspace. Both give credentials for
    the files of each table, in s3://. Hive: a Hive metastore; the files are read with the credentials of the pods."""
    unity_catalog: UnityCatalogServer | None = None
    """The server of Unity Catalog."""
    databricks: DatabricksCatalog | None = None
    """The workspace."""
    hive: HiveMetastore | None = None
    """The Hive metastore."""

    @property
    def is_unity(self) -> bool:
        """Whether it is Unity Catalog, which gives credentials for each table."""
        return self.type != "Hive"


def _fits_levels(part: str) -> str:
    """CEL: the table of a source has as many names as the catalog has levels."""
    return (
        f"(!has({part}.table) || (self.prepare.catalog.type == 'Hive' ? {part}.table.{_HAS_TWO_NAMES} "
        f": {part}.table.{_HAS_THREE_NAMES}))"
    )


_NO_CATALOG_OR = "!has(self.prepare) || !has(self.prepare.catalog) || !has(self.source) || "
DATA_RULES = (
    Rule(
        f"{_NO_CATALOG_OR}has(self.source.table) || (has(self.source.sources) && self.source.sources.exists(part, has(part.table))) "
        "|| (has(self.prepare.decontaminate) && self.prepare.decontaminate.sources.exists(part, has(part.table)))",
        "prepare.catalog applies only to sources with table: set table in a source, or remove prepare.catalog",
        ".prepare.catalog",
    ),
    Rule(
        f"{_NO_CATALOG_OR}({_fits_levels('self.source')} && (!has(self.source.sources) || self.source.sources.all(part, {_fits_levels('part')})) "
        f"&& (!has(self.prepare.decontaminate) || self.prepare.decontaminate.sources.all(part, {_fits_levels('part')})))",
        "table must be catalog.schema.table, or database.table when prepare.catalog.type is Hive",
        ".source",
    ),
)
"""Rules of Data."""

PREPARE_RULES = (
    Rule(
        "!has(self.catalog) || self.spark.mode != 'Databricks'",
        "catalog must not be set when spark.mode is Databricks",
        ".catalog",
    ),
)
"""Rules of Prepare."""
