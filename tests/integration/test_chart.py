"""The chart: rendered by helm, accepted by a real API server, and no more powerful than it says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.operator_processes.servers import Plane
from integration.chart import (
    CHART,
    KUBE_VERSION,
    allowed_by,
    environment,
    helm,
    notes_of,
    objects,
    parts,
    rendered,
)

POLICIES = "networking.k8s.io/networkpolicies"
RESOURCES = ("finetunejobs", "modelpromotions", "finetuneschedules")
Json = dict[str, Any]

VARIANTS = {
    "as it comes": (),
    "with MLflow": ("mlflow.enabled=true", "mlflow.artifactsDestination=s3://bucket/mlflow"),
    "two namespaces": ("watchNamespaces={research,products}",),
    "locked in": (
        "networkPolicy.enabled=true",
        "networkPolicy.mlflowFrom[0].ipBlock.cidr=10.0.0.0/8",
        "mlflow.enabled=true",
        "rbac.trackingSecrets=false",
        "imagePullSecrets[0].name=registry",
    ),
    "on OpenShift": ("openshift=true", "mlflow.enabled=true"),
    "behind a proxy": (
        "mlflow.enabled=true",
        "caBundle.configMap=authorities",
        "proxy.https=http://proxy.example.com:3128",
    ),
    "with defaults": (
        "defaults.storage=s3://bucket/root",
        "defaults.pods.all.envFrom[0].secretRef.name=s3",
        "defaults.pods.train.template.spec.tolerations[0].operator=Exists",
        "commonLabels.team=ml",
    ),
    "with Spark's executors": (
        "spark.namespaces={research,products}",
        "spark.serviceAccount.annotations.a=b",
    ),
    "for tenants": (
        "tenancy.tenants[0].namespaces={research}",
        "tenancy.tenants[1].namespaces={products}",
        "tenancy.tenants[1].pods=Any",
    ),
    "for tenants by a pattern": (
        "tenancy.tenants[0].namespaces={research,products-*}",
        "rbac.sparkApplications=true",
    ),
    "with a dashboard": ("metrics.grafanaDashboard.enabled=true", "metrics.grafanaDashboard.labels.team=ml"),
    "with Argo CD": ("argocd.healthConfigMap.enabled=true", "argocd.healthConfigMap.labels.team=ml"),
    "one replica": ("replicas=1",),
    "without CRDs": ("crds.enabled=false", "rbac.aggregate=false", "metrics.service=false"),
}


def test_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_api_server_accepts(values: tuple[str, ...], plane: Plane, kubeconfig: Path) -> None:
    kubectl = [str(plane.kubectl), "--kubeconfig", str(kubeconfig)]
    for namespace in ("fs", "research", "products"):
        subprocess.run([*kubectl, "create", "namespace", namespace], capture_output=True, check=False)
    # NB: the API server takes seconds for the rules of the CRDs, which all variants have in common; labels differ.
    has_crds = not values or any(value.startswith("commonLabels") for value in values)
    values = values if has_crds else ("crds.enabled=false", *values)
    # The API server warns of a pod that the standard would refuse.
    warn = ("pod-security.kubernetes.io/warn=restricted", "--overwrite")
    subprocess.run([*kubectl, "label", "namespace", "fs", *warn], capture_output=True, check=True)
    apply = [*kubectl, "apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename", "-"]
    done = subprocess.run(apply, input=rendered(*values), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(parts(*values))


def test_pods_are_restricted() -> None:
    for (kind, _), deployment in objects("mlflow.enabled=true").items():
        if kind == "Deployment":
            pod = deployment["spec"]["template"]["spec"]
            assert pod["securityContext"] == {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "fsGroup": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert [container["securityContext"] for container in pod["containers"]] == [
                {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
            ]


def test_operator_may_do_this_and_no_more() -> None:
    allowed = allowed_by(objects()["ClusterRole", "finetune-operator"])
    applied = ("get", "list", "watch", "create", "patch", "delete")
    assert allowed == {
        *((f"finetune.dev/{name}", verb) for name in RESOURCES for verb in ("list", "watch")),
        # Patched for their finalizers; a FineTuneSchedule has none.
        *((f"finetune.dev/{name}", verb) for name in RESOURCES[:2] for verb in ("get", "patch")),
        # The jobs of schedules, and the trials of a sweep.
        *(("finetune.dev/finetunejobs", verb) for verb in ("create", "delete")),
        *((f"finetune.dev/{name}/status", "patch") for name in RESOURCES),
        # For owner references.
        *((f"finetune.dev/{name}/finalizers", "update") for name in RESOURCES),
        *((name, verb) for name in ("batch/jobs", "services", "configmaps", POLICIES) for verb in applied),
        # Its uid is a tag of a run.
        ("namespaces", "get"),
        # Created as dry runs only.
        *(("pods", verb) for verb in ("list", "watch", "create")),
        # Whether Spark's driver may create pods.
        ("authorization.k8s.io/localsubjectaccessreviews", "create"),
        # Which of several jobs prepares. That of an alias is in the operator's namespace.
        *(("coordination.k8s.io/leases", verb) for verb in ("get", "create", "delete")),
        *(("events", verb) for verb in ("create", "list")),
        ("secrets", "get"),
        # For people: why a job waits, and on what it runs.
        ("kueue.x-k8s.io/localqueues", "list"),
        ("kueue.x-k8s.io/workloads", "list"),
        ("visibility.kueue.x-k8s.io/localqueues/pendingworkloads", "get"),
        ("nodes", "get"),
        ("nodes", "list"),
    }


def test_what_only_tells_people_more_can_be_left_out() -> None:
    optional_resources = {
        "kueue.x-k8s.io/localqueues",
        "kueue.x-k8s.io/workloads",
        "visibility.kueue.x-k8s.io/localqueues/pendingworkloads",
        "nodes",
    }
    values = ("rbac.kueue=false", "rbac.nodes=false")
    allowed = allowed_by(objects(*values)["ClusterRole", "finetune-operator"])
    assert {name for name, _ in allowed} & optional_resources == set()


def test_the_operator_has_rights_on_networkpolicies_if_it_creates_them() -> None:
    values = "networkPolicy.jobs=false"
    roles = [objects(*variant)["ClusterRole", "finetune-operator"] for variant in ((), (values,))]
    verbs = {"get", "list", "watch", "create", "patch", "delete"}
    assert allowed_by(roles[0]) - allowed_by(roles[1]) == {(POLICIES, verb) for verb in verbs}
    settings = [environment(*variant)["FINETUNE_NETWORK_POLICIES"] for variant in ((), (values,))]
    assert settings == ["true", "false"]


def test_sparkapplications_take_rights_that_are_asked_for() -> None:
    before = allowed_by(objects()["ClusterRole", "finetune-operator"])
    after = allowed_by(objects("rbac.sparkApplications=true")["ClusterRole", "finetune-operator"])
    verbs = ("get", "list", "create", "delete")
    assert after - before == {
        *(("sparkoperator.k8s.io/sparkapplications", verb) for verb in verbs),
        ("pods", "delete"),
    }


def test_sparks_drivers_may_do_this_and_no_more_in_the_namespaces_that_are_named() -> None:
    chart_objects = objects("spark.namespaces={research}")
    assert {
        key: chart_objects[key]["metadata"]["namespace"] for key in chart_objects if "spark" in key[1]
    } == {
        ("ServiceAccount", "finetune-spark"): "research",
        ("Role", "finetune-operator-spark"): "research",
        ("RoleBinding", "finetune-operator-spark"): "research",
    }
    verbs = ("get", "list", "watch", "create", "delete", "deletecollection")
    assert allowed_by(chart_objects["Role", "finetune-operator-spark"]) == {("pods", verb) for verb in verbs}
    assert [key for key in objects() if "spark" in key[1]] == []


def test_an_account_that_exists_gets_the_rights_of_sparks_drivers() -> None:
    values = ("spark.serviceAccount.create=false", "spark.serviceAccount.name=mine")
    chart_objects = objects("spark.namespaces={research}", *values)
    assert ("ServiceAccount", "mine") not in chart_objects
    subjects = chart_objects["RoleBinding", "finetune-operator-spark"]["subjects"]
    assert subjects == [{"kind": "ServiceAccount", "name": "mine", "namespace": "research"}]


def test_a_role_of_one_namespace_has_no_rule_for_nodes() -> None:
    role = objects("watchNamespaces={research}")["Role", "finetune-operator"]
    assert "nodes" not in {name for name, _ in allowed_by(role)}


@pytest.mark.parametrize("values", [(), ("watchNamespaces={research}",)], ids=["all", "watched"])
def test_leases_are_kept_in_the_operators_own_namespace(values: tuple[str, ...]) -> None:
    role = objects(*values)["Role", "finetune-operator-leases"]
    assert role["metadata"]["namespace"] == "fs"
    assert allowed_by(role) == {
        ("coordination.k8s.io/leases", verb) for verb in ("get", "create", "patch", "delete")
    }


def test_people_see_and_write_both_resources() -> None:
    chart_objects = objects()
    may = {
        name: {
            (resource, verb)
            for rule in chart_objects["ClusterRole", f"finetune-operator-{name}"]["rules"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for name in ("view", "edit")
    }
    shown = [part for name in RESOURCES for part in (name, f"{name}/status")]
    assert may == {
        "view": {(name, verb) for name in shown for verb in ("get", "list", "watch")},
        "edit": {
            (name, verb)
            for name in RESOURCES
            for verb in ("create", "delete", "deletecollection", "patch", "update")
        },
    }
    aggregated = {
        name: {
            label.rpartition("-")[2]
            for label in chart_objects["ClusterRole", f"finetune-operator-{name}"]["metadata"]["labels"]
            if "aggregate-to" in label
        }
        for name in ("view", "edit")
    }
    assert aggregated == {"view": {"view", "edit", "admin"}, "edit": {"edit", "admin"}}


def test_watched_namespaces_get_a_role_each_and_no_cluster_role() -> None:
    roles = [
        (part["kind"], part["metadata"].get("namespace"))
        for part in yaml.safe_load_all(
            rendered("watchNamespaces={research,products}", "rbac.aggregate=false")
        )
        if "Role" in part["kind"]
    ]
    assert sorted(roles) == [
        ("Role", "fs"),
        ("Role", "products"),
        ("Role", "research"),
        ("RoleBinding", "fs"),
        ("RoleBinding", "products"),
        ("RoleBinding", "research"),
    ]
    assert environment("watchNamespaces={research,products}")["FINETUNE_NAMESPACES"] == "research,products"


def test_environment_is_what_the_operator_reads() -> None:
    from finetune_operator.settings import Settings

    values = {
        name: value
        for name, value in environment("mlflow.enabled=true").items()
        if name.startswith("FINETUNE_")
    }
    assert values.pop("FINETUNE_DEFAULTS") == "/etc/finetune-operator/defaults.yaml"
    assert Settings.from_environment(values) == Settings(
        prep_image="finetune-prep:0.1.0",
        trainer_image="finetune-trainer:0.1.0",
        namespace="fs",
        lease_name="finetune-operator",
        replica="finetune-operator-pod",
        tracking_uri="http://finetune-operator-mlflow.fs.svc:5000",
        tracking_public_url="http://finetune-operator-mlflow.fs.svc:5000",
        network_policies=True,
    )
    assert {
        name for name in values if f"{name.removeprefix('FINETUNE_').lower()}" not in vars(Settings())
    } == set()


def test_given_tracking_server_goes_before_the_one_for_trying_out() -> None:
    values = (
        "mlflow.enabled=true",
        "tracking.uri=https://mlflow.example.com",
        "tracking.publicUrl=https://ml.example.com",
    )
    variables = environment(*values)
    assert (variables["FINETUNE_TRACKING_URI"], variables["FINETUNE_TRACKING_PUBLIC_URL"]) == (
        "https://mlflow.example.com",
        "https://ml.example.com",
    )


# NB: MLflow's own imports warn.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_answers_to_every_name_of_its_service_and_to_no_other() -> None:
    from mlflow.server.security_utils import is_allowed_host_header

    deployment = objects("mlflow.enabled=true", "mlflow.allowedHosts={mlflow.example.com}")
    container = deployment["Deployment", "finetune-operator-mlflow"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    option = next(word for word in container["args"] if word.startswith("--allowed-hosts="))
    hosts = option.partition("=")[2].split(",")
    service = "finetune-operator-mlflow"
    names = [
        service,
        f"{service}.fs",
        f"{service}.fs.svc",
        f"{service}.fs.svc.cluster.local",
        "localhost",
        "127.0.0.1",
    ]
    allowed = [*names, *(f"{name}:5000" for name in names), "mlflow.example.com", "mlflow.example.com:8443"]
    assert [host for host in allowed if not is_allowed_host_header(hosts, host)] == []
    assert not is_allowed_host_header(hosts, "evil.example.com:5000")


REFUSED = {
    "no number of replicas": ("replicas=two", "/replicas"),
    "a Lease that is too short": ("leaseSeconds=2", "/leaseSeconds"),
    "a slip of the pen": ("image.opertor=x", "additional properties 'opertor' not allowed"),
    "an image as one word, as it was": ("image.operator=a/b:1", "/image/operator"),
    "a pull policy of all images, as it was": (
        "image.pullPolicy=Always",
        "additional properties 'pullPolicy' not allowed",
    ),
    "pull secrets where they were": (
        "image.pullSecrets={a}",
        "additional properties 'pullSecrets' not allowed",
    ),
    "an image without a name": ("image.operator.repository=", "/image/operator/repository"),
    "a default that there is not": ("defaults.storge=s3://a/b", "additional properties 'storge' not allowed"),
    "certificates from two places": ("caBundle.configMap=a,caBundle.secret=b", "/caBundle"),
    "a log level": ("log.level=loud", "/log/level"),
    "a tracking server without a scheme": ("tracking.uri=mlflow", "/tracking/uri"),
    "a size": ("mlflow.persistence.size=big", "/mlflow/persistence/size"),
    "defaults without a value": ("defaults=null", "missing property 'defaults'"),
    "an account that nothing names": ("serviceAccount.create=false", "/serviceAccount/name"),
    "tenants that are blank": ("tenancy.tenants=null", "/tenancy/tenants"),
    "a tenant without namespaces": ("tenancy.tenants[0].pods=Any", "missing property 'namespaces'"),
    "a namespace that cannot be": ("tenancy.tenants[0].namespaces={Team}", "/tenancy/tenants/0/namespaces/0"),
    "a workspace without an audience": (
        "databricks.host=https://example.cloud.databricks.com",
        "/databricks/tokenAudience",
    ),
    "a workspace without a scheme": ("databricks.host=example.cloud.databricks.com", "/databricks/host"),
    "a workspace with a password": ("databricks.host=https://me:secret@example.com", "/databricks/host"),
}


@pytest.mark.parametrize(("value", "why"), REFUSED.values(), ids=REFUSED)
def test_wrong_values_are_refused(value: str, why: str) -> None:
    done = helm("template", "x", str(CHART), "--kube-version", KUBE_VERSION, "--set", value)
    assert done.returncode != 0
    assert why in done.stderr


@pytest.mark.parametrize("name", RESOURCES)
def test_crd_is_kept_unless_asked(name: str) -> None:
    crd = ("CustomResourceDefinition", f"{name}.finetune.dev")
    policies = [
        objects(f"crds.keep={keep}")[crd]["metadata"]["annotations"].get("helm.sh/resource-policy")
        for keep in ("true", "false")
    ]
    assert policies == ["keep", None]
    assert crd not in objects("crds.enabled=false")


WAVE = "argocd.argoproj.io/sync-wave"


def test_argo_cd_orders_only_the_crds_before_all_else() -> None:
    """A sync waits until a wave is healthy: pods before their ServiceAccount, rights or ConfigMap never are."""
    values = ("mlflow.enabled=true", "argocd.healthConfigMap.enabled=true", "networkPolicy.enabled=true")
    waves = {
        (part["kind"] == "CustomResourceDefinition", part["metadata"].get("annotations", {}).get(WAVE))
        for part in parts(*values)
    }
    assert waves == {(True, "-2"), (False, None)}


def test_the_sample_of_argo_cd_has_values_of_the_chart() -> None:
    applications = yaml.safe_load_all((CHART / "argocd" / "application.yaml").read_text(encoding="utf-8"))
    values = next(applications)["spec"]["source"]["helm"]["valuesObject"]
    settings = [
        word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")
    ]
    done = helm("template", "x", str(CHART), "--kube-version", KUBE_VERSION, *settings)
    assert done.returncode == 0, done.stderr
    assert "registry.example.com/ml/finetune-trainer:0.1.0-cu130" in done.stdout


def test_notes_say_what_to_do_next(kubeconfig: Path) -> None:
    notes = notes_of(kubeconfig, "mlflow.enabled=true")
    assert "is installed in namespace fs." in notes
    assert "kubectl -n fs rollout status deployment/finetune-operator" in notes
    assert "kubectl -n fs port-forward service/finetune-operator-mlflow 5000" in notes
    assert "kubectl explain modelpromotion.spec" in notes
    assert "kubectl get modelpromotions -w" in notes
    unreachable = [line for line in notes.splitlines() if line.startswith("WARNING: image.")]
    assert [line.split()[1] for line in unreachable] == ["image.operator", "image.prep", "image.trainer"]
    assert "delete the promotions that have onDelete: RemoveAlias" in notes


def test_notes_name_the_defaults_and_warn_of_no_image_that_has_a_registry(kubeconfig: Path) -> None:
    values = ("global.imageRegistry=r.example.com", "defaults.queueName=gpus", "defaults.storage=s3://a/b")
    notes = notes_of(kubeconfig, *values)
    assert "WARNING" not in notes
    assert "Jobs get these defaults: queueName, storage." in notes
