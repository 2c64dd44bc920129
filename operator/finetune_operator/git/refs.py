"""Parses the answers of Git servers about their refs, and keeps only the requested refs.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/protocol-v2

NB: a user names the server. Each line is parsed when it arrives, and then dropped, so that neither a long list nor many small
packets take much memory or block the event loop for long.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from finetune_operator.git.packets import PacketError, Packets, RefusedError

_SERVICE_LINE = b"# service="
_VERSION_2 = b"version 2"
_PEELED = b"^{}"
_ERROR = b"ERR "
_COMMIT = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?")


@dataclass(frozen=True)
class Ref:
    """What a name points at. `commit`: a commit or an annotated tag. `peeled`: the tag's commit. `target`: the branch that HEAD names."""

    commit: str
    peeled: str = ""
    target: str = ""


@dataclass
class Advertisement:
    """The answer to `/info/refs`: in version 2 the server's capabilities, in version 0 all refs.

    Lines of version 0, for example: `# service=git-upload-pack`, then `COMMIT HEAD` with a zero byte and
    `symref=HEAD:refs/heads/main`, then `COMMIT refs/tags/v1` and `COMMIT refs/tags/v1^{}`.

    Attributes:
        names: full names of the refs to keep.
        version_2: whether the server speaks version 2.
        refs: in version 0, the refs to keep that exist, by name.
    """

    names: Collection[str]
    version_2: bool = False
    refs: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)
    _lines: int = 0
    """The number of lines before the current line."""
    _symbolic: Mapping[str, str] = field(default_factory=dict)
    """In version 0: the target of each symbolic ref, by the name of the ref."""

    def __post_init__(self) -> None:
        self._requested = {name.encode() for name in self.names}
        self._requested |= {name + _PEELED for name in self._requested}

    def take(self, part: bytes) -> bool:
        """Parse a part, and return whether the rest is needed. The capabilities in version 2 are not needed.

        Raises:
            RefusedError: the server reports an error.
            PacketError: the data are not the response of a Git server.
        """
        for line in self._packets.feed(part):
            self._parse_line(line)
            if self.version_2:
                return False
            self._lines += 1
        return True

    def end(self) -> None:
        """Check that the list is complete.

        Raises:
            PacketError: it is incomplete.
        """
        if self.version_2:
            return
        self._packets.end()
        if not self._lines:
            raise PacketError("no list of refs")

    def _parse_line(self, line: bytes) -> None:
        _raise_reported_error(line)
        # NB: some servers of version 2 do not send the line with the service before the line with the version.
        if self._lines <= 1 and line == _VERSION_2:
            self.version_2 = True
        elif self._lines == 0:
            if not line.startswith(_SERVICE_LINE):
                raise PacketError("no list of refs")
        elif self._lines == 1:
            # In version 0, the first ref is followed by the capabilities.
            ref, _, capabilities = line.partition(b"\0")
            self._symbolic = _parse_symbolic_refs(capabilities.decode("utf-8", "replace"))
            self._keep(ref)
        else:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        """Keep a ref if it was requested. The line after an annotated tag repeats its name with `^{}`, for the tag's commit."""
        commit, _, ref_name = line.partition(b" ")
        if not _COMMIT.fullmatch(commit):
            raise PacketError("no ref")
        if ref_name not in self._requested:
            return
        name = ref_name.removesuffix(_PEELED).decode()
        if not ref_name.endswith(_PEELED):
            self.refs[name] = Ref(commit.decode(), target=self._symbolic.get(name, ""))
        elif name in self.refs:
            self.refs[name] = replace(self.refs[name], peeled=commit.decode())


@dataclass
class Listing:
    """The answer to `ls-refs` of version 2; each line has an object, its name, and attributes.

    Lines, for example: `COMMIT HEAD symref-target:refs/heads/main` and `COMMIT refs/tags/v1 peeled:COMMIT`.

    Attributes:
        names: full names of the refs to keep.
        refs: the refs to keep that exist, by name.
    """

    names: Collection[str]
    refs: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)

    def __post_init__(self) -> None:
        self._requested = {name.encode() for name in self.names}

    def take(self, part: bytes) -> bool:
        """Parse a part, and return whether the rest is needed, which it always is.

        Raises:
            RefusedError: the server reports an error.
            PacketError: the data are not the response of a Git server.
        """
        for line in self._packets.feed(part):
            self._parse_line(line)
        return True

    def end(self) -> None:
        """Check that the answer is complete.

        Raises:
            PacketError: it is incomplete.
        """
        self._packets.end()

    def _parse_line(self, line: bytes) -> None:
        _raise_reported_error(line)
        commit, separated, remainder = line.partition(b" ")
        if not separated:
            raise PacketError("no ref")
        ref_name, _, attributes = remainder.partition(b" ")
        if ref_name in self._requested and _COMMIT.fullmatch(commit):
            values = _parse_pairs(attributes.decode("utf-8", "replace").split(" "))
            peeled = values.get("peeled", "")
            self.refs[ref_name.decode()] = Ref(
                commit=commit.decode(),
                peeled=peeled if _COMMIT.fullmatch(peeled.encode()) else "",
                target=values.get("symref-target", ""),
            )


def _raise_reported_error(line: bytes) -> None:
    """Raise an error that the server reports instead of refs, with the HTTP status 200."""
    if line.startswith(_ERROR):
        raise RefusedError("an error of the server")


def _parse_symbolic_refs(capabilities: str) -> Mapping[str, str]:
    """The targets of symbolic refs, by name."""
    targets = (item.removeprefix("symref=") for item in capabilities.split(" ") if item.startswith("symref="))
    return _parse_pairs(targets)


def _parse_pairs(items: Iterable[str]) -> Mapping[str, str]:
    """Map the text before the first colon of each item to the text after it. Items without a colon are dropped."""
    return dict(item.split(":", 1) for item in items if ":" in item)
