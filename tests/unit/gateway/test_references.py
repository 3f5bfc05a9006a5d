"""References of every form of JSON Schema 2020-12 resolve as jsonschema resolves them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hadal.core.errors import RequestError
from hadal.gateway.text.references import MAX_REFERRED, resolved
from hadal.gateway.text.schemas import check_schema
from hadal.tokens.grammars import complaint, grammar_text

BOOLEAN = {"type": "boolean"}
ROOT = "https://example.com/root.json"


def asking(ref: str, defs: dict[str, Any], keyword: str = "$ref", **more: Any) -> dict[str, Any]:
    """Return the schema of an object with a property `a` that must match a reference's target."""
    return {
        "$defs": defs,
        "type": "object",
        "properties": {"a": {keyword: ref}},
        "required": ["a"],
        "additionalProperties": False,
        **more,
    }


BOOLEANS = {
    "anchor": asking("#aa", {"A": {"$anchor": "aa", **BOOLEAN}}),
    "pointer": asking("#/$defs/A", {"A": BOOLEAN}),
    "pointer with %": asking("#/$defs/a%20b%25", {"a b%": BOOLEAN}),
    "pointer with ~": asking("#/$defs/a~1b~0c", {"a/b~c": BOOLEAN}),
    "pointer into a list": asking("#/$defs/A/anyOf/1", {"A": {"anyOf": [{}, BOOLEAN]}}),
    "relative id": asking("item", {"A": {"$id": "item", **BOOLEAN}}),
    "relative to the root": asking("item", {"A": {"$id": "item", **BOOLEAN}}, **{"$id": ROOT}),
    "absolute id": asking(ROOT, {"A": {"$id": ROOT, **BOOLEAN}}),
    "the root by its id": asking(f"{ROOT}#/$defs/A", {"A": BOOLEAN}, **{"$id": ROOT}),
    "urn": asking("urn:x:y", {"A": {"$id": "urn:x:y", **BOOLEAN}}),
    "pointer in a resource": asking(
        "item#/$defs/x", {"A": {"$id": "item", "$defs": {"x": BOOLEAN}}}
    ),
    "anchor in a resource": asking(
        "item#x", {"A": {"$id": "item", "$defs": {"q": {"$anchor": "x", **BOOLEAN}}}}
    ),
    "same anchor in two resources": asking(
        "item#x",
        {"A": {"$id": "item", "$defs": {"q": {"$anchor": "x", **BOOLEAN}}}, "B": {"$anchor": "x"}},
    ),
    "reference in a resource": asking(
        "item", {"A": {"$id": "item", "$ref": "#/$defs/q", "$defs": {"q": BOOLEAN}}}
    ),
    "beside others": asking("#aa", {"A": {"$anchor": "aa", "enum": [True, False, 1, "a"]}})
    | {"properties": {"a": {"$ref": "#aa", **BOOLEAN}}},
    "dynamic anchor": asking("#aa", {"A": {"$dynamicAnchor": "aa", **BOOLEAN}}),
    "dynamic reference": asking("#aa", {"A": {"$dynamicAnchor": "aa", **BOOLEAN}}, "$dynamicRef"),
    "dynamic reference to an anchor": asking(
        "#aa", {"A": {"$anchor": "aa", **BOOLEAN}}, "$dynamicRef"
    ),
    "dynamic reference to a pointer": asking("#/$defs/A", {"A": BOOLEAN}, "$dynamicRef"),
    "the way decides": asking(
        "outer",
        {
            "o": {
                "$id": "outer",
                "$ref": "inner",
                "$defs": {"t": {"$dynamicAnchor": "t", **BOOLEAN}},
            },
            "i": {"$id": "inner", "$dynamicRef": "#t", "$defs": {"t": {"$dynamicAnchor": "t"}}},
        },
    ),
}
TREE = {
    "$id": "https://example.com/tree",
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}
STRICT_TREE = {
    "$id": "https://example.com/strict-tree",
    "$dynamicAnchor": "node",
    "$ref": "tree",
    "unevaluatedProperties": False,
    "$defs": {"tree": TREE},
}
"""Example from section 8.2.3.2 of the JSON Schema 2020-12 core specification."""


@pytest.mark.promise("References of every form of JSON Schema 2020-12 are followed")
@pytest.mark.parametrize("name", BOOLEANS)
def test_a_reference_leads_to_its_schema(name: str) -> None:
    schema = BOOLEANS[name]
    followed = check_schema(schema, "a", "p")
    assert complaint(grammar_text(followed, follows_reasoning=False)) is None
    theirs, ours = Draft202012Validator(schema), Draft202012Validator(followed)
    for instance in ({"a": True}, {"a": 1}, {"a": "x"}, {"a": None}, {}, {"a": True, "b": 1}):
        assert ours.is_valid(instance) == theirs.is_valid(instance)
    assert ours.is_valid({"a": True})
    assert not ours.is_valid({"a": "x"})
    assert list(followed["properties"]) == ["a"]


def test_a_tree_is_strict_to_its_leaves() -> None:
    ours = Draft202012Validator(resolved(STRICT_TREE, "a", "p"))
    theirs = Draft202012Validator(STRICT_TREE)
    for instance in ({"children": [{"data": 1}]}, {"children": [{"daat": 1}]}, {"daat": 1}):
        assert ours.is_valid(instance) == theirs.is_valid(instance)
    assert not ours.is_valid({"children": [{"daat": 1}]})


def test_plain_pointers_stay_as_they_are() -> None:
    for schema in (BOOLEANS["pointer"], {"properties": {"a": {"$ref": "#"}}}):
        assert resolved(schema, "a", "p") is schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "http://elsewhere/x"}, "a part of the same schema"),
        (asking("#zz", {"A": {"$anchor": "aa"}}), "a missing anchor 'zz'"),
        (asking("#/$defs/%20", {"A": {}}), "a missing pointer"),
        (
            {
                "$anchor": "a",
                "type": "object",
                "properties": {"b": {"$ref": "#a"}},
                "required": ["b"],
            },
            "itself",
        ),
    ],
)
def test_references_that_cannot_be_followed(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        check_schema(schema, "a", "p")
    assert caught.value.param == "p"


def test_names_of_properties_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"$id": {"type": "string"}, "$ref": {"$ref": "#aa"}}}
    schema |= {"$defs": {"A": {"$anchor": "aa", "enum": [{"$ref": "#x"}]}}}
    followed = resolved(schema, "a", "p")
    assert list(followed["properties"]) == ["$id", "$ref"]
    assert Draft202012Validator(followed).is_valid({"$ref": {"$ref": "#x"}})


def test_ways_are_bounded() -> None:
    """There are 2^n paths through n levels of two resources, each with a dynamic anchor."""
    defs: dict[str, Any] = {}
    for level in range(14):
        for side in "ab":
            uri = f"{side}{level}"
            refs = [{"$ref": f"{each}{level + 1}"} for each in "ab"] if level < 13 else []
            defs[uri] = {"$id": uri, "$defs": {"t": {"$dynamicAnchor": f"t{uri}"}}}
            defs[uri] |= {"anyOf": [*refs, {"$dynamicRef": f"#t{uri}"}]}
    with pytest.raises(RequestError, match=f"more than {MAX_REFERRED}"):
        resolved(asking("a0", defs), "a", "p")
    assert len(json.dumps(defs)) < 1 << 16
