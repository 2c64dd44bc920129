"""The tables that a job reads by name, and a check of their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune_crds.data import Data
    from finetune_crds.source import TableLocation


def list_tables(data: Data) -> Iterator[tuple[str, str]]:
    """Iterate over the tables that a preparation reads by name: the field that names the table, such as data.source.table, and the name."""
    sources: list[tuple[str, TableLocation]] = data.source.tables if data.source else []
    if data.prepare and data.prepare.decontaminate:
        evaluation_sets = data.prepare.decontaminate.sources
        sources += [(f"data.prepare.decontaminate.sources[{item.name}]", item) for item in evaluation_sets]
    return ((f"{field}.table", source.table) for field, source in sources if source.table)


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
