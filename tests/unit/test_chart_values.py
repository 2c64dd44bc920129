"""The chart's values: each has its place in the schema, and what jobs get by default is checked strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from finetune_crds.env import CODE_ENV, RESERVED_ENV
from finetune_operator.defaults import Defaults
from finetune_operator.installation_files import InstallationFileError, load
from finetune_operator.tenancy.model import Tenant
from support.documents import Block, blocks
from support.manifests import VALUES as TITLE

Json = dict[str, Any]
CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
README = (CHART / "README.md").read_text(encoding="utf-8")
SCHEMA: Json = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
# What is passed on as it is: the API server checks it.
FREE = {
    "podSecurityContext",
    "securityContext",
    *(f"{path}resources.{part}" for path in ("", "mlflow.") for part in ("requests", "limits")),
}


def paths(value: Json, path: str = "") -> Iterator[str]:
    """The path of every object of the values that has values of its own."""
    for name, inner in value.items():
        if isinstance(inner, dict) and inner and f"{path}{name}" not in FREE:
            yield f"{path}{name}"
            yield from paths(inner, f"{path}{name}.")


def nested(path: str, leaf: Any) -> Json:
    """Values with one leaf."""
    for name in reversed(path.split(".")):
        leaf = {name: leaf}
    return dict(leaf)


def over(values: Json, below: Json) -> Json:
    """Values over others, as Helm lays them: null removes what is below."""
    found = below | values
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            found[name] = over(value, below[name])
    return {name: value for name, value in found.items() if value is not None}


def errors(values: Json) -> list[str]:
    """What the chart's schema says of the values that Helm makes of these and those of the chart."""
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(over(values, VALUES))]


def test_the_values_fit_the_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert errors({}) == []


# Nothing in a template reads what is inside of these.
BLANK = {"resources", "mlflow.resources", "podSecurityContext", "securityContext"}


@pytest.mark.parametrize("path", [path for path in paths(VALUES) if path not in BLANK])
def test_a_blank_object_is_refused(path: str) -> None:
    name = path.rpartition(".")[2]
    assert errors(nested(path, None)) == [f"{name!r} is a required property"]


@pytest.mark.parametrize("path", sorted(BLANK))
def test_what_is_passed_on_may_be_blank(path: str) -> None:
    assert errors(nested(path, None)) == []


@pytest.mark.parametrize("path", ["", *(path for path in paths(VALUES) if path != "global")])
def test_a_value_that_there_is_not_is_refused(path: str) -> None:
    values = nested(f"{path}.unknown".lstrip("."), 1)
    assert any("unknown" in message for message in errors(values))


@pytest.mark.parametrize("block", [item for item in blocks("yaml") if item.title == TITLE], ids=str)
def test_values_in_the_documentation_fit_the_schema(block: Block) -> None:
    assert errors(yaml.safe_load(block.text)) == []


# NB: a blank value must be an error, and Helm would take it for the default.
WITHOUT_DEFAULT = {"tenancy.tenants"}


def test_every_value_of_the_schema_has_a_default() -> None:
    top = SCHEMA["properties"]
    inner = {
        f"{name}.{field}"
        for name, part in top.items()
        for field in part.get("properties", {})
        if field not in VALUES.get(name, {})
    }
    assert (top.keys() ^ VALUES.keys(), inner) == (set(), WITHOUT_DEFAULT)


@pytest.mark.parametrize("role", ["all", "prepare", "train", "evaluate"])
def test_jobs_cannot_get_variables_that_the_operator_sets(role: str) -> None:
    refused = [
        name
        for name in RESERVED_ENV
        if errors(nested(f"defaults.pods.{role}.env", [{"name": name, "value": "1"}]))
    ]
    assert refused == [*RESERVED_ENV]
    # The second is the operator's in jobs with trainer.code alone, where its value takes precedence.
    for name in ("HF_HOME", CODE_ENV):
        assert errors(nested(f"defaults.pods.{role}.env", [{"name": name, "value": "/models"}])) == []


