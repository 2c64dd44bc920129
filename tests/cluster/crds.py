"""CRDs of other projects, as the Go modules of these hold them: fetched once for a machine, never copied into the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.binaries import go_command
from cluster.paths import ClusterError
from support.cache import cache


@dataclass(frozen=True)
class ForeignCrd:
    """A file of a Go module at a version."""

    module: str
    version: str
    file: str

    def path(self) -> Path:
        """Where the file is kept, fetched if it is not there.

        Raises:
            ClusterError: the module cannot be fetched.
        """
        cached = cache() / "crds" / self.version / Path(self.file).name
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            # NB: tests in other processes may look for it meanwhile.
            new = cached.with_suffix(".new")
            shutil.copyfile(self._module() / self.file, new)
            new.chmod(0o644)
            new.replace(cached)
        return cached

    def _module(self) -> Path:
        """The folder of the module in Go's cache."""
        query = f"{self.module}@{self.version}"
        argv = [go_command(), "mod", "download", "-json", query]
        done = subprocess.run(argv, cwd=cache(), check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterError(f"{query} cannot be fetched: {done.stdout.strip()} {done.stderr.strip()}")
        return Path(json.loads(done.stdout)["Dir"])


SPARK_APPLICATION = ForeignCrd(
    "github.com/kubeflow/spark-operator/v2",
    "v2.3.0",
    "config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml",
)
# NB: the version of tests/cluster/go-kueue.
KUEUE_WORKLOADS = ForeignCrd(
    "sigs.k8s.io/kueue", "v0.19.0", "config/components/crd/bases/kueue.x-k8s.io_workloads.yaml"
)
