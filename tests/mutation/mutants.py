"""Mutants of a module: its syntax tree with one operator, sign, factor or transpose changed.

Every place in the tree that a rule below fits gives a mutant; nothing is chosen by hand. A mutant
that the tests do not notice is a statement of the mathematics that nothing checks.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
#: Calls that may be left out, keeping their first argument.
_DROPPED_CALLS = ("matrix_transpose", "swapaxes", "permute_dims", "cast", "wide", "abs", "stage")
#: Calls swapped for a sibling of the same shape.
_SIBLINGS = {
    "maximum": "minimum",
    "minimum": "maximum",
    "max": "min",
    "min": "max",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "bitwise_and": "bitwise_or",
    "bitwise_or": "bitwise_and",
    "bitwise_xor": "bitwise_or",
    "bitwise_left_shift": "bitwise_right_shift",
    "bitwise_right_shift": "bitwise_left_shift",
    "matmul": "matmul_t",
    "matmul_t": "matmul",
    "exp": "expm1",
    "log": "log1p",
    "tanh": "sin",
    "cos": "sin",
    "sin": "cos",
    "sum": "mean",
    "mean": "sum",
}
#: Arguments that guard, show or copy and compute nothing, so that no value of theirs is wrong.
_SPARED = ("compare", "copy", "repr", "strict")


@dataclass(frozen=True)
class Mutant:
    """module: dotted name; where: the function or class; before, after: the changed piece;
    place: its index in the walk over the tree and among the node's mutations; number: counts
    mutants of one function that read the same."""

    module: str
    where: str
    line: int
    before: str
    after: str
    place: tuple[int, int] = (0, 0)
    number: int = 1

    @property
    def name(self) -> str:
        """What the list of explained survivors calls it: stable while the code stays."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.module}:{self.where}: {self.before} → {self.after}{again}"


def mutants(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module's text, in the order of the text."""
    tree = ast.parse(source)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for index, (node, parent, where) in enumerate(_walk(tree)):
        # A constant is shown in what it is part of.
        shown = parent if isinstance(node, ast.Constant) else node
        before = _short(ast.unparse(shown))
        for number, new in enumerate(_mutations(node)):
            after = _short(ast.unparse(new if shown is node else _with(parent, node, new)))
            mutant = Mutant(module, where, getattr(node, "lineno", 0), before, after)
            seen[mutant.name] += 1
            found.append(replace(mutant, place=(index, number), number=seen[mutant.name]))
    return found


def mutated(source: str, mutant: Mutant) -> str:
    """The module's text with the mutation made."""
    tree = ast.parse(source)
    index, number = mutant.place
    node, parent, _ = next(item for i, item in enumerate(_walk(tree)) if i == index)
    _replace(parent, node, list(_mutations(node))[number])
    return ast.unparse(ast.fix_missing_locations(tree))


def _walk(tree: ast.AST, where: str = "") -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Every node that computes something, with its parent and the function around it: no
    annotations, messages of errors or imports."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.Raise | ast.Import):
                continue
            if isinstance(node, ast.Assert | ast.ImportFrom):
                continue
            if isinstance(node, ast.keyword) and node.arg in _SPARED:
                continue
            # What a protocol says is never run.
            if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
                continue
            inner = where
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inner = f"{where}.{node.name}".lstrip(".")
            yield node, tree, inner
            yield from _walk(node, inner)


def _mutations(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        other = _OPERATORS[type(node.op)]
        yield ast.BinOp(node.left, other(), node.right)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            yield node.left
            if not isinstance(node.op, ast.Sub):
                yield node.right
    elif isinstance(node, ast.AugAssign):
        yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield ast.BoolOp(other(), node.values)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _constants(value: object) -> Iterator[ast.AST]:
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
    elif isinstance(value, float):
        yield ast.Constant(2.0 * value or 1.0)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _DROPPED_CALLS and node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]
    if name in _SIBLINGS and isinstance(function, ast.Attribute):
        sibling = ast.Attribute(function.value, _SIBLINGS[name], ast.Load())
        yield ast.Call(sibling, node.args, node.keywords)


def _replace(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new)
        elif isinstance(value, list):
            setattr(parent, name, [new if item is old else item for item in value])


def _with(parent: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """A copy of ``parent`` with one child replaced."""
    shown = copy.copy(parent)
    _replace(shown, old, new)
    return shown


def _short(text: str, limit: int = 90) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