def resolve(schema: Json, definitions: Json) -> Json:
    """A schema without references, texts, defaults and null, whose objects have no other fields."""
    if "$ref" in schema:
        return resolve(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        (alternative,) = (item for item in schema["anyOf"] if item != {"type": "null"})
        return resolve(alternative, definitions)
    resolved = {
        name: value
        for name, value in schema.items()
        if name not in ("title", "description", "default", "$defs")
    }
    if "properties" in schema:
        fields = schema["properties"].items()
        resolved["properties"] = {name: resolve(field, definitions) for name, field in fields}
        resolved["additionalProperties"] = False
    if "items" in schema:
        resolved["items"] = resolve(schema["items"], definitions)
    return resolved


def test_a_tenant_of_the_chart_is_a_tenant_of_the_operator() -> None:
    of_operator = Tenant.model_json_schema()
    of_chart = SCHEMA["properties"]["tenancy"]["properties"]["tenants"]["items"]
    assert resolve(of_chart, SCHEMA["definitions"]) == resolve(of_operator, of_operator["$defs"])


def test_the_values_list_the_fields_of_a_tenant() -> None:
    comment = README.partition("each may use what its tenant lists: ")[2].partition(".")[0]
    assert comment.split(", ") == [*Tenant.model_json_schema()["properties"]]


LONG = "a" * 1024


def pods(**fields: Any) -> Json:
    """What all pods get."""
    return {"pods": {"all": fields}}


def requesting(resources: Json) -> Json:
    """A template whose own container requests resources."""
    return {"spec": {"containers": [{"name": "main", "resources": resources}]}}


DEFAULTS: dict[str, tuple[Json, bool]] = {
    "none": ({}, True),
    "all of them": (
        {
            "storage": "s3://bucket/finetune",
            "pods": {
                "all": {
                    "env": [
                        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
                    ],
                    "envFrom": [
                        {"secretRef": {"name": "s3"}},
                        {"configMapRef": {"name": "more", "optional": True}},
                    ],
                    "serviceAccountName": "main",
                },
                "prepare": {"image": "registry.example.com/prep@sha256:0123"},
                "train": {
                    "template": {
                        "metadata": {"labels": {"team": "ml"}},
                        "spec": {
                            "priorityClassName": "low",
                            "containers": [{"name": "main", "resources": {"limits": {"rdma/hca": 1}}}],
                            "initContainers": [{"name": "first"}],
                            "volumes": [{"name": "shm", "emptyDir": {}}],
                            "tolerations": [{"operator": "Exists"}],
                            "nodeSelector": {"gpu": "h100"},
                        },
                    }
                },
                "evaluate": {
                    "template": {
                        "spec": {
                            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}]
                        }
                    }
                },
            },
            "queueName": "gpus",
            "modelCache": {"claimName": "models"},
            "checkpoint": {"everySteps": 100, "keep": 3, "mode": "Sync"},
            "imagePullSecrets": [{"name": "registry"}],
        },
        True,
    ),
    **{
        f"a catalog: {catalog}": ({"catalog": catalog}, good)
        for catalog, good in (
            ({"type": "Hive", "hive": {"uri": "thrift://a:9083,thrift://b:9083"}}, True),
            ({"type": "Hive", "hive": {"uri": "thrift://a"}}, False),
            ({"type": "Hive", "hive": {"uri": "http://a:9083"}}, False),
            ({"type": "Hive"}, False),
            (
                {
                    "type": "UnityCatalog",
                    "unityCatalog": {"uri": "http://u:8080", "secretRef": {"name": "u"}},
                },
                True,
            ),
            ({"type": "UnityCatalog", "unityCatalog": {"uri": "http://me:secret@u:8080"}}, False),
            ({"type": "UnityCatalog", "unityCatalog": {}}, False),
            ({"type": "UnityCatalog", "hive": {"uri": "thrift://a:9083"}}, False),
            ({"type": "Databricks"}, True),
            ({"type": "Databricks", "databricks": {"secretRef": {"name": "d"}}}, True),
            ({"type": "Databricks", "hive": {"uri": "thrift://a:9083"}}, False),
            ({"type": "Glue"}, False),
        )
    },
    "a volume as storage": ({"storage": "/data"}, True),
    "a storage in the spelling of Spark": ({"storage": "s3a://bucket/finetune"}, True),
    "a storage of 1024 characters": ({"storage": f"/{LONG[1:]}"}, True),
    "a storage of 1025 characters": ({"storage": f"/{LONG}"}, False),
    "a storage that is none": ({"storage": "bucket/finetune"}, False),
    "a storage of Google": ({"storage": "gs://bucket/finetune"}, True),
    "a storage of Azure": ({"storage": "abfss://models@account.dfs.core.windows.net/finetune"}, True),
    "a storage of Azure without an account": ({"storage": "abfss://models/finetune"}, False),
    "a storage that is a page": ({"storage": "https://bucket.example.com/finetune"}, False),
    "a storage with a space": ({"storage": "s3://bucket/fine tune"}, False),
    "a storage without a bucket": ({"storage": "s3:///finetune"}, False),
    "an empty variable": (pods(env=[{"name": "A", "value": ""}]), True),
    "a variable without a value": (pods(env=[{"name": "A"}]), True),
    "a variable of 16384 characters": (pods(env=[{"name": "A", "value": LONG * 16}]), True),
    "a variable of more": (pods(env=[{"name": "A", "value": f"{LONG * 16}a"}]), False),
    "a variable with dots": (pods(env=[{"name": "a.b-c", "value": "1"}]), True),
    "a variable with a digit first": (pods(env=[{"name": "1A", "value": "1"}]), False),
    "a variable with two dots first": (pods(env=[{"name": "..A", "value": "1"}]), False),
    "a variable with a long name": (pods(env=[{"name": LONG[:254], "value": "1"}]), False),
    "a variable with two origins": (
        pods(env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        False,
    ),
    "a variable with no value and an origin": (
        pods(env=[{"name": "A", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
        False,
    ),
    "a variable with a secret of a workspace": (pods(env=[{"name": "A", "value": "{{secrets/a/b}}"}]), False),
    "a variable that the operator sets": (pods(env=[{"name": "MASTER_PORT", "value": "1"}]), False),
    "a source with a prefix": (pods(envFrom=[{"prefix": "A_", "secretRef": {"name": "s3"}}]), True),
    "a source with a wrong prefix": (pods(envFrom=[{"prefix": "1-", "secretRef": {"name": "s3"}}]), False),
    "a source that is none": (pods(envFrom=[{"prefix": "A_"}]), False),
    "two sources in one": (
        pods(envFrom=[{"secretRef": {"name": "a"}, "configMapRef": {"name": "a"}}]),
        False,
    ),
    "a Secret without a name": (pods(envFrom=[{"secretRef": {"name": " "}}]), False),
    "a Secret with dots": (pods(envFrom=[{"secretRef": {"name": "a.b"}}]), True),
    "a Secret with two dots": (pods(envFrom=[{"secretRef": {"name": "a..b"}}]), False),
    "a queue that is no label": ({"queueName": "a b"}, False),
    "a queue of 63 characters": ({"queueName": LONG[:63]}, True),
    "a queue of 64 characters": ({"queueName": LONG[:64]}, False),
    "an account with two dots": (pods(serviceAccountName="a..b"), False),
    "an account of 254 characters": (pods(serviceAccountName=LONG[:254]), False),
    "a claim with a dot": ({"modelCache": {"claimName": "a.b"}}, True),
    "a claim with two dots": ({"modelCache": {"claimName": "a..b"}}, False),
    "a claim with a dash before a dot": ({"modelCache": {"claimName": "a-.b"}}, False),
    "a mode of other spelling": ({"checkpoint": {"mode": "async"}}, False),
    "no step": ({"checkpoint": {"everySteps": 0}}, False),
    "101 checkpoints": ({"checkpoint": {"keep": 101}}, False),
    "a pod template with a field beside its spec": (pods(template={"containers": []}), False),
    "a pod template without a spec": (pods(template={"metadata": {}}), True),
    "a pod template with a word as spec": (pods(template={"spec": "x"}), False),
    "containers that are no list": (pods(template={"spec": {"containers": "x"}}), False),
    "containers by their names": (pods(template={"spec": {"containers": {"main": {}}}}), False),
    "a container as a word": (pods(template={"spec": {"containers": ["main"]}}), False),
    "a container without a name": (pods(template={"spec": {"containers": [{"image": "x"}]}}), False),
    "a container beside the pod's own": (
        pods(template={"spec": {"containers": [{"name": "main"}, {"name": "proxy", "image": "x"}]}}),
        False,
    ),
    "a sidecar": (
        pods(template={"spec": {"initContainers": [{"name": "proxy", "restartPolicy": "Always"}]}}),
        True,
    ),
    "volumes that are no list": (pods(template={"spec": {"volumes": {"name": "shm"}}}), False),
    "one toleration": (pods(template={"spec": {"tolerations": {"key": "gpu"}}}), False),
    "a node as a word": (pods(template={"spec": {"nodeSelector": "gpu"}}), False),
    "a GPU of all pods": (pods(template=requesting({"limits": {"nvidia.com/gpu": 1}})), False),
    "a device that all pods request": (pods(template=requesting({"requests": {"rdma/hca": 1}})), False),
    "a claim of all pods": (pods(template=requesting({"claims": [{"name": "gpu"}]})), False),
    "memory of all pods": (pods(template=requesting({"limits": {"memory": "1Gi"}})), True),
    "an image of all pods": (pods(image="a:1"), False),
    "an image with a space": ({"pods": {"train": {"image": "a b"}}}, False),
    "a variable of a role that the operator sets": (
        {"pods": {"evaluate": {"env": [{"name": "MASTER_PORT", "value": "1"}]}}},
        False,
    ),
    "a role that is none": ({"pods": {"trainer": {}}}, False),
    "a field of pods that is none": (pods(podTemplate={}), False),
    "a pull secret as a word": ({"imagePullSecrets": ["registry"]}, False),
}


def starts(defaults: Json, folder: Path) -> bool:
    """Whether the operator starts with the defaults that the chart gives it: it leaves out what is not set."""
    file = folder / "defaults.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in defaults.items() if value}))
    try:
        load(str(file), Defaults)
    except InstallationFileError:
        return False
    return True


@pytest.mark.parametrize(("defaults", "fit"), DEFAULTS.values(), ids=DEFAULTS)
def test_chart_and_operator_take_the_same_defaults(defaults: Json, fit: bool, tmp_path: Path) -> None:
    chart, operator = errors({"defaults": defaults}) == [], starts(defaults, tmp_path)
    assert (chart, operator) == (fit, fit)


FIT: dict[str, tuple[Json, bool]] = {
    "a volume in decimal units": (nested("mlflow.persistence.size", "10G"), True),
    "a volume with a fraction": (nested("mlflow.persistence.size", "1.5Gi"), True),
    "a volume in words": (nested("mlflow.persistence.size", "big"), False),
    "a volume of bytes, for want of a unit": (nested("mlflow.persistence.size", "10"), False),
    "an hour between scrapes": (nested("metrics.serviceMonitor.interval", "1h"), True),
    "a minute and a half": (nested("metrics.serviceMonitor.interval", "1m30s"), True),
    "a time without a unit": (nested("metrics.serviceMonitor.interval", "30"), False),
    "units in the wrong order": (nested("metrics.serviceMonitor.interval", "30s1m"), False),
    "no time": (nested("metrics.serviceMonitor.interval", ""), False),
    "the limit of a scrape of Prometheus' own": (nested("metrics.serviceMonitor.scrapeTimeout", ""), True),
    "claims": (nested("resources.claims", [{"name": "gpu", "request": "one"}]), True),
    "a claim without a name": (nested("resources.claims", [{"request": "one"}]), False),
    "an account that is there": (nested("serviceAccount", {"create": False, "name": "mine"}), True),
    "an account that nothing names": (nested("serviceAccount.create", False), False),
    "an account with a blank name": (nested("serviceAccount", {"create": False, "name": None}), False),
    "an account of MLflow": (nested("mlflow.serviceAccountName", "mlflow"), True),
    "an account of MLflow that cannot be": (nested("mlflow.serviceAccountName", "a..b"), False),
    "an image without a name": (nested("image.prep.repository", None), False),
    "no tenants": (nested("tenancy.tenants", []), True),
    "a tenant with a limit that is no number": (
        nested("tenancy.tenants", [{"namespaces": ["a"], "maxGpus": "8"}]),
        False,
    ),
    "a rule that is spelled wrong": (
        nested("tenancy.tenants", [{"namespaces": ["a"], "maxGPUs": 8}]),
        False,
    ),
}


@pytest.mark.parametrize(("values", "fit"), FIT.values(), ids=FIT)
def test_values_that_fit_and_that_do_not(values: Json, fit: bool) -> None:
    assert (errors(values) == []) is fit
