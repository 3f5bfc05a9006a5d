"""/v1/messages as Claude Code and its SDK use it: tools that come and go, tools with known schemas,
thinking that was not asked for, and prompts beyond the context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic.types.beta as sdk
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hadal.core.config import GatewayConfig
from hadal.core.errors import RequestError
from hadal.gateway.api.messages.known_tools import KNOWN_TOOLS
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.api.sealed import opened, sealed
from hadal.gateway.desk.service import ServedModel, read_served_model
from hadal.gateway.text.asks import ChatAsk, Turn
from hadal.gateway.text.chat import Prompt
from hadal.gateway.text.edits import edit_prompt
from tests.waiting import PATIENCE_S

from .event_streams import message_of, named_events
from .model_folder import TEMPLATE, write_model_folder
from .scenes import scene
from .serving import serving
from .test_tools import V31, written
from .tool_model import says, tool_model
from .world import World, spell, world

PARAMETERS = {"type": "object", "properties": {"row": {"type": "integer"}}}
USER = {"role": "user", "content": "Hi."}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"about {name}", "input_schema": PARAMETERS, **fields}


def system(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": [*blocks], **fields}


def added(name: str) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_reference", "name": name}}


def defined(definition: dict[str, Any]) -> dict[str, Any]:
    by_value = {"type": "tool_definition", "definition": definition}
    return {"type": "tool_addition", "tool": by_value}


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


def search(*names: str, id: str = "t") -> list[dict[str, Any]]:
    """Return a call of a search for tools, and its result."""
    found = [{"type": "tool_reference", "tool_name": name} for name in names]
    call = {"type": "tool_use", "id": id, "name": "Search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": id, "content": found}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    asked = {"model": "small", "max_tokens": 40, "messages": [*(messages or [USER])]}
    return {**asked, **fields}


def parse(*messages: dict[str, Any], **fields: Any) -> ChatAsk:
    return parse_messages(json.dumps(body(*messages, **fields)).encode())


def refused(*messages: dict[str, Any], **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        parse(*messages, **fields)
    return caught.value.param, str(caught.value)


@pytest.fixture(scope="module")
def taught() -> Iterator[ServedModel]:
    with tool_model() as made:
        yield made


# ---- tools that come and go ----

LATER = {"tools": [tool("Search"), tool("Later", defer_loading=True)]}


def names(ask: ChatAsk) -> tuple[list[str], list[str]]:
    """Return the tools that may be called, and those listed at the prompt's beginning."""
    choosing = ask.rendering.choosing
    return [each.name for each in choosing.tools], [each.name for each in choosing.listing]


@pytest.mark.promise("the prompt shows it there, and its beginning stays as it was")
@pytest.mark.parametrize(
    ("messages", "callable", "shown"),
    [
        ([USER], ["Search"], 0),
        ([USER, *search("Later")], ["Search", "Later"], 1),
        ([USER, *search("Later"), *search("Later", id="u")], ["Search", "Later"], 1),
        ([USER, system(added("Later"))], ["Search", "Later"], 1),
        ([USER, system(removed("Search"))], [], 0),
        ([USER, system(removed("Search"), added("Search"))], ["Search"], 0),
        ([USER, system(removed("Later"))], ["Search"], 0),
        ([USER, system(defined(tool("New")))], ["Search", "New"], 1),
        ([USER, system(defined(tool("Search", description="new")))], ["Search"], 1),
        ([USER, system(defined(tool("New"))), system(removed("New"))], ["Search"], 1),
    ],
)
def test_a_tool_is_there_from_the_message_that_names_it(
    messages: list[dict[str, Any]], callable: list[str], shown: int
) -> None:
    ask = parse(*messages, **LATER)
    assert names(ask) == (callable, ["Search"])
    texts = "".join(turn.content for turn in ask.turns)
    assert texts.count('"parameters"') == shown


