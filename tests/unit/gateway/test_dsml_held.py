"""Calls in DSML that a grammar constrains: any tokens that a model draws are calls of the offered
tools, with arguments of their schemas. Requests go through the service, as a client's do.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import jsonschema
import numpy as np
import pytest

from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.errors import RequestError
from hadal.core.messages.generation import Token
from hadal.core.plans import Grammar
from hadal.gateway.api.responses.request import parse_response, read_response
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import Choice, ServedModel, Service
from hadal.gateway.text.asks import SamplingDefaults
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.dsml import FORMS, V4, V32, Dsml
from hadal.gateway.text.dsml_chats import template_of
from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.roles.front.names import FrontNames
from hadal.tokens.grammars import Follower, Grammars, TextRows
from tests.schemas import SCHEMAS, closed

from .dsml_replies import SPELLED, TOKEN, written
from .test_tools import EOS

MAX_TOKENS = 700
TEXT = {"type": "string"}
MORE: dict[str, dict[str, Any]] = {
    "texts": closed(
        a=TEXT,
        b={"type": "string", "minLength": 2, "maxLength": 4},
        c={"enum": ["a", "a<", 'a"', 1, None]},
        d={"const": "é\n"},
        e={"type": ["string", "integer"]},
        f={"anyOf": [{"enum": ["x"]}, {"type": "boolean"}, {"type": "null"}]},
    ),
    "as_json": closed(
        a={"type": "string", "pattern": "^[ab]{2}$"}, b={"type": "string", "format": "date"}
    ),
    "patterns": closed(
        a={"type": "string", "pattern": "^[a/]{2,3}$"},
        b={"type": "string", "pattern": "x\\/y|z"},
        c={"type": "string", "pattern": "^a|b$"},
        d={"type": "string", "pattern": "[^a-z]$", "maxLength": 4},
    ),
    "open": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "extra": {"type": "object", "additionalProperties": {"type": "integer"}},
    "optional": {
        "type": "object",
        "properties": {"a": TEXT, "b": {"type": "number"}, "ab": {}},
        "additionalProperties": False,
    },
    "referring": {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/t"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"t": TEXT, "n": {"type": "integer"}},
    },
    "of_itself": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "next": {"$ref": "#"}},
        "additionalProperties": False,
    },
    "odd_names": {
        "type": "object",
        "properties": {'a"b': {"type": "integer"}, MARK: {"type": "integer"}},
        "required": ['a"b'],
        "additionalProperties": False,
    },
    "counted": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "minProperties": 1,
    },
}
OBJECTS = {
    **{name: each for name, each in SCHEMAS.items() if (each or {}).get("type") == "object"},
    **MORE,
}
PLAIN_ARGUMENTS = {"type": "object"}


@contextmanager
def service_of(form: Dsml, vocabulary: Vocabulary) -> Iterator[Service]:
    """Yield a service of a model with this form and vocabulary."""
    with closing(ChatFormat(vocabulary, {"default": template_of(form)}, {}, "here")) as chat:
        model = ServedModel(
            name="small",
            vocabulary=vocabulary,
            chat=chat,
            context_tokens=1 << 17,
            vocab_size=len(vocabulary),
            eos_ids=(vocabulary.control_ids[EOS],),
            sampling=SamplingDefaults(),
        )
        service = Service(model, LimitsConfig(), FrontNames(CacheConfig(), "f0"))
        try:
            yield service
        finally:
            service.close()


def asked(service: Service, tools: Sequence[dict[str, Any]], **more: Any) -> Choice:
    """Return the reply of a request with these tools."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    tenant = Tenant(salt_of(b"key"))
    work = asyncio.run(service.chat(json.dumps({**body, **more}).encode(), "r", tenant))
    return work.choices[0]


def tool(name: str, schema: dict[str, Any] | None, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "parameters": schema, "strict": strict}
    return {"type": "function", "function": function}


