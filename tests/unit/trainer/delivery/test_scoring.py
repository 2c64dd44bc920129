"""Requests as people send them, through MLflow's own scoring code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds.recipe import Recipe
from finetune_trainer.examples import chat_messages
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.train.delivery.signature import Examples
from support import networks
from support.evaluations import save_model
from support.exports import CONVERSATIONS, PROMPTS, written
from support.pods import Pod

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World
    from support.training import Mlflow

pytestmark = [
    # peft reads a property that transformers is about to rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.usefixtures("mlflow_imported"),
]
Export = Callable[..., Path]
DOCS = Path(__file__).parents[4] / "docs/modelpromotion/serving.md"
ASKED = "What is the red house? "
CHATML: dict[str, Any] = {"model.chatTemplate": {"type": "ChatML"}}
LORA = {"type": "LoRA", "lora": {"rank": 4}}
PREFIX = {"type": "PrefixTuning", "softPrompt": {"virtualTokens": 3}}
CHAT = [{"role": "user", "content": ASKED}]


def make_call(arguments: Any) -> dict[str, Any]:
    """A message that calls a tool."""
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.fixture(scope="module")
def base(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says something else at each step."""
    return save_model(base_model, tmp_path_factory.mktemp("talker"), width=64, deviation=0.2)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A gang of one rank, for all exports."""
    with networks.alone() as lone_world:
        yield lone_world


@pytest.fixture(scope="module")
def export(
    recipe: dict[str, Any], base: Path, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Export:
    """A function that exports a model of some changes to the recipe, once: a test that writes into the folder takes a copy."""
    exports: dict[str, Path] = {}

    def export_once(
        examples: Examples = PROMPTS,
        changes: dict[str, Any] | None = None,
        origin: Origin | None = None,
        *,
        registry: str = "",
    ) -> Path:
        key = repr((examples, changes or {}, origin, registry))
        if key not in exports:
            folder = tmp_path_factory.mktemp("exports") / "export"
            changed = Pod(folder.parent, recipe).but({"model.base": str(base), **(changes or {})})
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("MLFLOW_REGISTRY_URI", registry)
                written(
                    Recipe.model_validate(changed.recipe),
                    folder,
                    base,
                    world,
                    examples,
                    base=origin or Origin(str(base)),
                )
            exports[key] = folder
        return exports[key]

    return export_once


def export_for(export: Export, examples: Examples) -> Path:
    """The export of a model of these requests, with a chat template if they are conversations."""
    return export(examples, CHATML if examples.chat else None)


def copy_export(folder: Path, copy: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(folder, copy / "export")


def invoke(folder: Path, *requests: dict[str, Any], **settings: Any) -> list[tuple[int, Any]]:
    """The status and the body of the answer to each request, by the code of MLflow's scoring server."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.pyfunc import scoring_server

    model = mlflow.pyfunc.load_model(str(folder), model_config=settings or None)
    schema = model.metadata.get_input_schema()
    answers: list[tuple[int, Any]] = []
    for request in requests:
        try:
            response = scoring_server.invocations(json.dumps(request), "application/json", model, schema)
            answers.append((response.status, json.loads(response.response)))
        except MlflowException as error:
            answers.append((error.get_http_status_code(), error.message))
    return answers


def read_text(body: Any) -> str:
    """The text of the only answer, which a chat client gets without predictions."""
    (answer,) = body["predictions"] if isinstance(body, dict) else body
    return str(answer if isinstance(answer, str) else answer["choices"][0]["message"]["content"])


def continue_greedily(folder: Path, text: str, count: int) -> str:
    """The most probable tokens behind a text that is tokenized as it is, one forward pass each."""
    import mlflow

    parts = mlflow.transformers.load_model(str(folder), return_type="components")
    tokenizer, model = parts["tokenizer"], parts["model"].eval()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    begin = len(tokens)
    with torch.no_grad():
        while len(tokens) < begin + count:
            token = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            tokens.append(token)
    return str(tokenizer.decode(tokens[begin:], skip_special_tokens=True)).strip()


