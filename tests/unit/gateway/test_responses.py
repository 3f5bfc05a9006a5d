"""/v1/responses: the meaning of bodies, kept responses, and OpenAI's own client at a real port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from hadal.core.config import GatewayConfig
from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.api.openai.request import parse_chat
from hadal.gateway.api.reply import Head, Usage
from hadal.gateway.api.responses.items import listed
from hadal.gateway.api.responses.reply import ResponseFormatter
from hadal.gateway.api.responses.request import ResponseAsk, items_in, parse_response, read_response
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.asks import AnswerFormat, ChatAsk, PastCall, Turn
from hadal.gateway.text.piece import Piece
from tests.waiting import DEADLINE_S

from .event_streams import named_events, response_of
from .scenes import TEXT, error_of, scene
from .serving import Serving, serving
from .tool_model import Verdict, calls_then, tool_model
from .world import World, spell

ASKED: dict[str, Any] = {"model": "small", "input": "2 + 2?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather there",
    "parameters": PARAMETERS,
}


def parse(**fields: Any) -> ResponseAsk:
    return parse_response(read_response(json.dumps({**ASKED, **fields}).encode()), {})


def chat(**fields: Any) -> ChatAsk:
    return parse_chat(json.dumps({"model": "small", **fields}).encode())


# ---- meaning of bodies ----


def test_a_conversation_is_the_same_chat() -> None:
    ours = parse(
        instructions="Be brief.",
        max_output_tokens=60,
        temperature=0.5,
        top_p=0.9,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "Well."}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "weather",
                "arguments": '{"city":"Oslo"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"role": "developer", "content": "Now."},
        ],
    )
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    theirs = chat(
        max_tokens=60,
        temperature=0.5,
        top_p=0.9,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "description": "The weather there",
                    "parameters": PARAMETERS,
                },
            }
        ],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        reasoning_effort="none",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Oslo?"},
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "system", "content": "Now."},
        ],
    )
    found = ours.after(())
    assert found.turns[2].reasoning == "Well."
    found = replace(found, turns=tuple(replace(turn, reasoning="") for turn in found.turns))
    assert found.ask.max_name == "max_output_tokens"
    assert found == ChatAsk(**{**vars(theirs), "ask": found.ask})
    same = {**vars(found.ask), "max_name": theirs.ask.max_name, "prompt_name": "messages"}
    assert same == vars(theirs.ask)


def test_what_every_api_takes_is_taken_here() -> None:
    more = {"cache_salt": "ann", "priority": -3, "seed": 7, "stop_repetition": False}
    kwargs = {"chat_template_kwargs": {"thinking": False, "style": "dry"}}
    ours = parse(**more, **kwargs).after(())
    theirs = chat(messages=[{"role": "user", "content": "2 + 2?"}], **more, **kwargs)
    assert (ours.rendering.thinking, ours.rendering.template_kwargs) == (
        theirs.rendering.thinking,
        theirs.rendering.template_kwargs,
    )
    names = ("cache_salt", "priority", "seed", "stop_repetition")
    assert [getattr(ours.ask, name) for name in names] == ["ann", -3, 7, False]


@pytest.mark.parametrize(
    ("effort", "kwargs", "thinking"),
    [
        (None, {}, None),
        ("none", {}, False),
        ("high", {}, True),
        ("minimal", {}, True),
        ("high", {"thinking": False}, False),
    ],
)
def test_an_effort_is_a_wish_to_think(
    effort: str | None, kwargs: dict[str, bool], thinking: bool | None
) -> None:
    asked = parse(reasoning={"effort": effort}, chat_template_kwargs=kwargs)
    assert asked.chat.rendering.thinking is thinking


def test_what_an_assistant_says_behind_its_calls_stands_before_their_results() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Let me see. "},
        call,
        {"role": "assistant", "content": "And so."},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    assert parse(input=items).chat.turns == (
        Turn("user", "a"),
        Turn("assistant", "Let me see. And so.", (PastCall("c", "f", "{}"),)),
        Turn("tool", "x", call_id="c"),
    )


def test_items_of_an_input_are_what_clients_types_promise() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "reasoning"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    asked = parse(input=items)
    rows = msgspec.to_builtins(listed(asked.request.input))
    found = [TypeAdapter(ResponseItem).validate_python(row) for row in rows]
    assert [one.type for one in found][2:] == [
        "reasoning",
        "reasoning",
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert found[2].summary[0].text == "s"


def test_what_was_said_before_comes_behind_the_instructions() -> None:
    before = (Turn("user", "a"), Turn("assistant", "b"))
    turns = parse(instructions="Be brief.").after(before).turns
    assert turns == (Turn("system", "Be brief."), *before, Turn("user", "2 + 2?"))


def test_an_answer_in_a_format() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    format = parse(text={"format": given}).chat.ask.format
    assert format == AnswerFormat("answer", schema, "text.format")
    assert parse(text={"format": {"type": "text"}}).chat.ask.format is None
    loose = parse(text={"format": {"type": "json_object"}}).chat.ask.format
    assert loose == AnswerFormat("json_object", None, "text.format")
    both = parse(text={"format": given}, tools=[WEATHER]).chat
    assert both.ask.format == format
    assert [tool.name for tool in both.rendering.choosing.tools] == ["weather"]


DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}


@pytest.mark.promise("The 400 for a refused field names it and says what to send instead.")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": None}]}, "input[0].id"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": DEEP}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format"),
        ({"text": {"verbosity": 1}}, "text.verbosity"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_bad_bodies(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert "response_format" not in str(caught.value)


# ---- through a gateway ----


async def ask(it: World, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await it.client.post("/v1/responses", json=ASKED | fields, headers=headers)


async def test_streamed_and_whole_are_the_same(model: ServedModel) -> None:
    async with scene(model) as it:
        whole = (await ask(it)).json()
        reply = await ask(it, stream=True)
        streamed = response_of(named_events(reply.content))
        for response in (whole, streamed):
            Response.model_validate(response, strict=True)
            # Each response has its own times.
            assert 0 < response.pop("created_at") <= response.pop("completed_at")
            response.pop("id")
            for item in response["output"]:
                item.pop("id")
        assert whole == streamed
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]


async def test_what_is_cut_off_is_incomplete(model: ServedModel) -> None:
    async with scene(model) as it:
        whole = (await ask(it, max_output_tokens=9)).json()
        events = named_events((await ask(it, max_output_tokens=9, stream=True)).content)
        assert events[-1]["type"] == "response.incomplete"
        for response in (whole, response_of(events)):
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


@pytest.mark.promise(
    "A kept response has the whole conversation, so previous_response_id works even "
    "if still earlier responses have expired or were deleted."
)
async def test_a_response_is_gone_on_from(model: ServedModel) -> None:
    """The prompt has the whole conversation, without the first response's instructions."""
    async with scene(model) as it:
        first = (await ask(it, instructions="Be brief.")).json()
        second = (await ask(it, input="And?", previous_response_id=first["id"])).json()
        assert second["previous_response_id"] == first["id"]
        await it.client.delete(f"/v1/responses/{first['id']}")  # The second has the whole chat.
        unkept = (await ask(it, input="So?", previous_response_id=second["id"], store=False)).json()
        assert unkept["store"] is False
        said = {"role": "assistant", "content": "The answer is 4. 🙂"}
        messages = [
            {"role": "user", "content": "2 + 2?"},
            said,
            {"role": "user", "content": "And?"},
            said,
            {"role": "user", "content": "So?"},
        ]
        await it.chat(messages=messages)
        *_, responded, chatted = it.units.submitted
        assert responded.prompt == chatted.prompt
        gone = await it.client.get(f"/v1/responses/{unkept['id']}")
        assert error_of(gone, 404, "response_not_found")


