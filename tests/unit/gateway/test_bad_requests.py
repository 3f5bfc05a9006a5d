"""Many bad requests of agents: each is refused, and the next good one is served."""

from __future__ import annotations

import gzip
import itertools
import json
from typing import Any

import pytest

from .tool_model import says, tool_model
from .world import world

NUM_BAD = 1000
USER = {"role": "user", "content": "hi"}
NAMED = {"type": "function", "name": "f", "parameters": {"type": "object"}}
BAD_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: other"}
REFERENCE = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
KINDS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/responses", {"tools": [NAMED, {"type": "odd"}]}, "tools[1].type"),
    (
        "/v1/responses",
        {"tools": [{"type": "custom", "name": "c", "format": BAD_GRAMMAR}]},
        "unknown name",
    ),
    (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "call_9", "output": "1"}]},
        "call_9",
    ),
    ("/v1/responses", {"input": [{"type": "odd"}]}, "input[0].type"),
    ("/v1/responses", {"reasoning": {"context": "odd"}}, "reasoning.context"),
    ("/v1/messages", {"tools": [{"type": "odd_1", "name": "odd"}]}, "tools[0].type"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [REFERENCE]}]}, "'x'"),
    ("/v1/messages", {"context_management": {"edits": [{"type": "odd"}]}}, "odd"),
    ("/v1/chat/completions", {"messages": [{"role": "odd", "content": "a"}]}, "role"),
    ("/v1/chat/completions", {"tools": [{"type": "odd"}]}, "tools[0].type"),
)
"""Path, fields of a bad request, and a text that the refusal has."""
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "small", "input": [USER]},
    "/v1/messages": {"model": "small", "messages": [USER], "max_tokens": 9},
    "/v1/chat/completions": {"model": "small", "messages": [USER]},
}


@pytest.mark.parametrize("kinds", [KINDS, *((each,) for each in KINDS[:3])])
async def test_after_many_bad_requests_a_good_one_is_served(
    kinds: tuple[tuple[str, dict[str, Any], str], ...],
) -> None:
    """Send all kinds in turn, or one kind alone."""
    with tool_model() as model:
        async with world(model, says(lambda prompt: "Hi.")) as it:
            num_bad = NUM_BAD if kinds is KINDS else NUM_BAD // 10
            for number, (path, fields, said) in zip(range(num_bad), itertools.cycle(kinds)):
                data, headers = json.dumps({**WHOLE[path], **fields}).encode(), {}
                if number % 3 == 1:
                    data, headers = gzip.compress(data), {"Content-Encoding": "gzip"}
                reply = await it.client.post(path, content=data, headers=headers)
                assert reply.status_code == 400, (fields, reply.text)
                assert said in reply.text, reply.text
            for path, body in WHOLE.items():
                reply = await it.client.post(path, json=body)
                assert reply.status_code == 200, reply.text
                assert "Hi." in reply.text
            await it.settle()
