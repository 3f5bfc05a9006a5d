"""Checks of a JSON schema before a grammar is built: its size, and parts that llguidance would
misread (tokens/grammars checks the rest). Values in, a complaint out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hadal.core.errors import RequestError
from hadal.gateway.text.references import MAPS, resolved
from hadal.tokens.bounds import VALUES

MAX_SCHEMA_BYTES = 1 << 16
MAX_SCHEMA_DEPTH = 64
"""Deepest nesting of objects and lists in a schema; a level of properties counts as two."""
MAX_EXACT = 2**53
"""Largest exact whole number: the grammar engine uses floats, and would round larger ones."""
_NUMBERS = (
    "const",
    "enum",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
"""Keywords with numbers that constrain an answer."""
_NOTES = ("title", "description", "$comment")
"""Keywords with texts for readers, which constrain nothing."""
_IDLE: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("propertyNames", {"type": "string"}),
)
"""Keywords that constrain nothing with these values; zod and others write them."""


def check_schema(schema: dict[str, Any], of: str, param: str) -> dict[str, Any]:
    """Return a schema with all its references as plain pointers. Raises RequestError for an
    unsupported schema; `of` and `param` name it in the error.
    """
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise RequestError(
            f"The schema of {of} nests deeper than {MAX_SCHEMA_DEPTH} levels.", param
        )
    followed = resolved(schema, of, param)
    if (said := _complaint(followed)) is not None:
        raise RequestError(f"Invalid schema for {of}: {said}.", param)
    return followed


def plain(schema: Any, *, is_map: bool = False) -> Any:
    """Return a schema without notes and keywords that constrain nothing; mostly it is far shorter.
    `is_map`: it maps names to schemas instead.
    """
    if isinstance(schema, list):
        return [plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value
        if name in VALUES and not is_map
        else plain(value, is_map=name in MAPS and not is_map)
        for name, value in schema.items()
        if is_map or not _is_idle(name, value)
    }


def _is_idle(keyword: str, value: Any) -> bool:
    """Return True if a keyword with this value constrains nothing."""
    return (isinstance(value, str) and keyword in _NOTES) or (keyword, value) in _IDLE


def is_deeper(value: Any, depth: int) -> bool:
    """Return True if objects and lists nest deeper than `depth`."""
    level = [value]
    for _ in range(depth + 1):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return False
    return True


def _complaint(schema: dict[str, Any]) -> str | None:
    if "x-guidance" in schema:
        return "'x-guidance' is reserved for the server; leave it out"
    for part in _all(schema):
        if not isinstance(part, dict):
            continue
        for name in _NUMBERS:
            if name in part and any(map(_is_rounded, _all(part[name]))):
                return f"{name!r} contains a whole number beyond 2^53, which would be rounded"
        if _may_repeat(part):
            return (
                "'minProperties' above the number of 'required' needs 'additionalProperties': false"
            )
    if not _Finite(schema).of(schema):
        return "no text can satisfy the schema, because a required part contains itself"
    return None


def _may_repeat(part: dict[str, Any]) -> bool:
    """Return True if an object could meet `minProperties` with repeated names: unlisted names may
    be given twice.
    """
    least, required = part.get("minProperties"), part.get("required")
    is_open = part.get("additionalProperties") is not False or "patternProperties" in part
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(least, int) and is_open and least > num_required + 1


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _all(value: Any) -> Iterator[Any]:
    """Yield the value and all values inside it."""
    waiting = [value]
    while waiting:
        yield (one := waiting.pop())
        waiting.extend(_inner(one))


def _is_rounded(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > MAX_EXACT


def _references_in(value: Any) -> Iterator[str]:
    for part in _all(value):
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            yield part["$ref"]


class _Finite:
    """Finder of the parts of a schema that some finite text satisfies, considering self-references
    only. Computes a least fixed point, starting with no reference satisfiable.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._has_end = dict.fromkeys(self._references(), False)
        is_changing = True
        while is_changing:
            is_changing = False
            for ref, has_end in self._has_end.items():
                if not has_end and self.of(self._resolved(ref)):
                    self._has_end[ref] = is_changing = True

    def _references(self) -> list[str]:
        """Return all references, each after the references in its target. In this order one pass
        suffices, unless references form circles.
        """
        ordered: dict[str, None] = {}
        seen: set[str] = set()
        waiting = [(ref, False) for ref in _references_in(self._root)]
        while waiting:
            ref, is_done = waiting.pop()
            if is_done:
                ordered[ref] = None
            elif ref not in seen:
                seen.add(ref)
                waiting.append((ref, True))
                waiting += [(each, False) for each in _references_in(self._resolved(ref))]
        return list(ordered)

    def of(self, part: Any) -> bool:
        """Return True if a finite text satisfies this part."""
        if not isinstance(part, dict):
            return True
        alternatives = [
            many for name in ("anyOf", "oneOf") if isinstance(many := part.get(name), list)
        ]
        wanted = part["allOf"] if isinstance(part.get("allOf"), list) else []
        return (
            self._has_end.get(str(part.get("$ref")), True)
            and all(any(map(self.of, many)) for many in alternatives if many)
            and all(map(self.of, wanted))
            and all(map(self.of, self._needed(part)))
        )

    def _needed(self, part: dict[str, Any]) -> Iterator[Any]:
        """Yield the parts that every text of this part must contain."""
        if part.get("type") in ("object", ["object"]) and isinstance(part.get("required"), list):
            properties = part.get("properties")
            for name in part["required"]:
                known = properties if isinstance(properties, dict) else {}
                yield known.get(str(name), part.get("additionalProperties"))
        least = part.get("minItems")
        if part.get("type") in ("array", ["array"]) and isinstance(least, int):
            first = part.get("prefixItems")
            first = first if isinstance(first, list) else []
            yield from first[:least]
            if least > len(first):
                yield part.get("items")

    def _resolved(self, ref: str) -> Any:
        """Return the target of a reference within the schema; None for invalid references."""
        if not ref.startswith("#"):
            return None
        found: Any = self._root
        for step in ref[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict):
                found = found.get(name)
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found
