"""Preferences that the chat template renders, from a source to what training encodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from finetune_trainer.pod import exit_status
from support.tool_templates import HERMES
from unit.trainer.prep.chats import LEARNED_CALL, Trained, build_message, calling, counted
from unit.trainer.prep.recipes import PAIR_TOKENS, Json, Preparer, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

PREFERENCE: Json = {"type": "Preference"}
DPO: Json = {"type": "DPO"}


def pair(name: str) -> list[Json]:
    return [build_message("user", name), build_message("assistant", f"{name}!")]


def hermes(*turns: Json) -> str:
    """What the template makes of turns behind a system turn."""
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


DEFAULT, BRIEF = build_message("system", "You may call tools."), build_message("system", "Be brief.")
GOOD, BAD = build_message("assistant", "Blue."), build_message("assistant", "Red.")
SKY = build_message("user", "Sky?")
PREFERENCES: dict[str, tuple[Json, Json, list[Json]]] = {
    "texts": (
        {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {}},
        [DEFAULT, SKY],
    ),
    "texts behind a system turn": (
        {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {"system": "Be brief."}},
        [BRIEF, SKY],
    ),
    "a template of the prompt": (
        {"prompt": "Sky", "chosen": "Blue.", "rejected": "Red."},
        {"conversation": {}, "promptTemplate": "{prompt}?"},
        [DEFAULT, SKY],
    ),
    "answers that repeat the prompt, which is text": (
        {"prompt": "Sky?", "chosen": [SKY, GOOD], "rejected": [SKY, BAD]},
        {},
        [DEFAULT, SKY],
    ),
    "answers that repeat the prompt, behind a system turn": (
        {"prompt": "Sky?", "chosen": [SKY, GOOD], "rejected": [SKY, BAD]},
        {"conversation": {"system": "Be brief."}},
        [BRIEF, SKY],
    ),
    "lists": (
        {"prompt": [BRIEF, *pair("a"), SKY], "chosen": [GOOD], "rejected": [BAD]},
        {},
        [BRIEF, *pair("a"), SKY],
    ),
    "a prompt that is a list, and answers that are texts": (
        {"prompt": [*pair("a"), SKY], "chosen": "Blue.", "rejected": "Red."},
        {},
        [DEFAULT, *pair("a"), SKY],
    ),
}


@pytest.mark.parametrize(("row", "prepare", "prompt"), PREFERENCES.values(), ids=PREFERENCES)
def test_training_prefers_answers_behind_the_rendered_prompt(
    preparing: Callable[[str], Preparer], row: Json, prepare: Json, prompt: list[Json]
) -> None:
    preparer = preparing(HERMES)
    result = preparer([row], columns=PREFERENCE, objective=DPO, **prepare)
    trained = Trained(result, preparer.folder / "model", PREFERENCE, **prepare)
    assert trained.texts == [hermes(*prompt, GOOD), hermes(*prompt, BAD)]
    assert trained.learned == ["Blue.<|im_end|>\n", "Red.<|im_end|>\n"]
    assert trained.tokens == counted(result)
    assert list(table_of(result)[0]) == [
        "id",
        "prompt",
        "chosen",
        "rejected",
        *PAIR_TOKENS,
        "tokens",
        "split",
    ]


def test_unpaired_answers_are_learned_behind_the_rendered_prompt(
    preparing: Callable[[str], Preparer],
) -> None:
    columns: Json = {"type": "Unpaired"}
    rows: list[Json] = [
        {"prompt": [SKY], "completion": [SKY, GOOD], "label": True},
        {"prompt": [SKY], "completion": [BAD], "label": False},
        {"prompt": [SKY], "completion": [SKY], "label": True},  # adds nothing
        {"prompt": [BRIEF, SKY], "completion": [GOOD], "label": True},
        {"prompt": [BRIEF, SKY], "completion": [GOOD], "label": False},  # judged both ways
    ]
    preparer = preparing(HERMES)
    result = preparer(rows, columns=None, objective={"type": "KTO"}, onTemplateError="Drop")
    assert result.dropped == {"notNull": 0, "dedupe": 0, "onTemplateError": 1}
    trained = Trained(result, preparer.folder / "model", columns)
    assert sorted(zip(trained.texts, trained.learned, strict=True)) == sorted(
        (hermes(*prompt, answer), f"{answer['content']}<|im_end|>\n")
        for prompt, answer in (
            ([DEFAULT, SKY], GOOD),
            ([DEFAULT, SKY], BAD),
            ([BRIEF, SKY], GOOD),
            ([BRIEF, SKY], GOOD),
        )
    )
    assert sorted(trained.tokens) == counted(result)
    assert list(table_of(result)[0]) == [
        *("id", "prompt", "completion", "label", "input_ids", "loss_mask", "tokens", "split")
    ]


@pytest.mark.usefixtures("compiled_plans")
def test_preferences_that_are_conversations_come_through_every_step(
    preparing: Callable[[str], Preparer],
) -> None:
    def row(number: int, good: str = "Blue.", bad: str = "Red.") -> Json:
        prompt = f"Sky {number}?"
        return {
            "prompt": prompt,
            "chosen": [build_message("user", prompt), build_message("assistant", good)],
            "rejected": [build_message("user", prompt), build_message("assistant", bad)],
        }

    call = row(8) | {"chosen": [build_message("user", "Sky 8?"), calling("weather", city="Ulm")]}
    rows = [*(row(number) for number in range(6)), call]
    dirty = [
        row(0, good="BLUE. "),  # the same but for case and white space
        row(1, bad="Green."),  # another preference of the same prompt
        row(2) | {"chosen": []},
        row(3) | {"rejected": [build_message("user", "Sky 3?"), {"role": "assistant", "content": None}]},
        row(4) | {"rejected": [build_message("user", "Sky 4?")]},  # nothing behind the prompt
        row(5) | {"prompt": "Sea?"},  # answers to another prompt
        row(6, good="nowhere " * 200),
        row(7, good="Write to jane@example.com"),
    ]
    preparer = preparing(HERMES)
    result = preparer(
        rows + dirty,
        columns=None,
        objective=DPO,
        onTemplateError="Drop",
        redact=["Email"],
        maxTokens=400,
        minPromptChars=3,
    )
    assert result.dropped == {
        "notNull": 2,
        "minPromptChars": 0,
        "dedupe": 1,
        "onTemplateError": 2,
        "maxTokens": 1,
    }
    trained = Trained(result, preparer.folder / "model", PREFERENCE)
    assert (sorted(trained.tokens), len(trained.tokens)) == (counted(result), 9)
    assert {"Write to <EMAIL><|im_end|>\n", LEARNED_CALL} <= {*trained.learned}


def test_answers_to_another_prompt_fail_the_preparation(preparing: Callable[[str], Preparer]) -> None:
    row = {"prompt": "Sea?", "chosen": [SKY, GOOD], "rejected": [BAD]}
    preparer = preparing(HERMES)
    with pytest.raises(exit_status.DataError) as failed:
        preparer([row], columns=PREFERENCE, objective=DPO)
    assert failed.value.message == (
        f"column chosen of row 1 of {preparer.folder}/corpus-0/0.parquet begins its answer with a message of role user: the first message "
        "after those of the prompt must have role assistant; to drop these rows, set data.prepare.onTemplateError: Drop"
    )
