"""A model that is no causal language model is refused before its weights are fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.train.model.weights import merge
from support import networks

if TYPE_CHECKING:
    from pathlib import Path

REMEDY = "choose a causal language model"


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        ("bert", {}, f"bert, an encoder (is_decoder is false in its config.json): {REMEDY}"),
        ("xlm-roberta", {}, f"xlm-roberta, an encoder (is_decoder is false in its config.json): {REMEDY}"),
        ("t5", {}, f"t5, an encoder-decoder model: {REMEDY}"),
        ("bart", {}, f"bart, an encoder-decoder model: {REMEDY}"),
        (
            "vit",
            {},
            f"vit, a model type without a causal language model in this version of transformers: {REMEDY}",
        ),
        ("bert", {"is_decoder": True}, None),
        ("gpt_neox", {}, None),
        ("llama", {}, None),
        ("llama4_text", {}, None),
    ],
)
def test_a_config_tells_whether_a_model_continues_a_text(
    tmp_path: Path, model_type: str, fields: dict[str, Any], sentence: str | None
) -> None:
    """There are no weights in the folder."""
    from transformers import AutoConfig

    base = tmp_path / "base"
    AutoConfig.for_model(model_type, **fields).save_pretrained(base)
    recipe = networks.recipe(base)
    with networks.alone() as world:
        if sentence is None:
            merge.fetch(recipe.model, tmp_path / "fetched", world)
            return
        with pytest.raises(PodFailure) as refused:
            merge.fetch(recipe.model, tmp_path / "fetched", world)
    assert (refused.value.exit_code, refused.value.reason, refused.value.message) == (
        64,
        "ModelNotSupported",
        f"model.base {base} is a {sentence}",
    )
