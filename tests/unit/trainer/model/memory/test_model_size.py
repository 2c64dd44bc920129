"""How large a model is, told without its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.training import Model
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.memory import model_size

if TYPE_CHECKING:
    from pathlib import Path

WIDE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 32000}
# Configs of models without weights, and their parameters.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 7B": ("llama", {}, 6_738_415_616),
    "heads that are wider than the model": (
        "qwen3",
        WIDE | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        191_384_576,
    ),
    "names of its own": ("gpt2", {}, 124_439_808),
}


def saved(folder: Path, kind: str, **changes: Any) -> Model:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **changes).save_pretrained(folder)
    return Model(base=str(folder))


@pytest.mark.parametrize(("kind", "changes", "expected"), MODELS.values(), ids=MODELS)
def test_a_model_is_counted_without_its_weights(
    tmp_path: Path, kind: str, changes: dict[str, Any], expected: int
) -> None:
    assert (
        model_size.count_parameters(saved(tmp_path / "model", kind, **changes), tmp_path / "to") == expected
    )


SMALL = WIDE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000}
ESTIMATED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SMALL),
    "narrow heads": ("qwen3", SMALL | {"head_dim": 16}),
    "wide heads": ("qwen3", SMALL | {"head_dim": 128}),
    "experts": ("mixtral", SMALL | {"num_local_experts": 4, "intermediate_size": 256}),
}


@pytest.mark.parametrize(("kind", "changes"), ESTIMATED.values(), ids=ESTIMATED)
def test_a_small_model_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    model = saved(tmp_path / "model", kind, **changes)
    counted = model_size._count(model, tmp_path / "model")
    monkeypatch.setattr(model_size, "_count", None)
    assert model_size.count_parameters(model, tmp_path / "to") == pytest.approx(counted, rel=0.25)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(RecipeRefusedError) as refused:
        model_size.count_parameters(Model(base=str(tmp_path)), tmp_path / "to")
    assert refused.value.reason == "ModelNotLoadable"
    assert refused.value.message.startswith(f"model.base {tmp_path} cannot be loaded: ")