class Drawer:
    """Drawer of allowed tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.end = vocabulary.control_ids[EOS]
        self._grammars = Grammars(lambda: vocabulary.table, len(vocabulary))
        self._liked = {*b'"}]<>/\n', self.end, *range(256, len(vocabulary))}
        self._size = len(vocabulary)

    def allowed(self, follower: Follower) -> set[int]:
        bits = np.zeros((1, self._grammars.num_words), np.uint32)
        has_mask = np.zeros(1, np.bool_)
        self._grammars.allow([TextRows(follower, 0, ())], bits, has_mask)
        if not has_mask[0]:
            return set(range(self._size))
        return set(np.unpackbits(bits.view(np.uint8), bitorder="little").nonzero()[0].tolist())

    def drawn(self, grammar: Grammar, rng: random.Random, begin: Sequence[int]) -> list[int]:
        """Return allowed tokens, `begin` first; the last is the end if the reply ended."""
        follower, tokens = Follower(grammar, []), list[int]()
        while len(tokens) < MAX_TOKENS and self.end not in tokens:
            row = self.allowed(follower)
            assert row, f"{tokens}: {follower.error}"
            if len(tokens) < len(begin):
                token = begin[len(tokens)]
                assert token in row, f"{bytes(t for t in begin if t < 256)!r} at {len(tokens)}"
            else:
                liked = sorted(row & self._liked)
                token = rng.choice(liked if liked and rng.random() < 0.6 else sorted(row))
            tokens.append(token)
            follower.advance([token])
        return tokens


def read(choice: Choice, tokens: Sequence[int], end: int) -> tuple[str, list[list[str]], str]:
    """Return content, calls and finish of a reply, as a client adds them up."""
    piece = choice.assembler.push(
        Token("r", 0, i, token, "stop" if token == end else None) for i, token in enumerate(tokens)
    )
    piece.add(choice.assembler.end("length"))
    calls: list[list[str]] = []
    for delta in piece.calls:
        if delta.id:
            calls.append([delta.name, delta.arguments])
        else:
            calls[-1][1] += delta.arguments
    return piece.content, calls, piece.finish or ""


VOCABULARIES = pytest.mark.parametrize("vocabulary", [TOKEN, SPELLED], ids=["token", "spelled"])
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@pytest.mark.promise("A call in DSML is held to its schema from its mark on")
@VOCABULARIES
@EACH_FORM
def test_calls_are_right_whatever_is_drawn(form: Dsml, vocabulary: Vocabulary) -> None:
    drawer, num_calls, num_ended = Drawer(vocabulary), 0, 0
    with service_of(form, vocabulary) as service:
        for seed, name in enumerate(OBJECTS):
            rng = random.Random(seed)
            tools = [tool("first", OBJECTS[name]), tool("other", OBJECTS[name], False)]
            schemas = {"first": OBJECTS[name], "other": PLAIN_ARGUMENTS}
            is_auto = seed % 3 == 0
            named = {"type": "function", "function": {"name": "first"}}
            choice = ["auto", "required", named][seed % 3]
            thinks = rng.random() < 0.5
            reply = asked(
                service,
                tools,
                tool_choice=choice,
                thinking={"type": "enabled" if thinks else "disabled"},
            )
            grammar = reply.generation.sampling.grammar
            assert grammar is not None
            begin = [*b"hm", vocabulary.control_ids["</think>"]] if thinks else []
            if is_auto:
                begin += vocabulary.encode_controlled(f"So:\n\n<{MARK}")
            tokens = drawer.drawn(grammar, rng, begin)
            content, calls, finish = read(reply, tokens, drawer.end)
            is_whole = tokens[-1] == drawer.end
            for called, arguments in calls if is_whole else calls[:-1]:
                jsonschema.validate(json.loads(arguments), schemas[called])
                num_calls += 1
            assert MARK not in content
            assert content.strip() in ("", "So:")
            num_ended += is_whole
            if is_whole:
                assert calls
                assert finish == "tool_calls"
    assert num_calls >= len(OBJECTS) / 2
    assert num_ended >= len(OBJECTS) / 2


@VOCABULARIES
@EACH_FORM
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_models_write_is_allowed_as_they_write_it(
    form: Dsml, vocabulary: Vocabulary, choice: str
) -> None:
    """The grammar changes nothing for a model that writes correct calls by itself."""
    schema = closed(name=TEXT, size={"type": "integer"}, more={"type": "array", "items": TEXT})
    text = written(
        form,
        ("city", {"name": 'a < "b"\n</b>', "size": 7, "more": ["x", "y"]}),
        ("time", {"any": "thing", "z": [1.5]}),
        ("none", {}),
    )
    if form is not V4:  # Calls without parameters have an empty line.
        text = text.replace('name="none">\n', 'name="none">\n\n')
    with service_of(form, vocabulary) as service:
        tools = [tool("city", schema), tool("time", None, False), tool("none", closed())]
        reply = asked(service, tools, tool_choice=choice, thinking={"type": "disabled"})
        grammar = reply.generation.sampling.grammar
        assert grammar is not None
        said = "Let me see." if choice == "auto" else ""
        drawer = Drawer(vocabulary)
        tokens = [*vocabulary.encode_controlled(said + text), drawer.end]
        assert drawer.drawn(grammar, random.Random(0), tokens) == tokens
        content, calls, finish = read(reply, tokens, drawer.end)
    assert (content, finish) == (said, "tool_calls")
    assert [name for name, _ in calls] == ["city", "time", "none"]


@VOCABULARIES
@EACH_FORM
def test_the_input_of_a_custom_tool_is_plain_text_of_its_grammar(
    form: Dsml, vocabulary: Vocabulary
) -> None:
    """A grammar in which a rule contains itself is followed too, in the JSON form of the text."""
    lines = "start: LINE (LF LINE)*\nLINE: /[a<\\/]+/\n%import common.LF"
    pairs = 'start: "a" | "<" start "/"'
    is_allowed = {
        "lines": re.compile(r"[a</]+(\n[a</]+)*").fullmatch,
        "pairs": lambda text: text == "<" * (len(text) // 2) + "a" + "/" * (len(text) // 2),
    }
    drawer, num_calls = Drawer(vocabulary), {"lines": 0, "pairs": 0}
    with service_of(form, vocabulary) as service:
        for seed in range(12):
            tools = [custom("lines", lines), custom("pairs", pairs)]
            is_auto = seed % 3 == 0
            reply = responded(service, tools, "auto" if is_auto else "required")
            grammar = reply.generation.sampling.grammar
            assert grammar is not None
            begin = vocabulary.encode_controlled(f"So:\n\n<{MARK}") if is_auto else []
            tokens = drawer.drawn(grammar, random.Random(seed), begin)
            content, calls, _ = read(reply, tokens, drawer.end)
            is_whole = tokens[-1] == drawer.end
            for called, arguments in calls if is_whole else calls[:-1]:
                text = json.loads(arguments)["input"]
                assert is_allowed[called](text), (called, text)
                num_calls[called] += 1
            assert MARK not in content
        plain = written(form, ("lines", {"input": "a</aa/\n</<"}))
        grammar = responded(
            service, [custom("lines", lines)], "required"
        ).generation.sampling.grammar
        assert grammar is not None
        tokens = [*vocabulary.encode_controlled(plain), drawer.end]
        assert drawer.drawn(grammar, random.Random(0), tokens) == tokens
    assert all(num_calls.values()), num_calls


def custom(name: str, definition: str) -> dict[str, Any]:
    format = {"type": "grammar", "syntax": "lark", "definition": definition}
    return {"type": "custom", "name": name, "format": format}


def responded(service: Service, tools: Sequence[dict[str, Any]], choice: str) -> Choice:
    """Return the reply to a request of /v1/responses with these tools."""
    body = {"model": "small", "input": "hi", "tools": tools, "tool_choice": choice}
    asked = parse_response(
        read_response(json.dumps({**body, "thinking": False}).encode()), known={}
    )
    tenant = Tenant(salt_of(b"key"))
    work = asyncio.run(service.chat(b"", "r", tenant, lambda _: asked.after(()), 0))
    return work.choices[0]


def allows(service: Service, offered: dict[str, Any], text: str) -> bool:
    """Return True if a required call of the tool may be written so."""
    reply = asked(service, [offered], tool_choice="required", thinking={"type": "disabled"})
    grammar = reply.generation.sampling.grammar
    assert grammar is not None
    follower, drawer = Follower(grammar, []), Drawer(TOKEN)
    for token in TOKEN.encode_controlled(text):
        if token not in drawer.allowed(follower):
            return False
        follower.advance([token])
    return True


@EACH_FORM
def test_a_text_with_a_format_stays_plain_unless_its_tool_is_strict(form: Dsml) -> None:
    schema = closed(url={"type": "string", "format": "uri", "description": "where"})
    plain = written(form, ("f", {"url": "https://a.example/b?c=d"}))
    with service_of(form, TOKEN) as service:
        for strict in (False, True):
            assert allows(service, tool("f", schema, strict), plain) != strict


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": r"^\d+$"}, ["7"], ["٣"]),
        ({"pattern": r"^[\w.-]\W\D$"}, ["a-b", "-éé"], ["é-b", "a-3"]),
        ({"pattern": "^(a|b/)[$|^]$"}, ["a|", "b/$"], ["c|", "ac"]),
        ({"pattern": "(?:a|^b)c"}, [], ["ac"]),
        ({"minLength": 2000}, ["x" * 2000], ["x"]),
        ({"minLength": 5000}, [], ["x"]),
        ({"minLength": 9000, "maxLength": 20_000}, [], ["x"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_plain_text_follows_its_keywords_as_json_does(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Keywords that plain text cannot follow make JSON. Classes of characters are ASCII in both."""
    text = {"type": "string", **schema}
    offered = tool("f", closed(a={"oneOf": [text, {"type": "null"}]} if good else text))
    with service_of(V32, TOKEN) as service:
        for text in (*good, *bad):
            assert allows(service, offered, written(V32, ("f", {"a": text}))) == (text in good)


