"""Sends notices to webhooks, outside of passes: a receiver that is slow or away delays no promotion and no other receiver."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from finetune_operator import bounded, metrics
from finetune_operator.notifications.model import Notice, Webhook, build_request
from finetune_operator.tenancy.model import matches

log = logging.getLogger(__name__)
audit_log = logging.getLogger("finetune_operator.audit")

REPEAT_SECONDS = 900
"""For how long a notice is sent again to a webhook that is away, and how old a move may be that a new leader announces again."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
_MAX_WAITING = 1000
_MAX_REMEMBERED = 10_000
_MAX_ANSWER_BYTES = 64 * 1024
# Answers after which the same request may succeed.
_TEMPORARY = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


@dataclass
class Sender:
    """The webhooks of the platform team.

    Attributes:
        post: sends a request, and returns the status of the response; raises NoResponseError.
        sleep: waits for a number of seconds.
        clock: counts seconds.
    """

    webhooks: Sequence[Webhook]
    clock: Callable[[], float]
    post: Callable[[Webhook, Notice], Awaitable[int]] = field(default_factory=lambda: _post)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _queues: dict[str, asyncio.Queue[Notice]] = field(init=False)
    _announced: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """The ids of the last notices, since a pass can write the same move in two statuses."""

    def __post_init__(self) -> None:
        self._queues = {webhook.name: asyncio.Queue(_MAX_WAITING) for webhook in self.webhooks}

    def announce(self, notice: Notice) -> None:
        """Write a move to the log, and send it to the webhooks soon. A move that was announced before is ignored."""
        if not self._remember(notice):
            return
        audit_log.info("%s %s", notice.text, json.dumps(notice.data, default=str))
        self._enqueue(notice, self.webhooks)

    def announce_again(self, notices: Iterable[Notice]) -> None:
        """Send the latest moves again, as a new leader that does not know whether they were sent.

        Only CloudEvents have an id, by which a receiver recognizes a repetition.
        """
        for notice in notices:
            if self._remember(notice):
                self._enqueue(
                    notice, [webhook for webhook in self.webhooks if webhook.format == "CloudEvents"]
                )

    async def run(self) -> None:
        """Send what is announced, until it is canceled."""
        async with asyncio.TaskGroup() as group:
            for webhook in self.webhooks:
                group.create_task(self._serve(webhook))

    def _remember(self, notice: Notice) -> bool:
        if notice.id in self._announced:
            return False
        self._announced[notice.id] = None
        if len(self._announced) > _MAX_REMEMBERED:
            self._announced.popitem(last=False)
        return True

    def _enqueue(self, notice: Notice, webhooks: Iterable[Webhook]) -> None:
        for webhook in webhooks:
            if not matches(notice.model, webhook.models):
                continue
            try:
                self._queues[webhook.name].put_nowait(notice)
            except asyncio.QueueFull:
                self._report_loss(webhook, notice, f"{_MAX_WAITING} notices wait")

    async def _serve(self, webhook: Webhook) -> None:
        while True:
            await self._send(webhook, await self._queues[webhook.name].get())

    async def _send(self, webhook: Webhook, notice: Notice) -> None:
        """Send a notice, again and again for a time if the receiver is away."""
        pause, started = _FIRST_PAUSE_SECONDS, self.clock()
        while True:
            try:
                status = await self.post(webhook, notice)
                if status // 100 == 2:
                    return
                reason, is_temporary = f"HTTP {status}", status in _TEMPORARY or status // 100 == 5
            except bounded.NoResponseError as error:
                reason, is_temporary = str(error), not isinstance(error, bounded.AddressError)
            if not is_temporary or self.clock() - started > REPEAT_SECONDS:
                self._report_loss(webhook, notice, reason)
                return
            await self.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _report_loss(self, webhook: Webhook, notice: Notice, reason: str) -> None:
        log.error(
            "webhook %s did not get the notice %s (%s): %s", webhook.name, notice.id, reason, notice.text
        )


async def _post(webhook: Webhook, notice: Notice) -> int:
    headers, body = build_request(notice, webhook)
    with metrics.measuring_request("Webhook") as sent:
        response = await bounded.request(
            "POST", webhook.url, headers=headers, body=body, max_bytes=_MAX_ANSWER_BYTES
        )
        sent.status = response.status
    return response.status
