"""Draw mutants of the package: one small change of its syntax tree each, by a seed.

A mutant is known by its anchor: the file, the qualified name around it, its kind, and the source
before and after, normalised. So it stays the same mutant when lines move or are formatted anew.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PACKAGE = "megatron_zb"

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
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
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
_EXTREMES = {"max": "min", "min": "max"}


class Change(NamedTuple):
    """A node, what stands in its place in a mutant, and the statement whose block has to run."""

    kind: str
    old: ast.AST
    new: ast.AST


@dataclass(frozen=True)
class Mutant:
    """One change of one file; ``start`` and ``end`` are where the old source stands, in bytes."""

    file: str
    name: str
    kind: str
    old: str
    new: str
    line: int
    start: int
    end: int
    put: str

    @property
    def anchor(self) -> tuple[str, str, str, str]:
        return f"{self.file}::{self.name}", self.kind, self.old, self.new

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.put.encode() + source[self.end :]

    def diff(self, root: Path) -> str:
        before = (root / self.file).read_bytes()
        old, new = (text.decode().splitlines() for text in (before, self.applied(before)))
        lines = list(difflib.unified_diff(old, new, self.file, self.file, lineterm="", n=1))
        return "\n".join(lines[1:])

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}: {self.kind}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class Place:
    """Where a change can be made; nothing has been changed yet."""

    file: str
    name: str
    change: Change


def sources_of(root: Path) -> list[Path]:
    """Return the files of all packages."""
    return sorted((root / PACKAGE).rglob("*.py"))


def draw(root: Path, count: int, seed: str) -> list[Mutant]:
    """Draw mutants: first a kind, all alike, then one of that kind from all packages."""
    by_kind: dict[str, list[Place]] = {}
    sources = {}
    for path in sources_of(root):
        file = path.relative_to(root).as_posix()
        sources[file] = path.read_bytes()
        for place in places_of(sources[file], file):
            by_kind.setdefault(place.change.kind, []).append(place)
    chance = random.Random(seed)
    drawn: dict[tuple[str, ...], Mutant] = {}
    while len(drawn) < count and any(by_kind.values()):
        places = by_kind[chance.choice(sorted(kind for kind in by_kind if by_kind[kind]))]
        place = places.pop(chance.randrange(len(places)))
        mutant = mutant_of(place, sources[place.file])
        if mutant is not None:
            drawn.setdefault(mutant.anchor, mutant)
    return list(drawn.values())


def places_of(source: bytes, file: str) -> Iterator[Place]:
    """Yield all places of a file where a change can be made."""
    for name, change in _walk(ast.parse(source), ()):
        yield Place(file, ".".join(name), change)


def mutant_of(place: Place, source: bytes) -> Mutant | None:
    """Return the mutant of a place, or None where the change makes the same Python, or none."""
    node = place.change.old
    old, new = ast.unparse(node), ast.unparse(place.change.new)
    assert isinstance(node, ast.stmt | ast.expr)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
    put = f"({new})" if isinstance(node, ast.expr) and not _is_number(node) else new
    put = put.replace("\n", "\n" + " " * node.col_offset) if isinstance(node, ast.stmt) else put
    made = Mutant(place.file, place.name, place.change.kind, old, new, node.lineno, start, end, put)
    try:
        other = ast.dump(ast.parse(made.applied(source)))
    except SyntaxError:
        return None
    return made if other != ast.dump(ast.parse(source)) else None


def _walk(node: ast.AST, name: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Change]]:
    for change in _changes(node, bool(name)):
        yield name, change
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                inside = name
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inside = (*name, child.name)
                yield from _walk(child, inside)


def _is_left_out(node: ast.AST) -> bool:
    """Return whether a node is of no use while it runs: text for readers, types, assertions."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "__name__ == '__main__'",
    ):
        return True
    documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    documents |= isinstance(node, ast.keyword) and node.arg == "examples"  # of a field
    return documents or isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _changes(node: ast.AST, inside: bool) -> Iterator[Change]:
    for make in _MAKERS.get(type(node), ()):
        yield from make(node)
    if inside and isinstance(node, ast.stmt):
        yield from _of_statement(node)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    old = {name: getattr(node, name) for name in node._fields}
    return type(node)(**{**old, **fields})


def _comparison(node: ast.Compare) -> Iterator[Change]:
    for i, op in enumerate(node.ops):
        ops = [*node.ops[:i], _COMPARED[type(op)](), *node.ops[i + 1 :]]
        yield Change("comparison", node, _with(node, ops=ops))


