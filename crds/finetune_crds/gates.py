"""Gates: conditions that a model version must meet before an alias moves to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, Name, list_type_map, rules

_Tolerance = Annotated[float, Field(ge=0, le=1e12)]


class MetricGate(ApiModel):
    """Bounds of a number. The gate reads the tag of the version with this name or, without such a tag, the metric of its run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.min) || has(self.max)", "set min, max, or both"),
            ("!has(self.min) || !has(self.max) || self.min <= self.max", "min must not be above max", ".min"),
        )
    )

    name: Name
    """Name of the metric."""
    min: float | None = None
    """Minimum value that passes."""
    max: float | None = None
    """Maximum value that passes."""


class TagGate(ApiModel):
    """A tag that the version must have."""

    name: Name
    """Name of the tag."""
    equals: Annotated[str, Field(max_length=4096)]
    """Required value of the tag."""


class Tolerance(ApiModel):
    """A distance between two numbers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.absolute) != has(self.relative)", "set exactly one of absolute and relative"),
            (
                "!has(self.relative) || self.relative <= 1.0",
                "relative must be at most 1: it is a share of the value of the current version, 0.05 for five percent",
            ),
        )
    )

    absolute: _Tolerance | None = None
    """Distance in the unit of the metric."""
    relative: _Tolerance | None = None
    """Distance as a share of the value of the version that the alias points at: 0.05 for five percent."""


class ComparisonGate(ApiModel):
    """A comparison with the version that the alias points at, if both were evaluated on the same data.

    If the alias does not exist yet, the gate passes.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.betterBy) != has(self.notWorseThan)", "set exactly one of betterBy and notWorseThan"),
        )
    )

    metric: Name
    """Name of the metric; both versions must have it."""
    goal: Literal["Minimize", "Maximize"]
    """Better direction: Minimize for a loss, Maximize for an accuracy."""
    better_by: Tolerance | None = None
    """The version must be better by at least this much. With `absolute: 0` an equal version passes too."""
    not_worse_than: Tolerance | None = None
    """The version may be worse by at most this much."""


class Gate(ApiModel):
    """One condition on a version."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.metric) == (self.type == 'Metric') && has(self.tag) == (self.type == 'Tag') && "
                "has(self.comparison) == (self.type == 'Comparison')",
                "set only the field that matches type: metric for Metric, tag for Tag, comparison for Comparison",
            ),
        )
    )

    name: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    ]
    """Name of the gate, also in its verdict."""
    type: Literal["Metric", "Tag", "Comparison"]
    """Kind of gate: Metric checks a number, Tag a tag, Comparison a number of two versions."""
    metric: MetricGate | None = None
    """Bounds of a number."""
    tag: TagGate | None = None
    """A tag that the version must have."""
    comparison: ComparisonGate | None = None
    """A comparison with the version that the alias points at."""


Gates = Annotated[
    list[Gate],
    Field(
        max_length=32,
        json_schema_extra=list_type_map("name"),
    ),
]
