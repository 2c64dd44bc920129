"""What the demo puts into the cluster: the object store, the chart, the corpus and the base model."""

from __future__ import annotations

import json
import secrets
import subprocess
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.references import Reference
from demo.kubectl import DemoError, Json, explain_unready, render
from demo.place import REPOSITORY, Place
from demo.wait import MAX_SECONDS, ProgressLimit, wait_until_complete
from finetune_crds.base import GROUP
from finetune_crds.resources import RESOURCES

if TYPE_CHECKING:
    from demo.terminal import Terminal

CRDS = tuple(f"{kind.PLURAL}.{GROUP}" for kind in RESOURCES)
CHART = REPOSITORY / "charts" / "finetune-operator"
SAMPLES = REPOSITORY / "crds" / "samples"
MANIFESTS = Path(__file__).parent / "manifests"
SCRIPTS = Path(__file__).parent / "scripts"
# The demo uses its own names, so that it does not touch another installation on an existing cluster.
SYSTEM = "finetune-demo-system"
NAMESPACE = "demo"
RELEASE = "finetune-operator-demo"
TRACKING_URI = f"http://{RELEASE}-mlflow.{SYSTEM}.svc:5000"
BROWSER_URL = "http://localhost:5000"
CORPUS = "s3://finetune/corpus/docstrings"
PREFERENCES = "s3://finetune/corpus/preferences"
BASE_MODEL = "s3://finetune/models/docstring-llama-base"
STORAGE = "s3://finetune/jobs"
PRETRAINING_STEPS = 110
CRASHES = 3