def test_the_beginning_of_the_prompt_stays(taught: ServedModel) -> None:
    """A tool that is added or removed changes no token before the message that does it."""
    chat = taught.chat
    assert chat is not None

    def ids(*messages: dict[str, Any]) -> tuple[int, ...]:
        ask = parse(*messages, **LATER)
        rendering = replace(ask.rendering, opens_reply=False)
        return chat.prompt(ask.turns, rendering, max_tokens=10**6).ids

    begin = ids(USER)
    assert "about Search" in taught.vocabulary.decode(begin)
    for change in (search("Later"), [system(added("Later"))], [system(removed("Search"))]):
        after = ids(USER, *change, USER)
        assert after[: len(begin)] == begin
        assert len(after) > len(begin)


async def test_a_tool_of_the_conversation_can_be_called(taught: ServedModel) -> None:
    text = written(V31, ("Later", '{"row": 1}'))
    async with world(taught, says(lambda _: text)) as it:
        asked = body(USER, *search("Later"), **LATER, max_tokens=200)
        asked["tool_choice"] = {"type": "tool", "name": "Later"}
        message = (await it.client.post("/v1/messages", json=asked)).json()
        assert message["content"][0]["name"] == "Later"
        prompt = taught.vocabulary.decode(it.units.submitted[-1].prompt)
        assert prompt.count("about Later") == 1
        assert prompt.index("about Later") > prompt.index("Hi.")
        await it.settle()


def test_if_all_tools_are_deferred_the_prompt_lists_them() -> None:
    """Otherwise it would not have the form of a call."""
    later = [tool("Later", defer_loading=True)]
    assert names(parse(USER, *search("Later"), tools=later)) == (["Later"], ["Later"])


def test_a_tool_that_is_not_offered_cannot_be_chosen() -> None:
    for messages, name in (([USER], "Later"), ([USER, system(removed("Search"))], "Search")):
        choice = {"type": "tool", "name": name}
        path, said = refused(*messages, tool_choice=choice, **LATER)
        assert path == "tool_choice"
        assert f"no tool '{name}' is offered" in said, "tools has one of this name"


def test_many_deferred_tools_do_not_count() -> None:
    many = [tool(f"t{at}", defer_loading=True) for at in range(300)]
    assert names(parse(tools=[tool("Search"), *many])) == (["Search"], ["Search"])
    param, _ = refused(tools=[tool(f"t{at}") for at in range(300)])
    assert param == "tools"


@pytest.mark.promise("An unknown name is a 400.")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, *search("Gone")], "messages[2].content[0].content[0].tool_name"),
        ([USER, system(added("Gone"))], "messages[1].content[0].tool.name"),
        ([USER, system(removed("Gone"))], "messages[1].content[0].tool.name"),
        ([{**USER, "content": [added("Later")]}], "messages[0].content[0]"),
        (
            [USER, system(defined({"name": "f"}))],
            "messages[1].content[0].tool.definition.input_schema",
        ),
        (
            [USER, system({"type": "tool_addition", "tool": {"type": "mcp_tool_reference"}})],
            "messages[1].content[0].tool.type",
        ),
        (
            [USER, search("Later")[1]],
            "messages[1].content[0].tool_use_id",
        ),
    ],
)
def test_what_is_not_known_is_refused(messages: list[dict[str, Any]], param: str) -> None:
    found, message = refused(*messages, **LATER)
    assert found == param
    assert message.startswith(param)


def test_errors_name_a_tool_by_its_place_among_all() -> None:
    later = [tool("Later", defer_loading=True)]
    param, _ = refused(tools=[*later, tool("f", input_schema={"type": "array"}, strict=True)])
    assert param == "tools[1].input_schema"
    assert refused(tools=[*later, *later])[0] == "tools"


BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "a"},
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
    *({"type": "tool_use", "id": id, "name": "Search", "input": {}} for id in "ab"),
    *({"type": "tool_result", "tool_use_id": id, "content": "r"} for id in "ab"),
    search("Later", id="a")[1]["content"][0],
    added("Later"),
    removed("Search"),
    removed("New"),
    defined(tool("New")),
]
WHOLE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]),
        "content": st.lists(st.sampled_from(BLOCKS), max_size=3) | st.just("text"),
    },
    optional={
        "clear_at": st.just("next_user_message"),
        "output_config": st.just({"effort": "low"}),
    },
)


