"""A Git repository, and the Argo CD Application that keeps a namespace as it says."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cluster import argocd, binaries
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]
T = TypeVar("T")
CHART = Path(__file__).parents[2] / "charts" / "finetune-operator"
SAMPLE = CHART / "argocd" / "application.yaml"
_REFRESH = "argocd.argoproj.io/refresh"
_REQUEST = "finetune.dev/refresh-request"
_SECONDS_PER_REQUEST = 5.0
_AUTHOR = {"GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "ann@example.com"}
_COMMITTER = {"GIT_COMMITTER_NAME": "Ann", "GIT_COMMITTER_EMAIL": "ann@example.com"}


def teach_health(kubeconfig: Path) -> None:
    """Give Argo CD the chart's health scripts, as the chart's notes say."""
    kubectl = binaries.path("kubectl")
    environment = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig),
        "PATH": f"{kubectl.parent}:{os.environ['PATH']}",
    }

    def run(*argv: str, stdin: str | None = None) -> str:
        done = subprocess.run(argv, input=stdin, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "finetune-system"}}
    run("kubectl", "apply", "--filename", "-", stdin=yaml.safe_dump(namespace))
    # In a cluster from an earlier run, helm would refuse an object that it does not own.
    health = ("configmap", "finetune-operator-argocd-health", "--namespace", "finetune-system")
    run("kubectl", "delete", *health, "--ignore-not-found")
    chart = ["finetune-operator", str(CHART), "--namespace", "finetune-system"]
    values = ["--set", "argocd.healthConfigMap.enabled=true", "--set", "crds.enabled=false"]
    helm = str(binaries.path("helm"))
    notes = run(helm, "install", *chart, *values, "--dry-run=server").partition("NOTES:")[2].splitlines()
    rendered = run(helm, "template", *chart, *values, "--validate", "--show-only", "templates/argocd.yaml")
    run("kubectl", "apply", "--filename", "-", stdin=rendered)
    run("sh", "-c", next(line for line in notes if "patch configmap argocd-cm" in line))


@dataclass
class Repository:
    """A repository with one branch, `main`, and manifests in one folder of it."""

    folder: Path
    path: str

    def __post_init__(self) -> None:
        (self.folder / self.path).mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch", "main")

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    def git(self, *argv: str) -> str:
        environment = {**os.environ, **_AUTHOR, **_COMMITTER, "GIT_CONFIG_GLOBAL": os.devnull}
        command = ["git", "-C", str(self.folder), *argv]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def commit(self, message: str, *bodies: Json) -> str:
        """Write each manifest to a file of its name; the commit."""
        for body in bodies:
            file = self.folder / self.path / f"{body['kind'].lower()}-{body['metadata']['name']}.yaml"
            file.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)
        return self.head()

    def revert(self) -> str:
        """Undo the last commit by another one."""
        self.git("revert", "--no-edit", "HEAD")
        return self.head()

    def head(self) -> str:
        return self.git("rev-parse", "HEAD").strip()


@dataclass
class GitOps:
    """The sample's second Application, for a repository of the test's own and the test's namespace."""

    api: Api
    namespace: str
    argocd: argocd.ArgoCD
    repository: Repository
    syncs_seen: list[str] = field(default_factory=list)
    """What `status.sync.status` was, whenever anybody looked, since the last commit was synced."""
    operations_before: int = 0
    requests: Iterator[int] = field(default_factory=itertools.count)

    @property
    def name(self) -> str:
        return self.namespace

    def create(self) -> None:
        """Give Argo CD the Application."""
        sample = list(yaml.safe_load_all(SAMPLE.read_text(encoding="utf-8")))[1]
        sample["metadata"]["name"] = self.name
        sample["spec"]["source"]["repoURL"] = self.repository.url
        sample["spec"]["destination"] = {"server": self.argocd.server, "namespace": self.namespace}
        self.api.create(sample)

    def delete(self) -> None:
        self.api.delete("Application", argocd.NAMESPACE, self.name)

    def application(self) -> Json | None:
        return self.api.get("Application", argocd.NAMESPACE, self.name)

    def status(self) -> Json:
        status = dict((self.application() or {}).get("status") or {})
        self.syncs_seen.append(status.get("sync", {}).get("status", ""))
        return status

    def wait_synced(self, revision: str) -> None:
        """Wait until a commit is what the cluster holds."""

        def synced() -> bool:
            application = self.application() or {}
            status = application.get("status", {})
            done = status.get("operationState", {})
            return (
                "operation" not in application
                and status.get("sync", {}).get("status") == "Synced"
                and done.get("phase") == "Succeeded"
                and done["syncResult"]["revision"] == revision
            )

        self.look()
        self._wait(f"{revision} is synced", synced)
        # NB: Argo CD may refresh before its own watch delivers what it just created, and apply it once more.
        self.operations_before = self._operations()
        self.syncs_seen.clear()

    def wait_refusal(self, message: str) -> None:
        """Wait until the API server has refused a sync with these words."""
        self._wait(
            f"a sync is refused: {message}",
            lambda: message in self.status().get("operationState", {}).get("message", ""),
        )

    def wait_health(
        self, kind: str, name: str, health: str, message: str = "", *, seconds: float = 120
    ) -> Json:
        """Wait until Argo CD says that of a resource, in a message with these words, and of the whole Application."""

        def seen() -> Json | None:
            status = self.status()
            health_reports = [
                item.get("health", {})
                for item in status.get("resources", [])
                if (item["kind"], item["name"]) == (kind, name)
            ]
            reported = health_reports[0] if health_reports else {}
            if reported.get("status") != health:
                return None
            if message in reported.get("message", ""):
                return reported
            # NB: a new message with the same health does not make Argo CD refresh earlier.
            self._request_refresh()
            return None

        return self._wait(f"{kind} {name} is {health} {message}", seen, seconds)

    def wait_application(self, health: str) -> None:
        """Wait until the Application as a whole has this health."""
        self._wait(f"the Application is {health}", lambda: self.status()["health"]["status"] == health)

    def look(self) -> None:
        """Have Argo CD compare repository and cluster, as a Git server's webhook would, and wait until it has."""
        self._request_refresh()
        requested_at = time.monotonic()

        def looked() -> bool:
            nonlocal requested_at
            application = self.application() or {}
            if _REFRESH not in application.get("metadata", {}).get("annotations", {}):
                return True
            if time.monotonic() - requested_at > _SECONDS_PER_REQUEST:
                self._request_refresh()
                requested_at = time.monotonic()
            return False

        self._wait("Argo CD has looked", looked)

    def _request_refresh(self) -> None:
        # NB: when Argo CD ends a refresh, it writes its own result over a request that its watch has just delivered
        # (writeBackToInformer). The request then stands in the object and nobody reads it until the object changes
        # again, so each request changes it.
        annotations = {_REFRESH: "normal", _REQUEST: str(next(self.requests))}
        self.api.patch("Application", argocd.NAMESPACE, self.name, {"metadata": {"annotations": annotations}})

    def operations(self) -> int:
        """How often Argo CD has written to the cluster since the last commit was synced."""
        return self._operations() - self.operations_before

    def _operations(self) -> int:
        events = self.api.list("Event", argocd.NAMESPACE)
        application_events = [event for event in events if event["involvedObject"]["name"] == self.name]
        return sum(
            event.get("count", 1) for event in application_events if event["reason"] == "OperationStarted"
        )

    def _wait(self, what: str, check: Callable[[], T | None], seconds: float = 120) -> T:
        return wait_for(what, check, seconds, instead=lambda: yaml.safe_dump(self.status()))
