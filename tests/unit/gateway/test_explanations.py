"""Explanations of cache misses: their reasons, through the gateway with pretended units and alone."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hadal.core.config import GatewayConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation, PrefixSources
from hadal.core.plans import Sampling
from hadal.gateway.desk.auth import Keys, Tenant
from hadal.gateway.desk.cache_pages import CachePages
from hadal.gateway.desk.cache_reasons import Comparison
from hadal.gateway.desk.explanations import SHOWN_CHARS, CacheExplainer, PromptTrace
from hadal.gateway.desk.prefixes import KeptPrompt, packed
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.chat import Prompt
from tests.levels import MORE
from tests.waiting import wait_for

from .scenes import error_of, events, scene
from .world import World

RULES = "Naïve café: the answer is four. Write the numbers below each other. " * 8
QUESTION = "The next line follows the last one. " * 10
ALICE, BOB = "alice-key", "bob-key"
BOTH_KEYS = (ALICE, f"{BOB} operator")
OFF = GatewayConfig(explain_cache_mb=0)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SYSTEM, USER = message("system", RULES + "It is Monday."), message("user", QUESTION)


def header(key: str) -> dict[str, str] | None:
    return {"authorization": f"Bearer {key}"} if key else None


async def ask(it: World, *messages: dict[str, str], key: str = "", **fields: Any) -> Any:
    """Return the id of a chat's reply and its explanation, which agrees with its cached tokens."""
    asked = {"explain_cache": True, "max_tokens": 2, "ignore_eos": True, **fields}
    reply = await it.chat(header(key), messages=[*messages], **asked)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    [found] = usage["cache_explanation"]
    assert found["found_blocks"] * BLOCK_TOKENS == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["reusable_blocks"] == (usage["prompt_tokens"] - 1) // BLOCK_TOKENS
    return reply.json()["id"], found


async def explain(it: World, *messages: dict[str, str], key: str = "", **fields: Any) -> Any:
    return (await ask(it, *messages, key=key, **fields))[1]


def explainer_of(it: World) -> CacheExplainer:
    explainer = it.gateway.service.explainer
    assert explainer is not None
    assert explainer.check() == []
    return explainer


async def test_a_conversation_is_explained_turn_by_turn(model: ServedModel) -> None:
    async with scene(model) as it:
        first = await explain(it, SYSTEM, USER)
        assert first["reason"] == "first"
        assert "position" not in first
        assert (await explain(it, SYSTEM, USER))["reason"] == "cached"
        turns = [SYSTEM, USER, message("assistant", "Four."), message("user", QUESTION + "Why?")]
        longer = await explain(it, *turns)
        assert longer["reason"] == "extends"
        assert longer["message"] == {"role": "assistant", "index": 2}
        assert "Four." in longer["text"]
        assert longer["found_blocks"] == longer["common_tokens"] // BLOCK_TOKENS > 0
        assert len(explainer_of(it)) == 3 + 1, "three explanations, and one prompt of all turns"


async def test_a_difference_names_its_token_its_message_and_both_texts(model: ServedModel) -> None:
    async with scene(model) as it:
        await explain(it, SYSTEM, USER)
        today = await explain(it, message("system", RULES + "It is Tuesday, ü."), USER)
        assert today["reason"] == "differs"
        assert today["message"] == {"role": "system", "index": 0}
        assert "uesday, ü." in today["text"]
        assert "onday." in today["kept_text"]
        assert max(len(today["text"]), len(today["kept_text"])) <= SHOWN_CHARS
        assert today["position"] == today["common_tokens"]
        assert today["position"] // BLOCK_TOKENS == today["found_blocks"]
        later = await explain(it, SYSTEM, message("user", QUESTION + "abc" + QUESTION))
        assert (later["reason"], later["message"]) == ("extends", {"role": "user", "index": 1})
        other = await explain(it, SYSTEM, message("user", QUESTION + "abd" + QUESTION))
        assert (other["reason"], other["message"]) == ("differs", {"role": "user", "index": 1})
        assert (await explain(it, message("user", "hi")))["reason"] == "short"


