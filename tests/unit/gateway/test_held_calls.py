"""Calls that are constrained by a grammar: any tokens that a model draws are calls of existing
tools, with arguments of their schemas, in each family's own format.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.errors import RequestError
from hadal.core.messages.generation import Token
from hadal.core.plans import Grammar
from hadal.gateway.api import fields
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import Service
from hadal.gateway.text.asks import AnswerFormat
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.formats import Formats
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.template import Checked, ConfinedProcess
from hadal.gateway.text.tools import (
    FORMATS,
    MAX_HELD_BYTES,
    Choosing,
    Tool,
    ToolFormat,
    followed,
    read_tools,
)
from hadal.roles.front.names import FrontNames
from hadal.tokens.grammars import Follower, Grammars, TextRows, calls_text, grammar_text
from hadal.tokens.lark import TextGrammar
from tests.schemas import SCHEMAS, closed

from .test_formats import intersections
from .test_tools import BOS, EOS, KIMI, LISTING, V3, V31, VOCABULARY, read, written
from .tool_model import tool_model

END, CLOSE = VOCABULARY.control_ids[EOS], VOCABULARY.control_ids["</think>"]
GRAMMARS = Grammars(lambda: VOCABULARY.table, len(VOCABULARY))
MAX_TOKENS = 600
ENDING = frozenset([*b'"}]', END, *range(256, len(VOCABULARY))])
"""Tokens that `drawn` prefers, so that replies come to an end."""


def tool(name: str, parameters: dict[str, Any] | None, strict: bool | None = True) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    (read_one,) = read_tools([{"type": "function", "function": function}])
    return read_one if strict else followed(read_one, MAX_HELD_BYTES)[0]


OBJECTS = {
    name: schema for name, schema in SCHEMAS.items() if (schema or {}).get("type") == "object"
}
CITY = tool("city", closed(name={"type": "string"}, size={"type": "integer"}))


def held(format: ToolFormat, choosing: Choosing, **more: Any) -> Grammar:
    """Return the grammar that the service makes, without checking that it can be followed."""
    ids = VOCABULARY.control_ids
    text = calls_text(format.call_list(choosing, ids), **more)
    begins = ids[format.calls_begin], ids[format.call_begin]
    if more.get("is_opened"):
        return Grammar(text, (END,), opens=begins, closes=ids[format.calls_end])
    begins_after = CLOSE if more.get("follows_reasoning") else -1
    return Grammar(text, (END,), begins_after, barred=begins)


def allowed(follower: Follower, drafts: Sequence[int] = ()) -> list[set[int] | None]:
    """Return the tokens that each row may draw; None: any token."""
    bits = np.zeros((1 + len(drafts), GRAMMARS.num_words), np.uint32)
    has_mask = np.zeros(len(bits), np.bool_)
    GRAMMARS.allow([TextRows(follower, 0, drafts)], bits, has_mask)
    is_set = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [
        set(row.nonzero()[0].tolist()) if is_held else None
        for row, is_held in zip(is_set, has_mask, strict=True)
    ]


def drawn(grammar: Grammar, rng: random.Random, begin: Sequence[int] = ()) -> list[int]:
    """Return allowed tokens drawn at random, `begin` first. The last is END if the reply ended."""
    follower, tokens = Follower(grammar, []), list[int]()
    while len(tokens) < MAX_TOKENS and END not in tokens:
        (row,) = allowed(follower)
        assert row is None or row, f"{tokens}: {follower.error}"
        if len(tokens) < len(begin):
            token = begin[len(tokens)]
            assert row is None or token in row
        else:
            among = sorted(range(len(VOCABULARY)) if row is None else row)
            liked = [token for token in among if token in ENDING]
            token = rng.choice(liked if liked and rng.random() < 0.6 else among)
        tokens.append(token)
        follower.advance([token])
    return tokens


def replied(format: ToolFormat, tokens: Sequence[int], choosing: Choosing, thinks: bool) -> Piece:
    assembler = Assembler(
        VOCABULARY, TextReading(sections=True, thinks=thinks, calls=Calls(format, choosing))
    )
    piece = assembler.push(
        Token("r", 0, i, token, "stop" if token == END else None) for i, token in enumerate(tokens)
    )
    piece.add(assembler.end("length"))
    return piece


def called(piece: Piece) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for delta in piece.calls:
        if delta.id:
            calls.append((delta.name, ""))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + delta.arguments
    return calls


def check(piece: Piece, choosing: Choosing, has_ended: bool) -> int:
    """Check every complete call of the reply, and return how many there are."""
    calls = called(piece)
    tools = {each.name: each for each in choosing.callable}
    complete = calls if has_ended else calls[:-1]
    for name, arguments in complete:
        jsonschema.validate(json.loads(arguments), tools[name].arguments)
    assert all(name in tools for name, _ in calls)
    return len(complete)


@st.composite
def choosings(draw: st.DrawFn) -> Choosing:
    names = draw(
        st.lists(
            st.from_regex(r"[A-Za-z0-9_-]{1,6}", fullmatch=True),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    tools = [
        tool(name, OBJECTS[draw(st.sampled_from(sorted(OBJECTS)))], draw(st.booleans()))
        for name in names
    ]
    name = draw(st.sampled_from(["", *names]))
    return Choosing(tuple(tools), True, name, draw(st.booleans()))


@pytest.mark.promise(
    "From the control token that begins calls on, a call has the name of an offered tool "
    "and arguments of its schema, with strict and without."
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@given(choosing=choosings(), seed=st.integers(0, 2**30), thinks=st.booleans())
def test_forced_calls_are_right_whatever_is_drawn(
    format: ToolFormat, choosing: Choosing, seed: int, thinks: bool
) -> None:
    grammar, rng = held(format, choosing, follows_reasoning=thinks), random.Random(seed)
    begin: list[int] = []
    if thinks:
        (row,) = allowed(Follower(grammar, []))
        marks = set(VOCABULARY.control_ids.values()) & (row or set())
        begin = [*b"hm", *rng.choices([*b"hm", *(marks - {CLOSE})], k=5), CLOSE]
    tokens = drawn(grammar, rng, begin)
    piece = replied(format, tokens, choosing, thinks)
    assert piece.reasoning[:2] == ("hm" if thinks else "")
    # If the limit cuts a call in its head, no call was read, and the head is shown as text.
    shown = piece.content.strip()
    assert not shown or (END not in tokens and shown.startswith(format.call_begin))
    num = check(piece, choosing, END in tokens)
    if END in tokens:
        assert num == 1 or (choosing.is_parallel and num > 1)
        assert piece.finish == "tool_calls"
    else:
        assert piece.finish == ("tool_calls" if num and not choosing.is_parallel else "length")


@pytest.mark.promise(
    "From the control token that begins calls on, a call has the name of an offered tool "
    "and arguments of its schema, with strict and without."
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@given(choosing=choosings(), seed=st.integers(0, 2**30), before=st.text(max_size=5))
def test_chosen_calls_are_right_wherever_they_come(
    format: ToolFormat, choosing: Choosing, seed: int, before: str
) -> None:
    """Calls may begin without the mark of their list, in a second list, or inside a reasoning."""
    choosing = Choosing(choosing.tools, is_parallel=choosing.is_parallel)
    ids, rng = VOCABULARY.control_ids, random.Random(seed)
    begin = [*before.encode("utf-8", "replace"), ids[format.calls_begin]]
    if rng.random() < 0.5:
        begin[-1] = ids[format.call_begin]
    tokens = drawn(held(format, choosing, is_opened=True), rng, begin)
    for thinks in (False, True):
        check(replied(format, tokens, choosing, thinks), choosing, END in tokens)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_models_write_is_allowed_as_they_write_it(format: ToolFormat) -> None:
    """The grammar changes nothing for a model that writes correct calls by itself."""
    choosing = Choosing((CITY, tool("time", None, None)), True)
    gap = "\n" if format.is_fenced else ""
    text = written(format, ("city", '{"name": "Oslo", "size": 7}'), ("time", '{"z": [1.5]}'))
    text = text.replace(
        format.call_end + format.call_begin, format.call_end + gap + format.call_begin
    )
    tokens = [*VOCABULARY.encode_controlled(text), END]
    for opened in (False, True):
        follower = Follower(held(format, choosing, is_opened=opened), [])
        for token in tokens:
            (row,) = allowed(follower)
            assert row is None or token in row
            follower.advance([token])


@pytest.mark.promise(
    "A row after drafts gets the mask of the text with those drafts, and is sampled "
    "only if those drafts were drawn"
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_drafts_change_no_mask(format: ToolFormat) -> None:
    """A row after drafts has the mask of the text with those drafts, also if calls begin or end in
    the drafts.
    """
    choosing, rng = Choosing((CITY,)), random.Random(5)
    text = "hm" + written(format, ("city", '{"name": "a", "size": 1}')) + "</think>So, "
    tokens = [
        *VOCABULARY.encode_controlled(text + written(format, ("city", '{"name": "", "size": 0}'))),
        END,
    ]
    grammar = held(format, choosing, is_opened=True)
    for width in (1, 3, 40, 400):
        follower, at = Follower(grammar, []), 0
        while at < len(tokens):
            rows = allowed(follower, tokens[at : at + width])
            for number, row in enumerate(rows):
                so_far = tokens[: at + number]
                assert [row] == allowed(Follower(grammar, so_far))
            step = rng.randrange(1, width + 1)
            follower.advance(tokens[at : at + step])
            at += step


def test_a_call_or_content() -> None:
    """If a grammar allows calls and content, a reply has either calls or content, never both."""
    content = closed(answer={"enum": ["yes", "no"]})
    choosing = Choosing((CITY,))
    grammar = held(V31, choosing, content=content)
    (row,) = allowed(Follower(grammar, []))
    assert row == {ord("{"), VOCABULARY.control_ids[V31.calls_begin]}
    num = [0, 0]
    for seed in range(40):
        tokens = drawn(grammar, random.Random(seed))
        piece = replied(V31, tokens, choosing, False)
        if END not in tokens:
            continue
        num[bool(piece.calls)] += 1
        assert bool(piece.calls) != bool(piece.content)
        if piece.content:
            jsonschema.validate(json.loads(piece.content), content)
            assert piece.finish == "stop"
        check(piece, choosing, True)
    assert min(num) > 3


def test_an_answer_goes_on_from_a_prefix() -> None:
    text = grammar_text(CITY.arguments, follows_reasoning=False)
    prefix = '{"name": "Os'
    grammar = Grammar(text, (END,), prefix=tuple(prefix.encode()))
    tokens = drawn(grammar, random.Random(1), [*b'lo", "size": 1}', END])
    assert tokens[-1] == END
    rows = allowed(Follower(grammar, [*b'"']))
    assert rows[0] is not None
    assert {ord(char) for char in ", "} <= rows[0] <= {ord(char) for char in ", \t\r\n"}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Yield the service of a model with prompts that end in an open reasoning."""
    template = f"{LISTING}<｜User｜>{{{{ messages[0].content }}}}<｜Assistant｜><think>\n"
    special = {"bos_token": BOS, "eos_token": EOS}
    with (
        closing(ChatFormat(VOCABULARY, {"default": template}, special, "here")) as chat,
        tool_model() as taught,
        closing(
            Service(replace(taught, chat=chat), LimitsConfig(), FrontNames(CacheConfig(), "f0"))
        ) as made,
    ):
        yield made


