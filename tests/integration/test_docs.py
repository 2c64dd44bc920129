"""The API server accepts every manifest of the documentation, and what its parts of a spec make of a sample."""

from __future__ import annotations

import json
import subprocess

import pytest

from cluster.controlplane import ControlPlane
from support.api import Api
from support.documents import Block, blocks
from support.manifests import resources

# The samples have a test of their own.
BLOCKS = [block for block in blocks("yaml") if "samples.md" not in block.page and [*resources(block)]]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_api_server_accepts(block: Block, plane: ControlPlane, api: Api) -> None:
    command = [str(plane.kubectl), "--kubeconfig", str(plane.kubeconfig), "create", "--dry-run=server"]
    command += ["--validate=strict", "--filename", "-"]
    for resource in resources(block):
        done = subprocess.run(
            command, input=json.dumps(resource), capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
