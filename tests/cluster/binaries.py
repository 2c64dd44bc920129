"""The programs a cluster is made of, built from Go modules once and kept by what they were built from.

`python -m cluster.binaries kube helm` builds them. It needs Python alone, so that it runs beside the installation of packages.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.paths import PACKAGE, ClusterError
from support.cache import cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KUBERNETES = "v1.37.2"
# The oldest version that the operator supports: FINETUNE_KUBERNETES=1.31 runs it in place of the other.
OLDEST = "v1.31.13"
OLDEST_MODULE = PACKAGE / "go-oldest"
MODULE = PACKAGE / "go"
ARGOCD = "github.com/argoproj/argo-cd/v3"
ARGOCD_MODULE = PACKAGE / "go-argocd"
ACTIONLINT_MODULE = PACKAGE / "go-actionlint"
JOBSET = "sigs.k8s.io/jobset"
JOBSET_MODULE = PACKAGE / "go-jobset"
KUEUE = "sigs.k8s.io/kueue"
KUEUE_MODULE = PACKAGE / "go-kueue"
NETWORK_POLICIES_MODULE = PACKAGE / "go-network-policies"
PROMETHEUS_MODULE = PACKAGE / "go-prometheus"
KUBE_NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "coredns",
)
GO = (1, 26)
# The version of Kubernetes that the programs of a module report.
VERSIONS = {MODULE: KUBERNETES, OLDEST_MODULE: OLDEST}
# Prometheus without the clients of clouds, with which it finds targets there.
TAGS = {PROMETHEUS_MODULE: ("-tags=remove_all_sd",)}
# One set for all programs, so that they share compiled packages. Nothing reads debugging information here. Inlining costs a
# quarter of the compile time: only the standard library keeps it.
FLAGS = ("-trimpath", "-buildvcs=false")
_QUICK_FLAGS = ("-gcflags=all=-dwarf=false -l", "-gcflags=std=-dwarf=false")
# NB: a peer whose CPU time is measured is compiled as its makers compile it.
_OPTIMIZED = (JOBSET_MODULE,)


@dataclass(frozen=True)
class Program:
    """One Go program: a package of a module of ours, or of a module that it requires.

    `links` are other names to call it by. `copied_folders` names folders of `copied_module` that are kept beside it.
    """

    name: str
    package: str
    title: str
    minutes: int = 1
    links: tuple[str, ...] = ()
    module: Path = MODULE
    copied_module: str = ""
    copied_folders: tuple[str, ...] = ()

    def digest(self) -> str:
        """What it is built from, in sixteen letters."""
        inputs = (self.package, self.links, self.copied_module, self.copied_folders)
        content = hashlib.sha256(f"{inputs} {flags(self.module)} {os.uname().machine}".encode())
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


def flags(module: Path) -> tuple[str, ...]:
    """The flags of `go build` for the programs of a module."""
    version = VERSIONS.get(module)
    stamp = f" -X k8s.io/component-base/version.gitVersion={version}" if version else ""
    quick = () if module in _OPTIMIZED else _QUICK_FLAGS
    return (*FLAGS, *quick, *TAGS.get(module, ()), f"-ldflags=-s -w{stamp}")


PROGRAMS = {
    program.name: program
    for program in (
        Program("kube", "./kube", "etcd 3.7, Kubernetes 1.37 and CoreDNS 1.15", 4, KUBE_NAMES),
        Program("kubectl", "./kubectl", "kubectl"),
        Program(
            "kube-oldest",
            "./kube-oldest",
            "etcd 3.5 and Kubernetes 1.31",
            4,
            ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl"),
            module=OLDEST_MODULE,
        ),
        Program("helm", "helm.sh/helm/v3/cmd/helm", "helm 3.22"),
        Program("helm-docs", "github.com/norwoodj/helm-docs/cmd/helm-docs", "helm-docs 1.14"),
        Program(
            "actionlint",
            "github.com/rhysd/actionlint/cmd/actionlint",
            "actionlint 1.7",
            module=ACTIONLINT_MODULE,
        ),
        Program(
            "prometheus",
            "github.com/prometheus/prometheus/cmd/prometheus",
            "Prometheus 3.15",
            2,
            module=PROMETHEUS_MODULE,
        ),
        Program(
            "promtool",
            "github.com/prometheus/prometheus/cmd/promtool",
            "promtool 3.15",
            2,
            module=PROMETHEUS_MODULE,
        ),
        Program(
            "networkpolicies",
            "./networkpolicies",
            "kube-network-policies 0.8",
            2,
            module=NETWORK_POLICIES_MODULE,
        ),
        Program("registry", "./registry", "the registry, distribution 3.1"),
        Program("pause", "./pause", "the pause program"),
        Program("versitygw", "./versitygw", "versitygw 1.8"),
        Program("fake-gcs-server", "github.com/fsouza/fake-gcs-server", "fake-gcs-server 1.56"),
        Program("kstatus", "./kstatus", "kstatus of cli-utils 0.37"),
        Program(
            "argocd",
            "./argocd",
            "Argo CD 3.2",
            4,
            ("argocd-application-controller", "argocd-repo-server"),
            module=ARGOCD_MODULE,
            copied_module=ARGOCD,
            copied_folders=("manifests/crds", "manifests/base/config"),
        ),
        Program(
            "jobset",
            JOBSET,
            "JobSet 0.10",
            2,
            module=JOBSET_MODULE,
            copied_module=JOBSET,
            copied_folders=("config/components/crd/bases",),
        ),
        Program(
            "kueue",
            "./kueue",
            "Kueue 0.19",
            4,
            module=KUEUE_MODULE,
            copied_module=KUEUE,
            copied_folders=("config/components/crd/bases",),
        ),
    )
}


def ensure(*names: str) -> dict[str, Path]:
    """Build what is missing of these programs; return the path of each."""
    programs = [PROGRAMS[name] for name in names]
    for module in dict.fromkeys(program.module for program in programs if not program.path.exists()):
        with _locked(cache() / "bin" / f".{module.name}.lock"):
            missing = [each for each in programs if each.module == module and not each.path.exists()]
            if missing:
                _build(go_command(), module, missing)
    return {program.name: program.path for program in programs}


def check(*names: str) -> None:
    """Check that what is missing of these programs can be built.

    Raises:
        ClusterError: Go is not installed, or too old.
    """
    if not all(PROGRAMS[name].path.exists() for name in names):
        go_command()


def path(name: str) -> Path:
    """The path of a program by the name it is called by (kubectl, helm, etcd, ...), built if it is missing.

    Raises:
        ClusterError: FINETUNE_KUBERNETES asks for an unknown version, or for one that lacks this program.
    """
    owner = _owner(name, os.environ.get("FINETUNE_KUBERNETES", ""))
    return ensure(owner)[owner].parent / name


def _owner(name: str, version: str) -> str:
    """The program that `name` is a name of, in a version of Kubernetes; the newest if the version is empty."""
    owners = {
        program.module: program.name
        for program in PROGRAMS.values()
        if name in (program.name, *program.links)
    }
    oldest = OLDEST[1:].rpartition(".")[0]
    if version not in ("", oldest):
        raise ClusterError(
            f"FINETUNE_KUBERNETES={version} is unknown: set it to {oldest}, or unset it for {KUBERNETES}"
        )
    if version and name in PROGRAMS["kube"].links and OLDEST_MODULE not in owners:
        raise ClusterError(f"Kubernetes {version} is built without {name}: unset FINETUNE_KUBERNETES")
    return owners[OLDEST_MODULE] if version and OLDEST_MODULE in owners else next(iter(owners.values()))


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
        raise ClusterError("Go is not installed: install Go 1.26 or newer and put it on PATH")
    version = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, check=True, cwd=MODULE
    ).stdout
    match = re.match(r"go(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < GO:
        raise ClusterError(f"Go 1.26 or newer is needed to build Kubernetes 1.37, this is {version.strip()}")
    return go


def _build(go: str, module: Path, programs: list[Program]) -> None:
    """Build programs of one module together: a package that several have in common is compiled once."""
    titles = ", ".join(program.title for program in programs)
    say(f"building {titles} (about {max(program.minutes for program in programs)} min the first time)")
    began = time.monotonic()
    # NB: now, since sources may change while they are built.
    folders = [program.folder for program in programs]
    with tempfile.TemporaryDirectory(prefix="building-", dir=cache() / "bin") as folder:
        packages = [program.package for program in programs]
        # NB: a list of packages is written to a folder only if its name ends with a slash.
        done = subprocess.run(
            [go, "build", "-mod=readonly", *flags(module), "-o", f"{folder}/", *packages],
            env={**os.environ, "CGO_ENABLED": "0"},
            cwd=module,
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise ClusterError(f"{titles}: go build failed:\n{done.stderr.strip()[-3000:]}")
        for program, destination in zip(programs, folders, strict=True):
            _install(go, program, Path(folder) / program.name, destination)
    say(f"built in {time.monotonic() - began:.0f} s")


def _install(go: str, program: Program, binary: Path, folder: Path) -> None:
    """Move a program that was built into its folder, which appears as a whole."""
    incomplete = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir()
    binary.rename(incomplete / program.name)
    for link in program.links:
        (incomplete / link).symlink_to(program.name)
    if program.copied_folders:
        _copy_folders(_module_folder(go, program), program.copied_folders, incomplete)
    shutil.rmtree(folder, ignore_errors=True)
    incomplete.rename(folder)


def remove_unused() -> None:
    """Remove programs that no current source makes, and what builds that were killed have left."""
    folder = cache() / "bin"
    current = {program.folder for program in PROGRAMS.values()}
    with ExitStack() as locks:
        for module in dict.fromkeys(program.module for program in PROGRAMS.values()):
            locks.enter_context(_locked(folder / f".{module.name}.lock"))
        for path in folder.iterdir():
            if path.is_dir() and path not in current:
                say(f"removing {path}")
                shutil.rmtree(path)


def _module_folder(go: str, program: Program) -> Path:
    """Where Go keeps the sources of a module that was built."""
    argv = [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", program.copied_module]
    done = subprocess.run(argv, cwd=program.module, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def _copy_folders(source: Path, folders: tuple[str, ...], building: Path) -> None:
    # NB: folders of Go's module cache are read-only, and a copy of their modes could not be removed.
    for folder in folders:
        (building / folder).mkdir(parents=True)
        for file in (source / folder).iterdir():
            shutil.copyfile(file, building / folder / file.name)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build on this machine to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str]) -> int:
    """Build programs, all of them without names, or print the path of one: `--path NAME`; return the exit status."""
    show_path, names = arguments[:1] == ["--path"], [*arguments]
    if show_path:
        names = names[1:2]
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(
            f"error: unknown programs: {', '.join(unknown)}; known are {', '.join(PROGRAMS)}", file=sys.stderr
        )
        return 1
    try:
        paths = ensure(*(names or PROGRAMS))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if show_path:
        print(*paths.values())
    return 0


if __name__ == "__main__":
    # As Ctrl-C does, so that `go build` ends too and leaves nothing behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
