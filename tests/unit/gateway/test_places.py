"""Messages found in rendered prompts: every byte of a message's text belongs to it."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from random import Random

import pytest

from hadal.gateway.text.asks import PastCall, Rendering, Turn
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.dsml import FORMS
from hadal.gateway.text.dsml_chats import template_of
from hadal.gateway.text.places import REPLY, TOOLS, Places, PromptPart, places_of
from hadal.gateway.text.tools import Choosing, read_tools
from hadal.gateway.text.vocabulary import Vocabulary

from .dsml_replies import TOKEN
from .test_family_chats import TEMPLATES, chats, vocabulary
from .test_tools import VOCABULARY, listing_chat

__all__ = ["chats", "vocabulary"]

CHAT = [
    Turn("system", "You water the garden of a tall house — ü."),
    Turn("user", "a"),
    Turn("assistant", "<think>hm</think>  The rain came early this year.\n"),
    Turn("user", "user"),
    Turn("assistant", "Ja."),
    Turn("user", "When does the rain come again?"),
]
MAX = 100_000


def texts_of(text: str, places: Places) -> dict[PromptPart, str]:
    """Return the text of each part of a prompt."""
    data = text.encode()
    found: dict[PromptPart, bytearray] = {}
    for at, byte in enumerate(data):
        place = places.at(at)
        assert place is not None
        found.setdefault(place, bytearray()).append(byte)
    return {place: bytes(part).decode() for place, part in found.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_is_found_in_every_template(
    chats: dict[str, ChatFormat], vocabulary: Vocabulary, name: str
) -> None:
    prompt = chats[name].prompt(CHAT, max_tokens=MAX)
    texts = texts_of(vocabulary.decode(prompt.ids), prompt.find_places())
    for index, turn in enumerate(CHAT):
        content = turn.content.rpartition("</think>")[2].strip()
        if content == turn.role:
            continue  # Its header has the same text, so it may count as the next message's.
        assert content in texts[PromptPart(turn.role, index)]
    assert "again" not in texts[PromptPart(REPLY)]
    assert "".join(texts.values()) == vocabulary.decode(prompt.ids)


def test_a_later_system_message_is_found_where_the_template_puts_it(
    chats: dict[str, ChatFormat], vocabulary: Vocabulary
) -> None:
    late = Turn("system", "From now on speak of the rain only.")
    prompt = chats["DeepSeek-V3"].prompt([*CHAT[:2], late, CHAT[-1]], max_tokens=MAX)
    texts = texts_of(vocabulary.decode(prompt.ids), prompt.find_places())
    assert late.content in texts[PromptPart("system", 2)]
    assert CHAT[-1].content in texts[PromptPart("user", 3)]


def tools_of(*names: str) -> Choosing:
    return Choosing(
        read_tools([{"type": "function", "function": {"name": name}} for name in names])
    )


def test_the_list_of_tools_is_a_part_of_its_own() -> None:
    with closing(listing_chat(VOCABULARY)) as chat:
        rendering = Rendering(choosing=tools_of("find_rain", "find_sun"))
        prompt = chat.prompt(CHAT, rendering, max_tokens=MAX)
    texts = texts_of(VOCABULARY.decode(prompt.ids), prompt.find_places())
    assert "find_rain" in texts[PromptPart(TOOLS)]
    assert "find_sun" in texts[PromptPart(TOOLS)]
    for index in (0, 5):
        assert CHAT[index].content in texts[PromptPart(CHAT[index].role, index)]


WORDS = ("river", "stone", "tall", "house", "garden", "walks", "under", "seven", "lamp", "winter")


def agents_chat(rng: Random) -> list[Turn]:
    """Return a chat with calls, results and reasoning."""

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randrange(2, most))) + "."

    turns = [Turn("system", words(14))]
    for number in range(rng.randrange(1, 5)):
        call = PastCall(f"{number}", "find_rain", json.dumps({"city": words(4)}))
        said, thought = rng.choice(("", words(8))), rng.choice(("", words(10)))
        turns += [
            Turn("user", words(14)),
            Turn("assistant", said, (call,), reasoning=thought),
            Turn("tool", words(12), (), call.id),
            Turn("assistant", words(10)),
        ]
    return [*turns, Turn("user", words(9))]


@pytest.mark.parametrize("name", ["listing", *FORMS])
def test_a_change_is_found_in_its_message(name: str) -> None:
    """A changed word, or changed arguments of a call, which templates write in different forms."""
    vocabulary = VOCABULARY if name == "listing" else TOKEN
    rendering = Rendering(choosing=tools_of("find_rain"))
    with closing(
        listing_chat(VOCABULARY)
        if name == "listing"
        else ChatFormat(TOKEN, {"default": template_of(FORMS[name])}, {}, "here")
    ) as chat:
        for seed in range(40):
            rng = Random(seed)
            turns = agents_chat(rng)
            index = rng.randrange(len(turns))
            turn = turns[index]
            changed = replace(turn, content=f"{turn.content[:-1]} changed.")
            if turn.calls:
                call = replace(turn.calls[0], arguments='{"city": "Changed"}')
                changed = replace(turn, calls=(call,))
            before = chat.prompt(turns, rendering, max_tokens=MAX)
            turns[index] = changed
            prompt = chat.prompt(turns, rendering, max_tokens=MAX)
            pairs = zip(before.ids, prompt.ids, strict=False)
            num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            position = len(vocabulary.decode(prompt.ids[:num_common]).encode())
            assert prompt.find_places().at(position) == PromptPart(turn.role, index), seed


@pytest.mark.parametrize("written", ['{"city": "Rome"}', "<parameter>Rome</parameter>"])
def test_calls_belong_to_their_message(written: str) -> None:
    """The second form is one in which a template does not write the arguments as they came."""
    call = PastCall("1", "find_rain", '{"city": "Rome"}')
    turns = [Turn("user", "rain?"), Turn("assistant", "", (call,)), Turn("tool", "none", (), "1")]
    text = f"find_rain<u>rain?<a>call find_rain {written}<t>none<a>"
    texts = texts_of(text, places_of(text, turns, ["find_rain"]))
    assert f"find_rain {written}" in texts[PromptPart("assistant", 1)]
    assert texts[PromptPart(TOOLS)] == "find_rain<u>"
    assert texts[PromptPart("tool", 2)].endswith("none")
    assert texts[PromptPart(REPLY)] == "<a>"


def test_a_call_is_found_behind_what_a_template_rewrites() -> None:
    """Its own reasoning, and a result that the template escapes, may be long."""
    calls = [PastCall(f"{number}", "find_rain", f'{{"city": {number}}}') for number in range(2)]
    result = "dry\n" * 5000
    turns = [
        Turn("user", "Will it rain?"),
        Turn("assistant", "", (calls[0],), reasoning="I look. " * 5000),
        Turn("tool", result, (), "0"),
        Turn("assistant", "", (calls[1],)),
    ]
    text = "<u>" + turns[0].content
    for turn in turns[1:]:
        text += turn.reasoning + json.dumps(turn.content)
        text += "".join(f"<call>{call.name} {call.arguments}" for call in turn.calls)
    texts = texts_of(text + "<a>", places_of(text + "<a>", turns))
    for index, call in zip((1, 3), calls, strict=True):
        assert texts[PromptPart("assistant", index)].endswith(call.arguments)


def test_the_search_of_calls_that_a_template_rewrites_has_an_end() -> None:
    """Otherwise each call would cost the length of the whole prompt."""

    class Searched(str):
        num_chars = 0

        def find(self, sub: str, start: int = 0, end: int = sys.maxsize) -> int:  # type: ignore[override]
            found = super().find(sub, start, end)
            Searched.num_chars += (min(end, len(self)) if found < 0 else found) - start
            return found

    turns, text = [], ""
    for number in range(200):
        call = PastCall(f"{number}", "find_rain", f'{{"city": {number}}}')
        turns += [Turn("assistant", "", (call,)), Turn("tool", f"dry {number} " * 500, (), call.id)]
        text += f"<a>find_rain<city>{number}</city><t>{turns[-1].content}"
    places = places_of(Searched(text), turns)
    assert len(places.parts) == len(turns) + 1
    assert Searched.num_chars < 5 * len(text)


def test_messages_that_a_template_leaves_out_end_the_search() -> None:
    """Otherwise a long chat that is not shown would cost the square of its length."""
    missing = [Turn("user", f"This message number {number} is not shown.") for number in range(100)]
    last = Turn("user", "Only this one is shown.")
    text = f"<u>{last.content}<a>"
    few, many = (places_of(text, [*missing[:number], last]) for number in (5, 100))
    assert PromptPart("user", 5) in few.parts
    assert many.parts == (PromptPart(REPLY),)


def test_a_plain_text_has_no_parts() -> None:
    assert Places().at(3) is None
