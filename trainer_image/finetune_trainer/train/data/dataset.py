"""From the splits to token ids on disk, in an order that depends on the examples alone."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.outcome import DataError
from finetune_trainer.train.data.read import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.data import Splits
    from finetune_trainer.train.data.encode import Encoder

_FINGERPRINT = np.dtype("S16")
# Tokens that are put in order at once.
_CHUNK_TOKENS = 1 << 17


@dataclass(frozen=True)
class Split:
    """Tokenised examples, one after the other, each of one document or of two (chosen, then rejected).

    tokens: token ids, int32 [tokens].
    loss_mask: whether the token is a target of the loss, bool [tokens].
    offsets: where each document begins, and where the last ends, int64 [examples * documents + 1].
    documents: documents an example.
    reference: the reference's log-probabilities of each example's two documents, fp32 [examples, 2], where they are
        known.
    digest: of its examples in whatever order they came, token ids and loss labels; empty where nobody computed it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    documents: int = 1
    reference: np.ndarray | None = None
    digest: str = ""

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.documents

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each example, those of its documents together, int64 [examples]."""
        return np.diff(self.offsets[:: self.documents])

    @classmethod
    def load(cls, folder: Path) -> Split:
        """Map the arrays that `tokenize` left in `folder` into memory, shared by all ranks of the pod."""
        tokens, loss_mask, offsets = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "loss_mask", "offsets")
        )
        documents, digest = int(np.load(folder / "documents.npy")), (folder / "digest").read_text("ascii")
        return cls(tokens, loss_mask, offsets, documents, digest=digest)


def tokenize(splits: Splits, name: str, encoder: Encoder, folder: Path) -> bool:
    """Read and tokenise a split into `folder`, for `Split.load`; False, and no folder, when there is no such split.

    Examples come in the order of their hash: it depends on nothing but the examples themselves, not on the files
    they were in. Tokens go to disk as they are made; while the examples are put in order, memory holds at most
    64 bytes for each of them (a fingerprint of 16, the order, lengths and offsets), 96 where they are pairs. The
    disk holds the tokens twice for that time, at 5 bytes each.

    Raises:
        DataError: data is missing or broken, or nothing is left to train on (an error only for `train`, or when
            rows were read).
        RecipeRefusedError: examples are conversations, and nothing says how to render them.
    """
    encoder.counts.clear()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unordered:
        _spool(splits, name, encoder, Path(unordered))
        if encoder.counts["kept"]:
            folder.mkdir(exist_ok=True)
            _put_in_order(Path(unordered), folder, encoder.documents)
            return True
    if name == "train" or encoder.counts["read"]:
        raise DataError("EmptySplit", _nothing_left(splits, name, encoder))
    return False


def _nothing_left(splits: Splits, name: str, encoder: Encoder) -> str:
    place = splits.path or getattr(splits, name)
    if not encoder.counts["read"]:
        return f"{place} has no rows of the split {name}: look at how the splits were made"
    return (
        f"no example of the split {name} in {place} is left ({encoder.summary()}): raise training.maxLength "
        f"above {encoder.max_length}, or look at the data"
    )


def _spool(splits: Splits, name: str, encoder: Encoder, folder: Path) -> None:
    """Append the examples to files as they come."""
    wanted = [column for column in encoder.columns.to_json().values() if column]
    with (
        (folder / "tokens").open("wb") as tokens,
        (folder / "loss_mask").open("wb") as loss_mask,
        (folder / "lengths").open("wb") as lengths,
        (folder / "fingerprints").open("wb") as fingerprints,
    ):
        for rows in read(splits, name, wanted):
            for example in encoder.encode(rows):
                tokens.write(example.tokens.data)
                loss_mask.write(example.loss_mask.data)
                lengths.write(example.lengths.data)
                fingerprints.write(example.fingerprint)


def _put_in_order(unordered: Path, folder: Path, documents: int) -> None:
    """Write the arrays of a Split, its examples in the order of their fingerprints, a part at a time."""
    order, digest = _order(unordered)
    (folder / "digest").write_text(digest, "ascii")
    lengths = np.fromfile(unordered / "lengths", np.int32).reshape(-1, documents)
    sizes = lengths.sum(axis=1, dtype=np.int64)
    begins = (np.cumsum(sizes) - sizes)[order]
    sizes = sizes[order]
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths[order].ravel(), out=offsets[1:])
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "documents.npy", np.array(documents, np.int64))
    parts = list(_parts(offsets[::documents]))
    for name, kind in (("tokens", np.int32), ("loss_mask", np.bool_)):
        source = np.asarray(np.memmap(unordered / name, kind, mode="r"))
        with (folder / f"{name}.npy").open("wb") as file:
            header = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (len(source),)}
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(source[spans(begins[part], sizes[part])].data)


def _order(unordered: Path) -> tuple[np.ndarray, str]:
    """The order of the fingerprints, and a digest of them in this order: the same in whatever order they came."""
    fingerprints = np.fromfile(unordered / "fingerprints", _FINGERPRINT)
    order = np.argsort(fingerprints, kind="stable")
    return order, hashlib.blake2b(fingerprints[order].view(np.uint8).data, digest_size=16).hexdigest()


def _parts(offsets: np.ndarray) -> Iterator[slice]:
    """The examples in parts of about `_CHUNK_TOKENS` tokens."""
    begin, last = 0, len(offsets) - 1
    while begin < last:
        end = int(np.searchsorted(offsets, offsets[begin] + _CHUNK_TOKENS))
        end = min(max(end, begin + 1), last)
        yield slice(begin, end)
        begin = end


def spans(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1 and so on for sizes[0] numbers, then the same for each of the others, int64."""
    ends = np.cumsum(sizes)
    return np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
