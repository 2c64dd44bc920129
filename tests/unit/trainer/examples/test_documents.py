"""What the model reads of a row, and on which tokens the loss is taken."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.data import Columns
from finetune_crds.training import Model
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.token_columns import Document
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from support.small_tokenizer import save_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPT_RESPONSE = Columns(type="PromptResponse")
PREFERENCE = Columns(type="Preference")
UNPAIRED = Columns(type="Unpaired", label="thumb")


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def single(
    tokenizer: PreTrainedTokenizerBase,
    columns: Columns,
    rows: dict[str, list[Any]],
    *,
    answers_only: bool = True,
) -> Document:
    """The one document of the one row."""
    ((document,),) = Documents(tokenizer, columns, answers_only).of(rows)
    return document


def learned_text(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    """The part of a document on which the loss is taken."""
    assert document.loss_mask is not None
    chosen = [token for token, learned in zip(document.tokens, document.loss_mask, strict=True) if learned]
    return str(tokenizer.decode(chosen))


def pairs_of(
    tokenizer: PreTrainedTokenizerBase, rows: list[tuple[Any, Any, Any]]
) -> list[list[tuple[str, str]]]:
    """The documents of each pair as (all of it, the part on which the loss is taken)."""
    columns = {name: [row[at] for row in rows] for at, name in enumerate(("prompt", "chosen", "rejected"))}
    return [
        [(str(tokenizer.decode(document.tokens)), learned_text(tokenizer, document)) for document in pair]
        for pair in Documents(tokenizer, PREFERENCE, answers_only=True).of(columns)
    ]


CHAT = (
    "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def test_loss_is_taken_on_the_answer_and_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What is the red house? "], "response": ["The house is red."]}
    example = single(tokenizer, PROMPT_RESPONSE, rows)
    assert tokenizer.decode(example.tokens) == "What is the red house? The house is red.<eos>"
    assert learned_text(tokenizer, example) == "The house is red.<eos>"


def test_a_prompt_begins_as_every_text_of_the_tokenizer_does(tmp_path: Path) -> None:
    """Llama's puts a token before a text: before a prompt, and not before its answer."""
    save_tokenizer(tmp_path)
    model = Model(base=str(tmp_path))
    starting = load_tokenizer(model, tmp_path)
    example = single(starting, PROMPT_RESPONSE, {"prompt": ["the question"], "response": ["the answer"]})
    assert starting.decode(example.tokens) == "<s>the questionthe answer</s>"


