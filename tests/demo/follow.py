"""A FineTuneJob, followed on a terminal until it has succeeded or failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from demo.kubectl import DemoError, Json, Kubectl
from demo.terminal import Terminal, clock
from demo.wait import ProgressLimit

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

BAR = 24
SECONDS_BETWEEN_LINES = 10
SECONDS_BETWEEN_WARNINGS = 5
ENDS = ("Succeeded", "Failed")
# Conditions that are false for a while in every run.
EXPECTED = {"Ready", "Prepared", "Trained", "Registered", "Succeeded", "Failed", "Suspended"}


def follow(kubectl: Kubectl, name: str, namespace: str, terminal: Terminal) -> Json:
    """Show a job's progress until its end; return the resource as it is then.

    Raises:
        DemoError: it failed, was deleted, or made no progress for too long.
    """
    limit = ProgressLimit(f"the FineTuneJob {namespace}/{name}")
    shown: set[str] = set()
    phase, shown_at, warned_at = None, 0.0, 0.0
    while True:
        job = kubectl.get("finetunejob", name, "--namespace", namespace)
        if job is None:
            raise DemoError(f"the FineTuneJob {namespace}/{name} was deleted")
        limit.record(progress_state(job))
        before, phase = phase, job.get("status", {}).get("phase") or "Pending"
        sentences = complaints(job)
        if phase != before or time.monotonic() - warned_at > SECONDS_BETWEEN_WARNINGS:
            sentences += _warnings(kubectl, name, namespace)
            warned_at = time.monotonic()
        _report(terminal, sentences, shown)
        elapsed = limit.elapsed_seconds()
        if terminal.interactive and phase not in ENDS:
            terminal.live(f"        {clock(elapsed)}  {line(job)}")
        elif phase != before or time.monotonic() - shown_at > SECONDS_BETWEEN_LINES:
            terminal.detail(f"{clock(elapsed)}  {line(job)}")
            shown_at = time.monotonic()
        if phase == "Succeeded":
            return job
        if phase == "Failed":
            raise DemoError(failure(job))
        limit.check(" ".join(line(job).split()))
        time.sleep(1)


def progress_state(job: Json) -> Hashable:
    """What changes while a job makes progress."""
    status = job.get("status", {})
    progress = status.get("progress") or {}
    conditions = [(item["type"], item["status"], item["reason"]) for item in status.get("conditions", [])]
    return (
        status.get("phase"),
        status.get("attempt"),
        progress.get("step"),
        progress.get("summary"),
        (status.get("nodes") or {}).get("ready"),
        *conditions,
    )


def line(job: Json) -> str:
    """The state of a job, in one line: phase, bar, step, losses, speed, time left."""
    status = job.get("status", {})
    progress = status.get("progress") or {}
    parts = [f"{status.get('phase') or 'Pending':<11}"]
    if progress.get("maxSteps"):
        percent = progress.get("percent") or 0
        filled = BAR * percent // 100
        parts.append(f"[{'#' * filled}{'-' * (BAR - filled)}] {percent:3d}%")
        parts.append(f"step {progress.get('step', 0)}/{progress['maxSteps']}")
    elif progress.get("summary"):
        parts.append(progress["summary"])
    parts += list(_measures(progress))
    nodes = status.get("nodes") or {}
    if not progress.get("maxSteps") and nodes.get("desired"):
        parts.append(f"nodes {nodes['ready']}/{nodes['desired']}")
    rows = (status.get("data") or {}).get("rows")
    if rows and not progress.get("maxSteps"):
        parts.append(f"{rows['train']} rows to train on, {rows['validation']} to evaluate on")
    return "  ".join(parts).rstrip()


def complaints(job: Json) -> list[str]:
    """The conditions that say that something is wrong, each as a sentence."""
    return [
        f"{condition['reason']}: {condition['message']}"
        for condition in job.get("status", {}).get("conditions", [])
        if condition["status"] == "False"
        and condition["type"] not in EXPECTED
        and condition["reason"] != "NoPods"
    ]


def failure(job: Json) -> str:
    """Why a job failed, with where and how."""
    status = job["status"]
    why = next(
        (
            c["message"]
            for c in status.get("conditions", [])
            if c["type"] == "Failed" and c["status"] == "True"
        ),
        "",
    )
    last = status.get("lastFailure") or {}
    where = ", ".join(
        f"{word} {last[key]}"
        for word, key in (("pod", "pod"), ("rank", "rank"), ("exit code", "exitCode"))
        if key in last
    )
    return f"{job['metadata']['name']} failed: {why}{f' ({where})' if where else ''}"


def _report(terminal: Terminal, sentences: list[str], shown: set[str]) -> None:
    """Show each sentence that was not shown before."""
    for sentence in sentences:
        if sentence not in shown:
            shown.add(sentence)
            terminal.detail(f"! {sentence}")


def _measures(progress: Json) -> Iterator[str]:
    if progress.get("loss") is not None:
        yield f"loss {progress['loss']:.2f}"
    if progress.get("evalLoss") is not None:
        yield f"eval {progress['evalLoss']:.2f}"
    if progress.get("tokensPerSecond"):
        yield f"{progress['tokensPerSecond']:,.0f} tok/s"
    if progress.get("secondsRemaining"):
        yield f"{clock(progress['secondsRemaining'])} to go"


def _warnings(kubectl: Kubectl, name: str, namespace: str) -> list[str]:
    selector = f"involvedObject.kind=FineTuneJob,involvedObject.name={name},type=Warning"
    events = kubectl.items("events", "--namespace", namespace, "--field-selector", selector)
    return [f"{event['reason']}: {event['message']}" for event in events]
