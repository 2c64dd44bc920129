"""Values of the columns of an example. Conversations of a wrong shape: see test_documents."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.data import Columns
from finetune_trainer.examples.column_values import parse_labels, parse_margins
from finetune_trainer.pod.exit_status import DataError

PREFERENCE = Columns(type="Preference")
UNPAIRED = Columns(type="Unpaired", label="thumb")


def test_labels_are_booleans_numbers_or_texts() -> None:
    values = [True, False, 1, 0, "true", " FALSE ", "1", "0"]
    assert parse_labels({"thumb": values}, UNPAIRED) == [True, False] * 4
    assert parse_labels({"prompt": ["a", "b"]}, PREFERENCE) == [None, None]


@pytest.mark.parametrize("value", [None, 2, "good", [True]])
def test_what_is_no_label_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(DataError) as refused:
        parse_labels({"thumb": [True, value]}, UNPAIRED)
    assert f"{refused.value.reason}: {refused.value.message}" == (
        f"LabelValue: column thumb of a row holds {value!r}: labels are booleans, 1 and 0, or the texts true and false; correct or remove such rows"
    )


def test_margins_are_finite_numbers() -> None:
    with_margin = Columns(type="Preference", margin="gap")
    assert parse_margins({"gap": ["0.5", "-1", "2e1", 3, 0.25]}, with_margin) == [0.5, -1.0, 20.0, 3.0, 0.25]
    assert parse_margins({"prompt": ["a", "b"]}, PREFERENCE) == [None, None]


@pytest.mark.parametrize("value", [None, "large", "nan", "inf", [1.0]])
def test_what_is_no_margin_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(DataError) as refused:
        parse_margins({"gap": ["1", value]}, Columns(type="Preference", margin="gap"))
    assert f"{refused.value.reason}: {refused.value.message}" == (
        f"MarginValue: column gap of a row holds {value!r}, and a margin is a finite number: correct or remove such rows"
    )
