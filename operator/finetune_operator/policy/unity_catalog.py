"""Unity Catalog's rules for tags. The API server cannot check them if the chart configures the registry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from finetune_crds.mlflow_names import NOT_IN_UNITY_TAGS, UNITY_TAGS_MESSAGE

_FORBIDDEN_IN_KEYS = re.compile(NOT_IN_UNITY_TAGS)


def find_wrong_tags(tags: Mapping[str, str], field: str) -> Iterator[str]:
    """Messages for tags that Unity Catalog does not allow.

    Args:
        field: the field of the spec with the tags.
    """
    wrong_keys = sorted(repr(key) for key in tags if _FORBIDDEN_IN_KEYS.search(key))
    if wrong_keys:
        yield f"{UNITY_TAGS_MESSAGE}: rename {', '.join(wrong_keys)} in {field}"
    padded = sorted(repr(key) for key, value in tags.items() if value != value.strip())
    if padded:
        yield f"Unity Catalog does not allow spaces at the ends of the value of a tag: remove them from {', '.join(padded)} in {field}"
