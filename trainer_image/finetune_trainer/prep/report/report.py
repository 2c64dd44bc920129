"""The report of a preparation: what each step dropped, with samples, and the lengths of examples, as HTML and PNG."""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2

from finetune_crds import contract
from finetune_trainer.pod.mlflow_run import first_line
from finetune_trainer.prep.report.lengths import EDGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from finetune_trainer.pod.mlflow_run import Tracker
    from finetune_trainer.prep.steps.near import Pair

PAGE, PAIRS = "report.html", "near-duplicates.csv"
_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_WIDTH, _DPI = 8.0, 110
# Lower bounds of the bars of the chart of cluster sizes.
_CLUSTER_SIZES = (2, 3, 4, 5, 6, 11, 21, 51, 101, 1001)
_REMAINING_COLOR, _DROPPED_COLOR = "#2f6f9f", "#c8553d"


@dataclass(frozen=True)
class Facts:
    """The content of a report.

    Attributes:
        title: the job.
        source: the source, with its version if it has one.
        output: the table.
        examples: rows of the source.
        dropped: rows that each step dropped, by step, in the order of the steps.
        rows: rows of each split.
        tokens: tokens of each split.
        lengths: examples in each bin of `lengths.EDGES`: first before maxTokens and limit, then in the table.
        clusters: number of clusters of near duplicates, by size; None if near duplicates were not searched for.
        crowded: a sentence about examples that were not compared; empty if all were.
        pairs: near duplicates that were removed, each with the example that is most similar to it.
        warnings: what the author should look at, a sentence each.
        samples: the beginning of some examples that a step dropped, by step.
    """

    title: str
    source: str
    output: str
    examples: int
    dropped: dict[str, int]
    rows: dict[str, int]
    tokens: dict[str, int]
    lengths: tuple[Sequence[int], Sequence[int]]
    clusters: dict[int, int] | None = None
    crowded: str = ""
    pairs: Sequence[Pair] = ()
    warnings: Sequence[str] = ()
    samples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def funnel(self) -> list[tuple[str, int, int]]:
        """Each step, the number of examples that it dropped, and the number that remained, for example ("notNull", 3, 97)."""
        remaining = self.examples
        steps = [("source", 0, remaining)]
        for name, number in self.dropped.items():
            remaining -= number
            steps.append((name, number, remaining))
        return steps


def write(facts: Facts, folder: Path) -> list[Path]:
    """Write the report into a folder; return the files.

    `report.html` embeds the pictures, which are also written as PNG files. `near-duplicates.csv` has the pairs, if there are any.
    """
    pictures = {name: _encode_png(figure) for name, figure in _draw_figures(facts).items()}
    for name, content in pictures.items():
        (folder / f"{name}.png").write_bytes(content)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        table=PAIRS if facts.pairs else "",
        pictures={name: base64.b64encode(content).decode() for name, content in pictures.items()},
    )
    (folder / PAGE).write_text(page, encoding="utf-8")
    if facts.pairs:
        _write_pairs(facts.pairs, folder / PAIRS)
    tables = [folder / PAIRS] if facts.pairs else []
    return [folder / PAGE, *tables, *(folder / f"{name}.png" for name in pictures)]


def _write_pairs(pairs: Sequence[Pair], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        # In the order of the fields of `Pair`.
        table.writerow(("removed", "closest", "similarity", "kept", "text", "closest text"))
        table.writerows(pairs)


def publish(facts: Facts, *, tracker: Tracker, folder: Path) -> None:
    """Write the report into a folder, where it must stay until the tracker is closed, and log it to the run."""
    try:
        files = write(facts, folder)
    except Exception as error:  # noqa: BLE001 - a picture never stops a preparation
        print(f"cannot write the report of the preparation: {first_line(error)}", flush=True)
        return
    tracker.artifacts(files, contract.ARTIFACTS_PREPARATION)


def _draw_figures(facts: Facts) -> dict[str, Figure]:
    figures = {"funnel": _draw_funnel(facts), "tokens": _draw_lengths(facts)}
    if facts.clusters:
        figures["near-duplicates"] = _draw_clusters(facts.clusters)
    return figures


def _draw_funnel(facts: Facts) -> Figure:
    names, dropped, remaining = zip(*facts.funnel, strict=True)
    figure, axes = _create_figure(1.2 + 0.35 * len(names))
    places = range(len(names))
    axes.barh(places, remaining, color=_REMAINING_COLOR, label="remaining")
    axes.barh(places, dropped, left=remaining, color=_DROPPED_COLOR, label="dropped")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("examples")
    axes.legend(loc="lower right")
    return figure


def _draw_lengths(facts: Facts) -> Figure:
    before, after = facts.lengths
    used = [index for index, number in enumerate(before) if number]
    figure, axes = _create_figure(3.2)
    if used:
        shown = range(min(used), max(used) + 1)
        labels = [f"{EDGES[index]:,}" for index in shown]
        places = range(len(labels))
        # The second bars cover the first, so only the examples that the limits drop show in the first.
        axes.bar(places, [before[index] for index in shown], color=_DROPPED_COLOR, label="before the limits")
        axes.bar(places, [after[index] for index in shown], color=_REMAINING_COLOR, label="in the table")
        axes.set_xticks(places, labels, rotation=45, ha="right")
        axes.legend()
    axes.set_xlabel("tokens of an example, from")
    axes.set_ylabel("examples")
    return figure


def _draw_clusters(clusters: dict[int, int]) -> Figure:
    ends = [*_CLUSTER_SIZES[1:], max(*_CLUSTER_SIZES, *clusters) + 1]
    labels = [
        f"{begin:,}" if end - begin == 1 else f"{begin:,} to {end - 1:,}"
        for begin, end in zip(_CLUSTER_SIZES, ends, strict=True)
    ]
    numbers = [
        sum(number for size, number in clusters.items() if begin <= size < end)
        for begin, end in zip(_CLUSTER_SIZES, ends, strict=True)
    ]
    # The bars after the last cluster are left out.
    used = max(place for place, number in enumerate(numbers) if number) + 1
    figure, axes = _create_figure(3.0)
    axes.bar(labels[:used], numbers[:used], color=_DROPPED_COLOR)
    axes.set_xlabel("examples in a cluster of near duplicates")
    axes.set_ylabel("clusters")
    return figure


def _create_figure(height: float) -> tuple[Figure, Axes]:
    # NB: pyplot keeps its figures for the life of the process, and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _encode_png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()
