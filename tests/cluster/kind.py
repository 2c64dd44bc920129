"""The same cluster where a Docker engine runs: kind, with the images built by docker."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from cluster import binaries, images, volumes
from cluster.binaries import say
from cluster.paths import REPOSITORY, ClusterError, State
from cluster.process import run

BASE = "python:3.11-slim"
VOLUMES = 8
INSIDE = "/finetune-volumes"


def has_docker() -> bool:
    """Whether a Docker engine answers."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, check=False, timeout=30).returncode == 0


def up(name: str, nodes: int = 2) -> Path:
    """Create the cluster, or find it; return its kubeconfig's path."""
    _need_tools()
    state = State(name)
    state.directory.mkdir(parents=True, exist_ok=True)
    if name not in run("kind", "get", "clusters").split():
        state.volumes.mkdir(exist_ok=True)
        say(f"creating the kind cluster {name}")
        create = ["kind", "create", "cluster", "--name", name, "--kubeconfig", str(state.kubeconfig)]
        run(
            *create,
            "--wait",
            "180s",
            "--config",
            "-",
            timeout=600,
            stdin=json.dumps(configuration(state, nodes)),
        )
        for number in range(VOLUMES):
            folder = state.volumes / str(number)
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        kubectl = ("kubectl", "--kubeconfig", str(state.kubeconfig))
        unset = '{"metadata":{"annotations":{"storageclass.kubernetes.io/is-default-class":"false"}}}'
        run(*kubectl, "patch", "storageclass", "standard", "--patch", unset)
        run(*kubectl, "apply", "--filename", "-", stdin=json.dumps(persistent_volumes()))
    return state.kubeconfig


def down(name: str) -> None:
    """Delete the cluster and its folder."""
    _need_tools()
    run("kind", "delete", "cluster", "--name", name, timeout=300)
    shutil.rmtree(State(name).directory, ignore_errors=True)


def status(name: str) -> dict[str, object]:
    """What there is of the cluster."""
    _need_tools()
    up = name in run("kind", "get", "clusters").split()
    summary: dict[str, object] = {"name": name, "up": up, "backend": "kind"}
    return summary | ({"kubeconfig": str(State(name).kubeconfig)} if up else {})


def prepare() -> None:
    """Does nothing: docker keeps its own layers, and kind loads images into a running cluster."""


def build_images(name: str, project_images: list[images.Image]) -> dict[str, str]:
    """Build the project's images with docker and load them onto the nodes."""
    _need_tools()
    references = {}
    for image in project_images:
        tag = images.content_hash(REPOSITORY, image, None, BASE)
        reference = f"localhost/{image.name}:{tag}"
        argv = ["docker", "build", "--file", image.dockerfile, "--tag", reference]
        argv += ["--target", image.target] if image.target else []
        say(f"building {reference}")
        # NB: docker prints progress to standard output, which is for results only.
        run(*argv, str(REPOSITORY), timeout=3600)
        run("kind", "load", "docker-image", reference, "--name", name, timeout=1800)
        references[image.variable] = reference
    references[images.OBJECT_STORE] = _object_store(name)
    return references


def _object_store(name: str) -> str:
    """The S3 server's image: one static program."""
    program = binaries.ensure("versitygw")["versitygw"]
    reference = f"localhost/versitygw:{program.parent.name}"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy2(program, f"{folder}/versitygw")
        Path(folder, "Dockerfile").write_text(
            'FROM scratch\nCOPY versitygw /versitygw\nENTRYPOINT ["/versitygw"]\n'
        )
        run("docker", "build", "--tag", reference, folder, timeout=600)
    run("kind", "load", "docker-image", reference, "--name", name, timeout=600)
    return reference


def configuration(state: State, nodes: int) -> dict[str, object]:
    """Kind's configuration: a control plane and the nodes, which all mount one folder of this machine."""
    mount = {"hostPath": str(state.volumes), "containerPath": INSIDE}
    roles = ["control-plane"] + ["worker"] * nodes
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": [mount]} for role in roles],
    }


def persistent_volumes() -> dict[str, object]:
    """Volumes that every node can reach; kind's own are of one node each."""
    items: list[dict[str, object]] = [
        {**volumes.storage_class(), "provisioner": "kubernetes.io/no-provisioner"}
    ]
    for number in range(VOLUMES):
        spec = {
            "capacity": {"storage": "20Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"],
            "storageClassName": volumes.CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": f"{INSIDE}/{number}"},
        }
        metadata = {"name": f"folder-{number}"}
        items.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata, "spec": spec})
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _need_tools() -> None:
    missing = [tool for tool in ("docker", "kind", "kubectl") if shutil.which(tool) is None]
    if missing:
        raise ClusterError(
            f"CLUSTER=kind needs {', '.join(missing)} on PATH: install a Docker engine, kind and kubectl"
        )
    if not has_docker():
        raise ClusterError("CLUSTER=kind needs a Docker engine that answers: start it, or use CLUSTER=local")
