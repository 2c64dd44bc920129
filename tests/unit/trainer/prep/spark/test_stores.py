"""Settings of object stores."""

from __future__ import annotations

import pytest

from finetune_trainer.prep.spark import stores

PROVIDER = {
    "fs.s3a.aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
}
S3: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("AWS itself", {}, {}),
    ("region", {"AWS_REGION": "eu-central-1"}, {"endpoint.region": "eu-central-1"}),
    (
        "own endpoint",
        {"AWS_ENDPOINT_URL": "http://store:7070"},
        {
            "endpoint": "http://store:7070",
            "path.style.access": "true",
            "connection.ssl.enabled": "false",
            "endpoint.region": "us-east-1",
        },
    ),
    (
        "the endpoint of S3 goes before that of every service; credentials are not copied",
        {
            "AWS_ENDPOINT_URL": "http://other",
            "AWS_ENDPOINT_URL_S3": "https://store",
            "AWS_DEFAULT_REGION": "here",
            "AWS_SECRET_ACCESS_KEY": "secret",
        },
        {
            "endpoint": "https://store",
            "path.style.access": "true",
            "connection.ssl.enabled": "true",
            "endpoint.region": "here",
        },
    ),
]


@pytest.mark.parametrize(("environment", "expected"), [row[1:] for row in S3], ids=[row[0] for row in S3])
def test_s3(environment: dict[str, str], expected: dict[str, str]) -> None:
    expected = {f"fs.s3a.{name}": value for name, value in expected.items()}
    assert stores.s3_settings(environment) == PROVIDER | expected


def test_gs() -> None:
    client = stores.GS_CLIENT
    emulated = {"fs.gs.auth.type": "UNAUTHENTICATED", "fs.gs.storage.root.url": "http://gcs:4443/"}
    assert [
        stores.gs_settings(variables)
        for variables in (
            {},
            {"GOOGLE_APPLICATION_CREDENTIALS": "/secrets/key.json"},
            {"STORAGE_EMULATOR_HOST": "gcs:4443"},
            {"STORAGE_EMULATOR_HOST": "http://gcs:4443/"},
        )
    ] == [client | {"fs.gs.auth.type": "APPLICATION_DEFAULT"}] * 2 + [client | emulated] * 2


PRINCIPAL = {"AZURE_CLIENT_ID": "client", "AZURE_TENANT_ID": "tenant"}
OAUTH = {"auth.type": "OAuth", "oauth2.client.id": "client"}
AZURE: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "nothing": ({}, {}),
    "a principal without a secret": (PRINCIPAL, {}),
    "workload identity goes first": (
        PRINCIPAL
        | {
            "AZURE_FEDERATED_TOKEN_FILE": "/var/run/token",
            "AZURE_AUTHORITY_HOST": "https://login.example.com/",
            "AZURE_CLIENT_SECRET": "hidden",
        },
        OAUTH
        | {
            "oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.WorkloadIdentityTokenProvider",
            "oauth2.msi.tenant": "tenant",
            "oauth2.msi.authority": "https://login.example.com/",
            "oauth2.token.file": "/var/run/token",
        },
    ),
    "a principal": (
        PRINCIPAL | {"AZURE_CLIENT_SECRET": "hidden"},
        OAUTH
        | {
            "oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
            "oauth2.client.endpoint": "https://login.microsoftonline.com/tenant/oauth2/token",
            "oauth2.client.secret": "${env.AZURE_CLIENT_SECRET}",
        },
    ),
    "the key of an account": (
        {"AZURE_STORAGE_ACCOUNT": "lake", "AZURE_STORAGE_KEY": "hidden"},
        {
            "auth.type.lake.dfs.core.windows.net": "SharedKey",
            "key.lake.dfs.core.windows.net": "${env.AZURE_STORAGE_KEY}",
        },
    ),
}


@pytest.mark.parametrize(("environment", "expected"), AZURE.values(), ids=AZURE)
def test_abfs(environment: dict[str, str], expected: dict[str, str]) -> None:
    assert stores.abfs_settings(environment) == {
        f"fs.azure.account.{name}": value for name, value in expected.items()
    }


def test_secrets_stay_in_the_environment() -> None:
    key = {"AZURE_STORAGE_ACCOUNT": "lake", "AZURE_STORAGE_KEY": "hidden", "AWS_SECRET_ACCESS_KEY": "hidden"}
    for variables in (key, PRINCIPAL | {"AZURE_CLIENT_SECRET": "hidden"}):
        assert "hidden" not in stores.build_settings(variables).values()
