"""Sends notices to webhooks, outside of passes: a receiver that is slow or away delays no promotion and no other receiver."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from finetune_operator import bounded, metrics
from finetune_operator.notifications.model import Notice, Webhook, build_request
from finetune_operator.patterns import matches

log = logging.getLogger(__name__)
AUDIT_LOGGER = "finetune_operator.audit"
audit_log = logging.getLogger(AUDIT_LOGGER)

REPEAT_SECONDS = 900
"""For how long a notice is sent again to a webhook that is away, and how old a move may be that a new leader announces again."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
_MAX_WAITING = 1000
_MAX_REMEMBERED = 10_000
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
        _write_line(notice)
        self._enqueue(notice, self.webhooks)

    def announce_again(self, notices: Iterable[Notice]) -> None:
        """Write and send the latest moves again, as a new leader that does not know whether they were announced.

        Only lines of the log and CloudEvents have an id, by which a repetition is recognized.
        """
        for notice in notices:
            if self._remember(notice):
                _write_line(notice)
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
            except Exception as error:  # noqa: BLE001 - reported as a loss
                # NB: an error of the operator itself with one notice must not end the other webhooks, nor the operator.
                # Its message is not in the log, since it may quote the address.
                trace = "".join(traceback.format_tb(error.__traceback__))
                log.error("webhook %s: unexpected error at\n%s", webhook.name, trace)  # noqa: TRY400
                reason, is_temporary = type(error).__name__, False
            if not is_temporary or self.clock() - started > REPEAT_SECONDS:
                self._report_loss(webhook, notice, reason)
                return
            await self.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _report_loss(self, webhook: Webhook, notice: Notice, reason: str) -> None:
        log.error(
            "webhook %s did not get the notice %s (%s): %s",
            webhook.name,
            notice.id,
            reason,
            json.dumps(notice.text),
        )


def _write_line(notice: Notice) -> None:
    """Write a move to the log, as one line of JSON: users choose parts of the texts, and JSON has no line breaks in them."""
    audit_log.info("%s", json.dumps({"id": notice.id, "text": notice.text, **notice.data}, default=str))


async def _post(webhook: Webhook, notice: Notice) -> int:
    headers, body = build_request(notice, webhook)
    with metrics.measuring_request("Webhook") as sent:
        sent.status = await bounded.send("POST", webhook.url, headers=headers, body=body)
    return sent.status
