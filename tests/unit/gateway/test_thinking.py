"""Thinking switches of all services, in all formats: their effect on prompts and replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hadal.core.errors import RequestError
from hadal.core.plans import Grammar
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.api.openai.request import parse_chat
from hadal.gateway.api.responses.request import parse_response, read_response
from hadal.gateway.desk.service import ServedModel, read_served_model
from hadal.gateway.text.asks import ChatAsk

from .model_folder import TEMPLATE, write_model_folder
from .scenes import error_of, scene

MESSAGES = [{"role": "user", "content": "2 + 2?"}]
PATH_TO_BODY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "2 + 2?"},
}
OFF: list[dict[str, Any]] = [
    {"thinking": False},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_args": {"enable_thinking": False}},
]
ON: list[dict[str, Any]] = [
    {},
    {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "auto"}},
    {"enable_thinking": True},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": "xhigh"}},
    {"reasoning_effort": "ultra"},
]
BUDGETS: list[dict[str, Any]] = [
    {"thinking_budget": 5},
    {"thinking_token_budget": 5},
    {"thinking_budget_tokens": 5},
    {"reasoning_budget": 5},
    {"reasoning_budget_tokens": 5},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"reasoning": {"max_tokens": 5}},
]


EFFORTS = {
    **dict.fromkeys(("minimal", "low"), "low"),
    **dict.fromkeys(("medium", "high", "xhigh"), "high"),
    **dict.fromkeys(("max", "ultra"), "max"),
}
"""Effort that a client sends -> effort that the template gets."""
PATH_TO_PARSE: dict[str, Callable[[bytes], ChatAsk]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/messages": parse_messages,
    "/v1/responses": lambda body: parse_response(read_response(body), {}).chat,
}


def parsed(path: str, fields: dict[str, Any]) -> ChatAsk:
    return PATH_TO_PARSE[path](json.dumps({"model": "m", **PATH_TO_BODY[path], **fields}).encode())


@pytest.mark.promise("Every format accepts the thinking switches of all services.")
@pytest.mark.parametrize("path", PATH_TO_BODY)
def test_every_switch_is_taken_in_every_format(path: str) -> None:
    for fields in OFF:
        assert parsed(path, fields).rendering.thinking is False, fields
    for fields in ON:
        if not fields and path == "/v1/messages":
            continue  # Without `thinking`, it thinks only if the deployment says so.
        assert parsed(path, fields).rendering.thinking is not False, fields
    for fields in BUDGETS:
        assert parsed(path, fields).budget == 5, fields
    assert parsed(path, {"thinking_budget": -1}).budget is None


@pytest.mark.promise(
    "Efforts are mapped as in DeepSeek's service: minimal and low to low; medium, high and xhigh "
    "to high; max and ultra to max."
)
@pytest.mark.parametrize("path", PATH_TO_BODY)
def test_every_effort_reaches_the_template_in_every_format(path: str) -> None:
    for effort, value in EFFORTS.items():
        for fields in (
            {"reasoning_effort": effort},
            {"reasoning": {"effort": effort}},
            {"output_config": {"effort": effort}},
        ):
            if "output_config" in fields and path != "/v1/messages":
                continue
            kwargs = parsed(path, fields).rendering.template_kwargs
            assert kwargs["reasoning_effort"] == value, fields
    with pytest.raises(RequestError, match="'ultra'"):
        parsed(path, {"reasoning_effort": "most"})


def test_responses_name_the_turns_with_reasoning() -> None:
    """A chat has other fields for that, and refuses this one."""
    for context, keeps in (("all_turns", True), ("current_turn", False), ("auto", None)):
        kwargs = parsed(
            "/v1/responses", {"reasoning": {"context": context}}
        ).rendering.template_kwargs
        assert kwargs.get("preserve_thinking") is keeps
        assert kwargs.get("clear_thinking") is (None if keeps is None else not keeps)
    with pytest.raises(RequestError, match=r"reasoning\.context"):
        parsed("/v1/chat/completions", {"reasoning": {"context": "all_turns"}})


@pytest.mark.parametrize("path", PATH_TO_BODY)
async def test_switches_and_budgets_do_what_they_say(model: ServedModel, path: str) -> None:
    closes = model.vocabulary.control_ids["</think>"]
    budget = Grammar("", model.eos_ids, closes, budget=5)
    async with scene(model) as it:
        for fields, end, grammar in (
            ({"enable_thinking": False, "thinking_budget": 5}, "</think>", None),
            ({"thinking_budget": 5}, "<think>", budget),
        ):
            body = {"model": "small", **PATH_TO_BODY[path], **fields}
            reply = await it.client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            asked = it.units.submitted[-1]
            assert model.vocabulary.decode(asked.prompt).rstrip().endswith(end)
            assert asked.sampling.grammar == grammar


async def test_a_budget_goes_with_a_schema(model: ServedModel) -> None:
    wanted = {"type": "json_object", "schema": {"type": "object", "required": ["a"]}}
    async with scene(model, 'Easy.</think>{"a": 1}') as it:
        for fields in ({}, {"thinking_budget": 5}):
            body = {"model": "small", "messages": MESSAGES, "response_format": wanted, **fields}
            reply = await it.client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
        plain, bounded = (one.sampling.grammar for one in it.units.submitted)
        assert plain is not None
        assert bounded is not None
        assert '"required": ["a"]' in plain.text
        assert (plain.text, plain.budget, bounded.text, bounded.budget) == (
            bounded.text,
            -1,
            plain.text,
            5,
        )


@pytest.mark.promise("A budget is refused with 400 if the template has no mark of reasoning")
@pytest.mark.parametrize("has_tokens", [True, False])
async def test_a_model_without_the_mark_refuses_a_budget(tmp_path: Path, has_tokens: bool) -> None:
    template = TEMPLATE.replace("<think>\n", "") if has_tokens else TEMPLATE
    folder = write_model_folder(tmp_path / "m", think_tokens=has_tokens, template=template)
    async with scene(read_served_model(folder, "small")) as it:
        body = {"model": "small", "messages": MESSAGES}
        reply = await it.client.post("/v1/chat/completions", json={**body, "thinking_budget": 5})
        assert error_of(reply, 400)["param"] == "thinking_budget"
        assert "</think>" in error_of(reply, 400)["message"]
        reply = await it.client.post("/v1/chat/completions", json={**body, "enable_thinking": True})
        assert reply.status_code == (400 if has_tokens else 200), "it has a template that thinks"
        assert (await it.client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_a_reply_may_leave_its_reasoning_out(
    model: ServedModel, fields: dict[str, Any]
) -> None:
    async with scene(model) as it:
        body = {"model": "small", "messages": MESSAGES, "logprobs": True}
        shown = (await it.client.post("/v1/chat/completions", json=body)).json()
        hidden = (await it.client.post("/v1/chat/completions", json={**body, **fields})).json()
        stream = await it.client.post(
            "/v1/chat/completions", json={**body, **fields, "stream": True}
        )
        said, left = shown["choices"][0], hidden["choices"][0]
        assert said["message"]["reasoning_content"] == "Easy."
        assert left["message"]["reasoning_content"] is None
        assert left["message"]["content"] == said["message"]["content"]
        assert left["logprobs"] == {**said["logprobs"], "reasoning_content": []}
        assert hidden["usage"] == {**shown["usage"], **_cached(hidden)}
        assert b"Easy" not in stream.content


def _cached(body: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in body["usage"].items()
        if "cache" in name or "prompt_tokens_d" in name
    }
