"""The object store of the checkpoints is away, silent, slow, or sends its answers a byte at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cluster import object_stores
from cluster.object_stores import Store
from fixtures.operator_processes.link import OUTAGES, Link, Outage, Outages, outages
from support import networks
from support.checkpoints import Run, same

OUTAGE_SECONDS = 20
STEP_SECONDS = 5


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store, with a login in the variables of this process."""
    with object_stores.s3(tmp_path / "store") as s3:
        for name, value in s3.env.items():
            monkeypatch.setenv(name, value)
        yield s3


@pytest.fixture
def linked(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Outages, Link]]:
    """A link to the store that this process uses."""
    with outages() as network:
        link = network.link(urlsplit(store.env["AWS_ENDPOINT_URL"]).port or 80)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
        yield network, link


@pytest.mark.parametrize("outage", OUTAGES)
def test_training_goes_on_and_its_next_checkpoint_is_complete(
    store: Store, linked: tuple[Outages, Link], tmp_path: Path, outage: Outage
) -> None:
    network, link = linked
    link.drip_seconds = 0.005
    with networks.alone() as world:
        run = Run(f"{store.uri}/checkpoints", world)
        run.train_and_save(1)
        with network.outage(link, outage):
            run.train()
            began = time.monotonic()
            run.save(wait=False)
            # The steps until the next checkpoint do not wait for the store.
            run.train()
            run.train()
            assert time.monotonic() - began < STEP_SECONDS
            time.sleep(OUTAGE_SECONDS)
        run.save()
        print(f"{outage}: {run.published}, {run.failed}")
        untouched = Run(tmp_path / "untouched", world)
        untouched.train_and_save(4)
        again = Run(f"{store.uri}/checkpoints", world)
        assert again.resume().step == 4
        assert same(again.state(), untouched.state())
        assert {1, 4} <= {*run.published} <= {1, 2, 4}
        assert [step for step, _ in run.failed] == [step for step in (2,) if step not in run.published]
