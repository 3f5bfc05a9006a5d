"""Later turns of Codex, and its tools of all types: what the model reads, and what comes back."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import ResponseOutputItem
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.api import fields
from hadal.gateway.api.reply import Head, Usage
from hadal.gateway.api.responses.calls import CALL_TYPES, InputReader, as_arguments, as_input
from hadal.gateway.api.responses.items import input_page, listed
from hadal.gateway.api.responses.reply import ResponseFormatter, response_id_of
from hadal.gateway.api.responses.request import ResponseAsk, parse_response, read_response
from hadal.gateway.api.responses.tools import ResponseTool
from hadal.gateway.api.sealed import opened, sealed
from hadal.gateway.text.asks import Turn
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.tools import FORMATS, CallDelta, Choosing, ToolFormat
from hadal.tokens.grammars import forms_of
from hadal.tokens.lark import TextGrammar
from tests.waiting import DEADLINE_S

from .event_streams import named_events, response_of
from .scenes import error_of, scene
from .serving import serving
from .test_held_calls import CITY, END, called, drawn, held, replied, tool
from .test_tools import V31, VOCABULARY, written
from .tool_model import says, tool_model
from .world import spell, world

USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}
PARAMETERS = {"type": "object", "properties": {"row": {"type": "integer"}}}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds.",
    "parameters": PARAMETERS,
}
RUN = {
    "type": "custom",
    "name": "run",
    "description": "Runs code.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: /[a-z\\n"]+/'},
}
HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "file_search"),
    *("web_search_preview_2025_03_11", "code_interpreter", "image_generation", "mcp"),
    *("programmatic_tool_calling",),
)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": PARAMETERS, **more}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "", "tools": [*tools]}


def more_tools(*tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "additional_tools", "role": "developer", "tools": [*tools]}


def parse(*items: dict[str, Any], **more: Any) -> ResponseAsk:
    body = {"model": "small", "input": [USER, *items], **more}
    return parse_response(read_response(json.dumps(body).encode()), {})


def names_of(asked: ResponseAsk) -> list[str]:
    return [tool.name for tool in asked.chat.rendering.choosing.tools]


def turns_of(*items: dict[str, Any], **more: Any) -> tuple[Turn, ...]:
    return parse(*items, **more).after(()).turns[1:]


# ---- tools ----


@pytest.mark.promise(
    "additional_tools (its tools are offered from there on)",
)
def test_tools_come_from_items_too() -> None:
    asked = parse(
        more_tools(
            namespace("functions", RUN, function("wait")), namespace("clock", function("now"))
        ),
        more_tools(function("ask"), namespace("clock", function("now", description="Newer."))),
        tools=[function("first")],
    )
    assert names_of(asked) == ["first", "functions__run", "functions__wait", "clock__now", "ask"]
    (newer,) = (t for t in asked.chat.rendering.choosing.tools if t.name == "clock__now")
    assert newer.fields["function"]["description"] == "Newer."
    assert not parse(more_tools(RUN)).chat.turns[1:], "the item is no turn"


def test_a_search_s_tools_are_there_from_then_on() -> None:
    later = function("later", defer_loading=True)
    found = namespace("mcp__x", function("find", defer_loading=True))
    call = {
        "type": "tool_search_call",
        "call_id": "s",
        "execution": "client",
        "arguments": {"row": 1},
    }
    output = {"type": "tool_search_output", "call_id": "s", "tools": [found]}
    tools = [SEARCH, later, namespace("mcp__x", function("find", defer_loading=True))]
    assert names_of(parse(tools=tools)) == ["tool_search"]
    asked = parse(call, {**output, "id": "tso_1", "execution": "client"}, tools=tools)
    assert names_of(asked) == ["tool_search", "mcp__x__find"]
    asking, answer = asked.after(()).turns[1:]
    assert (asking.calls[0].name, json.loads(asking.calls[0].arguments)) == (
        "tool_search",
        {"row": 1},
    )
    names, shown = answer.content.split("\n")
    assert names == "Found tools: mcp__x__find"
    assert json.loads(shown) == {"name": "mcp__x__find", "parameters": PARAMETERS}
    # Where only a provider could search, nothing would find a deferred tool.
    assert names_of(parse(tools=[{"type": "tool_search"}, later])) == ["later"]


@pytest.mark.parametrize("kind", HOSTED)
def test_what_only_a_provider_can_run_is_left_out(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    hosted = {"type": kind, "filters": {}, "search_context_size": "low"}
    for _ in range(2):
        asked = parse(more_tools(namespace("a", function("f")), hosted), tools=[hosted])
    assert names_of(asked) == ["a__f"]
    (record,) = caplog.records
    assert kind in record.getMessage()
    for choice in (
        {"type": kind},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]},
    ):
        with pytest.raises(RequestError, match="only a provider") as caught:
            parse(tools=[hosted, function("f")], tool_choice=choice)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("items", "more", "path"),
    [
        ([], {"tools": [function("a"), {"type": "computer_use_preview"}]}, "tools[1].type"),
        ([], {"tools": [{"type": "web_search_x"}]}, "tools[0].type"),
        ([], {"tools": [{"type": "computer", "environment": "browser"}]}, "tools[0].type"),
        *(
            ([], {"tools": [{"type": "shell", "environment": each}]}, "tools[0].environment")
            for each in (
                "local",
                {},
                {"type": "x"},
                {"type": "local", "skills": {}},
                {"type": "local", "skills": [{"name": "a", "path": "/a"}]},
            )
        ),
        ([more_tools(function("a"), {"type": "odd"})], {}, "input[1].tools[1].type"),
        ([more_tools(namespace("n", {"type": "shell"}))], {}, "input[1].tools[0].tools[0].type"),
        ([more_tools(namespace("n", namespace("m", RUN)))], {}, "input[1].tools[0].tools[0].type"),
        ([more_tools({"type": "namespace", "tools": []})], {}, "input[1].tools[0].name"),
        ([more_tools(namespace("n", RUN, RUN))], {}, "input[1].tools[0].tools[1].name"),
        ([more_tools(namespace("n", function("")))], {}, "input[1].tools[0].tools[0].name"),
        ([more_tools(namespace("n", {"type": "custom"}))], {}, "input[1].tools[0].tools[0].name"),
        ([more_tools({"type": "shell"}, {"type": "shell"})], {}, "input[1].tools[1].type"),
        ([more_tools(function("a.b"))], {}, "input[1].tools[0].name"),
        (
            [more_tools(*(function(f"f{number}") for number in range(128)))],
            {"tools": [function("first")]},
            "input[1].tools",
        ),
        ([], {"tools": [{**RUN, "format": {"type": "x"}}]}, "tools[0].format.type"),
        ([], {"tools": [{**RUN, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        (
            [],
            {"tools": [{**RUN, "format": {"type": "grammar", "syntax": "lark"}}]},
            "tools[0].format.definition",
        ),
        (
            [more_tools({**RUN, "allowed_callers": ["program"]})],
            {},
            "input[1].tools[0].allowed_callers",
        ),
        ([{"type": "web_search_call", "id": "w"}], {}, "input[1].type"),
        # These have fields with the names of other items' fields, and other values.
        ([{"type": "computer_call_output", "output": {}}], {}, "input[1].type"),
        ([{"type": "mcp_list_tools", "tools": [{"name": "f"}]}], {}, "input[1].type"),
        ([{"type": "image_generation_call", "action": "edit"}], {}, "input[1].type"),
        ([{"type": "function_call_output", "output": {}}], {}, "input[1].output"),
        ([{"type": 5, "output": {}}], {}, "input[1].type"),
        ([{"type": "shell_call", "call_id": "c"}], {}, "input[1].action"),
        ([{"type": "apply_patch_call", "call_id": "c"}], {}, "input[1].operation"),
        (
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}],
            {},
            "input[1].arguments",
        ),
        ([{"type": "custom_tool_call", "call_id": "c", "input": "x"}], {}, "input[1].name"),
        ([{"type": "function_call", "name": "f"}], {}, "input[1].call_id"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    items: list[dict[str, Any]], more: dict[str, Any], path: str
) -> None:
    with pytest.raises(RequestError) as caught:
        parse(*items, **more)
    assert caught.value.param == path


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        ({"type": "custom", "name": "run"}, 4, "run"),
        ({"type": "function", "name": "f", "namespace": "n"}, 4, "n__f"),
        ({"type": "shell"}, 4, "shell"),
        ({"type": "apply_patch"}, 4, "apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}, 1, ""),
    ],
)
def test_any_offered_tool_can_be_chosen(choice: dict[str, Any], names: int, forced: str) -> None:
    tools = [RUN, namespace("n", function("f")), {"type": "shell"}, {"type": "apply_patch"}]
    choosing = parse(tools=tools, tool_choice=choice).chat.rendering.choosing
    assert (len(choosing.tools), choosing.is_forced, choosing.name) == (names, True, forced)
    assert len(choosing.listing) == 4, "the beginning of the prompt is that of all tools"
    for bad in (
        {"type": "custom", "name": "other"},
        {"type": "local_shell"},
        {"type": "allowed_tools", "tools": []},
        {"type": "x"},
        {"name": "run"},
    ):
        with pytest.raises(RequestError) as caught:
            parse(tools=tools, tool_choice=bad)
        assert caught.value.param == "tool_choice"


def test_fields_that_belong_to_tools_of_a_provider_are_no_error() -> None:
    both = ["direct", "programmatic"]
    hosted = {"type": "code_interpreter", "container": "c", "allowed_callers": ["programmatic"]}
    asked = parse(
        tools=[function("f", allowed_callers=both), hosted],
        include=["code_interpreter_call.outputs", "web_search_call.action.sources"],
    )
    assert names_of(asked) == ["f"]


def test_a_shell_in_a_provider_s_container_is_left_out() -> None:
    skill = {"name": "pdf", "description": "Reads PDF.", "path": "/skills/pdf"}
    for environment, is_offered in (
        ({"type": "container_auto"}, False),
        ({"type": "container_reference", "container_id": "c"}, False),
        ({"type": "local", "skills": [skill]}, True),
        (None, True),
    ):
        asked = parse(tools=[{"type": "shell", "environment": environment}])
        assert names_of(asked) == ["shell"] * is_offered
        if environment and is_offered:
            (tool,) = asked.chat.rendering.choosing.tools
            assert "Skill pdf, in /skills/pdf: Reads PDF." in tool.fields["function"]["description"]


# ---- items of later turns ----

CALLS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "function_call": ({"name": "f", "arguments": '{"row": 1}'}, "f", {"row": 1}),
    "custom_tool_call": ({"name": "run", "input": 'a "b"\n'}, "run", {"input": 'a "b"\n'}),
    "tool_search_call": ({"arguments": {"row": 1}}, "tool_search", {"row": 1}),
    "local_shell_call": (
        {"action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None}},
        "local_shell",
        {"command": ["ls"]},
    ),
    "shell_call": (
        {"action": {"commands": ["ls", "pwd"], "timeout_ms": 9, "max_output_length": None}},
        "shell",
        {"commands": ["ls", "pwd"], "timeout_ms": 9},
    ),
    "apply_patch_call": (
        {"operation": {"type": "delete_file", "path": "a"}},
        "apply_patch",
        {"operation": {"type": "delete_file", "path": "a"}},
    ),
}
OUTPUTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "function_call_output", "output": "text"}, "text"),
    (
        {
            "type": "custom_tool_call_output",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        "ab",
    ),
    ({"type": "local_shell_call_output", "output": '{"output": "x"}'}, '{"output": "x"}'),
    (
        {
            "type": "shell_call_output",
            "max_output_length": 9,
            "output": [
                {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "b", "outcome": {"type": "timeout"}},
            ],
        },
        "a\n[exit code 0]\nb\n[timed out]\n",
    ),
    ({"type": "apply_patch_call_output", "status": "completed"}, "completed"),
    ({"type": "apply_patch_call_output", "status": "failed", "output": "no"}, "failed: no"),
    ({"type": "tool_search_output", "tools": []}, "No tool was found."),
]


def test_all_calls_are_tried() -> None:
    assert CALLS.keys() == CALL_TYPES.keys()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_read_in_the_model_s_form(kind: str) -> None:
    own, name, arguments = CALLS[kind]
    for status in ({}, {"status": "completed"}):
        (turn,) = turns_of({"type": kind, "call_id": "c", **own, **status}, tools=[RUN])
        (call,) = turn.calls
        assert (turn.role, call.id, call.name) == ("assistant", "c", name)
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(("output", "text"), OUTPUTS)
def test_an_output_is_read(output: dict[str, Any], text: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for at in ({"call_id": "c", "id": "o_1"}, {"call_id": "c"}):
        _, answer = turns_of(call, {**output, **at})
        assert (answer.role, answer.call_id, answer.content) == ("tool", "c", text)
    if output["type"] == "local_shell_call_output":  # It may have the call's id as its own.
        assert turns_of(call, {**output, "id": "c"})[1].call_id == "c"
    with pytest.raises(RequestError, match="'other'") as caught:
        turns_of(call, {**output, "call_id": "other"})
    assert caught.value.param == "input[2].call_id"
    with pytest.raises(RequestError, match="'c'"):  # The call comes before its output.
        turns_of({**output, "call_id": "c"}, call)


async def test_an_unknown_call_is_refused_and_a_kept_one_is_known() -> None:
    with tool_model() as model:
        script = says(lambda prompt: written(V31, ("f", "{}")) if "<out>" not in prompt else "ok")
        async with world(model, script) as it:
            body = {"model": "small", "tools": [function("f"), RUN]}
            first = await it.client.post("/v1/responses", json={**body, "input": "Hi."})
            call = first.json()["output"][-1]
            output = {"type": "function_call_output", "output": "x"}
            for call_id, status in ((call["call_id"], 200), ("call_other", 400)):
                items = [{**output, "call_id": call_id}]
                more = {"input": items, "previous_response_id": first.json()["id"]}
                reply = await it.client.post("/v1/responses", json={**body, **more})
                assert reply.status_code == status, reply.text
            assert "call_other" in error_of(reply, 400)["message"]
            await it.settle()


async def test_a_search_changes_nothing_at_the_beginning_of_the_prompt() -> None:
    """Its tools are shown where it found them, also in a conversation that continues by id."""
    found = namespace("mcp__x", function("find", description="Finds rows."))
    call = {"type": "tool_search_call", "call_id": "s", "arguments": {}}
    output = {"type": "tool_search_output", "call_id": "s", "tools": [found]}
    with tool_model() as model:
        async with world(model, says(lambda _: "Yes.")) as it:
            body = {"model": "small", "tools": [SEARCH], "input": [USER, call]}
            for items in ([USER], [USER, call, output], [USER]):
                body["input"] = items
                first = (await it.client.post("/v1/responses", json=body)).json()
                body["previous_response_id"] = first["id"]
            plain, searched, continued = (each.prompt for each in it.units.submitted)
            assert searched[: len(plain)] == plain
            assert continued[: len(searched)] == searched
            assert model.vocabulary.decode(continued).count("Finds rows.") == 1
            await it.settle()


def test_a_type_may_be_left_out_or_null() -> None:
    for more in ({}, {"type": None}):
        assert turns_of({"role": "user", "content": "Hi.", **more}) == (Turn("user", "Hi."),)
        with pytest.raises(RequestError, match="has an item 'msg_1'") as caught:
            parse({"id": "msg_1", **more})
        assert caught.value.param == "input[1].id"


def test_arguments_of_a_search_may_be_a_text() -> None:
    for arguments in ('{"row": 1}', {"row": 1}):
        (turn,) = turns_of({"type": "tool_search_call", "call_id": "s", "arguments": arguments})
        assert turn.calls[0].arguments == '{"row": 1}'


def test_a_tool_that_comes_again_in_a_conversation_stays_one_tool() -> None:
    first, second = function("first"), function("second")
    newer = function("first", description="Newer.")
    hidden = function("hidden", defer_loading=True)
    turns = [
        [more_tools(SEARCH, namespace("n", first, second), hidden)],
        [more_tools(namespace("n", newer), {"type": "mcp", "server_label": "x"})],
        [more_tools(namespace("n", first))],
    ]
    staying: Sequence[ResponseTool] = ()
    for number, items in enumerate(turns):
        body = {"model": "small", "input": [USER, *items], "tools": [function("own")]}
        asked = parse_response(read_response(json.dumps(body).encode()), {}, staying)
        assert names_of(asked) == ["own", "tool_search", "n__first", "n__second"]
        staying = asked.tools.staying
        assert len(staying) == 3, "its own tools and those of providers do not stay"
        about = asked.chat.rendering.choosing.tools[2].fields["function"].get("description", "")
        assert ("Newer." in about) == (number == 1)


async def test_found_tools_are_there_in_the_next_response() -> None:
    """A client that continues by id does not send the search's output again."""
    found = namespace("mcp__x", function("find"))
    call = {"type": "tool_search_call", "call_id": "s", "arguments": {}}
    output = {"type": "tool_search_output", "call_id": "s", "tools": [found]}
    with tool_model() as model:
        async with world(model, says(lambda prompt: written(V31, ("mcp__x__find", "{}")))) as it:
            body = {"model": "small", "tools": [SEARCH], "input": [USER, call, output]}
            first = (await it.client.post("/v1/responses", json=body)).json()
            for again in ([], [call, output], []):
                body["input"] = [*again, USER]
                body["previous_response_id"] = first["id"]
                first = (await it.client.post("/v1/responses", json=body)).json()
                item = first["output"][-1]
                assert (item["name"], item["namespace"]) == ("find", "mcp__x")
            await it.settle()


