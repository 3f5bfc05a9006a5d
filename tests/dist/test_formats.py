"""Structured outputs are valid under any sampling, and equal with drafts, over many ranks, after
kills and preemption, and on another unit.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import httpx
import jsonschema
import pytest

from hadal.runtime.resolve import model_folder
from tests.dist import gate
from tests.dist.answers import PROMPT, Asked, ask_all, events_of
from tests.dist.oracle import FULL
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.dist.test_drafts import what_came
from tests.dist.test_ep_exactness import units
from tests.fresh import fresh
from tests.schemas import INTEGER, SCHEMAS, closed
from tests.unit.gateway.test_tools import BOS
from tests.waiting import PATIENCE_S, wait_for

TEMPERATURE = 1.5
DRAWN = {"temperature": TEMPERATURE, "top_p": 1}
"""Sampling of all requests. Among many tokens of similar probability the model's own top_p would
cut beside a border, which rounding moves when a request is recomputed (docs/decisions/005).
"""
NUM_EACH = 10 if FULL else 2
SERVED = pytest.mark.more("drafts, ranks, kills and preemption, each with a server of its own")
COMPLETIONS = "/v1/completions"
MAX_TOKENS = 240
PROMPTS = ["Write JSON: ", "2 + 2 = ", "Q: Which word is it?\nA: "]


def response_format(schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {"type": "json_object"}
    own = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": own}


def bodies_of(seed: int) -> list[dict[str, Any]]:
    """Return random requests under every schema, with some of no schema between them."""
    rng = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for number in range(NUM_EACH):
        for name, schema in SCHEMAS.items():
            body = {
                "prompt": rng.choice(PROMPTS),
                "max_tokens": rng.choice([20, MAX_TOKENS]),
                "seed": 1000 * number + rng.randrange(1000),
                **DRAWN,
                "return_token_ids": True,
                "response_format": response_format(schema),
                **({"repetition_penalty": 1.2} if rng.random() < 0.2 else {}),
                **({"logprobs": 2} if rng.random() < 0.2 else {}),
                **({"n": 2} if rng.random() < 0.2 else {}),
            }
            if name == "any" and number % 2:
                del body["response_format"]
            bodies.append(body)
    return bodies


def num_valid(bodies: list[dict[str, Any]], answers: list[Any]) -> int:
    """Return the number of finished answers; raises an error if one violates its schema."""
    num = 0
    for body, choices in zip(bodies, answers, strict=True):
        asked = body.get("response_format", {})
        for choice in choices:
            assert choice["finish_reason"] in ("stop", "length")
            if choice["finish_reason"] != "stop" or not asked:
                continue
            answer = json.loads(choice["text"])
            schema = asked.get("json_schema", {}).get("schema", {"type": "object"})
            jsonschema.validate(answer, schema)
            num += 1
    return num


@pytest.fixture(scope="module")
def requests() -> Asked:
    seed = fresh().randrange(2**31)
    print("requests: seed", seed)
    return Asked(COMPLETIONS, bodies_of(seed), what_came, model_folder(""))


@pytest.fixture
def asked(request: pytest.FixtureRequest, requests: Asked) -> Asked:
    """Requests answered by a server of two one-rank units, without drafts."""
    if not requests.answers:
        requests.ask(request.getfixturevalue("server"))
        assert num_valid(requests.bodies, requests.answers) > len(requests.bodies) / 5
    return requests


@SERVED
@pytest.mark.parametrize("drafts", [1, 3, "auto"] if FULL else [2])
def test_drafts_change_nothing(mortal: StartServer, asked: Asked, drafts: int | str) -> None:
    server = mortal(decode={"drafts": drafts})
    asked.assert_same(server)
    assert metric(server, "hadal_drafts_accepted_total") > 0


@SERVED
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_units_that_are_killed(mortal: StartServer, asked: Asked, victim: str) -> None:
    server = mortal(decode={"drafts": 2})
    before = metric(server, "hadal_retries_total")
    num_steps = 3 if victim == "decode-0" else 0
    asked.assert_same(server, lambda: kill_at_work(server, victim, num_steps))
    assert metric(server, "hadal_retries_total") > before


@SERVED
@pytest.mark.slow("four ranks form anew on two cores")
@pytest.mark.parametrize("victim", ["decode-0.2", "decode-0"])
def test_a_rank_and_a_leader_that_are_killed(
    mortal: StartServer, asked: Asked, victim: str
) -> None:
    """Requests of a dead rank continue on other ranks; requests of a dead leader stay on their ranks."""
    server = mortal(prefill=units(2), decode={**units(4), "drafts": 1})
    asked.assert_same(server, lambda: kill_at_work(server, victim))


@SERVED
def test_preemption(borrow: StartServer, server: Server) -> None:
    """Each of four answers needs four blocks, and the pool has four besides the scratch block. The gate
    holds decode until two answers are there, so one must be preempted.
    """
    schemas = [
        {"type": "array", "items": items, "minItems": MAX_TOKENS}  # An item has at least one token.
        for items in (INTEGER, {"enum": ["a", "b", None]})
    ]
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "seed": fresh().randrange(2**31),
            **DRAWN,
            "return_token_ids": True,
            "response_format": response_format(schema),
        }
        for schema in schemas
        for prompt in PROMPTS[:2]
    ]
    long = Asked(COMPLETIONS, bodies, what_came, model_folder(""))
    long.ask(server)
    assert all(one["finish_reason"] == "length" for choices in long.answers for one in choices)
    small = borrow(
        decode={"kv_blocks": 5, "kv_memory_mb": 0}, prefill={"kv_blocks": 40, "kv_memory_mb": 0}
    )
    small.gate.hold(gate.DECODE)

    before = metric(small, "hadal_preemptions_total")

    def was_preempted() -> bool:
        return metric(small, "hadal_preemptions_total") > before

    async def fill() -> None:
        await wait_for(
            lambda: metric(small, "hadal_generations_now", 'state="decoding"') > 1,
            "two are decoded, and both need three blocks more",
        )
        await wait_for(small.gate.stepping(gate.DECODE, was_preempted), "one is put back")
        small.gate.open()

    long.assert_same(small, fill)


def chat(server: Server, body: dict[str, Any], content: str = PROMPT) -> dict[str, Any]:
    """Return the first choice of a chat."""
    asked = {"messages": [{"role": "user", "content": content}], **body}
    (choice,) = asyncio.run(ask_all(server, "/v1/chat/completions", [asked]))[0]
    assert isinstance(choice, dict)
    return choice


@pytest.mark.promise("Reasoning is not constrained: the format begins after </think>.")
def test_a_chat_thinks_first_and_answers_in_its_format(server: Server) -> None:
    small = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = closed(sum=small, sure={"type": "boolean"})
    greedy = {"temperature": 0, "max_tokens": 600, "return_token_ids": True}
    free = chat(server, {**greedy, "thinking": True})
    for thinking in (True, False):
        held = {**greedy, "thinking": thinking, "response_format": response_format(schema)}
        choice = chat(server, held)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        reasoning = free["message"]["reasoning_content"] if thinking else None
        assert choice["message"]["reasoning_content"] == reasoning


@pytest.mark.promise(
    "If the answer without a schema would satisfy it, the constrained answer has the same tokens."
)
def test_a_format_that_the_free_answer_has_changes_nothing(server: Server) -> None:
    """hadal-tiny answers a sum with a number, which is JSON. The prompt is text, because a chat's
    template would add the format and thus change the prompt.
    """
    thought = "sum: 12 + 30\n2 1 + 0 3\n2+0=2, 2\n1+3=4, 42\n"
    prompt = f"{BOS}<｜User｜>What is 12 + 30?<｜Assistant｜><think>\n{thought}</think>\n\n"
    greedy = {"prompt": prompt, "temperature": 0, "max_tokens": 60, "return_token_ids": True}
    schemas: list[dict[str, Any]] = [{"type": "integer"}, {"enum": [7, 42, "42"]}, {}]
    bodies = [greedy, *({**greedy, "response_format": response_format(one)} for one in schemas)]
    free, *held = map(what_came, asyncio.run(ask_all(server, COMPLETIONS, bodies)))
    assert [(text, finish) for _, text, finish in free] == [("42", "stop")]
    assert held == [free] * len(schemas)


@pytest.mark.more("six answers of 400 tokens; tests/unit/tokens has the blanks")
def test_a_model_that_knows_no_json_comes_to_an_end(server: Server) -> None:
    """Such a model would draw blanks endlessly. Outside of strings, at most one blank, two line breaks
    and twenty more blanks may follow each other, and the answer is complete.
    """
    small = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = closed(
        a=small, b={"type": "boolean"}, c={"type": "array", "items": small, "maxItems": 2}
    )
    for temperature in (0, TEMPERATURE):
        for content in ("Hi", "What is 12 + 30?", "Write JSON."):
            body = {
                "temperature": temperature,
                "seed": 1,
                "max_tokens": 400,
                "response_format": response_format(schema),
                "thinking": False,
            }
            choice = chat(server, body, content)
            text = choice["message"]["content"]
            runs = re.findall(r"\s+", text)
            assert max(map(len, runs), default=0) <= 23, text
            assert max((run.count("\n") for run in runs), default=0) <= 2, text
            assert choice["finish_reason"] == "stop", text
            jsonschema.validate(json.loads(text), schema)


def test_streams_and_limits(server: Server) -> None:
    """Streams give the same texts, and a truncated answer has finish reason "length"."""
    schema = closed(words={"type": "array", "items": {"type": "string"}, "minItems": 40})
    body = {
        "prompt": "Words: ",
        "max_tokens": 30,
        "seed": 5,
        **DRAWN,
        "response_format": response_format(schema),
    }
    ((whole,),) = asyncio.run(ask_all(server, COMPLETIONS, [body]))
    assert whole["finish_reason"] == "length"
    assert whole["text"].lstrip().startswith("{")
    events = events_of(server, COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]


@pytest.mark.promise(
    "What cannot be followed is a 400 before anything is computed, and its message names "
    "the keyword"
)
def test_what_cannot_be_followed_is_refused_by_name(server: Server) -> None:
    for keyword, schema in (
        ("'not'", {"not": {"type": "null"}}),
        ("'uniqueItems'", closed(a={"type": "array", "uniqueItems": True})),
        ("'$ref'", {"$ref": "https://example.org/schema"}),
    ):
        body = {
            "model": server.model,
            "prompt": "hi",
            "response_format": response_format(schema),
        }
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "response_format"
        assert keyword in error["message"]
