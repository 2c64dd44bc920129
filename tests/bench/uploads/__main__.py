"""`python -m bench.uploads`: the ways of register.upload beside each other, on a real MLflow server over a gateway of S3."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.trainer.machine import processor
from cluster import object_stores
from support.mlflow_server import Mlflow

_MIB = 2**20
# NB: a process of its own, whose peak of memory is that of the upload.
_CLIENT = """
import json, resource, sys, time
from pathlib import Path
from finetune_trainer.pod import library_variables, mlflow_run
from finetune_trainer.train.delivery import upload
from finetune_trainer.train.delivery.register import Registry
library_variables.set_defaults()
client = mlflow_run.create_client()
run = client.create_run(client.create_experiment(f"{sys.argv[1]}-{time.time()}")).info.run_id
upload.configure_client(sys.argv[1])
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
Registry(run, sys.argv[1]).upload(Path(sys.argv[2]))
seconds = time.monotonic() - started
print(json.dumps([seconds, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


@dataclass(frozen=True)
class Measured:
    """An upload: seconds, and by how many MiB the memory of client and server grew."""

    way: str
    seconds: float
    client: float
    server: float


def main(arguments: list[str]) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.uploads", description="Measure the ways of register.upload.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-uploads-") as folder:
        model = Path(folder) / "model"
        _write(model, options.gigabytes)
        measurements = []
        for number in range(options.rounds):
            ways = ("Proxy", "Direct") if number % 2 == 0 else ("Direct", "Proxy")
            for way in ways:
                measurements.append(measure(way, model, Path(folder) / f"{number}-{way}"))
                print(measurements[-1], flush=True)
    cpu = processor(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    print(f"{cpu}, {os.cpu_count()} cores, {datetime.now(UTC):%Y-%m-%d}, load {os.getloadavg()[0]:.1f}")
    return 0


def measure(way: str, model: Path, folder: Path) -> Measured:
    """Upload a model to a new server and a new store."""
    folder.mkdir()
    with object_stores.s3(folder) as store:
        mlflow = Mlflow(folder / "mlflow", artifacts=f"{store.uri}/artifacts", environment=store.env)
        mlflow.start()
        try:
            before = _peak(mlflow.pid)
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CLIENT, way, str(model)],
                env={**os.environ, "MLFLOW_TRACKING_URI": mlflow.uri},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            server = _peak(mlflow.pid) - before
        finally:
            mlflow.stop()
    seconds, at_first, peak = json.loads(done.stdout.splitlines()[-1])
    return Measured(way, round(seconds, 1), round((peak - at_first) / 1024), round(server))


def _peak(pid: int) -> float:
    """The most memory that a process has had, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def _write(folder: Path, gigabytes: float) -> None:
    """A model of one file, as the trainer writes one of this size, and a small file."""
    folder.mkdir()
    block = os.urandom(_MIB)
    with (folder / "model.safetensors").open("wb") as file:
        for _ in range(int(gigabytes * 1e9 / _MIB)):
            file.write(block)
    (folder / "config.json").write_text("{}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
