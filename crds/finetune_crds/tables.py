"""The tables that a preparation reads and saves by name, and a check of their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune_crds.data import Data
    from finetune_crds.source import TableLocation


def list_tables(data: Data) -> Iterator[tuple[str, str]]:
    """Iterate over the tables that a preparation names: the field that names the table, such as data.source.table, and the name."""
    yield from list_sources(data)
    yield from list_split_tables(data)


def list_sources(data: Data) -> Iterator[tuple[str, str]]:
    """Iterate over the tables that a preparation reads from sources and evaluation sets, each after its field."""
    sources: list[tuple[str, TableLocation]] = data.source.tables if data.source else []
    if data.prepare and data.prepare.decontaminate:
        evaluation_sets = data.prepare.decontaminate.sources
        sources += [(f"data.prepare.decontaminate.sources[{item.name}]", item) for item in evaluation_sets]
    return ((f"{field}.table", source.table) for field, source in sources if source.table)


def list_split_tables(data: Data) -> Iterator[tuple[str, str]]:
    """Iterate over the tables that a preparation saves splits to, each after its field."""
    split_tables = data.prepare.split_tables if data.prepare else None
    named_splits = split_tables.by_split if split_tables else {}
    return ((f"data.prepare.splitTables.{split}", table) for split, table in named_splits.items())


def find_misnamed_tables(data: Data) -> Iterator[str]:
    """Iterate over errors about table names: unfit for the catalog, or of a table that the preparation would read and replace.

    An error begins with the field that names the table.
    """
    yield from _find_replaced_tables(data)
    catalog = data.prepare.catalog if data.prepare else None
    if catalog is None:
        return
    if catalog.is_unity and any(list_split_tables(data)):
        yield (
            "data.prepare.splitTables cannot be saved in Unity Catalog by a preparation in this cluster: create a job with "
            "data.prepare.spark.mode Databricks, or without data.prepare.splitTables"
        )
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


def _find_replaced_tables(data: Data) -> Iterator[str]:
    """Iterate over errors about split tables that have the name of a source or of another split; catalogs ignore case."""
    fields = {table.lower(): field for field, table in list_sources(data)}
    for field, table in list_split_tables(data):
        if other_field := fields.get(table.lower()):
            yield f"{field} {table} is the table of {other_field}: create a job that names another table"
        fields[table.lower()] = field
