"""What servers of Git answer about their refs, of which those are kept that are asked for.

https://git-scm.com/docs/http-protocol, https://git-scm.com/docs/protocol-v2

NB: the server is one that a user names. Each line is judged as it comes and dropped, so that neither a long list nor many small
packets take memory, or the event loop for long.
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
    """What a name is at; `peeled` is the commit of an annotated tag; `target` is the branch that HEAD names."""

    commit: str
    peeled: str = ""
    target: str = ""


@dataclass
class Advertisement:
    """The answer to `/info/refs`: that the server knows version 2, or, in version 0, all refs, unasked.

    Attributes:
        names: the refs to keep.
        refs: of version 0, those of them that exist.
    """

    names: Collection[str]
    version_2: bool = False
    refs: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)
    _lines: int = 0
    _symbolic: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._requested = {name.encode() for name in self.names}
        self._requested |= {name + _PEELED for name in self._requested}

    def take(self, part: bytes) -> bool:
        """Judge a part; returns whether the rest is needed. The capabilities of a server of version 2 are not.

        Raises:
            RefusedError: the server says that it failed.
            PacketError: it is no response of a Git server.
        """
        for line in self._packets.feed(part):
            self._parse_line(line)
            if self.version_2:
                return False
            self._lines += 1
        return True

    def end(self) -> None:
        """Check that all of a list has come.

        Raises:
            PacketError: it has not.
        """
        if self.version_2:
            return
        self._packets.end()
        if not self._lines:
            raise PacketError("no list of refs")

    def _parse_line(self, line: bytes) -> None:
        _raise_reported_error(line)
        # NB: not every server of version 2 names the service before it.
        if self._lines <= 1 and line == _VERSION_2:
            self.version_2 = True
        elif self._lines == 0:
            if not line.startswith(_SERVICE_LINE):
                raise PacketError("no list of refs")
        elif self._lines == 1:
            ref, _, capabilities = line.partition(b"\0")
            self._symbolic = _parse_symbolic_refs(capabilities.decode("utf-8", "replace"))
            self._keep(ref)
        else:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        """Keep a ref that is asked for; `^{}` follows the name of a tag's commit."""
        commit, _, ref_name = line.partition(b" ")
        if not _COMMIT.fullmatch(commit):
            raise PacketError("no ref")
        if ref_name not in self._requested:
            return
        name, at = ref_name.decode(), commit.decode()
        tag = self.refs.get(name.removesuffix("^{}"))
        if name.endswith("^{}"):
            if tag:
                self.refs[name.removesuffix("^{}")] = replace(tag, peeled=at)
        else:
            self.refs[name] = Ref(at, target=self._symbolic.get(name, ""))


@dataclass
class Listing:
    """The answer to `ls-refs` of version 2: in each line an object, its name, and attributes.

    Attributes:
        names: the refs to keep.
        refs: those of them that exist.
    """

    names: Collection[str]
    refs: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)

    def __post_init__(self) -> None:
        self._requested = {name.encode() for name in self.names}

    def take(self, part: bytes) -> bool:
        """Judge a part; returns whether the rest is needed.

        Raises:
            RefusedError: the server says that it failed.
            PacketError: it is no response of a Git server.
        """
        for line in self._packets.feed(part):
            self._parse_line(line)
        return True

    def end(self) -> None:
        """Check that all of it has come.

        Raises:
            PacketError: it has not.
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
                commit.decode(),
                peeled if _COMMIT.fullmatch(peeled.encode()) else "",
                values.get("symref-target", ""),
            )


def _raise_reported_error(line: bytes) -> None:
    """Raise an error that the server reports in place of refs, with the HTTP status 200."""
    if line.startswith(_ERROR):
        raise RefusedError("an error of the server")


def _parse_symbolic_refs(capabilities: str) -> Mapping[str, str]:
    """The targets of symbolic refs, by name."""
    targets = (item.removeprefix("symref=") for item in capabilities.split(" ") if item.startswith("symref="))
    return _parse_pairs(targets)


def _parse_pairs(items: Iterable[str]) -> Mapping[str, str]:
    """What stands before the first colon, and what behind it."""
    return dict(item.split(":", 1) for item in items if ":" in item)
