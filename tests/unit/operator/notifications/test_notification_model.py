"""What a webhook receives, and which mistakes its file can have."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from finetune_operator.installation_files import InstallationFileError
from finetune_operator.notifications.model import (
    Notice,
    Webhook,
    build_request,
    load_webhooks,
)

if TYPE_CHECKING:
    from pathlib import Path

NOTICE = Notice(
    id="uid-1785585600-2",
    source="/apis/finetune.dev/v1alpha1/namespaces/team/modelpromotions/champion",
    subject="llm@champion",
    model="llm",
    time=datetime(2026, 8, 1, 12, tzinfo=UTC),
    data={"model": "llm", "alias": "champion", "fromVersion": "1", "toVersion": "2"},
    text="llm@champion: version 1 -> version 2",
)
SECRET = "https://hooks.example/services/T0/B0/credential"


def test_a_cloud_event_has_the_attributes_of_version_1() -> None:
    headers, body = build_request(NOTICE, Webhook(name="audit", url=SECRET))
    assert headers == {"Content-Type": "application/cloudevents+json"}
    assert json.loads(body) == {
        "specversion": "1.0",
        "id": "uid-1785585600-2",
        "source": "/apis/finetune.dev/v1alpha1/namespaces/team/modelpromotions/champion",
        "type": "dev.finetune.modelpromotion.moved",
        "subject": "llm@champion",
        "time": "2026-08-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {"model": "llm", "alias": "champion", "fromVersion": "1", "toVersion": "2"},
    }


def test_a_message_for_slack_is_a_sentence() -> None:
    headers, body = build_request(NOTICE, Webhook(name="chat", url=SECRET, format="Slack"))
    assert headers == {"Content-Type": "application/json"}
    assert json.loads(body) == {"text": "llm@champion: version 1 -&gt; version 2"}


def test_what_users_choose_is_no_markup_in_slack() -> None:
    text = "llm@champion by eve\nllm@champion: <!channel> <https://evil.example|see> & more\u202e"
    _, body = build_request(replace(NOTICE, text=text), Webhook(name="chat", url=SECRET, format="Slack"))
    assert json.loads(body) == {
        "text": "llm@champion by eve llm@champion: &lt;!channel&gt; &lt;https://evil.example|see&gt; &amp; more "
    }


MISTAKES = {
    "a field that is spelled wrong": (
        f"webhooks: [{{name: a, url: '{SECRET}', formt: Slack}}]",
        "is invalid at webhooks.0.formt: unknown field",
    ),
    "a name twice": (
        f"webhooks: [{{name: a, url: '{SECRET}'}}, {{name: a, url: '{SECRET}'}}]",
        "is invalid at the top: Value error, each webhook requires a name of its own",
    ),
    "no address": (
        "webhooks: [{name: a, url: 'hooks.example'}]",
        "is invalid at webhooks.0.url: String should match pattern '^https?://[^ ]+$'",
    ),
    "no YAML": (f"webhooks: ['{SECRET}", "is not YAML at line 1"),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_without_an_address(case: tuple[str, str], tmp_path: Path) -> None:
    text, message = case
    path = tmp_path / "webhooks.yaml"
    path.write_text(text)
    with pytest.raises(InstallationFileError) as caught:
        load_webhooks(str(path))
    assert str(caught.value) == f"{path} {message}"
    assert "credential" not in str(caught.value)


def test_webhooks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "webhooks.yaml"
    path.write_text(f"webhooks: [{{name: chat, url: '{SECRET}', format: Slack, models: ['team_a.*']}}]")
    assert load_webhooks(str(path)) == [Webhook(name="chat", url=SECRET, format="Slack", models=["team_a.*"])]
    assert load_webhooks("") == []
    with pytest.raises(InstallationFileError, match="cannot be read"):
        load_webhooks(str(tmp_path / "none"))
