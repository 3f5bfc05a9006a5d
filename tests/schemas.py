"""JSON schemas that constrain answers in tests, by name. None: any JSON object."""

from __future__ import annotations

from typing import Any

STRING, INTEGER = {"type": "string"}, {"type": "integer"}


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any] | None] = {
    "any": None,
    "flat": closed(name={"type": "string", "maxLength": 8}, age={"type": "integer", "minimum": 0}),
    "enum": {"enum": ["red", "green", "blue", 7, None]},
    "const": closed(kind={"const": "point"}, x={"const": 3}),
    "integer": {"type": "integer", "minimum": -50, "maximum": 300},
    "number": closed(value={"type": "number", "minimum": 0, "exclusiveMaximum": 10}),
    "multiple": closed(value={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 90}),
    "boolean": closed(a={"type": "boolean"}, b={"type": "null"}),
    "types": closed(a={"type": ["integer", "null"]}, b={"type": ["boolean", "string"]}),
    "order": closed(
        item=STRING,
        count=INTEGER,
        tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        paid={"type": "boolean"},
    ),
    "list": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False},
    "nested": closed(a=closed(b=closed(c={"type": "boolean"}))),
    "optional": {
        "type": "object",
        "properties": {"a": INTEGER, "b": {"type": "boolean"}, "c": {"enum": ["x"]}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "extra": {
        "type": "object",
        "properties": {"a": INTEGER},
        "additionalProperties": {"type": "boolean"},
    },
    "names": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": INTEGER},
        "additionalProperties": False,
    },
    "union": {"anyOf": [INTEGER, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    "tagged": {
        "anyOf": [
            closed(kind={"const": "a"}, value=INTEGER),
            closed(kind={"const": "b"}, value={"type": "boolean"}),
        ]
    },
    "both": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "tree": {
        "$defs": {
            "node": closed(
                leaf={"type": "boolean"},
                inner={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            )
        },
        "$ref": "#/$defs/node",
    },
    "pattern": closed(code={"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,3}$"}),
    "length": closed(word={"type": "string", "minLength": 2, "maxLength": 5}),
    "date": closed(day={"type": "string", "format": "date"}),
    "uuid": closed(id={"type": "string", "format": "uuid"}),
    "few": {
        "type": "object",
        "additionalProperties": INTEGER,
        "maxProperties": 2,
        "minProperties": 1,
    },
    "anything": {},
}