def grammar_of(service: Service, asked_for: dict[str, Any]) -> Grammar | None:
    """Return the grammar of a chat's reply."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **asked_for}
    work = asyncio.run(service.chat(json.dumps(body).encode(), "r", Tenant(salt_of(b"key"))))
    (asked,) = work.choices
    grammar: Grammar | None = asked.generation.sampling.grammar
    return grammar


def city(strict: bool | None) -> dict[str, Any]:
    return {"type": "function", "function": {**CITY.fields["function"], "strict": strict}}


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_a_reasoning_s_calls_are_held_or_barred(
    service: Service, choice: str, strict: bool | None
) -> None:
    """Calls are constrained from the first mark on. A required call is barred from the reasoning
    before it.
    """
    named = {"type": "function", "function": {"name": "city"}}
    grammar = grammar_of(
        service, {"tools": [city(strict)], "tool_choice": named if choice == "named" else choice}
    )
    way = {"is_opened" if choice == "auto" else "follows_reasoning": True}
    wanted = held(V31, Choosing((CITY,)), **way)
    assert grammar == msgspec.structs.replace(wanted, is_lenient=not strict)
    marks = {VOCABULARY.control_ids[mark] for mark in (V31.calls_begin, V31.call_begin)}
    (row,) = allowed(Follower(grammar, [*b"hm"]))
    assert row is None if choice == "auto" else row is not None and not row & {*marks, END}


@pytest.mark.promise(
    "refused together with a strict tool or a required call; otherwise calls are then free"
)
@pytest.mark.parametrize(
    "option", [{"ignore_eos": True}, {"min_tokens": 3}, {"stop_token_ids": [65]}]
)
def test_options_that_a_grammar_cannot_follow_leave_calls_free(
    service: Service, option: dict[str, Any]
) -> None:
    assert grammar_of(service, {"tools": [city(False)], **option}) is None
    budget = grammar_of(service, {"tools": [city(False)], "thinking_budget": 5, **option})
    assert budget is not None
    assert (budget.text, budget.budget) == ("", 5)
    for more in ({"tools": [city(True)]}, {"tools": [city(False)], "tool_choice": "required"}):
        with pytest.raises(RequestError, match="strict or required"):
            grammar_of(service, {**more, **option})


def test_a_model_without_an_end_writes_calls_freely(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grammar_of(service, {"tools": [city(False)], "tool_choice": "none"}) is None
    monkeypatch.setattr(service, "model", replace(service.model, eos_ids=()))
    assert grammar_of(service, {"tools": [city(False)]}) is None
    with pytest.raises(RequestError, match="no token that ends a text"):
        grammar_of(service, {"tools": [city(True)]})


# ---- checks before the request is served ----


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_can_be_followed_passes(formats: Formats, format: ToolFormat) -> None:
    ids = VOCABULARY.control_ids
    tools = tuple(tool(f"f{at}", schema) for at, schema in enumerate(OBJECTS.values()))
    for is_opened, is_forced in itertools.product((False, True), repeat=2):
        choosing = Choosing(tools, is_forced)
        text = formats.calls_text(Calls(format, choosing), ids, is_opened=is_opened)
        assert text == held(format, choosing, is_opened=is_opened).text


@pytest.mark.promise("With strict, a schema that cannot be followed is a 400 that names the tool")
def test_what_cannot_be_followed_is_said_of_the_tool(formats: Formats) -> None:
    bad = tool("bad", closed(a={"not": {}}))
    for format in (V3, V31, KIMI):
        with pytest.raises(RequestError, match="tool 'bad': 'not' is not supported") as caught:
            formats.calls_text(Calls(format, Choosing((CITY, bad), True)), VOCABULARY.control_ids)
        assert caught.value.param == bad.schema_field == "tools[0].function.parameters"
    named = Choosing((CITY, bad), True, "city")
    formats.calls_text(Calls(V31, named), VOCABULARY.control_ids)


def test_a_prefix_is_looked_at(formats: Formats) -> None:
    wanted = AnswerFormat("mine", CITY.arguments)
    formats.text(wanted, follows_reasoning=False, prefix='{"name": "')
    with pytest.raises(RequestError, match="the prefix does not match the schema from byte 2"):
        formats.text(wanted, follows_reasoning=False, prefix='{"size": 1')


def test_many_tools_are_looked_at_in_time(formats: Formats) -> None:
    schema = closed(**{f"key{at}": {"enum": ["a", "b", at]} for at in range(8)})
    tools = tuple(tool(f"f{at}", {**schema, "title": str(at)}) for at in range(128))
    formats.calls_text(Calls(KIMI, Choosing(tools, True)), VOCABULARY.control_ids)
    found = read(VOCABULARY, V31, VOCABULARY.encode_controlled(written(V31, ("f1", "{}"))))
    assert found.calls == [["f1", "{}"]]


# ---- tools that are not strict ----

NOT = closed(a={"not": {"type": "null"}})
LOOKING_AHEAD = closed(a={"type": "string", "pattern": "^(?!x)"})


@pytest.mark.promise(
    "its arguments may be any JSON object, and the log names the tool and the keyword once"
)
@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (NOT, "'not' is not supported"),
        (LOOKING_AHEAD, "'pattern' is not supported"),
        (closed(a={"type": "string", "format": "odd"}), "'format' 'odd' is not supported"),
        (closed(a={"const": 2**60}), "'const' contains a whole number beyond 2^53"),
        (closed(a={"$ref": "#/$defs/none"}), "'/$defs/none' does not exist"),
        ({"$ref": "#"}, "no text can satisfy the schema"),
        ({"type": "array"}, "its 'type' is not 'object'"),
        ({"x-guidance": {}}, "'x-guidance' is reserved"),
        (closed(**{"a" * 70_000: {}, "b" * 70_000: {}}), "the schemas have more than 131072 bytes"),
        (closed(a=intersections(8)), "too large"),
    ],
    ids=[*("not", "pattern", "format", "const", "ref", "circle", "type", "own", "size", "time")],
)
def test_what_cannot_be_followed_is_any_object(parameters: dict[str, Any], why: str) -> None:
    """Other tools of the request are still held to their schemas."""
    logged: list[tuple[str, str, str]] = []
    with closing(Formats(lambda *said: logged.append(said))) as formats:
        odd = tool("odd", parameters, None)
        for choosing in (Choosing((odd, CITY)), Choosing((odd, CITY), True)):
            text = formats.calls_text(Calls(V31, choosing), VOCABULARY.control_ids)
            free = Choosing((tool("odd", None, None), CITY), choosing.is_forced)
            assert text == held(V31, free).text
        formats.calls_text(Calls(V31, Choosing((odd, CITY), True, "city")), VOCABULARY.control_ids)
    assert len(logged) == 2, "nothing is logged of a tool that cannot be called"
    assert logged[0] == logged[1]
    event, *of = logged[0]
    assert why in event
    assert of == ["tool", "odd"]


def test_a_schema_that_cannot_be_followed_is_logged_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    function = {"name": "mine", "parameters": NOT}
    for choice in ("auto", "required"):
        tools = [{"type": "function", "function": function}]
        assert grammar_of(service, {"tools": tools, "tool_choice": choice}) is not None
    (record,) = caplog.records
    assert "'not' is not supported: tool='mine'" in record.getMessage()


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (None, {"type": "object"}),
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"type": ["object", "null"]}, {"type": "object"}),
        (
            {"type": "object", "title": "T", "description": "d", "properties": {"title": {}}},
            {"type": "object", "properties": {"title": {}}},
        ),
        (
            {"properties": {"a": {"const": {"title": "x"}, "$comment": "c"}}},
            {"properties": {"a": {"const": {"title": "x"}}}, "type": "object"},
        ),
        (
            {"properties": {"propertyNames": {"type": "string"}, "uniqueItems": False}},
            {
                "properties": {"propertyNames": {"type": "string"}, "uniqueItems": False},
                "type": "object",
            },
        ),
        (
            {"propertyNames": {"type": "string"}, "additionalProperties": {"uniqueItems": False}},
            {"additionalProperties": {}, "type": "object"},
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "description": "d"}}},
            {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}, "type": "object"},
        ),
    ],
)
def test_what_a_schema_says_for_readers_is_left_out(
    formats: Formats, parameters: dict[str, Any] | None, wanted: dict[str, Any]
) -> None:
    read_one = tool("f", parameters, None)
    assert read_one.arguments == wanted
    text = formats.calls_text(Calls(V31, Choosing((read_one,), True)), VOCABULARY.control_ids)
    assert json.dumps(wanted)[:-1] in text
    assert read_one.fields["function"]["parameters"] == parameters, "the template shows all of it"


@pytest.mark.promise("other tools beyond that limit may be called with any JSON object")
def test_the_limit_of_all_schemas() -> None:
    """Strict tools count first; then tools count in their order, as far as they fit."""
    sizes = [50_000, 50_002, 50_004, 20_000]
    stricts = [False, False, True, False]
    functions = [
        {"name": f"f{at}", "parameters": closed(**{"a" * (size // 2): {}}), "strict": strict}
        for at, (size, strict) in enumerate(zip(sizes, stricts, strict=True))
    ]
    tools = read_tools([{"type": "function", "function": each} for each in functions])
    logged: list[tuple[str, str, str]] = []
    with closing(Formats(lambda *said: logged.append(said))) as formats:
        text = formats.calls_text(Calls(V31, Choosing(tools)), VOCABULARY.control_ids)
        named = Choosing(tools, True, "f1")
        formats.calls_text(Calls(V31, named), VOCABULARY.control_ids)
    assert [f'"{"a" * (size // 2)}"' in text for size in sizes] == [True, False, True, True]
    assert [(name, "131072 bytes" in event) for event, _, name in logged] == [("f1", True)]
    assert text.count('"required"') == 3


def test_schemas_that_cannot_be_combined_are_followed_only_where_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[str, str, str]] = []
    with closing(Formats(lambda *said: logged.append(said))) as formats:
        plain = formats._check

        def check(text: str, prefix: str = "") -> Checked:
            too_many = text.count("additionalProperties") > 1
            return Checked("too many", 0.1) if too_many else plain(text, prefix)

        monkeypatch.setattr(formats, "_check", check)
        for strict in (True, False):
            tools = (CITY, tool("b", closed(a={}), False))
            if not strict:
                tools = (tool("city", CITY.arguments, False), tools[1])
            text = formats.calls_text(Calls(V31, Choosing(tools, True)), VOCABULARY.control_ids)
            free = tuple(each if each.is_strict else tool(each.name, None, False) for each in tools)
            assert text == held(V31, Choosing(free, True)).text
        assert [name for _, _, name in logged] == ["b", "city", "b"]
        both = Choosing((CITY, tool("b", closed(a={}))), True)
        with pytest.raises(RequestError, match="cannot be combined: too many"):
            formats.calls_text(Calls(V31, both), VOCABULARY.control_ids)


def test_the_processor_time_of_all_checks_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict tools are checked first. What was checked costs nothing again."""
    logged: list[tuple[str, str, str]] = []
    asked: list[str] = []

    def check(process: ConfinedProcess, grammar: str, prefix: str = "") -> Checked:
        asked.append(grammar)
        return Checked("", 0.9)

    monkeypatch.setattr(ConfinedProcess, "check", check)
    tools = tuple(tool(f"f{at}", closed(**{f"a{at}": {}}), at == 4) for at in range(5))
    with closing(Formats(lambda *said: logged.append(said))) as formats:
        for num_checked in (4, 2, 0):  # Three tools and their combination, then the other two.
            asked.clear()
            text = formats.calls_text(Calls(V31, Choosing(tools)), VOCABULARY.control_ids)
            assert len(asked) == num_checked + (num_checked == 2)
    assert text == held(V31, Choosing(tools)).text
    assert {(name, "more than 2 s" in event) for event, _, name in logged} == {
        ("f2", True),
        ("f3", True),
    }


def test_the_processor_time_of_all_grammars_of_clients_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their forms are remembered, the most recently used ones."""
    asked: list[str] = []

    def forms_of(process: ConfinedProcess, syntax: str, definition: str) -> tuple[str, str, float]:
        asked.append(definition)
        return f"start: {definition}", f"PLAIN: {definition}", 0.9

    def custom(number: int) -> Tool:
        grammar = TextGrammar("input", "lark", f'"{number}"')
        return replace(tool(f"f{number}", closed(input={"type": "string"})), input=grammar)

    monkeypatch.setattr(ConfinedProcess, "forms_of", forms_of)
    with closing(Formats(lambda *said: None)) as formats:

        def num_asked(*numbers: int) -> int:
            asked.clear()
            choosing = Choosing(tuple(map(custom, numbers)))
            formats.calls_text(Calls(V31, choosing), VOCABULARY.control_ids)
            return len(asked)

        with pytest.raises(RequestError, match=r"'f2': .* more than 2 s"):
            num_asked(*range(5))
        assert len(asked) == 3
        assert num_asked(*range(4)) == 1
        for number in range(100):
            num_asked(0, number)
        assert num_asked(0, 99) == 0
        assert num_asked(1) == 1