async def test_items_of_a_response_are_named_instead_of_sent(model: ServedModel) -> None:
    """Items of two responses may be named in any order. For other tenants they do not exist."""
    async with scene(model, keys=("mine", "other")) as it:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
        ids: list[str] = []
        for _ in range(2):
            reply = await ask(it, headers=mine)
            ids += [item["id"] for item in reply.json()["output"]]
        named = [{"type": "item_reference", "id": item_id} for item_id in ids]
        question = {"role": "user", "content": "And?"}
        items = [question, *named, question]
        reply = await ask(it, mine, input=items)
        assert reply.status_code == 200
        said = {"role": "assistant", "content": "The answer is 4. 🙂"}
        await it.chat(mine, messages=[question, said, said, question])
        *_, responded, chatted = it.units.submitted
        assert responded.prompt == chatted.prompt
        path = f"/v1/responses/{reply.json()['id']}/input_items"
        listed = (await it.client.get(path, headers=mine)).json()["data"]
        kinds = [item["type"] for item in listed if item["id"] in ids]
        assert kinds == ["message", "reasoning"] * 2
        refused = await ask(it, mine, input=[*named, named[0]])
        assert "is referenced twice" in error_of(refused, 400)["message"]
        refused = await ask(it, other, input=items)
        assert error_of(refused, 400)["param"] == "input[1].id"