def read_or_refused(*messages: dict[str, Any], **fields: Any) -> tuple[ChatAsk | None, str]:
    """Return the request, or None and the field that is refused."""
    try:
        return parse(*messages, **fields), ""
    except RequestError as error:
        return None, error.param or ""


@given(messages=st.lists(WHOLE, min_size=1, max_size=6))
def test_any_conversation_is_read_or_refused_by_name(messages: list[dict[str, Any]]) -> None:
    edits = {
        "edits": [
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 0}}
        ]
    }
    ask, param = read_or_refused(*messages, **LATER, context_management=edits)
    if ask is None:
        assert param.startswith("messages")
        return
    called, listed = names(ask)
    assert listed == ["Search"]
    assert len(set(called)) == len(called)
    assert {turn.role for turn in ask.turns} <= {"user", "assistant", "system", "tool"}
    found = edit_prompt(ask.turns, ask.edits or (), lambda turns: Prompt((0,) * len(turns)))
    assert len(found.prompt.ids) == len(ask.turns) > 0


# ---- tools with known schemas ----


@pytest.mark.promise(
    "Tools of types bash, text_editor and memory are served with their documented schemas"
)
@pytest.mark.parametrize("kind", KNOWN_TOOLS)
def test_tools_of_known_types_have_their_schema(kind: str) -> None:
    name = KNOWN_TOOLS[kind].name
    asked = [{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}]
    (found,) = parse(tools=asked).rendering.choosing.tools
    assert found.name == name
    parameters = found.fields["function"]["parameters"]
    assert set(parameters["required"]) <= set(parameters["properties"])
    strict = [{"type": kind, "name": name, "strict": True}]
    assert parse(tools=strict).rendering.choosing.tools[0].is_strict
    assert refused(tools=[{"type": kind, "name": "other"}])[0] == "tools[0].name"
    given = [{"type": kind, "name": name, "input_schema": PARAMETERS}]
    assert refused(tools=given)[0] == "tools[0].input_schema"


def test_the_schema_of_memory_is_that_of_the_sdk() -> None:
    """Each command of the SDK's memory tool takes only arguments that the schema has."""
    properties = KNOWN_TOOLS["memory_20250818"].schema["properties"]
    commands = {
        each.model_fields["command"].annotation.__args__[0]: set(each.model_fields)  # type: ignore[union-attr]
        for each in (
            sdk.BetaMemoryTool20250818ViewCommand,
            sdk.BetaMemoryTool20250818CreateCommand,
            sdk.BetaMemoryTool20250818DeleteCommand,
            sdk.BetaMemoryTool20250818InsertCommand,
            sdk.BetaMemoryTool20250818RenameCommand,
            sdk.BetaMemoryTool20250818StrReplaceCommand,
        )
    }
    assert set(properties["command"]["enum"]) == set(commands)
    assert set(properties) == set().union(*commands.values())


def test_the_types_are_those_of_the_sdk() -> None:
    """The SDK's type of each tool accepts the name that is required here."""
    adapter: TypeAdapter[Any] = TypeAdapter(sdk.BetaToolUnionParam)
    for kind, known in KNOWN_TOOLS.items():
        adapter.validate_python({"type": kind, "name": known.name})


def test_a_length_is_shown_by_the_editor() -> None:
    editor = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    (found,) = parse(tools=[{**editor, "max_characters": 777}]).rendering.choosing.tools
    assert "777" in found.fields["function"]["description"]
    older = {"type": "text_editor_20250429", "name": "str_replace_based_edit_tool"}
    for other in (older, tool("f")):
        assert refused(tools=[{**other, "max_characters": 7}])[0] == "tools[0].max_characters"


@pytest.mark.parametrize(
    "kind",
    [
        *("computer_20250124", "text_editor_20990101", "web_search_20250305"),
        *("mcp_toolset", "browser_toolset_20260801"),
    ],
)
def test_other_types_are_refused_by_name(kind: str) -> None:
    for name in ({"name": "x"}, {}):
        param, message = refused(tools=[{"type": kind, **name}])
        assert param == "tools[0].type"
        assert kind in message


# ---- thinking ----

TEXT = "Easy.</think>\n\nThe answer is 4."


