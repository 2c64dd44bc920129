"""Messages of conversations, and what training encodes of a prepared table of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune_crds.data import Columns, Splits
from finetune_crds.training import Model
from finetune_trainer.examples.columns import find_table_columns
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.token_columns import read_documents, token_columns
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.train.data import read
from finetune_trainer.train.data.encode import Encoder
from unit.trainer.prep.recipes import recipe, table_of

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from finetune_crds.contract import PrepResult
    from unit.trainer.prep.recipes import Json

# What training learns of `calling("weather", city="Ulm")` behind the template of Hermes.
LEARNED_CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call><|im_end|>\n'


def tool(name: str, *, of: str) -> Json:
    """The definition of a tool with one parameter, in the order of keys that clients send."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": {of: {"type": "string"}}, "required": [of]},
        },
    }


def calling(name: str, **arguments: Any) -> Json:
    calls = [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def build_message(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def returned(content: str) -> Json:
    return {"role": "tool", "content": content, "tool_call_id": "c1"}


class Trained:
    """What training encodes of a prepared table.

    texts: of each document. learned: the part of each on which the loss is taken. tokens: of each example.
    """

    def __init__(self, result: PrepResult, model: Path, columns: Json, **prepare: Any) -> None:
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(Model(base=str(model)), model)
        table_columns: Columns = find_table_columns(recipe(columns=columns, **prepare).data)
        encoder = Encoder(Documents(self.tokenizer, table_columns, answers_only=True), 100_000, "Fail")
        splits = Splits(type="Delta", path=result.path, version=result.version)
        assert read.has_token_ids(splits, encoder.documents.encoding)
        names = token_columns(table_columns)
        ids = [name for each in names for name in each]
        self.texts: list[str] = []
        self.learned: list[str] = []
        self.tokens: list[int] = []
        for rows in read.read(splits, "train", table_columns.column_names + ids, label=table_columns.label):
            assert [*read_documents(rows, names)] == [*encoder.documents.of(rows)]
            for example in encoder.encode(rows):
                self.tokens.append(len(example.tokens))
                ends = example.lengths.cumsum()
                for begin, end in zip(ends - example.lengths, ends, strict=True):
                    tokens, mask = example.tokens[begin:end], example.loss_mask[begin:end]
                    self.texts.append(self.tokenizer.decode(tokens))
                    self.learned.append(self.tokenizer.decode(tokens[mask]))


def counted(result: PrepResult) -> list[int]:
    """The tokens that the preparation counted for each example, sorted."""
    return sorted(row["tokens"] for row in table_of(result))