def test_a_message_of_another_agent_is_read_as_the_user_s() -> None:
    part = {"type": "input_text", "text": "Done."}
    item = {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": [part]}
    assert turns_of(item) == (Turn("user", "Done."),)
    for text, read, num_unreadable in (("Say hi.", "Done.Say hi.", 0), ("gAAAAABx", "Done.", 1)):
        more = {"type": "encrypted_content", "encrypted_content": text}
        asked = parse({**item, "content": [part, more]})
        assert asked.chat.turns[-1] == Turn("user", read)
        assert asked.read.num_unreadable == num_unreadable
    with pytest.raises(RequestError) as caught:
        turns_of({**item, "content": [{"type": "input_image", "image_url": "x"}]})
    assert caught.value.param == "input[1].content[0]"


# ---- reasoning of earlier turns ----


def reasoning(text: str | None, **more: Any) -> dict[str, Any]:
    content = None if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **more}


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([reasoning("a"), message("assistant", "t")], ["a"]),
        ([reasoning("a"), message("assistant", "t"), CALL, OUTPUT], ["a", ""]),
        ([reasoning("a"), CALL, reasoning("b"), message("assistant", "t"), OUTPUT], ["a\nb", ""]),
        ([reasoning("a"), CALL, OUTPUT, reasoning("b"), message("assistant", "t")], ["a", "", "b"]),
        ([reasoning("a"), message("user", "u"), message("assistant", "t")], ["", ""]),
        ([reasoning(None, encrypted_content=sealed("é\n")), CALL, OUTPUT], ["é\n", ""]),
        ([reasoning("a", encrypted_content=sealed("b")), CALL, OUTPUT], ["a", ""]),
        ([reasoning(None), CALL, OUTPUT], ["", ""]),
    ],
)
def test_reasoning_belongs_to_the_assistant_turn_after_it(
    items: list[dict[str, Any]], expected: list[str]
) -> None:
    assert [turn.reasoning for turn in turns_of(*items)] == expected