@dataclass(frozen=True)
class Installation:
    """The demo's things on a cluster.

    Attributes:
        place: the cluster and its images.
        terminal: where the progress is shown.
        max_seconds: how long each wait may take, also where there is progress.
    """

    place: Place
    terminal: Terminal
    max_seconds: float = MAX_SECONDS

    def object_store(self) -> None:
        """The namespaces, the S3 gateway, and a Secret with its credentials for whoever needs them."""
        kubectl = self.place.kubectl
        for namespace in (NAMESPACE, SYSTEM):
            kubectl.apply(render(MANIFESTS / "namespace.yaml", {"namespace": namespace}))
        secret_of_gateway = kubectl.get("secret", "s3-credentials", "--namespace", NAMESPACE)
        credentials = (
            {name: b64decode(value).decode() for name, value in secret_of_gateway["data"].items()}
            if secret_of_gateway
            else _credentials()
        )
        for namespace in (NAMESPACE, SYSTEM):
            metadata = {"name": "s3-credentials", "namespace": namespace}
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": credentials}
            kubectl.apply(json.dumps(secret))
        values = {"namespace": NAMESPACE, "versitygw_image": self.place.versitygw_image}
        kubectl.apply(render(MANIFESTS / "object-store.yaml", values))

    def chart(self, *values: str) -> None:
        """The operator, and an MLflow server for evaluation."""
        place = self.place
        images = {
            "image.operator": place.operator_image,
            "image.prep": place.prep_image,
            "image.trainer": place.trainer_image,
            "mlflow.image": place.trainer_image,
        }
        # NB: a tag of digits alone would be taken for a number.
        strings = [value for path, image in images.items() for value in Reference.of(image).values(path)]
        settings = [
            # One machine runs the whole cluster: a second replica would survive nothing more.
            "replicas=1",
            "mlflow.enabled=true",
            "mlflow.artifactsDestination=s3://finetune/mlflow",
            "mlflow.envFromSecret=s3-credentials",
            f"tracking.publicUrl={BROWSER_URL}",
            # What a platform team sets once, so that a job need not say it.
            f"defaults.storage={STORAGE}",
            "defaults.pods.all.envFrom[0].secretRef.name=s3-credentials",
            *values,
        ]
        command = ["upgrade", "--install", RELEASE, str(CHART)]
        command += ["--namespace", SYSTEM]
        command += [word for setting in strings for word in ("--set-string", setting)]
        command += [word for setting in settings for word in ("--set", setting)]
        self._helm(*command)

    def remove(self) -> None:
        """Take everything out of a cluster that stays."""
        # While the operator is there: it takes the finalizers away.
        for kind in ("finetuneschedules", "modelpromotions", "finetunejobs"):
            self.place.kubectl("delete", kind, "--all", "--namespace", NAMESPACE, check=False, timeout=300)
        self._helm("uninstall", RELEASE, "--namespace", SYSTEM, "--ignore-not-found")
        for namespace in (NAMESPACE, SYSTEM):
            self.place.kubectl("delete", "namespace", namespace, "--ignore-not-found", timeout=300)
        for name in CRDS:
            crd = self.place.kubectl.get("crd", name)
            if crd and crd["metadata"].get("annotations", {}).get("meta.helm.sh/release-name") == RELEASE:
                self.place.kubectl("delete", "crd", name)

    def wait_ready(self) -> None:
        """Wait until the object store, MLflow and the operator answer."""
        limit = ProgressLimit("the installation", max_seconds=self.max_seconds)
        wait_until_complete(limit, self._describe_unready, self.terminal)

    def seed(self, pretraining_steps: int = PRETRAINING_STEPS) -> None:
        """Start the Job that creates the corpus and the base model, unless it exists."""
        self._scripts()
        self.start_script(
            "seed",
            f"python corpus.py {CORPUS} --preferences {PREFERENCES}; "
            f"python base_model.py {CORPUS} {BASE_MODEL} --steps {pretraining_steps}",
        )

    def start_script(self, name: str, command: str) -> None:
        """Start a Job that runs scripts of this folder, unless it exists and has not failed."""
        if self.place.kubectl.get("job", name, "--namespace", NAMESPACE) and self._end_of(name) == "Failed":
            self.delete("job", name)
        if self.place.kubectl.get("job", name, "--namespace", NAMESPACE) is None:
            values = {
                "name": name,
                "namespace": NAMESPACE,
                "trainer_image": self.place.trainer_image,
                "command": json.dumps(command),
                "tracking_uri": TRACKING_URI,
            }
            self.place.kubectl.apply(render(MANIFESTS / "script-job.yaml", values))

    def finish_script(self, name: str) -> str:
        """Wait for such a Job, showing its output; return all of it.

        Raises:
            DemoError: it failed, or made no progress for too long.
        """
        limit = ProgressLimit(f"the Job {name}", max_seconds=self.max_seconds)
        shown = 0

        def describe_missing() -> str | None:
            nonlocal shown
            ended = self._end_of(name)
            lines = self._log(name).splitlines()
            for line in lines[shown:]:
                self.terminal.detail(line)
            shown = max(shown, len(lines))
            limit.record(len(lines))
            if ended == "Failed":
                raise DemoError(f"the Job {name} failed: see its output above")
            if ended:
                return None
            return "it runs" if lines else self._describe_start(name)

        wait_until_complete(limit, describe_missing, self.terminal)
        return self._log(name)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object of the demo and wait until it no longer exists."""
        self.place.kubectl(
            "delete",
            kind,
            name,
            "--namespace",
            NAMESPACE,
            "--ignore-not-found",
            "--cascade=foreground",
            timeout=300,
        )

    def apply(self, manifest: Path | str) -> str:
        """Apply a manifest (a file, or its text) to the demo's namespace; return that text."""
        text = manifest.read_text(encoding="utf-8") if isinstance(manifest, Path) else manifest
        self.place.kubectl("apply", "--namespace", NAMESPACE, "--filename", "-", stdin=text)
        return text

    def patch(self, kind: str, name: str, spec: Json) -> None:
        """Merge a change into the spec of an object of the demo, as a user would."""
        change = json.dumps({"spec": spec})
        self.place.kubectl(
            "patch", kind, name, "--namespace", NAMESPACE, "--type", "merge", "--patch", change
        )

    def _scripts(self) -> None:
        scripts = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "demo-scripts", "namespace": NAMESPACE},
            "data": {file.name: file.read_text(encoding="utf-8") for file in SCRIPTS.glob("[!_]*.py")},
        }
        self.place.kubectl.apply(json.dumps(scripts))

    def _helm(self, *arguments: str) -> None:
        command = [str(self.place.helm), "--kubeconfig", str(self.place.kubectl.kubeconfig), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DemoError(f"helm {arguments[0]} failed: {done.stderr.strip()}")

    def _end_of(self, name: str) -> str | None:
        """Failed or Complete; None while the Job runs."""
        job = _required(self.place.kubectl.get("job", name, "--namespace", NAMESPACE))
        ends = {item["type"] for item in job["status"].get("conditions", []) if item["status"] == "True"}
        return next(iter(ends & {"Failed", "Complete"}), None)

    def _describe_start(self, name: str) -> str:
        pods = self.place.kubectl.items("pods", "--namespace", NAMESPACE, "--selector", f"job-name={name}")
        return ", ".join(explain_unready(pods)) or "it starts"

    def _log(self, name: str) -> str:
        return self.place.kubectl("logs", f"job/{name}", "--namespace", NAMESPACE, check=False)

    def _refuse_crashes(self, pods: list[Json]) -> None:
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                continue
            restarts = sum(status["restartCount"] for status in pod["status"].get("containerStatuses", []))
            if restarts >= CRASHES:
                name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
                log = self.place.kubectl("logs", name, "--namespace", namespace, "--previous", check=False)
                raise DemoError(f"the pod {namespace}/{name} has crashed {restarts} times:\n{log[-2000:]}")

    def _describe_unready(self) -> str | None:
        # NB: one call for both kinds: kubectl takes a tenth of a second to start, of processors that are needed elsewhere.
        present = [
            each
            for namespace in (SYSTEM, NAMESPACE)
            for each in self.place.kubectl.items("deployments,pods", "--namespace", namespace)
        ]
        waiting = [each for each in present if each["kind"] == "Deployment" and not _is_ready(each)]
        if not waiting:
            return None
        namespaces = {each["metadata"]["namespace"] for each in waiting}
        pods = [
            each for each in present if each["kind"] == "Pod" and each["metadata"]["namespace"] in namespaces
        ]
        self._refuse_crashes(pods)
        names = ", ".join(each["metadata"]["name"] for each in waiting)
        reasons = "; ".join(explain_unready(pods))
        return f"{names} ({reasons or 'no pods yet'})"


def _is_ready(deployment: Json) -> bool:
    status = deployment["status"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    replicas = deployment["spec"]["replicas"]
    return bool(
        current and status.get("updatedReplicas") == replicas and status.get("readyReplicas") == replicas
    )


def _credentials() -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        "AWS_ENDPOINT_URL": f"http://object-store.{NAMESPACE}.svc:7070",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


def _required(resource: Json | None) -> Json:
    if resource is None:
        raise DemoError("an object of the demo was deleted while the demo runs: start it again")
    return resource
