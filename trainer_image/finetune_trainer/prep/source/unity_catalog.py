"""Locates tables of Unity Catalog by name, and requests temporary credentials that read one of them.

The client uses the REST API of the open-source server, which Databricks supports too. Only the driver calls it; executors get the credentials
with the files that they read.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import requests
from databricks.sdk import WorkspaceClient
from databricks.sdk.config import Config
from databricks.sdk.credentials_provider import CredentialsStrategy
from databricks.sdk.errors import (
    BadRequest,
    InvalidParameterValue,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from databricks.sdk.errors.base import DatabricksError
from databricks.sdk.service.catalog import (
    AwsCredentials,
    GenerateTemporaryTableCredentialResponse,
    TableInfo,
    TableOperation,
)

from finetune_crds.catalog import DATABRICKS_PREFIX, TOKEN_KEY
from finetune_crds.databricks import SECRET_KEYS
from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.prep.source.location import OWN_SCHEME, Place
from finetune_trainer.storage import unity_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_crds.catalog import Catalog

# The path on the open-source server, which has only this version of the API; the SDK would request the credentials under /api/2.0.
_CREDENTIALS_PATH = "/api/2.1/unity-catalog/temporary-table-credentials"
_PRODUCT = "finetune-prep"
# The types of sources, by the names of formats in Unity Catalog.
_FORMATS = {"DELTA": "Delta", "PARQUET": "Parquet"}
_DATABRICKS_ADVICE = "use data.prepare.spark.mode Databricks"
# A message of a server may be long.
_MAX_MESSAGE_CHARS = 300


class _TableReference(NamedTuple):
    """A table of a server.

    label: the recipe's field with the table's name, for messages: `data.source.table main.sales.orders`.
    """

    label: str
    table: str
    host: str

    @property
    def schema(self) -> str:
        """The schema that the table is in."""
        return self.table.rpartition(".")[0]


def locate(table: str, kind: str, field: str, catalog: Catalog) -> Place:
    """Return the location of a table, with credentials that read its files for about an hour.

    Args:
        table: catalog.schema.table.
        kind: the type of the source, Delta or Parquet.
        field: the recipe's field that names the table, for messages.

    Raises:
        DataError: the table does not exist, has another type, has files outside S3, or is not readable with the login.
        TrainingError: the server does not answer.
    """
    with _log_in(catalog) as client:
        reference = _TableReference(f"{field} {table}", table, client.config.host or "")
        with _translate_errors(reference, _build_table_error):
            info = client.tables.get(table)
        _check_table(info, kind, reference)
        with _translate_errors(reference, _build_credentials_error):
            response = _request_credentials(client, catalog, info.table_id or "")
    return _build_place(info.storage_location or "", response.aws_temp_credentials, reference)


@contextmanager
def _log_in(catalog: Catalog) -> Iterator[WorkspaceClient]:
    """Yield a client of the server. NB: the SDK may log in only on the first request, so errors of the `with` block are translated too.

    Raises:
        DataError: the login is not complete, or the server does not accept it.
        TrainingError: the server does not answer the login.
    """
    try:
        yield WorkspaceClient(config=_build_config(catalog))
    except ValueError as error:
        message = f"the login to Unity Catalog fails: {_shorten(error)}"
        if unity_tables.is_refusal(error):
            raise DataError("CatalogForbidden", message) from error
        raise TrainingError("CatalogUnreachable", message) from error


def _build_config(catalog: Catalog) -> Config:
    """Return the configuration of the SDK for a catalog.

    Raises:
        DataError: the Secret of the catalog is not complete.
    """
    if catalog.unity_catalog:
        token = os.environ.get(TOKEN_KEY)
        # NB: auth_type keeps the SDK from sending this server the login of another workspace in the environment.
        login = {"token": token, "auth_type": "pat"} if token else {"credentials_strategy": _Anonymous()}
        return unity_tables.Login(_PRODUCT, host=catalog.unity_catalog.uri, **login)
    # In the order of SECRET_KEYS.
    host, token, client, secret = (os.environ.get(f"{DATABRICKS_PREFIX}{key}") for key in SECRET_KEYS)
    secret_ref = catalog.databricks and catalog.databricks.secret_ref
    is_complete = host and (token or (client and secret))
    if secret_ref and not is_complete:
        # NB: the SDK would read the missing values from the environment, which may contain the login to another workspace.
        raise DataError(
            "CatalogForbidden",
            f"the login to Unity Catalog fails: Secret {secret_ref.name} of data.prepare.catalog needs DATABRICKS_HOST, and DATABRICKS_TOKEN or DATABRICKS_CLIENT_ID and "
            "DATABRICKS_CLIENT_SECRET",
        )
    if token:
        return unity_tables.Login(_PRODUCT, host=host, token=token, auth_type="pat")
    if client and secret:
        return unity_tables.Login(
            _PRODUCT, host=host, client_id=client, client_secret=secret, auth_type="oauth-m2m"
        )
    # The login of the environment: of the pods, or of the user's machine.
    return unity_tables.Login(_PRODUCT)


class _Anonymous(CredentialsStrategy):
    """No login."""

    def auth_type(self) -> str:
        return "anonymous"

    def __call__(self, cfg: Config) -> Callable[[], dict[str, str]]:  # noqa: ARG002 - the SDK's own signature
        return dict


@contextmanager
def _translate_errors(
    reference: _TableReference, refusal: Callable[[_TableReference, str], DataError]
) -> Iterator[None]:
    """Translate errors of the server into errors of the pod.

    Args:
        refusal: builds the error of a refusal from the message of the server.
    """
    try:
        yield
    except Unauthenticated as error:
        raise DataError(
            "CatalogForbidden",
            (
                f"Unity Catalog at {reference.host} rejects the credentials of data.prepare.catalog: correct its Secret "
                f"({_shorten(error)})"
            ),
        ) from error
    except (NotFound, PermissionDenied, BadRequest, InvalidParameterValue) as error:
        raise refusal(reference, _shorten(error)) from error
    except (DatabricksError, requests.RequestException, TimeoutError) as error:
        raise TrainingError(
            "CatalogUnreachable",
            f"Unity Catalog at {reference.host} does not respond to the request for {reference.label}: {_shorten(error)}",
        ) from error


def _build_table_error(reference: _TableReference, answer: str) -> DataError:
    return DataError(
        "MissingSource",
        f"{reference.label} is not in Unity Catalog at {reference.host}, or the principal of data.prepare.catalog has "
        f"no access to it: correct the name, or grant USE CATALOG, USE SCHEMA and SELECT ({answer})",
    )


def _build_credentials_error(reference: _TableReference, answer: str) -> DataError:
    return DataError(
        "CatalogForbidden",
        f"Unity Catalog at {reference.host} issues no credentials for the files of {reference.label}: grant SELECT on "
        f"the table and EXTERNAL USE SCHEMA on {reference.schema}, and allow external data access in the metastore "
        f"({answer})",
    )


def _check_table(info: TableInfo, kind: str, reference: _TableReference) -> None:
    """Check that the files of a table contain exactly its rows, and have the type that the recipe names.

    Raises:
        DataError: the files contain other rows, or have another type.
    """
    obstacle = unity_tables.explain_other_rows(info)
    if obstacle:
        raise DataError("UnreadableSource", f"{reference.label} {obstacle}: {_DATABRICKS_ADVICE}")
    format_name = _enum_value(info.data_source_format)
    # For example, data.source of the label `data.source.table main.sales.orders`.
    source_field, *_ = reference.label.split(".table", 1)
    if _FORMATS.get(format_name.upper()) != kind:
        raise DataError(
            "UnreadableSource",
            f"{reference.label} is in the format {format_name}, and {source_field}.type is {kind}: correct the type, or "
            f"name a {kind} table",
        )


def _enum_value(value: object) -> str:
    """Return the text of an enum of the SDK, which may be missing or a plain text."""
    return str(getattr(value, "value", value))


def _request_credentials(
    client: WorkspaceClient, catalog: Catalog, table_id: str
) -> GenerateTemporaryTableCredentialResponse:
    if catalog.type == "Databricks":
        api = client.temporary_table_credentials
        return api.generate_temporary_table_credentials(operation=TableOperation.READ, table_id=table_id)
    body = {"table_id": table_id, "operation": TableOperation.READ.value}
    answer = client.api_client.do("POST", _CREDENTIALS_PATH, body=body)
    return GenerateTemporaryTableCredentialResponse.from_dict(answer if isinstance(answer, dict) else {})


def _build_place(location: str, credentials: AwsCredentials | None, reference: _TableReference) -> Place:
    """Return the place of files in S3, with the credentials that read them.

    Raises:
        DataError: the files are not in S3, or there are no credentials.
    """
    url = urlsplit(location)
    if url.scheme not in ("s3", "s3a"):
        where = "a folder of the server" if url.scheme in ("", "file") else "in another storage"
        raise DataError(
            "UnreadableSource",
            f"the files of {reference.label} are at {location}, {where}, but a preparation in this cluster reads "
            "Unity Catalog tables only from s3://: move the table, or use path with your own credentials",
        )
    if credentials is None or not credentials.access_key_id or not credentials.secret_access_key:
        raise _build_credentials_error(reference, "the answer has no credentials for S3")
    # NB: Hadoop keeps one client for each scheme and bucket. With a separate scheme, the credentials of one table do not apply
    # to other tables of the bucket, or to the output.
    digest = hashlib.sha256(f"{credentials.access_key_id} {credentials.session_token}".encode()).hexdigest()
    scheme = f"{OWN_SCHEME}{digest[:8]}"
    provider = "Temporary" if credentials.session_token else "Simple"
    login = {
        "aws.credentials.provider": f"org.apache.hadoop.fs.s3a.{provider}AWSCredentialsProvider",
        "access.key": credentials.access_key_id,
        "secret.key": credentials.secret_access_key,
        **({"session.token": credentials.session_token} if credentials.session_token else {}),
    }
    # Hadoop looks up a login by the bucket, whatever the scheme; `Place` applies these settings only to reading this table.
    return Place(
        f"{scheme}://{url.netloc}{url.path}",
        {f"fs.{scheme}.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
        | {f"fs.s3a.bucket.{url.netloc}.{name}": value for name, value in login.items()},
    )


def _shorten(error: Exception) -> str:
    """Return the first line of a message of the server or the SDK."""
    return first_line(error)[:_MAX_MESSAGE_CHARS]
