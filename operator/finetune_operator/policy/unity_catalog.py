"""What Unity Catalog demands of names, which the API server cannot see where the registry is that of the installation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from finetune_crds.mlflow_names import NOT_IN_UNITY_TAGS, UNITY_TAGS_MESSAGE

_FORBIDDEN_IN_TAGS = re.compile(NOT_IN_UNITY_TAGS)


def find_wrong_tags(keys: Iterable[str], field: str) -> Iterator[str]:
    """A message for keys of tags that Unity Catalog does not take; `field` of the spec holds them."""
    wrong = sorted(key for key in keys if _FORBIDDEN_IN_TAGS.search(key) or key != key.strip())
    if wrong:
        yield f"{UNITY_TAGS_MESSAGE}: rename {', '.join(wrong)} in {field}"
