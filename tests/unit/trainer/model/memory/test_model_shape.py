"""The sizes of models that the estimate of their memory depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.memory import fit
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.weights import load
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks
from support.shapes import ADAPTER_8B, ENDS_8B, LLAMA_8B, PARAMETERS, llama_shapes, shape_of

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

# Of the embedding, and of the output layer.
END = ENDS_8B // 2


def ends(shape: Shape) -> tuple[int, int, int, int, int]:
    """The numbers of both ends, and how many of them are trained."""
    return shape.embedding, shape.embedding_trained, shape.output, shape.output_trained, shape.head


def test_shapes_are_those_of_the_models() -> None:
    shapes = llama_shapes()
    full, adapted = shapes["8B Full"], shapes["8B LoRA"]
    assert (full.parameters, full.trained) == (PARAMETERS["8B"], PARAMETERS["8B"])
    assert ends(full) == (END, END, END, END, END)
    assert (full.layers, full.width, full.feed_forward) == (32, 4096, 14336)
    assert (adapted.parameters, adapted.trained) == (PARAMETERS["8B"] + ADAPTER_8B, ADAPTER_8B)
    assert (ends(adapted), adapted.copied) == ((END, 0, END, 0, 0), 0)
    assert (adapted.initial, shapes["8B PiSSA"].initial) == (0, ADAPTER_8B)
    assert shapes["70B Full"].parameters == PARAMETERS["70B"]


def test_what_is_trained_whole_is_also_there_as_it_was() -> None:
    whole = llama_shapes()["8B whole"]
    trained = ADAPTER_8B + ENDS_8B
    assert (whole.parameters, whole.trained) == (PARAMETERS["8B"] + trained, trained)
    assert ends(whole) == (2 * END, END, 2 * END, END, END)


def test_new_tokens_have_rows_in_both_ends_and_a_copy_of_the_embedding() -> None:
    new, rows = shape_of(LLAMA_8B, "LoRA", new=NewTokens((128256, 128257))), 2 * 4096
    # In the weight, where nothing is trained, and beside it.
    assert ends(new) == (END + 2 * rows, rows, END + 2 * rows, rows, rows)
    assert (new.trained, new.copied) == (ADAPTER_8B + 2 * rows, ENDS_8B + 2 * rows)


def test_a_tied_output_layer_is_a_part_of_the_embedding() -> None:
    tied = shape_of(LLAMA_8B, "Full", tied=True)
    assert tied.parameters == PARAMETERS["8B"] - END
    assert (tied.tied, ends(tied)) == (True, (END, END, 0, 0, END))


def test_a_four_bit_base_is_counted_as_it_is_stored(base_model: Path) -> None:
    recipe = networks.recipe(base_model, method={"type": "QLoRA"})
    with networks.alone() as world:
        model = load.load_quantized(
            recipe, base_model, world, skeleton=load.build_skeleton(recipe, base_model, world)
        )
    adapted = adapt.adapt(model, recipe.method, "base")
    shape = Shape.of(Network(adapted, Sft()), None, quantized=True)
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    rest = model.get_input_embeddings().weight.numel() + 5 * 32
    assert (shape.unsharded, shape.unsharded_bytes) == (linear // 2 + rest, linear // 2 + 4 * rest)


def test_experts_in_one_tensor_are_not_packed(capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of docs/finetunejob/methods.md."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    sizes = {
        "Mixtral 8x7B": MixtralConfig(tie_word_embeddings=False),
        "Qwen3-30B-A3B": Qwen3MoeConfig(
            num_experts=128,
            hidden_size=2048,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=False,
        ),
    }
    recipe = networks.recipe(Path("/base"), method={"type": "QLoRA"}, precision="BF16")
    card = Card("NVIDIA-T4", 2**30, (8, 0))
    world = World(0, 1, 0, 1, torch.device("cpu"), card=card)
    shares: dict[str, float] = {}
    gibibytes: dict[str, int] = {}
    for name, config in sizes.items():
        model = load.build_empty_model(config, torch.bfloat16, trust=False)
        # The adapters of all experts have no values either, which take seconds to draw.
        with torch.device("meta"):
            network = Network(adapt.adapt(model, recipe.method, "base"), Sft())
        shape = Shape.of(network, None, quantized=True)
        shares[name] = round(shape.four_bits / (shape.parameters - shape.trained), 2)
        gibibytes[name] = round(shape.unsharded_bytes / 2**30)
        with pytest.raises(RecipeRefusedError) as refused:
            fit.choose(network, recipe, world, 2048, None)
        sentence = f"{shares[name]:.0%} of the base is quantized to 4 bits: experts that the model stores in one tensor are not quantized"
        assert refused.value.message.endswith(f"; {sentence}")
        assert sentence in capsys.readouterr().out.splitlines()
    assert shares == {"Mixtral 8x7B": 0.03, "Qwen3-30B-A3B": 0.03}
    assert gibibytes == {"Mixtral 8x7B": 85, "Qwen3-30B-A3B": 56}
