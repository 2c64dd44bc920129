"""The chart's options, as people expect them of a chart: names, labels, extras, certificates, proxies, defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from integration.chart import CHART, KUBE_VERSION, helm, parts
from integration.chart_without_crds import defaults, environment, objects, operator, pod

Json = dict[str, Any]


def test_defaults_of_jobs_are_what_is_set_and_nothing_else() -> None:
    assert defaults() == {}
    values = (
        "defaults.storage=s3://bucket/root",
        "defaults.checkpoint.everySteps=1000000",
        "defaults.modelCache.claimName=models",
        "defaults.pods.train.template.spec.tolerations[0].operator=Exists",
        "defaults.pods.all.env[0].name=HF_HOME",
        "defaults.pods.all.env[0].value=/models",
    )
    assert defaults(*values) == {
        "storage": "s3://bucket/root",
        "checkpoint": {"everySteps": 1000000},
        "modelCache": {"claimName": "models"},
        "pods": {
            "all": {"env": [{"name": "HF_HOME", "value": "/models"}]},
            "train": {"template": {"spec": {"tolerations": [{"operator": "Exists"}]}}},
        },
    }


def test_a_change_of_the_defaults_restarts_the_operator_and_nothing_else_does() -> None:
    def checksum(*values: str) -> str:
        return str(operator(*values)["spec"]["template"]["metadata"]["annotations"]["checksum/defaults"])

    assert checksum() == checksum("workers=2", "commonLabels.a=b")
    assert checksum() != checksum("defaults.queueName=gpus")


def test_the_defaults_are_mounted_where_the_operator_reads_them() -> None:
    file = Path(environment()["FINETUNE_DEFAULTS"])
    mount = next(item for item in pod()["containers"][0]["volumeMounts"] if item["name"] == "defaults")
    volume = next(item for item in pod()["volumes"] if item["name"] == "defaults")
    assert (mount["mountPath"], mount["readOnly"], file.name) == (str(file.parent), True, "defaults.yaml")
    assert volume["configMap"]["name"] == "finetune-operator-defaults"


def test_workers_and_seconds() -> None:
    variables = environment("workers=4", "pollSeconds=10", "resyncSeconds=60")
    names = ("FINETUNE_WORKERS", "FINETUNE_POLL_SECONDS", "FINETUNE_RESYNC_SECONDS")
    assert [variables[name] for name in names] == ["4", "10", "60"]


def test_extras_are_added_to_what_the_operator_has() -> None:
    values = (
        "extraArgs={--registration-patience-seconds=120}",
        "extraEnv[0].name=MLFLOW_HTTP_REQUEST_TIMEOUT",
        "extraEnv[0].value=90s",
        "extraEnvFrom[0].secretRef.name=proxy",
        "extraVolumes[0].name=more",
        "extraVolumes[0].emptyDir.sizeLimit=1Mi",
        "extraVolumeMounts[0].name=more",
        "extraVolumeMounts[0].mountPath=/more",
    )
    plain, more = pod(), pod(*values)
    container = more["containers"][0]
    assert container["args"] == ["--registration-patience-seconds=120"]
    assert container["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert container["env"] == [
        *plain["containers"][0]["env"],
        {"name": "MLFLOW_HTTP_REQUEST_TIMEOUT", "value": "90s"},
    ]
    assert container["volumeMounts"] == [
        *plain["containers"][0]["volumeMounts"],
        {"name": "more", "mountPath": "/more"},
    ]
    assert more["volumes"] == [*plain["volumes"], {"name": "more", "emptyDir": {"sizeLimit": "1Mi"}}]


def test_two_replicas_on_different_nodes_of_which_a_drain_leaves_one() -> None:
    chart_objects = objects()
    deployment = chart_objects["Deployment", "finetune-operator"]["spec"]
    selector = deployment["selector"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert chart_objects["PodDisruptionBudget", "finetune-operator"]["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": selector,
    }
    on_other_nodes = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
    over_zones = {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector,
    }
    assert pod()["affinity"] == {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": on_other_nodes}
            ]
        }
    }
    assert pod()["topologySpreadConstraints"] == [over_zones]


def test_one_replica_can_be_drained() -> None:
    chart_objects = objects("replicas=1")
    assert chart_objects["Deployment", "finetune-operator"]["spec"]["replicas"] == 1
    assert ("PodDisruptionBudget", "finetune-operator") not in chart_objects


def test_places_of_ones_own_replace_those_of_the_chart() -> None:
    values = (
        "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
        "topologySpreadConstraints[0].topologyKey=rack",
    )
    assert list(pod(*values)["affinity"]) == ["nodeAffinity"]
    assert pod(*values)["topologySpreadConstraints"] == [{"topologyKey": "rack"}]


def test_the_lease_has_the_name_of_the_release_and_the_replica_that_of_its_pod() -> None:
    variables = environment("leaseSeconds=30")
    names = ("FINETUNE_LEASE_NAME", "FINETUNE_LEASE_SECONDS", "FINETUNE_REPLICA")
    assert [variables[name] for name in names] == ["finetune-operator", "30", "finetune-operator-pod"]


CERTIFICATES = {
    "a ConfigMap": ("caBundle.configMap=authorities", {"configMap": {"name": "authorities"}}),
    "a Secret": ("caBundle.secret=authorities", {"secret": {"secretName": "authorities"}}),
}


@pytest.mark.parametrize(("value", "source"), CERTIFICATES.values(), ids=CERTIFICATES)
@pytest.mark.parametrize("name", ["finetune-operator", "finetune-operator-mlflow"])
def test_certificates_of_ones_own(name: str, value: str, source: Json) -> None:
    pod_spec = pod(value, "caBundle.key=all.pem", "mlflow.enabled=true", name=name)
    container = pod_spec["containers"][0]
    variables = {
        item["name"]: item["value"]
        for item in container["env"]
        if item["name"].endswith(("_FILE", "_BUNDLE"))
    }
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
    assert variables == dict.fromkeys(names, "/etc/finetune-ca/all.pem")
    assert {"name": "ca-bundle", **source} in pod_spec["volumes"]
    mount = {"name": "ca-bundle", "mountPath": "/etc/finetune-ca", "readOnly": True}
    assert mount in container["volumeMounts"]


def proxies(name: str, *values: str) -> dict[str, str | None]:
    """The variables of a proxy in a Deployment's pod."""
    container = pod(*values, "mlflow.enabled=true", name=name)["containers"][0]
    return {item["name"]: item.get("value") for item in container["env"] if item["name"].endswith("_PROXY")}


