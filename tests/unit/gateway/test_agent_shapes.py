"""Requests with the fields, types, order and sizes of real agents are served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import shapes, table
from tests.clients.agents.agents import AGENTS, Agent

from . import fake_units
from .event_streams import named_events
from .tool_model import says, tool_model
from .world import world

ANSWER = "Q"
CONTEXT_TOKENS = 400_000
"""The vocabulary of the tests has a token for each byte."""


def shape(name: str) -> dict[str, Any]:
    return json.loads((shapes.FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", AGENTS)
async def test_the_request_of_an_agent_is_served(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_units, "NUM_BLOCKS", CONTEXT_TOKENS // 64)
    found = shape(name)
    body = shapes.filled(found["body"])
    assert shapes.num_chars(body) == found["num_chars"]
    with tool_model() as model:
        big = dataclasses.replace(model, name=body["model"], context_tokens=CONTEXT_TOKENS)
        async with world(big, says(lambda prompt: ANSWER)) as it:
            headers = shapes.filled(found["headers"])
            reply = await it.client.post(found["path"], json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            assert _is_complete(AGENTS[name], reply), reply.text[-500:]
            await it.settle()


def _is_complete(agent: Agent, reply: Any) -> bool:
    """Return whether a stream has the answer and its last event."""
    assert f'"{ANSWER}"' in reply.text
    if agent.api.endswith("completions"):
        return reply.text.rstrip().endswith("data: [DONE]")
    return named_events(reply.content)[-1]["type"] in ("response.completed", "message_stop")


@pytest.mark.parametrize("name", AGENTS)
def test_a_request_has_no_text_of_an_agent(name: str) -> None:
    """Each text of several words stands as its size, or is an argument that our script wrote."""
    for text in _texts(shape(name)["body"]):
        own = "notes.t" in text or text.startswith(("{", "***"))
        assert own or len(text.split()) <= 1, text


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def test_a_filled_shape_has_the_shape() -> None:
    body = {"model": "m", "input": [{"type": "message", "content": "one two three"}], "n": 1}
    filled = shapes.filled(shapes.shape_of(body))
    assert shapes.shape_of(filled) == shapes.shape_of(body)
    assert filled["input"][0]["content"] != "one two three"
    assert len(json.dumps(filled)) == len(json.dumps(body))


def test_the_page_has_the_settings_that_are_run() -> None:
    page = Path(table.DOCUMENT).read_text(encoding="utf-8")
    assert page.startswith(table.HEAD)
    for agent in AGENTS.values():
        assert table.section(agent).rstrip() in page
        assert f"| {agent.title} | {agent.version} |" in page
    assert page.count("\n### ") == len(AGENTS)