@pytest.mark.parametrize("length", [250, 500])
def test_every_name_that_a_call_may_have_is_read(length: int) -> None:
    schema = closed(**{"n" * length: {"enum": [1]}})
    drawer = Drawer(TOKEN)
    with service_of(V32, TOKEN) as service:
        reply = asked(
            service, [tool("f", schema)], tool_choice="required", thinking={"type": "disabled"}
        )
        grammar = reply.generation.sampling.grammar
        assert grammar is not None
        for seed in range(20):
            tokens = drawer.drawn(grammar, random.Random(seed), [])
            if tokens[-1] == drawer.end:
                break
        _, calls, finish = read(reply, tokens, drawer.end)
    assert finish == "tool_calls"
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), schema)


@VOCABULARIES
def test_a_free_reply_may_have_no_calls(vocabulary: Vocabulary) -> None:
    with service_of(V32, vocabulary) as service:
        reply = asked(service, [tool("f", closed(a=TEXT))], thinking={"type": "disabled"})
        grammar = reply.generation.sampling.grammar
        assert grammar is not None
        drawer = Drawer(vocabulary)
        tokens = [*b"1 < 2, </b>.\n\n", drawer.end]
        assert drawer.drawn(grammar, random.Random(0), tokens) == tokens
        assert read(reply, tokens, drawer.end) == ("1 < 2, </b>.\n\n", [], "stop")


