"""The mutation operators: every small fault that can be put into a function.

Nothing here changes a text, a message, a log line, a type, a default of an argument or an assertion: such faults either
change nothing that can be observed or only words.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeGuard, cast

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.expr | ast.stmt

MAX_FRAGMENT = 160
"""Characters. A longer fragment cannot be read in a list, and its function has others."""

_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
}  # fmt: skip
_OPPOSITE_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "warn"}
_NOT_NUMBERS = (
    ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Starred,
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A fault that can be put into a function.

    The operator, the fragment and the occurrence identify it within the function, however its lines move.

    Attributes:
        fragment: the source of the mutated expression or statement, as `ast.unparse` writes it.
        occurrence: the index among the candidates of the function that have the same operator and fragment.
        shape: the fragment without its names; it survives a rename of variables.
        node: what is replaced in the source.
        replacement: the source that replaces it.
    """

    operator: str
    fragment: str
    occurrence: int
    shape: str
    node: Node
    replacement: str

    def apply(self, source: str) -> str:
        """The source of the module with this fault in it."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.node.lineno - 1])) + self.node.col_offset
        end = (
            sum(map(len, lines[: cast("int", self.node.end_lineno) - 1]))
            + cast("int", self.node.end_col_offset)
        )  # fmt: skip
        content = b"".join(lines)
        return (content[:start] + self.replacement.encode() + content[end:]).decode()


def list_functions(tree: ast.AST, prefix: str = "") -> dict[str, Function]:
    """All functions below a node by their qualified names, without `<locals>`; the last of a name counts."""
    functions: dict[str, Function] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[prefix + node.name] = node
        name = f"{prefix}{node.name}." if isinstance(node, Function | ast.ClassDef) else prefix
        functions |= list_functions(node, name)
    return functions


def list_candidates(function: Function) -> list[Candidate]:
    """All faults that can be put into a function, but not those of functions and classes inside it."""
    occurrences: Counter[tuple[str, str]] = Counter()
    candidates = []
    for statement in function.body:
        for operator, fragment, node, new in _mutate(statement):
            text = fragment if isinstance(fragment, str) else ast.unparse(fragment)
            if len(text) > MAX_FRAGMENT or "\n" in text:
                continue
            occurrence = occurrences[operator, text]
            occurrences[operator, text] += 1
            replacement = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            candidates.append(
                Candidate(operator, text, occurrence, shape_of(operator, text), node, replacement)
            )
    return candidates


def place_of(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """The place of a candidate among those of its function that have its operator and shape; empty for the only one."""
    alike = [
        each for each in candidates if (each.operator, each.shape) == (candidate.operator, candidate.shape)
    ]
    return f"{alike.index(candidate) + 1} of {len(alike)}" if len(alike) > 1 else ""


_Fault = tuple[str, str | Node, Node, Node]
"""The operator, the fragment that identifies it, what is replaced, and by what."""


def _mutate(node: ast.AST) -> Iterator[_Fault]:
    """The faults of a node and of all below it."""
    if isinstance(node, Function | ast.ClassDef | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.Call) and _has_words_only(node):
        return
    yield from _mutate_here(node)
    for child in _children(node):
        yield from _mutate(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Raise():
            return
        case ast.AnnAssign(value=value):
            yield from [] if value is None else [value]
        case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
            yield value
        case ast.Call(func=ast.Name(id="zip")):
            yield from node.args
        case ast.ExceptHandler(body=body):
            yield from body
        case _:
            yield from ast.iter_child_nodes(node)


def _mutate_here(node: ast.AST) -> Iterator[_Fault]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield from _negate(node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _negate(test)
    if isinstance(node, ast.stmt):
        yield from _mutate_statement(node)
    elif isinstance(node, ast.Compare):
        yield from _mutate_comparison(node)
    elif isinstance(node, ast.Call):
        yield from _mutate_call(node)
    elif isinstance(node, ast.expr):
        yield from _mutate_expression(node)


def _negate(test: ast.expr) -> Iterator[_Fault]:
    if not isinstance(test, ast.Compare | ast.Constant):
        yield "negate-condition", test, test, ast.UnaryOp(ast.Not(), test)


def _mutate_statement(node: ast.stmt) -> Iterator[_Fault]:
    match node:
        case ast.Return(value=ast.expr() as value) if not _is_empty(value):
            yield "drop-return-value", node, node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            if not _has_words_only(call):
                yield "delete-statement", node, node, ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]) | ast.AugAssign() | ast.Raise():
            yield "delete-statement", node, node, ast.Pass()


def _mutate_comparison(node: ast.Compare) -> Iterator[_Fault]:
    for name, table in (("swap-comparison", _NEGATED), ("move-boundary", _BOUNDARY)):
        for index, old in enumerate(node.ops):
            if type(old) in table:
                new = deepcopy(node)
                new.ops[index] = table[type(old)]()
                yield name, node, node, new


def _mutate_call(node: ast.Call) -> Iterator[_Fault]:
    if isinstance(node.func, ast.Name) and node.func.id in _OPPOSITE_NAMES and len(node.args) > 0:
        new = deepcopy(node)
        new.func = ast.Name(_OPPOSITE_NAMES[node.func.id])
        yield "swap-function", node, node, new
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    if name[:1].isupper() or name == "zip":
        return
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            new = deepcopy(node)
            del new.keywords[index]
            yield "drop-keyword", f"{ast.unparse(node.func)}(..., {ast.unparse(keyword)})", node, new


def _mutate_expression(node: ast.expr) -> Iterator[_Fault]:
    match node:
        case ast.BoolOp():
            opposite = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "swap-and-or", node, node, ast.BoolOp(opposite, node.values)
        case ast.UnaryOp(op=ast.Invert()):
            yield "drop-invert", node, node, node.operand
        case ast.UnaryOp(op=ast.Not()):
            yield "drop-not", node, node, node.operand
        case ast.Constant(value=bool() as value):
            yield "flip-boolean", node, node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "add-one", node, node, ast.Constant(value + 1)
        case ast.BinOp(op=operation) if type(operation) in _ARITHMETIC and _has_numbers(node):
            opposite_operation = _ARITHMETIC[type(operation)]()
            yield "swap-arithmetic", node, node, ast.BinOp(node.left, opposite_operation, node.right)


def _has_numbers(node: ast.BinOp) -> bool:
    """Whether an operation may be one on numbers or columns, and neither joins texts or lists nor a path."""
    sides = (node.left, node.right)
    if any(isinstance(side, _NOT_NUMBERS) or _is_text(side) for side in sides):
        return False
    return not isinstance(node.op, ast.Div) or any(
        isinstance(side, ast.Constant | ast.BinOp) for side in sides
    )


def _is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_empty(value: ast.expr) -> bool:
    """Whether a value that is returned is a constant, or as empty as None."""
    match value:
        case ast.Constant() | ast.List(elts=[]) | ast.Tuple(elts=[]) | ast.Dict(keys=[]):
            return True
    return False


def _has_words_only(call: ast.Call) -> bool:
    """Whether a call writes a log line, or makes an error with its message."""
    match call.func:
        case ast.Attribute(attr=name, value=owner) if name in _LOG_METHODS:
            return "log" in ast.unparse(owner).lower() or ast.unparse(owner) == "warnings"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == "print" or name.endswith(("Error", "Warning", "Exception"))
    return False


class _Anonymize(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("_", node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Attribute(self.visit(node.value), "_", node.ctx)


def shape_of(operator: str, fragment: str) -> str:
    """A fragment with all names replaced by `_`: what stays of it when variables are renamed."""
    source = fragment.replace("(..., ", "(") if operator == "drop-keyword" else fragment
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a return outside a function parses, a yield or an await may not
        return source
    return ast.unparse(_Anonymize().visit(tree))
