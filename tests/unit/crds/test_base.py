from __future__ import annotations

import pytest

from finetune_crds.base import join_names

SENTENCES = {
    "no name": ([], "and", ""),
    "one name": (["a"], "and", "a"),
    "two names": (["a", "b"], "or", "a or b"),
    "three names": (["a", "b", "c"], "and", "a, b and c"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_names_are_joined_as_in_a_sentence(case: str) -> None:
    names, conjunction, sentence = SENTENCES[case]
    assert join_names(names, conjunction) == sentence
