"""Finds credentials in the settings of Spark, which the ConfigMap with the recipe would show."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finetune_crds.finetunejob import FineTuneJobSpec

# Parts of the names of Hadoop's settings whose value is a credential for S3, Google Cloud Storage or Azure, such as fs.s3a.secret.key.
_CREDENTIAL = re.compile(
    r"(?:^|[.])(?:secret|password|passphrase|(?:access|account|private|secret)[.]key|(?:fixed|session|refresh|access)[.]token)(?:[.]|$)",
    re.IGNORECASE,
)
# Ends of names that match _CREDENTIAL although the value is no credential: it says where a credential is, or how to fetch one. For
# example, fs.gs.auth.service.account.private.key.id.
_PLACE = re.compile(
    r"[.](?:endpoint|file|path|provider|provider[.]type|type|class|id|enabled|enable)$", re.IGNORECASE
)
# References that Hadoop and Databricks replace when they read the setting.
_REFERENCE = re.compile(r"(?:\$\{env[.]\w+\}|\{\{secrets/[^}]+\}\})")


def find_mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake for each setting of Spark that holds a credential."""
    if spec.prepare is None:
        return
    spark = spec.prepare.spark
    remedy = (
        "store it in a secret scope, and set the value to {{secrets/scope/key}}"
        if spark.mode == "Databricks"
        else "put it into a Secret that spec.pods.prepare.envFrom names, and set the value to ${env.NAME}"
    )
    for name, value in spark.conf.items():
        is_about_credential = _CREDENTIAL.search(name) and not _PLACE.search(name)
        if is_about_credential and not _REFERENCE.fullmatch(value):
            yield f"spec.data.prepare.spark.conf contains a credential in {name}, which anybody who reads the recipe could see: {remedy}"
