"""Grammars of free texts that clients send, as grammars of JSON strings with these texts.

A tool's call has JSON arguments, so a grammar of its input must describe the text as JSON writes
it: a line break as \\n, a quote as \\". Two characters with one first byte need more than new
terminals. llguidance's lexer takes the longest match and looks one byte ahead, so a terminal such as
/.*/ would keep the backslash of a line break that follows it. Two forms avoid that:

    no rule contains itself     one terminal, made of all rules: as fast as a JSON string
    others                      rules, with each character as a terminal of its own: slower

Both allow exactly the grammar's texts. tokens/grammars checks a client's grammar first, so this
file reads only what llguidance accepts. Values in, values out; independent of tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hadal.tokens.escapes import Forms, GrammarError, StartsWith

SYNTAXES = ("lark", "regex")
MAX_DEFINITION_CHARS = 1 << 16
"""Longest grammar that a client may send."""
_LIBRARY = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": r"[eE][+\-]?[0-9]+",
    "FLOAT": r"[0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SIGNED_FLOAT": (
        r"[+\-]?([0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)"
    ),
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's library, `common`."""
_TOKEN = re.compile(
    r"(?P<skipped>\s+|(?:#|//)[^\n]*|->\s*\w+|%llguidance\s*\{\s*\})"
    r'|(?P<range>"(?:\\.|[^"\\\n])*"\s*\.\.\s*"(?:\\.|[^"\\\n])*")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<many>[\w\s,]*)\))"
    r"|(?P<ignore>%ignore\b)"
    r"|(?P<refused>%\w+|<[^<>\s]+>|@\w+)"
    r"|(?P<begun>[!?]*[A-Za-z_][\w-]*\s*(?P<options>[\[{][^\]}:]*[\]}])?\s*:)"
    r"|(?P<name>[!?]*[A-Za-z_][\w-]*)"
    r"|(?P<other>\{[\d\s,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|.)",
    re.DOTALL,
)
_IGNORED = "%ignore"
PLAIN = "PLAIN"
"""Terminal that is a client's text as it is."""


@dataclass(frozen=True)
class TextGrammar:
    """Grammar of a tool's only argument, a text."""

    name: str
    """Name of the argument."""
    syntax: str
    """One of SYNTAXES."""
    definition: str
    """Grammar of the text, as the client sent it."""
    escaped: str = field(default="", compare=False)
    """Lark grammar of the text as JSON writes it, from `forms_of_text`; "" before it is made."""
    plain: str = field(default="", compare=False)
    """Definition of the terminal PLAIN, which is the text itself; "" if there is none."""


def forms_of_text(syntax: str, definition: str, starts: StartsWith) -> tuple[str, str]:
    """Return the Lark grammar of a text's JSON form, without quotes, and the definition of PLAIN, a
    terminal that is the text itself; "" if a rule contains itself. Raises GrammarError for a part
    that llguidance accepts and that has no such form.
    """
    is_lark = syntax == "lark"
    name_to_parts = _read(definition) if is_lark else {"start": [_Part("regex", definition)]}
    is_split = _contains_itself(name_to_parts)
    start = _name_of("start", is_split=is_split)
    lines = _lines(name_to_parts, Forms(starts, is_split=is_split))
    escaped = "\n".join([f"start: {start}", *lines])
    if is_split:
        return escaped, ""
    lines = _lines(name_to_parts, Forms(starts, is_split=False, is_json=False))
    return escaped, "\n".join([f"{PLAIN}: {start}", *lines])


def _lines(name_to_parts: Mapping[str, Sequence[_Part]], forms: Forms) -> list[str]:
    """Return the definitions of all rules and terminals."""
    lines, is_split = [], forms.is_split
    for name, parts in name_to_parts.items():
        gap = ""
        if _IGNORED in name_to_parts and name.lower() == name != _IGNORED:
            gap = f" {_name_of(_IGNORED, is_split=is_split)}*"
        lines.append(f"{_name_of(name, is_split=is_split)}: {' '.join(_pieces(parts, forms, gap))}")
    return lines


@dataclass(frozen=True)
class _Part:
    """Part of a definition: a text, a pattern, a name or an operator."""

    kind: str
    text: str
    flags: str = ""


