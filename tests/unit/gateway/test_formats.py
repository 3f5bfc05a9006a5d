"""Grammars that ranks get for a response_format, and refusals of unsupported formats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.errors import RequestError
from hadal.core.messages.requests import Submit
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import ServedModel, Service
from hadal.gateway.text import template
from hadal.gateway.text.asks import AnswerFormat
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.formats import Formats
from hadal.roles.front.names import FrontNames
from hadal.tokens.grammars import grammar_text
from tests.schemas import SCHEMAS, closed

from .model_folder import BOS, EOS
from .scenes import error_of, scene
from .world import CHAT


def json_schema(schema: Any, name: str = "answer") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def intersections(num: int) -> dict[str, Any]:
    """Return a schema with `num` to the power of `num` combinations of alternatives."""
    return {
        "allOf": [
            {"anyOf": [closed(**{f"p{i}_{j}": {"type": "integer"}}) for j in range(num)]}
            for i in range(num)
        ]
    }


def unanchored(num: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(num)]}


def test_what_can_be_followed_passes(formats: Formats) -> None:
    for name, schema in SCHEMAS.items():
        wanted = AnswerFormat(name, schema)
        for _ in range(2):
            text = formats.text(wanted, follows_reasoning=False)
            assert text == grammar_text(schema, follows_reasoning=False)


def test_a_keyword_that_is_not_supported_is_named(formats: Formats) -> None:
    wanted = AnswerFormat("mine", closed(a={"not": {"type": "null"}}))
    with pytest.raises(RequestError, match="response_format 'mine': 'not' is not supported") as it:
        formats.text(wanted, follows_reasoning=False)
    assert it.value.param == "response_format"


@pytest.mark.parametrize("follows_reasoning", [False, True])
def test_a_schema_that_no_text_satisfies_is_refused(
    formats: Formats, follows_reasoning: bool
) -> None:
    with pytest.raises(RequestError, match="no text can satisfy the schema"):
        formats.text(AnswerFormat("mine", {"$ref": "#"}), follows_reasoning=follows_reasoning)


@pytest.mark.promise(
    "A schema of more than 64 KiB or 64 levels, or one that takes more than 0.25 s of "
    "a core to check, is a 400, too."
)
@pytest.mark.parametrize("schema", [unanchored(14), intersections(8)], ids=["regex", "product"])
def test_what_takes_too_long_to_look_at_is_refused(
    formats: Formats, monkeypatch: pytest.MonkeyPatch, schema: Any
) -> None:
    """The check runs within the limits of a process of its own, not in the gateway's process."""
    monkeypatch.setattr(template, "complaint", None)
    with pytest.raises(RequestError, match=r"Invalid schema .*(processor time|Unable|too)"):
        formats.text(AnswerFormat("long", schema), follows_reasoning=False)
    formats.text(AnswerFormat("short", closed(a={})), follows_reasoning=False)


@pytest.mark.promise("Reasoning is not constrained: the format begins after </think>.")
@pytest.mark.parametrize("thinking", [True, False])
async def test_what_ranks_are_asked(model: ServedModel, thinking: bool) -> None:
    service = Service(model, LimitsConfig(), FrontNames(CacheConfig(), "f0"))
    schema = closed(b={"type": "integer"}, a={"type": "string"})
    body = {**CHAT, "n": 2, "thinking": thinking, "response_format": json_schema(schema)}
    try:
        work = await service.chat(json.dumps(body).encode(), "r", Tenant(salt_of(b"key")))
    finally:
        service.close()
    close = model.vocabulary.control_ids["</think>"]
    grammars = [choice.generation.sampling.grammar for choice in work.choices]
    assert grammars[0] is grammars[1]
    assert grammars[0] is not None
    assert grammars[0].text == grammar_text(schema, follows_reasoning=thinking)
    assert grammars[0].begins_after == (close if thinking else -1)
    assert grammars[0].end_ids == model.eos_ids
    message = Submit(work.choices[0].generation)
    packed = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(packed, type=Submit) == message


@pytest.mark.parametrize(
    ("template", "thinking", "may_think"),
    [
        # Like R1-0528's template: the model opens its reasoning itself.
        ("{{ messages[0]['content'] }}", None, True),
        ("{{ messages[0]['content'] }}", False, False),
        ("{{ messages[0]['content'] }}</think>", None, False),
        ("{{ messages[0]['content'] }}<think>", False, False),
    ],
)
async def test_a_model_that_opens_its_reasoning_itself_may(
    model: ServedModel, template: str, thinking: bool | None, may_think: bool
) -> None:
    chat = ChatFormat(
        model.vocabulary, {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "test"
    )
    service = Service(replace(model, chat=chat), LimitsConfig(), FrontNames(CacheConfig(), "f0"))
    body = {**CHAT, "thinking": thinking, "response_format": json_schema({"type": "integer"})}
    try:
        work = await service.chat(json.dumps(body).encode(), "r", Tenant(salt_of(b"key")))
    finally:
        service.close()
    grammar, ids = work.choices[0].generation.sampling.grammar, model.vocabulary.control_ids
    assert grammar is not None
    assert (grammar.begins_with >= 0) == may_think
    if may_think:
        assert (grammar.begins_with, grammar.begins_after) == (ids["<think>"], ids["</think>"])


@pytest.mark.promise(
    "What cannot be followed is a 400 before anything is computed, and its message names "
    "the keyword"
)
async def test_over_http(model: ServedModel) -> None:
    async with scene(model) as it:
        body = {**CHAT, "response_format": json_schema({"type": "array", "uniqueItems": True})}
        completion = {"model": "small", "prompt": "hi", "response_format": body["response_format"]}
        for path, fields in (("chat/completions", body), ("completions", completion)):
            for stream in (False, True):
                reply = await it.client.post(f"/v1/{path}", json={**fields, "stream": stream})
                assert reply.status_code == 400
                error = error_of(reply, 400)
                assert error["type"] == "invalid_request_error"
                assert error["param"] == "response_format"
                assert "'uniqueItems'" in error["message"]
        assert not it.units.submitted
        reply = await it.chat(response_format={"type": "json_object"})
        assert reply.status_code == 200
        assert it.units.submitted[0].sampling.grammar is not None