def test_named_items_are_no_longer_than_a_body_that_sends_them() -> None:
    item = {"id": "msg_1", "type": "message", "role": "assistant"}
    body = json.dumps(
        {"output": [{**item, "content": "x" * 900}, {**item, "id": "msg_2"}]}
    ).encode()
    assert set(items_in([body], ["msg_1"], 1000)) == {"msg_1"}
    assert set(items_in([body], ["msg_2", "msg_3"], 100)) == {"msg_2"}
    with pytest.raises(RequestError, match="exceed 500 bytes"):
        items_in([body], ["msg_1"], 500)


@pytest.mark.promise("One key's responses do not exist for another.")
async def test_a_response_is_its_tenants_alone(model: ServedModel) -> None:
    async with scene(model, keys=("mine", "other")) as it:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("mine", "other"))
        made = (await ask(it, headers=mine)).json()
        path = f"/v1/responses/{made['id']}"
        assert (await it.client.get(path)).status_code == 401
        for method in ("GET", "DELETE"):
            reply = await it.client.request(method, path, headers=other)
            error_of(reply, 404, "response_not_found")
        reply = await ask(it, other, previous_response_id=made["id"])
        error = error_of(reply, 400, "previous_response_not_found")
        assert error["param"] == "previous_response_id"
        assert (await it.client.get(path, headers=mine)).json() == made
        items = (await it.client.get(f"{path}/input_items", headers=mine)).json()
        assert items["data"][0]["content"] == [{"type": "input_text", "text": "2 + 2?"}]
        deleted = (await it.client.delete(path, headers=mine)).json()
        assert deleted == {"id": made["id"], "object": "response", "deleted": True}
        error_of(await it.client.get(path, headers=mine), 404)
        assert it.gateway.responses.own.check() == []


def test_parts_that_end_with_a_cut_reply_are_not_cut_but_the_last(model: ServedModel) -> None:
    """The last piece may bring the reasoning's end and all of the text; nothing may be lost."""
    head = Head("resp_0_" + "0" * 32, 0, "small", "")
    for pieces in (
        [Piece(reasoning="Well.", content="It is", finish="length")],
        [Piece(reasoning="We"), Piece(reasoning="ll.", content="It is", finish="length")],
        [Piece(reasoning="Well.", content="It is"), Piece(finish="length")],
    ):
        made = ResponseFormatter(
            head, model.vocabulary, parse().request, None, Sampling(), lambda: 7.0
        )
        usage = Usage(3, 4, 2)
        data = made.begin(usage) + b"".join(made.chunks(0, piece) for piece in pieces)
        events = named_events(data + made.end(usage))
        said = response_of(events)
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert done == said["output"]
        assert [item["status"] for item in done] == ["completed", "incomplete"]
        assert [item["content"][0]["text"] for item in said["output"]] == ["Well.", "It is"]
        assert said["status"] == "incomplete"


