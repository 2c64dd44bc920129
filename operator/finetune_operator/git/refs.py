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
        found: of version 0, those of them that exist.
    """

    names: Collection[str]
    version_2: bool = False
    found: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)
    _lines: int = 0
    _symbolic: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wanted = {name.encode() for name in self.names}
        self._wanted |= {name + _PEELED for name in self._wanted}

    def take(self, part: bytes) -> bool:
        """Judge a part; returns whether the rest is needed. The capabilities of a server of version 2 are not.

        Raises:
            RefusedError: the server says that it failed.
            PacketError: it is no response of a Git server.
        """
        for line in self._packets.feed(part):
            self._judge(line)
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

    def _judge(self, line: bytes) -> None:
        _check(line)
        # NB: not every server of version 2 names the service before it.
        if self._lines <= 1 and line == _VERSION_2:
            self.version_2 = True
        elif self._lines == 0:
            if not line.startswith(_SERVICE_LINE):
                raise PacketError("no list of refs")
        elif self._lines == 1:
            ref, _, capabilities = line.partition(b"\0")
            self._symbolic = _symbolic(capabilities.decode("utf-8", "replace"))
            self._keep(ref)
        else:
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        """Keep a ref that is asked for; `^{}` follows the name of a tag's commit."""
        commit, _, ref_name = line.partition(b" ")
        if not _COMMIT.fullmatch(commit):
            raise PacketError("no ref")
        if ref_name not in self._wanted:
            return
        name, at = ref_name.decode(), commit.decode()
        tag = self.found.get(name.removesuffix("^{}"))
        if name.endswith("^{}"):
            if tag:
                self.found[name.removesuffix("^{}")] = replace(tag, peeled=at)
        else:
            self.found[name] = Ref(at, target=self._symbolic.get(name, ""))


@dataclass
class Listing:
    """The answer to `ls-refs` of version 2: in each line an object, its name, and attributes.

    Attributes:
        names: the refs to keep.
        found: those of them that exist.
    """

    names: Collection[str]
    found: dict[str, Ref] = field(default_factory=dict)
    _packets: Packets = field(default_factory=Packets)

    def __post_init__(self) -> None:
        self._wanted = {name.encode() for name in self.names}

    def take(self, part: bytes) -> bool:
        """Judge a part; returns whether the rest is needed.

        Raises:
            RefusedError: the server says that it failed.
            PacketError: it is no response of a Git server.
        """
        for line in self._packets.feed(part):
            self._judge(line)
        return True

    def end(self) -> None:
        """Check that all of it has come.

        Raises:
            PacketError: it has not.
        """
        self._packets.end()

    def _judge(self, line: bytes) -> None:
        _check(line)
        commit, separated, remainder = line.partition(b" ")
        if not separated:
            raise PacketError("no ref")
        ref_name, _, attributes = remainder.partition(b" ")
        if ref_name in self._wanted and _COMMIT.fullmatch(commit):
            values = _pairs(attributes.decode("utf-8", "replace").split(" "))
            peeled = values.get("peeled", "")
            self.found[ref_name.decode()] = Ref(
                commit.decode(),
                peeled if _COMMIT.fullmatch(peeled.encode()) else "",
                values.get("symref-target", ""),
            )


def _check(line: bytes) -> None:
    """Raise an error that the server reports in place of refs, with the HTTP status 200."""
    if line.startswith(_ERROR):
        raise RefusedError("an error of the server")


def _symbolic(capabilities: str) -> Mapping[str, str]:
    """The targets of symbolic refs, by name."""
    targets = (item.removeprefix("symref=") for item in capabilities.split(" ") if item.startswith("symref="))
    return _pairs(targets)


def _pairs(items: Iterable[str]) -> Mapping[str, str]:
    """What stands before the first colon, and what behind it."""
    return dict(item.split(":", 1) for item in items if ":" in item)