def test_loss_can_be_taken_on_everything(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What? "], "response": ["That."]}
    example = single(tokenizer, PROMPT_RESPONSE, rows, answers_only=False)
    assert learned_text(tokenizer, example) == "What? That.<eos>"


def test_a_text_is_learned_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    example = single(tokenizer, Columns(type="Text", text="body"), {"body": ["The river is old."]})
    assert learned_text(tokenizer, example) == "The river is old.<eos>"


def test_loss_is_taken_on_what_the_assistant_says(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    messages = [
        {"role": "user", "content": "a house"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "a river"},
        {"role": "assistant", "content": "blue"},
    ]
    example = single(tokenizer, Columns(type="Messages"), {"messages": [messages]})
    assert tokenizer.decode(example.tokens) == (
        "user\na house\nassistant\nred<eos>\nuser\na river\nassistant\nblue<eos>\n"
    )
    assert learned_text(tokenizer, example) == "red<eos>\nblue<eos>\n"
    names = {"user": "human", "assistant": "gpt"}
    shared = [
        {"from": names[turn["role"]], "value": [{"type": "text", "text": turn["content"]}]}
        for turn in messages
    ]
    assert single(tokenizer, Columns(type="Messages"), {"messages": [shared]}) == example


def test_reasoning_before_an_earlier_answer_may_be_left_out(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    messages = [user("a"), assistant("red") | {"reasoning": "Hm."}, user("b"), assistant("blue")]
    example = single(tokenizer, Columns(type="Messages"), {"messages": [messages]})
    assert learned_text(tokenizer, example) == "red<eos>\nblue<eos>\n"
    with pytest.raises(DataError, match="does not render reasoning"):
        single(tokenizer, Columns(type="Messages"), {"messages": [messages[:2]]})


WITH_TOOLS = (
    "{% for tool in tools or [] %}tool {{ tool.name }}\n{% endfor %}"
    "{% for turn in messages %}{{ turn.role }}\n{{ turn.content }}"
    "{% for call in turn.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.a }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def test_calls_are_learned_and_neither_tools_nor_results(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    """A column of structures has nulls where other rows have values, and a row may have no tools."""
    monkeypatch.setattr(tokenizer, "chat_template", WITH_TOOLS)
    call = {"function": {"name": "count", "arguments": {"a": 1, "b": None}}}
    nothing = {"tool_calls": None, "tool_call_id": None}
    called = [
        {"role": "user", "content": "a"} | nothing,
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
        {"role": "tool", "content": "b", "tool_calls": None, "tool_call_id": "c"},
        {"role": "assistant", "content": "d"} | nothing,
    ]
    rows: dict[str, list[Any]] = {
        "messages": [called, called[:1] + called[3:]],
        "functions": [[{"name": "count", "strict": None}], None],
    }
    columns = Columns(type="Messages", tools="functions")
    encoded = [document for (document,) in Documents(tokenizer, columns, answers_only=True).of(rows)]
    assert [tokenizer.decode(document.tokens) for document in encoded] == [
        "tool count\nuser\na\nassistant\ncount1\ntool\nb\nassistant\nd\n",
        "user\na\nassistant\nd\n",
    ]
    assert [learned_text(tokenizer, document) for document in encoded] == ["count1\nd\n", "d\n"]


def test_a_conversation_that_the_template_refuses_is_bad_data(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="fails on a row with the roles user: roles must alternate"):
        single(tokenizer, Columns(type="Messages"), {"messages": [messages]})


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_a_preference_is_two_documents_with_the_loss_on_the_answers(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert pairs_of(tokenizer, [("Which? ", "This.", "That is it.")]) == [
        [("Which? This.<eos>", "This.<eos>"), ("Which? That is it.<eos>", "That is it.<eos>")]
    ]


@pytest.mark.parametrize(
    "row",
    [
        ([user("a house")], [assistant("red")], [assistant("blue")]),
        ("a house", [assistant("red")], [assistant("blue")]),
        ([user("a house")], "red", "blue"),
        ("a house", [user("a house"), assistant("red")], [user("a house"), assistant("blue")]),
    ],
    ids=["messages", "text prompt", "text answers", "answers that repeat the prompt"],
)
def test_a_preference_can_be_messages(
    row: tuple[Any, Any, Any], tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    # In one batch with texts, which no template renders.
    assert pairs_of(tokenizer, [("Which? ", "This.", "That."), row]) == [
        [("Which? This.<eos>", "This.<eos>"), ("Which? That.<eos>", "That.<eos>")],
        [
            ("user\na house\nassistant\nred<eos>\n", "red<eos>\n"),
            ("user\na house\nassistant\nblue<eos>\n", "blue<eos>\n"),
        ],
    ]


def test_the_turns_of_a_prompt_are_not_learned(tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    prompt = [user("a"), assistant("b"), user("c")]
    row = (prompt, [assistant("d"), user("e"), assistant("f")], [assistant("g")])
    ((chosen, rejected),) = pairs_of(tokenizer, [row])
    assert (chosen[1], rejected[1]) == ("d<eos>\nf<eos>\n", "g<eos>\n")


def test_weights_that_are_not_of_a_judged_answer_say_nothing(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    weighted_prompt = [user("a") | {"weight": 0.5}, assistant("b") | {"weight": 0}, user("c") | {"weight": 0}]
    plain = [user("a"), assistant("b"), user("c")]
    answers = [assistant("d")], [assistant("e") | {"weight": 1}]
    assert pairs_of(tokenizer, [(weighted_prompt, *answers)]) == pairs_of(tokenizer, [(plain, *answers)])
    with pytest.raises(DataError) as refused:
        pairs_of(tokenizer, [(plain, answers[0], [assistant("e") | {"weight": 0}])])
    assert (refused.value.reason, refused.value.message) == (
        "MessageWeight",
        "the preference of a row has an answer with weight 0, but preferences compare whole answers: remove the weight, or such rows",
    )


DATED = "{{ strftime_now('%d %b %Y') }}." + CHAT


@pytest.mark.parametrize(("template", "depends"), [(CHAT, False), (DATED, True)], ids=["undated", "dated"])
def test_a_template_that_writes_the_date_writes_that_of_the_job(
    template: str, depends: bool, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    days = [date(2026, 11, 24), date(2026, 11, 25), date(2026, 11, 24)]
    encoders = [Documents(tokenizer, Columns(type="Messages"), answers_only=True, day=day) for day in days]
    texts = [each.render([user("a"), assistant("red")], None) for each in encoders]
    written = ["24 Nov 2026.", "25 Nov 2026.", "24 Nov 2026."] if depends else [""] * 3
    assert texts == [f"{prefix}user\na\nassistant\nred<eos>\n" for prefix in written]
    row: dict[str, list[Any]] = {"messages": [[user("a"), assistant("red")]]}
    learned = [learned_text(tokenizer, next(each.of(row))[0]) for each in encoders]
    assert learned == ["red<eos>\n"] * 3
    assert len({each.encoding for each in encoders}) == (2 if depends else 1)
    assert encoders[0].encoding == encoders[2].encoding


@pytest.mark.parametrize(
    ("columns", "depends"),
    [
        ({"type": "Text"}, False),
        ({"type": "PromptResponse"}, False),
        ({"type": "Messages"}, True),
        ({"type": "Preference"}, True),
        ({"type": "Unpaired"}, True),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_only_what_a_template_may_render_depends_on_the_day(
    columns: dict[str, str], depends: bool, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", DATED)
    encoder = Documents(tokenizer, Columns.model_validate(columns), answers_only=True)
    assert encoder.depend_on_day == depends
    encodings = {replace(encoder, day=date(2026, 11, day)).encoding for day in (24, 25)}
    assert len(encodings) == (2 if depends else 1)


def test_an_unpaired_preference_is_one_document_with_the_loss_on_the_answer(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    rows: dict[str, list[Any]] = {
        "prompt": ["Which? ", "a house", "no"],
        "completion": ["This.", [user("a house"), assistant("red")], [user("no")]],
    }
    encoded = [*Documents(tokenizer, UNPAIRED, answers_only=True).of(rows)]
    assert [len(documents) for documents in encoded] == [1, 1, 1]
    texts = [
        (tokenizer.decode(document.tokens), learned_text(tokenizer, document)) for (document,) in encoded
    ]
    # The last answer adds nothing to its prompt.
    assert texts == [
        ("Which? This.<eos>", "This.<eos>"),
        ("user\na house\nassistant\nred<eos>\n", "red<eos>\n"),
        ("", ""),
    ]


MESSAGES = Columns(type="Messages", messages="chat")


SHAPE = "MessageShape: column chat of a row is not a list of {role, content}, "


@pytest.mark.parametrize(
    ("columns", "rows", "sentence"),
    [
        (
            MESSAGES,
            {"chat": [[user("a"), {"content": "b"}]]},
            f"{SHAPE}message 2 has no role: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [[{"role": "user", "content": None}]]},
            f"{SHAPE}message 1 has no content: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [["a", "b"]]},
            f"{SHAPE}message 1 has neither a role nor a content: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": ["a"]},
            f"{SHAPE}it is text: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [[{"role": "user", "content": [{"type": "image"}]}, assistant("b")]]},
            "MessageShape: column chat of a row is invalid, message 1 has a part of type image, but only text parts can be trained on: "
            "correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [[{"role": "assistant", "tool_calls": "count"}]]},
            "MessageShape: column chat of a row is invalid, tool_calls of message 1 are not JSON: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [[user("a"), assistant("b") | {"weight": 0.5}]]},
            "MessageShape: column chat of a row is invalid, weight of message 2 is 0.5, but must be 1 (the message "
            "is learned) or 0 (it is not): correct or remove such rows",
        ),
        (
            Columns(type="Messages", messages="chat", tools="functions"),
            {"chat": [[assistant("a")]], "functions": ["count"]},
            "ToolShape: column functions of a row is invalid, tools are not JSON: correct or remove such rows",
        ),
        (
            MESSAGES,
            {"chat": [[assistant("a"), {"role": "tool", "content": "b", "tool_calls": "[{}]"}]]},
            "TemplateFailed: the chat template of the model fails on a row with the roles assistant, tool: it does not render tool calls: "
            "set model.chatTemplate to one that does",
        ),
        (
            Columns(type="Text", text="body"),
            {"body": [[user("a")]]},
            "ColumnType: column body contains lists, but text is required: name the column in data.columns.messages if the lists are "
            "conversations",
        ),
        (
            PREFERENCE,
            {"prompt": ["a"], "chosen": [[user("b"), assistant("c")]], "rejected": [[assistant("d")]]},
            "MessageShape: column chosen of a row begins its answer with a message of role user: the first message after those of the "
            "prompt must have role assistant",
        ),
    ],
)
def test_rows_of_another_shape_are_refused_in_a_sentence(
    columns: Columns,
    rows: dict[str, list[Any]],
    sentence: str,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    with pytest.raises(DataError) as refused:
        list(Documents(tokenizer, columns, answers_only=True).of(rows))
    assert f"{refused.value.reason}: {refused.value.message}" == sentence
    assert refused.value.exit_code == 65


def test_messages_need_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    rows: dict[str, list[Any]] = {
        "prompt": ["a"],
        "chosen": [[assistant("b")]],
        "rejected": [[assistant("c")]],
    }
    with pytest.raises(RecipeRefusedError) as refused:
        list(Documents(tokenizer, PREFERENCE, answers_only=True).of(rows))
    assert refused.value.message == (
        "a preference with lists of {role, content} requires a chat template, but the tokenizer of model.base has none: "
        "set model.chatTemplate"
    )


GOES_ON = "{% for turn in messages %}{{ turn.content }}{% if loop.last %}.{% endif %}{% endfor %}"
NEEDS_A_TURN = "{{ messages[0]['role'] }}{% for turn in messages %}{{ turn.content }}{% endfor %}"


@pytest.mark.parametrize("template", [GOES_ON, NEEDS_A_TURN], ids=["other beginnings", "no beginning"])
def test_a_template_that_hides_the_answers_still_gives_token_ids(
    template: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    rows = {"chat": [[assistant("a"), user("b")]]}
    hidden, whole = (
        single(tokenizer, MESSAGES, rows, answers_only=answers_only) for answers_only in (True, False)
    )
    assert hidden == Document(whole.tokens, None)
    assert whole.loss_mask == [True] * len(whole.tokens)


def test_more_texts_than_are_encoded_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["the " * (number % 7) for number in range(600)]
    documents = Documents(tokenizer, Columns(type="Text"), answers_only=True)
    assert list(documents.of({"text": texts})) == [
        (single(tokenizer, documents.columns, {"text": [text]}),) for text in texts
    ]


def test_what_decides_on_token_ids_is_in_the_encoding(base_model: Path, monkeypatch: Any) -> None:
    from transformers import AutoTokenizer

    plain, same, more, chat, special = (AutoTokenizer.from_pretrained(base_model) for _ in range(5))
    more.add_tokens(["<new>"])
    chat.chat_template = CHAT
    special.split_special_tokens = not plain.split_special_tokens
    documents = Documents(plain, PROMPT_RESPONSE, answers_only=True)
    different = [
        documents.encoding,
        *(replace(documents, tokenizer=other).encoding for other in (more, chat, special)),
        replace(documents, columns=Columns(type="Text")).encoding,
        replace(documents, answers_only=False).encoding,
        replace(documents, last_only=True).encoding,
    ]
    monkeypatch.setattr("finetune_trainer.examples.documents.get_release", lambda: "another")
    different.append(documents.encoding)
    assert len(set(different)) == len(different)
    monkeypatch.undo()
    list(documents.of({"prompt": ["a"], "response": ["b"]}))
    assert {documents.encoding, replace(documents, tokenizer=same).encoding} == {different[0]}
