"""What of an example the model reads, and on which tokens the loss is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.chat import Conversation
from finetune_crds.data import Columns, Data
from finetune_crds.prepare import Prepare
from finetune_trainer.outcome import DataError, RecipeRefusedError
from finetune_trainer.train.data import encode
from finetune_trainer.train.runtime.recipe import example_columns

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

PROMPT_RESPONSE = Columns(type="PromptResponse", prompt="prompt", response="response")
PREFERENCE = Columns(type="Preference", prompt="prompt", chosen="chosen", rejected="rejected")
CHAT = (
    "{% for message in messages %}{{ message['role'] }}\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(base_model: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(base_model)


def encoder(tokenizer: PreTrainedTokenizerBase, columns: Columns, **changes: Any) -> encode.Encoder:
    settings: dict[str, Any] = {"loss_on_answer": True, "max_length": 64, "overlong": "Drop"}
    return encode.Encoder(tokenizer=tokenizer, columns=columns, **(settings | changes))


def learned_text(tokenizer: PreTrainedTokenizerBase, example: encode.Encoded) -> str:
    """The part of an example on which the loss is taken."""
    chosen = [token for token, learned in zip(example.tokens, example.loss_mask, strict=True) if learned]
    return str(tokenizer.decode(chosen))


def test_loss_is_taken_on_the_answer_and_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What is the red house? "], "response": ["The house is red."]}
    (example,) = encoder(tokenizer, PROMPT_RESPONSE).encode(rows)
    assert tokenizer.decode(example.tokens) == "What is the red house? The house is red.<eos>"
    assert learned_text(tokenizer, example) == "The house is red.<eos>"


def test_loss_can_be_taken_on_everything(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = {"prompt": ["What? "], "response": ["That."]}
    (example,) = encoder(tokenizer, PROMPT_RESPONSE, loss_on_answer=False).encode(rows)
    assert learned_text(tokenizer, example) == "What? That.<eos>"


def test_a_text_is_learned_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    (example,) = encoder(tokenizer, Columns(type="Text", text="body")).encode({"body": ["The river is old."]})
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
    (example,) = encoder(tokenizer, Columns(type="Messages", messages="messages")).encode(
        {"messages": [messages]}
    )
    assert tokenizer.decode(example.tokens) == (
        "user\na house\nassistant\nred\nuser\na river\nassistant\nblue\n"
    )
    assert learned_text(tokenizer, example) == "red\nblue\n"


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
    found = list(encoder(tokenizer, columns).encode(rows))
    assert [tokenizer.decode(example.tokens) for example in found] == [
        "tool count\nuser\na\nassistant\ncount1\ntool\nb\nassistant\nd\n",
        "user\na\nassistant\nd\n",
    ]
    assert [learned_text(tokenizer, example) for example in found] == ["count1\nd\n", "d\n"]


def test_a_conversation_that_the_template_refuses_is_bad_data(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="cannot render a conversation of the data: roles must alternate"):
        list(
            encoder(tokenizer, Columns(type="Messages", messages="messages")).encode({"messages": [messages]})
        )


@pytest.mark.parametrize(
    ("overlong", "kept", "counts"),
    [
        ("Drop", [5], {"read": 2, "kept": 1, "too long": 1}),
        ("Truncate", [8, 5], {"read": 2, "kept": 2, "truncated": 1, "tokens cut": 5}),
    ],
)
def test_what_becomes_of_overlong_examples_is_counted(
    tokenizer: PreTrainedTokenizerBase, overlong: str, kept: list[int], counts: dict[str, int]
) -> None:
    texts = {"text": ["qqqqqqqqqqqq", "qqqq"]}
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, overlong=overlong)
    assert [len(example.tokens) for example in encoding.encode(texts)] == kept
    assert dict(encoding.counts) == counts


def test_an_overlong_example_can_be_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, overlong="Fail")
    with pytest.raises(DataError, match=r"an example has 13 tokens, above training\.maxLength 8"):
        list(encoding.encode({"text": ["qqqqqqqqqqqq"]}))


PREPARED = Prepare(output="/splits")
TEMPLATED = Prepare(output="/splits", prompt_template="{a}")
TURNS = Prepare(output="/splits", prompt_template="{a}", conversation=Conversation())
BOTH_TEMPLATES = Prepare(output="/splits", prompt_template="{a}", response_template="{b}")


@pytest.mark.parametrize(
    ("columns", "prepare", "expected"),
    [
        (Columns(type="Text", text="body"), None, Columns(type="Text", text="body")),
        (Columns(type="Text", text="body"), PREPARED, Columns(type="Text", text="text")),
        (Columns(type="PromptResponse", prompt="q", response="a"), PREPARED, PROMPT_RESPONSE),
        (Columns(type="Messages", messages="chat"), PREPARED, Columns(type="Messages", messages="messages")),
        (Columns(type="Messages", tools="functions"), PREPARED, Columns(type="Messages", tools="tools")),
        (Columns(type="Messages", tools="functions"), None, Columns(type="Messages", tools="functions")),
        (Columns(type="Preference", prompt="q"), TURNS, PREFERENCE),
        (Columns(type="PromptResponse", prompt="q", response="a"), TURNS, Columns(type="Messages")),
        (Columns(type="Text", text="body"), TEMPLATED, Columns(type="Text", text="text")),
        (
            Columns(type="PromptResponse", prompt="q", response="a"),
            TEMPLATED,
            Columns(type="Text", text="text"),
        ),
        (Columns(type="Text", text="body"), BOTH_TEMPLATES, PROMPT_RESPONSE),
    ],
)
def test_a_prepared_table_has_columns_of_its_own_making(
    columns: Columns, prepare: Prepare | None, expected: Columns
) -> None:
    assert example_columns(Data(columns=columns, prepare=prepare)) == expected


def pairs_of(
    tokenizer: PreTrainedTokenizerBase, encoding: encode.Encoder, rows: list[tuple[Any, Any, Any]]
) -> list[list[tuple[str, str]]]:
    """The documents of each pair as (all of it, the part on which the loss is taken)."""
    columns = {name: [row[at] for row in rows] for at, name in enumerate(("prompt", "chosen", "rejected"))}
    found = []
    for example in encoding.encode(columns):
        ends = example.lengths.cumsum()
        found.append(
            [
                (
                    tokenizer.decode(example.tokens[begin:end]),
                    tokenizer.decode(example.tokens[begin:end][example.loss_mask[begin:end]]),
                )
                for begin, end in zip(ends - example.lengths, ends, strict=True)
            ]
        )
    return found


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def test_a_preference_is_two_documents_with_the_loss_on_the_answers(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    encoding = encoder(tokenizer, PREFERENCE)
    assert pairs_of(tokenizer, encoding, [("Which? ", "This.", "That is it.")]) == [
        [("Which? This.<eos>", "This.<eos>"), ("Which? That is it.<eos>", "That is it.<eos>")]
    ]
    assert encoding.documents == 2


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
    assert pairs_of(tokenizer, encoder(tokenizer, PREFERENCE), [("Which? ", "This.", "That."), row]) == [
        [("Which? This.<eos>", "This.<eos>"), ("Which? That.<eos>", "That.<eos>")],
        [("user\na house\nassistant\nred\n", "red\n"), ("user\na house\nassistant\nblue\n", "blue\n")],
    ]


def test_the_turns_of_a_prompt_are_not_learned(tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    prompt = [user("a"), assistant("b"), user("c")]
    row = (prompt, [assistant("d"), user("e"), assistant("f")], [assistant("g")])
    ((chosen, rejected),) = pairs_of(tokenizer, encoder(tokenizer, PREFERENCE), [row])
    assert (chosen[1], rejected[1]) == ("d\nf\n", "g\n")


@pytest.mark.parametrize(
    ("overlong", "kept", "counts"),
    [
        ("Drop", [[6, 6]], {"read": 5, "kept": 1, "too long": 1}),
        ("Truncate", [[8, 6], [6, 6]], {"read": 5, "kept": 2, "truncated": 1, "tokens cut": 6}),
    ],
)
def test_a_pair_is_kept_or_left_out_as_a_whole(
    overlong: str, kept: list[list[int]], counts: dict[str, int], tokenizer: PreTrainedTokenizerBase
) -> None:
    encoding = encoder(tokenizer, PREFERENCE, max_length=8, overlong=overlong)
    rows = {
        "prompt": ["qq"] * 5,
        "chosen": ["q" * 11, "jjj", "jjj", "", "jjj"],
        "rejected": ["jjj", "kkk", "jjj", "jjj", " "],
    }
    assert [example.lengths.tolist() for example in encoding.encode(rows)] == kept
    assert dict(encoding.counts) == {**counts, "without a difference": 1, "without an answer": 2}


def test_counts_are_metrics_too(tokenizer: PreTrainedTokenizerBase) -> None:
    encoding = encoder(tokenizer, Columns(type="Text", text="text"), max_length=8, overlong="Truncate")
    list(encoding.encode({"text": ["qqqqqqqqqqqq", "qqqq"]}))
    assert encoding.metrics("train") == {
        "train_rows_read": 2,
        "train_rows_kept": 2,
        "train_rows_too_long": 0,
        "train_rows_truncated": 1,
        "train_tokens_cut": 5,
        "train_rows_without_answer": 0,
        "train_rows_without_difference": 0,
    }
    assert encoding.summary() == "2 read, 1 truncated, 5 tokens cut, 2 kept"


def test_a_fingerprint_tells_examples_apart_by_all_that_they_are() -> None:
    examples = [
        encode.Encoded.of(encode.Document([5, 6, 7], [False, True, True])),
        encode.Encoded.of(encode.Document([5, 6, 7], [False, False, True])),
        encode.Encoded.of(encode.Document([5, 6, 8], [False, True, True])),
        encode.Encoded.of(encode.Document([5, 6], [False, True]), encode.Document([7], [True])),
    ]
    assert len({example.fingerprint for example in examples}) == 4
    assert {len(example.fingerprint) for example in examples} == {16}


MESSAGES = Columns(type="Messages", messages="chat")
SHAPE = "MessageShape: a row of column chat is not a list of {role, content}, "


@pytest.mark.parametrize(
    ("columns", "rows", "sentence"),
    [
        (
            MESSAGES,
            {"chat": [[user("a"), {"content": "b"}]]},
            f"{SHAPE}message 2 has no role: correct such rows or filter them out",
        ),
        (
            MESSAGES,
            {"chat": [[{"role": "user", "content": None}]]},
            f"{SHAPE}message 1 has no content: correct such rows or filter them out",
        ),
        (
            MESSAGES,
            {"chat": [["a", "b"]]},
            f"{SHAPE}message 1 has neither: correct such rows or filter them out",
        ),
        (
            MESSAGES,
            {"chat": ["a"]},
            f"{SHAPE}it is text: correct such rows or filter them out",
        ),
        (
            MESSAGES,
            {"chat": [[{"role": "assistant", "tool_calls": "count"}]]},
            "MessageShape: a row of column chat is wrong, tool_calls of message 1 are not JSON: correct such rows or "
            "filter them out",
        ),
        (
            Columns(type="Messages", messages="chat", tools="functions"),
            {"chat": [[assistant("a")]], "functions": ["count"]},
            "ToolShape: a row of column functions is wrong, tools are not JSON: correct such rows or filter them out",
        ),
        (
            MESSAGES,
            {"chat": [[assistant("a"), {"role": "tool", "content": "b", "tool_calls": "[{}]"}]]},
            "ChatTemplate: the chat template cannot render a conversation of the data: it does not render tool calls: set "
            "model.chatTemplate to one that does",
        ),
        (
            Columns(type="Text", text="body"),
            {"body": [[user("a")]]},
            "ColumnType: column body holds lists where text is needed: name it in data.columns.messages if they are "
            "conversations",
        ),
        (
            PREFERENCE,
            {"prompt": ["a"], "chosen": [[user("b"), assistant("c")]], "rejected": [[assistant("d")]]},
            "MessageShape: a row of column chosen goes on from the prompt with role user: an answer is the "
            "assistant's, alone or after the messages of the prompt",
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
        list(encoder(tokenizer, columns).encode(rows))
    assert f"{refused.value.reason}: {refused.value.message}" == sentence
    assert refused.value.exit_code == 65


def test_conversations_without_a_turn_of_the_assistant_teach_nothing(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    encoding = encoder(tokenizer, MESSAGES)
    assert list(encoding.encode({"chat": [[], [user("a")]]})) == []
    assert dict(encoding.counts) == {"read": 2, "without an answer": 2}


def test_messages_need_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    rows: dict[str, list[Any]] = {
        "prompt": ["a"],
        "chosen": [[assistant("b")]],
        "rejected": [[assistant("c")]],
    }
    with pytest.raises(RecipeRefusedError) as refused:
        list(encoder(tokenizer, PREFERENCE).encode(rows))
    assert refused.value.message == (
        "a preference with lists of {role, content} needs a chat template, and the tokenizer of model.base has none: "
        "set model.chatTemplate"
    )
