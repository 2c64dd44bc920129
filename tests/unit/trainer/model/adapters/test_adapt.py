"""What a method adds to a model begins as it should, and computes as peft computes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from finetune_crds.training import Method, SoftPrompt
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError
from finetune_trainer.train.data import pack
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.adapters.new_tokens import NewTokens
from finetune_trainer.train.model.network.trained_network import trained_parameters
from finetune_trainer.train.model.weights import load
from support import families, networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

pytestmark = [pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS]

LORA = {"rank": 4, "alpha": 8}


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as single_rank:
        yield single_rank


@pytest.fixture(scope="module")
def gpt2(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose layers keep their weights as [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = load_tokenizer(networks.recipe(base_model).model, base_model)
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=32,
            n_layer=1,
            n_head=4,
            n_positions=128,
            bos_token_id=1,
            eos_token_id=1,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, base_model: Path) -> Path:
    folder: Path = base_model if request.param == "llama" else request.getfixturevalue("gpt2")
    return folder


def base_logits(base: Path, batch: pack.Batch) -> torch.Tensor:
    """What the base says of a batch of one row of one document."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)(
            batch.input_ids
        ).logits
    return logits


def one_document() -> pack.Batch:
    return pack.collate(networks.of_documents(list(range(5, 25))), [[0]], pad_id=0)


