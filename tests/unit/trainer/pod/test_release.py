"""The release of the code, under both names of its distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from finetune_trainer.pod import release

RELEASES: dict[str, tuple[dict[str, str], str]] = {
    "the image": ({"finetune-trainer": "1.2.0"}, "1.2.0"),
    "the wheel": ({"finetune-prep": "1.2.0.post4711"}, "1.2.0"),
}


@pytest.mark.parametrize(("installed", "expected"), RELEASES.values(), ids=RELEASES)
def test_the_release(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], expected: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(release, "version", version)
    assert release.get_release() == expected
