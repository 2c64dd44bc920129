"""An existing cluster gets the references of all images."""

from __future__ import annotations

import pytest

from cluster import current, images
from cluster.paths import ClusterError

REFERENCES = {image.variable: f"example/{image.name}:1" for image in images.PROJECT} | {
    images.OBJECT_STORE: "example/versitygw:1"
}


def test_images_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, reference in REFERENCES.items():
        monkeypatch.setenv(variable, reference)
    assert current.build_images("demo", list(images.PROJECT)) == REFERENCES


def test_every_missing_image_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in REFERENCES:
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ClusterError) as refusal:
        current.build_images("demo", list(images.PROJECT))
    assert [variable for variable in REFERENCES if variable not in str(refusal.value)] == []
