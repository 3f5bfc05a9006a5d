"""Rewrite all references of a JSON schema (2020-12) as plain JSON pointers.

    $id, $anchor, $dynamicAnchor   name schemas                        (core specification, 8.2)
    $ref, $dynamicRef              refer to them, or by a JSON pointer
    after `resolved`               {"$ref": "#/$defs/ref-0"}; unchanged if all were plain pointers

The code that reads a schema then handles one form only. A `$dynamicRef` depends on the resources
that evaluation passed through (its dynamic scope), so a schema may be written several times, once
per scope. Values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from hadal.core.errors import RequestError

MAX_REFERRED = 1000
"""Maximum schemas that one schema's references may lead to, each counted once per dynamic scope."""
_NAMES = ("$id", "$anchor", "$dynamicAnchor")
_OTHER_FORMS = (*_NAMES, "$dynamicRef")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that map names to schemas."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = (
    "items",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "additionalItems",
    "contentSchema",
)
_HOLDERS = ("$defs", "definitions")
"""Maps of schemas that only references use."""

Schema = dict[str, Any]


class _SchemaPlace(NamedTuple):
    """A schema, and the URI of the resource that it is part of."""

    schema: Any
    base: str


class LeadsNowhere(Exception):
    """Raised for a reference to no part of its schema, or for references to too many schemas."""


def resolved(schema: Schema, of: str, param: str) -> Schema:
    """Return the schema with all its references as plain pointers. Raises RequestError if a
    reference leads out of the schema or nowhere; `of` and `param` name the schema in the error.
    """
    if not any(map(_is_other, _dicts(schema))):
        return schema
    try:
        return _SchemaWriter(schema).written()
    except LeadsNowhere as error:
        raise RequestError(f"Invalid schema for {of}: {error}.", param) from None


def _dicts(value: Any) -> Iterator[Schema]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _is_other(part: Schema) -> bool:
    """Return True if a schema has a name, or a reference that is not a plain pointer."""
    if any(isinstance(part.get(name), str) for name in _OTHER_FORMS):
        return True
    ref = part.get("$ref")
    return isinstance(ref, str) and (ref[:2] not in ("#", "#/") or "%" in ref)


class _Names:
    """Names of all schemas within one schema."""

    def __init__(self, root: Schema) -> None:
        self.resources: dict[str, Schema] = {}
        """URI without fragment -> schema."""
        self.anchors: dict[tuple[str, str], _SchemaPlace] = {}
        """(URI of a resource, anchor) -> schema, dynamic anchors included."""
        self.dynamic: set[tuple[str, str]] = set()
        self._bases: dict[int, str] = {}
        """Identity of a schema -> URI of its resource."""
        self.resources[""] = root
        self._read(root, "")
        self.base = self.base_of(root, "")

    def base_of(self, schema: Any, outer: str) -> str:
        """Return the URI of a schema's resource; `outer`: the enclosing schema's URI."""
        return self._bases.get(id(schema), outer)

    def _read(self, schema: Any, base: str) -> None:
        if not isinstance(schema, dict):
            return
        named = schema.get("$id")
        if isinstance(named, str) and not named.startswith("#"):
            base = urldefrag(urljoin(base, named)).url
            self.resources.setdefault(base, schema)
        self._bases[id(schema)] = base
        if isinstance(named, str) and len(named) > 1 and named.startswith("#"):
            # Older drafts name anchors this way.
            self.anchors[base, named[1:]] = _SchemaPlace(schema, base)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self.anchors[base, name] = _SchemaPlace(schema, base)
                if keyword == "$dynamicAnchor":
                    self.dynamic.add((base, name))
        for _, inner in _subschemas(schema):
            self._read(inner, base)

    def find(self, ref: str, base: str) -> tuple[_SchemaPlace, tuple[str, str]]:
        """Return a reference's target, and its resource and fragment. Raises LeadsNowhere."""
        uri, fragment = base, unquote(ref[1:])
        if not ref.startswith("#"):
            uri, encoded = urldefrag(urljoin(base, ref))
            fragment = unquote(encoded)
        if uri not in self.resources:
            raise LeadsNowhere("'$ref' must refer to a part of the same schema")
        if fragment and not fragment.startswith("/"):
            if (uri, fragment) not in self.anchors:
                raise LeadsNowhere(f"'$ref' refers to a missing anchor {fragment[:64]!r}")
            return self.anchors[uri, fragment], (uri, fragment)
        found: Any = self.resources[uri]
        for step in fragment.split("/")[1:]:
            uri = self.base_of(found, uri)
            found = _step(found, step.replace("~1", "/").replace("~0", "~"), fragment)
        return _SchemaPlace(found, self.base_of(found, uri)), (uri, fragment)


