"""Training computes what the model computes, or the model is refused before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.checks import parity
from finetune_trainer.train.model.network import attention
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.sft import Sft
from support import families

CPU = torch.device("cpu")
PACKED = "set training.packing to false"


def network_of(model_type: str, implementation: str | None = None) -> Network:
    """A network of random weights with the attention of training, or another one."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(families.config_of(model_type)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    if implementation is None:
        attention.isolate(model, card=None, half=False, soft_prompt=False)
    else:
        attention.register()
        model.set_attn_implementation(implementation)
    return Network(model, Sft())


def subject(*, is_packed: bool) -> parity.Subject:
    return parity.Subject("BASE", packing_remedy=PACKED if is_packed else None)


@pytest.mark.parametrize(
    ("model_type", "is_packed"),
    [
        ("llama", False),
        ("llama", True),
        ("gemma2", True),
        ("mixtral", True),
        ("nemotron", True),
        ("doge", True),
        ("llama4_text", False),
        ("jamba", False),
    ],
)
def test_a_model_whose_logits_are_its_own_passes(model_type: str, *, is_packed: bool) -> None:
    parity.check(network_of(model_type), CPU, subject(is_packed=is_packed))


REMEDY = "choose another model, or train it with your own script"
# Model type, attention, whether rows are packed, and what is said of it.
REFUSED: dict[str, tuple[str, str | None, bool, str]] = {
    "encoder": (
        "bert-generation",
        None,
        True,
        f"bert-generation, whose tokens attend to later tokens, so it is not a causal language model: {REMEDY}",
    ),
    "encoder in rows of its own": (
        "bert-generation",
        None,
        False,
        f"bert-generation, whose tokens attend to later tokens, so it is not a causal language model: {REMEDY}",
    ),
    "mask without documents": (
        "gpt_oss",
        None,
        True,
        f"gpt_oss, whose layers mix the documents of a row: {PACKED}",
    ),
    "recurrent layers": (
        "jamba",
        None,
        True,
        f"jamba, whose layers mix the documents of a row: {PACKED}",
    ),
    "arguments that do not arrive": (
        "nemotron",
        attention.NAME,
        True,
        "nemotron, whose forward pass fails in training (TypeError: isolated_attention() missing 2 required keyword-only "
        f"arguments: 'cu_seqlens' and 'max_seqlen'): {REMEDY}",
    ),
    "a window that does not arrive": (
        "phimoe",
        attention.NAME,
        True,
        "phimoe, whose attention computes different logits in training than in the model's own forward pass (they differ by SHARE): "
        f"{REMEDY}",
    ),
    "another output layer": (
        "inkling_text",
        None,
        False,
        f"inkling_text, which has an unsupported LM head (the logits differ by SHARE): {REMEDY}",
    ),
}


@pytest.mark.parametrize(
    ("model_type", "implementation", "is_packed", "sentence"), REFUSED.values(), ids=REFUSED
)
def test_a_model_that_computes_otherwise_in_training_is_refused(
    model_type: str, implementation: str | None, *, is_packed: bool, sentence: str
) -> None:
    network = network_of(model_type, implementation)
    with pytest.raises(RecipeRefusedError) as refused:
        parity.check(network, CPU, subject(is_packed=is_packed))
    before, share, after = sentence.partition("SHARE")
    assert refused.value.reason == "ModelNotSupported"
    assert refused.value.message.startswith(f"model.base BASE is a {before}")
    assert refused.value.message.endswith(after)
    assert bool(share) == ("%)" in refused.value.message)


def test_the_check_changes_nothing() -> None:
    network = network_of("llama")
    weights = {name: weight.clone() for name, weight in network.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    parity.check(network, CPU, subject(is_packed=True))
    torch.testing.assert_close(network.state_dict(), weights, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert network.base.config._attn_implementation == attention.NAME
    assert not network.base.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    for model_type in ("llama", "qwen3_moe"):
        network = network_of(model_type)
        network.model.to(dtype)
        parity.check(network, CPU, subject(is_packed=True))


def test_errors_of_memory_and_of_other_ranks_are_not_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end in another code, after which the job is tried again."""
    network = network_of("llama")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("gloo: connection closed by peer"),
    ):

        def fail(*_args: object, failure: Exception = error, **_options: object) -> None:
            raise failure

        monkeypatch.setattr(network, "compute_model_outputs", fail)
        with pytest.raises(RuntimeError) as raised:
            parity.check(network, CPU, subject(is_packed=True))
        assert raised.value is error
