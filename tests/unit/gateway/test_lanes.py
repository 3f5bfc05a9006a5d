"""Work on bodies before admission: its limits, its order, and the quota that it is charged to."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from hadal.core.config import LimitsConfig
from hadal.core.errors import RequestError
from hadal.core.messages.requests import Quota
from hadal.gateway.desk import far_host
from hadal.gateway.desk.lanes import SHORT_BYTES
from hadal.gateway.desk.salts import EVERYONE
from hadal.gateway.desk.service import COUNTED_CONTEXTS, ServedModel
from hadal.gateway.text.formats import Formats
from hadal.gateway.text.lengths import FAR, PIECE_CHARS, USUAL_CHARS, encode_within
from hadal.gateway.text.template import Checked, ConfinedProcess
from hadal.gateway.text.vocabulary import Vocabulary
from tests.waiting import DEADLINE_S, wait_for

from .scenes import error_of
from .test_far_host import TEXT, pair, unix_now
from .tool_model import tool_model
from .world import Clock, spell, world

HUGE = "<a b" * 1_000_000
"""4 MB of text. In the tests' vocabularies no token covers more than a few of its characters."""
LIMITS = LimitsConfig(max_body_bytes=8 << 20)
KEY_A, KEY_B = ({"authorization": f"Bearer {key}"} for key in "ab")


def of(text: str) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