def read_requests() -> dict[str, dict[str, Any]]:
    """The requests in the docs, by their titles."""
    blocks = re.findall(r'```json title="Request: (.+?)"\n(.+?)```', DOCS.read_text(), re.DOTALL)
    return {title: json.loads(text) for title, text in blocks}


# The models that the requests of the docs are for.
SERVED: dict[str, Examples] = {
    "a rendered prompt": PROMPTS,
    "a column": replace(PROMPTS, prompt="instruction"),
    "a conversation": CONVERSATIONS,
    "a conversation, as a chat client": CONVERSATIONS,
}


def test_the_docs_have_a_request_for_each_kind_of_model() -> None:
    assert list(read_requests()) == list(SERVED)


@pytest.mark.parametrize("title", SERVED)
def test_the_requests_of_the_docs_are_answered_without_the_prompt(title: str, export: Export) -> None:
    request, examples = read_requests()[title], SERVED[title]
    folder = export_for(export, examples)
    greedy = {name: value for name, value in request.items() if name != "temperature"}
    greedy |= {"params": {"max_new_tokens": 20}} if "inputs" in request else {"max_tokens": 20}
    (prompt,) = (
        request.get("inputs", request)[examples.input] if examples.chat else request["inputs"].values()
    )
    question = prompt["content"] if examples.chat else prompt
    rendered = (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" if examples.chat else question
    )
    answers = invoke(folder, request, greedy)
    assert [status for status, _ in answers] == [200, 200], answers
    text, greedy_text = (read_text(body) for _, body in answers)
    assert question not in text
    assert greedy_text == continue_greedily(folder, rendered, 20)