HYBRID = TEMPLATE.replace("<think>", "{{ '<think>' if thinking | default(true) else '</think>' }}")
"""Template that heeds the switch, as DeepSeek-V3.1's does."""


@pytest.mark.promise("Without `thinking` nothing is thought")
async def test_without_thinking_nothing_is_thought(tmp_path: Path) -> None:
    model = read_served_model(write_model_folder(tmp_path / "m", template=HYBRID), "small")
    async with scene(model, "The answer is 4.") as it:
        for stream in (False, True):
            message = await answer(it, stream=stream)
            assert [block["type"] for block in message["content"]] == ["text"]
            assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 0
            prompt = model.vocabulary.decode(it.units.submitted[-1].prompt)
            assert prompt.rstrip().endswith("</think>")
        await answer(it, thinking={"type": "adaptive"})
        assert model.vocabulary.decode(it.units.submitted[-1].prompt).endswith("<think>\n")


async def answer(it: World, **fields: Any) -> dict[str, Any]:
    reply = await it.client.post("/v1/messages", json=body(**fields))
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        found: dict[str, Any] = reply.json()
        return found
    return message_of(named_events(reply.content))


@pytest.mark.promise("its blocks are not sent, and `usage` counts them")
@pytest.mark.parametrize("opens", [True, False])
async def test_a_model_that_always_thinks_does_not_show_it(
    model: ServedModel, tmp_path: Path, opens: bool
) -> None:
    """The template opens the reasoning, or else the model does."""
    text = TEXT
    if not opens:
        plain = TEMPLATE.replace("<think>\n", "")
        model = read_served_model(write_model_folder(tmp_path / "m", template=plain), "small")
        text = f"<think>{TEXT}"
    async with scene(model, text) as it:
        whole, streamed = await answer(it), await answer(it, stream=True)
        for message in (whole, streamed):
            (block,) = message["content"]
            assert (block["type"], block["text"]) == ("text", "The answer is 4.")
            assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        reply = await it.client.post("/v1/messages", json=body(stream=True))
        assert b"event: ping" in reply.content, "the client sees that the stream is alive"
        prompt = model.vocabulary.decode(it.units.submitted[-1].prompt)
        assert prompt.endswith("<think>\n") == opens
        await answer(it, thinking={"type": "disabled"})
        prompt = model.vocabulary.decode(it.units.submitted[-1].prompt)
        assert not prompt.endswith("<think>\n")


@pytest.mark.promise(
    'With the setting `unasked_thinking = "model"` in the deployment\'s table `[gateway]` the chat template decides'
)
async def test_a_deployment_may_leave_it_to_the_model(model: ServedModel) -> None:
    async with scene(model, TEXT, settings=GatewayConfig(unasked_thinking="model")) as it:
        for stream in (False, True):
            message = await answer(it, stream=stream)
            assert [block["type"] for block in message["content"]] == ["thinking", "text"]
        prompt = it.units.submitted[-1].prompt
        counted = await it.client.post("/v1/messages/count_tokens", json=body())
        assert counted.json() == {"input_tokens": len(prompt)}


def test_whatever_asks_for_thinking_is_heeded() -> None:
    asking: tuple[dict[str, Any], ...] = (
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"enable_thinking": True},
        {"reasoning_effort": "low"},
        {"thinking_budget": 10},
        {"chat_template_kwargs": {"thinking": True}},
    )
    for fields in asking:
        ask = parse(**fields)
        assert ask.rendering.thinking is not False, fields
        assert not ask.ask.hides_reasoning
    for fields in ({}, {"output_config": {"effort": "high"}}, {"thinking": {"type": "disabled"}}):
        ask = parse(**fields)
        assert (ask.rendering.thinking, ask.ask.hides_reasoning) == (False, True)
        assert ask.rendering.may_stay_open == ("thinking" not in fields)


# ---- thinking of earlier turns ----


