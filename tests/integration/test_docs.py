"""The API server accepts every manifest of the documentation, and what its parts of a spec make of a sample."""

from __future__ import annotations

import pytest

from integration.schema import dry_run
from support.api import Api
from support.documents import Block, blocks
from support.manifests import resources

# The samples have a test of their own.
BLOCKS = [block for block in blocks("yaml") if "samples.md" not in block.page and [*resources(block)]]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_api_server_accepts(block: Block, api: Api) -> None:
    for resource in resources(block):
        assert dry_run.warnings(api, resource) == []
