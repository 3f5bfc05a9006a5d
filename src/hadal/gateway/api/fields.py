"""Apply the table of fields to a body, before anything else reads it.

    body --names at the top and in objects--> refused: RequestError
                                              alias of a field: renamed to the field's own name
                                              in no row: the name, once, in the log

The body is not decoded for this: values stay raw JSON, except short values of refused
fields and of aliases.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.decoding import decode
from hadal.gateway.api.field_rows import FieldRow, Verdict
from hadal.gateway.api.field_table import API_TO_PATH, rows_of

T = TypeVar("T")
log = logging.getLogger("hadal.gateway")

_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_MAX_HARMLESS_BYTES = 64
_SMALL = ("logit_bias", "stop", "stop_token_ids")
_MAX_SMALL_BYTES = 1 << 18
"""Maximum bytes of a `_SMALL` field. Valid ones are shorter; parsing megabytes takes a second."""
MAX_LOGGED = 256
"""Maximum number of names that a process logs, since clients choose them."""
_MAX_NAME_CHARS = 64
_Raws = dict[str, msgspec.Raw]
_logged: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class NamedBody:
    """Body with every field under the API's own name for it, not under an alias."""

    body: bytes
    own_to_sent: Mapping[str, str] = field(default_factory=dict)
    """Field -> the alias that the client sent."""

    def sent(self, name: str) -> str:
        """Return the client's name for a field."""
        return self.own_to_sent.get(name, name)

    def read(self, make: Callable[[], T]) -> T:
        """Return the result of `make`. Its RequestErrors name fields as the client did."""
        try:
            return make()
        except RequestError as error:
            name, bracket, rest = (error.param or "").partition("[")
            if name not in self.own_to_sent:
                raise
            sent = self.own_to_sent[name]
            said = str(error).replace(name, sent)
            raise RequestError(said, f"{sent}{bracket}{rest}", error.code) from None


@dataclass
class _FieldNode:
    """Field of a body, with the fields inside its value."""

    row: FieldRow | None = None
    fields: dict[str, _FieldNode] = field(default_factory=dict)
    items: _FieldNode | None = None
    """Node of the items, if the value is a list."""
    quick: frozenset[str] = frozenset()
    """Names that need no check: known, not refused, and without fields of their own."""
    looked_at: frozenset[str] = frozenset()
    """Known names that need a check."""


def check_fields(body: bytes, api: str) -> NamedBody:
    """Apply an API's table to a body. Raises RequestError for refused fields, for contradicting
    fields, for a `_SMALL` field that is too long, and for bytes that are not a JSON object.
    """
    given = decode(body, _Raws)
    for name in _SMALL:
        if len(given.get(name, b"")) > _MAX_SMALL_BYTES:
            raise RequestError(f"{name} has more than {_MAX_SMALL_BYTES} bytes; shorten it.", name)
    unknown: dict[str, None] = {}
    _check_object(given, _tree_of(api), "", unknown)
    for path in unknown:
        log_once(f"unknown field of {API_TO_PATH[api]} is ignored", "field", path)
    return _named(body, given, api)


def _named(body: bytes, given: _Raws, api: str) -> NamedBody:
    """Return the body with aliases renamed. Raises RequestError if a field has different values."""
    own_to_sent: dict[str, str] = {}
    rows = rows_of(api)
    for name in [name for name in given if name in rows and rows[name].alias]:
        row, raw = rows[name], given.pop(name)
        if len(raw) <= _MAX_HARMLESS_BYTES and decode(bytes(raw), object) in (None, *row.unset):
            continue
        other = given.get(row.alias)
        if other is not None and bytes(other) not in (b"null", bytes(raw)):
            first = own_to_sent.get(row.alias, row.alias)
            raise RequestError(f"{first} and {name} have different values; send one.", name)
        given[row.alias] = raw
        own_to_sent[row.alias] = name
    if not own_to_sent:
        return NamedBody(body)
    return NamedBody(msgspec.json.encode(given), own_to_sent)


def _check_object(given: _Raws, node: _FieldNode, where: str, unknown: dict[str, None]) -> None:
    begin = f"{where}." if where else ""
    for name in given.keys() & node.looked_at:
        known, path = node.fields[name], begin + name
        if known.row is not None and known.row.verdict is Verdict.REFUSED:
            _check_refused(path, bytes(given[name]), known.row)
        else:
            _check_value(bytes(given[name]), known, path, unknown)
    if len(unknown) < MAX_LOGGED:
        for name in islice(given.keys() - node.fields.keys(), MAX_LOGGED):
            unknown[_without_indices(begin + name)] = None


def _check_value(raw: bytes, node: _FieldNode, where: str, unknown: dict[str, None]) -> None:
    """Check the objects in a value. The decoder later refuses a value of the wrong type."""
    if raw[:1] == b"{" and node.fields:
        _check_object(decode(raw, _Raws), node, where, unknown)
    elif raw[:1] == b"[" and node.items is not None:
        for index, given in _objects_in(raw):
            if not given.keys() <= node.items.quick:
                _check_object(given, node.items, f"{where}[{index}]", unknown)


def _objects_in(raw: bytes) -> Iterator[tuple[int, _Raws]]:
    try:
        yield from enumerate(msgspec.json.decode(raw, type=list[_Raws]))
    except msgspec.ValidationError:  # Not all items are objects.
        for index, item in enumerate(decode(raw, list[msgspec.Raw])):
            if bytes(item).startswith(b"{"):
                yield index, decode(bytes(item), _Raws)


def _check_refused(path: str, raw: bytes, row: FieldRow) -> None:
    harmless = row.harmless
    nothing = (None,) if any(value is True or value is None for value in harmless) else _NOTHING
    if len(raw) <= _MAX_HARMLESS_BYTES and _is_one_of(decode(raw, object), (*nothing, *harmless)):
        return
    raise RequestError(f"{path} is not supported: {row.note}.", path)


def _is_one_of(value: Any, harmless: Sequence[Any]) -> bool:
    """Return True if `value` is in `harmless`, with its type: in Python 0 == False and 1 == True;
    in JSON they differ.
    """
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless
    )


def _without_indices(path: str) -> str:
    first, *others = path.split("[")
    return first + "".join(f"[]{part.partition(']')[2]}" for part in others)


def log_once(event: str, name: str, value: str) -> None:
    """Log a value that a client sent and the server ignores, once per process."""
    shown = value[:_MAX_NAME_CHARS]
    if (event, shown) not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add((event, shown))
        log.warning("%s: %s=%r (see docs/api.md)", event, name, shown)


@cache
def _tree_of(api: str) -> _FieldNode:
    root = _FieldNode()
    for path, row in rows_of(api).items():
        node = root
        for step in path.split("."):
            name = step.removesuffix("[]")
            node = node.fields.setdefault(name, _FieldNode())
            if step != name:
                node.items = node.items or _FieldNode()
                node = node.items
        node.row = row
    _set_quick(root)
    return root


def _set_quick(node: _FieldNode) -> None:
    for inner in (*node.fields.values(), *filter(None, [node.items])):
        _set_quick(inner)
    node.quick = frozenset(
        name
        for name, inner in node.fields.items()
        if not inner.fields
        and inner.items is None
        and inner.row is not None
        and inner.row.verdict is not Verdict.REFUSED
    )
    node.looked_at = frozenset(node.fields.keys() - node.quick)
