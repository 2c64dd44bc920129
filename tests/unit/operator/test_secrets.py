"""Credentials from Secrets."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from finetune_crds.env import LocalReference
from finetune_operator import secrets
from finetune_operator.errors import ExternalError
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.client import Credentials
from fixtures.fake_kube import StandIn

Json = dict[str, Any]


def secret(**values: str | bytes) -> Json:
    raw = {name: value.encode() if isinstance(value, str) else value for name, value in values.items()}
    data = {name: base64.b64encode(value).decode() for name, value in raw.items()}
    return {"kind": "Secret", "metadata": {"name": "mlflow"}, "data": data}


HELD: dict[str, tuple[Json, Credentials]] = {
    "none": (secret(), Credentials()),
    "basic": (
        secret(MLFLOW_TRACKING_USERNAME="me", MLFLOW_TRACKING_PASSWORD="pass\n"),
        Credentials(username="me", password="pass"),
    ),
    "token": (secret(MLFLOW_TRACKING_TOKEN=" t \n"), Credentials(token="t")),
    "beside others that are no text": (
        secret(MLFLOW_TRACKING_TOKEN="t", keystore=b"\xff\xfe"),
        Credentials(token="t"),
    ),
}


@pytest.mark.parametrize(("body", "expected"), HELD.values(), ids=HELD)
async def test_credentials_of_a_secret(body: Json, expected: Credentials) -> None:
    credentials = await secrets.read(StandIn(body), "team", LocalReference(name="mlflow"), secrets.TRACKING)
    assert Credentials.of(credentials) == expected


async def test_what_is_read_here_and_nothing_else_leaves_a_secret() -> None:
    kube = StandIn(secret(DATABRICKS_HOST="h", MLFLOW_TRACKING_TOKEN="t", AWS_SECRET_ACCESS_KEY="s"))
    credentials = await secrets.read(kube, "team", LocalReference(name="mlflow"), secrets.TRACKING)
    assert credentials == {"DATABRICKS_HOST": "h", "MLFLOW_TRACKING_TOKEN": "t"}


async def test_a_secret_may_be_optional() -> None:
    assert (
        await secrets.read(StandIn(), "team", LocalReference(name="mlflow", optional=True), secrets.TRACKING)
        is None
    )


REFUSED: dict[str, tuple[StandIn, KubeError | None, str]] = {
    "there is none": (
        StandIn(),
        None,
        "Secret mlflow of spec.tracking.secretRef does not exist in namespace team: create the Secret",
    ),
    "no text": (
        StandIn(secret(MLFLOW_TRACKING_TOKEN=b"\xff")),
        None,
        "Secret mlflow of spec.tracking.secretRef contains credentials that are not text: recreate it from text",
    ),
    "not allowed": (
        StandIn(),
        KubeError(403, "forbidden"),
        "the operator cannot read Secret mlflow of spec.tracking.secretRef (forbidden): install the chart with "
        "rbac.trackingSecrets",
    ),
}


@pytest.mark.parametrize(("kube", "refusal", "message"), REFUSED.values(), ids=REFUSED)
async def test_a_secret_that_cannot_be_used(kube: StandIn, refusal: KubeError | None, message: str) -> None:
    if refusal:
        kube.refuse["get", "Secret"] = refusal
    with pytest.raises(ExternalError) as raised:
        await secrets.read(kube, "team", LocalReference(name="mlflow"), secrets.TRACKING)
    assert str(raised.value) == message
