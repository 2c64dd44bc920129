"""Settings of Spark that hold a credential are refused, and references to one are not."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds import FineTuneJobSpec
from finetune_operator.finetunejob.decide.accept import mistakes_of_fixed_fields
from finetune_operator.finetunejob.preparation import conf_credentials
from finetune_operator.settings import Settings

HADOOP = "spark.hadoop.fs"
ACCOUNT = "lake.dfs.core.windows.net"
HELD = (
    f"{HADOOP}.s3a.access.key",
    f"{HADOOP}.s3a.secret.key",
    f"{HADOOP}.s3a.session.token",
    f"{HADOOP}.s3a.bucket.corpora.secret.key",
    f"{HADOOP}.s3a.proxy.password",
    f"{HADOOP}.azure.account.key.{ACCOUNT}",
    f"{HADOOP}.azure.account.oauth2.client.secret",
    f"{HADOOP}.azure.account.oauth2.client.secret.{ACCOUNT}",
    f"{HADOOP}.azure.account.oauth2.refresh.token",
    f"{HADOOP}.azure.sas.fixed.token.{ACCOUNT}",
    f"{HADOOP}.gs.auth.service.account.private.key",
)
PLAIN = (
    f"{HADOOP}.s3a.endpoint",
    f"{HADOOP}.s3a.aws.credentials.provider",
    f"{HADOOP}.s3a.encryption.key",
    f"{HADOOP}.azure.account.oauth2.client.id",
    f"{HADOOP}.azure.account.oauth2.refresh.token.endpoint",
    f"{HADOOP}.azure.account.oauth2.token.file",
    f"{HADOOP}.gs.auth.service.account.private.key.id",
    "spark.sql.shuffle.partitions",
)


def build_spec(conf: dict[str, str], **spark: Any) -> FineTuneJobSpec:
    data = {
        "source": {"type": "Parquet", "path": "s3://corpora/chats"},
        "prepare": {"output": "s3://lake/table", "spark": {"conf": conf, **spark}},
    }
    return FineTuneJobSpec.model_validate({"model": {"base": "org/model"}, "data": data})


def list_names(value: str, *names: str) -> list[str]:
    sentences = conf_credentials.find_mistakes(build_spec(dict.fromkeys(names, value)))
    return [sentence.split(" in ")[1].split(",")[0] for sentence in sentences]


def test_credentials_are_refused_by_name() -> None:
    assert list_names("a canary", *HELD, *PLAIN) == [*HELD]


@pytest.mark.parametrize("value", ["${env.STORE_KEY}", "{{secrets/lake/key}}"])
def test_references_are_not(value: str) -> None:
    assert list_names(value, *HELD) == []


def test_the_remedy_is_that_of_the_mode_and_the_value_is_not_shown() -> None:
    conf = {HELD[1]: "a canary ${env.STORE_KEY}"}
    start = "spec.data.prepare.spark.conf contains a credential in spark.hadoop.fs.s3a.secret.key, which anybody who reads the recipe could see: "
    databricks = {"volume": "/Volumes/a/b/c", "compute": {"type": "NewCluster"}, "secretRef": {"name": "a"}}
    assert [
        *conf_credentials.find_mistakes(build_spec(conf)),
        *conf_credentials.find_mistakes(build_spec(conf, mode="Databricks", databricks=databricks)),
    ] == [
        f"{start}put it into a Secret that spec.pods.prepare.envFrom names, and set the value to ${{env.NAME}}",
        f"{start}store it in a secret scope, and set the value to {{{{secrets/scope/key}}}}",
    ]


def test_a_job_with_one_is_not_accepted() -> None:
    spec = build_spec({HELD[1]: "a canary"})
    assert [*mistakes_of_fixed_fields(spec, Settings())] == [*conf_credentials.find_mistakes(spec)]
