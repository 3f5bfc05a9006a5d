"""Places where a code change should fail a test, and the change itself.

A point is named independently of its file: by room, function, the statement's text from
`ast.unparse`, and the number of the change within that statement. It is thus found again in another
checkout with other files.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOMS = ("roles", "policy", "kv", "runtime", "gateway")
PROBE = "mutants_probe"
"""Module that records which mutants' statements were executed; it lies beside `hadal`."""
_SPOKEN = re.compile(r"(^|[._])(log|logger|logging|print|warn)\b")
"""Matches calls that only report something."""
_UNTOUCHED = ("__repr__", "__str__")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_EXTREMES = {"min": "max", "max": "min"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Put = Callable[[ast.AST], None]


@dataclass(frozen=True)
class Point:
    """One mutant, independent of its file."""

    room: str
    function: str
    """Name with the enclosing classes and functions."""
    statement: str
    """Text of the statement; of `if`, `for`, `while` and `with` only the first line."""
    occurrence: int
    """Index among equal statements of the function."""
    change: int
    """Index among the changes that `_changes` finds in the statement."""
    kind: str
    was: str
    now: str


@dataclass(frozen=True)
class Place:
    """A statement in a checkout."""

    path: Path
    function: Function
    statement: ast.stmt


@dataclass(frozen=True)
class _Change:
    kind: str
    was: ast.AST
    now: ast.AST
    put: Put
    """Function that puts its argument in place of `was`."""


Tree = dict[tuple[str, str, str], list[Place]]
"""(room, function, statement) -> its places, in order."""


def read_tree(checkout: Path) -> Tree:
    """Return all statements of functions in the rooms. Statements that two functions of one name
    share are left out: another checkout could not tell the two apart.
    """
    tree: Tree = defaultdict(list)
    for room in ROOMS:
        for path in sorted((checkout / "src" / "hadal" / room).rglob("*.py")):
            module = ast.parse(path.read_text(encoding="utf-8"))
            for name, function in _functions(module, ""):
                for statement, _ in _statements(function.body):
                    place = Place(path, function, statement)
                    tree[room, name, _text(statement)].append(place)
    return {
        key: places
        for key, places in tree.items()
        if len({id(place.function) for place in places}) == 1
    }


def points_of(trees: list[Tree]) -> list[Point]:
    """Return the points that exist in all trees."""
    first = trees[0]
    found = []
    for key, places in sorted(first.items(), key=lambda item: item[0]):
        if any(len(tree.get(key, ())) != len(places) for tree in trees):
            continue
        for occurrence, place in enumerate(places):
            found += [
                Point(*key, occurrence, number, change.kind, _short(change.was), _short(change.now))
                for number, change in enumerate(_changes(place.function, place.statement))
            ]
    return found


def draw(points: list[Point], num: int, seed: int) -> list[Point]:
    """Draw equal numbers of points from all rooms, `num` in total."""
    random = Random(seed)
    drawn = []
    for number, room in enumerate(ROOMS):
        share = num * (number + 1) // len(ROOMS) - num * number // len(ROOMS)
        there = [point for point in points if point.room == room]
        drawn += random.sample(there, min(share, len(there)))
    return drawn


def find(tree: Tree, point: Point) -> Place | None:
    """Return a point's place in a checkout; None if it has none."""
    places = tree.get((point.room, point.function, point.statement), [])
    return places[point.occurrence] if point.occurrence < len(places) else None


def mutated(place: Place, point: Point) -> str:
    """Return the text of the place's file with the change applied."""
    module, function, statement, put = _again(place)
    changes = _changes(function, statement)
    change = changes[point.change]
    assert (change.kind, _short(change.was)) == (point.kind, point.was), "not the same statement"
    (put if change.was is statement else change.put)(change.now)
    return ast.unparse(ast.fix_missing_locations(module))


def probed(path: Path, marked: Iterable[tuple[int, Place]]) -> str:
    """Return the text of a file with a `hit` call before each marked statement."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, place in marked:
        numbers[_position(place.statement)].append(number)
    for _, function in _functions(module, ""):
        for statement, siblings in list(_statements(function.body)):
            for number in numbers.get(_position(statement), ()):
                probe = ast.parse(f"__import__({PROBE!r}).hit({number})").body[0]
                siblings.insert(siblings.index(statement), probe)
    return ast.unparse(ast.fix_missing_locations(module))


def _again(place: Place) -> tuple[ast.Module, Function, ast.stmt, Put]:
    """Return the place in a newly parsed module, and the function that replaces its statement."""
    module = ast.parse(place.path.read_text(encoding="utf-8"))
    for _, function in _functions(module, ""):
        for statement, siblings in _statements(function.body):
            if _position(statement) == _position(place.statement):
                return module, function, statement, _putter(siblings, siblings.index(statement))
    raise LookupError(f"{place.path}:{place.statement.lineno}: not there any more")


def _position(statement: ast.stmt) -> int:
    """Return a number that is unique in a file, because no two statements begin at the same character."""
    return statement.lineno * 10_000 + statement.col_offset


def _functions(node: ast.AST, around: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{around}.{child.name}".lstrip(".")
            if isinstance(child, Function) and child.name not in _UNTOUCHED:
                yield name, child
            yield from _functions(child, name)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _functions(child, around)


def _statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """Yield each statement with its list, without statements of inner functions and classes."""
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        yield statement, body
        for inner in _bodies(statement):
            yield from _statements(inner)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _text(statement: ast.stmt) -> str:
    return _short(statement) if hasattr(statement, "body") else ast.unparse(statement)


def _short(node: ast.AST) -> str:
    """Return the first line of a node's text, for a table."""
    if isinstance(node, ast.If | ast.While | ast.For | ast.AsyncFor | ast.With | ast.AsyncWith):
        bare = copy.copy(node)
        bare.body = [ast.Pass()]
        if not isinstance(bare, ast.With | ast.AsyncWith):
            bare.orelse = []
        return ast.unparse(bare).partition("\n")[0]
    return ast.unparse(node).partition("\n")[0]


def _putter(siblings: list[ast.stmt], index: int) -> Put:
    def put(new: ast.AST) -> None:
        assert isinstance(new, ast.stmt)
        siblings[index] = new

    return put


def _changes(function: Function, statement: ast.stmt) -> list[_Change]:
    """Return all changes of a statement, without those of inner statements."""
    match statement:
        case ast.Raise() | ast.Assert() | ast.Try() | ast.TryStar() | ast.Match():
            return []
        case ast.Expr(ast.Constant()):
            return []  # A docstring.
        case ast.Expr(value) if isinstance(value, ast.Yield | ast.YieldFrom):
            return []
        case ast.Expr(ast.Call(called)) if _SPOKEN.search(ast.unparse(called)):
            return []
    found = list(_of_statement(function, statement))
    for node, put in _expressions(statement):
        found += [_Change(kind, node, now, put) for kind, now in _of_expression(node)]
    return found


def _of_statement(function: Function, statement: ast.stmt) -> Iterator[_Change]:
    def change(kind: str, now: ast.AST) -> _Change:
        return _Change(kind, statement, now, lambda _: None)

    match statement:
        case ast.Return(ast.expr() as value) if not _is_none(value) and not _yields(function):
            yield change("return", ast.Return(ast.Constant(None)))
        case ast.If(test) if not isinstance(test, ast.UnaryOp) and not _is_equality(test):
            turned = copy.copy(statement)
            turned.test = ast.UnaryOp(ast.Not(), test)
            yield change("condition", turned)
        case ast.AugAssign(_, ast.Add() | ast.Sub() as sign):
            turned = copy.copy(statement)
            turned.op = _SIGNS[type(sign)]()
            if not _is_text(statement.value):
                yield change("sign", turned)
            yield change("removed", ast.Pass())
        case ast.AugAssign() | ast.Expr(ast.Call() | ast.Await()):
            yield change("removed", ast.Pass())
        case ast.Assign([ast.Attribute() | ast.Subscript()]) if function.name != "__init__":
            yield change("removed", ast.Pass())


def _of_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(_, operators):
            for index, operator in enumerate(operators):
                if other := _COMPARISONS.get(type(operator)):
                    turned = copy.deepcopy(node)
                    turned.ops[index] = other()
                    yield "comparison", turned
        case ast.BoolOp(operator, values):
            swapped = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and, or", ast.BoolOp(swapped, values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", operand
        case ast.BinOp(left, ast.Add() | ast.Sub() as sign, right):
            if not (_is_text(left) or _is_text(right)):
                yield "sign", ast.BinOp(left, _SIGNS[type(sign)](), right)
        case ast.Constant(bool() as truth):
            yield "constant", ast.Constant(not truth)
        case ast.Constant(int() as number):
            yield "constant", ast.Constant(number + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in _EXTREMES:
            yield "min, max", ast.Call(ast.Name(_EXTREMES[name]), arguments, keywords)
        case ast.IfExp(test, then, otherwise):
            yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), test), then, otherwise)


def _expressions(parent: ast.AST) -> Iterator[tuple[ast.AST, Put]]:
    """Yield expressions of a statement, without those in inner statements, f-strings and annotations."""
    for name, value in ast.iter_fields(parent):
        if name == "annotation" or isinstance(value, ast.JoinedStr):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, ast.JoinedStr) or not isinstance(
                child, ast.expr | ast.comprehension | ast.keyword | ast.withitem
            ):
                continue

            def put(new: ast.AST, name: str = name, index: int = index) -> None:
                held = getattr(parent, name)
                if isinstance(held, list):
                    held[index] = new
                else:
                    setattr(parent, name, new)

            yield child, put
            yield from _expressions(child)


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_equality(test: ast.expr) -> bool:
    """Return whether a test is an (in)equality: negating it then equals changing its operator."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq)


def _is_text(value: ast.expr) -> bool:
    """Return whether a value is a text, a list or a tuple. Changing + to - on these would fail any test."""
    if isinstance(value, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple):
        return True
    return isinstance(value, ast.Constant) and isinstance(value.value, str | bytes)


def _yields(function: Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
