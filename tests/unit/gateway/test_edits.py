"""Edits of a conversation in /v1/messages: which are made, and their report in replies and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.errors import RequestError
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.asks import ContextEdit, PastCall, ReasoningEdit, ToolUsesEdit, Turn
from hadal.gateway.text.chat import Prompt
from hadal.gateway.text.edits import CLEARED, EditedPrompt, edit_prompt
from tests.waiting import PATIENCE_S

from .event_streams import message_of, named_events
from .serving import serving
from .tool_model import says, tool_model
from .world import World, world

THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "note")]
LONG = "line " * 40


def render(turns: tuple[Turn, ...]) -> Prompt:
    """Return a prompt with a token per character, reasoning included."""
    texts = [
        turn.reasoning + turn.content + "".join(call.arguments for call in turn.calls)
        for turn in turns
    ]
    return Prompt(tuple(map(ord, "".join(texts))))


def conversation(num_rounds: int, *, name: str = "read") -> tuple[Turn, ...]:
    """Return a chat of `num_rounds` rounds: a question, and a call with its result."""
    turns = []
    for at in range(num_rounds):
        call = PastCall(f"c{at}", name, f'{{"path": "file {at}"}}')
        turns += [
            Turn("user", f"ask {at}."),
            Turn("assistant", "", (call,), reasoning=f"think {at}."),
            Turn("tool", LONG, call_id=call.id),
        ]
    return tuple(turns)


def edited(turns: tuple[Turn, ...], *edits: ContextEdit) -> tuple[EditedPrompt, str]:
    """Return the result of edits, and the text of the prompt."""
    found = edit_prompt(turns, edits, render)
    return found, "".join(map(chr, found.prompt.ids))


def test_the_oldest_results_are_removed() -> None:
    found, text = edited(conversation(5), ToolUsesEdit(trigger=10, keep=2))
    (one,) = found.applied or ()
    assert one.num_cleared == 3
    assert one.num_tokens == 3 * (len(LONG) - len(CLEARED))
    assert found.num_original_tokens == len(found.prompt.ids) + one.num_tokens
    assert text.count(CLEARED) == 3
    assert text.endswith(LONG)
    assert text.count('"path"') == 5, "arguments stay"


@pytest.mark.parametrize(
    ("edit", "num_cleared"),
    [
        (ToolUsesEdit(trigger=10**6), None),
        (ToolUsesEdit(trigger=5, is_by_calls=True), None),
        (ToolUsesEdit(trigger=4, is_by_calls=True), 2),
        (ToolUsesEdit(trigger=0, keep=5), None),
        (ToolUsesEdit(trigger=0, keep=0), 5),
        (ToolUsesEdit(trigger=0, min_tokens=2 * (len(LONG) - len(CLEARED)) + 1), None),
        (ToolUsesEdit(trigger=0, min_tokens=2 * (len(LONG) - len(CLEARED))), 2),
        (ToolUsesEdit(trigger=0, excluded=frozenset({"read"})), None),
        (ToolUsesEdit(trigger=0, excluded=frozenset({"note"})), 2),
        (ToolUsesEdit(trigger=0, excluded_ids=frozenset({"c0"})), 1),
    ],
)
def test_an_edit_is_made_by_its_conditions(edit: ToolUsesEdit, num_cleared: int | None) -> None:
    turns = conversation(5)
    found, text = edited(turns, edit)
    assert [one.num_cleared for one in found.applied or ()] == (
        [] if num_cleared is None else [num_cleared]
    )
    assert text.count(CLEARED) == (num_cleared or 0)
    assert found.num_original_tokens == len(render(turns).ids)


@pytest.mark.parametrize(
    ("inputs", "num_left"), [(False, 4), (True, 1), (frozenset({"note"}), 2), (frozenset(), 4)]
)
def test_arguments_are_removed_with_their_results(inputs: Any, num_left: int) -> None:
    read, note = conversation(2), conversation(4, name="note")
    found, text = edited((*read, *note[6:]), ToolUsesEdit(trigger=0, keep=1, inputs=inputs))
    (one,) = found.applied or ()
    assert one.num_cleared == 3
    assert text.count('"path"') == num_left + (inputs == frozenset({"note"}))


def test_a_cleared_result_is_not_cleared_again() -> None:
    turns = [*conversation(4)]
    turns[2] = Turn("tool", CLEARED, call_id="c0")
    found, _ = edited(tuple(turns), ToolUsesEdit(trigger=0))
    assert found.applied == ()


def test_reasoning_of_a_turn_goes_with_all_its_messages() -> None:
    """Calls and their results between two messages of the user belong to one turn."""
    call = PastCall("a", "read", "{}")
    turns = (
        Turn("user", "1"),
        Turn("assistant", "", (call,), reasoning="one "),
        Turn("tool", "x", call_id="a"),
        Turn("assistant", "A", reasoning="two "),
        Turn("user", "2"),
        Turn("assistant", "B"),
        Turn("user", "3"),
        Turn("assistant", "C", reasoning="three "),
        Turn("system", "S"),
        Turn("user", "4"),
    )
    for keep, num_cleared, left in ((1, 1, ["three "]), (2, 0, ["one ", "two ", "three "])):
        found, text = edited(turns, ReasoningEdit(keep))
        assert sum(one.num_cleared for one in found.applied or ()) == num_cleared
        assert [word for word in ("one ", "two ", "three ") if word in text] == left


@given(
    num_rounds=st.integers(0, 6),
    edits=st.lists(
        st.builds(ReasoningEdit, st.integers(1, 4))
        | st.builds(
            ToolUsesEdit,
            trigger=st.integers(0, 1500),
            is_by_calls=st.booleans(),
            keep=st.integers(0, 4),
            min_tokens=st.integers(0, 400),
            inputs=st.booleans(),
        ),
        max_size=4,
    ),
)
def test_tokens_add_up(num_rounds: int, edits: list[ContextEdit]) -> None:
    """The original number is the final one and all that edits removed; no turn is lost."""
    turns = conversation(num_rounds)
    rendered: list[tuple[Turn, ...]] = []

    def watched(given: tuple[Turn, ...]) -> Prompt:
        rendered.append(given)
        return render(given)

    found = edit_prompt(turns, edits, watched)
    removed = sum(one.num_tokens for one in found.applied or ())
    assert found.num_original_tokens == len(found.prompt.ids) + removed
    assert {len(each) for each in rendered} == {len(turns)}
    assert len(rendered) <= 1 + len(edits)


# ---- the field ----


def body_of(num_rounds: int, **fields: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for at in range(num_rounds):
        call = {"type": "tool_use", "id": f"c{at}", "name": "read", "input": {"path": f"file {at}"}}
        result = {"type": "tool_result", "tool_use_id": f"c{at}", "content": LONG}
        messages += [
            {"role": "user", "content": f"ask {at}."},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "other"}, call],
            },
            {"role": "user", "content": [result]},
        ]
    fields = {"tools": TOOLS, "max_tokens": 8, **fields}
    return {"model": "small", "messages": messages or [{"role": "user", "content": "a"}], **fields}


def edits_of(*edits: dict[str, Any], **fields: Any) -> tuple[ContextEdit, ...] | None:
    body = {**body_of(0, **fields), "context_management": {"edits": [*edits]}}
    return parse_messages(json.dumps(body).encode()).edits


def test_edits_are_read_with_their_defaults() -> None:
    assert edits_of({"type": TOOL_USES}) == (ToolUsesEdit(),)
    assert edits_of({"type": THINKING}) == (ReasoningEdit(1),)
    for keep in ("all", {"type": "all"}):
        assert edits_of({"type": THINKING, "keep": keep}) == ()
    everything = {
        "type": TOOL_USES,
        "trigger": {"type": "tool_uses", "value": 7},
        "keep": {"type": "tool_uses", "value": 2},
        "clear_at_least": {"type": "input_tokens", "value": 500},
        "exclude_tools": ["note"],
        "clear_tool_inputs": ["read"],
    }
    turns = {"type": THINKING, "keep": {"type": "thinking_turns", "value": 4}}
    uses = ToolUsesEdit(7, True, 2, 500, frozenset({"note"}), frozenset(), frozenset({"read"}))
    assert edits_of(turns, everything, {"type": TOOL_USES, "clear_tool_inputs": True}) == (
        ReasoningEdit(4),
        uses,
        ToolUsesEdit(inputs=True),
    )
    assert parse_messages(json.dumps(body_of(0)).encode()).edits is None


@pytest.mark.promise("Edits of other types, or with other fields, are a 400 that names them.")
@pytest.mark.parametrize(
    ("edit", "where"),
    [
        ({"type": "compact_20260112"}, ".type"),
        ({"type": "compact_20260112", "instructions": "a"}, ".type"),
        ({"type": TOOL_USES, "instructions": "a"}, ".instructions"),
        ({"type": TOOL_USES, "size": 1}, ""),
        ({"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 1, "size": 1}}, ".trigger"),
        ({"type": TOOL_USES, "keep": "all"}, ".keep"),
        ({"type": TOOL_USES, "keep": {"type": "thinking_turns", "value": 1}}, ".keep.type"),
        ({"type": TOOL_USES, "keep": {"type": "tool_uses"}}, ".keep.value"),
        ({"type": TOOL_USES, "keep": {"type": "tool_uses", "value": -1}}, ".keep.value"),
        ({"type": TOOL_USES, "trigger": {"type": "minutes", "value": 1}}, ".trigger.type"),
        ({"type": TOOL_USES, "clear_at_least": {"type": "tool_uses", "value": 1}}, None),
        ({"type": TOOL_USES, "exclude_tools": "read"}, ".exclude_tools"),
        ({"type": TOOL_USES, "clear_tool_inputs": "read"}, ".clear_tool_inputs"),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}, ".keep.value"),
        ({"type": THINKING, "keep": {"type": "tool_uses", "value": 1}}, ".keep"),
        ({"type": THINKING, "keep": "some"}, ".keep"),
        ({"type": THINKING, "trigger": {"type": "input_tokens", "value": 1}}, ".trigger"),
    ],
)
def test_bad_edits_are_refused_by_name(edit: dict[str, Any], where: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        edits_of(edit)
    where = ".clear_at_least.type" if where is None else where
    assert caught.value.param == f"context_management.edits[0]{where}"


def test_thinking_is_cleared_first_and_only_if_it_is_on() -> None:
    with pytest.raises(RequestError, match="first") as caught:
        edits_of({"type": TOOL_USES}, {"type": THINKING})
    assert caught.value.param == "context_management.edits[1].type"
    with pytest.raises(RequestError, match="disabled"):
        edits_of({"type": THINKING}, thinking={"type": "disabled"})
    with pytest.raises(RequestError, match="at most 4"):
        edits_of(*[{"type": TOOL_USES}] * 5)


# ---- through a gateway ----


@pytest.fixture(scope="module")
def taught() -> Iterator[ServedModel]:
    with tool_model() as made:
        yield made


EDITED: dict[str, Any] = {
    "context_management": {
        "edits": [
            {"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}},
            {
                "type": TOOL_USES,
                "trigger": {"type": "input_tokens", "value": 300},
                "keep": {"type": "tool_uses", "value": 1},
            },
        ]
    },
    "thinking": {"type": "adaptive"},
}


async def post(it: World, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = await it.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.promise(
    "Replies report the edits that were made in `context_management.applied_edits`"
)
@pytest.mark.promise("count_tokens counts what a request with the same body would count")
async def test_edits_are_made_reported_and_counted(taught: ServedModel) -> None:
    async with world(taught, says(lambda _: "Hi.")) as it:
        plain = await post(it, "/v1/messages", body_of(4, thinking={"type": "adaptive"}))
        assert "context_management" not in plain
        whole = await post(it, "/v1/messages", body_of(4, **EDITED))
        prompt = taught.vocabulary.decode(it.units.submitted[-1].prompt)
        assert (prompt.count(LONG), prompt.count(CLEARED)) == (1, 3)
        reply = await it.client.post("/v1/messages", json=body_of(4, **EDITED, stream=True))
        events = named_events(reply.content)
        thinking, uses = events[-2]["context_management"]["applied_edits"]
        assert whole["context_management"] == events[-2]["context_management"]
        assert message_of(events)["content"] == whole["content"]
        assert thinking.pop("cleared_thinking_turns") == 2
        assert uses.pop("cleared_tool_uses") == 3
        lost = thinking.pop("cleared_input_tokens") + uses.pop("cleared_input_tokens")
        assert [thinking, uses] == [{"type": THINKING}, {"type": TOOL_USES}]

        def num_input(message: dict[str, Any]) -> int:
            usage = message["usage"]
            return int(usage["input_tokens"] + usage["cache_read_input_tokens"])

        assert num_input(whole) == num_input(plain) - lost
        counted = await post(it, "/v1/messages/count_tokens", body_of(4, **EDITED))
        assert counted == {
            "input_tokens": num_input(whole),
            "context_management": {"original_input_tokens": num_input(plain)},
        }
        await it.settle()


async def test_edits_that_change_nothing_are_accepted(taught: ServedModel) -> None:
    edits = [{"type": THINKING, "keep": "all"}, {"type": TOOL_USES}]
    fields = {"context_management": {"edits": edits}, "thinking": {"type": "adaptive"}}
    async with world(taught, says(lambda _: "Hi.")) as it:
        await post(it, "/v1/messages", body_of(2, thinking={"type": "adaptive"}))
        found = await post(it, "/v1/messages", body_of(2, **fields))
        assert found["context_management"] == {"applied_edits": []}
        first, second = it.units.submitted
        assert first.prompt == second.prompt
        await it.settle()


async def test_a_conversation_beyond_the_context_fits_after_its_edits(taught: ServedModel) -> None:
    """Clients send the whole conversation each time, however much of it edits remove."""
    num_rounds = 2 * taught.context_tokens // len(LONG)
    async with world(taught, says(lambda _: "Hi.")) as it:
        refused = await it.client.post("/v1/messages", json=body_of(num_rounds))
        assert refused.status_code == 400
        found = await post(it, "/v1/messages", body_of(num_rounds, **EDITED))
        (_, uses) = found["context_management"]["applied_edits"]
        assert uses["cleared_tool_uses"] == num_rounds - 1
        assert found["usage"]["input_tokens"] < taught.context_tokens
        await it.settle()


def test_the_client_reads_the_report(taught: ServedModel) -> None:
    with (
        serving(taught, says(lambda _: "Hi.")) as it,
        Anthropic(base_url=it.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        asked: Any = body_of(4, **EDITED)
        whole = client.beta.messages.create(**asked)
        with client.beta.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        del asked["max_tokens"]
        counted = client.beta.messages.count_tokens(**asked)
    assert whole.context_management is not None
    assert [edit.type for edit in whole.context_management.applied_edits] == [THINKING, TOOL_USES]
    assert streamed.context_management == whole.context_management
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens > counted.input_tokens