def _arithmetic(node: ast.BinOp) -> Iterator[Change]:
    text = any(
        isinstance(n, ast.Constant | ast.JoinedStr) and not _is_number(n)
        for n in (node.left, node.right)
    )
    if type(node.op) in _COMPUTED and not text:
        yield Change("arithmetic", node, _with(node, op=_COMPUTED[type(node.op)]()))


def _increment(node: ast.AugAssign) -> Iterator[Change]:
    if type(node.op) in _COMPUTED:
        yield Change("arithmetic", node, _with(node, op=_COMPUTED[type(node.op)]()))


def _sign(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.USub):
        yield Change("arithmetic", node, node.operand)
    if isinstance(node.op, ast.Not):
        yield Change("boolean", node, node.operand)


def _and_or(node: ast.BoolOp) -> Iterator[Change]:
    op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield Change("boolean", node, _with(node, op=op))


def _negation(node: ast.If | ast.IfExp | ast.While) -> Iterator[Change]:
    if not isinstance(node.test, ast.Compare | ast.Constant | ast.UnaryOp):
        yield Change("boolean", node.test, ast.UnaryOp(ast.Not(), node.test))


def _call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in _EXTREMES:
        yield Change("arithmetic", node.func, ast.Name(_EXTREMES[node.func.id]))
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return
    commutes = isinstance(node.func, ast.Name) and node.func.id in _EXTREMES
    for i in range(0 if commutes else len(node.args) - 1):
        one, other = node.args[i : i + 2]
        args = [*node.args[:i], other, one, *node.args[i + 2 :]]
        yield Change("argument swap", node, _with(node, args=args))
    for i in range(len(node.keywords) - 1):
        first, second = node.keywords[i : i + 2]
        if first.arg and second.arg:
            swapped = [ast.keyword(first.arg, second.value), ast.keyword(second.arg, first.value)]
            keywords = [*node.keywords[:i], *swapped, *node.keywords[i + 2 :]]
            yield Change("argument swap", node, _with(node, keywords=keywords))


def _is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)


def _another_number(kind: str, node: ast.AST | None) -> Iterator[Change]:
    """Yield the change of a constant to another number, if it is a number."""
    value = node.value if isinstance(node, ast.Constant) else None
    if node is None or not isinstance(value, bool | int | float):
        return
    if isinstance(value, bool):
        yield Change(kind, node, ast.Constant(not value))
    else:
        other = value + 1 if isinstance(value, int) else value * 2 or 1.0
        yield Change(kind, node, ast.Constant(other))


def _constant(node: ast.Constant) -> Iterator[Change]:
    yield from _another_number("constant", node)


def _entries(node: ast.Dict) -> Iterator[Change]:
    for i in range(len(node.keys)):
        keys, values = list(node.keys), list(node.values)
        del keys[i], values[i]
        yield Change("entry", node, ast.Dict(keys, values))


def _elements(node: ast.List | ast.Set | ast.Tuple) -> Iterator[Change]:
    if len(node.elts) > 2 and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        for i in range(len(node.elts)):
            yield Change("entry", node, _with(node, elts=node.elts[:i] + node.elts[i + 1 :]))


def _defaults(node: ast.arguments) -> Iterator[Change]:
    for default in (*node.defaults, *node.kw_defaults):
        yield from _another_number("default", default)


def _field(node: ast.ClassDef) -> Iterator[Change]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            yield from _another_number("default", statement.value)


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    if (
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value) != "None"
    ):
        yield Change("early return", node, ast.Return(ast.Constant(None)))
    ends = ast.Return | ast.Continue | ast.Break | ast.Raise
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ends):
        yield Change("early return", node, ast.Pass())
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    kept = isinstance(node, ast.Assign | ast.AugAssign | ast.Raise | ast.Delete)
    if called or kept:
        yield Change("dropped statement", node, ast.Pass())


_MAKERS: dict[type[ast.AST], tuple[Callable[..., Iterator[Change]], ...]] = {
    ast.Compare: (_comparison,),
    ast.BinOp: (_arithmetic,),
    ast.AugAssign: (_increment,),
    ast.UnaryOp: (_sign,),
    ast.BoolOp: (_and_or,),
    ast.If: (_negation,),
    ast.IfExp: (_negation,),
    ast.While: (_negation,),
    ast.Call: (_call,),
    ast.Constant: (_constant,),
    ast.Dict: (_entries,),
    ast.List: (_elements,),
    ast.Set: (_elements,),
    ast.Tuple: (_elements,),
    ast.arguments: (_defaults,),
    ast.ClassDef: (_field,),
}