async def test_evicted_blocks_are_told_from_another_text(model: ServedModel) -> None:
    async with scene(model) as it:
        await explain(it, SYSTEM, USER)
        it.units.names.clear()
        again = await explain(it, SYSTEM, USER)
        assert (again["reason"], again["found_blocks"]) == ("evicted", 0)
        assert again["common_tokens"] // BLOCK_TOKENS >= again["reusable_blocks"] > 0


def test_a_prompt_still_being_computed_is_told_from_an_evicted_one(
    model: ServedModel,
) -> None:
    prompt = packed(range(200))
    kept = KeptPrompt(prompt, b"", b"", "f0", 5.0)
    reasons = {
        arrived_s: Comparison(200, 200, "f0", True, 0, PrefixSources(), arrived_s, kept, 200).reason
        for arrived_s in (4.0, 6.0)
    }
    assert reasons == {4.0: "concurrent", 6.0: "evicted"}


@pytest.mark.parametrize(
    ("sources", "fingerprint", "is_named", "reason"),
    [
        (PrefixSources(num_recomputed=64), "f0", True, "on_disk"),
        (PrefixSources(num_elsewhere=128), "f0", True, "elsewhere"),
        (PrefixSources(), "f1", True, "weights"),
        (PrefixSources(), "f0", False, "off"),
        (PrefixSources(), "f0", True, "evicted"),
    ],
)
def test_the_front_knows_where_blocks_are(
    sources: PrefixSources, fingerprint: str, is_named: bool, reason: str
) -> None:
    prompt = packed(range(200))
    kept = KeptPrompt(prompt, b"", b"", "f0", 5.0)
    found = Comparison(200, 200, fingerprint, is_named, 64, sources, 6.0, kept, 200)
    assert found.reason == reason
    assert found.detail(None).endswith(".")


async def test_usage_has_it_in_every_api_and_in_streams(model: ServedModel) -> None:
    async with scene(model) as it:
        await explain(it, SYSTEM, USER)
        chat = {"model": "small", "messages": [SYSTEM, USER], "max_tokens": 2}
        whole = {**chat, "explain_cache": True}
        reply = await it.client.post("/v1/chat/completions", json={**whole, "stream": True})
        assert events(reply)[-1]["usage"]["cache_explanation"][0]["reason"] == "cached"
        body = {**whole, "system": SYSTEM["content"], "messages": [USER]}
        usage = (await it.client.post("/v1/messages", json=body)).json()["usage"]
        assert usage["cache_explanation"][0]["reason"] == "cached"
        lines = (await it.client.post("/v1/messages", json={**body, "stream": True})).text
        begun = next(json.loads(line[6:]) for line in lines.split("\n") if line[:5] == "data:")
        assert begun["message"]["usage"]["cache_explanation"][0]["reason"] == "cached"
        asked = {"model": "small", "input": [SYSTEM, USER], "explain_cache": True}
        usage = (await it.client.post("/v1/responses", json=asked)).json()["usage"]
        assert usage["cache_explanation"][0]["reason"] == "cached"
        plain = {"model": "small", "prompt": [RULES, RULES + "b" + RULES], "n": 2, "max_tokens": 2}
        usage = (
            await it.client.post("/v1/completions", json={**plain, "explain_cache": True})
        ).json()["usage"]
        assert len(usage["cache_explanation"]) == 2, "one for each prompt, none for each choice"
        for path, sent in (("chat/completions", chat), ("completions", plain)):
            usage = (await it.client.post(f"/v1/{path}", json=sent)).json()["usage"]
            assert "cache_explanation" not in usage


