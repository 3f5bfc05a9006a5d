"""Extraction tasks: a short text and a schema in the request; the answer is the text's data as
JSON.

Texts and keys are combined at random, so most pairs occur only once; some wordings are held out.
Independent of HTTP. The sentences are in filling.yaml.
"""

import json
from typing import Any

import msgspec

from evals.frames import Said, Words, load
from evals.wordings import Source
from evals.words import (
    ANIMALS,
    COLOURS,
    FOODS,
    NAMES,
    PLACES,
    THINGS,
    WORDS,
    Turn,
    join_list,
    random_letters,
    with_articles,
)


class Field(msgspec.Struct, frozen=True):
    """Names of a field of a schema, and the kind of its values."""

    keys: Words
    kind: str


class Filling(msgspec.Struct, frozen=True):
    """Contents of filling.yaml."""

    said: Said
    events: Words
    fields: dict[str, Field]
    described: dict[str, str]


_TEXTS = load("filling", Filling)
_FIELDS, _SAID, _DESCRIBED = _TEXTS.fields, _TEXTS.said, _TEXTS.described
_RANGES = {
    "age": (1, 95),
    "amount": (2, 60),
    "price": (2, 900),
    "hour": (1, 12),
    "year": (1850, 2025),
    "pages": (20, 900),
}
_POOLS = {**WORDS, "events": _TEXTS.events}
_TYPES = {**dict.fromkeys(_RANGES, "integer"), "yes": "boolean"}


def _name(source: Source) -> str:
    if source.chance(0.15):
        return random_letters(source, 3, 7).capitalize()
    return source.choice(NAMES)


def _value(source: Source, kind: str) -> Any:
    if kind in _POOLS:
        if kind in ("cities", "things", "counted", "places") and source.chance(0.1):
            word = random_letters(source, 4, 8)
            return word.capitalize() if kind == "cities" else word
        return source.choice(_POOLS[kind])
    if kind == "name":
        return _name(source)
    if kind == "full":
        return f"{_name(source)} {_name(source)}" if source.chance(0.7) else _name(source)
    if kind == "title":
        return " ".join(
            source.choice((*COLOURS, *THINGS, *PLACES, *ANIMALS)).capitalize()
            for _ in range(source.randint(1, 3))
        )
    if kind == "list of things":
        return source.sample((*THINGS, *FOODS), source.randint(2, 4))
    if kind == "list of names":
        return source.sample(NAMES, source.randint(2, 4))
    if kind == "list of numbers":
        return [source.randint(0, 99) for _ in range(source.randint(2, 4))]
    if kind == "yes":
        return source.chance(0.5)
    return source.randint(*_RANGES[kind])


def _written(source: Source, kind: str, value: Any) -> str:
    if isinstance(value, bool):
        return source.choice(("already", "")) if value else "not"
    if isinstance(value, list):
        parts = [str(each) for each in value]
        return ", ".join(parts[:-1]) + f" and {parts[-1]}"
    if kind == "title" and source.chance(0.5):
        mark = source.choice("\"'")
        return f"{mark}{value}{mark}"
    return str(value)


def _property(source: Source, kind: str, value: Any, described: bool) -> dict[str, Any]:
    if isinstance(value, list):
        inner = "integer" if kind == "list of numbers" else "string"
        found: dict[str, Any] = {"type": "array", "items": {"type": inner}}
    else:
        found = {"type": _TYPES.get(kind, "string")}
        if found["type"] == "integer" and source.chance(0.1):
            found["type"] = "number"
    if kind in ("colours", "weekdays") and source.chance(0.2):
        others = [each for each in _POOLS[kind] if each != value]
        found["enum"] = sorted([value, *source.sample(others, source.randint(2, 5))])
    if described and kind in _DESCRIBED:
        found["description"] = source.spelled(_DESCRIBED[kind]).replace(" .", ".")
    return found


_VAGUE = {"date", "when", "location", "total", "years", "home"}
"""Keys that fit more than one kind of value."""


def _key(source: Source, field: str, used: dict[str, str], fields: list[str]) -> str:
    names = list(_FIELDS[field].keys)
    if field not in fields:  # A missing field's key must not fit another value in the text.
        meant = {name for each in fields for name in _FIELDS[each].keys}
        names = [name for name in names if name not in _VAGUE | meant]
    if field in ("pet_name", "title") and {"name", "owner", "author"} & set(fields):
        names = [name for name in names if name != "name"]  # "name" would be ambiguous.
    while True:
        key = source.choice(names)
        if source.chance(0.08):
            first, *rest = key.split("_")
            key = first + "".join(word.capitalize() for word in rest)
        elif source.chance(0.04):
            key = key.capitalize()
        if key not in used:
            return key
        names = [*names, field, f"{field}_2"]


def filling(source: Source) -> Turn:
    """Return a turn with a text and a request for its data as an object. The keys are in a schema or in the
    request.
    """
    text = source.frame(_SAID["texts"]).replace("\\n", "\n")
    fields = [field for field in _FIELDS if f"{{{field}}}" in text]
    values = {field: _value(source, _FIELDS[field].kind) for field in fields}
    written = {
        field: _written(source, _FIELDS[field].kind, value) for field, value in values.items()
    }
    text = with_articles(text.format(**written).replace("  ", " "))
    wanted = [field for field in fields if source.chance(0.85)] or fields[:1]
    source.shuffle(wanted)
    keys: dict[str, str] = {}
    for field in wanted:
        keys[_key(source, field, keys, fields)] = field
    described = source.chance(0.3)
    properties = {
        key: _property(source, _FIELDS[field].kind, values[field], described)
        for key, field in keys.items()
    }
    answer: dict[str, Any] = {key: values[field] for key, field in keys.items()}
    missing = [
        field for field in ("age", "city", "price", "day", "colour", "year") if field not in fields
    ]
    if source.chance(0.12):
        field = source.choice(missing)
        key = _key(source, field, keys, fields)
        kind = _FIELDS[field].kind
        properties[key] = {"type": [_TYPES.get(kind, "string"), "null"]}
        answer[key] = None
    reasoning = "\n".join(f"{key}: {_told(value)}" for key, value in answer.items())
    schema: dict[str, Any] | None = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    key_of_turn = f"fill {text} {list(answer)}"
    if None not in answer.values() and source.chance(0.2):
        said = source.frame(_SAID["with_keys"])
        listed = join_list(source, list(answer)) if source.chance(0.4) else ", ".join(answer)
        request = said.replace("\\n", "\n").format(k=listed, t=text)
        schema = {"type": "object"} if source.chance(0.4) else None
    else:
        request = source.frame(_SAID["requests"]).replace("\\n", "\n").format(t=text)
    written_answer = json.dumps(answer, ensure_ascii=False)
    return Turn(request, reasoning, written_answer, key_of_turn, "schema", schema=schema)


def _told(value: Any) -> str:
    if value is None:
        return "not said"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
