"""References of images, taken apart."""

from __future__ import annotations

import pytest

from cluster.references import Reference

DIGEST = f"sha256:{'a' * 64}"
REFERENCES = {
    "of the local cluster": (
        "registry.finetune.local/finetune-operator:0123456789abcdef",
        Reference("registry.finetune.local", "finetune-operator", "0123456789abcdef", ""),
    ),
    "of kind": ("localhost/finetune-prep:a", Reference("localhost", "finetune-prep", "a", "")),
    "with a port and folders": (
        "registry.example.com:5000/team/ml/trainer:0.1.0",
        Reference("registry.example.com:5000", "team/ml/trainer", "0.1.0", ""),
    ),
    "with a digest": (
        f"registry.example.com/trainer@{DIGEST}",
        Reference("registry.example.com", "trainer", "", DIGEST),
    ),
    "with both": (f"ml/trainer:0.1.0@{DIGEST}", Reference("", "ml/trainer", "0.1.0", DIGEST)),
    "of the default registry": ("team/trainer:0.1.0", Reference("", "team/trainer", "0.1.0", "")),
    "without a tag": ("trainer", Reference("", "trainer", "latest", "")),
}


@pytest.mark.parametrize(("text", "expected"), REFERENCES.values(), ids=REFERENCES)
def test_a_reference(text: str, expected: Reference) -> None:
    assert Reference.of(text) == expected


def test_values_of_the_chart() -> None:
    assert Reference("registry.example.com", "trainer", "0.1.0", "").values("image.trainer") == [
        "image.trainer.registry=registry.example.com",
        "image.trainer.repository=trainer",
        "image.trainer.tag=0.1.0",
        "image.trainer.digest=",
    ]
