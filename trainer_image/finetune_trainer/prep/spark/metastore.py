"""Finds tables by name in the session's own catalog: a Hive metastore, or the catalog of a Databricks run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions.template import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def hive_settings(uri: str) -> dict[str, str]:
    """Return Spark's settings for a Hive metastore; `uri` may name several replicas."""
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.hive.metastore.uris": uri,
        # Other tools write locations with this scheme.
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
    }


def read_parquet(spark: SparkSession, table: str, field: str) -> DataFrame:
    """Return the rows of a Parquet table.

    Args:
        field: the recipe's field that names the table, for messages.

    Raises:
        DataError: the table does not exist, or has another format.
    """
    require(spark, table, field)
    name = ".".join(quoted(part) for part in table.split("."))
    properties = {
        row["col_name"]: row["data_type"] for row in spark.sql(f"DESCRIBE TABLE EXTENDED {name}").collect()
    }
    provider, serde = properties.get("Provider", ""), properties.get("Serde Library", "")
    # For a table that Hive created, only the serde shows the format. A view has no provider.
    is_parquet = provider.lower() == "parquet" or (provider.lower() == "hive" and "Parquet" in serde)
    if not is_parquet:
        kind = f"in the format {provider}" if provider else "a view"
        raise DataError(
            "UnreadableSource",
            f"{field} {table} is {kind}, and its source has the type Parquet: correct "
            "the type, or name a Parquet table",
        )
    return spark.table(name)


def require(spark: SparkSession, table: str, field: str) -> None:
    """Check that the session's catalog has a table.

    Raises:
        DataError: the table does not exist.
    """
    if not spark.catalog.tableExists(table):
        raise DataError(
            "MissingSource", f"{field} {table} is not in the catalog of this preparation: correct the name"
        )
