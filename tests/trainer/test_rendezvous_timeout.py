"""Pods of a gang that do not find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_crds.contract import PodError
from support.ports import free_port

if TYPE_CHECKING:
    from support.pods import Pod


@pytest.mark.parametrize("node", [0, 1])
def test_a_gang_that_does_not_come_together_says_so(pod: Pod, node: int) -> None:
    port = free_port()
    lonely = pod.but({"distributed.rendezvousTimeoutSeconds": 1, "distributed.nodes": 2}).in_gang(node, port)
    lonely.forked = True
    outcome = lonely.run()
    assert outcome.code == 1, outcome.output
    assert outcome.message is not None
    assert outcome.message.error == PodError(
        reason="RendezvousTimeout",
        message=f"the 2 pods did not all join the rendezvous at localhost:{port} within 1 s: check whether all of them are "
        "running and may reach that port",
    )
