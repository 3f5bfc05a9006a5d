"""First requests of agents, in the form in which Codex and Claude Code send them, are served."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hadal.core.errors import RequestError
from hadal.gateway.api import fields
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.api.responses.calls import as_arguments, as_input
from hadal.gateway.api.responses.request import parse_response, read_response
from hadal.gateway.api.responses.tools import ResponseTool, offered
from hadal.gateway.text.asks import PastCall

from .event_streams import named_events
from .test_tools import V31, written
from .tool_model import says, tool_model
from .world import world

PARAMETERS = {"type": "object", "properties": {"row": {"type": "integer"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "strict": False, "parameters": PARAMETERS, **fields}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Of the user.", "tools": [*tools]}


APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CODEX: dict[str, Any] = {
    "model": "small",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "prompt_cache_key": "k",
    "client_metadata": {"a": "b"},
    "text": {"verbosity": "low"},
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": text}]}
        for text in ("Rules.", "More rules.")
    ]
    + [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}],
    "tools": [
        function("exec_command"),
        function("find_row"),
        namespace("mcp__ledger", function("find_row"), function("close")),
        APPLY_PATCH,
        {"type": "web_search", "external_web_access": True},
    ],
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "small",
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        for text in ("x-anthropic-billing-header: 1", "You are an agent.", "Rules.")
    ],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": PARAMETERS},
        {"name": "Later", "input_schema": PARAMETERS, "defer_loading": True},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "system", "content": "Be brief."},
    ],
}


def parse(**more: Any) -> Any:
    return parse_response(read_response(json.dumps({**CODEX, **more}).encode()), {})


def parse_message(**more: Any) -> Any:
    return parse_messages(json.dumps({**CLAUDE_CODE, **more}).encode())


@pytest.mark.promise("a call of their functions comes back with its `namespace`")
def test_functions_of_a_namespace_are_offered_under_names_of_their_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    for _ in range(2):
        names = [tool.name for tool in parse().chat.rendering.choosing.tools]
    assert names == [
        "exec_command",
        "find_row",
        "mcp__ledger__find_row",
        "mcp__ledger__close",
        "apply_patch",
    ]
    (record,) = caplog.records
    assert "web_search" in record.getMessage()
    assert record.levelno == logging.WARNING


def test_no_two_tools_have_one_name() -> None:
    tools = [
        ResponseTool(type="function", name="a__b_c"),
        ResponseTool(
            type="namespace",
            name="a",
            tools=[ResponseTool(type="function", name=name) for name in ("b_c", "b.c", "x" * 200)],
        ),
    ]
    found = offered(tools, ())
    assert len(found.flat_to_name) == len(found.tools) == 4
    for flat, call in found.flat_to_name.items():
        assert found.flat_of(*call) == flat
        assert len(flat) <= 128


def test_earlier_calls_have_the_names_that_are_offered() -> None:
    items = [
        *CODEX["input"],
        {
            "type": "reasoning",
            "summary": [],
            "content": None,
            "encrypted_content": "x",
            "id": "rs_1",
        },
        {
            "type": "function_call",
            "namespace": "mcp__ledger",
            "name": "find_row",
            "call_id": "c1",
            "arguments": '{"row": 1}',
        },
        {"type": "custom_tool_call", "name": "apply_patch", "call_id": "c2", "input": 'a "b"\n'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "id": "fco_1",
            "output": [{"type": "input_text", "text": "row 1"}],
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "id": "ctco_1", "output": "done"},
    ]
    turns = parse(input=items).chat.turns
    assert turns[-3].calls == (
        PastCall("c1", "mcp__ledger__find_row", '{"row": 1}'),
        PastCall("c2", "apply_patch", as_arguments('a "b"\n')),
    )
    assert [turn.content for turn in turns[-2:]] == ["row 1", "done"]
    assert as_input(as_arguments('a "b"\n')) == 'a "b"\n'


@pytest.mark.parametrize(
    ("call", "item"),
    [
        (
            ("mcp__ledger__find_row", '{"row": 1}'),
            {"type": "function_call", "name": "find_row", "namespace": "mcp__ledger"}
            | {"arguments": '{"row": 1}'},
        ),
        (
            ("find_row", '{"row": 1}'),
            {"type": "function_call", "name": "find_row", "arguments": '{"row": 1}'},
        ),
        (
            ("apply_patch", as_arguments('a "b"\n')),
            {"type": "custom_tool_call", "name": "apply_patch", "input": 'a "b"\n'},
        ),
    ],
)
async def test_calls_come_back_in_the_client_s_form(
    call: tuple[str, str], item: dict[str, Any]
) -> None:
    with tool_model() as model:
        async with world(model, says(lambda prompt: written(V31, call))) as it:
            whole = await it.client.post("/v1/responses", json={**CODEX, "stream": False})
            assert whole.status_code == 200, whole.text
            body = whole.json()
            reply = await it.client.post("/v1/responses", json=CODEX)
            events = named_events(reply.content)
            streamed = events[-1]["response"]
            done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
            for output in (body["output"], streamed["output"], done):
                found = dict(output[-1])
                for name in ("id", "call_id", "status"):
                    assert found.pop(name)
                assert found == item
            assert streamed["status"] == "completed"
            assert [tool["type"] for tool in body["tools"]] == ["function"] * 2 + [
                "namespace",
                "custom",
            ]
            inputs = [one["input"] for one in events if one["type"].endswith("input.done")]
            assert inputs == ([item["input"]] if "input" in item else [])
            await it.settle()


def test_a_tool_of_a_namespace_can_be_demanded() -> None:
    choice = {"type": "function", "namespace": "mcp__ledger", "name": "close"}
    choosing = parse(tool_choice=choice).chat.rendering.choosing
    assert (choosing.is_forced, choosing.name) == (True, "mcp__ledger__close")


async def test_claude_code_s_first_turn_is_served() -> None:
    asked = parse_message()
    assert [tool.name for tool in asked.rendering.choosing.tools] == ["Bash"]
    assert [turn.role for turn in asked.turns] == ["system", "user", "system"]
    with tool_model() as model:
        async with world(model, says(lambda prompt: "Hi.")) as it:
            reply = await it.client.post("/v1/messages?beta=true", json=CLAUDE_CODE)
            assert reply.status_code == 200, reply.text
            assert named_events(reply.content)[-1]["type"] == "message_stop"
            await it.settle()


def test_a_deferred_tool_is_offered_once_it_is_referred_to() -> None:
    search = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "Later"}]
    messages = [
        *CLAUDE_CODE["messages"],
        {"role": "assistant", "content": [search]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}],
        },
    ]
    asked = parse_message(messages=messages)
    assert [tool.name for tool in asked.rendering.choosing.tools] == ["Bash", "Later"]
    assert "Later" in asked.turns[-1].content


@pytest.mark.parametrize("kind", ["compact_20260112", "other"])
def test_edits_of_other_types_are_refused(kind: str) -> None:
    for keep in ("all", {"type": "thinking_turns", "value": 1}):
        edits = [{"type": "clear_thinking_20251015", "keep": keep}, {"type": kind}]
        with pytest.raises(RequestError) as caught:
            parse_message(context_management={"edits": edits})
        assert caught.value.param == "context_management.edits[1].type"


def test_shown_to_the_model() -> None:
    """Functions of a namespace reach the template like any other functions."""
    (first, *_), (tool, *_) = parse().chat.turns, parse().chat.rendering.choosing.tools
    assert first.role == "system"
    assert tool.fields["function"]["parameters"] == PARAMETERS
