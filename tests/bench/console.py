"""What the benchmarks have in common on the command line: their arguments, and where their figures go."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """An argument that is a positive number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def publish(document: Mapping[str, Any], markdown: str, output: Path) -> None:
    """Write the figures as JSON, and print them."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    say(f"\n{markdown}\n\nwritten to {output}")


def report_failures(sentences: Iterable[str]) -> int:
    """Print what failed, and return the exit code."""
    failures = list(sentences)
    for sentence in failures:
        print(f"FAILED: {sentence}", file=sys.stderr)
    return int(bool(failures))