async def test_tenants_and_salts_are_compared_with_their_own_prompts_only(
    model: ServedModel,
) -> None:
    async with scene(model, keys=BOTH_KEYS) as it:
        of_alice, _ = await ask(it, SYSTEM, USER, key=ALICE)
        changed = message("system", RULES + "It is Sunday.")
        of_bob, found = await ask(it, changed, USER, key=BOB)
        assert found["reason"] == "first"
        assert (await explain(it, changed, USER, key=ALICE, cache_salt="x"))["reason"] == "first"
        path = "/v1/explain_cache"
        refused = await it.client.get(f"{path}/{of_alice}", headers=header(BOB))
        assert error_of(refused, 404)["code"] == "request_not_found"
        report = (await it.client.get(f"{path}/{of_alice}", headers=header(ALICE))).json()
        assert (report["id"], report["prompts"][0]["reason"]) == (of_alice, "first")
        assert (await it.client.get(path)).status_code == 401
        for name, status in (("/explain_cache", 200), (f"/explain_cache/{of_alice}", 200)):
            assert (await it.client.get(name, headers=header(ALICE))).status_code == status
        assert (await explain(it, changed, USER, key=ALICE))["text"] != ""
        seen = {}
        for key in (ALICE, BOB):
            listed = (await it.client.get(path, headers=header(key))).json()["data"]
            seen[key] = {one["id"]: one["prompts"][0] for one in listed}
        assert of_bob not in seen[ALICE]
        assert len(seen[BOB]) == 4, "an operator sees all requests"
        for name, one in seen[BOB].items():
            assert name == of_bob or not one.keys() & {"text", "kept_text"}, "but no other's text"
        assert any("text" in one for one in seen[ALICE].values())


@pytest.mark.promise("When a key is withdrawn, its prompts and explanations are dropped at once.")
async def test_everything_goes_with_the_key(model: ServedModel) -> None:
    async with scene(model, keys=BOTH_KEYS, then_stop=False) as it:
        of_alice, _ = await ask(it, SYSTEM, USER, key=ALICE)
        await explain(it, SYSTEM, USER, key=BOB)
        explainer = explainer_of(it)
        num_before = len(explainer)
        it.units.go.clear()
        running = asyncio.create_task(explain(it, USER, key=ALICE))
        await wait_for(lambda: it.units.prefilling, "a request of the key runs")
        it.gateway.tenancy.take(Keys([BOTH_KEYS[1]]))
        assert len(explainer) == num_before - 2 == 2
        it.units.go.set()
        assert (await running)["reason"] == "first"
        assert len(explainer_of(it)) == 2, "a request that ends later leaves nothing"
        it.gateway.tenancy.take(Keys(BOTH_KEYS))
        report = await it.client.get(f"/v1/explain_cache/{of_alice}", headers=header(ALICE))
        assert report.status_code == 404


async def test_0_keeps_and_explains_nothing(model: ServedModel) -> None:
    async with scene(model, settings=OFF) as it:
        assert it.gateway.service.explainer is None
        reply = await it.chat(explain_cache=True)
        assert error_of(reply, 400)["param"] == "explain_cache"
        assert (await it.chat()).status_code == 200
        assert (await it.chat(explain_cache=False)).status_code == 200
        for path in ("/v1/explain_cache", "/v1/explain_cache/chatcmpl-1"):
            reply = await it.client.get(path)
            assert error_of(reply, 404)["code"] == "explain_cache_off"


async def test_a_gateway_waits_longer_for_the_front_than_the_front_for_others(
    model: ServedModel,
) -> None:
    """Otherwise a silent gateway would hide what the front and the others have."""
    waits: list[float] = []

    class Silent:
        async def ask(self, name: str, path: str, query: Any, timeout_s: float) -> None:
            waits.append(timeout_s)

    for has_front in (True, False):
        link: Any = SimpleNamespace(has_front=has_front, gateways=("own", "other"), pages=Silent())
        pages = CachePages(made(model, 4096), link, "own")
        with pytest.raises(ApiError, match="not known"):
            await pages.report(TENANT, "chatcmpl-1")
    of_front, of_other = waits
    assert of_front < of_other


