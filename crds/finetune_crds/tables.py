"""The tables that a job reads by name, and a check of their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune_crds.data import Data
    from finetune_crds.source import SourceLocation


def list_tables(data: Data) -> Iterator[tuple[str, str]]:
    """Iterate over the tables that a preparation reads by name: the field that names the table, such as data.source.table, and the name."""
    parts: list[tuple[str, SourceLocation]] = [("data.source", data.source)] if data.source else []
    mixed = data.source.sources or [] if data.source else []
    decontaminate = data.prepare.decontaminate if data.prepare else None
    sources = [
        *parts,
        *((f"data.source.sources[{part.name}]", part) for part in mixed),
        *(
            (f"data.prepare.decontaminate.sources[{part.name}]", part)
            for part in (decontaminate.sources if decontaminate else [])
        ),
    ]
    return ((f"{field}.table", part.table) for field, part in sources if part.table)


def find_misnamed_tables(data: Data) -> Iterator[str]:
    """Iterate over errors about table names that do not fit the catalog. An error begins with the field that names the table."""
    catalog = data.prepare.catalog if data.prepare else None
    if catalog is None:
        return
    levels = ("catalog", "schema", "table") if catalog.is_unity else ("database", "table")
    where = "Unity Catalog" if catalog.is_unity else "a Hive metastore"
    for field, table in list_tables(data):
        names = table.split(".")
        if len(names) != len(levels) or not all(names):
            yield (
                f"{field} {table} must be {'.'.join(levels)} in {where}, the catalog of the job or of the chart: create a job that "
                "names the table in this form, or that sets data.prepare.catalog"
            )
