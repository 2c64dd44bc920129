"""Checks the specs of jobs and promotions against the rules of their tenant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote

from finetune_crds.base import Json
from finetune_crds.databricks import SECRET_KEYS
from finetune_crds.env import LocalReference
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.modelpromotion import ModelPromotionSpec, PromotionTracking, SourceRegistry
from finetune_crds.pods import MAIN_CONTAINER, Pods
from finetune_crds.serving import Serving
from finetune_crds.tracking import Tracking
from finetune_operator.databricks.access import find_named_login
from finetune_operator.databricks.secret_scopes import find_scopes, is_own_login
from finetune_operator.patterns import matches
from finetune_operator.settings import DATABRICKS, UNITY_CATALOG, Settings
from finetune_operator.template_merge import containers, items
from finetune_operator.tenancy.model import ApprovalRule, DatabricksAccess, Tenant
from finetune_operator.tenancy.templates import (
    Breach,
    count_devices,
    find_account_breaches,
    find_template_breaches,
)
from finetune_operator.text import normalize_address, strip_user

# A part of a path that clients or servers may resolve to a folder above.
_UPWARDS = re.compile(r"(^|[/\\])\.{1,2}($|[/\\;])|[\\;]")
_MAX_ENCODINGS = 5
# Modes of Spark whose driver has an API token, with which it creates the pods of executors.
_MODES_WITH_TOKEN = ("Kubernetes", "SparkApplication")
# The variables that a driver with an API token may have from the author: logins and addresses of stores, of MLflow and of the Hub. NB: a
# list of what is refused would have holes: shells, the JVM, Python and their libraries load code, or trust servers, by hundreds of names.
_DRIVER_VARIABLES = frozenset(
    {
        *(
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
        ),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        *("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT"),
        "AZURE_STORAGE_KEY",
        *("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TZ"),
        *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
        *SECRET_KEYS,
    }
)


def find_job_breaches(
    written: FineTuneJobSpec, spec: FineTuneJobSpec, tenant: Tenant, settings: Settings
) -> Iterator[Breach]:
    """Yield what a FineTuneJob uses without permission.

    Args:
        written: the spec as the user wrote it. What the chart adds to it is the choice of the platform team.
        spec: the same with the defaults of the chart.
    """
    yield from _find_tracking_breaches(spec.tracking, tenant, settings)
    experiment = spec.tracking.experiment
    if experiment and not matches(experiment, tenant.experiments):
        yield Breach(f"spec.tracking.experiment {experiment}", "experiments")
    if spec.register_:
        _, registry = settings.servers(spec.tracking)
        yield from _find_model_breaches(spec.register_.model, "spec.register.model", registry, tenant)
        for alias in spec.register_.aliases:
            yield from _find_alias_breaches(alias, "spec.register.aliases", registry, tenant)
            if _find_approval_rules(spec.register_.model, alias, tenant):
                what = f"spec.register.aliases {alias}, which only a ModelPromotion may move,"
                yield Breach(what, "approvals")
    url = spec.trainer.code.git.url if spec.trainer.code and spec.trainer.code.git else None
    # NB: a client may resolve `..`, also in its encoded form, to a folder that the pattern does not name.
    if url and (_leads_upwards(url) or not matches(url, tenant.repositories)):
        yield Breach(f"spec.trainer.code.git.url {url}", "repositories")
    yield from _find_preparation_breaches(written, spec, tenant, settings)
    yield from _find_pod_breaches(written.pods, tenant)
    yield from _find_remote_code_breaches(spec, tenant)
    if tenant.max_nodes is not None and spec.distributed.nodes > tenant.max_nodes:
        yield Breach(f"spec.distributed.nodes {spec.distributed.nodes}", "maxNodes")
    yield from _find_scope_breaches(_list_texts(written.model_dump(mode="json", by_alias=True)), tenant)


def find_promotion_breaches(spec: ModelPromotionSpec, tenant: Tenant, settings: Settings) -> Iterator[Breach]:
    """Yield what a ModelPromotion uses without permission."""
    yield from _find_tracking_breaches(spec.tracking, tenant, settings)
    _, registry = settings.servers(spec.tracking)
    yield from _find_model_breaches(spec.model, "spec.model", registry, tenant)
    yield from _find_alias_breaches(spec.alias, "spec.alias", registry, tenant)
    if spec.source.registry:
        yield from _find_source_breaches(spec.source.registry, tenant, settings)
    for gate in spec.gates:
        if gate.job:
            field = f"spec.gates {gate.name} job.template"
            yield from _find_job_template_breaches(gate.job.template, field, tenant)
    query = spec.on_regression.prometheus if spec.on_regression else None
    if query:
        url = normalize_address(query.url)
        if url not in map(normalize_address, tenant.prometheus):
            yield Breach(f"spec.onRegression.prometheus.url {strip_user(url)}", "prometheus")
    if spec.serving:
        yield from _find_serving_breaches(spec.serving, tenant)
        yield from _find_approval_breaches(spec, spec.serving.endpoint, tenant)
    yield from _find_scope_breaches(_list_texts(spec.model_dump(mode="json", by_alias=True)), tenant)


def count_needed_approvals(spec: ModelPromotionSpec, tenant: Tenant) -> int:
    """Return the number of people who must approve a version before a ModelPromotion gives it the alias; 0 if no rule matches."""
    rules = _find_approval_rules(spec.model, spec.alias, tenant)
    return max((rule.count for rule in rules), default=0)


def _leads_upwards(url: str) -> bool:
    """Whether an address, also after decoding, can lead to a folder above one that it names."""
    for _ in range(_MAX_ENCODINGS):
        if _UPWARDS.search(url):
            return True
        decoded = unquote(url)
        if decoded == url:
            return False
        url = decoded
    return True


def _find_source_breaches(source: SourceRegistry, tenant: Tenant, settings: Settings) -> Iterator[Breach]:
    """Check the registry from which a promotion copies a version, and the pod that copies it."""
    field = "spec.source.registry"
    tracking = PromotionTracking(uri=source.uri, secret_ref=source.secret_ref)
    yield from _find_tracking_breaches(tracking, tenant, settings, field=field)
    yield from _find_model_breaches(source.model, f"{field}.model", source.uri, tenant)
    yield from _find_job_template_breaches(source.template, f"{field}.template", tenant)


def _find_job_template_breaches(template: Json | None, field: str, tenant: Tenant) -> Iterator[Breach]:
    """Check the pod template of a promotion's Job."""
    yield from find_template_breaches(template, field, tenant)
    if tenant.max_gpus is not None and count_devices(template):
        yield Breach(f"{field} with GPUs, which maxGpus does not count,", "maxGpus")