@pytest.mark.promise(
    "input_items lists the input of the response itself, the last item first. Its "
    "parameters are order, limit (1 to 100, by default 20) and after."
)
async def test_a_long_input_is_listed_page_by_page(model: ServedModel) -> None:
    """Ids that a client sent twice do not make paging loop for ever."""
    given: list[dict[str, Any]] = [{"role": "user", "content": f"{number}"} for number in range(45)]
    given[3]["id"] = given[7]["id"] = "item_9"

    def texts(items: list[dict[str, Any]]) -> list[str]:
        return [item["content"][0]["text"] for item in items]

    async with scene(model) as it:
        made = (await ask(it, input=given)).json()
        path = f"/v1/responses/{made['id']}/input_items"

        async def page(**query: Any) -> dict[str, Any]:
            reply = await it.client.get(path, params=query)
            assert reply.status_code == 200, reply.text
            found: dict[str, Any] = reply.json()
            return found

        first = await page()
        assert texts(first["data"]) == [f"{number}" for number in range(44, 24, -1)]
        assert first["has_more"] is True
        assert first["first_id"] == first["data"][0]["id"]
        assert first["last_id"] == first["data"][-1]["id"]
        for order in ("asc", "desc"):
            read, after = [], {}
            while True:
                found = await page(order=order, limit=7, **after)
                read += found["data"]
                if not found["has_more"]:
                    break
                after = {"after": found["last_id"]}
            wanted = [item["content"] for item in given]
            assert texts(read) == (wanted if order == "asc" else wanted[::-1])
            assert len({item["id"] for item in read}) == 45
        last = await page(after=read[-1]["id"])
        nothing = {"data": [], "first_id": None, "last_id": None, "has_more": False}
        assert last == {"object": "list", **nothing}
        assert len((await page(limit=100))["data"]) == 45
        for name, bad in (
            ("limit", "0"),
            ("limit", "101"),
            ("limit", "x"),
            ("order", "up"),
            ("after", "item_99"),
        ):
            reply = await it.client.get(path, params={name: bad})
            assert error_of(reply, 400)["param"] == name


async def test_where_nothing_is_kept_it_is_said(model: ServedModel) -> None:
    async with scene(model, settings=GatewayConfig(keep_responses_s=0.0)) as it:
        made = (await ask(it)).json()
        assert made["store"] is False
        reply = await ask(it, previous_response_id=made["id"])
        assert "stores no responses" in error_of(reply, 400)["message"]


# ---- OpenAI's client ----


@pytest.fixture(scope="module")
def taught() -> Iterator[ServedModel]:
    with tool_model() as made:
        yield made


def client_of(it: Serving) -> OpenAI:
    return OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def test_the_client_adds_up_a_stream(model: ServedModel) -> None:
    script = spell(model, TEXT)
    with serving(model, script) as it, client_of(it) as client:
        whole = client.responses.create(**ASKED)
        assert whole.output_text == "The answer is 4. 🙂"
        kinds = []
        with client.responses.stream(**ASKED) as stream:
            for event in stream:
                kinds.append(event.type)
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert {"response.reasoning_text.delta", "response.output_text.done"} <= set(kinds)
        assert client.responses.retrieve(whole.id) == whole
        assert client.responses.input_items.list(whole.id).data[0].type == "message"
        said = [{"role": "user", "content": f"{number}"} for number in range(5)]
        long = client.responses.create(**{**ASKED, "input": said})
        pages = client.responses.input_items.list(long.id, limit=2, order="asc")
        assert [item.content[0].text for item in pages] == [one["content"] for one in said]
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)


def test_calls_and_their_results(taught: ServedModel) -> None:
    script = calls_then("weather", '{"city": "Oslo"}', lambda result: f"It says {result}.")
    with serving(taught, script) as it, client_of(it) as client:
        first = client.responses.create(**ASKED, tools=[WEATHER])
        text, call = first.output
        assert text.type == "message"
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("weather", '{"city": "Oslo"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        kept = client.responses.create(
            **{**ASKED, "input": [result]}, tools=[WEATHER], previous_response_id=first.id
        )
        sent = client.responses.create(
            **{
                **ASKED,
                "input": [{"role": "user", "content": "2 + 2?"}, *first.output, result],
            },
            tools=[WEATHER],
        )
        assert kept.output_text == sent.output_text == "It says rain."
        first_prompt, second_prompt = (one.prompt for one in it.world.units.submitted[1:])
        assert first_prompt == second_prompt
        with client.responses.stream(**ASKED, tools=[WEATHER]) as stream:
            deltas = [e.delta for e in stream if e.type.endswith("function_call_arguments.delta")]
            final = stream.get_final_response()
        assert "".join(deltas) == '{"city": "Oslo"}'
        assert final.output[1].type == "function_call"


def test_its_parsed_answers(model: ServedModel) -> None:
    with serving(model, spell(model, '</think>{"colour": "red"}')) as it, client_of(it) as client:
        found = client.responses.parse(**ASKED, text_format=Verdict)
        assert found.output_parsed == Verdict(colour="red")
        grammar = it.world.units.submitted[0].sampling.grammar
        assert grammar is not None
        assert "colour" in grammar.text
