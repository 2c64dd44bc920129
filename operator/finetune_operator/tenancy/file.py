"""Reads the file with the tenancy, and reads it again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from finetune_operator import metrics
from finetune_operator.installation_files import InstallationFileError, parse, read_bytes
from finetune_operator.tenancy.model import Tenancy

log = logging.getLogger(__name__)

# The kubelet updates a mounted ConfigMap within about a minute; this adds little to it.
_READ_SECONDS = 5.0


@dataclass
class TenancyFile:
    """The file of the platform team.

    Attributes:
        path: of the file; empty if the installation has one tenant that may use everything.
        sleep: waits for a number of seconds.
    """

    path: str = ""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    tenancy: Tenancy | None = field(init=False, default=None)
    """What was last read without a mistake; None without a file."""
    _content: bytes = field(init=False, default=b"")
    _has_mistake: bool = field(init=False, default=False)
    """Whether the content is not the one of `tenancy`."""

    def read(self) -> bool:
        """Read the file, and return whether its content has changed.

        Raises:
            InstallationFileError: the file is missing, is not YAML, or is invalid. `tenancy` stays as it was.
        """
        if not self.path:
            return False
        content = read_bytes(self.path)
        if content == self._content:
            return False
        # NB: a file with a mistake is reported once, until it changes.
        self._content, self._has_mistake = content, True
        self.tenancy = parse(content, self.path, Tenancy)
        self._has_mistake = False
        return True

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Read the file again and again. While it has a mistake, the rules that were last read apply, and a metric is 1.

        Args:
            on_change: called after the rules have changed.
        """
        while True:
            await self.sleep(_READ_SECONDS)
            try:
                has_changed = await asyncio.to_thread(self.read)
            except InstallationFileError as error:
                metrics.tenancy_outdated.set(1)
                log.error("the tenancy %s; the rules that were read before apply", error)  # noqa: TRY400 - the message says it all
                continue
            metrics.tenancy_outdated.set(self._has_mistake)
            if has_changed:
                log.info("read the tenancy %s, which has changed", self.path)
                on_change()