def _find_tracking_breaches(
    tracking: Tracking | PromotionTracking,
    tenant: Tenant,
    settings: Settings,
    *,
    field: str = "spec.tracking",
) -> Iterator[Breach]:
    """Check the addresses that get credentials, whether the spec or the chart names them. `field` has them."""
    server, registry = settings.servers(tracking)
    # Both addresses are often the same.
    for address, name in {registry: f"{field}.registryUri", server: f"{field}.uri"}.items():
        if not address:
            continue
        on_databricks = address in (DATABRICKS, UNITY_CATALOG)
        uri = DATABRICKS if on_databricks else normalize_address(address)
        credentials = {each.credentials for each in tenant.tracking if normalize_address(each.uri) == uri}
        if not credentials:
            yield Breach(f"{name} {strip_user(address)}", "tracking")
        elif "Installation" not in credentials and not is_own_login(tracking.secret_ref):
            yield Breach(
                f"{name} {strip_user(address)} with the credentials of the installation, because {field}.secretRef names no required Secret,",
                "tracking",
            )


def _find_model_breaches(model: str, field: str, registry: str, tenant: Tenant) -> Iterator[Breach]:
    if not matches(model, tenant.models, ignore_case=registry == UNITY_CATALOG):
        yield Breach(f"{field} {model}", "models")


def _find_alias_breaches(alias: str, field: str, registry: str, tenant: Tenant) -> Iterator[Breach]:
    if not matches(alias, tenant.aliases, ignore_case=registry == UNITY_CATALOG):
        yield Breach(f"{field} {alias}", "aliases")


def _find_approval_breaches(spec: ModelPromotionSpec, endpoint: str, tenant: Tenant) -> Iterator[Breach]:
    """Check that a promotion names an endpoint of a rule for approvals only if such a rule is about its alias."""
    guards = [rule for rule in tenant.approvals if matches(endpoint, rule.endpoints, ignore_case=True)]
    rules = _find_approval_rules(spec.model, spec.alias, tenant)
    if guards and not any(rule in rules for rule in guards):
        what = f"spec.serving.endpoint {endpoint}, which only a promotion of an alias that needs approvals may name,"
        yield Breach(what, "approvals")


def _find_approval_rules(model: str, alias: str, tenant: Tenant) -> list[ApprovalRule]:
    # NB: in every registry without regard to case, as the admission policy: an MLflow server on MySQL moves `champion` for `Champion`.
    return [
        rule
        for rule in tenant.approvals
        if matches(alias, [rule.alias], ignore_case=True) and matches(model, rule.models, ignore_case=True)
    ]