# ---- the store alone ----
TENANT = Tenant(b"salt", given_name="ann", key_digest=b"ann")


def trace_of(explainer: CacheExplainer, ids: tuple[int, ...], request_id: str) -> PromptTrace:
    generation = Generation(
        request_id,
        ids,
        (),
        1,
        (),
        0,
        Sampling(),
        0,
        salt=TENANT.salt,
        chain=b"some",
        fingerprint="f",
    )
    return explainer.trace(request_id, TENANT, generation, Prompt(ids))


def made(model: ServedModel, max_bytes: int) -> CacheExplainer:
    return CacheExplainer(max_bytes, model.vocabulary, lambda: 1.0, lambda: 2.0)


@pytest.mark.promise("at most 16 MiB a gateway")
def test_many_prompts_stay_within_the_memory(model: ServedModel) -> None:
    num_prompts = 10_000 if MORE else 1000
    max_bytes, rng = num_prompts * 400, Random(5)
    explainer = made(model, max_bytes)
    tracemalloc.start()
    try:
        for number in range(num_prompts):
            ids = (number, *range(rng.choice((10, 100, 1500))))
            trace_of(explainer, ids, f"chatcmpl-{number:032x}").computed(0, None, 0.0)
            assert explainer.num_bytes <= max_bytes
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert explainer.check() == []
    assert max_bytes // 2 < explainer.num_bytes
    assert num_bytes < max_bytes, "what is counted is not less than what is used"


def test_the_oldest_go_first(model: ServedModel) -> None:
    explainer = made(model, 64 << 10)
    for number in range(40):
        trace_of(explainer, (number,) * 100, f"{number}").computed(0, None, 0.0)
    present = [number for number in range(40) if explainer.report(b"ann", f"{number}")]
    assert present == list(range(40 - len(present), 40))
    assert 0 < len(present) < 40
    old, new = (trace_of(explainer, (number,) * 100, "new") for number in (0, 39))
    old.computed(0, None, 0.0)
    new.computed(0, None, 0.0)
    assert old.explanation is not None
    assert new.explanation is not None
    assert (old.explanation.common_tokens, new.explanation.common_tokens) == (0, 100)


def test_a_repeated_prompt_is_no_old_one(model: ServedModel) -> None:
    explainer = made(model, 64 << 10)
    for number in range(100):
        trace_of(explainer, (number,) * 100, f"{number}").computed(0, None, 0.0)
        for again in ((999,) * 100, (999,) * 50):
            trace = trace_of(explainer, again, f"{number} again")
            trace.computed(0, None, 0.0)
            assert trace.explanation is not None
            assert trace.explanation.common_tokens == len(again) * (number > 0 or len(again) == 50)
    assert explainer.check() == []


def test_waiting_prompts_take_no_memory_of_their_own(model: ServedModel) -> None:
    explainer = made(model, 1 << 20)
    ids = tuple(range(100_000))
    tracemalloc.start()
    try:
        traces = [trace_of(explainer, ids, f"{number}") for number in range(100)]
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 100 * 4096
    traces[0].computed(0, None, 0.0)
    assert explainer.report(b"ann", "0") is not None


def test_more_of_a_prompt_in_another_unit_is_the_reason_whatever_is_kept_here() -> None:
    """Another gateway served the prompt that this one continues."""
    for kept in (None, KeptPrompt(packed((0, 7)), b"", b"", "f0", 5.0)):
        num_common = 0 if kept is None else 1
        sources = PrefixSources(num_elsewhere=128)
        found = Comparison(200, 200, "f0", True, 0, sources, 6.0, kept, num_common)
        assert found.reason == "elsewhere"


def test_a_prompt_larger_than_the_memory_is_explained_and_not_kept(model: ServedModel) -> None:
    explainer = made(model, 4096)
    trace = trace_of(explainer, (7,) * 5000, "large")
    trace.computed(0, None, 0.0)
    assert trace.explanation is not None
    assert trace.explanation.reason == "first"
    assert explainer.num_bytes <= 4096