def _read(definition: str) -> dict[str, list[_Part]]:
    """Return name -> parts for rules and terminals; `_IGNORED` has those of the ignored ones."""
    name_to_parts: dict[str, list[_Part]] = {}
    parts: list[_Part] = []
    for found in _TOKEN.finditer(definition):
        kind, text = found.lastgroup or "", found[0]
        if found["one"] or found["many"] is not None:
            for name in (found["many"] or found["one"]).replace(",", " ").split():
                library = _Part("regex", _LIBRARY[name])
                name_to_parts[found["alias"] or name] = [library]
        elif found["begun"] is not None:
            if found["options"]:
                raise GrammarError(f"{found['options']} is not supported in a tool's grammar")
            parts = name_to_parts.setdefault(text.strip("!?: \t\r\n"), [])
        elif kind == "ignore":
            parts = name_to_parts.setdefault(_IGNORED, [])
            parts += [_Part("other", "|")] if parts else []
        elif kind == "refused":
            raise GrammarError(f"{text} is not supported in a tool's grammar")
        elif kind != "skipped":
            parts.append(_part_of(kind, text))
    return name_to_parts


def _part_of(kind: str, text: str) -> _Part:
    if kind == "string":
        body, _, flags = text.rpartition('"')
        return _Part(kind, _text_of(f'{body}"'), flags)
    if kind == "range":
        first, last = (
            ord(_text_of(end.strip())) for end in re.split(r'(?<=")\s*\.\.\s*(?=")', text)
        )
        return _Part("regex", f"[\\x{{{first:x}}}-\\x{{{last:x}}}]")
    if kind == "regex":
        body, _, flags = text[1:].rpartition("/")
        return _Part(kind, body.replace("\\/", "/"), flags)
    return _Part(kind, text.lstrip("!?") if kind == "name" else text)


def _text_of(string: str) -> str:
    """Return the text of a Lark string: a JSON string that may contain \\xHH."""
    as_json = re.sub(
        r"\\(?:x([0-9a-fA-F]{2})|(.))",
        lambda found: f"\\u00{found[1]}" if found[1] else found[0],
        string,
    )
    return str(json.loads(as_json))


def _contains_itself(name_to_parts: Mapping[str, Sequence[_Part]]) -> bool:
    """Return True if a rule contains itself, directly or through others."""
    names = {
        name: {part.text for part in parts if part.kind == "name"}
        for name, parts in name_to_parts.items()
    }
    while free := [name for name, needs in names.items() if not needs & names.keys()]:
        for name in free:
            del names[name]
    return bool(names)


def _name_of(name: str, *, is_split: bool) -> str:
    """Return a name that is no name of the client's: a rule's if the form is split, else a
    terminal's.
    """
    if name == _IGNORED:
        return "ignored" if is_split else "IGNORED"
    if is_split:
        return f"rule--{name}" if name.lower() == name else f"terminal--{name.lower()}"
    return f"RULE--{name.upper()}" if name.lower() == name else f"TERMINAL--{name}"


def _pieces(parts: Sequence[_Part], forms: Forms, gap: str) -> Iterator[str]:
    """Yield the pieces of a definition. `gap`: what may follow each terminal in it."""
    before = behind = ""
    """Negation of the next part."""
    ends: list[str] = []
    """Ends of the negations of open brackets."""
    for part in parts:
        if part.kind == "other":
            if part.text in "&~" and forms.is_split:
                raise GrammarError(
                    f"{part.text} is not supported in a tool's grammar with a rule that contains itself"
                )
            if part.text == "~":
                before, behind = forms.negation
                continue
            if part.text in "([":
                ends.append(behind)
            yield before + part.text + (ends.pop() if part.text in ")]" else "")
            before = behind = ""
            continue
        is_rule = part.kind == "name" and part.text.lower() == part.text
        if part.kind == "name":
            form = _name_of(part.text, is_split=forms.is_split)
        elif part.kind == "string":
            form = forms.string(part.text, part.flags)
        else:
            form = forms.regex(part.text, part.flags)
        form, before, behind = before + form + behind, "", ""
        yield f"({form}{gap})" if gap and not is_rule else form
