"""What a server of models answers with a registered model is what the evaluation has judged: real worker, MLflow, command and server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from support.cells import WARNINGS
from support.evaluations import evaluate, save_splits
from support.pods import examples
from support.ports import free_port
from support.process import Process
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.pods import Pod
    from support.training import Mlflow

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in WARNINGS),
    pytest.mark.usefixtures("mlflow_imported"),
]
Register = Callable[[dict[str, Any] | None], "Pod"]
OWN = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = [
    *("<|im_start|>", "<|im_end|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|user|>", "<|assistant|>", "<|end|>"),
]
CONVERSATIONS = [
    [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    for row in examples()[:4]
]
SPLITS = ("train", "validation", "test")
# The template of the recipe; None: that of the tokenizer. And the token that ends an answer, which is not the base's end of text.
TEMPLATES: dict[str, tuple[dict[str, Any] | None, str]] = {
    "ChatML": ({"type": "ChatML"}, "<|im_end|>"),
    "Llama3": ({"type": "Llama3"}, "<|eot_id|>"),
    "the tokenizer's own": (None, "<|end|>"),
}


@pytest.fixture(scope="module")
def base(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose files stop at its end of text alone, and whose tokenizer has the tokens of all templates."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": SPECIAL})
    tokenizer.chat_template = OWN
    config = LlamaConfig.from_pretrained(base_model)
    config.vocab_size, config.initializer_range = len(tokenizer), 0.2
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `transformers serve`, which loads the model that a request names."""
    port = free_port()
    command = Path(sys.executable).with_name("transformers")
    process = Process(
        "transformers serve",
        [str(command), "serve", "--device", "cpu", "--port", str(port)],
        tmp_path_factory.mktemp("server") / "log",
        {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    process.start()
    url = f"http://localhost:{port}"
    try:
        wait_for("transformers serve", lambda: _is_healthy(url), 240, process, instead=process.tail)
        yield url
    finally:
        process.stop()


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.fixture
def register(pod: Pod, mlflow_of_test: Mlflow, base: Path, capsys: pytest.CaptureFixture[str]) -> Register:
    """A function that trains on four conversations by heart, with a template, and registers the model `tiny`."""

    def trained(template: dict[str, Any] | None) -> Pod:
        rows = [{"messages": messages, "split": split} for messages in CONVERSATIONS for split in SPLITS]
        job = pod.but(
            {
                "model.base": str(base),
                **({"model.chatTemplate": template} if template else {}),
                "data.splits.path": str(save_splits(pod.folder / "splits", rows)),
                "data.columns": {"type": "Messages"},
                "training.maxSteps": 40,
                "register": {"model": "tiny"},
                "evaluation": {
                    "baseModel": False,
                    "metrics": ["ExactMatch"],
                    "maxNewTokens": 48,
                    "generations": len(CONVERSATIONS),
                },
            }
        )
        job.env |= mlflow_of_test.env
        outcome = job.run_here(capsys)
        assert outcome.code == 0, outcome
        return job

    return trained


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_server_stops_and_answers_as_the_evaluation_does(
    name: str, register: Register, server: str
) -> None:
    import mlflow
    from transformers import AutoTokenizer

    template, end = TEMPLATES[name]
    job = register(template)
    assert evaluate(job, "models:/tiny/1").metrics["eval_exact_match"] == 1
    (path,) = job.folder.glob("artifacts/**/generations.json")
    judged = {prompt: answer for prompt, _, answer in json.loads(path.read_text())["data"]}
    version = mlflow.artifacts.download_artifacts("models:/tiny/1", dst_path=str(job.folder / "served"))
    model = Path(version) / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.eos_token == end
    served, ends = {}, set()
    for messages, _ in CONVERSATIONS:
        prompt = tokenizer.apply_chat_template([messages], tokenize=False, add_generation_prompt=True)
        request: dict[str, Any] = {"model": str(model), "messages": [messages]}
        body = requests.post(f"{server}/v1/chat/completions", json=request, timeout=240).json()
        (choice,) = body["choices"]
        served[prompt] = choice["message"]["content"]
        tokens = tokenizer(served[prompt], add_special_tokens=False).input_ids
        ends.add((choice["finish_reason"], body["usage"]["completion_tokens"] - len(tokens)))
    assert served == judged
    # The token that ends an answer is counted, and none behind it.
    assert ends == {("stop", 1)}
