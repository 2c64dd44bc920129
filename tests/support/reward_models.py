"""Reward models, and the adapters of reward models, as transformers and peft save them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def save_reward_model(base: Path, folder: Path, *, labels: int = 1, seed: int = 3) -> Path:
    """Save a reward model with the decoder and the tokenizer of a language model, and a score head that it has learned."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=labels, pad_token_id=tokenizer.pad_token_id
    )
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_reward_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """Save an adapter of a reward model with random weights, beside the tokenizer of its base."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    options: dict[str, Any] = {
        "task_type": "SEQ_CLS",
        "r": 4,
        "init_lora_weights": False,
        "target_modules": ["q_proj", "down_proj"],
        **changes,
    }
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(**options))
    adapted.peft_config["default"].init_lora_weights = True
    torch.nn.init.normal_(adapted.base_model.model.score.modules_to_save["default"].weight)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def load_reward_adapter(adapter: Path) -> Any:
    """Load an adapter on its base, as anyone would."""
    from peft import AutoPeftModelForSequenceClassification

    return AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
