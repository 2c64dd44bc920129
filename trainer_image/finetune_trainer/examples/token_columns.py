"""Documents (token ids of texts), and their columns in a prepared table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from finetune_crds.data import Columns

ENCODING = "finetune.encoding"
"""The key of `Documents.encoding` in the metadata of a column of token ids, and in the metadata of the commit that wrote the column."""


class Document(NamedTuple):
    """Token ids of one independent text, and whether each is a target of the loss.

    loss_mask: None if the chat template does not show which tokens are answers.
    """

    tokens: list[int]
    loss_mask: list[bool] | None

    def first(self, count: int) -> Document:
        """Return the document truncated to `count` tokens."""
        return Document(self.tokens[:count], None if self.loss_mask is None else self.loss_mask[:count])


class TokenColumns(NamedTuple):
    """The columns of a prepared table that hold one document of each example."""

    input_ids: str
    loss_mask: str


_DOCUMENT_COLUMNS = TokenColumns("input_ids", "loss_mask")
_PREFERENCE_COLUMNS = (
    TokenColumns("chosen_input_ids", "chosen_loss_mask"),
    TokenColumns("rejected_input_ids", "rejected_loss_mask"),
)
ALL_TOKEN_COLUMNS = tuple(name for pair in (_DOCUMENT_COLUMNS, *_PREFERENCE_COLUMNS) for name in pair)
"""The names of all columns that can hold token ids or loss masks."""


def token_columns(columns: Columns) -> tuple[TokenColumns, ...]:
    """Return the columns for the documents of an example, one pair of columns for each document."""
    return (_DOCUMENT_COLUMNS,) if columns.chosen is None else _PREFERENCE_COLUMNS


def read_documents(
    rows: Mapping[str, list[Any]], columns: Sequence[TokenColumns]
) -> Iterator[tuple[Document, ...]]:
    """Yield the documents of each row, given a batch of the token columns of a prepared table."""
    columns_of_documents = [map(Document, rows[names.input_ids], rows[names.loss_mask]) for names in columns]
    return zip(*columns_of_documents, strict=True)