def _step(found: Any, name: str, pointer: str) -> Any:
    if isinstance(found, dict) and name in found:
        return found[name]
    if isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
        return found[int(name)]
    raise LeadsNowhere(f"'$ref' refers to a missing pointer {pointer[:64]!r}")


def _subschemas(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yield each direct subschema with the keyword that holds it."""
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            yield from ((keyword, inner) for inner in value.values())
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((keyword, inner) for inner in value)
        elif keyword in _SINGLE:
            yield keyword, value


class _SchemaWriter:
    """Writer of a schema and of the schemas that it refers to, each once per dynamic scope."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._names = _Names(root)
        self._referred: dict[tuple[int, tuple[str, ...]], str] = {}
        self._waiting: list[tuple[str, _SchemaPlace, tuple[str, ...]]] = []

    def written(self) -> Schema:
        """Return the schema with plain pointers."""
        base = self._names.base
        out: Schema = self._schema(_SchemaPlace(self._root, base), (base,))
        definitions: Schema = {}
        while self._waiting:
            name, place, scope = self._waiting.pop()
            definitions[name] = self._schema(place, scope)
        return {**out, "$defs": definitions} if definitions else out

    def _schema(self, place: _SchemaPlace, scope: tuple[str, ...]) -> Any:
        schema, base = place
        if not isinstance(schema, dict):
            return schema
        base = self._names.base_of(schema, base)
        scope = scope if base in scope else (*scope, base)

        def inner(value: Any) -> Any:
            return self._schema(_SchemaPlace(value, base), scope)

        out: Schema = {}
        references: list[Schema] = []
        for keyword, value in schema.items():
            if keyword in _NAMES or keyword in _HOLDERS:
                continue
            if keyword in ("$ref", "$dynamicRef") and isinstance(value, str):
                references.append(self._reference(keyword, value, base, scope))
            elif keyword in MAPS and isinstance(value, dict):
                out[keyword] = {name: inner(each) for name, each in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                out[keyword] = [inner(each) for each in value]
            else:
                out[keyword] = inner(value) if keyword in _SINGLE else value
        if references:
            out["$ref"] = references[0]["$ref"]
        if len(references) > 1:
            out["allOf"] = [*out.get("allOf", ()), *references[1:]]
        return out

    def _reference(self, keyword: str, ref: str, base: str, scope: tuple[str, ...]) -> Schema:
        place, (uri, fragment) = self._names.find(ref, base)
        if keyword == "$dynamicRef" and (uri, fragment) in self._names.dynamic:
            outermost = next((one for one in scope if (one, fragment) in self._names.dynamic), uri)
            place = self._names.anchors[outermost, fragment]
        # Only resources with dynamic anchors change the target of a `$dynamicRef`.
        dynamic = {one for one, _ in self._names.dynamic}
        key = id(place.schema), tuple(one for one in scope if one in dynamic)
        if key not in self._referred:
            if len(self._referred) >= MAX_REFERRED:
                raise LeadsNowhere(f"its references lead to more than {MAX_REFERRED} schemas")
            self._referred[key] = f"ref-{len(self._referred)}"
            self._waiting.append((self._referred[key], place, scope))
        return {"$ref": f"#/$defs/{self._referred[key]}"}