def test_an_item_that_another_server_encrypted_is_passed_over_and_counted() -> None:
    for content in ("gAAAAAB", "hadal.reasoning.1.%%", "hadal.reasoning.1._w", ""):
        asked = parse(reasoning(None, encrypted_content=content), message("assistant", "t"))
        assert asked.read.num_unreadable == bool(content)
        assert asked.chat.turns[-1] == Turn("assistant", "t")
    assert opened(sealed("a" * 100)) == "a" * 100


async def test_the_count_is_exported(model: Any) -> None:
    async with scene(model) as it:
        items = [USER, reasoning(None, encrypted_content="x"), message("user", "u")]
        await it.client.post("/v1/responses", json={"model": "small", "input": items})
        metrics = (await it.client.get("/metrics")).text
        assert "hadal_unreadable_items_total 1.0" in metrics


def test_the_context_of_reasoning() -> None:
    items = [reasoning("a"), CALL, OUTPUT, message("user", "u"), reasoning("b"), CALL, OUTPUT]
    for context, expected in (
        ("current_turn", "b"),
        ("all_turns", "ab"),
        ("auto", "ab"),
        (None, "ab"),
    ):
        turns = turns_of(*items, reasoning={"context": context})
        assert "".join(turn.reasoning for turn in turns) == expected
    with pytest.raises(RequestError, match=r"reasoning\.context"):
        parse(reasoning={"context": "some"})


