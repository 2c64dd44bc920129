"""The control plane that releases of the chart are installed on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.controlplane import ControlPlane
from fixtures.operator_processes.servers import Plane
from support.process import running


@pytest.fixture(scope="session")
def installation_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A control plane that starts without our CRDs, which the chart brings.

    NB: tests in this folder have it one after the other, in one worker; a release that was uninstalled leaves its CRDs.
    """
    with running(ControlPlane(tmp_path_factory.mktemp("plane"))) as plane:
        yield Plane(plane.kubeconfig, plane.kubectl)