def own_logits(network: Any, batch: pack.Batch) -> torch.Tensor:
    def of_each_token(
        network: Any, batch: pack.Batch, _hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return network.head.compute_logits(network.compute_hidden_states(batch)), torch.zeros(0)

    with network.no_grad_forward(of_each_token):
        logits, _ = network(batch)
    return cast("torch.Tensor", logits)


def values(network: Any, part: str) -> dict[str, torch.Tensor]:
    """The parameters with a part in their names, whole."""
    return {
        name: parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in network.model.named_parameters()
        if part in name
    }


def test_new_values_depend_on_name_and_seed_alone() -> None:
    """So they are the same for any number of ranks, each of which takes its rows of them."""
    shape = torch.Size((4, 32))
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    first = adapt.compute_initial_value(name, shape, 1)
    torch.manual_seed(7)
    assert torch.equal(first, adapt.compute_initial_value(name, shape, 1))
    assert not torch.equal(first, adapt.compute_initial_value(name, shape, 2))
    assert not torch.equal(first, adapt.compute_initial_value(name.replace("0", "1"), shape, 1))
    assert not adapt.compute_initial_value(name.replace("lora_A", "lora_B"), shape, 1).any()


def test_new_values_are_distributed_as_those_of_peft() -> None:
    import peft

    layer = torch.nn.Sequential(torch.nn.Linear(400, 300))
    theirs = peft.get_peft_model(layer, peft.LoraConfig(r=64, target_modules=["0"]))
    peft_values = theirs.base_model.model[0].lora_A["default"].weight.detach()
    ours = adapt.compute_initial_value("0.lora_A.default.weight", peft_values.shape, 1)
    bound = 1 / math.sqrt(400)
    for sample in (ours, peft_values):
        assert sample.abs().max().item() == pytest.approx(bound, rel=1e-2)
        assert sample.std().item() == pytest.approx(bound / math.sqrt(3), rel=2e-2)
        assert abs(sample.mean().item()) < bound / 50


@pytest.mark.parametrize("method", ["LoRA", "DoRA"])
def test_an_adapted_model_begins_as_its_base(base: Path, world: World, method: str) -> None:
    recipe = networks.recipe(base, method={"type": method, "lora": LORA})
    network = networks.build(recipe, base, world).eval()
    batch = one_document()
    torch.testing.assert_close(own_logits(network, batch), base_logits(base, batch), rtol=1e-4, atol=1e-4)
    assert {weight.dtype for weight in trained_parameters(network)} == {torch.float32}


@pytest.mark.parametrize("method", ["LoRA", "DoRA"])
def test_an_adapter_computes_as_that_of_peft(base: Path, world: World, method: str) -> None:
    """With rsLoRA's scale, alpha / sqrt(rank), and with the magnitudes that peft gives DoRA."""
    import peft
    from transformers import AutoModelForCausalLM

    lora = {**LORA, "scaling": "RankStabilized"}
    recipe = networks.recipe(base, method={"type": method, "lora": lora})
    network = networks.build(recipe, base, world).eval()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        use_rslora=True,
        use_dora=method == "DoRA",
        fan_in_fan_out=model.config.model_type == "gpt2",
    )
    theirs = peft.get_peft_model(model, config).eval()
    parameters = dict(theirs.named_parameters())
    magnitudes = values(network, "lora_magnitude_vector")
    assert bool(magnitudes) == (method == "DoRA")
    torch.testing.assert_close(magnitudes, {name: parameters[name].detach() for name in magnitudes})
    scales = {module.scaling["default"] for module in network.model.modules() if hasattr(module, "lora_A")}
    assert scales == {8 / math.sqrt(4)}
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.model.named_parameters():
            if ".lora_" in name:
                change = torch.randn(parameter.shape) * 0.1
                if "magnitude" in name:
                    change = change.abs()
                for each in (
                    parameter.to_local() if hasattr(parameter, "to_local") else parameter,
                    parameters[name],
                ):
                    each.add_(change) if "magnitude" in name else each.copy_(change)
        batch = one_document()
        expected = theirs(batch.input_ids).logits
    torch.testing.assert_close(own_logits(network, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["PromptTuning", "PrefixTuning"])
def test_virtual_tokens_compute_as_those_of_peft(base_model: Path, world: World, method: str) -> None:
    """Trap 4: the prefix is there, and positions count it."""
    import peft
    from transformers import AutoModelForCausalLM

    recipe = networks.recipe(
        base_model, method={"type": method, "softPrompt": {"virtualTokens": 5}}, packing=False
    )
    network = networks.build(recipe, base_model, world).eval()
    kind = peft.PrefixTuningConfig if method == "PrefixTuning" else peft.PromptTuningConfig
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.float32)
    theirs = peft.PeftModelForCausalLM(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    ours = values(network, "prompt_encoder")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "prompt_encoder" in name:
                # Larger than at the start of a training, so that it shows.
                local = dict(network.model.named_parameters())[name].to_local()
                local.mul_(20)
                parameter.copy_(ours[name] if ours[name].data_ptr() == local.data_ptr() else local)
    batch = pack.collate(networks.of_documents(list(range(5, 25)), list(range(40, 60))), [[0], [1]], pad_id=0)
    with torch.no_grad():
        expected = theirs(input_ids=batch.input_ids).logits[:, -20:]
        without = model(batch.input_ids).logits
    logits = own_logits(network, batch)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (logits - without).abs().max() > 1e-2


def test_a_prompt_without_tokens_is_refused() -> None:
    """Many tokenizers ignore spaces between words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"red": 0, "house": 1}))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    prompt = SoftPrompt(virtual_tokens=3, init_text="red house")
    assert adapt.choose_prompt_tokens(prompt, tokenizer, 0).tolist() == [0, 1, 0]
    with pytest.raises(RecipeRefusedError) as refused:
        adapt.choose_prompt_tokens(SoftPrompt(virtual_tokens=3, init_text=" \t"), tokenizer, 0)
    assert refused.value.message == (
        "method.softPrompt.initText ' \\t' has no tokens in the tokenizer of the model: write a text with words, or remove initText"
    )


def test_a_padded_row_under_virtual_tokens_gives_what_it_gives_alone(base_model: Path, world: World) -> None:
    recipe = networks.recipe(
        base_model, method={"type": "PrefixTuning", "softPrompt": {"virtualTokens": 5}}, packing=False
    )
    network = networks.build(recipe, base_model, world).eval()
    split = networks.of_documents(list(range(5, 25)), list(range(40, 50)))
    together = own_logits(network, pack.collate(split, [[0], [1]], pad_id=0))
    alone = own_logits(network, pack.collate(split, [[1]], pad_id=0))
    torch.testing.assert_close(together[1, :10], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["What is the red house?", None])
def test_a_prompt_begins_with_words(base_model: Path, world: World, text: str | None) -> None:
    from transformers import AutoModelForCausalLM

    prompt = {"virtualTokens": 30, **({"initText": text} if text else {})}
    recipe = networks.recipe(base_model, method={"type": "PromptTuning", "softPrompt": prompt}, packing=False)
    tokenizer = load_tokenizer(recipe.model, base_model)
    words = adapt.choose_prompt_tokens(SoftPrompt.model_validate(prompt), tokenizer, recipe.training.seed)
    embedding = AutoModelForCausalLM.from_pretrained(base_model).get_input_embeddings().weight
    (embedded,) = values(networks.build(recipe, base_model, world), "prompt_encoder").values()
    torch.testing.assert_close(embedded, embedding[words].detach().float())
    if text:
        ids = tokenizer(text)["input_ids"]
        assert words.tolist() == (ids * 30)[:30]
    else:
        assert len(set(words.tolist())) > 15
        assert not torch.equal(words, adapt.choose_prompt_tokens(SoftPrompt(virtual_tokens=30), tokenizer, 1))


def test_a_prefix_begins_small(base_model: Path, world: World) -> None:
    recipe = networks.recipe(base_model, method={"type": "PrefixTuning"}, packing=False)
    (prefix,) = values(networks.build(recipe, base_model, world), "prompt_encoder").values()
    assert prefix.shape == (20, 2 * 2 * 16)
    assert prefix.std().item() == pytest.approx(0.02, rel=0.1)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an unknown target": (
        "LoRA",
        {"targetModules": ["q_proj", "qkv"]},
        "method.lora.targetModules qkv is not a linear layer of the model: its linear layers are down_proj, gate_proj, k_proj, "
        "lm_head, o_proj, q_proj, up_proj, v_proj",
    ),
    "an unknown layer": (
        "LoRA",
        {"modulesToSave": ["lm_head", "mlp"]},
        "method.lora.modulesToSave mlp is not a layer of the model: its layers are down_proj, embed_tokens, gate_proj, "
        "input_layernorm, k_proj, lm_head, norm, o_proj, post_attention_layernorm, q_proj, up_proj, v_proj",
    ),
    "a layer in four bits": (
        "QLoRA",
        {"modulesToSave": ["lm_head", "v_proj"]},
        "method.lora.modulesToSave v_proj is quantized to 4 bits by method QLoRA and cannot be trained: remove v_proj from the list, or set "
        "method.type LoRA",
    ),
    "no biases": (
        "LoRA",
        {"bias": "All"},
        "method.lora.bias All trains biases, but the model has no biases: remove method.lora.bias",
    ),
    "no biases of its layers": (
        "DoRA",
        {"bias": "LoraOnly"},
        "method.lora.bias LoraOnly trains biases, but the adapted layers have no biases: remove method.lora.bias",
    ),
}


@pytest.mark.parametrize(("method", "lora", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_model_does_not_have_is_refused(
    *, method: str, lora: dict[str, Any], message: str, base_model: Path, world: World
) -> None:
    from finetune_trainer.train.model.weights import load

    recipe = networks.recipe(base_model, method={"type": method, "lora": lora})
    model = load.build_skeleton(recipe, base_model, world)
    with pytest.raises(RecipeRefusedError) as refused:
        adapt.adapt(model, recipe.method, recipe.model.base)
    assert refused.value.message == message


def test_an_adapter_of_an_output_layer_with_new_tokens_is_refused(base_model: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base_model)
    for tied in (True, False):
        config.tie_word_embeddings = tied
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(RecipeRefusedError) as refused:
            adapt.adapt(model, low_rank(targetModules=["q_proj", "lm_head"]), "org/base", NewTokens((3,)))
        assert refused.value.message == (
            "method.lora.targetModules lm_head is the output layer, which gets rows for model.newTokens: list it in "
            "method.lora.modulesToSave instead"
        )


def test_new_tokens_beside_a_bias_of_the_output_layer_need_it_whole(
    base_model: Path, tmp_path: Path, world: World
) -> None:
    """Those of Phi and GPT-J, which have a bias for each token."""
    from transformers import AutoConfig, AutoTokenizer, PhiConfig, PhiForCausalLM

    like = AutoConfig.from_pretrained(base_model)
    config = PhiConfig(
        vocab_size=like.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=like.bos_token_id,
        eos_token_id=like.eos_token_id,
        pad_token_id=like.pad_token_id,
    )
    torch.manual_seed(0)
    base = tmp_path / "base"
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(base)

    def built(method: dict[str, Any]) -> Network:
        recipe = networks.recipe(base, method=method)
        model = recipe.model.model_copy(update={"new_tokens": ["<a>", "<b>"]})
        return networks.build(recipe.model_copy(update={"model": model}), base, world)

    with pytest.raises(PodFailure) as refused:
        built({"type": "LoRA", "export": "Merged"})
    assert refused.value.message == (
        "model.newTokens cannot be trained while lm_head is frozen, because its bias gets no entries for them: add lm_head to "
        "method.lora.modulesToSave, or set method.type Full"
    )
    for method in (
        {"type": "LoRA", "export": "Merged", "lora": {"modulesToSave": ["lm_head"]}},
        {"type": "Full"},
    ):
        assert built(method).head.vocabulary == like.vocab_size + 2


def low_rank(**lora: Any) -> Method:
    return Method.model_validate({"type": "LoRA", "lora": lora})


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize(
    "names", [["wte"], ["transformer.wte"], ["lm_head"], ["wte", "lm_head"]], ids="-".join
)
def test_a_tied_layer_is_trained_at_both_ends_whatever_its_name(names: list[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    adapted: Any = adapt.adapt(model, low_rank(modulesToSave=names), "org/base")
    base = adapted.get_base_model()
    ends = [end.modules_to_save["default"].weight for end in (base.transformer.wte, base.lm_head)]
    assert ends[0] is ends[1]
    assert ends[0].requires_grad


def test_a_tied_layer_that_peft_would_untie_is_refused() -> None:
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertLMHeadModel(BertConfig(**sizes, intermediate_size=32, is_decoder=True))
    with pytest.warns(UserWarning, match="no tied modules"), pytest.raises(RecipeRefusedError) as refused:
        adapt.adapt(model, low_rank(modulesToSave=["word_embeddings"]), "org/base")
    assert refused.value.message == (
        "method.lora.modulesToSave lists only one of bert.embeddings.word_embeddings and cls.predictions.decoder, which share a "
        "weight, and peft cannot train the weight for both: remove the listed layer from method.lora.modulesToSave, or set method.type Full"
    )


EXPERTS = {
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 2, "head_dim": 16},
}


def of_experts(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **heads, **EXPERTS[kind]))


# What docs/finetunejob/parameters.md says of target_parameters. The warnings are of patterns that peft makes itself.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "adapted"),
    [
        ("mixtral", {"self_attn", "experts", "gate"}),
        ("qwen3_moe", {"self_attn", "experts", "gate"}),
        ("gpt_oss", {"self_attn"}),
    ],
)
def test_the_default_adapts_the_experts_of_some_models(kind: str, adapted: set[str]) -> None:
    network = adapt.adapt(of_experts(kind), low_rank(), "org/base")
    names = [name.split(".") for name, weight in network.named_parameters() if weight.requires_grad]
    assert {part for name in names for part in name} & {"self_attn", "experts", "gate", "router"} == adapted


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("method", "change"),
    [
        (Method.model_validate({"type": "LoRA", "lora": {"dropout": 0.1}}), "set method.lora.dropout to 0"),
        (Method.model_validate({"type": "DoRA", "lora": {"dropout": 0}}), "set method.type to LoRA"),
    ],
    ids=["dropout", "DoRA"],
)
def test_what_experts_cannot_be_adapted_with_is_refused(kind: str, method: Method, change: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        adapt.adapt(of_experts(kind), method, "org/base")
    assert str(refused.value) == (
        "method.lora.targetModules includes the model's experts, which peft can adapt only with LoRA and no dropout: "
        f"{change}, or list only attention layers"
    )


def test_layers_of_gpt2_can_be_named(gpt2: Path, world: World) -> None:
    recipe = networks.recipe(gpt2, method={"type": "LoRA", "lora": {**LORA, "targetModules": ["c_attn"]}})
    model = load.build_skeleton(recipe, gpt2, world)
    adapted = adapt.adapt(model, recipe.method, "base")
    assert {
        name.rsplit(".", 2)[0] for name, weight in adapted.named_parameters() if weight.requires_grad
    } == {f"base_model.model.transformer.h.0.attn.c_attn.lora_{part}" for part in "AB"}


def gemma3() -> Any:
    """A wrapper of a vision tower, a projector and a decoder."""
    from transformers import Gemma3Config

    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return load.build_empty_model(config, torch.float32, trust=False)


# Method, and the names that its fields give.
OF_GEMMA3: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all linear layers": (
        {},
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
    "layers that the tower has too": ({"targetModules": ["q_proj"]}, {"q_proj"}),
    "a layer beside them": ({"targetModules": ["q_proj"], "modulesToSave": ["k_proj"]}, {"q_proj", "k_proj"}),
}


@pytest.mark.parametrize("case", OF_GEMMA3)
def test_a_tower_of_images_is_not_adapted(case: str) -> None:
    fields, expected = OF_GEMMA3[case]
    method = Method.model_validate({"type": "LoRA", "lora": {**LORA, **fields}})
    adapted = adapt.adapt(gemma3(), method, "base")
    names = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    within = "base_model.model.model.language_model.layers.0."
    assert all(name.startswith(within) for name in names)
    assert {name.removeprefix(within).split(".")[1] for name in names} == expected


@pytest.mark.parametrize("field", ["targetModules", "modulesToSave"])
def test_a_layer_of_a_tower_is_refused(field: str) -> None:
    method = Method.model_validate({"type": "LoRA", "lora": {**LORA, field: ["fc1"]}})
    with pytest.raises(
        RecipeRefusedError, match=rf"^method\.lora\.{field} fc1 is not a (linear )?layer of the model"
    ):
        adapt.adapt(gemma3(), method, "base")


def test_a_decoder_whose_model_names_another_module_as_its_decoder_is_adapted() -> None:
    """ModernBERT's get_decoder() returns its output layer."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(families.config_of("modernbert-decoder"))
    adapted = adapt.adapt(model, Method.model_validate({"type": "LoRA", "lora": LORA}), "base")
    names = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert names
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
