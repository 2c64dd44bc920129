"""On which tokens of a conversation the loss is, for chat templates of many models, with transformers' own masks as the reference.

The templates are those that TRL brings: those of models, and the same with {% generation %} blocks.
"""

from __future__ import annotations

import copy
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune_crds.data import Columns
from finetune_crds.recipe import today
from finetune_trainer.examples import chat_messages, chat_templates, loss_mask
from finetune_trainer.examples.documents import Documents
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError

if TYPE_CHECKING:
    from finetune_trainer.examples.token_columns import Document

Json = dict[str, Any]


def templates_of_trl() -> Path:
    # NB: an import of trl's own modules takes seconds; its __init__ is lazy.
    import trl

    return Path(trl.__file__).parent / "chat_templates"


def of_trl(name: str) -> str:
    return (templates_of_trl() / f"{name}.jinja").read_text("utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and one for each of two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_tokenizer = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    )
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer, bos_token="<s>", eos_token="</s>")


def user(content: str) -> Json:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> Json:
    return {"role": "assistant", "content": content, **fields}


CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TWO = [user("a?"), assistant("b"), user("c?"), assistant("d")]
THINKING = [
    user("a?"),
    assistant("<think>\nt\n</think>\n\nb"),
    user("c?"),
    assistant("<think>\nu\n</think>\n\nd"),
]
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CALLING = [
    user("a?"),
    assistant("", tool_calls=[CALL]),
    {"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "a1b2c3d4e"},
    assistant("b"),
]


def document(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[Json],
    tools: list[Json] | None = None,
    *,
    last: bool = False,
) -> Document:
    columns = Columns(type="Messages", tools="tools")
    rows: dict[str, list[Any]] = {"messages": [messages], "tools": [tools]}
    ((only_document,),) = Documents(tokenizer, columns, answers_only=True, last_only=last).of(rows)
    return only_document


def learned(tokenizer: PreTrainedTokenizerFast, encoded: Document) -> str | None:
    if encoded.loss_mask is None:
        return None
    return str(
        tokenizer.decode([token for token, on in zip(encoded.tokens, encoded.loss_mask, strict=True) if on])
    )


WITH_BLOCKS = (
    *(
        "qwen2_5",
        "qwen3",
        "qwen3_5_think",
        "llama3",
        "gemma3",
        "diffusion_gemma",
        "phi3",
        "deepseekv3",
        "deepseek_r1_distill",
    ),
    *("gptoss", "glm4moe"),
)


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_generation_blocks_mark_what_transformers_marks(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", of_trl(f"{name}_training"))
    compared = 0
    for messages, tools in ((TWO, None), (TWO[:2], None), (THINKING, None), (CALLING, [WEATHER])):
        try:
            encoded = document(tokenizer, messages, tools)
        except DataError as error:
            assert "it does not render" in error.message  # noqa: PT017 - of one that leaves out tools
            continue
        expected = tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        assert (encoded.tokens, encoded.loss_mask) == (
            expected["input_ids"],
            [mask == 1 for mask in expected["assistant_masks"]],
        )
        assert any(encoded.loss_mask or ())
        compared += 1
    assert compared >= 2


# What is learned of two answers, and with the last one alone; None where the template hides the answers. Templates without blocks.
FOUND: dict[str, tuple[str, list[Json], str | None, str | None]] = {
    "Qwen 2.5": ("qwen2_5", TWO, "b<|im_end|>\nd<|im_end|>\n", "d<|im_end|>\n"),
    "Qwen 3 leaves thinking out of earlier turns": (
        "qwen3",
        THINKING,
        None,
        "<think>\nu\n</think>\n\nd<|im_end|>\n",
    ),
    "Qwen 3 instruct": ("qwen3_instruct_2507", TWO, "b<|im_end|>\nd<|im_end|>\n", "d<|im_end|>\n"),
    "Llama 3": ("llama3", TWO, "b<|eot_id|>d<|eot_id|>", "d<|eot_id|>"),
    "Llama 3.1": ("llama3_1", TWO, "b<|eot_id|>d<|eot_id|>", "d<|eot_id|>"),
    "Gemma 3": ("gemma3", TWO, "b<end_of_turn>\nd<end_of_turn>\n", "d<end_of_turn>\n"),
    "Phi 3 ends a conversation with the end of a text": (
        "phi3",
        TWO,
        "b<|end|>\nd<|end|>\n<|endoftext|>",
        "d<|end|>\n<|endoftext|>",
    ),
    "gpt-oss ends the last answer otherwise": (
        "gptoss",
        TWO,
        None,
        "<|channel|>final<|message|>d<|return|>",
    ),
    "DeepSeek R1 asks for thoughts that an answer may lack": (
        "deepseek_r1_distill",
        TWO,
        f"b{DEEPSEEK_END}d{DEEPSEEK_END}",
        f"d{DEEPSEEK_END}",
    ),
    "DeepSeek V3 asks for thoughts that an answer may lack": (
        "deepseekv3",
        TWO,
        f"b{DEEPSEEK_END}d{DEEPSEEK_END}",
        f"d{DEEPSEEK_END}",
    ),
}  # fmt: skip


# The special tokens of models whose templates are found by them, and their ends of texts.
SPECIAL = {
    "deepseek_r1_distill": (DEEPSEEK_END, ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>"]),
    "deepseekv3": (DEEPSEEK_END, ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>"]),
    "glm4moe": ("<|endoftext|>", ["<|user|>", "<|assistant|>", "<|observation|>"]),
    "phi3": ("<|endoftext|>", ["<|user|>", "<|assistant|>", "<|end|>"]),
    "gptoss": ("<|return|>", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"]),
}


def of_model(tokenizer: PreTrainedTokenizerFast, name: str, template: str = "") -> PreTrainedTokenizerFast:
    """A copy of a tokenizer with the special tokens and a template of a model."""
    end, special = SPECIAL.get(name, ("</s>", []))
    model_tokenizer = copy.deepcopy(tokenizer)
    model_tokenizer.add_special_tokens({"eos_token": end, "additional_special_tokens": special})
    model_tokenizer.chat_template = of_trl(template or name)
    return model_tokenizer


@pytest.mark.parametrize(("name", "messages", "answers", "last"), FOUND.values(), ids=FOUND)
def test_answers_of_templates_without_blocks(
    name: str,
    messages: list[Json],
    answers: str | None,
    last: str | None,
    *,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model_tokenizer = of_model(tokenizer, name)
    texts = [
        learned(model_tokenizer, document(model_tokenizer, messages, last=last)) for last in (False, True)
    ]
    assert texts == [answers, last]


def test_thoughts_in_an_answer_that_a_template_drops_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model_tokenizer = of_model(tokenizer, "deepseek_r1_distill")
    for messages in (THINKING, THINKING[:2]):
        with pytest.raises(DataError, match="it does not render the reasoning before </think>"):
            document(model_tokenizer, messages)
    # Earlier thoughts are dropped on purpose.
    assert (
        learned(model_tokenizer, document(model_tokenizer, [*THINKING[:3], assistant("d")], last=True))
        == f"d{DEEPSEEK_END}"
    )


BLOCKS = (
    "{% for turn in messages %}{% if turn.role == 'assistant' %}A:{% generation %}{{ turn.content }};{% endgeneration %}"
    "{% else %}{{ turn.role }}:{{ turn.content }};{% endif %}{% endfor %}"
)
# As QwQ's: a request begins a thought, and an answer may have none. The header of an answer ends with no special token.
ASKS_FOR_A_THOUGHT = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content.split('</think>')[-1] if turn.role == 'assistant' else "
    "turn.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_header_that_ends_with_no_special_token_hides_the_answers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model_tokenizer = copy.deepcopy(tokenizer)
    model_tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>"]}
    )
    model_tokenizer.chat_template = ASKS_FOR_A_THOUGHT
    assert learned(model_tokenizer, document(model_tokenizer, TWO)) is None


def test_a_question_may_have_the_end_of_a_thought(tokenizer: PreTrainedTokenizerFast) -> None:
    model_tokenizer = copy.deepcopy(tokenizer)
    model_tokenizer.chat_template = ASKS_FOR_A_THOUGHT
    assert "mean </think>?" in chat_templates.render(
        model_tokenizer, [user("What does it mean </think>?")], add_generation_prompt=True
    )


WITHOUT_END = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
NO_STOP = "the chat template of org/base writes "
SO_NO_STOP = ", so a model trained with it would not learn to stop: "
# Templates by name, or their texts, and the end of the sentence with which they are refused; "" where they are not.
ENDS: dict[str, tuple[str, str]] = {
    **{name: (name, "") for name in ("qwen2_5", "qwen3", "llama3", "gemma3", "phi3", "gptoss", "deepseekv3")},
    **{f"{name} with blocks": (f"{name}_training", "") for name in WITH_BLOCKS},
    "GLM 4 writes the end as the beginning of the next message": (
        "glm4moe",
        "nothing that ends the last answer{so}set model.chatTemplate to one that writes, for example, <|endoftext|> at the end of each "
        "answer",
    ),
    "none": (
        WITHOUT_END,
        "nothing that ends the last answer{so}set model.chatTemplate to one that writes, for example, </s> at the end of each answer",
    ),
    "the last one alone has none": (
        BLOCKS.replace(";{% endg", "{{ '' if loop.last else ';' }}{% endg"),
        "nothing that ends the last answer{so}set model.chatTemplate to one that writes, for example, </s> at the end of each answer, "
        "before {% endgeneration %}",
    ),
    "the last one alone has one": (
        BLOCKS.replace(";{% endg", "{{ ';' if loop.last else '' }}{% endg"),
        "nothing that ends an answer{so}set model.chatTemplate to one that writes, for example, </s> at the end of each answer, before "
        "{% endgeneration %}",
    ),
    "outside of blocks": (
        BLOCKS.replace(";{% endgeneration %}", "{% endgeneration %};"),
        "';' outside of {% generation %} and {% endgeneration %}{so}move ';' between them in model.chatTemplate.jinja",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "why"), ENDS.values(), ids=ENDS)
def test_the_end_of_an_answer_is_learned(template: str, why: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model_tokenizer = copy.deepcopy(tokenizer)
    model_tokenizer.chat_template = template
    if (templates_of_trl() / f"{template[:40]}.jinja").exists():
        model_tokenizer = of_model(tokenizer, template.removesuffix("_training"), template)
    try:
        loss_mask.check_template(model_tokenizer, "org/base")
    except RecipeRefusedError as error:
        sentence = error.message
    else:
        sentence = ""
    assert sentence == (NO_STOP + why.replace("{so}", SO_NO_STOP) if why else "")


@pytest.mark.parametrize(("name", "written"), [("llama3_2", "25 Nov 2026"), ("gptoss", "2026-11-25")])
def test_templates_of_models_write_the_day_that_they_are_given(
    name: str, written: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model_tokenizer = of_model(tokenizer, name)
    texts = [
        chat_templates.render(model_tokenizer, TWO, day=day) for day in (date(2026, 11, 25), today(), None)
    ]
    assert texts[0].count(written) == 1
    assert texts[1] == texts[2]
    assert texts[0] != texts[1] or today() == date(2026, 11, 25)


def test_a_date_is_written_as_by_strftime(tokenizer: PreTrainedTokenizerFast) -> None:
    model_tokenizer = copy.deepcopy(tokenizer)
    day = datetime(2026, 1, 5)  # noqa: DTZ001 - it has no time, and so no zone
    codes = [*chat_templates._DATE_CODES, "%%", "%%d", "100%% of %B %-d"]
    # One template with all of them: each takes most of a second to compile.
    model_tokenizer.chat_template = "|".join("{{ strftime_now('" + code + "') }}" for code in codes)
    texts = chat_templates.render(model_tokenizer, TWO, day=day.date()).split("|")
    assert dict(zip(codes, texts, strict=True)) == {code: day.strftime(code) for code in codes}


def test_blocks_of_a_template_that_writes_the_day(tokenizer: PreTrainedTokenizerFast) -> None:
    model_tokenizer = of_model(tokenizer, "gptoss", "gptoss_training")
    day = date(1999, 1, 2)
    text = chat_templates.render(model_tokenizer, TWO, day=day)
    blocks = chat_templates.find_marked_spans(model_tokenizer, TWO, day=day) or []
    assert "Current date: 1999-01-02" in text
    assert [
        text[begin:end].endswith(said + stop)
        for (begin, end), said, stop in zip(blocks, "bd", ("<|end|>", "<|return|>"), strict=True)
    ] == [True, True]


def weighed(messages: list[Json], *weights: Any) -> list[Json]:
    """Messages with a weight for each answer."""
    left = iter(weights)
    return [
        message | {"weight": next(left)} if message["role"] == "assistant" else message
        for message in messages
    ]


WITHOUT_BLOCKS = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "") + (
    "{% if add_generation_prompt %}A:{% endif %}"
)
CHOSEN: dict[str, tuple[list[Json], bool, str]] = {
    "all answers": (TWO, False, "b;d;"),
    "the last answer": (TWO, True, "d;"),
    "the last answer, with more behind it": ([*TWO, user("e?")], True, "d;"),
    "weights": (weighed(TWO, 1, 0), False, "b;"),
    "booleans": (weighed(TWO, False, True), False, "d;"),
    "texts and numbers": (weighed(TWO, "0", 1.0), False, "d;"),
    "one without a weight": (weighed(TWO, 0, None), False, "d;"),
    "none": (weighed(TWO, 0, 0), False, ""),
    "the last answer, which is not learned": (weighed(TWO, 1, 0), True, ""),
    "a weight of a question": ([TWO[0] | {"weight": 1}, *TWO[1:2]], False, "b;"),
}


@pytest.mark.parametrize("template", [BLOCKS, WITHOUT_BLOCKS], ids=["blocks", "no blocks"])
@pytest.mark.parametrize(("messages", "last", "expected"), CHOSEN.values(), ids=CHOSEN)
def test_the_answers_that_are_learned(
    template: str,
    messages: list[Json],
    last: bool,
    expected: str,
    *,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    encoded = document(tokenizer, messages, last=last)
    assert learned(tokenizer, encoded) == expected
    assert "weight" not in tokenizer.decode(encoded.tokens)


@pytest.mark.parametrize("field", chat_messages.REASONING)
def test_thinking_in_a_field_of_its_own(
    field: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    """A table of a preparation has all such fields, one of them with a value."""
    monkeypatch.setattr(tokenizer, "chat_template", of_trl("qwen3"))
    answer = assistant("d", **dict.fromkeys(chat_messages.REASONING)) | {field: "u"}
    assert document(tokenizer, [*THINKING[:3], answer], last=True) == document(tokenizer, THINKING, last=True)


def test_a_conversation_whose_only_learned_answer_is_the_last_suits_templates_that_rewrite_earlier_turns(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", of_trl("qwen3"))
    encoded = document(tokenizer, weighed(THINKING, 0, 1))
    assert learned(tokenizer, encoded) == "<think>\nu\n</think>\n\nd<|im_end|>\n"


def test_answers_with_several_blocks(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    """Phi's template with blocks has one more for the end of the text, and Gemma's one for each end of a turn."""
    ends = {"phi3_training": "d<|end|>\n</s>", "diffusion_gemma_training": "d<turn|>\n"}
    for name, expected in ends.items():
        monkeypatch.setattr(tokenizer, "chat_template", of_trl(name))
        assert len(chat_templates.find_marked_spans(tokenizer, TWO) or []) > 2
        assert learned(tokenizer, document(tokenizer, TWO, last=True)) == expected
        assert learned(tokenizer, document(tokenizer, weighed(TWO, 0, 1))) == expected


def test_blocks_that_cannot_be_told_apart(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    one_block = "{% generation %}{% for turn in messages %}{{ turn.content }};{% endfor %}{% endgeneration %}"
    monkeypatch.setattr(tokenizer, "chat_template", one_block)
    assert learned(tokenizer, document(tokenizer, TWO)) == "a?;b;c?;d;"
    with pytest.raises(DataError) as refused:
        document(tokenizer, TWO, last=True)
    assert refused.value.message == (
        "the chat template has 1 {% generation %} blocks for the 2 turns of the assistant in a row, so the blocks of some turns cannot "
        "be identified: set model.chatTemplate to a template with a block for each turn"
    )


EMPTY = BLOCKS.replace("{{ turn.content }};{% endgeneration %}", "{% endgeneration %}{{ turn.content }};")


def test_blocks_that_hold_nothing_are_refused(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    documents = Documents(tokenizer, Columns(type="Messages"), answers_only=True)
    for fine in (
        BLOCKS,
        WITHOUT_BLOCKS,
        "{# {% generation %} #}" + WITHOUT_BLOCKS,
        "{{ messages[5].content }}",
    ):
        monkeypatch.setattr(tokenizer, "chat_template", fine)
        documents.check_template("data.columns.messages", "org/base")
    monkeypatch.setattr(tokenizer, "chat_template", EMPTY)
    with pytest.raises(RecipeRefusedError) as refused:
        documents.check_template("data.columns.messages", "org/base")
    assert refused.value.message == (
        "the {% generation %} blocks of the chat template contain no part of an answer: put what the assistant says between "
        "{% generation %} and {% endgeneration %} in model.chatTemplate.jinja, or remove the blocks"
    )
    Documents(tokenizer, Columns(type="Messages"), answers_only=False).check_template("messages", "org/base")


def test_blocks_of_answers_that_were_judged(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", BLOCKS)
    documents = Documents(tokenizer, Columns(type="Preference"), answers_only=True)
    rows: dict[str, list[Any]] = {"prompt": [TWO[:3]], "chosen": [TWO[3:]], "rejected": [[assistant("e")]]}
    ((chosen, rejected),) = documents.of(rows)
    assert [learned(tokenizer, encoded) for encoded in (chosen, rejected)] == ["d;", "e;"]
    with pytest.raises(DataError) as refused:
        list(documents.of(rows | {"chosen": [weighed(TWO[3:], 0)]}))
    assert refused.value.message == (
        "the preference of a row has an answer with weight 0, but preferences compare whole answers: remove the weight, or such rows"
    )


def test_a_template_is_checked_once_for_many_answers(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", BLOCKS)
    checked: list[Any] = []
    monkeypatch.setattr(chat_templates, "check_marks", checked.append)
    documents = Documents(tokenizer, Columns(type="Preference"), answers_only=True)
    rows: dict[str, list[Any]] = {"prompt": [TWO[:3]], "chosen": [TWO[3:]], "rejected": [[assistant("e")]]}
    assert len(list(documents.of({name: values * 5 for name, values in rows.items()}))) == 5
    assert checked == [tokenizer]


def test_weights_beside_a_loss_on_all_tokens(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", BLOCKS)
    documents = Documents(tokenizer, Columns(type="Messages"), answers_only=False)
    ((encoded,),) = documents.of({"messages": [weighed(TWO, 1, 1)]})
    assert learned(tokenizer, encoded) == "user:a?;A:b;user:c?;A:d;"
    with pytest.raises(DataError) as refused:
        list(documents.of({"messages": [weighed(TWO, 1, 0)]}))
    assert refused.value.message == (
        "column messages of a row has an answer with weight 0, but objective.lossOn All computes the loss on every token: remove the "
        "weight, or objective.lossOn All"
    )


def test_a_field_of_another_name(tokenizer: PreTrainedTokenizerFast, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", BLOCKS)
    documents = Documents(tokenizer, Columns(type="Messages", message_weight="train"), answers_only=True)
    rows = {"messages": [[TWO[0], TWO[1] | {"train": False}, TWO[2], TWO[3] | {"weight": 0}], TWO]}
    assert [learned(tokenizer, encoded) for (encoded,) in documents.of(rows)] == ["d;", "b;d;"]
    assert documents.count_weighted(rows) == 1
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | tojson }}")
    assert documents.render([assistant("b", train=False)], None) == '[{"role": "assistant", "content": "b"}]'


def test_tokens_that_touch_the_answers() -> None:
    places = [(0, 2), (2, 5), (5, 5), (5, 9), (9, 12), (12, 14), (20, 21)]
    for spans in ([], [(0, 14)], [(3, 6), (9, 10), (13, 20)], [(4, 4), (5, 9)]):
        expected = [any(begin < last and end > first for first, last in spans) for begin, end in places]
        assert loss_mask.find_overlaps(places, spans) == expected
