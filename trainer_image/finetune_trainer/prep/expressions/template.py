"""Templates: text with {column} placeholders, rendered in the JVM."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Template:
    """A parsed template: pairs of literal text and the column after it, if any.

    For example, `Q: {question}!` has the parts `(("Q: ", "question"), ("!", None))`.
    """

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def of_column(cls, name: str) -> Template:
        """Return the template that renders only the value of a column."""
        return cls((("", name),))

    @classmethod
    def parse(cls, text: str, field: str) -> Template:
        """Parse the template in a field of the recipe.

        Raises:
            RecipeRefusedError: a brace is unmatched, or a placeholder is not just the name of a column.
        """
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as error:
            raise RecipeRefusedError(
                f"{field} has an unmatched brace: write {{column}} for a column's value, and {{{{ and }}}} for braces"
            ) from error
        for _, column, specification, conversion in parts:
            if column == "" or specification or conversion:
                raise RecipeRefusedError(
                    f"{field} has a placeholder that is not a column name: write {{column}}, and {{{{ and }}}} for "
                    "braces"
                )
        return cls(tuple((literal, column) for literal, column, _, _ in parts))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the placeholders, in order."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def render(self) -> Column:
        """Return the template as a Spark expression; null renders as the empty string."""
        from pyspark.sql import functions as sf

        pieces = []
        for literal, column in self.parts:
            if literal:
                pieces.append(sf.lit(literal))
            if column is not None:
                pieces.append(sf.coalesce(sf.col(quoted(column)).cast("string"), sf.lit("")))
        return sf.concat(*pieces) if pieces else sf.lit("")


def quoted(column: str) -> str:
    """Quote a column name for Spark."""
    escaped = column.replace("`", "``")
    return f"`{escaped}`"
