"""Grammar rules of calls in DSML: an object's schema as one tag per parameter.

    {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
    <｜DSML｜parameter name="city" string="true">any text</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">JSON</｜DSML｜parameter>     may be missing

A text's `enum`, `const`, `pattern`, `minLength` and `maxLength` are followed as plain text. A text
with other keywords is JSON with string="false"; if the tool is not strict, its `format` is left out
instead, because models write such texts plainly. An object with keywords beyond `properties`, `required`
and `additionalProperties` is one JSON object in the call, without parameters. The reader accepts
all of these. Schemas in, rules out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hadal.tokens.grammars import AnyText, Json, OneOf, Part, Repeated
from hadal.tokens.lark import TextGrammar

MARK = "｜DSML｜"
_NOTES = {
    *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly"),
    *("writeOnly", "$schema"),
}
"""Keywords that constrain nothing."""
_OBJECT = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
} | _NOTES
_REFERRED = ("#/$defs/", "#/definitions/")
_NO_TEXT = ["object", "array", "number", "integer", "boolean", "null"]
_ODD = re.compile(r'["<>\n]|' + MARK)
"""Parts that a parameter's name cannot have."""
_MAX_LEAST, _MAX_MOST = 2_000, 10_000
"""Largest `minLength` and `maxLength` that are followed in plain text."""
_MAX_NAME = 256
"""Longest name of a parameter: a reader takes a longer tag for text (gateway/text/dsml_reader)."""
_SAME = {"/": r"\/", r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
"""Part of a JSON schema's pattern -> its form in a grammar, where classes are not of ASCII alone."""
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""Character of a pattern, escape, or class of characters."""


@dataclass(frozen=True)
class Tags:
    """Tags of one model's form."""

    mark: int | None
    """Id of the mark's token; None: the tokenizer has none."""
    gap: str
    """Space after the mark."""
    is_strict: bool = True
    """False: `format` of a text is left out."""

    def begin(self, text: str) -> tuple[Part, ...]:
        """Return an opening tag that continues with `text` after the mark."""
        return self._tag("<", self.gap + text)

    def end(self, text: str) -> tuple[Part, ...]:
        """Return a closing tag that continues with `text` after the mark."""
        return self._tag("</", self.gap + text)

    def text_to_end(
        self,
        text: str,
        least: int = 0,
        most: int | None = None,
        pattern: str = "",
        grammar: TextGrammar | None = None,
    ) -> tuple[Part, ...]:
        """Return a plain text of `least` to `most` characters and the closing tag after it."""
        before, *rest = self.end(text)
        if self.mark is None:
            before, rest = f"</{MARK}", [self.gap + text]
        return (AnyText(MARK, str(before), least, most, pattern=pattern, grammar=grammar), *rest)

    def _tag(self, before: str, behind: str) -> tuple[Part, ...]:
        if self.mark is None:
            return (before + MARK + behind,)
        return (before, self.mark, behind)


def parameters(schema: dict[str, Any] | TextGrammar, tags: Tags) -> tuple[Part, ...]:
    """Return the rules for arguments that follow an object's schema, or the grammar of the only
    argument.
    """
    if isinstance(schema, TextGrammar):
        return _input(schema, tags)
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    more = schema.get("additionalProperties", True)
    if not _is_plain(schema, properties, required):
        return (Json(schema), "\n")
    parts: list[Part] = []
    for name, value in properties.items():
        if value is False and name not in required:
            continue
        tag = _parameter((name,), value, schema, tags)
        parts += [tag] if name in required else [Repeated((tag,), 1)]
    if more is not False:
        parts.append(Repeated((_parameter(tuple(properties), more, schema, tags, is_other=True),)))
    return tuple(parts)


def _input(grammar: TextGrammar, tags: Tags) -> tuple[Part, ...]:
    """Return the rules for one plain text of a client's grammar. A grammar in which a rule contains
    itself is followed in its JSON form only.
    """
    if not grammar.plain:
        return (Json(grammar), "\n")
    text = tags.text_to_end("parameter>\n", grammar=grammar)
    return (*tags.begin(f'parameter name="{grammar.name}" string="true">'), *text)


def _is_plain(schema: dict[str, Any], properties: Any, required: Any) -> bool:
    """Return True if parameters can express the schema."""
    if not (set(schema) <= _OBJECT and schema.get("type", "object") == "object"):
        return False
    if any(_ODD.search(name) or len(name) > _MAX_NAME for name in properties):
        return False
    if any(properties.get(name, False) is False for name in required):
        return False
    shown = {key: value for key, value in schema.items() if key not in _NOTES}
    return all(reference.startswith(_REFERRED) for reference in _references(shown))


def _references(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _parameter(
    names: tuple[str, ...],
    value: Any,
    whole: dict[str, Any],
    tags: Tags,
    *,
    is_other: bool = False,
) -> Part:
    """Return the tag of a parameter with this name, or with a name other than all of these
    (`is_other`), and with a value of this schema. `whole`: the schema of all parameters.
    """
    texts, rest = _split({} if value is True else value, whole, tags)
    name: Part = AnyText(MARK, '"', 1, 64, bars='"<>\n', without=names) if is_other else names[0]
    quote = "" if is_other else '"'  # The pattern of an unknown name includes its quotation mark.
    options: list[tuple[Part, ...]] = [(f'{quote} string="true">', *text) for text in texts]
    if rest is not None:
        options.append((f'{quote} string="false">', Json(_rooted(rest, whole)), *_closing(tags)))
    begin = tags.begin('parameter name="')
    return OneOf(((*begin, name, OneOf(tuple(options))),))


def _closing(tags: Tags) -> tuple[Part, ...]:
    return tags.end("parameter>\n")


def _rooted(value: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with the definitions that its references need."""
    if not any(_references(value)):
        return value
    return {**value, **{key: whole[key] for key in ("$defs", "definitions") if key in whole}}


def _split(
    value: dict[str, Any], whole: dict[str, Any], tags: Tags, depth: int = 0
) -> tuple[list[tuple[Part, ...]], dict[str, Any] | None]:
    """Return the plain texts that the schema allows, each with its closing tag, and the schema of
    its other values; None if it has no others.
    """
    keys = set(value) - _NOTES - (set() if tags.is_strict else {"format"})
    kinds = value.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not keys:
        return [tags.text_to_end("parameter>\n")], {"type": _NO_TEXT}
    if keys == {"$ref"} and depth < 8:
        target = _target(value["$ref"], whole)
        if isinstance(target, dict):
            texts, rest = _split(target, whole, tags, depth + 1)
            return (texts, rest) if texts else ([], value)
    # The check refuses a "oneOf" with a value that matches two schemas, so it equals "anyOf" here.
    options = value.get("anyOf", value.get("oneOf")) if len(keys) == 1 and depth < 8 else None
    if options is not None and all(isinstance(each, dict) for each in options):
        split = [_split(each, whole, tags, depth + 1) for each in options]
        others = [rest for _, rest in split if rest is not None]
        return [text for texts, _ in split for text in texts], {"anyOf": others} if others else None
    if keys and keys <= {"type", "enum", "const"} and keys & {"enum", "const"}:
        return _split_values(value, kinds, tags)
    least, most = value.get("minLength", 0), value.get("maxLength")
    pattern = _whole_pattern(value.get("pattern", ""))
    if (
        kinds is not None
        and "string" in kinds
        and keys <= {"type", "minLength", "maxLength", "pattern"}
        and pattern is not None
        and 0 <= least <= min(_MAX_LEAST, _MAX_MOST if most is None else most)
        and (most is None or most <= _MAX_MOST)
    ):
        left = [kind for kind in kinds if kind != "string"]
        text = tags.text_to_end("parameter>\n", least, most, pattern)
        return [text], {"type": left} if left else None
    return [], value


def _whole_pattern(pattern: str) -> str | None:
    """Return the pattern of all texts that contain a match of `pattern`; "" for all texts, None if
    the pattern has anchors within.
    """
    atoms = _ATOM.findall(pattern)
    before = behind = "(?s:.*)"
    if atoms[:1] == ["^"]:
        before, atoms = "", atoms[1:]
    if atoms[-1:] == ["$"]:
        behind, atoms = "", atoms[:-1]
    depth = 0
    for atom in atoms:
        depth += (atom == "(") - (atom == ")")
        is_split = atom == "|" and not depth and not (before and behind)
        if atom in ("^", "$") or is_split:
            return None
    inner = re.sub(
        r"\\.|/", lambda found: _SAME.get(found[0], found[0]), "".join(atoms), flags=re.DOTALL
    )
    return f"{before}(?:{inner}){behind}".replace("\n", "\\n") if pattern else ""


def _split_values(
    value: dict[str, Any], kinds: list[str] | None, tags: Tags
) -> tuple[list[tuple[Part, ...]], dict[str, Any] | None]:
    """Split a schema that lists its values."""
    values = value["enum"] if "enum" in value else [value["const"]]
    if "enum" in value and "const" in value:
        return [], value
    texts = [each for each in values if isinstance(each, str) and MARK not in each]
    others = [each for each in values if each not in texts]
    rest = {**value, "enum": others}
    rest.pop("const", None)
    allowed = texts if kinds is None or "string" in kinds else []
    # One text with its ending: a longer value may begin with a shorter one and its ending.
    first, *end = _closing(tags)
    has_rest = bool(others) and kinds != ["string"]
    return [(f"{each}{first}", *end) for each in allowed], rest if has_rest else None


def _target(reference: str, whole: dict[str, Any]) -> Any:
    """Return the schema that a plain pointer leads to; None if it leads nowhere."""
    found: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found
