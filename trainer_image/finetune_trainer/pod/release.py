"""The release of this code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from finetune_crds import contract

# The same code has two package names: one in the image, and one in the wheel for Databricks.
_DISTRIBUTIONS = ("finetune-trainer", contract.PREP_WHEEL)


def get_release() -> str:
    """Return the release of this code."""
    for name in _DISTRIBUTIONS:
        try:
            # NB: the wheel's version is that of the release, followed by .post and a digest of the wheel's content.
            return version(name).partition(".post")[0]
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError(_DISTRIBUTIONS[0])
