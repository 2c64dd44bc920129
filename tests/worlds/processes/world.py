"""A namespace of a real API server that an operator watches, and a real MLflow server.

There is no kubelet: a test plays it by writing pod statuses, and kube-controller-manager does the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import yaml
from kubernetes import client

from finetune_crds.contract import TerminationMessage
from finetune_operator import names
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import metric
from support.process import Process
from support.waiting import PATIENCE, wait_for

Json = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"


def _version(kind: str, meta: Json) -> str:
    """The resourceVersion; for a Job or a Pod, whose status other controllers write, only what the operator wrote."""
    if kind not in ("Job", "Pod"):
        return str(meta["resourceVersion"])
    ours = [item for item in meta.get("managedFields", ()) if item["manager"] == names.FIELD_MANAGER]
    return f"{meta['uid']} {meta.get('deletionTimestamp')} {ours}"


@dataclass
class World:
    """One namespace that an operator watches, and MLflow."""

    api: Api
    mlflow: Mlflow
    namespace: str
    patience: float = field(default=PATIENCE, kw_only=True)
    """The timeout of each wait, in seconds."""

    @property
    def model(self) -> str:
        """The registered model of this test."""
        return f"tuned-{self.namespace}"

    def submit(self, body: Json) -> Json:
        """Create a FineTuneJob in the namespace; if it registers a model, it registers this test's, but in Unity Catalog its own."""
        spec = dict(body["spec"])
        if "register" in spec and "." not in spec["register"].get("model", ""):
            spec["register"] = {**spec["register"], "model": self.model}
        return self.api.create(
            {**body, "metadata": {**body["metadata"], "namespace": self.namespace}, "spec": spec}
        )

    def versions(self) -> dict[str, str]:
        """What changes with each write of the operator to anything in the namespace, by kind and name."""
        kinds = ("FineTuneJob", "ModelPromotion", "Job", "Pod", "Service", "ConfigMap", "Event")
        return {
            f"{kind}/{item['metadata']['name']}": _version(kind, item["metadata"])
            for kind in kinds
            for item in self.api.list(kind, self.namespace)
        }

    def settle(self, operator: Process) -> dict[str, str]:
        """Wait until the operator takes passes over a FineTuneJob that write nothing; the versions of everything then."""

        def passes() -> float:
            return metric(operator, "finetune_reconcile_seconds_count", kind="FineTuneJob")

        def settled() -> dict[str, str] | None:
            before, begun = self.versions(), passes()
            wait_for("more passes", lambda: passes() > begun + 1, self.patience)
            return before if before == self.versions() else None

        return wait_for("nothing more is written", settled, self.patience)

    def delete_all(self) -> None:
        """Delete the test's resources, so that the operator has no more work with them."""
        for kind in ("FineTuneJob", "ModelPromotion"):
            for item in self.api.list(kind, self.namespace):
                self.api.delete(kind, self.namespace, item["metadata"]["name"])

    def job(self, name: str) -> Json:
        resource = self.api.get("FineTuneJob", self.namespace, name)
        assert resource is not None, f"FineTuneJob {name} is gone"
        return resource

    def status(self, name: str) -> Json:
        return dict(self.job(name).get("status") or {})

    def condition(self, name: str, kind: str) -> Json:
        for item in self.status(name).get("conditions", []):
            if item["type"] == kind:
                return dict(item)
        return {}

    def wait_phase(self, name: str, phase: str) -> Json:
        def seen() -> Json | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        return wait_for(f"{name} is {phase}", seen, self.patience, instead=lambda: self._dumped(name))

    def wait_condition(self, name: str, kind: str, reason: str) -> Json:
        def seen() -> Json | None:
            condition = self.condition(name, kind)
            return condition if condition.get("reason") == reason else None

        return wait_for(
            f"{name} has {kind} {reason}", seen, self.patience, instead=lambda: self._dumped(name)
        )

    def _dumped(self, name: str) -> str:
        return str(yaml.safe_dump(self.status(name)))

    def wait_pods(self, job: str, count: int) -> list[Json]:
        """The pods of a child Job, once kube-controller-manager has made them."""

        def seen() -> list[Json] | None:
            pods = self.api.list("Pod", self.namespace, f"batch.kubernetes.io/job-name={job}")
            return pods if len(pods) == count else None

        pods = wait_for(f"{count} pods of Job {job}", seen, self.patience)
        return sorted(pods, key=lambda pod: pod["metadata"].get("annotations", {}).get(INDEX, ""))

    def run_pods(self, job: str, count: int) -> list[Json]:
        """Play the kubelet: the pods run and are ready."""
        pods = self.wait_pods(job, count)
        for pod in pods:
            container = pod["spec"]["containers"][0]["name"]
            self._pod_status(pod, "Running", [{"name": container, "state": {"running": {}}}], ready=True)
        return pods

    def end_pods(
        self,
        job: str,
        codes: list[int],
        messages: list[TerminationMessage | str | None],
        *,
        running_container: str | None = None,
    ) -> None:
        """Play the kubelet: the main containers end with these exit codes and termination messages, and their pods with them.

        Args:
            running_container: name of a container that still runs in each pod, which then does not end.
        """
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pods = self.wait_pods(job, len(codes))
        for pod, code, message in zip(pods, codes, messages, strict=True):
            text = message.dump() if isinstance(message, TerminationMessage) else message or ""
            ended = {
                "exitCode": code,
                "message": text,
                "finishedAt": stamp,
                "reason": "Error" if code else "Completed",
            }
            container = pod["spec"]["containers"][0]["name"]
            statuses = [{"name": container, "state": {"terminated": ended}}]
            if running_container:
                statuses.append({"name": running_container, "state": {"running": {}}})
            phase = "Running" if running_container else "Failed" if code else "Succeeded"
            self._pod_status(pod, phase, statuses, ready=False)

    def set_waiting(self, pod: Json, reason: str, message: str) -> None:
        """Play the kubelet: a container cannot start."""
        container = pod["spec"]["containers"][0]["name"]
        waiting = {"name": container, "state": {"waiting": {"reason": reason, "message": message}}}
        self._pod_status(pod, "Pending", [waiting], ready=False)

    def _pod_status(self, pod: Json, phase: str, containers: list[Json], *, ready: bool) -> None:
        image = pod["spec"]["containers"][0]["image"]
        complete = {"image": image, "imageID": "", "restartCount": 0, "ready": ready}
        status = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**complete, **item} for item in containers],
        }
        meta = pod["metadata"]
        self.api.patch("Pod", meta["namespace"], meta["name"], {"status": status}, status=True)

    def remaining_pods(self) -> list[Json]:
        """Play the kubelet, under which pods that are to be deleted stop at once; the others."""
        for pod in self.api.list("Pod", self.namespace):
            if pod["metadata"].get("deletionTimestamp"):
                self.remove_pod(pod)
        return self.api.list("Pod", self.namespace)

    def remove_pod(self, pod: Json) -> None:
        core = client.CoreV1Api(self.api._dynamic.client)
        try:
            core.delete_namespaced_pod(
                pod["metadata"]["name"],
                self.namespace,
                grace_period_seconds=0,
                propagation_policy="Background",
            )
        except client.ApiException as error:
            if error.status != 404:
                raise

    def events(self, reason: str) -> list[Json]:
        return [item for item in self.api.list("Event", self.namespace) if item["reason"] == reason]


@dataclass
class OwnWorld(World):
    """A world whose operator no other test uses."""

    operator: Process

    def restart(self) -> None:
        """Kill the operator and start it again."""
        self.operator.kill()
        self.operator.start()
