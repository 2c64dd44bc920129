"""Leader election: of the replicas of the operator, only the holder of one Lease reconciles and writes.

The other replicas stand by: they watch and list, so that their caches are warm. A leader that cannot renew the Lease ends its process.
Each process has a fence, which refuses writes while it is closed. Writes of two leaders never overlap: the fence of the old leader
closes before the Lease expires, and each write ends before the fence closes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NoReturn

from finetune_operator.controller.leases import HeldLease, LeaseBusy, Leases
from finetune_operator.fence import Fence
from finetune_operator.kube import KubeError

log = logging.getLogger(__name__)

_ABOUT = "leader election of the operator"
# Shares of the duration of the Lease. The margin is the time between the closing of the fence and the expiry of the Lease: a server may
# carry out a write after its sender has given up, and clocks run at different speeds. With a Lease of 10 s, for example, the leader renews
# it every 2 s, and the fence closes 8 s after the last renewal.
_MARGIN = 0.2
_RENEW_INTERVAL = 0.2
_RETRY_INTERVAL = 0.1
_REQUEST_TIMEOUT = 0.3
_DRAIN_INTERVAL_SECONDS = 0.02


class LeaseLostError(Exception):
    """This process was the leader and no longer holds the Lease."""


def request_timeout(lease_seconds: float) -> float:
    """The timeout of a request for the Lease: short enough for another attempt before the fence closes."""
    return _REQUEST_TIMEOUT * lease_seconds


@dataclass
class Election:
    """Acquires the Lease of the operator and renews it.

    Attributes:
        leases: they need a client of their own, whose fence is always open and which does not wait behind other requests.
        name: name of the Lease.
        replica: the name of this replica, which stays the same when its process restarts; empty if it has none.
        fence: lets writes pass while this process holds the Lease.
        sleep: waits for a number of seconds.
        won: set when this process has become the leader. It stays set: a process that loses the Lease ends.
    """

    leases: Leases
    name: str
    replica: str
    fence: Fence
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    won: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: HeldLease | None = None
    _may_hold: bool = False
    """Whether this process holds the Lease, or has sent a request for it whose result is unknown."""
    _tried_recovery: bool = False
    """Whether the API server has been asked, and has answered, if an earlier process of this replica holds the Lease."""
    _last_answer: float = field(init=False)
    """When the Lease was last acquired, renewed, or read as held by another replica."""

    def __post_init__(self) -> None:
        self.fence.close()
        self._last_answer = self.leases.clock()

    async def run(self) -> NoReturn:
        """Wait for the Lease, and renew it until it is lost.

        Raises:
            LeaseLostError: another process may be the leader now.
        """
        self._hold(await self._wait_for_lease())
        self.won.set()
        log.info("this replica leads: it acquired Lease %s as %s", self._where, self.leases.identity)
        while True:
            await self.sleep(_RENEW_INTERVAL * self.leases.seconds)
            self._hold(await self._renew())

    async def resign(self) -> None:
        """Refuse further writes, wait for the writes in progress, and release the Lease. Call it after `run` has ended."""
        self.fence.close()
        # NB: the loop ends before the Lease expires, since each write has an earlier deadline. The loop is needed even if the Lease is
        # lost: the next process of this replica could take the Lease back while a write is still in progress.
        while self.fence.writes:
            await self.sleep(_DRAIN_INTERVAL_SECONDS)
        if not self._may_hold:
            return
        try:
            # A request whose response was lost, or not awaited, has changed the Lease, so the Lease is read again.
            lease = await self.leases.recover(self.name, _ABOUT, self.leases.identity)
        except (KubeError, LeaseBusy) as error:
            log.warning("Lease %s was not released, and expires: %s", self._where, error)
            return
        if lease:
            await self.leases.release(lease)
            log.info("released Lease %s", self._where)

    def why_unready(self) -> str | None:
        """Return the reason why this replica could not become the leader; None if it is the leader or could take over."""
        seconds = self.leases.clock() - self._last_answer
        if seconds > 2 * self.leases.seconds:
            return f"Lease {self._where} could not be read or renewed for {seconds:.0f} s"
        return None

    @property
    def _where(self) -> str:
        return f"{self.leases.namespace}/{self.name}"

    def _hold(self, lease: HeldLease) -> None:
        self._lease = lease
        self.fence.open_until(self._find_end(lease))
        self._last_answer = self.leases.clock()

    def _find_end(self, lease: HeldLease) -> float:
        """The time by which all writes under a Lease have ended."""
        return lease.until - _MARGIN * self.leases.seconds

    async def _wait_for_lease(self) -> HeldLease:
        """Try to get the Lease until this process holds it. What prevents this is logged when it changes."""
        report = ""
        while True:
            try:
                lease = await self._recover_earlier() or await self._acquire()
            except LeaseBusy as error:
                self._last_answer = self.leases.clock()
                text, level = f"{error}: standing by", logging.INFO
            except KubeError as error:
                text, level = f"cannot acquire Lease {self._where}: {error}; retrying", logging.WARNING
            else:
                return lease
            if text != report:
                log.log(level, text)
                report = text
            await self.sleep(_RETRY_INTERVAL * self.leases.seconds)

    async def _acquire(self) -> HeldLease:
        # NB: this process may be told to end while it waits for the response.
        self._may_hold = True
        try:
            return await self.leases.acquire(self.name, _ABOUT)
        except LeaseBusy:
            self._may_hold = False
            raise

    async def _recover_earlier(self) -> HeldLease | None:
        """Take back the Lease if this process has acquired it without getting the response, or an earlier process of this replica holds it.

        The latter, after a restart of the container, is tried until the API server answers.
        """
        if self._may_hold:
            lease = await self.leases.recover(self.name, _ABOUT, self.leases.identity)
            if lease:
                return lease
            self._may_hold = False
        if not self.replica or self._tried_recovery:
            return None
        # With an empty process, this is the beginning of the identities of all processes of this replica.
        self._may_hold = True
        lease = await self.leases.recover(self.name, _ABOUT, build_identity(self.replica, ""))
        self._tried_recovery = True
        self._may_hold = lease is not None
        return lease

    async def _renew(self) -> HeldLease:
        """Renew the Lease; after an error, try again until the fence closes.

        Raises:
            LeaseLostError: the Lease could not be renewed in time, or another process acquired it.
        """
        lease = self._lease
        assert lease is not None  # noqa: S101 - only a holder renews
        problem = "it was not renewed in time"
        while self.leases.clock() < self._find_end(lease):
            try:
                return await self._renew_once(lease)
            except LeaseBusy as error:
                raise self._lose(str(error)) from error
            except KubeError as error:
                problem = str(error)
                log.warning("failed to renew Lease %s: %s; retrying", self._where, error)
            await self.sleep(_RETRY_INTERVAL * self.leases.seconds)
        raise self._lose(problem)

    async def _renew_once(self, lease: HeldLease) -> HeldLease:
        try:
            return await self.leases.renew(lease)
        except LeaseBusy:
            # This process still holds the Lease if a renewal whose response was lost has changed the version of the Lease.
            recovered = await self.leases.recover(self.name, _ABOUT, self.leases.identity)
            if recovered is None:
                raise
            return recovered

    def _lose(self, why: str) -> LeaseLostError:
        self.fence.close()
        self._lease = None
        self._may_hold = False
        return LeaseLostError(
            f"this replica lost Lease {self._where} and ends, so that another replica leads: {why}"
        )


def build_identity(replica: str, process: str) -> str:
    """The identity of a process of a replica, which `kubectl get lease` shows."""
    return f"{replica}_{process}"
