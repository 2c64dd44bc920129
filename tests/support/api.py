"""The API server as plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.dynamic.exceptions import NotFoundError

Json = dict[str, Any]
_KINDS = {
    "FineTuneJob": "finetune.dev/v1alpha1",
    "ModelPromotion": "finetune.dev/v1alpha1",
    "FineTuneSchedule": "finetune.dev/v1alpha1",
    "OlderJob": "finetune.dev/v1alpha1",
    "OlderPromotion": "finetune.dev/v1alpha1",
    "Application": "argoproj.io/v1alpha1",
    "Job": "batch/v1",
    "Deployment": "apps/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "ValidatingAdmissionPolicy": "admissionregistration.k8s.io/v1",
    "ValidatingAdmissionPolicyBinding": "admissionregistration.k8s.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "Pod": "v1",
    "Service": "v1",
    "ConfigMap": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "Secret": "v1",
    "Namespace": "v1",
    "Event": "v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "ServiceAccount": "v1",
    "ResourceQuota": "v1",
    "Node": "v1",
    "Workload": "kueue.x-k8s.io/v1beta2",
    "ResourceFlavor": "kueue.x-k8s.io/v1beta2",
    "ClusterQueue": "kueue.x-k8s.io/v1beta2",
    "LocalQueue": "kueue.x-k8s.io/v1beta2",
    "SparkApplication": "sparkoperator.k8s.io/v1beta2",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
}


@dataclass
class Api:
    """The API server, as plain JSON."""

    kubeconfig: Path
    _dynamic: Any = field(init=False)

    def __post_init__(self) -> None:
        self._dynamic = dynamic.DynamicClient(
            client.ApiClient(config.load_kube_config(str(self.kubeconfig)) or self._configuration())
        )

    def _configuration(self) -> client.Configuration:
        configuration = client.Configuration()
        config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)
        return configuration

    def _of(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=_KINDS[kind], kind=kind)

    def create(self, body: Json, *, strict: bool = False, dry_run: bool = False) -> Json:
        """Create an object; `strict`: as kubectl does, which has fields refused that the API server does not know."""
        namespace = body["metadata"].get("namespace")
        query = [("fieldValidation", "Strict")] if strict else []
        query += [("dryRun", "All")] if dry_run else []
        resource = self._of(body["kind"]).create(body=body, namespace=namespace, query_params=query)
        return dict(resource.to_dict())

    def warnings(self, body: Json) -> list[str]:
        """Create an object in a strict dry run, and return what the API server warns of."""
        query = [("fieldValidation", "Strict"), ("dryRun", "All")]
        namespace = body["metadata"].get("namespace")
        answer = self._of(body["kind"]).create(
            body=body, namespace=namespace, query_params=query, serialize=False
        )
        return list(answer.headers.getlist("Warning"))

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        try:
            return dict(self._of(kind).get(name=name, namespace=namespace).to_dict())
        except NotFoundError:
            return None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Json]:
        return list(self._of(kind).get(namespace=namespace, label_selector=selector).to_dict()["items"])

    def patch(self, kind: str, namespace: str, name: str, body: Json, *, status: bool = False) -> Json:
        target = self._of(kind)
        target = target.status if status else target
        content_type = "application/merge-patch+json"
        return dict(
            target.patch(body=body, name=name, namespace=namespace, content_type=content_type).to_dict()
        )

    def delete(self, kind: str, namespace: str, name: str) -> None:
        self._of(kind).delete(name=name, namespace=namespace, body={"propagationPolicy": "Background"})
