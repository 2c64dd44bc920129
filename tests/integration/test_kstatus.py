"""What kstatus, the library that Flux and other tools decide by, makes of our resources."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from cluster import binaries

Json = dict[str, Any]


def kstatus(objects: list[Json]) -> list[Json]:
    """Status and message that kstatus computes for each object."""
    program = str(binaries.path("kstatus"))
    done = subprocess.run([program], input=json.dumps(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


async def test_kstatus_says_what_the_table_says() -> None:
    from fixtures.operator_in_memory.verdicts import VERDICTS, bodies

    resources = await bodies()
    statuses = {
        name: item["status"] for name, item in zip(resources, kstatus([*resources.values()]), strict=True)
    }
    assert statuses == {name: verdict.kstatus for name, verdict in VERDICTS.items()}


async def test_kstatus_repeats_the_message_of_what_explains_it() -> None:
    from fixtures.operator_in_memory.verdicts import bodies

    resources = await bodies()
    silent = ("Resource is Ready", "Resource scheduled for deletion")
    explanations = zip(resources.values(), kstatus([*resources.values()]), strict=True)
    unexplained = [
        item["message"]
        for body, item in explanations
        if item["message"] not in silent
        and "latest observed generation" not in item["message"]
        and item["message"] not in [condition["message"] for condition in body["status"]["conditions"]]
    ]
    assert unexplained == []
