"""Delta tables of a workspace's Unity Catalog by their names: where their files are, and temporary credentials that read them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import requests
from databricks.sdk import WorkspaceClient
from databricks.sdk.config import Config
from databricks.sdk.errors import (
    BadRequest,
    InvalidParameterValue,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from databricks.sdk.errors.base import DatabricksError
from databricks.sdk.service.catalog import DataSourceFormat, TableInfo, TableOperation, TableType

from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Mapping

# Types of tables that have files; None: the server reports no type.
_TABLE_TYPES = (None, TableType.MANAGED, TableType.EXTERNAL)
# Features of Delta tables whose newest version only the catalog has.
_CATALOG_MANAGED_FEATURES = ("delta.feature.catalogManaged", "delta.feature.catalogOwned-preview")
# Parts of the SDK's ValueErrors about a login that is missing, contradictory or refused. It raises ValueError for every other response of
# a token endpoint too, such as 503.
_REFUSALS = (
    "invalid_client",
    "access_denied",
    "unauthorized_client",
    "not configured",
    "cannot configure",
    "more than one authorization method",
)
_MAX_MESSAGE_CHARS = 300
_HTTP_TIMEOUT_SECONDS = 20.0
_RETRY_TIMEOUT_SECONDS = 60

# NB: the SDK warns about each server that is not a workspace, and logs the bodies of requests at level DEBUG.
logging.getLogger("databricks.sdk").setLevel(logging.ERROR)
# NB: the SDK collects the attributes once, on the first class used. That class must be Config, not the subclass `Login`.
Config.attributes()


class Login(Config):
    """The SDK's configuration, without its values in error messages."""

    def __init__(self, product: str, **login: Any) -> None:
        super().__init__(
            product=product,
            http_timeout_seconds=_HTTP_TIMEOUT_SECONDS,
            retry_timeout_seconds=_RETRY_TIMEOUT_SECONDS,
            **login,
        )

    def wrap_debug_info(self, message: str) -> str:
        """Return the message alone."""
        return message


class TableFiles(NamedTuple):
    """The files of a table.

    options: the options with which deltalake reads them, with credentials that expire after about an hour.
    """

    uri: str
    options: Mapping[str, str]


def locate(table: str, field: str) -> TableFiles:
    """Return the files of a Delta table. The login comes from the environment, in the variables of the databricks-sdk.

    Args:
        table: catalog.schema.table.
        field: the recipe's field that names the table, for messages.

    Raises:
        DataError: the table does not exist, is not a Delta table with files in S3, or is not readable with the login.
        TrainingError: the workspace does not answer.
    """
    label = f"{field} {table}"
    try:
        client = WorkspaceClient(config=Login("finetune-trainer"))
        info = client.tables.get(table)
        _check(info, label)
        response = client.temporary_table_credentials.generate_temporary_table_credentials(
            operation=TableOperation.READ, table_id=info.table_id or ""
        )
    except (NotFound, PermissionDenied, BadRequest, InvalidParameterValue) as error:
        raise DataError(
            "MissingTable",
            f"{label} is not in Unity Catalog, or its files are not readable with the login of tracking: correct the name, or grant USE "
            f"CATALOG, USE SCHEMA, SELECT and EXTERNAL USE SCHEMA ({_shorten(error)})",
        ) from error
    except (DatabricksError, requests.RequestException, TimeoutError, ValueError) as error:
        if isinstance(error, Unauthenticated) or is_refusal(error):
            raise DataError(
                "CatalogForbidden", f"the login of tracking cannot read {label}: {_shorten(error)}"
            ) from error
        raise TrainingError(
            "CatalogUnreachable",
            f"Unity Catalog does not respond to the request for {label}: {_shorten(error)}",
        ) from error
    uri, login = info.storage_location or "", response.aws_temp_credentials
    if not uri.startswith("s3://") or login is None:
        raise DataError(
            "UnsupportedTable",
            f"the files of {label} are at {uri}, but training reads tables of Unity Catalog only from s3://: use type Delta with a path",
        )
    credentials = {
        "AWS_ACCESS_KEY_ID": login.access_key_id,
        "AWS_SECRET_ACCESS_KEY": login.secret_access_key,
        "AWS_SESSION_TOKEN": login.session_token,
    }
    options = {name: value for name, value in credentials.items() if value}
    return TableFiles(uri, filesystems.build_delta_options(uri) | options)


def is_refusal(error: Exception) -> bool:
    """Whether an error of the SDK is about a login that is missing or refused, and not about a server that fails."""
    # NB: errors of `requests` may be ValueErrors.
    is_about_login = isinstance(error, ValueError) and not isinstance(error, requests.RequestException)
    return is_about_login and any(part in str(error).lower() for part in _REFUSALS)


def _check(info: TableInfo, label: str) -> None:
    """Check that the files of a table are a Delta table with exactly its rows.

    Raises:
        DataError: they are not.
    """
    obstacle = explain_other_rows(info)
    if obstacle is None and info.data_source_format is not DataSourceFormat.DELTA:
        obstacle = "is not a Delta table"
    if obstacle:
        raise DataError(
            "UnsupportedTable", f"{label} {obstacle}: name a Delta table that has the rows in its own files"
        )


def explain_other_rows(info: TableInfo) -> str | None:
    """Return why the files of a table do not contain exactly its rows, as the end of a sentence; None if they do."""
    if info.table_type not in _TABLE_TYPES:
        return f"is a {getattr(info.table_type, 'value', info.table_type)}, which has no files"
    if info.row_filter or any(column.mask for column in info.columns or []):
        return "has a row filter or a column mask, which only the workspace applies"
    if any((info.properties or {}).get(feature) == "supported" for feature in _CATALOG_MANAGED_FEATURES):
        return "is a catalog-managed table, whose newest version only its catalog knows"
    return None


def _shorten(error: Exception) -> str:
    """Return the first line of a message of the server or the SDK."""
    return first_line(error)[:_MAX_MESSAGE_CHARS]
