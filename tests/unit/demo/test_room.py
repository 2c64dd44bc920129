"""What the demo asks of a disk before anything is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster import backends, builder
from demo import room
from demo.room import GB
from support.cache import cache
from support.documents import ROOT, Page

# Free GB of a disk of 100, whether images and packages are there, and the GB that are needed; None: there is room.
DISKS: dict[str, tuple[int, bool, bool, int | None]] = {
    "nothing there, too little": (16, False, False, 17),
    "nothing there": (17, False, False, None),
    "packages there, too little": (11, False, True, 12),
    "packages there": (12, False, True, None),
    "all there, too little": (6, True, True, 7),
    "all there": (7, True, True, None),
}


@pytest.mark.parametrize(("free", "built", "installed", "wanted"), DISKS.values(), ids=DISKS)
def test_a_disk(free: int, built: bool, installed: bool, wanted: int | None) -> None:
    said = room.refusal(100 * GB, free * GB, built=built, installed=installed)
    if wanted is None:
        assert said is None
        return
    assert said
    assert f"has {free} GB free, and " in said
    assert f" needs {wanted} GB, " in said
    assert ("which every cluster that shares this cache then builds again" in said) == (built and installed)


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_the_pages_name_the_same_numbers(page: str) -> None:
    first, later = room.FIRST_GB + room.PACKAGES_GB, room.LATER_GB
    assert f"{first} GB of free disk ({later} GB for later runs)" in " ".join(Page(page).text.split())


def test_it_looks_where_the_images_are() -> None:
    assert builder.folder() == cache() / "buildah"


@pytest.mark.parametrize("wanted", ["", "local", "kind", "current"])
def test_it_means_the_cluster_that_will_be_chosen(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", wanted)
    assert room.is_local() == ((wanted or "local") == "local" and (bool(wanted) or backends.can_be_local()))


def test_it_needs_no_package() -> None:
    code = "import sys; sys.path.insert(0, 'tests'); import demo.room"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True)