WORST: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": HUGE}),
    "tokenize a chat": ("/tokenize", {"messages": of(HUGE)["messages"]}),
    "count": ("/v1/messages/count_tokens", of(HUGE)),
    "chat": ("/v1/chat/completions", of(HUGE)),
    "completion": ("/v1/completions", {"model": "small", "prompt": HUGE}),
    "message": ("/v1/messages", of(HUGE)),
    "response": ("/v1/responses", {"model": "small", "input": HUGE}),
}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the length in characters of each tokenised text is added."""
    lengths: list[int] = []
    plain = Vocabulary._word_ids

    def word_ids(vocabulary: Vocabulary, text: str) -> list[int]:
        lengths.append(len(text))
        return plain(vocabulary, text)

    monkeypatch.setattr(Vocabulary, "_word_ids", word_ids)
    return lengths


@pytest.mark.parametrize("name", WORST)
@pytest.mark.parametrize("longest", [5, 1_000_000])
async def test_a_body_costs_a_few_contexts_at_most_however_long_it_is(
    model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    encoded: list[int],
    name: str,
    longest: int,
) -> None:
    """The limit holds even if a token is so long that no text is refused by length alone."""
    monkeypatch.setattr(model.vocabulary, "_longest", longest)
    path, body = WORST[name]
    async with world(model, spell(model, "a"), limits=LIMITS) as it:
        encoded.clear()
        reply = await it.client.post(path, json=body)
        assert reply.status_code == 400
        words = "prompt is too long: " if "messages" in path else "tokens or more; at most"
        assert words in reply.json()["error"]["message"]
        await it.settle()
    most = COUNTED_CONTEXTS * model.context_tokens
    assert sum(encoded) <= USUAL_CHARS * FAR * most + 2 * PIECE_CHARS < len(HUGE) / 20


def test_a_text_of_long_tokens_is_not_taken_for_a_long_one() -> None:
    text = "a" * 100 * PIECE_CHARS
    asked: list[int] = []

    def encode(piece: str) -> list[int]:
        asked.append(len(piece))
        return [0] * (len(piece) // 1000)

    assert len(encode_within(encode, text, 2000, "prompt")) == len(text) // 1000
    assert asked[-1] == len(text)
    asked.clear()
    with pytest.raises(RequestError, match="at most 700 are allowed"):
        encode_within(encode, text, 700, "prompt")
    assert max(asked) == PIECE_CHARS
    assert sum(asked) < len(text), "it stops as soon as the text is sure to be too long"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_between_two_turns_of_a_short_body_no_long_one_is_tokenised(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """While a long body blocks its tokenizer thread, short requests of the same tenant and of
    another tenant are answered.
    """
    plain, go, begun = Vocabulary._word_ids, threading.Event(), threading.Event()
    text = "a b " * (SHORT_BYTES // 8)

    def word_ids(vocabulary: Vocabulary, given: str) -> list[int]:
        if len(given) > SHORT_BYTES // 4:
            begun.set()
            assert go.wait(DEADLINE_S)
        return plain(vocabulary, given)

    monkeypatch.setattr(Vocabulary, "_word_ids", word_ids)
    long = {"prompt": text * 3} if path == "/tokenize" else of(text * 3)
    async with world(model, spell(model, "a"), keys=("a", "b")) as it:
        held = [
            asyncio.create_task(it.client.post(path, json=long, headers=KEY_A)) for _ in range(3)
        ]
        try:
            await wait_for(begun.is_set, "a long body is being tokenised")
            for headers in (KEY_B, KEY_A, KEY_B):
                assert (await it.chat(headers)).status_code == 200
            assert not any(task.done() for task in held)
        finally:
            go.set()
        await asyncio.gather(*held)
        await it.settle()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]},
    ],
    ids=["schema", "tools"],
)
async def test_a_look_at_a_schema_holds_up_no_prompt(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    go, begun = threading.Event(), threading.Event()

    def check(formats: Formats, text: str, prefix: str = "") -> Checked:
        begun.set()
        assert go.wait(DEADLINE_S)
        return Checked("", 0.0)

    monkeypatch.setattr(Formats, "_check", check)
    with tool_model() as model:
        await _look_while_others_ask(model, fields, begun, go)


async def _look_while_others_ask(
    model: ServedModel, fields: dict[str, Any], begun: threading.Event, go: threading.Event
) -> None:
    async with world(model, spell(model, "{}"), keys=("a", "b")) as it:
        held = asyncio.create_task(it.chat(KEY_A, **fields))
        try:
            await wait_for(begun.is_set, "a schema is looked at")
            for headers in (KEY_B, KEY_A):
                assert (await it.chat(headers)).status_code == 200
            assert not held.done()
        finally:
            go.set()
        assert (await held).status_code == 200
        await it.settle()


async def test_a_chat_that_is_being_rendered_holds_up_no_short_one(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, go, begun = ConfinedProcess.render, threading.Event(), threading.Event()

    def render(process: ConfinedProcess, messages: Any, *given: Any) -> str:
        if len(str(messages)) > SHORT_BYTES // 4:
            begun.set()
            with process._lock:
                assert go.wait(DEADLINE_S)
        return plain(process, messages, *given)

    monkeypatch.setattr(ConfinedProcess, "render", render)
    async with world(model, spell(model, "a")) as it:
        held = asyncio.create_task(it.client.post("/v1/chat/completions", json=of("a" * 40_000)))
        try:
            await wait_for(begun.is_set, "a long chat is being rendered")
            assert (await it.chat()).status_code == 200
            assert not held.done()
        finally:
            go.set()
        assert (await held).status_code == 400
        await it.settle()


async def test_every_prompt_of_a_body_is_a_turn_of_its_own(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(model, spell(model, "a")) as it:
        lane, num_turns = it.gateway.service._lanes.long, Counter[str]()
        plain = lane.run

        async def run(tenant: str, make: Any) -> Any:
            num_turns[tenant] += 1
            return await plain(tenant, make)

        monkeypatch.setattr(lane, "run", run)
        body = {"model": "small", "prompt": ["ab " * 700] * 20, "max_tokens": 1}
        assert (await it.client.post("/v1/completions", json=body)).status_code == 200
        assert num_turns.total() >= 20
        await it.settle()


async def test_a_response_that_goes_on_from_much_is_no_short_body(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(model, spell(model, "a")) as it:
        lanes, sizes = it.gateway.service._lanes, list[int]()
        plain = lanes.for_bytes
        monkeypatch.setattr(lanes, "for_bytes", lambda size: [sizes.append(size), plain(size)][1])
        much = {"model": "small", "input": "a" * 3000, "max_output_tokens": 2}
        first = await it.client.post("/v1/responses", json=much)
        assert first.status_code == 200, first.text
        sizes.clear()
        more = {"model": "small", "input": "a", "previous_response_id": first.json()["id"]}
        assert (await it.client.post("/v1/responses", json=more)).status_code == 200
        assert max(sizes) > 3000
        await it.settle()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_counted_tokens_are_drawn_from_the_quota(
    model: ServedModel, encoded: list[int], path: str
) -> None:
    keys, clock = ("a tokens_per_minute=600", "b"), Clock()
    body = {"prompt": "2 + 2 " * 50} if path == "/tokenize" else of("2 + 2 " * 50)
    async with world(model, spell(model, "a"), keys=keys, now=clock) as it:
        it.gateway.tenancy.take(it.gateway.tenancy.keys)
        counts: list[int] = []
        while (reply := await it.client.post(path, json=body, headers=KEY_A)).status_code == 200:
            counts.append(reply.json()["count" if path == "/tokenize" else "input_tokens"])
            encoded.clear()
        assert sum(counts[:-1]) < 600 <= sum(counts)
        assert reply.status_code == 429
        assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
        assert int(reply.headers["retry-after"]) >= 1
        assert encoded == [], "it costs nothing more"
        assert (await it.chat(KEY_A)).status_code == 429, "chats have the same bucket"
        assert (await it.client.post(path, json=body, headers=KEY_B)).status_code == 200
        clock.now_s += 60.0
        assert (await it.client.post(path, json=body, headers=KEY_A)).status_code == 200
        await it.settle()


async def test_another_gateway_draws_from_the_same_quota(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model, spell(model, TEXT), now=lambda: 1000.0) as it:
        await wait_for(lambda: it.far.snapshot().can_serve, "the front is heard")
        it.host.set_quotas(unix_now(), (Quota(EVERYONE, tokens_per_minute=100),))
        body = {"prompt": "2 + 2 " * 50}
        assert (await it.client.post("/tokenize", json=body)).status_code == 200
        refused = await it.client.post("/tokenize", json=body)
        assert error_of(refused, 429, "rate_limit_exceeded")
        assert refused.headers["retry-after"]
        with pytest.raises(Exception, match="tokens a minute"):
            await it.host.check_counting(EVERYONE)
        monkeypatch.setattr(far_host, "_ADMISSION_S", 0.05)
        await it.kill_front()
        answer = asyncio.create_task(it.client.post("/tokenize", json=body))
        assert (await answer).status_code == 200, "nothing is refused while there is no front"
        it.start_front()
        await it.settle()
