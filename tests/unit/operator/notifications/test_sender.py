"""Which webhook gets which notice, how often it is tried, and what is said if it does not arrive."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from dataclasses import dataclass, field, replace

import pytest

from finetune_operator.bounded import AddressError, NoResponseError
from finetune_operator.notifications.model import Notice, Webhook
from finetune_operator.notifications.sender import Sender
from support.http_server import Answer, Request, serving
from unit.operator.notifications.test_notification_model import NOTICE

AUDIT = Webhook(name="audit", url="https://audit.example/credential")
LINE = (
    '{"id": "uid-1785585600-2", "text": "llm@champion: version 1 -> version 2", '
    '"model": "llm", "alias": "champion", "fromVersion": "1", "toVersion": "2"}'
)
CHAT = Webhook(name="chat", url="https://chat.example/credential", format="Slack", models=["team.*"])


@dataclass
class Receivers:
    """Webhooks that answer as told; the clock goes on by the pauses."""

    answers: dict[str, list[int | Exception]] = field(default_factory=dict)
    """By webhook, the next answers; afterwards 200."""
    received: list[tuple[str, str]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sender = Sender([AUDIT, CHAT], lambda: sum(self.pauses), self._post, self._pause)

    async def _post(self, webhook: Webhook, notice: Notice) -> int:
        answers = self.answers.get(webhook.name) or [200]
        answer = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer == 200:
            self.received.append((webhook.name, notice.id))
        return answer

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def deliver(self) -> None:
        """Send until all webhooks wait for the next notice."""
        running = asyncio.create_task(self.sender.run())
        for _ in range(200):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def list_losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def list_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "finetune_operator.audit"]


async def test_a_webhook_gets_the_notices_of_its_models() -> None:
    receivers = Receivers()
    receivers.sender.announce(NOTICE)
    receivers.sender.announce(replace(NOTICE, id="second", model="team.llm"))
    await receivers.deliver()
    assert sorted(receivers.received) == [("audit", "second"), ("audit", NOTICE.id), ("chat", "second")]


async def test_a_move_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    receivers = Receivers()
    with caplog.at_level(logging.INFO, "finetune_operator.audit"):
        receivers.sender.announce(NOTICE)
        receivers.sender.announce(NOTICE)
        receivers.sender.announce_again([NOTICE])
    await receivers.deliver()
    assert receivers.received == [("audit", NOTICE.id)]
    assert list_lines(caplog) == [LINE]


async def test_a_line_of_the_log_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    forged = (
        "llm@champion: version 1 -> version 2 by eve\nllm@champion: version 2 -> version 3 by alice\u2028"
    )
    receivers = Receivers({"audit": [404]})
    with caplog.at_level(logging.INFO):
        receivers.sender.announce(replace(NOTICE, text=forged, data={"by": "eve\n{}"}))
        await receivers.deliver()
    (line,), (loss,) = list_lines(caplog), list_losses(caplog)
    assert json.loads(line) == {"id": NOTICE.id, "text": forged, "by": "eve\n{}"}
    assert [text.splitlines() for text in (line, loss)] == [[line], [loss]]


async def test_a_new_leader_repeats_only_what_has_an_id(caplog: pytest.LogCaptureFixture) -> None:
    receivers = Receivers()
    with caplog.at_level(logging.INFO, "finetune_operator.audit"):
        receivers.sender.announce_again([replace(NOTICE, model="team.llm")])
    await receivers.deliver()
    assert (receivers.received, list_lines(caplog)) == ([("audit", NOTICE.id)], [LINE])


ANSWERS: dict[str, tuple[list[int | Exception], str, list[float]]] = {
    "away for a moment": ([503, NoResponseError("no route"), 429, 408, 200], "sent", [1, 2, 4, 8]),
    "not found": ([404], "lost", []),
    "a redirect": ([302], "lost", []),
    "no address": ([AddressError("its address is not valid")], "lost", []),
    "away for long": ([500], "lost", [1, 2, 4, 8, 16, 32, *[60] * 14]),
}


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
async def test_what_is_tried_again(
    case: tuple[list[int | Exception], str, list[float]], caplog: pytest.LogCaptureFixture
) -> None:
    answers, outcome, pauses = case
    receivers = Receivers({"audit": list(answers)})
    receivers.sender.announce(NOTICE)
    await receivers.deliver()
    received = [("audit", NOTICE.id)] if outcome == "sent" else []
    assert (receivers.received, receivers.pauses) == (received, pauses)
    assert (len(list_losses(caplog)), "credential" in caplog.text) == (1 - len(received), False)


async def test_a_receiver_that_is_away_delays_no_other() -> None:
    receivers = Receivers({"audit": [503, 503, 503, 200]})
    for number in range(3):
        receivers.sender.announce(replace(NOTICE, id=str(number), model="team.llm"))
    await receivers.deliver()
    names = [name for name, _ in receivers.received]
    assert names[:3] == ["chat"] * 3
    assert [notice for name, notice in receivers.received if name == "audit"] == ["0", "1", "2"]


async def test_what_waits_has_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    receivers = Receivers()
    for number in range(1001):
        receivers.sender.announce(replace(NOTICE, id=str(number)))
    assert list_losses(caplog) == [
        "webhook audit did not get the notice 1000 (1000 notices wait): "
        '"llm@champion: version 1 -> version 2"'
    ]


async def test_an_error_with_one_notice_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    receivers = Receivers({"audit": [TypeError(AUDIT.url), 200]})
    for number in range(2):
        receivers.sender.announce(replace(NOTICE, id=str(number), model="team.llm"))
    await receivers.deliver()
    assert sorted(receivers.received) == [("audit", "1"), ("chat", "0"), ("chat", "1")]
    unexpected, loss = list_losses(caplog)
    assert unexpected.startswith("webhook audit: unexpected error at\n")
    assert "credential" not in caplog.text
    assert loss == (
        'webhook audit did not get the notice 0 (TypeError): "llm@champion: version 1 -> version 2"'
    )


async def test_the_status_counts_however_long_the_answer_is() -> None:
    requests: list[str] = []

    def respond(request: Request) -> Answer:
        requests.append(request.method)
        return Answer(200, b"x" * 1024 * 1024)

    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with serving(respond) as address:
        sender = Sender([Webhook(name="audit", url=address)], lambda: 0.0, sleep=pause)
        await sender._send(sender.webhooks[0], NOTICE)
    assert (requests, pauses) == (["POST"], [])


async def test_a_request_over_http() -> None:
    requests: queue.Queue[tuple[str, str]] = queue.Queue()

    def respond(request: Request) -> Answer:
        requests.put((request.method, request.headers["Content-Type"]))
        return Answer(202, b"")

    with serving(respond) as address:
        webhook = Webhook(name="audit", url=f"{address}/events")
        sender = Sender([webhook], lambda: 0.0)
        sender.announce(NOTICE)
        running = asyncio.create_task(sender.run())
        received = await asyncio.to_thread(requests.get, timeout=10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert received == ("POST", "application/cloudevents+json")