def test_a_required_call_is_barred_from_the_reasoning() -> None:
    with service_of(V32, TOKEN) as service:
        tools = [tool("f", closed(a=TEXT))]
        reply = asked(service, tools, tool_choice="required", thinking={"type": "enabled"})
    grammar = reply.generation.sampling.grammar
    assert grammar is not None
    row = Drawer(TOKEN).allowed(Follower(grammar, [*b"hm"]))
    assert TOKEN.control_ids[MARK] not in row
    assert TOKEN.control_ids["</think>"] in row


@pytest.mark.parametrize("form", [V32, V4], ids=lambda form: form.name)
def test_a_call_or_content(form: Dsml) -> None:
    """If a grammar allows calls and content, a reply has either of them, never both."""
    content = closed(answer={"enum": ["yes", "no"]})
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": content, "strict": True},
    }
    drawer, num = Drawer(TOKEN), [0, 0]
    with service_of(form, TOKEN) as service:
        for seed in range(12):
            reply = asked(
                service,
                [tool("f", closed(a={"type": "boolean"}))],
                response_format=wanted,
                thinking={"type": "disabled"},
            )
            grammar = reply.generation.sampling.grammar
            assert grammar is not None
            begin = [[*b"{"], [*b"<"]][seed % 2]
            tokens = drawer.drawn(grammar, random.Random(seed), begin)
            if tokens[-1] == drawer.end:
                shown, calls, _ = read(reply, tokens, drawer.end)
                assert bool(shown) != bool(calls)
                num[bool(calls)] += 1
                if shown:
                    jsonschema.validate(json.loads(shown), content)
    assert min(num) > 2


def test_what_cannot_be_followed_is_said_of_the_tool() -> None:
    with (
        service_of(V32, TOKEN) as service,
        pytest.raises(RequestError, match="tool 'bad': 'not' is not supported"),
    ):
        asked(service, [tool("bad", closed(a={"not": {}}))])
