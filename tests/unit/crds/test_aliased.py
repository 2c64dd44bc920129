"""What names a registered model by an alias."""

from __future__ import annotations

import pytest

from finetune_crds.aliased import Aliased

URIS: dict[str, Aliased | None] = {
    "models:/support@champion": Aliased("support", "champion"),
    "models:/ml.prod.support@champion": Aliased("ml.prod.support", "champion"),
    "models:/support/3": None,
    "models:/support/latest": None,
    "models:/support/3/model@x": None,
    "org/name": None,
    "/models/base@champion": None,
    "s3://bucket/base@champion": None,
}


@pytest.mark.parametrize(("uri", "expected"), URIS.items())
def test_what_names_an_alias(uri: str, expected: Aliased | None) -> None:
    assert Aliased.parse(uri) == expected
