"""Tables in Unity Catalog, and temporary credentials for their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from databricks.sdk.service.catalog import (
    DataSourceFormat,
    GenerateTemporaryTableCredentialResponse,
    TableInfo,
    TableType,
)

from standins.databricks.unity import CREATED, Refusal

if TYPE_CHECKING:
    from standins.s3 import Store

Json = dict[str, Any]
_HOUR = 3_600_000


@dataclass
class Tables:
    """Tables by their names.

    Attributes:
        by_name: as the SDK's class has them.
        store: who gives credentials for s3://.
        closed: names of those that the login may not see.
        external: schemas in which the login has EXTERNAL USE SCHEMA.
    """

    by_name: dict[str, TableInfo] = field(default_factory=dict)
    store: Store | None = None
    closed: set[str] = field(default_factory=set)
    external: set[str] = field(default_factory=set)

    def add(self, name: str, location: str, **about: Any) -> None:
        """A managed Delta table, unless `about` says something else."""
        catalog, schema, short = name.split(".")
        usual: Json = {"table_type": TableType.MANAGED, "data_source_format": DataSourceFormat.DELTA}
        self.by_name[name] = TableInfo(
            full_name=name,
            catalog_name=catalog,
            schema_name=schema,
            name=short,
            storage_location=location,
            table_id=f"id-of-{name}",
            created_at=CREATED,
            **usual | about,
        )
        self.external.add(f"{catalog}.{schema}")

    def get(self, name: str) -> Json:
        """A table.

        Raises:
            Refusal: there is none of the name, or it is closed.
        """
        if name in self.closed:
            raise Refusal(
                403,
                "PERMISSION_DENIED",
                f"User does not have USE SCHEMA on Schema '{name.rpartition('.')[0]}'.",
            )
        if name not in self.by_name:
            raise Refusal(404, "TABLE_DOES_NOT_EXIST", f"Table '{name}' does not exist.")
        return self.by_name[name].as_dict()

    def credentials(self, body: Json) -> Json:
        """Credentials that read the files of a table.

        Raises:
            Refusal: another operation is asked for, there is no such table, or the login may not have them.
        """
        if body.get("operation") != "READ":
            raise Refusal(
                400, "INVALID_PARAMETER_VALUE", f"operation {body.get('operation')} is none of READ"
            )
        table = next((item for item in self.by_name.values() if item.table_id == body.get("table_id")), None)
        if table is None:
            raise Refusal(404, "TABLE_DOES_NOT_EXIST", f"Table '{body.get('table_id')}' does not exist.")
        schema = f"{table.catalog_name}.{table.schema_name}"
        if schema not in self.external:
            raise Refusal(
                403, "PERMISSION_DENIED", f"User does not have EXTERNAL USE SCHEMA on Schema '{schema}'."
            )
        location = str(table.storage_location)
        login = self.store.grant(location) if self.store and location.startswith("s3://") else None
        return GenerateTemporaryTableCredentialResponse(
            aws_temp_credentials=login, expiration_time=CREATED + _HOUR, url=location
        ).as_dict()
