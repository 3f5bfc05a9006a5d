"""Readers of streams of named events: they add events up to the whole reply, as a client does."""

from __future__ import annotations

import json
from typing import Any


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON of every event except pings. Keep-alive comments are skipped too. An event's
    name must be its type.
    """
    events = []
    assert data.endswith(b"\n\n")
    for block in data.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, body = block.split("\n")
        fields = json.loads(body.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        if fields["type"] != "ping":
            events.append(fields)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events of /v1/messages add up to. A block must end before the next
    one begins: clients rely on that order.
    """
    first, *others, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    arguments = ""
    is_open = False
    for event in others:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(content)
            content.append(event["content_block"])
            is_open, arguments = True, ""
            continue
        assert is_open
        assert event["index"] == len(content) - 1
        block = content[-1]
        if kind == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = parsed(arguments)
            continue
        assert kind == "content_block_delta"
        change = event["delta"]
        if change["type"] == "input_json_delta":
            assert block["type"] == "tool_use"
            arguments += change["partial_json"]
            continue
        field = change["type"].removesuffix("_delta")
        assert field in block
        block[field] += change[field]
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def parsed(arguments: str) -> dict[str, Any]:
    """Return tool arguments as a message has them: an object, or INVALID_JSON with the text."""
    try:
        found = json.loads(arguments or "{}", parse_constant=lambda _: None)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the response in the last event of /v1/responses; the others must add up to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, started, *others, last = events
    assert (created["type"], started["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == started["response"]
    assert created["response"]["output"] == []
    output: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in others:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["output_index"] == len(output) - 1
            output[-1] = event["item"]
            assert _text_of(event["item"]) == texts[-1]
        elif kind.endswith((".done", ".added")):
            assert event["item_id"] == output[event["output_index"]]["id"]
        else:
            raise AssertionError(kind)
    assert last["type"] == f"response.{last['response']['status']}"
    # `_bare` ignores the status: items can be sent as completed before the reply is cut off.
    assert [_bare(item) for item in output] == [_bare(item) for item in last["response"]["output"]]
    response: dict[str, Any] = last["response"]
    return response


def _bare(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "status"}


def _text_of(item: dict[str, Any]) -> str:
    if item["type"] in ("function_call", "custom_tool_call"):
        return str(item.get("arguments", item.get("input")))
    return "".join(part["text"] for part in item.get("content", ()))
