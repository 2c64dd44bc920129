"""Hadoop's settings for object stores, from the environment variables of each cloud's own tools.

NB: secrets stay in the environment: Hadoop replaces ${env.NAME} in each process when it reads the setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Hadoop's package of login providers for Azure.
_AZURE = "org.apache.hadoop.fs.azurebfs.oauth2"
_AUTHORITY = "https://login.microsoftonline.com/"
_MIB = 2**20
GS_CLIENT = {
    # NB: Hadoop's defaults name Hadoop's own connector, which is not in the image, and give sizes with units, which Google's
    # connector cannot read.
    "fs.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem",
    "fs.AbstractFileSystem.gs.impl": "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFS",
    "fs.gs.block.size": str(64 * _MIB),
    "fs.gs.rewrite.max.chunk.size": str(512 * _MIB),
    "fs.gs.outputstream.buffer.size": str(8 * _MIB),
    "fs.gs.inputstream.inplace.seek.limit": str(8 * _MIB),
    "fs.gs.inputstream.min.range.request.size": str(2 * _MIB),
}


def build_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's settings for s3://, gs:// and abfss://."""
    hadoop_settings = s3_settings(environment) | gs_settings(environment) | abfs_settings(environment)
    return {f"spark.hadoop.{name}": value for name, value in hadoop_settings.items()}


def s3_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of S3A."""
    hadoop_settings = {
        "fs.s3a.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
    }
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if endpoint:
        hadoop_settings |= {
            "fs.s3a.endpoint": endpoint,
            "fs.s3a.path.style.access": "true",
            "fs.s3a.connection.ssl.enabled": str(not endpoint.startswith("http://")).lower(),
        }
        # S3A requires a region; servers other than AWS accept any.
        region = region or "us-east-1"
    if region:
        hadoop_settings["fs.s3a.endpoint.region"] = region
    return hadoop_settings


def gs_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the connector of Google Cloud Storage.

    The login works as in every client of Google: GOOGLE_APPLICATION_CREDENTIALS, or the ServiceAccount of the pod. An emulator
    needs no login.
    """
    emulator = environment.get("STORAGE_EMULATOR_HOST")
    if not emulator:
        return GS_CLIENT | {"fs.gs.auth.type": "APPLICATION_DEFAULT"}
    address = emulator if "://" in emulator else f"http://{emulator}"
    return GS_CLIENT | {
        "fs.gs.auth.type": "UNAUTHENTICATED",
        "fs.gs.storage.root.url": f"{address.rstrip('/')}/",
    }


def abfs_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Azure Data Lake Storage; empty if the environment has no login.

    The login is a pod's workload identity, a service principal, or the key of one account: the first that is complete.
    """
    client, tenant = environment.get("AZURE_CLIENT_ID"), environment.get("AZURE_TENANT_ID")
    token_file = environment.get("AZURE_FEDERATED_TOKEN_FILE")
    account = environment.get("AZURE_STORAGE_ACCOUNT")
    authority = environment.get("AZURE_AUTHORITY_HOST") or _AUTHORITY
    if client and tenant and token_file:
        return _oauth_settings("WorkloadIdentityTokenProvider", client) | {
            "fs.azure.account.oauth2.msi.tenant": tenant,
            "fs.azure.account.oauth2.msi.authority": authority,
            "fs.azure.account.oauth2.token.file": token_file,
        }
    if client and tenant and environment.get("AZURE_CLIENT_SECRET"):
        return _oauth_settings("ClientCredsTokenProvider", client) | {
            "fs.azure.account.oauth2.client.endpoint": f"{authority.rstrip('/')}/{tenant}/oauth2/token",
            "fs.azure.account.oauth2.client.secret": "${env.AZURE_CLIENT_SECRET}",
        }
    if account and environment.get("AZURE_STORAGE_KEY"):
        host = f"{account}.dfs.core.windows.net"
        return {
            f"fs.azure.account.auth.type.{host}": "SharedKey",
            f"fs.azure.account.key.{host}": "${env.AZURE_STORAGE_KEY}",
        }
    return {}


def _oauth_settings(provider: str, client: str) -> dict[str, str]:
    return {
        "fs.azure.account.auth.type": "OAuth",
        "fs.azure.account.oauth.provider.type": f"{_AZURE}.{provider}",
        "fs.azure.account.oauth2.client.id": client,
    }
