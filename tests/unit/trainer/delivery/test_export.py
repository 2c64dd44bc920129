"""What is written is what was trained, for each kind of model and of base."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from finetune_crds import contract
from finetune_crds.contract import TrainResult
from finetune_crds.recipe import Recipe
from finetune_crds.training import Method
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.delivery import signature
from finetune_trainer.train.delivery.lineage import Counts, Lineage, build_version_tags, render_model_card
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.weights import load, standalone
from support.exports import CONVERSATIONS, INPUT, PROMPTS, written

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World
    from support.pods import Pod

pytestmark = [
    # peft reads a property that transformers is about to rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.usefixtures("mlflow_imported"),
]
LORA = {"type": "LoRA", "lora": {"rank": 4}}
PISSA = {"type": "LoRA", "lora": {"rank": 4, "init": "PiSSA", "scaling": "RankStabilized"}}
EOS = "<eos>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUT).logits


HELD, NAMED = {"peft", "model", "components"}, {"peft", "components"}
DIGEST = "sha256:0123"
STORE, VERSION = Origin("s3://models/base", digest=DIGEST), Origin("models:/base/3/model", digest=DIGEST)
# The method, where the base lies (`Origin` of an empty path: in the folder of the base model), the registry, and the folders.
LOADED: dict[str, tuple[dict[str, Any], Origin | None, str, set[str]]] = {
    "a model": ({"type": "Full"}, Origin(""), "", {"model", "components"}),
    "a merged adapter": ({**LORA, "export": "Merged"}, STORE, "", HELD),
    "an adapter of a volume's base": (LORA, Origin("", digest=DIGEST), "", NAMED),
    "an adapter of an object store's base": (LORA, STORE, "", NAMED),
    "an adapter that began with PiSSA": (PISSA, STORE, "", NAMED),
    "an adapter of a registered model": (LORA, VERSION, "", NAMED),
    "an adapter of a base that was merged in the pod": (LORA, None, "", HELD),
    # MLflow's client registers nothing in Unity Catalog whose weights are elsewhere.
    "an adapter in Unity Catalog": (LORA, STORE, "databricks-uc", HELD),
}


@pytest.mark.parametrize("case", LOADED)
def test_mlflow_loads_what_was_trained(
    case: str, pod: Pod, base_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    method, base, registry, folders = LOADED[case]
    if base is not None and not base.uri:
        base = replace(base, uri=str(base_model))
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry)
    changes = {"method": method, "model.base": base.uri if base else "models:/adapter@candidate"}
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    folder = pod.folder / "export"
    model_card = written(recipe, folder, base_model, world, base=base)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == folders
    named_base = base if folders == NAMED else None
    assert base_reference.read_reference(folder / "peft") == named_base
    # What lies neither in the version nor on a volume, its reader downloads.
    elsewhere = {"base_model_path": str(base_model)} if named_base in (STORE, VERSION) else {}
    parts = mlflow.transformers.load_model(str(folder), return_type="components", **elsewhere)
    torch.testing.assert_close(logits(parts["model"]), model_card, rtol=1e-4, atol=1e-4)
    assert parts["tokenizer"]("red").input_ids
    if folders != {"model", "components"}:
        stored = json.loads((folder / "peft/adapter_config.json").read_text())
        assert stored["base_model_name_or_path"] == recipe.model.base


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_mlflow_finds_the_base_of_an_adapter_on_the_hub(
    template: str | None, pod: Pod, base_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = pod.folder / "hub/models--org--base"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(base_model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(pod.folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    changes: dict[str, Any] = {"method": LORA, "model.base": "org/base"}
    if template is not None:
        changes["model.chatTemplate"] = {"type": "Jinja", "jinja": template}
    folder = pod.folder / "export"
    recipe = Recipe.model_validate(pod.but(changes).recipe)
    mlmodel = written(recipe, folder, snapshot, world, base=Origin("org/base", commit, DIGEST))
    assert {path.name for path in folder.iterdir() if path.is_dir()} == NAMED
    parts = mlflow.transformers.load_model(str(folder), return_type="components")
    torch.testing.assert_close(logits(parts["model"]), mlmodel, rtol=1e-4, atol=1e-4)
    assert parts["tokenizer"].chat_template == template
    stored = json.loads((folder / "peft/adapter_config.json").read_text())
    assert (stored["base_model_name_or_path"], stored["revision"]) == ("org/base", commit)


CHATML: dict[str, Any] = {
    "model.chatTemplate": {"type": "ChatML"},
    "model.newTokens": ["<|im_end|>", "<|im_start|>"],
}
# The method, and where the token that ends an answer is written: in which generation configs, and in which tokenizers.
STOPS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "a model": ({"type": "Full"}, {"model"}, {"model", "components/tokenizer"}),
    "a merged adapter": (
        {**LORA, "export": "Merged"},
        {"model", "peft"},
        {"model", "peft", "components/tokenizer"},
    ),
    "an adapter": (LORA, {"peft"}, {"peft", "components/tokenizer"}),
}


@pytest.mark.parametrize("case", STOPS)
def test_what_is_registered_stops_where_its_chat_template_ends_an_answer(
    case: str, pod: Pod, base_model: Path, world: World
) -> None:
    from transformers import AutoTokenizer

    method, models, tokenizers = STOPS[case]
    recipe = Recipe.model_validate(pod.but({"method": method, **CHATML}).recipe)
    folder = pod.folder / "export"
    written(recipe, folder, base_model, world, CONVERSATIONS, base=STORE)
    saved_tokenizers = {name: AutoTokenizer.from_pretrained(folder / name) for name in tokenizers}
    assert {name: each.eos_token for name, each in saved_tokenizers.items()} == dict.fromkeys(
        tokenizers, "<|im_end|>"
    )
    end, text = (
        saved_tokenizers["components/tokenizer"].convert_tokens_to_ids(token) for token in ("<|im_end|>", EOS)
    )
    configs = {
        file.parent.name: json.loads(file.read_text()) for file in folder.glob("*/generation_config.json")
    }
    assert {name: config["eos_token_id"] for name, config in configs.items()} == {
        name: [end, text] for name in models
    }


@pytest.mark.parametrize(("base_stops", "registered"), [([0, 7], [0, 7]), (None, [0])])
def test_an_adapter_has_the_stops_and_the_settings_of_its_base(
    base_stops: list[int] | None, registered: list[int], pod: Pod, base_model: Path, world: World
) -> None:
    base = Path(shutil.copytree(base_model, pod.folder / "base"))
    settings = {"top_k": 5} | ({} if base_stops is None else {"eos_token_id": base_stops})
    (base / "generation_config.json").write_text(json.dumps(settings))
    folder = pod.folder / "export"
    written(Recipe.model_validate(pod.but({"method": LORA}).recipe), folder, base, world, base=STORE)
    written_config = json.loads((folder / "peft/generation_config.json").read_text())
    assert written_config == {"top_k": 5, "eos_token_id": registered}


def test_a_generation_config_that_lacks_the_end_of_the_tokenizer_gets_it(
    pod: Pod, base_model: Path, world: World
) -> None:
    """Transformers stops at the generation config alone."""
    base = Path(shutil.copytree(base_model, pod.folder / "base"))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    folder = pod.folder / "export"
    recipe = Recipe.model_validate(pod.recipe)
    written(recipe, folder, base, world)
    end = load_tokenizer(recipe.model, base).eos_token_id
    assert json.loads((folder / "model/generation_config.json").read_text()) == {"eos_token_id": [end, 7]}


@pytest.mark.parametrize("examples", [PROMPTS, CONVERSATIONS], ids=["prompts", "conversations"])
def test_the_stops_of_the_base_stay_where_they_are_right(
    examples: signature.Examples, pod: Pod, base_model: Path, world: World, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    base = Path(shutil.copytree(base_model, tmp_path / "stops"))
    tokenizer = load_tokenizer(Recipe.model_validate(pod.but(CHATML).recipe).model, base)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", EOS)]
    stops = {"eos_token_id": [*ends, 7]}
    (base / "generation_config.json").write_text(json.dumps(stops))
    folder = pod.folder / "export"
    written(Recipe.model_validate(pod.but(CHATML).recipe), folder, base, world, examples)
    assert json.loads((folder / "model/generation_config.json").read_text()) == stops
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token == EOS


# What the tokenizer of the base says, and that of the registered model: where it says nothing, the positions of the model.
LONGEST = {48: 48, None: 128}


@pytest.mark.parametrize("tokenizer_limit", LONGEST)
def test_the_tokenizer_knows_the_longest_text_of_the_model(
    tokenizer_limit: int | None, pod: Pod, base_model: Path, world: World
) -> None:
    from transformers import AutoTokenizer

    base = Path(shutil.copytree(base_model, pod.folder / "base"))
    config = json.loads((base / "tokenizer_config.json").read_text())
    config.pop("model_max_length", None)
    config |= {} if tokenizer_limit is None else {"model_max_length": tokenizer_limit}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    folder = pod.folder / "export"
    written(Recipe.model_validate(pod.recipe), folder, base, world)
    assert AutoTokenizer.from_pretrained(folder / "model").model_max_length == LONGEST[tokenizer_limit]


def test_weights_go_back_into_the_type_of_the_base(
    pod: Pod, base_model: Path, tmp_path: Path, world: World
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(half)
    folder = pod.folder / "export"
    written(Recipe.model_validate(pod.but({"model.base": str(half)}).recipe), folder, half, world)
    assert AutoModelForCausalLM.from_pretrained(folder / "model").dtype == torch.bfloat16


def test_the_model_card_tells_where_the_model_comes_from(pod: Pod, table: Path, base_model: Path) -> None:
    recipe = Recipe.model_validate(pod.but({"register": {"model": "support"}}).recipe)
    recipe = recipe.model_copy(update={"method": Method.model_validate(LORA)})
    assert recipe.data.splits is not None
    card = render_model_card(
        Lineage(
            recipe,
            recipe.data.splits,
            TrainResult(step=3, base_eval_loss=5.5, eval_loss=1.25),
            {"train": Counts(1072, 12345), "validation": Counts(8, 99)},
        )
    )
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": str(base_model),
    }
    assert f"FineTuneJob tests/tiny: 3 steps on {table} version 0." in body
    assert "| Evaluation loss before training | 5.5000 |\n| Evaluation loss | 1.2500 |\n" in body
    assert (
        "| Split | Examples | Tokens |\n| --- | --- | --- |\n| train | 1,072 | 12,345 |\n| validation | 8 | 99 |\n"
        in body
    )
    assert "| lora_rank | 4 |\n| lora_alpha | 32 |\n" in body
    assert f"## Recipe {recipe.digest()}\n\n```yaml\nkind: Recipe\n" in body


def test_the_model_card_tells_which_weights_were_the_best(pod: Pod, table: Path) -> None:
    recipe = Recipe.model_validate(pod.recipe)
    assert recipe.data.splits is not None
    card = render_model_card(Lineage(recipe, recipe.data.splits, TrainResult(step=12), weights_step=6))
    assert (
        f"FineTuneJob tests/tiny: the weights after step 6 of 12, which have the lowest evaluation loss, on {table} version 0."
        in card
    )


@pytest.mark.parametrize("eval_data", [None, "d1"])
def test_a_version_says_what_it_was_evaluated_on(pod: Pod, eval_data: str | None) -> None:
    recipe = Recipe.model_validate(pod.recipe)
    assert recipe.data.splits is not None
    lineage = Lineage(recipe, recipe.data.splits, TrainResult(step=3), eval_data=eval_data)
    assert build_version_tags(lineage).get(contract.TAG_EVAL_DATA) == eval_data


@pytest.mark.parametrize("method", [{"type": "Full"}, {**LORA, "export": "Merged"}])
def test_what_belongs_to_a_model_goes_with_it(
    pod: Pod, base_model: Path, method: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base's generation config, also one that contradicts itself, the chat template, and shards of bounded size."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = pod.folder / "base"
    AutoModelForCausalLM.from_pretrained(base_model).save_pretrained(base)
    AutoTokenizer.from_pretrained(base_model).save_pretrained(base)
    generation = {"do_sample": False, "temperature": 0.3, "max_new_tokens": 7, "eos_token_id": 0}
    (base / "generation_config.json").write_text(json.dumps(generation))
    monkeypatch.setattr(standalone, "_MAX_SHARD_SIZE", "40KB")
    changes = {
        "method": method,
        "model.base": str(base),
        "model.chatTemplate": {"type": "Jinja", "jinja": TEMPLATE},
    }
    folder = pod.folder / "export"
    mlmodel = written(Recipe.model_validate(pod.but(changes).recipe), folder, base, world)
    assert json.loads((folder / "model/generation_config.json").read_text()) == generation
    index = json.loads((folder / "model/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for place in ("model", "components/tokenizer"):
        assert AutoTokenizer.from_pretrained(folder / place).chat_template == TEMPLATE
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(folder / "model")), mlmodel, rtol=1e-4, atol=1e-4
    )


def test_an_unknown_target_module_is_refused_with_the_known_names(
    pod: Pod, base_model: Path, world: World
) -> None:
    method = {"type": "LoRA", "lora": {"targetModules": ["q_proj", "qkv"]}}
    recipe = Recipe.model_validate(pod.but({"method": method}).recipe)
    model = load.build_skeleton(recipe, base_model, world)
    with pytest.raises(RecipeRefusedError) as refused:
        adapt.adapt(model, recipe.method, recipe.model.base)
    assert refused.value.message == (
        "method.lora.targetModules qkv is not a linear layer of the model: its linear layers are down_proj, gate_proj, k_proj, "
        "lm_head, o_proj, q_proj, up_proj, v_proj"
    )


def test_a_base_that_cannot_be_used_is_refused(
    pod: Pod, base_model: Path, tmp_path: Path, world: World
) -> None:
    (tmp_path / "empty").mkdir()

    def sentence(changes: dict[str, Any]) -> str:
        recipe = Recipe.model_validate(pod.but(changes).recipe)
        with pytest.raises(RecipeRefusedError) as refused:
            load.build_skeleton(recipe, Path(recipe.model.base), world)
        return refused.value.message.replace(str(tmp_path), "").replace(str(base_model), "BASE")

    assert sentence({"model.base": str(tmp_path / "empty")}).startswith(
        "model.base /empty cannot be loaded: Unrecognized model"
    )
    assert sentence({"training.maxLength": 512}) == (
        "training.maxLength 512 exceeds the context of 128 tokens of model.base BASE: lower training.maxLength"
    )
