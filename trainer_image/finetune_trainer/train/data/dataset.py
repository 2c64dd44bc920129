"""Tokenizes splits into memory-mapped arrays on disk, in an order that depends only on the examples."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.examples.column_values import parse_labels, parse_margins
from finetune_trainer.examples.columns import missing_weights_error
from finetune_trainer.examples.token_columns import read_documents, token_columns
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data.encode import WEIGHED
from finetune_trainer.train.data.read import read
from finetune_trainer.train.data.row_places import name_refused_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune_crds.data import Splits
    from finetune_trainer.train.data.encode import Encoded, Encoder

_FINGERPRINT = np.dtype("S16")
_LABELS, _MARGINS = "labels.npy", "margins.npy"
_TOKENS_PER_WRITE = 1 << 17


@dataclass(frozen=True)
class Split:
    """Tokenized examples, concatenated; an example has one or two documents.

    The documents of a preference are its prompt with the chosen and with the rejected answer. The documents of an unpaired preference are its
    prompt with its own answer, and with the answer of the next example (the last example uses the answer of the first).

    tokens: token ids, int32 [tokens].
    loss_mask: whether the token is a target of the loss, bool [tokens].
    offsets: where each document begins, and where the last ends, int64 [examples * documents + 1].
    documents: documents per example.
    reference: log-probabilities of both documents under the reference, fp32 [examples, 2], once computed.
    labels: for unpaired preferences, whether the answer of each example is good, bool [examples].
    margins: for pairs with margins, by how much each chosen answer is better, fp32 [examples].
    digest: of token ids, loss masks, labels and margins, independent of the order of the input; empty if not computed.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    documents: int = 1
    reference: np.ndarray | None = None
    labels: np.ndarray | None = None
    margins: np.ndarray | None = None
    digest: str = ""

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.documents

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per example, over all its documents, int64 [examples]."""
        return np.diff(self.offsets[:: self.documents])

    @classmethod
    def load(cls, folder: Path) -> Split:
        """Memory-map the arrays that `tokenize` wrote to `folder`; the ranks of a pod share the pages."""
        tokens, loss_mask, offsets = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "loss_mask", "offsets")
        )
        documents, digest = int(np.load(folder / "documents.npy")), (folder / "digest").read_text("ascii")
        label_array, margin_array = (
            np.load(folder / name, mmap_mode="r") if (folder / name).exists() else None
            for name in (_LABELS, _MARGINS)
        )
        return cls(
            tokens, loss_mask, offsets, documents, labels=label_array, margins=margin_array, digest=digest
        )


def tokenize(splits: Splits, name: str, encoder: Encoder, folder: Path, *, prepared: bool = False) -> bool:
    """Read and tokenize a split into `folder`, for `Split.load`; returns False, without a folder, if a split other than `train` has no rows.

    Examples are sorted by their hash, so the order does not depend on the input files. Tokens stream to disk. Sorting
    takes 64 bytes of memory per example (a fingerprint of 16, order, lengths and offsets), 96 per pair and 200 per unpaired
    preference. On disk, the tokens exist twice, or three times for unpaired preferences, at 5 bytes per token.

    Args:
        encoder: makes the examples; its counts start at 0.
        prepared: whether the table has the token ids (`read.has_token_ids`).

    Raises:
        DataError: data is missing or corrupt, no example is left (for `train`, or when rows were read), or a split has
            only one unpaired preference.
        RecipeRefusedError: examples are conversations, and the tokenizer has no chat template.
    """
    encoder.counts.clear()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unordered:
        _spool(_encode_examples(splits, name, encoder, prepared=prepared), Path(unordered))
        # If the table has token ids, the preparation has checked the weights of the messages.
        if name == "train" and not prepared:
            _check_weights(encoder)
        if encoder.counts["kept"]:
            folder.mkdir(exist_ok=True)
            if encoder.documents.columns.label is None:
                _write_sorted(Path(unordered), folder, len(token_columns(encoder.documents.columns)))
            else:
                if encoder.counts["kept"] == 1:
                    raise DataError("EmptySplit", _explain_single_example(splits, name, encoder))
                _write_sorted_with_next_answers(Path(unordered), folder, encoder.max_length)
            return True
    if name == "train" or encoder.counts["read"]:
        raise DataError("EmptySplit", _explain_empty_split(splits, name, encoder))
    return False


def _check_weights(encoder: Encoder) -> None:
    """Check that messages have the field that data.columns.messageWeight names: otherwise training would learn all answers."""
    columns = encoder.documents.columns
    if columns.message_weight is not None and not encoder.counts[WEIGHED]:
        raise missing_weights_error(str(columns.messages), columns.message_weight)


def _explain_empty_split(splits: Splits, name: str, encoder: Encoder) -> str:
    place = splits.path or getattr(splits, name)
    if not encoder.counts["read"]:
        return f"{place} has no rows of the split {name}: check how the splits were written"
    return (
        f"every example of the split {name} in {place} was dropped ({encoder.summary()}): "
        f"{encoder.suggest_remedy()}"
    )


def _explain_single_example(splits: Splits, name: str, encoder: Encoder) -> str:
    return (
        f"the split {name} in {splits.path or getattr(splits, name)} has one example ({encoder.summary()}), but objective KTO "
        "requires at least two: prepare more examples"
    )


def _encode_examples(splits: Splits, name: str, encoder: Encoder, *, prepared: bool) -> Iterator[Encoded]:
    """Yield the examples of a split: of the token ids in a prepared table, or of its texts and conversations."""
    columns = encoder.documents.columns
    if prepared:
        document_columns = token_columns(columns)
        names = [column for document in document_columns for column in document]
        names += [column for column in (columns.label, columns.margin) if column]
        nullable = [document.loss_mask for document in document_columns]
        for rows in read(splits, name, names, may_be_null=nullable, label=columns.label):
            yield from encoder.select_examples(
                read_documents(rows, document_columns),
                parse_labels(rows, columns),
                parse_margins(rows, columns),
            )
    else:
        with name_refused_row(splits, name, encoder.counts):
            for rows in read(
                splits, name, columns.column_names, may_be_null=[columns.tools], label=columns.label
            ):
                yield from encoder.encode(rows)


def _spool(examples: Iterable[Encoded], folder: Path) -> None:
    """Append the examples to files, in input order."""
    with (
        (folder / "tokens").open("wb") as tokens,
        (folder / "loss_mask").open("wb") as loss_mask,
        (folder / "lengths").open("wb") as lengths,
        (folder / "fingerprints").open("wb") as fingerprints,
        (folder / "prompts").open("wb") as prompts,
        (folder / "labels").open("wb") as labels_file,
        (folder / "margins").open("wb") as margins_file,
    ):
        for example in examples:
            tokens.write(example.tokens.data)
            loss_mask.write(example.loss_mask.data)
            lengths.write(example.lengths.data)
            fingerprints.write(example.fingerprint)
            if example.label is not None:
                # The length of the prompt: the answer begins at its first target.
                prompts.write(np.int32(example.loss_mask.argmax()).data)
                labels_file.write(np.bool_(example.label).data)
            if example.margin is not None:
                margins_file.write(np.float32(example.margin).data)


def _write_sorted(unordered: Path, folder: Path, documents: int) -> None:
    """Write the arrays of a Split in the order of the fingerprints, in chunks."""
    order, digest = _sort_fingerprints(unordered)
    (folder / "digest").write_text(digest, "ascii")
    margins = np.fromfile(unordered / "margins", np.float32)
    if len(margins):
        np.save(folder / _MARGINS, margins[order])
    lengths = np.fromfile(unordered / "lengths", np.int32).reshape(-1, documents)
    sizes = lengths.sum(axis=1, dtype=np.int64)
    begins = (np.cumsum(sizes) - sizes)[order]
    lengths, sizes = lengths[order], sizes[order]
    # One piece for each example: its documents are adjacent.
    _write_documents(unordered, folder, lengths, begins[:, None], sizes[:, None])


def _write_sorted_with_next_answers(unordered: Path, folder: Path, max_length: int) -> None:
    """Write the arrays of a Split of unpaired preferences.

    The prompt with the answer of the next example is cut to `max_length`. An answer begins at its first target.
    At least one token of that answer remains: the prompt is shorter than `max_length`, because the example has a target of its own.
    """
    order, digest = _sort_fingerprints(unordered)
    (folder / "digest").write_text(digest, "ascii")
    np.save(folder / _LABELS, np.fromfile(unordered / "labels", np.bool_)[order])
    sizes = np.fromfile(unordered / "lengths", np.int32).astype(np.int64)
    begins = (np.cumsum(sizes) - sizes)[order]
    sizes, prompts = sizes[order], np.fromfile(unordered / "prompts", np.int32)[order].astype(np.int64)
    answers = sizes - prompts
    # First document: the example. Second document: its prompt, and the answer of the next example.
    next_answers = np.minimum(np.roll(answers, -1), max_length - prompts)
    _write_documents(
        unordered,
        folder,
        lengths=np.stack([sizes, prompts + next_answers], axis=1),
        begins=np.stack([begins, begins, np.roll(begins + prompts, -1)], axis=1),
        sizes=np.stack([sizes, prompts, next_answers], axis=1),
    )


def _write_documents(
    unordered: Path, folder: Path, lengths: np.ndarray, begins: np.ndarray, sizes: np.ndarray
) -> None:
    """Write the documents of examples.

    Args:
        unordered: folder with the tokens as they were read.
        folder: the folder to write the arrays of a Split to.
        lengths: tokens in each document, [examples, documents].
        begins: where each piece of the documents begins in the tokens of `unordered`, int64 [examples, pieces].
        sizes: tokens in each piece, int64 [examples, pieces].
    """
    documents = lengths.shape[1]
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths.ravel(), out=offsets[1:])
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "documents.npy", np.array(documents, np.int64))
    parts = list(_slice_by_tokens(offsets[::documents]))
    for name, kind in (("tokens", np.int32), ("loss_mask", np.bool_)):
        source = np.asarray(np.memmap(unordered / name, kind, mode="r"))
        with (folder / f"{name}.npy").open("wb") as file:
            header = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (int(offsets[-1]),)}
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(source[concatenate_ranges(begins[part].ravel(), sizes[part].ravel())].data)


def _sort_fingerprints(unordered: Path) -> tuple[np.ndarray, str]:
    """Return the sort order of the fingerprints, and the digest of the sorted fingerprints."""
    fingerprints = np.fromfile(unordered / "fingerprints", _FINGERPRINT)
    order = np.argsort(fingerprints, kind="stable")
    return order, hashlib.blake2b(fingerprints[order].view(np.uint8).data, digest_size=16).hexdigest()


def _slice_by_tokens(offsets: np.ndarray) -> Iterator[slice]:
    """Yield slices of examples with about `_TOKENS_PER_WRITE` tokens each."""
    begin, last = 0, len(offsets) - 1
    while begin < last:
        end = int(np.searchsorted(offsets, offsets[begin] + _TOKENS_PER_WRITE))
        end = min(max(end, begin + 1), last)
        yield slice(begin, end)
        begin = end


def concatenate_ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenate the ranges begins[i], ..., begins[i] + sizes[i] - 1 of all i, int64.

    For example, [5, 6, 20, 21, 22] for the begins [5, 20] and the sizes [2, 3].
    """
    ends = np.cumsum(sizes)
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