@pytest.mark.parametrize("name", ["finetune-operator", "finetune-operator-mlflow"])
def test_a_proxy_is_not_used_for_what_is_in_the_cluster(name: str) -> None:
    values = (
        "proxy.http=http://p.example.com:3128",
        "proxy.https=http://q.example.com",
        "proxy.noProxy={.example.com}",
    )
    assert proxies(name, *values) == {
        "HTTP_PROXY": "http://p.example.com:3128",
        "HTTPS_PROXY": "http://q.example.com",
        "NO_PROXY": "localhost,127.0.0.1,$(KUBERNETES_SERVICE_HOST),.svc,.cluster.local,.example.com",
    }


@pytest.mark.parametrize("name", ["finetune-operator", "finetune-operator-mlflow"])
def test_hosts_without_a_proxy_where_the_proxy_comes_from_a_secret(name: str) -> None:
    assert proxies(name) == {}
    assert proxies(name, "proxy.noProxy={.example.com}") == {
        "NO_PROXY": "localhost,127.0.0.1,$(KUBERNETES_SERVICE_HOST),.svc,.cluster.local,.example.com"
    }


def test_on_openshift_no_pod_names_a_user() -> None:
    plain = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for name in ("finetune-operator", "finetune-operator-mlflow"):
        assert pod("openshift=true", "mlflow.enabled=true", name=name)["securityContext"] == plain
    assert environment("openshift=true")["FINETUNE_POD_USER"] == "0"
    assert "FINETUNE_POD_USER" not in environment()


def test_a_security_context_can_be_changed_field_by_field() -> None:
    pod_spec = pod("podSecurityContext.fsGroup=null", "securityContext.seccompProfile.type=RuntimeDefault")
    assert "fsGroup" not in pod_spec["securityContext"]
    assert pod_spec["securityContext"]["runAsUser"] == 65532
    assert pod_spec["containers"][0]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_labels_of_ones_own_are_on_every_object_and_pod() -> None:
    values = (
        "commonLabels.team=ml",
        "commonLabels.app\\.kubernetes\\.io/name=mine",
        "mlflow.enabled=true",
        "argocd.healthConfigMap.enabled=true",
        "networkPolicy.enabled=true",
        "metrics.serviceMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
        "metrics.grafanaDashboard.enabled=true",
    )
    chart_parts = parts(*values)
    templates = [part["spec"]["template"] for part in chart_parts if part["kind"] == "Deployment"]
    assert [
        part for part in [*chart_parts, *templates] if part["metadata"]["labels"].get("team") != "ml"
    ] == []
    # A selector's labels are the chart's own.
    for part in (part for part in chart_parts if part["kind"] == "Deployment"):
        assert (
            part["spec"]["selector"]["matchLabels"].items()
            <= part["spec"]["template"]["metadata"]["labels"].items()
        )
        assert "team" not in part["spec"]["selector"]["matchLabels"]


NAMES = {
    "the release has the chart's name": ("finetune-operator", (), "finetune-operator"),
    "the release has another": ("ml", (), "ml-finetune-operator"),
    "another name for the chart": ("ml", ("nameOverride=tuner",), "ml-tuner"),
    "another name for all": ("ml", ("fullnameOverride=tuner",), "tuner"),
}


