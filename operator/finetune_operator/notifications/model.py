"""What a webhook receives, in the formats of CloudEvents and Slack."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune_crds.base import ApiModel, Json
from finetune_operator.installation_files import load
from finetune_operator.patterns import Pattern
from finetune_operator.text import format_time

_CLOUD_EVENTS_VERSION = "1.0"
# Control characters, line separators, and characters that change the direction of a text.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]+")


@dataclass(frozen=True)
class Notice:
    """A move of an alias.

    Attributes:
        id: the same each time that the move is announced, so that a receiver can drop a repetition.
        source: path of the resource in the Kubernetes API.
        subject: the model and the alias, such as support-llama@champion.
        model: the registered model.
        time: when the move was made.
        data: the move, as in status.history.
        text: the move in a sentence.
    """

    id: str
    source: str
    subject: str
    model: str
    time: datetime
    data: Mapping[str, object]
    text: str


class Webhook(ApiModel):
    """An address that gets a POST for each move."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
    """Name in logs and metrics, which do not show the address."""
    url: Annotated[str, Field(pattern=r"^https?://[^ ]+$", max_length=2048)]
    """Address; for Slack, that of an incoming webhook."""
    format: Literal["CloudEvents", "Slack"] = "CloudEvents"
    """CloudEvents: structured JSON of version 1.0. Slack: an object with `text`."""
    models: list[Pattern] = Field(default_factory=lambda: ["*"])
    """Registered models whose moves are sent."""


class Webhooks(ApiModel):
    """The file of webhooks. Addresses of Slack are credentials, so the file comes from a Secret."""

    webhooks: Annotated[list[Webhook], Field(max_length=16)]
    """The webhooks, each with a name of its own."""

    @model_validator(mode="after")
    def _check_names(self) -> Webhooks:
        names = [webhook.name for webhook in self.webhooks]
        if len({*names}) < len(names):
            raise ValueError("each webhook requires a name of its own")
        return self


def load_webhooks(path: str) -> list[Webhook]:
    """Read the file of webhooks; none without a path.

    Raises:
        InstallationFileError: the file is missing, is not YAML, or is invalid. The message shows no address.
    """
    return load(path, Webhooks).webhooks if path else []


def build_request(notice: Notice, webhook: Webhook) -> tuple[Mapping[str, str], bytes]:
    """Return the headers and the body of the request for a move."""
    if webhook.format == "Slack":
        message = {"text": _escape_for_slack(notice.text)}
        return {"Content-Type": "application/json"}, json.dumps(message).encode()
    # https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/formats/json-format.md
    event: Json = {
        "specversion": _CLOUD_EVENTS_VERSION,
        "id": notice.id,
        "source": notice.source,
        "type": "dev.finetune.modelpromotion.moved",
        "subject": notice.subject,
        "time": format_time(notice.time),
        "datacontenttype": "application/json",
        "data": dict(notice.data),
    }
    return {"Content-Type": "application/cloudevents+json"}, json.dumps(event).encode()


def _escape_for_slack(text: str) -> str:
    """Return a text as one line without Slack's markup of links and mentions; users choose parts of the text.

    https://docs.slack.dev/messaging/formatting-message-text#escaping
    """
    text = _CONTROL.sub(" ", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
