"""Templates of prompts and answers in Jinja, rendered in a sandbox in Spark's Python workers.

A template sees only the columns of its row. The sandbox hides attributes that begin with an underscore, and limits ranges, the passes of
loops for a row (`MAX_PASSES`) and the rendered text (`MAX_CHARACTERS`).
The memory of a template is not limited: the template is the author's own, and can end only the author's own pod.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from finetune_trainer.examples import plain_text, template_input
from finetune_trainer.examples.refused_rows import A_ROW, TEMPLATE_FAILED, RowError, write_text
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from jinja2 import Template
    from jinja2.runtime import Context
    from pyspark.sql import Column, DataFrame

MAX_CHARACTERS = 1_000_000
MAX_PASSES = 100_000
# Maximum number of bits of a power of integers.
_MAX_BITS = 1024
REFUSAL = "__finetune_refusal"
"""The column with the error text of a refused row, see `refused_rows.write_text`."""

# A template is a program that runs over the data; it can raise any of these.
_FAILURES = (*template_input.FAILURES, ArithmeticError, RecursionError)
# Jinja's own functions that templates may call.
_GLOBALS = ("range", "dict", "namespace")
# The variable that counts passes, and the filter that adds to it. No template can use their names, which have spaces.
_PASSES, _COUNTED = "passes of loops", "counted passes"
# Blocks that run other code, or may call themselves: their passes could not be counted.
_FORBIDDEN_NODES = (
    nodes.Macro,
    nodes.CallBlock,
    nodes.Block,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
)


@dataclass(frozen=True)
class JinjaTemplate:
    """A Jinja template in a field of the recipe, and the columns that it names."""

    text: str
    field: str
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, field: str) -> JinjaTemplate:
        """Parse the template in a field of the recipe.

        Raises:
            RecipeRefusedError: the text is not a Jinja template, or uses what the sandbox does not allow.
        """
        try:
            tree = _build_environment().parse(text)
            # Compilation finds mistakes that parsing does not, such as an unknown filter.
            _compile(text)
        except TemplateSyntaxError as error:
            raise RecipeRefusedError(
                f"{field} is not a valid Jinja template: line {error.lineno}: {error.message}"
            ) from error
        construct = next(_find_forbidden(tree), None)
        if construct is not None:
            raise RecipeRefusedError(
                f"{field} has {construct}, which the sandbox of templates does not allow"
            )
        return cls(text, field, _list_columns(tree))

    @property
    def output_column(self) -> str:
        """The column that `render_templates` adds for the template."""
        return f"__finetune_{self.field}"

    def render(self) -> Column:
        """Return the text of the template as a Spark expression, on a frame from `render_templates`; null if the template failed."""
        from pyspark.sql import functions as sf

        return sf.col(f"`{self.output_column}`")


def render_templates(frame: DataFrame, templates: Sequence[JinjaTemplate], *, drop: bool) -> DataFrame:
    """Return the frame with a column for the text of each template.

    Args:
        drop: return null for a row on which a template fails. Otherwise the row fails the task with the error text from
            `refused_rows.write_text`. If the frame has the column REFUSAL, neither applies: the text is null, and the error text is in
            that column.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    if not templates:
        return frame
    schema = StructType(
        [*frame.schema.fields, *(StructField(template.output_column, StringType()) for template in templates)]
    )
    return frame.mapInArrow(partial(_render_batches, templates=tuple(templates), drop=drop), schema)


def render_text(template: JinjaTemplate, row: Mapping[str, Any]) -> str:
    """Render a template on a row.

    Raises:
        RowError: the template fails, has too many passes of loops, or its text is too long.
    """
    return _render_row(_compile(template.text), template.field, row)


