"""Applies a method to a model: full fine-tuning, adapters, or virtual tokens."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from finetune_crds.training import SOFT_PROMPTS, Lora, SoftPrompt
from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_crds.training import Method

# Standard deviation of a new prefix: small beside the model's own keys.
_PREFIX_DEVIATION = 0.02


def adapt(model: PreTrainedModel, method: Method, base: str) -> nn.Module:
    """Add the parameters of the method to the model, and freeze the rest.

    `initial` gives new parameters their values later: the model may be on the meta device.

    Raises:
        RecipeRefusedError: method.lora.targetModules names a layer that the model does not have.
    """
    if method.type == "Full":
        return model
    import peft

    if method.type in SOFT_PROMPTS:
        prompt = method.soft_prompt or SoftPrompt()
        kind = peft.PrefixTuningConfig if method.type == "PrefixTuning" else peft.PromptTuningConfig
        config = kind(task_type="CAUSAL_LM", num_virtual_tokens=prompt.virtual_tokens)
    else:
        config = _lora_config(model, method)
    adapted = peft.get_peft_model(model, config)
    # An adapter needs its base: record the name in the recipe, not a folder of this pod.
    adapted.peft_config["default"].base_model_name_or_path = base
    return adapted


def _lora_config(model: nn.Module, method: Method) -> Any:
    import peft

    lora = method.lora or Lora()
    _check_targets(model, lora.target_modules)
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or "all-linear",
        use_rslora=lora.scaling == "RankStabilized",
        use_dora=method.type == "DoRA",
    )


def _check_targets(model: nn.Module, wanted: list[str]) -> None:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise RecipeRefusedError(
                f"method.lora.targetModules {target} is not a linear layer of the model: it has {', '.join(known)}"
            )


def initial(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return the initial value of a parameter that the method adds, fp32; it does not depend on the number of ranks.

    LoRA's A is uniform in +-1/sqrt(inputs), as in peft (He et al. with a = sqrt(5)), and B zero, so that the adapted
    model starts equal to its base. A prefix is normal.

    Args:
        name: the parameter's name in the model.
        shape: its unsharded shape.
        seed: the recipe's seed.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if ".lora_A." in name:
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.empty(shape).normal_(0.0, _PREFIX_DEVIATION, generator=generator)


def prompt_tokens(prompt: SoftPrompt, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
    """Return the tokens whose embeddings initialise prompt tuning, int64 [virtual tokens].

    They are those of initText, repeated; without it, a sample of the vocabulary, by the seed (Lester et al.,
    arXiv:2104.08691, section 3.2, find both better than random values).
    """
    if prompt.init_text:
        ids = tokenizer(prompt.init_text, add_special_tokens=False)["input_ids"]
        rounds = math.ceil(prompt.virtual_tokens / max(1, len(ids)))
        return torch.tensor((ids * rounds)[: prompt.virtual_tokens])
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(tokenizer), (prompt.virtual_tokens,), generator=generator)