async def test_reasoning_comes_in_a_form_that_comes_back(model: Any) -> None:
    """Versions of Codex drop the text of an item, and send its `encrypted_content` back."""
    asked = {"model": "small", "input": "2 + 2?", "include": ["reasoning.encrypted_content"]}
    async with scene(model) as it:
        whole = (await it.client.post("/v1/responses", json=asked)).json()
        events = named_events(
            (await it.client.post("/v1/responses", json={**asked, "stream": True})).content
        )
        plain = (await it.client.post("/v1/responses", json={**asked, "include": []})).json()
        assert "encrypted_content" not in plain["output"][0]
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        for item in (whole["output"][0], response_of(events)["output"][0], done[0]):
            assert opened(item["encrypted_content"]) == item["content"][0]["text"] == "Easy."


# ---- calls that come back ----


def made(asked: ResponseAsk, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return the events of a streamed reply in these pieces."""
    formatter = ResponseFormatter(
        Head("resp_0_" + "0" * 32, 0, "small", ""),
        VOCABULARY,
        asked.request,
        None,
        Sampling(),
        lambda: 7.0,
        asked.tools,
    )
    usage = Usage(3, 4, 0)
    data = formatter.begin(usage) + b"".join(formatter.chunks(0, piece) for piece in pieces)
    return named_events(data + formatter.end(usage))


def cut(name: str, arguments: str, rng: random.Random, finish: str) -> Iterator[Piece]:
    """Yield a call's pieces, cut at random places."""
    yield Piece(calls=[CallDelta(0, "", "call_1", name)])
    while arguments:
        num = rng.randrange(1, 6)
        yield Piece(calls=[CallDelta(0, arguments[:num])])
        arguments = arguments[num:]
    yield Piece(finish=finish)


ALL_TOOLS = [
    *(function("f"), RUN, SEARCH, {"type": "local_shell"}, {"type": "shell"}),
    *({"type": "apply_patch"}, namespace("n", RUN, function("f"))),
]


@pytest.mark.parametrize("kind", [*CALLS, "of a namespace"])
def test_a_call_comes_back_as_its_item_and_is_read_again(kind: str) -> None:
    """Ids in output_item.done equal those in response.completed."""
    asked = parse(tools=ALL_TOOLS)
    own, name, arguments = CALLS[kind if kind in CALLS else "custom_tool_call"]
    if kind not in CALLS:
        name, own = "n__run", {**own, "namespace": "n"}
    rng = random.Random(4)
    for _ in range(20):
        text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
        events = made(asked, [*cut(name, text, rng, "tool_calls")])
        (item,) = response_of(events)["output"]
        added, done = (
            [one["item"] for one in events if one["type"] == f"response.output_item.{what}"]
            for what in ("added", "done")
        )
        assert done == [item]
        assert [one["id"] for one in added] == [item["id"]]
        assert response_id_of(item["id"]) == "resp_0_" + "0" * 32
        assert (item["call_id"], item["status"]) == ("call_1", "completed")
        assert item["type"] == (kind if kind in CALLS else "custom_tool_call")
        for field, value in own.items():
            found = item[field]
            if isinstance(value, dict):
                found = {key: found[key] for key in value}
            assert found == value
        assert item["type"] == "custom_tool_call" or TypeAdapter(
            ResponseOutputItem
        ).validate_python(item)
        (turn,) = turns_of(item, tools=ALL_TOOLS)
        assert (turn.calls[0].name, json.loads(turn.calls[0].arguments)) == (name, arguments)


@pytest.mark.promise("the input of a custom tool's call is streamed as it comes")
def test_the_input_of_a_custom_tool_is_streamed() -> None:
    asked, rng = parse(tools=[RUN]), random.Random(5)
    for _ in range(200):
        text = "".join(rng.choices('ab"\\\n\t/é🙂\u2028', k=rng.randrange(30)))
        arguments = json.dumps({"input": text}, ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.3:
            arguments = f" {arguments.replace(': ', ' :', 1)}\n"
        events = made(asked, [*cut("run", arguments, rng, "tool_calls")])
        kinds = [one["type"] for one in events]
        deltas = [one["delta"] for one in events if one["type"].endswith("call_input.delta")]
        (done,) = (one for one in events if one["type"].endswith("call_input.done"))
        assert (
            "".join(deltas) == done["input"] == events[-1]["response"]["output"][0]["input"] == text
        )
        assert not any("arguments" in kind for kind in kinds)
        assert len(deltas) >= len(text) // 6
        assert all(deltas)


def test_an_input_that_is_cut_off_is_as_long_as_it_came() -> None:
    asked, rng = parse(tools=[RUN]), random.Random(6)
    text = 'a\n"é🙂'
    arguments = json.dumps({"input": text})
    for num in range(len(arguments)):
        events = made(asked, [*cut("run", arguments[:num], rng, "length")])
        (item,) = response_of(events)["output"]
        deltas = "".join(one["delta"] for one in events if one["type"].endswith("input.delta"))
        assert item["status"] == "incomplete"
        assert item["input"] == deltas
        assert text.startswith(item["input"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": 1}',
        '{"input": 3}',
        "[1]",
        '{"x": 1, "input": "a"}',
        '{"input": "\\ud83d"}',
        '{"input": "\\ude00\\ud83dx"}',
    ],
)
def test_arguments_of_another_form_are_not_lost(arguments: str) -> None:
    reader = InputReader()
    text = reader.feed(arguments) + reader.rest()
    expected = {'{"x": 1, "input": "a"}': "a", '{"input": "\\ud83d"}': "\ufffd"}
    expected['{"input": "\\ude00\\ud83dx"}'] = "\ufffd\ufffdx"
    assert as_input(arguments) == expected.get(arguments, arguments)
    assert text in ("", as_input(arguments))
    assert as_input(as_arguments("x")) == "x"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", '{"commands": "ls"}'),
        ("local_shell", "{}"),
        ("tool_search", '{"query": "\\ud800"}'),
        ("tool_search", '["query"]'),
        ("shell", '{"commands": ["\\udc00"]}'),
        ("apply_patch", '{"operation": {"type": "create_file", "path": "a"}}'),
    ],
)
def test_a_call_that_does_not_fit_its_item_is_shown(name: str, arguments: str) -> None:
    """Such a call must neither be lost nor be run."""
    for text, finish in ((arguments, "tool_calls"), (arguments[:-1], "length")):
        events = made(parse(tools=ALL_TOOLS), [*cut(name, text, random.Random(7), finish)])
        (item,) = response_of(events)["output"]
        assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, text)
        assert (item["status"] == "incomplete") is (finish == "length")


