"""A cluster for one test alone, with two nodes and our CRDs. The operator of such a test runs on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster import images, local, snapshots
from fixtures.operator_processes.servers import create_crds, list_our_crds
from support.api import Api

Json = dict[str, Any]
NAMESPACE = "default"


@contextmanager
def own_cluster(name: str) -> Iterator[Api]:
    """A cluster that is gone at the end."""
    snapshots.ensure({*snapshots.references(), images.base_reference(), images.pause()})
    try:
        api = Api(local.up(name))
        create_crds(api, list_our_crds())
        yield api
    finally:
        local.down(name)


def build_job(name: str, command: Sequence[str], **fields: Any) -> Json:
    """A job of two pods that run a command of the base image. `fields`: more fields of the spec."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "trainer": {"command": [*command]},
            "distributed": {"nodes": 2},
            "pods": {
                "train": {
                    "image": images.base_reference(),
                    "template": {"spec": {"securityContext": {"runAsUser": 65532}}},
                }
            },
            **fields,
        },
    }
