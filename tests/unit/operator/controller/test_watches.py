"""What kopf does besides calling the handlers."""

from __future__ import annotations

import kopf

from finetune_operator.controller import watches


def test_kopf_compares_no_object_with_its_last_state() -> None:
    settings = kopf.OperatorSettings()
    watches.configure(settings)
    storage = settings.persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "tune", "labels": {"a": "b"}}, "spec": {"nodes": 2}})
    assert (storage.build(body=body), storage.fetch(body=body)) == ({}, None)


def test_kopf_holds_few_objects_at_once_when_a_watch_begins() -> None:
    settings = kopf.OperatorSettings()
    watches.configure(settings)
    assert (settings.watching.chunk_size, settings.queueing.idle_timeout) == (100, 0.1)
