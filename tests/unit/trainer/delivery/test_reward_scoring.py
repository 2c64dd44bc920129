"""Requests to a reward model, through MLflow's own scoring code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds.recipe import Recipe
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.train.delivery.signature import Examples
from support import networks
from support.exports import CONVERSATIONS, PROMPTS, written
from support.pods import Pod
from support.reward_models import load_reward_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.train.runtime.distributed import World

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in networks.PEFT_WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
Json = dict[str, Any]
DOCS = Path(__file__).parents[4] / "docs/modelpromotion/serving.md"
REWARDS: Json = {"objective": {"type": "RewardModel"}, "data.columns": {"type": "Preference"}}
MESSAGES = [
    {"role": "user", "content": "What is the red house? "},
    {"role": "assistant", "content": "The house is red."},
]


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


def export(
    recipe: Json, base: Path, world: World, folder: Path, examples: Examples = PROMPTS, **changes: Any
) -> Path:
    pod = Pod(folder, recipe).but(
        {
            "model.base": str(base),
            **REWARDS,
            **{name.replace("_", "."): value for name, value in changes.items()},
        }
    )
    written(
        Recipe.model_validate(pod.recipe), folder / "export", base, world, examples, base=Origin(str(base))
    )
    return folder / "export"


def invoke(folder: Path, request: Json) -> tuple[int, Any]:
    """The status and the body of the answer, or the message, by the code of MLflow's scoring server."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.pyfunc import scoring_server

    model = mlflow.pyfunc.load_model(str(folder))
    try:
        response = scoring_server.invocations(
            json.dumps(request), "application/json", model, model.metadata.get_input_schema()
        )
    except MlflowException as error:
        return error.get_http_status_code(), error.message
    return response.status, json.loads(response.response)


def compute_reward(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=torch.tensor([ids])).logits[0, 0])


def test_the_request_of_the_docs_gets_the_reward_of_transformers(
    recipe: Json, base_model: Path, world: World, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = export(recipe, base_model, world, tmp_path)
    (block,) = re.findall(r'```json title="Request to a reward model"\n(.+?)```', DOCS.read_text(), re.DOTALL)
    request = json.loads(block)
    status, body = invoke(folder, request)
    assert status == 200, body
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    (prompt,), (response,) = request["inputs"]["prompt"], request["inputs"]["response"]
    ids = [*tokenizer(prompt).input_ids, *tokenizer(response).input_ids, tokenizer.eos_token_id]
    assert body == {"predictions": [{"reward": pytest.approx(compute_reward(model, ids), rel=1e-4)}]}

    # A pipeline of MLflow's transformers flavor is there too, and the files say what the model is.
    import mlflow

    assert mlflow.transformers.load_model(str(folder)).task == "text-classification"
    assert "pipeline_tag: text-classification" in (folder / "model" / "README.md").read_text()
    missing = invoke(folder, {"inputs": {"prompt": ["a"]}})
    assert missing[0] == 400


def test_an_adapter_scores_conversations_on_its_base(
    recipe: Json, base_model: Path, world: World, tmp_path: Path
) -> None:
    folder = export(
        recipe,
        base_model,
        world,
        tmp_path,
        CONVERSATIONS,
        method={"type": "LoRA", "lora": {"rank": 4}},
        model_chatTemplate={"type": "ChatML"},
    )
    assert not (folder / "model").exists()
    status, body = invoke(folder, {"inputs": {"messages": MESSAGES}})
    assert status == 200, body
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "peft")
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    expected = compute_reward(load_reward_adapter(folder / "peft"), tokenizer(text).input_ids)
    assert body == {"predictions": [{"reward": pytest.approx(expected, rel=1e-4)}]}
    assert invoke(folder, {"inputs": {"messages": [{"role": "user"}]}})[0] == 400