# What changes in the recipe, and the registry.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "a model": ({}, ""),
    "a merged adapter": ({"method": {**LORA, "export": "Merged"}}, ""),
    "an adapter of a volume's base": ({"method": LORA}, ""),
    "an adapter in Unity Catalog, with its base": ({"method": LORA}, "databricks-uc"),
    "virtual tokens": ({"method": PREFIX, "training.packing": False}, ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_answers_greedily(kind: str, export: Export) -> None:
    changes, registry = KINDS[kind]
    folder = export(PROMPTS, changes, registry=registry)
    prompts = [ASKED, "Who?"]
    request = {"inputs": {"prompt": prompts}, "params": {"max_new_tokens": 6}}
    expected = [continue_greedily(folder, prompt, 6) for prompt in prompts]
    assert invoke(folder, request) == [(200, {"predictions": expected})]


def test_a_dictionary_with_a_list_of_prompts_is_a_batch(export: Export) -> None:
    """MLflow makes one row of it outside of its server."""
    import mlflow

    model = mlflow.pyfunc.load_model(str(export()), model_config={"max_new_tokens": 2})
    prompts = [ASKED, "Who?"]
    answers = [model.predict({"prompt": prompt})[0] for prompt in prompts]
    assert (
        model.predict({"prompt": prompts})
        == model.predict([{"prompt": prompt} for prompt in prompts])
        == answers
    )


def test_the_base_of_an_adapter_comes_from_the_registry_or_from_where_the_reader_says(
    export: Export, base: Path, mlflow_of_test: Mlflow
) -> None:
    registry = mlflow_of_test.client()
    registry.create_registered_model("base")
    registry.create_model_version("base", base.as_uri())
    folder = export(PROMPTS, {"method": LORA}, Origin("models:/base/1"))
    request = {"inputs": {"prompt": ASKED}, "params": {"max_new_tokens": 6}}
    ((status, body),) = invoke(folder, request)
    assert status == 200, body
    assert invoke(folder, request, base=str(base)) == [(200, body)]


def test_the_configuration_of_a_server_sets_the_length_of_answers(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that sets max_new_tokens has its own length."""
    folder = export()
    request: dict[str, Any] = {"inputs": {"prompt": ASKED}}
    requests = [request, {**request, "params": {"max_new_tokens": 2}}]
    expected = [(200, {"predictions": [continue_greedily(folder, ASKED, count)]}) for count in (6, 2)]
    assert invoke(folder, *requests, max_new_tokens=6) == expected
    monkeypatch.setenv("MLFLOW_PYFUNC_INFERENCE_CONFIG", '{"max_new_tokens": 6}')
    assert invoke(folder, *requests) == expected


def test_an_adapter_stops_where_its_generation_config_says(export: Export, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = copy_export(export(PROMPTS, {"method": LORA}), tmp_path)
    request = {"inputs": {"prompt": ASKED}, "params": {"max_new_tokens": 6}}
    tokenizer = AutoTokenizer.from_pretrained(folder / "components/tokenizer")
    ((_, body),) = invoke(folder, request)
    tokens = tokenizer(body["predictions"][0]).input_ids
    config = folder / "peft/generation_config.json"
    config.write_text(json.dumps({"eos_token_id": tokens[-1]}))
    ((_, body),) = invoke(folder, request)
    tokens_to_stop = tokens[: tokens.index(tokens[-1])]
    assert body["predictions"] == [tokenizer.decode(tokens_to_stop).strip()]


# Parameters, and whether every answer is the greedy one.
DECODING: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "a temperature": ({"temperature": 50.0}, False),
    "top_p, of every token": ({"top_p": 1.0, "temperature": 50}, False),
    "a temperature of 0": ({"temperature": 0, "top_p": 0.9}, True),
    "do_sample": ({"do_sample": False, "temperature": 50.0}, True),
    "a parameter that no version has": ({"streaming": True}, True),
}


def test_a_temperature_or_top_p_has_tokens_sampled(export: Export, tmp_path: Path) -> None:
    """Also where the base samples by default, nothing asked is greedy."""
    folder = copy_export(export(), tmp_path)
    sampling = {"do_sample": True, "temperature": 50.0, "repetition_penalty": 9.0}
    config = folder / "model/generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sampling))
    expected = continue_greedily(folder, ASKED, 6)
    requests = [
        {"inputs": {"prompt": ASKED}, "params": {"max_new_tokens": 6, **params}}
        for params, _ in DECODING.values()
        for _ in range(2)
    ]
    texts = [body["predictions"][0] for _, body in invoke(folder, *requests)]
    pairs = zip(DECODING, texts[::2], texts[1::2], strict=True)
    greedy = {name: first == second == expected for name, first, second in pairs}
    assert greedy == {name: is_greedy for name, (_, is_greedy) in DECODING.items()}


# A request to a model of prompts or of conversations, and the sentence of its refusal.
REFUSED: dict[str, tuple[Examples, dict[str, Any], str]] = {
    "a prompt that is too long": (
        PROMPTS,
        {"inputs": {"prompt": ASKED * 60}},
        "the prompt has 420 tokens, and the model takes 128 including the answer: shorten the prompt",
    ),
    "a penalty that is none": (
        PROMPTS,
        {"inputs": {"prompt": ASKED}, "params": {"repetition_penalty": -1.0}},
        "the settings of the request conflict: `penalty` has to be a strictly positive float, but is -1.0",
    ),
    "another column": (
        PROMPTS,
        {"inputs": {"question": ASKED}},
        "Model is missing inputs ['prompt']. Note that there were extra inputs: ['question'].",
    ),
    "several answers": (
        CONVERSATIONS,
        {"messages": CHAT, "n": 2},
        "n is not supported: remove it from the request",
    ),
    "no messages": (CONVERSATIONS, {"messages": []}, "a row has no messages"),
    "arguments of a call that are not JSON": (
        CONVERSATIONS,
        {"messages": [*CHAT, make_call("house")]},
        "arguments in tool_calls of message 2 are not JSON",
    ),
    "arguments of a call that are a list": (
        CONVERSATIONS,
        {"messages": [*CHAT, make_call('["house"]')]},
        "arguments in tool_calls of message 2 are not a JSON object",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_with_the_reason(case: str, export: Export) -> None:
    examples, request, sentence = REFUSED[case]
    ((status, message),) = invoke(export_for(export, examples), request)
    assert (status, sentence in message) == (400, True), message


def test_a_conversation_is_answered_as_its_template_renders_it(export: Export) -> None:
    """Its beginning of text is there once, contents of parts are texts, and arguments of calls are objects."""
    from mlflow.models import validate_schema
    from mlflow.types.llm import CHAT_MODEL_OUTPUT_SCHEMA

    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments.at }}{% endfor %}|{% endfor %}"
    folder = export(CONVERSATIONS, {"model.chatTemplate": {"type": "Jinja", "jinja": template}})
    messages = [*CHAT, make_call('{"at": "house"}'), {"role": "tool", "content": "red"}]
    requests = [
        {"messages": messages, "max_tokens": 6},
        {"inputs": {"messages": messages}, "params": {"max_new_tokens": 6}},
        {"messages": messages, "max_tokens": 6, "stop": ["e"]},
    ]
    (_, chat), (_, inputs), (_, stopped) = invoke(folder, *requests)
    expected = continue_greedily(folder, f"{ASKED}|house|red|", 6)
    answers = [body["choices"][0]["message"]["content"] for body in (*chat, *inputs["predictions"], *stopped)]
    assert answers == [expected, expected, expected.partition("e")[0].strip()]
    assert chat[0]["usage"]["completion_tokens"] == 6
    assert [body[0]["choices"][0]["finish_reason"] for body in (chat, stopped)] == ["length", "stop"]
    validate_schema(chat[0], CHAT_MODEL_OUTPUT_SCHEMA)


PARTS = "{% for m in messages %}{% for part in m.content if part.text is defined %}{{ part.text }}{% endfor %}|{% endfor %}"


def test_contents_are_what_the_template_takes(export: Export) -> None:
    """A template that iterates over parts leaves out texts without a word."""
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "red"}, {"type": "text", "text": "house"}]}
    ]
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    examples = Examples(
        chat=True, requests=[{"messages": messages} for messages in (CHAT, parts)], answers=["", ""]
    )
    folder = export(examples, {"model.chatTemplate": {"type": "Jinja", "jinja": PARTS}})
    requests = [{"messages": messages, "max_tokens": 6} for messages in (CHAT, parts, image)]
    (_, text), (_, joined), (status, refusal) = invoke(folder, *requests)
    answers = [body[0]["choices"][0]["message"]["content"] for body in (text, joined)]
    assert answers == [continue_greedily(folder, prompt, 6) for prompt in (f"{ASKED}|", "red\nhouse|")]
    assert status == 400
    assert refusal.endswith("Error: message 1 has a part of type image, and the model takes only text")


# Messages that training takes: a served model continues them as training renders them.
TRAINED: dict[str, list[dict[str, Any]]] = {
    "a call without arguments": [*CHAT, make_call("")],
    "a call with blank arguments": [*CHAT, make_call(" ")],
    "a call with arguments": [*CHAT, make_call('{"at": "it"}')],
    "a call with arguments as an object": [*CHAT, make_call({"at": "it"})],
    "a call without a wrapper": [
        *CHAT,
        {"role": "assistant", "tool_calls": [{"name": "look", "arguments": ""}]},
    ],
    "no calls": [*CHAT, {"role": "assistant", "content": "red", "tool_calls": []}],
    "texts as parts": [{"role": "user", "content": ["red", "house"]}],
    "a part without a type": [{"role": "user", "content": [{"text": "red"}, "house"]}],
    "no parts": [*CHAT, {"role": "user", "content": []}],
}
# Messages that a served model refuses, and the sentence.
BROKEN: dict[str, tuple[Any, str]] = {
    "a text part without a text": (
        [*CHAT, {"role": "user", "content": [{"type": "text"}]}],
        "message 2 has a text part without a text",
    ),
    "a part that is a number": (
        [{"role": "user", "content": [1]}],
        "message 1 has a text part without a text",
    ),
    "a content that is a number": ([{"role": "user", "content": 1}], "the content of message 1 is not text"),
    "calls that are text": (
        [{"role": "assistant", "content": "", "tool_calls": "look"}],
        "tool_calls of message 1 are not a list of calls",
    ),
    "a message that is text": (["red"], "message 1 is not an object with a role and a content"),
}


def test_messages_are_read_as_in_training(export: Export) -> None:
    import mlflow
    from mlflow.exceptions import MlflowException
    from transformers import AutoTokenizer

    template = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}|{% endfor %}"
    )
    unsigned = {"model": "tiny", "signature": False}
    folder = export(
        CONVERSATIONS, {"model.chatTemplate": {"type": "Jinja", "jinja": template}, "register": unsigned}
    )
    model = mlflow.pyfunc.load_model(str(folder), model_config={"max_new_tokens": 2})
    tokenizer = AutoTokenizer.from_pretrained(folder / "components/tokenizer")
    for case, messages in TRAINED.items():
        text = tokenizer.apply_chat_template(chat_messages.messages(messages), tokenize=False)
        (body,) = model.predict({"messages": messages})
        answer, usage = body["choices"][0]["message"]["content"], body["usage"]
        count = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert (usage["prompt_tokens"], answer) == (count, continue_greedily(folder, text, 2)), case
    for messages, sentence in BROKEN.values():
        with pytest.raises(MlflowException, match=f"^{sentence}$"):
            model.predict({"messages": messages})


def test_mlmodel_says_what_the_model_was_made_of(export: Export, base: Path) -> None:
    from mlflow.models import Model

    loaded = Model.load(str(export(CONVERSATIONS, {"method": LORA, **CHATML})))
    assert loaded.metadata == {
        "base_model": str(base),
        "finetuning": "LoRA",
        "data_version": 0,
        "task": "llm/v1/chat",
    }


def test_mlflows_command_predicts(export: Export, tmp_path: Path) -> None:
    """`mlflow models predict` calls this function in the environment of the model."""
    from mlflow.pyfunc import scoring_server

    folder, input_file, output_file = export(), tmp_path / "asked.json", tmp_path / "answered.json"
    input_file.write_text(json.dumps({"inputs": {"prompt": ASKED}, "params": {"max_new_tokens": 6}}))
    scoring_server._predict(str(folder), str(input_file), str(output_file), "json")
    assert json.loads(output_file.read_text()) == {"predictions": [continue_greedily(folder, ASKED, 6)]}
    assert {"requirements.txt", "python_env.yaml", "conda.yaml"} <= {file.name for file in folder.iterdir()}


# What a version without a signature is given, in which MLflow changes nothing, and how many rows it has.
UNSIGNED: dict[str, tuple[Any, int]] = {
    "a text": (ASKED, 1),
    "texts": ([ASKED, ASKED], 2),
    "a row": ({"prompt": ASKED}, 1),
    "a column": ({"prompt": [ASKED, ASKED]}, 2),
    "rows": ([{"prompt": ASKED}], 1),
}


def test_a_version_without_a_signature_answers_too(export: Export) -> None:
    import mlflow

    folder = export(PROMPTS, {"register": {"model": "tiny", "signature": False}})
    model = mlflow.pyfunc.load_model(str(folder), model_config={"max_new_tokens": 6})
    expected = continue_greedily(folder, ASKED, 6)
    answers = {name: model.predict(data) for name, (data, _) in UNSIGNED.items()}
    assert answers == {name: [expected] * count for name, (_, count) in UNSIGNED.items()}