@pytest.mark.parametrize(("release", "values", "name"), NAMES.values(), ids=NAMES)
def test_names(release: str, values: tuple[str, ...], name: str) -> None:
    settings = [
        word for value in ("mlflow.enabled=true", "crds.enabled=false", *values) for word in ("--set", value)
    ]
    done = helm("template", release, str(CHART), "--kube-version", KUBE_VERSION, *settings)
    assert done.returncode == 0, done.stderr
    object_names = {part["metadata"]["name"] for part in yaml.safe_load_all(done.stdout) if part}
    assert object_names == {
        f"{name}{suffix}" for suffix in ("", "-defaults", "-edit", "-leases", "-metrics", "-mlflow", "-view")
    }


ACCOUNTS = {
    "the chart's": ((), "finetune-operator", True),
    "the chart's by another name": (("serviceAccount.name=mine",), "mine", True),
    "one that is there": (("serviceAccount.create=false", "serviceAccount.name=mine"), "mine", False),
}


@pytest.mark.parametrize(("values", "name", "made"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_the_service_account(values: tuple[str, ...], name: str, made: bool) -> None:
    chart_objects = objects(*values)
    assert pod(*values)["serviceAccountName"] == name
    assert (("ServiceAccount", name) in chart_objects) is made
    binding = chart_objects["ClusterRoleBinding", "finetune-operator"]
    assert [subject["name"] for subject in binding["subjects"]] == [name]


def test_mlflow_has_an_account_where_one_is_named() -> None:
    name = "finetune-operator-mlflow"
    assert "serviceAccountName" not in pod("mlflow.enabled=true", name=name)
    pod_spec = pod("mlflow.enabled=true", "mlflow.serviceAccountName=mlflow", name=name)
    assert (pod_spec["serviceAccountName"], pod_spec["automountServiceAccountToken"]) == ("mlflow", False)


BLANK = (
    "commonLabels",
    "imagePullSecrets",
    "global.imagePullSecrets",
    "defaults.imagePullSecrets",
    "proxy.noProxy",
    "mlflow.allowedHosts",
    "resources",
    "podSecurityContext",
    "watchNamespaces",
    "tolerations",
)


def test_lists_and_labels_may_be_blank() -> None:
    """A list whose items are all commented out is null."""
    values = ("mlflow.enabled=true", "openshift=true", "proxy.http=http://p.example.com")
    chart_objects = objects(*values, *(f"{name}=null" for name in BLANK))
    assert chart_objects.keys() == objects(*values).keys()


def test_a_service_monitor_in_prometheus_own_namespace() -> None:
    monitor = objects(
        "metrics.serviceMonitor.enabled=true",
        "metrics.serviceMonitor.namespace=monitoring",
        "metrics.serviceMonitor.scrapeTimeout=10s",
        "metrics.serviceMonitor.labels.release=prometheus",
        "metrics.serviceMonitor.relabelings[0].targetLabel=cluster",
        "metrics.serviceMonitor.relabelings[0].replacement=a",
        "metrics.serviceMonitor.metricRelabelings[0].action=labeldrop",
        "metrics.serviceMonitor.metricRelabelings[0].regex=instance",
    )["ServiceMonitor", "finetune-operator"]
    assert (monitor["metadata"]["namespace"], monitor["metadata"]["labels"]["release"]) == (
        "monitoring",
        "prometheus",
    )
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["fs"]}
    assert monitor["spec"]["endpoints"] == [
        {
            "port": "metrics",
            "interval": "30s",
            "scrapeTimeout": "10s",
            "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
            "metricRelabelings": [{"action": "labeldrop", "regex": "instance"}],
        }
    ]


def test_networkpolicies_open_ports_and_mlflow_to_those_who_need_it() -> None:
    key = "NetworkPolicy", "finetune-operator-mlflow"
    http = [{"port": "http"}]
    values = ("mlflow.enabled=true", "networkPolicy.enabled=true")
    assert [name for kind, name in objects("mlflow.enabled=true") if kind == "NetworkPolicy"] == []
    assert objects(*values)[key]["spec"]["ingress"] == [{"ports": http}]
    policy = objects(*values, "networkPolicy.mlflowFrom[0].ipBlock.cidr=10.0.0.0/8")[key]
    selectors = {
        name: {"matchLabels": objects(*values)["Deployment", name]["spec"]["selector"]["matchLabels"]}
        for name in ("finetune-operator", key[1])
    }
    pods_of_jobs = {"matchExpressions": [{"key": "finetune.dev/job-uid", "operator": "Exists"}]}
    assert policy["spec"] == {
        "podSelector": selectors[key[1]],
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "ports": http,
                "from": [
                    {"podSelector": selectors["finetune-operator"]},
                    {"namespaceSelector": {}, "podSelector": pods_of_jobs},
                    {"ipBlock": {"cidr": "10.0.0.0/8"}},
                ],
            }
        ],
    }