def said(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": [*blocks]}, USER]


def block(thinking: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": signature}


OURS = "msg_" + "0" * 32


@pytest.mark.parametrize(
    ("blocks", "reasoning"),
    [
        ([block("Well. ", "any"), block("Yes.", "")], "Well. Yes."),
        ([{"type": "redacted_thinking", "data": "x"}], ""),
        ([block("", sealed("Ö. 🙂", OURS))], "Ö. 🙂"),
        ([block("", OURS)], ""),
        ([block("", "EqQBCkYIBxgCKkDQ.c29tZQ==")], ""),
        ([block("", f"{OURS}.a")], ""),
        ([block("", f"{OURS}._w==")], ""),
        ([block("shown", sealed("other", OURS))], "shown"),
    ],
)
def test_reasoning_goes_with_its_turn(blocks: list[dict[str, Any]], reasoning: str) -> None:
    ask = parse(*said(*blocks, {"type": "text", "text": "A"}))
    assert ask.turns[1] == Turn("assistant", "A", reasoning=reasoning)


def test_reasoning_of_messages_that_become_one_turn_is_joined() -> None:
    texts = [{"type": "text", "text": text} for text in "AB"]
    turns = [
        {"role": "assistant", "content": [block(at, ""), text]}
        for at, text in zip("ab", texts, strict=True)
    ]
    assert parse(USER, *turns, USER).turns[1] == Turn("assistant", "AB", reasoning="ab")


@pytest.mark.promise("its signature carries the reasoning, so that it is not lost for later turns")
async def test_an_omitted_reasoning_comes_back_with_its_signature(model: ServedModel) -> None:
    async with scene(model, TEXT) as it:
        omitted = {"type": "enabled", "display": "omitted"}
        for stream in (False, True):
            message = await answer(it, thinking=omitted, stream=stream)
            thinking = message["content"][0]
            assert thinking["thinking"] == ""
            assert opened(thinking["signature"]) == "Easy."
            turn = parse(*said(*message["content"])).turns[1]
            assert (turn.reasoning, turn.content) == ("Easy.", "The answer is 4.")


# ---- system text ----


@pytest.mark.promise("A first block of `system` that is one line beginning with")
@pytest.mark.parametrize(
    ("texts", "left"),
    [
        (["x-anthropic-billing-header: a=1; b=2;", "Be brief."], "Be brief."),
        (["x-anthropic-billing-header: a=1\n", "Be brief."], "Be brief."),
        (["x-anthropic-billing-header: a=1\nBe brief."], None),
        (["Be brief.", "x-anthropic-billing-header: a=1"], None),
        ([" x-anthropic-billing-header: a=1", "Be brief."], None),
        (["x-anthropic-billing-header", "Be brief."], None),
    ],
)
def test_the_line_for_billing_stays_out_of_the_prompt(texts: list[str], left: str | None) -> None:
    ask = parse(system=[{"type": "text", "text": text} for text in texts])
    assert ask.turns[0] == Turn("system", "".join(texts) if left is None else left)
    if len(texts) == 1:
        assert parse(system=texts[0]).turns == ask.turns


def test_a_system_text_with_nothing_but_the_line_is_none() -> None:
    line = "x-anthropic-billing-header: a=1"
    for asked in (line, [{"type": "text", "text": line}]):
        assert parse(system=asked).turns == (Turn("user", "Hi."),)


async def test_the_prefix_is_found_by_another_start_of_the_client(model: ServedModel) -> None:
    rules = {"type": "text", "text": "Add. " * 100}
    async with scene(model, "4.") as it:
        usages = []
        for number in range(2):
            line = {"type": "text", "text": f"x-anthropic-billing-header: session={number};"}
            usages.append((await answer(it, system=[line, rules]))["usage"])
        assert usages[0]["cache_read_input_tokens"] == 0
        cached, fresh = usages[1]["cache_read_input_tokens"], usages[1]["input_tokens"]
        assert cached > 0.7 * (cached + fresh), "the rest is less than a block"


@pytest.mark.parametrize("kind", ["next_user_message", "never", None])
def test_a_system_message_may_be_for_one_turn(kind: str | None) -> None:
    text = {"type": "text", "text": "Now."}
    message = system(text, removed("Search"), clear_at=kind)
    last = parse(USER, message, **LATER)
    assert "Now." in last.turns[-1].content
    later = parse(USER, message, {"role": "assistant", "content": "A"}, USER, **LATER)
    shown = "".join(turn.content for turn in later.turns)
    assert ("Now." in shown) == (kind != "next_user_message")
    assert names(later)[0] == [], "its changes of tools stay"
    only = parse(USER, system(text, clear_at=kind), {"role": "assistant", "content": "A"}, USER)
    assert len(only.turns) == (3 if kind == "next_user_message" else 4)


def test_a_message_may_set_the_effort() -> None:
    config = {"role": "system", "output_config": {"effort": "low"}}
    ask = parse(USER, config, output_config={"effort": "max"})
    assert ask.rendering.template_kwargs == {"reasoning_effort": "low"}
    assert ask.turns == (Turn("user", "Hi."),)
    assert refused(USER, {"role": "system", "output_config": {}})[0] == "messages[1].content"
    assert refused({"role": "user"})[0] == "messages[0].content"
    for name, value in (("clear_at", "never"), ("output_config", {"effort": "low"})):
        assert refused({**USER, name: value})[0] == f"messages[0].{name}"


# ---- lengths, counts and the first requests ----


@pytest.mark.promise("`prompt is too long: N tokens > M maximum`")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_read(
    model: ServedModel, path: str
) -> None:
    async with scene(model, "4.") as it:
        asked = body({"role": "user", "content": "2 + 2 " * 20_000})
        error = (await it.client.post(path, json=asked)).json()["error"]
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found is not None, error
        num_tokens, most = map(int, found.groups())
        assert num_tokens > most >= model.context_tokens - 1
        assert error["type"] == "invalid_request_error"


async def test_the_number_in_the_refusal_is_exact_where_the_prompt_is_counted(
    model: ServedModel,
) -> None:
    asked = body({"role": "user", "content": "2 + 2 " * 1500})
    async with scene(model, "4.") as it:
        error = (await it.client.post("/v1/messages", json=asked)).json()["error"]
        counted = (await it.client.post("/v1/messages/count_tokens", json=asked)).json()
        assert f"{counted['input_tokens']} tokens > {model.context_tokens - 1} " in error["message"]


async def test_all_kinds_of_bodies_are_counted_to_the_token(taught: ServedModel) -> None:
    format = {"type": "json_schema", "schema": PARAMETERS}
    kinds: list[dict[str, Any]] = [
        body(),
        body(system="Be brief.", thinking={"type": "enabled", "budget_tokens": 2000}),
        body(USER, *search("Later"), **LATER, stream=True),
        body(**LATER, tool_choice={"type": "none"}),
        body(tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice={"type": "any"}),
        body(USER, {"role": "assistant", "content": "It "}, stop_sequences=["x"]),
        body(output_config={"effort": "low", "format": format}, temperature=0.5),
        body(USER, system({"type": "text", "text": "Now."}), metadata={"user_id": "u"}),
        body(chat_template_kwargs={"thinking": True}, seed=3, top_k=5, cache_salt="s"),
    ]
    async with world(taught, spell(taught, "{}")) as it:
        for asked in kinds:
            reply = await it.client.post("/v1/messages", json={**asked, "stream": False})
            usage = reply.json()["usage"]
            counted = await it.client.post("/v1/messages/count_tokens", json=asked)
            total = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert counted.json() == {"input_tokens": total}, asked
        await it.settle()


@pytest.mark.promise("`HEAD /` and `HEAD /api/hello` are answered")
def test_a_client_looks_first_if_the_server_is_there(model: ServedModel) -> None:
    betas = ",".join(f"beta-{at}-2026-01-01" for at in range(1500))
    with (
        serving(model, spell(model, "4."), keys=("k",)) as it,
        Anthropic(base_url=it.url, api_key="k", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        for path in ("/", "/api/hello"):
            reply = client._client.head(f"{it.url}{path}")
            assert (reply.status_code, reply.content) == (200, b"")
            assert client._client.get(f"{it.url}{path}").json()["model"] == "small"
        long: Any = {"extra_headers": {"anthropic-beta": betas}, "extra_query": {"beta": "true"}}
        assert len(betas) > 30_000
        assert client.messages.create(**body(), **long).stop_reason == "end_turn"
