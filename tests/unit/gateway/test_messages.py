"""/v1/messages: the meaning of bodies, and Anthropic's own client at a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, beta_tool

from hadal.core.config import LimitsConfig
from hadal.core.errors import RequestError
from hadal.gateway.api.messages.request import parse_count, parse_messages
from hadal.gateway.api.openai.request import parse_chat
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.intake import Patience
from hadal.gateway.text.asks import AnswerFormat, ChatAsk, PastCall, Turn
from hadal.gateway.text.tools import Choosing
from tests.waiting import wait_for

from .event_streams import message_of, named_events
from .scenes import TEXT, scene, sent_by_replies
from .serving import Serving, serving
from .test_tools import V31, written
from .tool_model import Verdict, calls_then, says, tool_model
from .world import Clock, World, spell

ASKED: dict[str, Any] = {
    "model": "small",
    "max_tokens": 60,
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "thinking": {"type": "adaptive"},
}
WEATHER = {
    "name": "weather",
    "description": "The weather there",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


THEN = {"type": "text", "text": "then."}


def parse(**fields: Any) -> ChatAsk:
    return parse_messages(json.dumps({**ASKED, **fields}).encode())


def chat(**fields: Any) -> ChatAsk:
    return parse_chat(json.dumps({"model": "small", "max_tokens": 60, **fields}).encode())


def as_message(ask: ChatAsk) -> ChatAsk:
    """Return the same request as /v1/messages would ask it."""
    hides = ask.rendering.thinking is False
    return replace(
        ask,
        ask=replace(ask.ask, ends_with_room=True, hides_reasoning=hides),
        rendering=replace(ask.rendering, keeps_places=True),
    )


# ---- meaning of bodies ----


def test_a_conversation_is_the_same_chat() -> None:
    """A conversation gives the prompt, sampling and tools that /v1/chat/completions gives."""
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ös lo"}}
    ours = parse(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["END"],
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Oslo?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Well.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me see."},
                    call,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    function = {"name": "weather", "arguments": '{"city": "Ös lo"}'}
    theirs = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop="END",
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "The weather there",
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        thinking={"type": "disabled"},
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Oslo?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "user", "content": "And?"},
        ],
    )
    assert ours.turns[2].reasoning == "Well."
    plain = tuple(replace(turn, reasoning="") for turn in ours.turns)
    assert replace(ours, turns=plain) == as_message(theirs)


def test_what_every_api_takes_is_taken_here() -> None:
    more = {"cache_salt": "ann", "priority": -3, "seed": 7, "stop_repetition": False}
    kwargs = {"chat_template_kwargs": {"thinking": False, "style": "dry"}}
    ours = parse(**more, **kwargs)
    assert ours == as_message(chat(messages=ASKED["messages"], **more, **kwargs))
    assert (ours.ask.cache_salt, ours.rendering.thinking) == ("ann", False)


def test_messages_of_one_role_are_one_turn() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "a"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "x"}]},
    ]
    other = {**call, "id": "b"}
    asked = parse(
        tools=[{**WEATHER, "name": "f" * 128}],
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "system", "content": [{"type": "text", "text": "Now "}, THEN]},
            {"role": "assistant", "content": [call, other]},
            {"role": "user", "content": results},
            {"role": "assistant", "content": "C "},
            {"role": "assistant", "content": "D"},
        ],
    )
    assert asked.turns == (
        Turn("user", "a\nb"),
        Turn("system", "Now then."),
        Turn("assistant", "", (PastCall("a", "f", "{}"), PastCall("b", "f", "{}"))),
        Turn("tool", "", call_id="a"),
        Turn("tool", "x", call_id="b"),
    )
    assert asked.rendering.prefix == "C D", "the reply goes on from it"


def test_a_format_by_its_older_name() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    assert parse(output_format=format) == parse(output_config={"format": format})
    assert parse(output_format=format).ask.format is not None
    other = {**format, "schema": {"type": "array"}}
    with pytest.raises(RequestError, match="output_format differ"):
        parse(output_format=format, output_config={"format": other})


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"type": "auto"}, (False, "", True)),
        ({"type": "any"}, (True, "", True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (False, "", False)),
        ({"type": "tool", "name": "weather"}, (True, "weather", True)),
    ],
)
def test_what_may_be_chosen(choice: dict[str, Any], found: tuple[bool, str, bool]) -> None:
    choosing = parse(tools=[WEATHER], tool_choice=choice).rendering.choosing
    assert (choosing.is_forced, choosing.name, choosing.is_parallel) == found
    assert [tool.name for tool in choosing.tools] == ["weather"]


def test_no_tool_is_offered_where_none_is_wanted() -> None:
    assert parse(tools=[WEATHER], tool_choice={"type": "none"}).rendering.choosing == Choosing()


def test_thinking() -> None:
    assert parse(thinking={"type": "enabled", "budget_tokens": 1024}).rendering.thinking is True
    assert parse(thinking={"type": "disabled"}).rendering.thinking is False
    assert parse(thinking={"type": "adaptive"}).rendering.thinking is None
    shown = parse(thinking={"type": "adaptive", "display": "updates"})
    assert not shown.ask.omits_reasoning
    assert parse(thinking={"type": "between_tools"}).rendering.thinking is False
    assert parse(output_config={"effort": "none"}).rendering.thinking is False
    assert parse(output_config={"effort": "low"}).rendering.template_kwargs == {
        "reasoning_effort": "low"
    }


def test_an_answer_in_a_format() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    asked = parse(output_config={"format": format})
    assert asked.ask.format == AnswerFormat("answer", {"type": "object"}, "output_config.format")
    begun = [*ASKED["messages"], {"role": "assistant", "content": '{"sum": '}]
    both = parse(output_config={"format": format}, tools=[WEATHER], messages=begun)
    assert both.ask.format == asked.ask.format
    assert [tool.name for tool in both.rendering.choosing.tools] == ["weather"]
    assert both.rendering.prefix == '{"sum": '


def test_what_is_counted_is_the_same_prompt() -> None:
    body = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    assert parse_count(json.dumps(body).encode()).turns == parse().turns


ASSISTANT = {"role": "assistant", "content": "a"}
USER = {"role": "user", "content": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}


@pytest.mark.promise("The 400 for a refused field names it and says what to send instead.")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": [CALL]}]}, "messages[0].content[0]"),
        ({"messages": [ASSISTANT]}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {**ASSISTANT, "content": [CALL]}]}, "messages"),
        (
            {"messages": [USER, {**ASSISTANT, "content": [{**CALL, "input": DEEP}]}, USER]},
            "messages[1].content[0].input",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": DEEP}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        (
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "none"}},
            "output_config.effort",
        ),
        ({"output_config": {"effort": "most"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [{**WEATHER, "name": "a" * 129}]}, "tools[0].name"),
    ],
)
def test_bad_bodies(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert str(caught.value)


# ---- through a gateway ----


async def ask(it: World, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await it.client.post("/v1/messages", json=ASKED | fields, headers=headers)


async def test_thinking_that_is_not_to_be_shown(model: ServedModel) -> None:
    async with scene(model) as it:
        shown = (await ask(it)).json()
        omitted = {"type": "enabled", "display": "omitted"}
        whole = (await ask(it, thinking=omitted)).json()
        reply = await ask(it, thinking=omitted, stream=True)
        streamed = message_of(named_events(reply.content))
        assert shown["content"][0]["thinking"]
        for message in (whole, streamed):
            thinking, text = message["content"]
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "")
            assert thinking["signature"]
            assert text == shown["content"][1]
        assert b"thinking_delta" not in reply.content
        assert reply.headers["request-id"] == reply.headers["x-request-id"]


async def test_streamed_and_whole_are_the_same(model: ServedModel) -> None:
    async with scene(model) as it:
        whole = (await ask(it)).json()
        reply = await ask(it, stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        streamed = message_of(named_events(reply.content))
        for message in (whole, streamed):
            thinking = message["content"][0]
            assert thinking.pop("signature") == message.pop("id")
        assert whole == streamed
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        assert whole["content"][1]["text"] == "The answer is 4. 🙂"
        assert whole["stop_reason"] == "end_turn"


@pytest.mark.promise("A key is sent as Authorization: Bearer KEY or x-api-key: KEY.")
@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/anthropic/v1/messages"])
async def test_errors_are_in_anthropics_shape(model: ServedModel, path: str) -> None:
    async with scene(model, keys=("right",)) as it:
        for body, headers, status, kind in (
            ({**ASKED, "model": "other"}, {}, 404, "not_found_error"),
            ({**ASKED, "max_tokens": 0}, {}, 400, "invalid_request_error"),
            (ASKED, {"x-api-key": "wrong"}, 401, "authentication_error"),
        ):
            sent = {"x-api-key": "right", **headers}
            for where in (path, f"{path}/count_tokens"):
                if where != path and status == 400:
                    continue
                reply = await it.client.post(where, json=body, headers=sent)
                assert reply.status_code == status
                error = reply.json()
                assert (error["type"], error["error"]["type"]) == ("error", kind)
                assert set(error["error"]) == {"type", "message"}
        assert (await it.client.get(path)).json()["error"]["type"] == "invalid_request_error"
        bearer = {"authorization": "Bearer right"}
        assert (await it.client.post(path, json=ASKED, headers=bearer)).status_code == 200


async def test_conversations_are_not_kept_and_the_client_sends_them_whole(
    taught: ServedModel,
) -> None:
    async with scene(taught) as it:
        reply = await ask(it, thread={"type": "create"})
        assert reply.status_code == 400
        details = reply.json()["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        body = {**ASKED, "thread": {"type": "continue", "previous_message_id": "msg_1"}}
        assert (await it.client.post("/v1/messages/count_tokens", json=body)).status_code == 400


@pytest.mark.promise("A waiting stream sends ping.")
async def test_a_stream_that_waits_pings(model: ServedModel) -> None:
    async with scene(model, patience=Patience(keep_alive_s=0.05)) as it:
        it.units.go.clear()
        asyncio.get_running_loop().call_later(0.2, it.units.go.set)
        reply = await ask(it, stream=True)
        assert reply.content.startswith(b'event: ping\ndata: {"type":"ping"}\n\n')
        assert message_of(named_events(reply.content))["stop_reason"] == "end_turn"


@pytest.mark.promise(
    "usage counts cached prompt tokens as cache_read_input_tokens, and the other "
    "prompt tokens as input_tokens"
)
async def test_tokens_that_a_cache_had_are_counted_apart(model: ServedModel) -> None:
    async with scene(model) as it:
        system = "Add. " * 60
        first, second = [(await ask(it, system=system)).json()["usage"] for _ in range(2)]
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] >= 64
        read, fresh = "cache_read_input_tokens", "input_tokens"
        assert second[read] + second[fresh] == first[read] + first[fresh]
        counted = await it.client.post(
            "/v1/messages/count_tokens", json={**ASKED, "system": system}
        )
        assert counted.json() == {"input_tokens": first["input_tokens"]}
        streamed = await ask(it, system=system, stream=True)
        start = named_events(streamed.content)[0]["message"]
        assert start["usage"]["cache_read_input_tokens"] == second["cache_read_input_tokens"]


# ---- Anthropic's client ----


@pytest.fixture(scope="module")
def taught() -> Iterator[ServedModel]:
    with tool_model() as made:
        yield made


def client_of(it: Serving, **options: Any) -> Anthropic:
    given = {"base_url": it.url, "api_key": "none", "max_retries": 0, "timeout": 30, **options}
    return Anthropic(**given)


@pytest.mark.promise(
    'Any OpenAI client with base_url="http://127.0.0.1:8000/v1" works with the '
    "server; Anthropic's clients use the URL without /v1."
)
def test_the_client_adds_up_a_stream(model: ServedModel) -> None:
    with (
        serving(model, spell(model, TEXT)) as it,
        client_of(it, base_url=f"{it.url}/anthropic") as client,
    ):
        with client.messages.stream(**ASKED) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        whole = client.messages.create(**ASKED)
        assert text == "The answer is 4. 🙂"
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert [b.to_dict() | {"signature": ""} for b in final.content] == [
            b.to_dict() | {"signature": ""} for b in whole.content
        ]
        assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
        asked: Any = {name: ASKED[name] for name in ASKED if name != "max_tokens"}
        counted = client.messages.count_tokens(**asked)
        assert counted.input_tokens == whole.usage.input_tokens


def test_the_client_raises_its_own_errors(model: ServedModel) -> None:
    with serving(model, spell(model, TEXT), keys=("k",)) as it:
        with client_of(it) as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ASKED)
        with client_of(it, api_key="k") as client:
            with pytest.raises(anthropic.BadRequestError, match="temperature"):
                client.messages.create(**ASKED, extra_body={"temperature": 3})
            with pytest.raises(anthropic.NotFoundError):
                client.messages.create(**{**ASKED, "model": "other"})
            assert client.messages.create(**ASKED).stop_reason == "end_turn"
        with Anthropic(base_url=it.url, auth_token="k", api_key=None, max_retries=0) as client:
            assert client.messages.create(**ASKED).stop_reason == "end_turn"


@pytest.mark.parametrize("streams", [False, True])
def test_its_tool_runner_calls_and_goes_on(taught: ServedModel, streams: bool) -> None:
    asked: list[str] = []

    @beta_tool
    def weather(city: str) -> str:
        """The weather there.

        Args:
            city: where
        """
        asked.append(city)
        return f"{city}: rain"

    script = calls_then("weather", '{"city": "Oslo"}', lambda result: f"It says {result}.")
    with serving(taught, script) as it, client_of(it) as client:
        runner = client.beta.messages.tool_runner(
            **{**ASKED, "max_tokens": 400}, tools=[weather], stream=streams
        )
        last = None
        for turn in runner:
            last = turn.get_final_message() if streams else turn
    assert asked == ["Oslo"]
    assert last is not None
    assert last.content[-1].text == "It says Oslo: rain."
    assert last.stop_reason == "end_turn"


def test_two_calls_with_text_around_them(taught: ServedModel) -> None:
    calls = written(V31, ("weather", '{"city": "Ö"}'), ("weather", "{}"))
    with serving(taught, says(lambda _: f"See. {calls} Done.")) as it, client_of(it) as client:
        asked = {**ASKED, "max_tokens": 400, "tools": [WEATHER]}
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(**asked)
        for message in (whole, streamed):
            assert [block.type for block in message.content] == [
                *("text", "tool_use", "tool_use", "text")
            ]
            assert message.content[1].input == {"city": "Ö"}
            assert message.stop_reason == "tool_use"
        one = client.messages.create(
            **asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        )
        assert [block.type for block in one.content] == ["text", "tool_use"]


@pytest.mark.promise(
    "a limit beyond the context ends the answer where the context does "
    "(model_context_window_exceeded)"
)
def test_an_answer_ends_where_the_context_does(model: ServedModel) -> None:
    """Clients send a max_tokens of their own, without regard to the model's context."""
    context = model.context_tokens
    with serving(model, spell(model, "tick " * context)) as it, client_of(it) as client:
        asked = {**ASKED, "max_tokens": 10 * context}
        asked["extra_body"] = {"stop_repetition": False}
        made = client.messages.create(**asked)
        assert made.usage.input_tokens + made.usage.output_tokens == context
        assert made.stop_reason == "model_context_window_exceeded"
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_message().stop_reason == made.stop_reason
        short = client.messages.create(**{**ASKED, "max_tokens": 9})
        assert short.stop_reason == "max_tokens"


def test_its_parsed_answers(model: ServedModel) -> None:
    """The schema that the client makes reaches the ranks as a grammar."""
    with serving(model, spell(model, '</think>{"colour": "red"}')) as it, client_of(it) as client:
        found = client.messages.parse(**ASKED, output_format=Verdict)
        assert found.parsed_output == Verdict(colour="red")
        grammar = it.world.units.submitted[0].sampling.grammar
        assert grammar is not None
        assert "colour" in grammar.text


async def test_a_stream_that_fails_says_so(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.gateway.desk.reply._GRACE_S", 0.0)
    sent, clock = sent_by_replies(monkeypatch), Clock()
    async with scene(
        model,
        limits=LimitsConfig(request_timeout_s=60.0),
        patience=Patience(keep_alive_s=0.05),
        now=clock,
    ) as it:
        it.units.go.clear()
        asking = asyncio.create_task(ask(it, stream=True))
        await wait_for(lambda: sent, "it has begun")
        clock.now_s += 100
        reply = await asking
        it.units.go.set()
        last = reply.content.split(b"\n\n")[-2].decode()
        assert last.startswith("event: error\ndata: ")
        error = json.loads(last.partition("data: ")[2])
        assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
