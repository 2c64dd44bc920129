"""How many CPUs a pod has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod.cpus import count_cpus

if TYPE_CHECKING:
    from pathlib import Path

CGROUPS: list[tuple[str, dict[str, str], int]] = [
    ("v2, one and a half CPUs", {"cpu.max": "150000 100000\n"}, 2),
    ("v2, a tenth of a CPU", {"cpu.max": "10000 100000\n"}, 1),
    ("v2, no limit", {"cpu.max": "max 100000\n"}, 8),
    ("v1, three CPUs", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ("v1, no limit", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ("no cgroup", {}, 8),
]


@pytest.mark.parametrize(("files", "cpus"), [row[1:] for row in CGROUPS], ids=[row[0] for row in CGROUPS])
def test_cpus_are_those_of_the_pods_limit(
    files: dict[str, str], cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_cpus(tmp_path) == cpus