def test_a_call_with_all_its_arguments_is_complete_even_if_the_limit_follows() -> None:
    arguments = '{"operation": {"type": "delete_file", "path": "a"}}'
    pieces = [*cut("apply_patch", arguments, random.Random(7), "length")]
    events = made(parse(tools=ALL_TOOLS), pieces)
    (item,) = response_of(events)["output"]
    assert (item["type"], item["status"]) == ("apply_patch_call", "completed")
    TypeAdapter(ResponseOutputItem).validate_python(item)


async def test_the_reply_lists_the_tools_that_are_offered() -> None:
    tools = [*ALL_TOOLS, *({"type": kind} for kind in HOSTED), {"type": "tool_search"}]
    choice = {"type": "custom", "name": "run"}
    with tool_model() as model:
        script = says(lambda prompt: written(V31, ("run", as_arguments("a"))))
        async with world(model, script) as it:
            more = {"tools": tools, "tool_choice": choice, "text": {"verbosity": "low"}}
            body = {"model": "small", "input": [USER], **more}
            reply = (await it.client.post("/v1/responses", json=body)).json()
            kinds = [tool["type"] for tool in reply["tools"]]
            assert kinds == [tool["type"] for tool in ALL_TOOLS]
            assert reply["tools"][1] == RUN
            assert reply["tool_choice"] == choice
            assert reply["text"] == {"format": {"type": "text"}, "verbosity": "low"}
            grammar = it.units.submitted[0].sampling.grammar
            assert "%lark" in grammar.text
            await it.settle()


