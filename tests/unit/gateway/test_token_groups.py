"""Steps of several tokens per request give the same reply and the same bill as steps of one
token.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hadal.core.facts import RequestFact
from hadal.gateway.desk.service import ServedModel

from .scenes import TEXT
from .test_accounting import booked
from .world import CHAT, spell

ASKED: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"n": 3, "logprobs": True},
    {"stop": "wer i"},
    {"stop": ["4"], "logprobs": True},
    {"max_tokens": 6},
    {"max_tokens": 1},
]


def answer(
    model: ServedModel, tokens_step: int, fields: dict[str, Any]
) -> tuple[dict[int, Any], dict[str, Any], list[tuple[object, ...]]]:
    """Return the content of each choice of a reply, its usage, and its facts of the ledger."""

    async def ask() -> tuple[str, list[RequestFact]]:
        async with booked(model, spell(model, TEXT)) as (it, sink):
            it.units.tokens_step = tokens_step
            reply = await it.client.post("/v1/chat/completions", json=CHAT | fields)
            assert reply.status_code == 200
            await it.settle()
            assert it.gateway.link._front.check() == []
            return reply.text, sink.requests

    text, facts = asyncio.run(ask())
    billed = [
        (
            fact.tokens_hit,
            fact.tokens_miss,
            fact.tokens_out,
            fact.kv_tokens,
            fact.end,
            fact.income_pico_usd,
        )
        for fact in facts
    ]
    if not fields.get("stream"):
        body = json.loads(text)
        choices = {choice["index"]: choice for choice in body["choices"]}
        return choices, body["usage"], billed
    joined: dict[int, Any] = {}
    usage: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            one = joined.setdefault(choice["index"], {"text": "", "thought": "", "tokens": []})
            assert "finish" not in one, "nothing comes behind the finish"
            one["text"] += choice["delta"]["content"]
            one["thought"] += choice["delta"]["reasoning_content"] or ""
            for entries in (choice["logprobs"] or {}).values():
                one["tokens"] += entries or []
            if choice["finish_reason"]:
                one["finish"] = choice["finish_reason"]
    return joined, usage, billed


@pytest.mark.parametrize("tokens_step", [2, 4, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", ASKED)
def test_a_reply_is_the_same_however_many_tokens_a_step_draws(
    model: ServedModel, tokens_step: int, stream: bool, fields: dict[str, Any]
) -> None:
    """Text, finish, log-probabilities, usage and bill are equal."""
    if stream:
        fields = fields | {"stream": True, "stream_options": {"include_usage": True}}
    one_by_one, together = (answer(model, number, fields) for number in (1, tokens_step))
    assert together == one_by_one
    choices, usage, billed = together
    assert len(choices) == len(billed) == fields.get("n", 1)
    assert usage["completion_tokens"] == sum(fact[2] for fact in billed)  # type: ignore[misc]
