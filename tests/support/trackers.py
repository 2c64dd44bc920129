"""What TensorBoard and W&B have of a run: event files by TensorBoard's own reader, and the file of an offline run of W&B."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# W&B chooses the module by the version of protobuf, which type checkers do not see.
Record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
# A file of W&B is a log of LevelDB behind a header: blocks of records, each with a CRC, a length and a kind.
_WANDB_HEADER, _RECORD_HEADER, _BLOCK = 7, 7, 32 * 1024
_FULL, _FIRST, _LAST = 1, 2, 4


def read_events(folder: Path | str) -> dict[str, list[tuple[int, float]]]:
    """The scalars of the event files in a folder by tag: step and value, in the order of TensorBoard."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def read_event_texts(folder: Path | str) -> dict[str, str]:
    """The texts of the event files in a folder by tag."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]
    }


def read_wandb(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], dict[str, Any], Any]:
    """An offline run of W&B: the history by step, the summary, and the record of the run."""
    history: list[tuple[int, dict[str, Any]]] = []
    summary: dict[str, Any] = {}
    run = Record()
    for record in _read_records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record
        elif kind == "history":
            row = {_key(item): json.loads(item.value_json) for item in record.history.item}
            history.append((record.history.step.num, row))
        elif kind == "summary":
            summary |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
    return history, summary, run


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _read_records(content: bytes) -> Iterator[Any]:
    at, parts = _WANDB_HEADER, b""
    while at + _RECORD_HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _RECORD_HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _crc, length, kind = struct.unpack_from("<IHB", content, at)
        at += _RECORD_HEADER
        parts = content[at : at + length] if kind in (_FULL, _FIRST) else parts + content[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
