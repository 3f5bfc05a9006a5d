"""Schemas that the grammar engine would misread, or that nest too deep, are refused with the reason;
other schemas pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.errors import RequestError
from hadal.gateway.text import schemas
from hadal.gateway.text.schemas import MAX_SCHEMA_DEPTH, check_schema
from tests.schemas import SCHEMAS

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
TEXT = {"type": "string"}


def deep(levels: int) -> dict[str, Any]:
    return {"items": deep(levels - 1)} if levels else {}


def wide(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": fields}}}


@pytest.mark.promise(
    "A schema of more than 64 KiB or 64 levels, or one that takes more than 0.25 s of "
    "a core to check, is a 400, too."
)
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"x-guidance": {}}, "is reserved for the server"),
        (deep(MAX_SCHEMA_DEPTH + 1), "deeper"),
        (wide(const=2**53 + 1), "'const'"),
        (wide(enum=["a", {"id": [1234567890123456789]}]), "'enum'"),
        (wide(minimum=-(2**60)), "'minimum'"),
        (wide(exclusiveMaximum=2**54), "'exclusiveMaximum'"),
        (wide(multipleOf=10**20), "'multipleOf'"),
        (wide(type="object", minProperties=2), "'minProperties'"),
        (wide(type="object", minProperties=3, required=["a"], properties={"a": {}}), "'minPro"),
        (NODE, "contains itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": NODE}},
            "contains itself",
        ),
        (
            {
                "$defs": {"l": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/l"}}},
                "anyOf": [{"$ref": "#/$defs/l"}, {"allOf": [{}, NODE]}],
            },
            "contains itself",
        ),
    ],
)
def test_what_would_be_taken_for_something_else(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        check_schema(schema, "a", "p")
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    "schema",
    [
        *[schema for schema in SCHEMAS.values() if schema is not None],
        deep(MAX_SCHEMA_DEPTH - 1),
        wide(enum=[2**53, -(2**53), True, 1e300]),
        wide(default=10**30, examples=[10**30]),
        wide(type="object", minProperties=1),
        wide(type="object", minProperties=2, required=["a"], properties={"a": {}}),
        wide(
            type="object",
            minProperties=2,
            properties={"a": {}, "b": {}},
            additionalProperties=False,
        ),
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, TEXT]}}}
        | {"required": ["next"]},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "items": {"$ref": "#"}, "prefixItems": [TEXT], "minItems": 1},
    ],
)
def test_what_can_be_followed_passes(schema: dict[str, Any]) -> None:
    check_schema(schema, "a", "p")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_chain_of_references_takes_two_passes(
    monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    """Each pass would resolve one reference in the worst order: 88 KB took 3 s of a core."""
    num, asked = 300, 0
    plain = schemas._Finite.of

    def of(finite: Any, part: Any) -> bool:
        nonlocal asked
        asked += 1
        return plain(finite, part)

    monkeypatch.setattr(schemas._Finite, "of", of)
    names = sorted((f"a{at:03}" for at in range(num)), reverse=is_reversed)
    links = {name: {"$ref": f"#/$defs/a{int(name[1:]) + 1:03}"} for name in names}
    end: dict[str, Any] = {f"a{num:03}": TEXT}
    check_schema({"$ref": "#/$defs/a000", "$defs": {**links, **end}}, "of", "field")
    assert asked <= 3 * num
    circle = {f"a{num:03}": {"$ref": "#/$defs/a000"}}
    with pytest.raises(RequestError, match="contains itself"):
        check_schema({"$ref": "#/$defs/a000", "$defs": {**links, **circle}}, "of", "field")