def _render_batches(
    batches: Iterable[pa.RecordBatch], *, templates: tuple[JinjaTemplate, ...], drop: bool
) -> Iterator[pa.RecordBatch]:
    """Yield the batches with the texts of the templates, see `render_templates`."""
    import pyarrow as pa

    compiled = [(_compile(template.text), template) for template in templates]
    for batch in batches:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        refusals = columns[REFUSAL].to_pylist() if REFUSAL in columns else None
        for program, template in compiled:
            # A template may name no columns: Arrow then lists no rows.
            rows = batch.select([*template.columns]).to_pylist() or [{}] * batch.num_rows
            texts: list[str | None] = []
            for number, row in enumerate(rows):
                try:
                    texts.append(_render_row(program, template.field, row))
                except RowError as error:
                    if refusals is not None:
                        refusals[number] = write_text(error)
                    elif not drop:
                        raise ValueError(write_text(error)) from error
                    texts.append(None)
            columns[template.output_column] = pa.array(texts, pa.string())
        if refusals is not None:
            columns[REFUSAL] = pa.array(refusals, pa.string())
        yield pa.RecordBatch.from_arrays([*columns.values()], [*columns])


def _render_row(program: Template, field: str, row: Mapping[str, Any]) -> str:
    """Render a compiled template on a row; raises as `render_text`."""
    pieces: list[str] = []
    characters = 0
    # The count is in a list so that `_count_passes` can change it.
    variables = {**row, _PASSES: [0]}
    try:
        for piece in program.generate(variables):
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise ValueError(f"the rendered text has more than {MAX_CHARACTERS:,} characters")
            pieces.append(piece)
    except _FAILURES as error:
        raise RowError(TEMPLATE_FAILED, f"{field} fails on {A_ROW}: {str(error).rstrip('.')}") from error
    return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, without large powers and long repetitions of texts and lists."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply, or raise to a power; raise ValueError if the result would be too large."""
        if operator == "**" and isinstance(left, int) and abs(left).bit_length() * right > _MAX_BITS:
            raise ValueError(f"a power has more than {_MAX_BITS:,} bits")
        # Either operand of * may be the sequence.
        for sequence, repetitions in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and len(sequence) * repetitions > MAX_CHARACTERS:
                raise ValueError(f"the template's * produces a string or list longer than {MAX_CHARACTERS:,}")
        return super().call_binop(context, operator, left, right)


def _build_environment() -> _Sandbox:
    # NB: blocks leave no empty lines, as in chat templates; the last line break stays, as in templates with placeholders.
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=_finalize,
    )
    environment.globals = {name: value for name, value in environment.globals.items() if name in _GLOBALS}
    # NB: Jinja's own tojson escapes characters for HTML.
    environment.filters["tojson"] = _to_json
    environment.filters[_COUNTED] = _count_passes
    return environment


def _finalize(value: Any) -> Any:
    """Return what a template writes for a value: the shortest decimal of a float, and an empty text for null, NaN and infinities."""
    if value is None or isinstance(value, float):
        return plain_text.write(value) or ""
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


@pass_context
def _count_passes(context: Context, values: Iterable[Any]) -> list[Any]:
    """Return the items of a loop, and count them as passes of the row."""
    passes = context[_PASSES]
    # One item above the limit is enough to find that the loops exceed it; `values` may be a large range.
    items = list(islice(values, MAX_PASSES + 1 - passes[0]))
    passes[0] += len(items)
    if passes[0] > MAX_PASSES:
        raise ValueError(f"the loops of the template have more than {MAX_PASSES:,} passes")
    return items


def _compile(text: str) -> Template:
    """Compile a template whose loops count their passes: `{% for x in xs %}` becomes `{% for x in xs | counted passes %}`.

    Raises:
        TemplateSyntaxError: the text is not a Jinja template.
    """
    environment = _build_environment()
    tree = environment.parse(text)
    for loop in tree.find_all(nodes.For):
        # The empty values are the arguments of the filter.
        loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
    tree.set_environment(environment)
    return environment.from_string(tree)


def _find_forbidden(tree: nodes.Template) -> Iterator[str]:
    """Yield the constructs of a template that are not allowed, in words that its author knows."""
    for node in tree.find_all(_FORBIDDEN_NODES):
        yield f"a block of type {type(node).__name__}"
    if any(loop.recursive for loop in tree.find_all(nodes.For)):
        yield "a recursive loop"
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            yield f"the attribute {attribute.attr}"


def _list_columns(tree: nodes.Template) -> tuple[str, ...]:
    """Return the columns that a template names, in the order of their first use."""
    columns = meta.find_undeclared_variables(tree) - {*_GLOBALS}
    names = (node.name for node in tree.find_all(nodes.Name) if node.name in columns)
    return tuple(dict.fromkeys(names))