def _find_preparation_breaches(
    written: FineTuneJobSpec, spec: FineTuneJobSpec, tenant: Tenant, settings: Settings
) -> Iterator[Breach]:
    preparation = spec.prepare
    if preparation is None:
        return
    spark = preparation.spark
    if spark.mode in _MODES_WITH_TOKEN and tenant.pods == "Scheduling":
        yield from _find_code_in_driver(written.pods, spark.mode)
    if spark.databricks is None:
        return
    login, field = find_named_login(spec, settings), "spec.data.prepare.spark.databricks"
    yield from _find_principal_breaches(login, field, tenant)
    compute, clusters = spark.databricks.compute, _access(tenant).clusters
    if compute.existing_cluster and not matches(compute.existing_cluster.cluster_id, clusters):
        cluster_id = compute.existing_cluster.cluster_id
        yield Breach(f"{field}.compute.existingCluster {cluster_id}", "databricks.clusters")
    if compute.new_cluster:
        bounds = (compute.new_cluster.instance_pool_id, compute.new_cluster.policy_id)
        if not any(bound and matches(bound, clusters) for bound in bounds):
            yield Breach(
                f"{field}.compute.newCluster without an instance pool or a policy", "databricks.clusters"
            )


def _find_code_in_driver(pods: Pods, mode: str) -> Iterator[Breach]:
    """Check that a driver with an API token runs nothing but the code of the installation's image."""
    because = f", because with spark.mode {mode} the pod has an API token"
    if pods.prepare.image:
        yield Breach(f"spec.pods.prepare.image {pods.prepare.image}{because},", "pods")
    for role, settings in (("all", pods.all), ("prepare", pods.prepare)):
        field = f"spec.pods.{role}"
        for variable in settings.env:
            if variable.name not in _DRIVER_VARIABLES:
                yield Breach(f"{field}.env {variable.name}{because},", "pods")
        if settings.env_from:
            # NB: the names of the variables are in objects that can change later.
            yield Breach(f"{field}.envFrom{because},", "pods")
        if any(items(settings.template, "volumes")):
            # NB: a volume can replace one of the operator with the same name, such as that of the home folder.
            yield Breach(f"{field}.template with volumes{because},", "pods")
        for container in containers(settings.template, MAIN_CONTAINER):
            for name in ("env", "envFrom", "volumeMounts"):
                if container.get(name):
                    yield Breach(f"{field}.template with {name}{because},", "pods")


def _find_pod_breaches(pods: Pods, tenant: Tenant) -> Iterator[Breach]:
    for role, settings in pods.each():
        field = f"spec.pods.{role}"
        yield from find_account_breaches(settings.service_account_name, f"{field}.serviceAccountName", tenant)
        shared = pods.all.template if role != "all" else None
        yield from find_template_breaches(settings.template, f"{field}.template", tenant, shared=shared)


def _find_remote_code_breaches(spec: FineTuneJobSpec, tenant: Tenant) -> Iterator[Breach]:
    if tenant.trust_remote_code:
        return
    if spec.model and spec.model.trust_remote_code:
        yield Breach("spec.model.trustRemoteCode", "trustRemoteCode")
    distillation = spec.objective.distillation
    if distillation and distillation.teacher_trust_remote_code:
        yield Breach("spec.objective.distillation.teacherTrustRemoteCode", "trustRemoteCode")


def _find_serving_breaches(serving: Serving, tenant: Tenant) -> Iterator[Breach]:
    if not matches(serving.endpoint, tenant.endpoints):
        yield Breach(f"spec.serving.endpoint {serving.endpoint}", "endpoints")
    if serving.databricks is None:
        return
    field = "spec.serving.databricks"
    yield from _find_principal_breaches(serving.databricks.secret_ref, field, tenant)
    table = serving.databricks.inference_table
    if table and not matches(f"{table.catalog}.{table.schema_}", tenant.models, ignore_case=True):
        yield Breach(f"{field}.inferenceTable {table.catalog}.{table.schema_}", "models")


def _find_principal_breaches(login: LocalReference | None, field: str, tenant: Tenant) -> Iterator[Breach]:
    """Check who logs in to a Databricks workspace."""
    if tenant.databricks is None:
        yield Breach(field, "databricks")
    elif tenant.databricks.principal == "Own" and not is_own_login(login):
        yield Breach(f"{field} without a required Secret in secretRef", "databricks.principal")


def _find_scope_breaches(texts: Iterable[str], tenant: Tenant) -> Iterator[Breach]:
    """Check each reference to a secret of a workspace, wherever it is."""
    scopes = {scope for text in texts for scope in find_scopes(text)}
    for scope in sorted(scopes):
        if not matches(scope, _access(tenant).secret_scopes):
            yield Breach(f"{{{{secrets/{scope}}}}}", "databricks.secretScopes")


def _access(tenant: Tenant) -> DatabricksAccess:
    return tenant.databricks or DatabricksAccess()


def _list_texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _list_texts(item)
