"""Every path, field, variable and label that README.md and the documentation name in their sentences exists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from finetune_operator.tenancy.model import Tenant
from support.documents import PAGES, ROOT, Page
from support.manifests import SCHEMAS

Json = dict[str, Any]

# Where a path may begin, besides the root of the repository: the pages about a package say which one they mean.
BASES = (
    "",
    "operator/finetune_operator/",
    "operator/finetune_operator/finetunejob/",
    "operator/finetune_operator/modelpromotion/",
    "trainer_image/finetune_trainer/",
    "trainer_image/finetune_trainer/train/",
    "trainer_image/finetune_trainer/train/delivery/",
    "tests/cluster/",
)
_PATH = re.compile(
    r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|yaml|json|lua|tpl|toml|yml|mk))|(?:crds|charts|docs|tests)/[\w./-]+"
)
_FIELD = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+|[a-z]+(?:[A-Z][a-z]+)+")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_LABEL = re.compile(r"finetune\.dev/[\w-]+")

# Fields of Kubernetes' own objects, and names of other tools that look like fields of ours.
OF_OTHERS = {
    "backoffLimit", "emptyDir", "fieldPath", "hostNetwork", "lastTransitionTime", "messageExpression", "nodeSelector", "observedGeneration", "podFailurePolicy", "secretKeyRef",
    "sizeLimit", "terminationGracePeriodSeconds", "valueFrom.secretKeyRef", "volumeMounts", "host.cluster.internal", "catalog.schema", "catalog.schema.name", "catalog.schema.table", "database.table",
    "pods.eks.amazonaws.com", "checkpoint.checkpoint_dir", "dropDuplicates", "mlflow.pyfunc", "mlflow.pyfunc.load_model", "mlflow.register_model", "mlflow.source.git", "mlflow.source.git.branch", "mlflow.source.git.commit",
    "mlflow.source.git.repoURL", "mlflow.transformers", "mlflow.transformers.load_model", "randomSplit", "requirements.txt", "step_scheduler.max_steps",
    "spark.dynamicAllocation.enabled", "spark.executor.memoryOverheadFactor", "spark.kubernetes.executor.limit.cores",
    "compute.num_accelerators", "compute.accelerator_type", "compute.pool_id", "compute.priority_class", "environment.version",
    "environment.unity_catalog_image", "code_source.snapshot.root_path", "code_source.root_path", "checkpoint.staging_dir", "checkpoint.restore_from", "torch.distributed",
    "driver.template", "initContainers", "restartPolicy", "environment.dependencies", "executor.template", "spark.jobNamespaces", "sparkConf",
    "extraJavaOptions", "fs.azure", "fs.gs", "spark.databricks.delta", "spark.hadoop.fs.s3a", "spark.jars", "spark.memory", "spark.network", "spark.plugins", "spark.shuffle", "spark.sql.adaptive", "spark.sql.extensions", "spark.sql.files", "spark.sql.shuffle",
    "maxTrialCount", "parallelTrialCount", "maxFailedTrialCount", "tpe.suggest",
}  # fmt: skip


def fields(schema: Json, path: str = "") -> Iterator[str]:
    """The path of every field below a schema."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(field.get("items", field), f"{path}.{name}")


def keys(value: object, path: str = "") -> Iterator[str]:
    """The path of every key of the chart's values."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{path}.{name}"
        yield from keys(inner, f"{path}.{name}")


VALUES = yaml.safe_load((ROOT / "charts/finetune-operator/values.yaml").read_text(encoding="utf-8"))
TENANT = Tenant.model_json_schema()
TENANT_FIELDS = {
    f".tenancy.tenants.{name}"
    for schema in (TENANT, *TENANT["$defs"].values())
    for name in schema["properties"]
}
FIELDS = {
    *keys(VALUES),
    ".tenancy.tenants",
    *TENANT_FIELDS,
    *(path for schema in SCHEMAS.values() for path in fields(schema)),
}


@cache
def sources() -> str:
    """The text of every file of the repository but its documentation."""
    command = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        ":!tests/unit/docs",
        ":!*.md",
        ":!*.txt",
    ]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in files if (ROOT / name).is_file())


def problem(code: str) -> str | None:
    """What is wrong with a name; None when nothing is, or when it is no name of ours."""
    code = code.partition(": ")[0]
    if _LABEL.fullmatch(code):
        return None if f'"{code}"' in sources() else "is no label or tag of ours"
    if _PATH.fullmatch(code):
        return None if any((ROOT / base / code).exists() for base in BASES) else "does not exist"
    if _VARIABLE.fullmatch(code):
        return None if re.search(rf"\b{code}\b", sources()) else "is nowhere in the code"
    if _FIELD.fullmatch(code) and code not in OF_OTHERS:
        return None if any(field.endswith(f".{code}") for field in FIELDS) else "is no field and no value"
    return None


def wrong(page: Page) -> Iterator[str]:
    for line, code in page.codes():
        if said := problem(code):
            yield f"{page.name}:{line}: {code} {said}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.is_generated], ids=lambda page: page.name
)
def test_a_name_exists(page: Page) -> None:
    assert [*wrong(page)] == []


# A name that is wrong, and what is said of it.
BROKEN = {
    "finetunejob/decide/phases.py": "does not exist",
    "crds/sample/": "does not exist",
    "tests/units": "does not exist",
    "operator.toml": "does not exist",
    "data.prepare.minimumQuality": "is no field and no value",
    "minQualities": "is no field and no value",
    "training.packs: false": "is no field and no value",
    "crds.keeps": "is no field and no value",
    "FINETUNE_CACHES": "is nowhere in the code",
    "finetune.dev/jobs": "is no label or tag of ours",
}


@pytest.mark.parametrize(("code", "said"), BROKEN.items(), ids=BROKEN)
def test_what_is_wrong_is_found(code: str, said: str) -> None:
    assert problem(code) == said
