"""Parts of a reply are the same however its tokens are grouped, and whether it is streamed or sent
whole. Both formats with parts are tested: /v1/messages and /v1/responses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.messages.generation import Token
from hadal.core.plans import Sampling
from hadal.gateway.api.messages.reply import MessagesFormatter
from hadal.gateway.api.parts import PartFold, PartKind, parts_of
from hadal.gateway.api.reply import Head, Outcome, Usage
from hadal.gateway.api.responses.reply import ResponseFormatter
from hadal.gateway.api.responses.request import ResponsesRequest
from hadal.gateway.text.asks import Turn
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.tools import FORMATS, CallReader, Choosing, ToolFormat

from .event_streams import message_of, named_events, response_of
from .test_tools import V31, VOCABULARY, WEATHER, replies, written

HEAD = Head("resp_0_abc", 5, "small", "hadal-test")
USAGE = Usage(10, 7, 3, 4)
ASKED = ResponsesRequest(model="small", input="hi")


def pieces_of(
    format: ToolFormat,
    ids: Sequence[int],
    cuts: Sequence[int],
    *,
    stops: tuple[str, ...] = (),
    finish: str = "stop",
) -> list[Piece]:
    """Return the pieces of tokens pushed in groups, cut at `cuts`. Calls get the ids call_0, call_1
    and so on.
    """
    assembler = Assembler(
        VOCABULARY,
        TextReading(sections=True, stops=stops, calls=Calls(format, Choosing((WEATHER,)))),
    )
    numbers = iter(range(1000))
    assembler._calls._reader = CallReader(format, lambda: f"call_{next(numbers)}")
    tokens = [Token("r", 0, i, token) for i, token in enumerate(ids)]
    tokens.append(Token("r", 0, len(ids), 0, finish))
    pieces, begin = [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        pieces.append(assembler.push(tokens[begin:cut]))
        begin = max(begin, cut)
    return pieces


def added(pieces: Sequence[Piece]) -> Piece:
    whole = Piece()
    for piece in pieces:
        whole.add(piece)
    return whole


def message_formatter() -> MessagesFormatter:
    return MessagesFormatter(HEAD, VOCABULARY, max_tokens=60, context_tokens=4096)


def message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the message as a client of /v1/messages reads it from the stream."""
    reply = message_formatter()
    data = reply.begin(USAGE) + b"".join(reply.chunks(0, piece) for piece in pieces)
    return message_of(named_events(data + reply.end(USAGE)))


def whole_message(piece: Piece) -> dict[str, Any]:
    reply = message_formatter()
    body: dict[str, Any] = json.loads(reply.whole([Outcome(0, piece, True)], USAGE))
    return body


def response_formatter(kept: list[tuple[bytes, Turn]]) -> ResponseFormatter:
    def keep(*each: Any) -> None:
        kept.append(each)

    return ResponseFormatter(HEAD, VOCABULARY, ASKED, keep, Sampling(), now=lambda: 7.0)


def response(pieces: Sequence[Piece], kept: list[tuple[bytes, Turn]]) -> dict[str, Any]:
    """Return the response as a client of /v1/responses reads it from the stream."""
    reply = response_formatter(kept)
    data = reply.begin(USAGE) + b"".join(reply.chunks(0, piece) for piece in pieces)
    return response_of(named_events(data + reply.end(USAGE)))


def whole_response(piece: Piece, kept: list[tuple[bytes, Turn]]) -> dict[str, Any]:
    reply = response_formatter(kept)
    body: dict[str, Any] = json.loads(reply.whole([Outcome(0, piece, True)], USAGE))
    return body


@pytest.mark.promise(
    "However a stream cuts a reply into pieces, its events add up to the whole reply"
)
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_cut_of_any_reply_adds_up_to_the_whole_one(name: str, data: st.DataObject) -> None:
    format = FORMATS[name]
    ids = VOCABULARY.encode_controlled(data.draw(replies(format)))
    cuts = data.draw(st.lists(st.integers(0, len(ids) + 1), max_size=8))
    finish = data.draw(st.sampled_from(("stop", "length")))
    stops = data.draw(st.sampled_from(((), ("a",), ("`",))))
    cut = pieces_of(format, ids, cuts, stops=stops, finish=finish)
    singly = pieces_of(format, ids, range(len(ids) + 1), stops=stops, finish=finish)
    at_once = pieces_of(format, ids, [], stops=stops, finish=finish)[0]
    body, kept = whole_message(at_once), []
    found = whole_response(at_once, kept)
    for pieces in (cut, singly):
        assert whole_message(added(pieces)) == message(pieces) == body
        assert whole_response(added(pieces), kept) == response(pieces, kept) == found
    assert len({(raw, turn) for raw, turn in kept}) == 1
    assert json.loads(kept[0][0]) == found
    assert kept[0][1].content == at_once.content


def test_calls_are_to_be_answered_though_a_stop_came_behind_them() -> None:
    text = written(V31, ("weather", "[1]")) + " So halt."
    ids = VOCABULARY.encode_controlled(text)
    pieces = pieces_of(V31, ids, range(len(ids)), stops=("halt",))
    for found in (message(pieces), whole_message(added(pieces))):
        assert found["stop_reason"] == "tool_use"
    plain = pieces_of(V31, VOCABULARY.encode_controlled("So halt."), (), stops=("halt",))
    assert message(plain)["stop_reason"] == "stop_sequence"


def test_parts_come_in_their_order() -> None:
    text = (
        f"<think>Two.</think>See.{written(V31, ('weather', '[1]'))} And {written(V31, ('f', ''))}."
    )
    ids = VOCABULARY.encode_controlled(text)
    for cuts in ([], range(len(ids)), [40, 41, 42]):
        fold = PartFold()
        for piece in pieces_of(V31, ids, cuts):
            fold.take(piece)
        assert [(part.kind, part.name, part.text) for part in fold.parts] == [
            (PartKind.REASONING, "", "Two."),
            (PartKind.TEXT, "", "See."),
            (PartKind.CALL, "weather", "[1]"),
            (PartKind.TEXT, "", " And "),
            (PartKind.CALL, "f", "{}"),
            (PartKind.TEXT, "", "."),
        ]


@pytest.mark.promise(
    "If a reply was cut off and the arguments of a call are no JSON object, they are "
    '{"INVALID_JSON": text}'
)
def test_what_is_no_object_is_not_lost() -> None:
    for arguments, found in (
        ('{"a": 1e400, "b": [1]}', {"INVALID_JSON": '{"a": 1e400, "b": [1]}'}),
        ('{"a": 12345678901234567}', {"a": 12345678901234567}),
        ('{"city": "Os', {"INVALID_JSON": '{"city": "Os'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("", {}),
    ):
        ids = VOCABULARY.encode_controlled(written(V31, ("weather", arguments)))
        (call,) = whole_message(added(pieces_of(V31, ids, [])))["content"]
        assert call["input"] == found


def test_a_stop_string_is_told() -> None:
    ids = VOCABULARY.encode_controlled("One, two, three")
    pieces = pieces_of(V31, ids, [3], stops=("two",))
    body = message(pieces)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "two")
    assert body["content"] == [{"type": "text", "text": "One, ", "citations": []}]
    assert parts_of(added(pieces))[0].text == "One, "
