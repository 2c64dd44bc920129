"""The SQL filter of a recipe, which may only use the columns of one row.

The condition is checked as Spark's parser and analyser read it, so another spelling of a function makes no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.prep.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

# Spark's classes of leaf expressions that are allowed, in a condition before and after Spark's analyser has resolved its names.
_PARSED = ("Literal", "UnresolvedAttribute", "UnresolvedNamedLambdaVariable", "UnresolvedCollation")
_ANALYSED = (
    "Literal",
    "AttributeReference",
    "NamedLambdaVariable",
    "ResolvedCollation",
    "CommonExpressionRef",
)
_SUBQUERIES = ("ScalarSubquery", "Exists", "ListQuery")
# Functions that run code of the classpath. NB: Spark's analyser loads the class, so the functions are refused before the analyser runs.
_REFLECTION = ("java_method", "reflect", "try_reflect")


def check(frame: DataFrame, condition: str) -> None:
    """Check that an SQL condition depends on the columns of a row alone.

    Raises:
        RecipeRefusedError: the condition has a subquery, a window, an aggregate, or a function of something else: the session,
            the clock, files, chance, or code of the classpath. Without access to the JVM, every condition is refused.
        ParseException: the condition is not SQL.
        AnalysisException: the condition does not fit the columns of the frame.
    """
    if session.context(frame.sparkSession) is None:
        raise RecipeRefusedError(
            "data.prepare.filter cannot be checked on compute without access to the JVM (serverless, or the access mode "
            "Standard): use spark.databricks.compute of type NewCluster, or an existing cluster with the access mode Dedicated"
        )
    refused_part = _find_refused_syntax(frame, condition) or _find_refused_function(frame, condition)
    if refused_part:
        raise RecipeRefusedError(
            f"data.prepare.filter `{condition}` has {refused_part}, but a filter may only use the columns of one row: remove that part"
        )


def _find_refused_syntax(frame: DataFrame, condition: str) -> str | None:
    """Return the part of a parsed condition that is refused before Spark resolves names."""
    spark: Any = frame.sparkSession
    # NB: pyspark has no public access to the parser.
    parsed = spark._jsparkSession.sessionState().sqlParser().parseExpression(condition)  # noqa: SLF001
    for node in _walk(parsed):
        kind = _class_name(node)
        if kind == "UnresolvedFunction":
            *catalog, name = [part.lower() for part in _list_items(node.nameParts())]
            # A function of a catalog may be anybody's code.
            if catalog or name in _REFLECTION:
                return f"the function {'.'.join([*catalog, name])}"
        elif "Window" in kind:
            return "a window"
        elif kind in _SUBQUERIES:
            return "a subquery"
        elif not _list_items(node.children()) and kind not in _PARSED:
            return str(node.toString())
    return None


def _find_refused_function(frame: DataFrame, condition: str) -> str | None:
    """Return the part of an analysed condition that does not depend on the row alone."""
    analysed: Any = frame.selectExpr(condition)._jdf.queryExecution().analyzed()  # noqa: SLF001 - as above
    # A selection without aggregates is a Project.
    if _class_name(analysed) != "Project":
        return "an aggregate"
    for node in _walk(analysed.projectList().head()):
        children = _list_items(node.children())
        is_forbidden_leaf = not children and _class_name(node) not in _ANALYSED
        # NB: an expression around a nondeterministic expression is nondeterministic, too: only the innermost is reported.
        is_random = not node.deterministic() and all(part.deterministic() for part in children)
        # The code of a UDF may read anything.
        is_udf = _class_name(node).endswith("UDF")
        if is_forbidden_leaf or is_random or is_udf:
            return f"the function {node.prettyName().lower()}"
    return None


def _walk(expression: Any) -> Iterator[Any]:
    """Yield an expression of the JVM and its descendants."""
    yield expression
    for part in _list_items(expression.children()):
        yield from _walk(part)


def _list_items(sequence: Any) -> list[Any]:
    """Return the items of a Scala sequence."""
    return [sequence.apply(index) for index in range(sequence.size())]


def _class_name(node: Any) -> str:
    return str(node.getClass().getSimpleName())
