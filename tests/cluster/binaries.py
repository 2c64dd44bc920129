"""The programs a cluster is made of, built from Go modules once and kept by what they were built from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.paths import PACKAGE, ClusterError
from support.cache import cache

if TYPE_CHECKING:
    from collections.abc import Iterator

KUBERNETES = "v1.34.4"
MODULE = PACKAGE / "go"
ARGOCD = "github.com/argoproj/argo-cd/v3"
ARGOCD_MODULE = PACKAGE / "go-argocd"
KSTATUS_MODULE = PACKAGE / "go-kstatus"
KUBE_NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)


@dataclass(frozen=True)
class Program:
    """One Go program: a package of a module of ours, or one installed by `path@version`.

    `beside` names folders of `beside_module` that are kept beside it.
    """

    name: str
    package: str
    title: str
    minutes: str
    links: tuple[str, ...] = ()
    flags: str = "-s -w"
    module: Path = MODULE
    beside_module: str = ""
    beside: tuple[str, ...] = ()

    @property
    def own(self) -> bool:
        """Whether it comes from a module in this folder."""
        return self.package.startswith("./")

    def digest(self) -> str:
        """What it is built from, in sixteen letters."""
        content = hashlib.sha256(f"{self.package} {self.flags} {os.uname().machine}".encode())
        if self.own:
            for file in sorted([*self.module.glob("go.*"), *(self.module / self.package).glob("*.go")]):
                content.update(file.name.encode() + b"\0" + file.read_bytes())
        return content.hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return cache() / "bin" / f"{self.name}-{self.digest()}"

    @property
    def path(self) -> Path:
        """The program itself."""
        return self.folder / self.name


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "kube",
            "./",
            "etcd 3.6 and Kubernetes 1.34",
            "4 min",
            KUBE_NAMES,
            f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}",
        ),
        Program("helm", "helm.sh/helm/v3/cmd/helm@v3.19.0", "helm 3.19", "3 min"),
        Program(
            "helm-docs", "github.com/norwoodj/helm-docs/cmd/helm-docs@v1.14.2", "helm-docs 1.14", "1 min"
        ),
        Program("coredns", "github.com/coredns/coredns@v1.12.4", "CoreDNS 1.12", "3 min"),
        Program(
            "registry",
            "github.com/distribution/distribution/v3/cmd/registry@v3.0.0",
            "the registry, distribution 3.0",
            "1 min",
        ),
        Program("pause", "./pause", "the pause program", "seconds"),
        Program("versitygw", "github.com/versity/versitygw/cmd/versitygw@v1.8.0", "versitygw 1.8", "2 min"),
        Program(
            "fake-gcs-server",
            "github.com/fsouza/fake-gcs-server@v1.56.1",
            "fake-gcs-server 1.56",
            "1 min",
        ),
        Program(
            "argocd",
            "./",
            "Argo CD 3.2",
            "4 min",
            ("argocd-application-controller", "argocd-repo-server"),
            module=ARGOCD_MODULE,
            beside_module=ARGOCD,
            beside=("manifests/crds", "manifests/base/config"),
        ),
        Program("kstatus", "./", "kstatus of cli-utils 0.37", "1 min", module=KSTATUS_MODULE),
    )
}


def ensure(*names: str) -> dict[str, Path]:
    """Build what is missing of these programs; return the path of each."""
    wanted = [PROGRAMS[name] for name in names]
    missing = [program for program in wanted if not program.path.exists()]
    if missing:
        with _locked(cache() / "bin"):
            go = go_command()
            for number, program in enumerate(missing, 1):
                if not program.path.exists():
                    say(
                        f"[{number}/{len(missing)}] building {program.title} (about {program.minutes} the first time)"
                    )
                    started = time.monotonic()
                    _build(go, program)
                    say(
                        f"[{number}/{len(missing)}] built {program.title} in {time.monotonic() - started:.0f} s"
                    )
    return {program.name: program.path for program in wanted}


def path(name: str) -> Path:
    """The path of a program by the name it is called by (kubectl, helm, etcd, ...), built if it is missing."""
    owner = next((program.name for program in PROGRAMS.values() if name in program.links), name)
    return ensure(owner)[owner].parent / name


def say(message: str) -> None:
    """Print progress to standard error; standard output is for results."""
    print(message, file=sys.stderr, flush=True)


def go_command() -> str:
    """The path of Go.

    Raises:
        ClusterError: it is not installed, or too old.
    """
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if go is None:
        raise ClusterError("Go is not installed: install Go 1.24 or newer and put it on PATH")
    version = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, check=True, cwd=MODULE
    ).stdout
    found = re.match(r"go(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < (1, 24):
        raise ClusterError(f"Go 1.24 or newer is needed to build Kubernetes 1.34, this is {version.strip()}")
    return go


def _build(go: str, program: Program) -> None:
    building = program.folder.with_name(program.folder.name + ".new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    options = ["-trimpath", "-buildvcs=false", "-ldflags", program.flags]
    environment = {**os.environ, "CGO_ENABLED": "0"}
    if program.own:
        argv = [go, "build", *options, "-mod=readonly", "-o", str(building / program.name), program.package]
    else:
        argv = [go, "install", *options, program.package]
        environment["GOBIN"] = str(building)
    done = subprocess.run(
        argv, env=environment, cwd=program.module, check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        shutil.rmtree(building, ignore_errors=True)
        raise ClusterError(f"{program.title} does not build:\n{done.stderr.strip()[-3000:]}")
    for link in program.links:
        (building / link).symlink_to(program.name)
    if program.beside:
        _keep_beside(_module_folder(go, program), program.beside, building)
    shutil.rmtree(program.folder, ignore_errors=True)
    building.rename(program.folder)


def _module_folder(go: str, program: Program) -> Path:
    """Where Go keeps the sources of a module that was built."""
    argv = [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", program.beside_module]
    done = subprocess.run(argv, cwd=program.module, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def _keep_beside(source: Path, folders: tuple[str, ...], building: Path) -> None:
    # NB: folders of Go's module cache are read-only, and a copy of their modes could not be removed.
    for folder in folders:
        (building / folder).mkdir(parents=True)
        for file in (source / folder).iterdir():
            shutil.copyfile(file, building / folder / file.name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build on this machine to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
