"""What the images install for the nodes that they run on."""

from __future__ import annotations

import re
from pathlib import Path

DOCKERFILE = Path(__file__).parents[3] / "trainer_image" / "Dockerfile"


def stage(name: str) -> str:
    _, *parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))[name]


def test_a_trainer_for_gpus_has_the_libraries_of_rdma() -> None:
    """Without any one of them NCCL says nothing, and goes over TCP."""
    for_gpus = r'apt-get install [^&]*\$\(\[ "\$\{TORCH_BACKEND\}" = cpu \] \|\| echo ([^)]*)\)'
    (packages,) = re.findall(for_gpus, stage("trainer"))
    assert packages.split() == ["ibverbs-providers", "libibverbs1", "librdmacm1"]
