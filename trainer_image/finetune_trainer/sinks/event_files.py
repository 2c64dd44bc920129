"""TensorBoard: event files in the folder of a job, on a volume or in an object store.

Each attempt has files of its own. The first one begins with the step from which the attempt repeats the steps of earlier attempts:
TensorBoard drops their later events.
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from finetune_trainer.sinks.entries import Metrics, Parameters, Start
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.sinks.entries import Entry, Settings

# An object store has no appending: a file is uploaded as a whole, at most this often, and the next file begins at this size.
PUBLISH_SECONDS = 15.0
MAX_FILE_BYTES = 4 * 2**20
# The version of the format from which a start of a session means that later steps are repeated.
_FILE_VERSION = "brain.Event:2"
_TEXT_TAG = "parameters"


class EventFiles:
    """Writes the event files of one pod.

    Args:
        settings: of the sink; `target` is the folder of the job.
        clock: seconds since the epoch.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.label = f"TensorBoard's folder {settings.target}"
        self._folder = settings.target
        self._writer_name = settings.writer
        self._clock = clock
        self._parameters: dict[str, object] = {}
        self._file: _EventFile | None = None
        self._published_time = 0.0

    def add(self, entry: Entry) -> None:
        """Add an entry to the current file. Parameters wait for the start of the attempt."""
        if isinstance(entry, Parameters):
            self._parameters |= entry.values
        elif isinstance(entry, Start):
            self._start(entry.step)
        elif isinstance(entry, Metrics):
            self._add_metrics(entry)

    def publish(self) -> None:
        """Write the current file if it has new events and was not written for PUBLISH_SECONDS."""
        now = self._clock()
        if self._file is None or now - self._published_time < PUBLISH_SECONDS:
            return
        self._write(self._file)
        # NB: the clock is read again: a store that takes longer than the interval must not be written to without a pause.
        self._published_time = self._clock()

    def close(self) -> None:
        """Write the current file if it has new events."""
        if self._file is not None:
            self._write(self._file)

    def is_final(self, error: Exception) -> bool:  # noqa: ARG002 - the protocol of a writer
        """Whether a retry cannot succeed: never, since a person can correct a volume or a login."""
        return False

    def _start(self, step: int) -> None:
        file = self._open()
        # The attempt does not repeat its first step, unless it is step 0: an evaluation of the base precedes the training.
        purge_step = step + 1 if step else 0
        file.add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)), self._clock())
        if self._parameters:
            rows = "\n".join(
                f"| {name} | {json.dumps(value, default=str)} |" for name, value in self._parameters.items()
            )
            summary = text_pb(_TEXT_TAG, f"| parameter | value |\n|---|---|\n{rows}")
            file.add(Event(step=step, summary=summary), self._clock())

    def _add_metrics(self, entry: Metrics) -> None:
        file = self._file or self._open()
        if file.size >= MAX_FILE_BYTES:
            self._write(file)
            file = self._open()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
        file.add(Event(step=entry.step, summary=Summary(value=values)), entry.time)

    def _open(self) -> _EventFile:
        """Begin the next file. TensorBoard reads the files of a folder in the order of their names."""
        number = self._file.number + 1 if self._file is not None else 0
        now = self._clock()
        name = f"events.out.tfevents.{int(now):010d}.{self._writer_name}.{number:04d}"
        self._file = _EventFile(name, number)
        self._file.add(Event(file_version=_FILE_VERSION), now)
        return self._file

    def _write(self, file: _EventFile) -> None:
        """Write the events of a file that are not written yet."""
        content = file.content()
        if len(content) == file.written_bytes:
            return
        files, path = filesystems.open_filesystem(self._folder)
        filesystems.make_folder(files, path)
        if "file" in files.protocol:
            _append(Path(path) / file.name, content, file.written_bytes)
        else:
            files.pipe_file(f"{path}/{file.name}", content)
        file.written_bytes = len(content)


class _EventFile:
    """The content of an event file.

    written_bytes: the length of the content that is in the folder.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.written_bytes = 0
        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)

    @property
    def size(self) -> int:
        return self._buffer.tell()

    def add(self, event: Event, seconds: float) -> None:
        event.wall_time = seconds
        self._records.write(event.SerializeToString())

    def content(self) -> bytes:
        return self._buffer.getvalue()


def _append(path: Path, content: bytes, written_bytes: int) -> None:
    """Write `content` from `written_bytes` on. A part that an earlier failure left behind is overwritten."""
    with path.open("r+b" if written_bytes else "wb") as file:
        file.seek(written_bytes)
        file.write(content[written_bytes:])