@pytest.mark.promise("What llguidance cannot read is a 400 with its words")
async def test_a_grammar_that_cannot_be_read_is_refused_in_the_parser_s_words() -> None:
    bad = {**RUN, "format": {**RUN["format"], "definition": "start: other"}}
    with tool_model() as model:
        async with world(model, says(lambda prompt: "Hi.")) as it:
            for tools, items, path in (
                ([function("f"), bad], [USER], "tools[1].format.definition"),
                (
                    [],
                    [USER, more_tools(namespace("n", bad))],
                    "input[1].tools[0].tools[0].format.definition",
                ),
            ):
                body = {"model": "small", "tools": tools, "input": items}
                error = error_of(await it.client.post("/v1/responses", json=body), 400)
                assert error["param"] == path
                assert 'unknown name: "other"' in error["message"]
                assert "run" in error["message"]
            body = {"model": "small", "tools": [RUN], "input": [USER]}
            for _ in range(2):  # The next good request is served.
                assert (await it.client.post("/v1/responses", json=body)).status_code == 200
            await it.settle()


SUM = """
start: sum
sum: atom ("+" atom)* LF?
atom: /[0-9"\\\\]/ | "(" sum ")"
%import common.LF
"""


@pytest.mark.promise("A custom tool's input follows its grammar")
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("opened", [False, True])
def test_whatever_is_drawn_follows_the_grammar(format: ToolFormat, opened: bool) -> None:
    """A grammar without and one with a rule that contains itself, beside a strict function."""
    tools = []
    for name, definition in (
        ("lines", 'start: ("a" | "\\"")+ (LF "b")* LF\n%import common.LF'),
        ("sum", SUM),
    ):
        made = TextGrammar("input", "lark", definition, forms_of("lark", definition)[0])
        tools.append(replace(tool(name, None), input=made))
    rng, num_read = random.Random(8), {"lines": 0, "sum": 0}
    for _ in range(12):
        choosing = Choosing((*tools, CITY), not opened, rng.choice(["lines", "sum"]))
        grammar = held(format, choosing, is_opened=opened)
        begin = [VOCABULARY.control_ids[format.calls_begin]] if opened else []
        tokens = drawn(grammar, rng, begin)
        for name, arguments in called(replied(format, tokens, choosing, thinks=False)):
            text = as_input(arguments)
            if END in tokens:
                assert json.loads(arguments) == {"input": text}
                assert _is_allowed(name, text), text
                num_read[name] += 1
    assert all(num_read.values()), num_read


def _is_allowed(name: str, text: str) -> bool:
    if name == "lines":
        return re.fullmatch(r'[a"]+(\nb)*\n', text) is not None
    while "(" in text:
        shorter = re.sub(r'\([0-9"\\](\+[0-9"\\])*\n?\)', "0", text)
        if shorter == text:
            return False
        text = shorter
    return re.fullmatch(r'[0-9"\\](\+[0-9"\\])*\n?', text) is not None


def test_items_of_a_search_are_listed_with_the_side_that_runs_it() -> None:
    search = {"type": "tool_search_call", "call_id": "c", "arguments": {}}
    found = {"type": "tool_search_output", "call_id": "c", "tools": [function("f")]}
    for given, side in (({}, "client"), ({"execution": "server"}, "server")):
        items = parse({**search, **given}, {**found, **given}).request.input
        page = ResponseItemList.model_validate(input_page(listed(items), {}))
        assert [item.type for item in page.data] == [
            "tool_search_output",
            "tool_search_call",
            "message",
        ]
        assert [item.execution for item in page.data[:2]] == [side, side]


def test_openai_s_client_reads_calls_of_all_types() -> None:
    operation = {"type": "create_file", "path": "a", "diff": "+b"}
    calls = [
        ("local_shell", {"command": ["ls"]}),
        ("shell", {"commands": ["ls"]}),
        ("apply_patch", {"operation": operation}),
        ("n__run", {"input": 'a\n"'}),
        ("tool_search", {"row": 1}),
    ]
    text = written(V31, *((name, json.dumps(arguments)) for name, arguments in calls))
    with tool_model() as model, serving(model, says(lambda prompt: text)) as it:
        client = OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
        asked: dict[str, Any] = {"model": "small", "input": "Hi.", "tools": ALL_TOOLS}
        with client, client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed"
        assert "response.custom_tool_call_input.delta" in kinds
        local, shell, patch, custom, search = final.output
        assert (local.action.command, shell.action.commands) == (["ls"], ["ls"])
        assert patch.operation.to_dict() == operation
        assert (custom.namespace, custom.name, custom.input) == ("n", "run", 'a\n"')
        assert search.arguments == {"row": 1}


# ---- connections ----


@pytest.mark.promise("A WebSocket is answered with 426")
def test_a_websocket_is_sent_to_http(model: Any) -> None:
    with serving(model, spell(model, "a")) as it:
        for path in ("/v1/responses", "/responses"):
            with socket.create_connection(it.address) as connection:
                head = (
                    f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
                    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
                )
                connection.sendall(head.encode())
                reply = connection.recv(65536).decode()
            first, *lines = reply.partition("\r\n\r\n")[0].lower().split("\r\n")
            assert first.startswith("http/1.1 426")
            assert "upgrade: http/1.1" in lines
            assert "connection: upgrade" in lines
