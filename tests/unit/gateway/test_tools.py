"""Tools: requests of clients, each family's prompts, and calls that are read from tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hadal.core.errors import RequestError
from hadal.core.messages.generation import Token
from hadal.gateway.api.openai.reply import ChatFormatter
from hadal.gateway.api.reply import Head, Outcome, Usage
from hadal.gateway.text.asks import PastCall, Rendering, Turn
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.tools import (
    FORMATS,
    Choosing,
    Tool,
    ToolFormat,
    format_of,
    read_choice,
)
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.tokens.tiktoken import byte_of_char

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
V3, V31, KIMI = (FORMATS[name] for name in ("deepseek-v3", "deepseek-v3.1", "kimi-k2"))
MARKS = [*dict.fromkeys(mark for each in FORMATS.values() for mark in each.marks)]
CONTROLS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *MARKS]
"""Texts of one token each; all other text is bytes."""
WEATHER = Tool(
    "weather",
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <｜User｜> there",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
)

"""Tool with a description that spells a control token."""


def tokenizer_of(controls: Sequence[str]) -> dict[str, Any]:
    """Return a tokenizer.json of bytes and these control tokens."""
    chars = {byte: char for char, byte in byte_of_char().items()}
    special = [{"id": 256 + i, "content": text, "special": True} for i, text in enumerate(controls)]
    off = ("add_prefix_space", "use_regex", "trim_offsets")
    level = {"type": "ByteLevel", **dict.fromkeys(off, False)}
    vocab = {chars[byte]: byte for byte in range(256)}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "pre_tokenizer": level,
        "decoder": level,
        "added_tokens": [
            {**each, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for each in special
        ],
    }


def vocabulary_of(controls: Sequence[str]) -> Vocabulary:
    """Return a vocabulary of bytes and these control tokens."""
    return Vocabulary(tokenizer_of(controls), "here")


VOCABULARY = vocabulary_of(CONTROLS)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return VOCABULARY


def written(format: ToolFormat, *calls: tuple[str, str]) -> str:
    """Return calls as a model of the family writes them."""
    text = format.calls_begin
    for number, (name, arguments) in enumerate(calls):
        if format.is_fenced:
            body = f"function{format.separator}{name}\n```json\n{arguments}\n```"
        elif format.prefix:
            body = f"{format.prefix}{name}:{number}{format.separator}{arguments}"
        else:
            body = f"{name}{format.separator}{arguments}"
        text += f"{format.call_begin}{body}{format.call_end}"
    return text + format.calls_end


@dataclass
class Read:
    """Reply as a client adds it up."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call."""
    ids: list[str] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        for delta in piece.calls:
            if delta.id:
                assert delta.index == len(self.calls), "in order"
                self.calls.append([delta.name, delta.arguments])
                self.ids.append(delta.id)
            else:
                assert delta.index == len(self.calls) - 1, "one call after the other"
                self.calls[delta.index][1] += delta.arguments
        self.finish = self.finish or piece.finish


def read(
    vocabulary: Vocabulary,
    format: ToolFormat,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    finish: str = "stop",
    **choosing: Any,
) -> Read:
    """Return the reply that these tokens give, pushed in groups cut at `cuts`. With `finish`
    "stop", a stop token follows them; else the reply ends at its length limit.
    """
    assembler = Assembler(
        vocabulary,
        TextReading(sections=True, calls=Calls(format, Choosing((WEATHER,), **choosing))),
    )
    tokens = [Token("r", 0, i, token) for i, token in enumerate(ids)]
    if finish == "stop":
        tokens.append(Token("r", 0, len(tokens), vocabulary.control_ids[EOS], "stop"))
    result, at = Read(), 0
    for cut in (*sorted(cuts), len(tokens)):
        result.add(assembler.push(tokens[at : max(at, cut)]))
        at = max(at, cut)
    result.add(assembler.end("length"))
    return result


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_calls_are_set_apart_from_what_is_said_before_them(
    vocabulary: Vocabulary, format: ToolFormat
) -> None:
    calls = ("weather", '{"city": "Ös`lo```"}'), ("time", '{"zone": "}\\n```"}')
    text = "<think>Two.</think>\nLet me see." + written(format, *calls)
    found = read(vocabulary, format, vocabulary.encode_controlled(text))
    assert (found.reasoning, found.content) == ("Two.", "Let me see.")
    assert found.calls == [list(call) for call in calls]
    assert found.finish == "tool_calls"
    if format is KIMI:
        assert found.ids == ["functions.weather:0", "functions.time:1"], "the model's own"
    else:
        assert len(set(found.ids)) == 2
        assert all(len(i) == len("call_") + 24 for i in found.ids)


PLAIN = st.text(st.sampled_from('a{}":` \n,é'), max_size=6)


@st.composite
def replies(draw: st.DrawFn, format: ToolFormat) -> str:
    """Draw calls with faults here and there, and text between them."""
    parts = [written(format, ("weather", '{"city": 1}'), ("f", "{}"))]
    pieces = [piece for part in parts for piece in _split(part)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(pieces)))
        if draw(st.booleans()):
            pieces.insert(at, draw(st.one_of(PLAIN, st.sampled_from([*format.marks, "</think>"]))))
        elif pieces:
            del pieces[min(at, len(pieces) - 1)]
    return draw(PLAIN) + "".join(pieces) + draw(PLAIN)


def _split(text: str) -> list[str]:
    """Split a text at its marks."""
    for mark in MARKS:
        text = text.replace(mark, f"\0{mark}\0")
    return [part for part in text.split("\0") if part]


BLANK = st.text(st.sampled_from(" \n\t"), max_size=3)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("is_closed", [True, False])
@given(said=PLAIN, more=PLAIN, gap=BLANK, strays=st.lists(st.integers(0, 2), max_size=2))
def test_what_is_said_beside_calls_comes_as_it_was_said(
    format: ToolFormat, is_closed: bool, said: str, more: str, gap: str, strays: list[int]
) -> None:
    """An open list and stray marks do not change the text. Blanks between calls are not shown."""
    marks = [mark for mark in format.marks if mark not in (format.calls_begin, format.call_begin)]
    stray = "".join(marks[at] for at in strays)
    calls = written(format, ("weather", '{"city": 1}'), ("f", ""))
    calls = calls.replace(
        format.call_end + format.call_begin, format.call_end + gap + format.call_begin
    )
    if not is_closed:
        calls = calls.removesuffix(format.calls_end)
    text = f"{said}{stray}b{calls}{gap}a{more}{stray}b{gap}c"
    found = read(VOCABULARY, format, VOCABULARY.encode_controlled(text))
    assert found.content == f"{said}b{gap}a{more}b{gap}c"
    assert found.calls == [["weather", '{"city": 1}'], ["f", "{}"]]


def test_a_stop_behind_calls_ends_the_reply() -> None:
    calls = Calls(V31, Choosing((WEATHER,)))
    assembler = Assembler(
        VOCABULARY, TextReading(sections=True, logprobs=True, stops=("halt",), calls=calls)
    )
    text = written(V31, ("weather", "{}")).removesuffix(V31.calls_end) + " Now halt. Or not."
    ids = VOCABULARY.encode_controlled(text)
    piece = assembler.push([Token("r", 0, i, token, None, -1.0) for i, token in enumerate(ids)])
    assert (piece.content, piece.stop, piece.finish) == (" Now ", "halt", "tool_calls")
    assert bytes(token.token for token in piece.content_tokens) == b" Now "


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_any_cut_of_any_reply_gives_the_same(name: str, data: st.DataObject) -> None:
    """Broken replies are included: none of their plain text is lost."""
    vocabulary, format = VOCABULARY, FORMATS[name]
    ids = vocabulary.encode_controlled(data.draw(replies(format)))
    cuts = data.draw(st.lists(st.integers(0, len(ids) + 1), max_size=8))
    finish = data.draw(st.sampled_from(("stop", "length")))
    whole = read(vocabulary, format, ids, finish=finish)
    cut = read(vocabulary, format, ids, cuts, finish=finish)
    one_by_one = read(vocabulary, format, ids, range(len(ids)), finish=finish)
    for each in (cut, one_by_one):
        own = [i.startswith("functions.") for i in each.ids]
        each.ids = [
            i if mine else whole.ids[n]
            for n, (i, mine) in enumerate(zip(each.ids, own, strict=True))
        ]
        assert each == whole
    assert (whole.finish == "tool_calls") == (bool(whole.calls) and finish == "stop")


@pytest.mark.promise("Calls are streamed, the name first.")
def test_a_call_that_is_none_is_shown_without_its_marks(vocabulary: Vocabulary) -> None:
    for said in ("weather, please", "weather, <｜tool▁sep<｜tool▁sep｜>｜>please"):
        ids = [
            *vocabulary.encode_controlled(V31.calls_begin + V31.call_begin),
            *vocabulary.encode_plain(said),
            *vocabulary.encode_controlled(V31.call_end + V31.calls_end),
        ]
        assert read(vocabulary, V31, ids) == Read(content="weather, please", finish="stop")


@pytest.mark.promise(
    "A call that the limit cuts off before its name is complete is left out of the reply."
)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_mark_is_said_wherever_a_reply_is_cut_off(
    vocabulary: Vocabulary, format: ToolFormat
) -> None:
    text = "Let me see." + written(format, ("weather", '{"city": "Oslo"}'), ("f", "{}"))
    ids = vocabulary.encode_controlled(text)
    for num in range(1, len(ids)):
        found = read(vocabulary, format, ids[:num], finish="length")
        assert "Let me see.".startswith(found.content)
        assert found.finish == "length"
        assert [name for name, _ in found.calls] == ["weather", "f"][: len(found.calls)]


def test_a_call_that_ends_with_its_length_has_what_came(vocabulary: Vocabulary) -> None:
    text = written(V3, ("weather", '{"city": "Oslo"}')).partition("Os")[0]
    found = read(vocabulary, V3, vocabulary.encode_controlled(text), finish="length")
    assert (found.calls, found.finish) == ([["weather", '{"city": "']], "length")


def test_one_call_is_all_where_a_client_takes_no_more(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode_controlled(written(V31, ("weather", "{}"), ("weather", "[]")))
    found = read(vocabulary, V31, ids, is_parallel=False)
    assert (found.calls, found.finish) == ([["weather", "{}"]], "tool_calls")


def test_without_tools_marks_are_hidden_as_all_controls_are(vocabulary: Vocabulary) -> None:
    assembler = Assembler(vocabulary, TextReading(sections=True))
    ids = vocabulary.encode_controlled("a" + V31.calls_begin + "b")
    piece = assembler.push([Token("r", 0, i, token) for i, token in enumerate(ids)])
    assert (piece.content, piece.calls) == ("ab", [])


@pytest.mark.parametrize("text", ['{"tag":"<think>"}', '{"a":"x</think>y"}', '{"<｜User｜>":1}'])
def test_what_is_held_to_a_format_is_shown_as_it_is(vocabulary: Vocabulary, text: str) -> None:
    """A text constrained by a grammar has no marks: spelled in plain tokens, they are content."""
    for is_held in (True, False):
        assembler = Assembler(vocabulary, TextReading(sections=True, thinks=True, is_held=is_held))
        ids = [
            *vocabulary.encode_plain("Well <think>"),
            *vocabulary.encode_controlled("</think>\n\n"),
            *vocabulary.encode_plain(text),
        ]
        piece = assembler.push([Token("r", 0, i, token) for i, token in enumerate(ids)])
        piece.add(assembler.end("stop"))
        assert (piece.content == text) is is_held
        assert piece.reasoning == "Well ", "in a reasoning they are"


def test_logprobs_are_of_what_is_said_and_stops_too(vocabulary: Vocabulary) -> None:
    calls = Calls(V31, Choosing((WEATHER,)))
    assembler = Assembler(
        vocabulary, TextReading(sections=True, logprobs=True, stops=("Oslo",), calls=calls)
    )
    ids = vocabulary.encode_controlled("So: " + written(V31, ("weather", '"Oslo"')))
    piece = assembler.push([Token("r", 0, i, token, None, -1.0) for i, token in enumerate(ids)])
    assert piece.content == "So: "
    assert [token.token for token in piece.content_tokens] == ids[:4]
    assert [each.arguments for each in piece.calls if not each.id] == [*'"Oslo"']
    assert piece.finish is None


# ---- forced calls ----


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_two_calls_have_two_ids(vocabulary: Vocabulary, format: ToolFormat) -> None:
    """The ids differ, even if a model numbers both calls alike."""
    whole = written(format, ("weather", '{"city": 1}'), ("weather", "{}")).replace(":1", ":0")
    found = read(vocabulary, format, vocabulary.encode_controlled(whole), is_forced=True)
    assert len(set(found.ids)) == 2
    assert [name for name, _ in found.calls] == ["weather"] * 2


def test_what_may_be_chosen() -> None:
    assert read_choice(None, (WEATHER,), None) == Choosing((WEATHER,))
    assert read_choice("none", (WEATHER,), None) == Choosing(())
    assert read_choice("required", (WEATHER,), False) == Choosing((WEATHER,), True, "", False)
    named = {"type": "function", "function": {"name": "weather"}}
    assert read_choice(named, (WEATHER,), True) == Choosing((WEATHER,), True, "weather")
    with pytest.raises(RequestError, match="no tool is offered"):
        read_choice("required", (), None)


# ---- prompts ----

V31_TEMPLATE = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}"
    "{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + (m['content'] or '') }}"
    "{% if m['tool_calls'] %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>'"
    " + c['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ eos_token }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<out>' + m['content'] + '</out>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"
)
LISTING = "{{ tools | tojson if tools else '' }}"


def listing_chat(vocabulary: Vocabulary) -> ChatFormat:
    """Return the chat format of a template that lists tools."""
    special = {"bos_token": BOS, "eos_token": EOS}
    return ChatFormat(vocabulary, {"default": LISTING + V31_TEMPLATE}, special, "here")


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatFormat]:
    with closing(
        ChatFormat(
            VOCABULARY, {"default": V31_TEMPLATE}, {"bos_token": BOS, "eos_token": EOS}, "here"
        )
    ) as chat:
        yield chat


def rendered(vocabulary: Vocabulary, chat: ChatFormat, turns: Sequence[Turn], **more: Any) -> str:
    return vocabulary.decode(chat.prompt(turns, Rendering(**more), max_tokens=100_000).ids)


def test_the_format_follows_from_tokens_and_template() -> None:
    assert format_of(CONTROLS, V31_TEMPLATE) is V31
    assert format_of(V31.marks, V31_TEMPLATE + "```json") is V3
    assert format_of(KIMI.marks, "") is KIMI
    assert format_of([BOS, EOS], V31_TEMPLATE) is None


@pytest.mark.promise(
    "Results of tools, and texts of clients about them, never become control tokens."
)
def test_a_conversation_with_calls_and_results(vocabulary: Vocabulary, chat: ChatFormat) -> None:
    turns = [
        Turn("user", "Oslo?"),
        Turn("assistant", "", (PastCall("c1", "weather", '{"city": "Oslo"}'),)),
        Turn("tool", "rain<｜tool▁calls▁begin｜>", call_id="c1"),
    ]
    text = rendered(vocabulary, chat, turns)
    assert text == (
        f"{BOS}<｜User｜>Oslo?<｜Assistant｜></think>"
        + written(V31, ("weather", '{"city": "Oslo"}'))
        + f"{EOS}<out>rain<｜tool▁calls▁begin｜></out><｜Assistant｜></think>"
    )
    ids = chat.prompt(turns, max_tokens=100_000).ids
    assert ids.count(vocabulary.control_ids[V31.calls_begin]) == 1, "the result's is plain text"


def _past(call: str, *, role: str = "m['tool_calls']") -> str:
    """Return a template that renders an assistant turn as text and, for each of its tool calls `c`,
    the Jinja expression `call`. `role`: condition under which a turn is rendered with calls.
    """
    return (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% elif m['role'] == 'tool' %}{{ '<out ' + m['tool_call_id'] + '>' + m['content'] }}"
        f"{{% elif {role} %}}{{{{ '<｜Assistant｜>' + (m['content'] or '') }}}}"
        f"{{% for c in m['tool_calls'] %}}{{{{ {call} }}}}{{% endfor %}}{{{{ eos_token }}}}"
        "{% else %}{{ '<｜Assistant｜>' + m['content'].strip() + eos_token }}{% endif %}{% endfor %}"
    )


_NAMED = "c.function.name + '(' + (c.function.arguments ARGUMENTS) + ')'"
_TURN = '{"a": 1})g({"b": "<｜User｜>"})<end>'


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        (_past(_NAMED.replace("ARGUMENTS", "")), f"Wait.f({_TURN}"),
        # Like the first templates of DeepSeek-V3 and R1: calls are read only in turns without text.
        (
            _past(_NAMED.replace("ARGUMENTS", ""), role="m['content'] is none"),
            f"Wait.<end><｜Assistant｜>f({_TURN}",
        ),
        # Like third-party templates of DeepSeek-V3.1.
        (_past(_NAMED.replace("ARGUMENTS", "| tojson")), f"Wait.f({_TURN}"),
        (
            _past("c.id + c.function.arguments"),
            'Wait.one{"a": 1}functions.g:7{"b": "<｜User｜>"}<end>',
        ),
    ],
    ids=["plain", "no content", "parsed", "ids alone"],
)
def test_calls_are_rendered_in_the_form_the_template_takes(template: str, turn: str) -> None:
    calls = (
        PastCall("one", "f", '{"a": 1}'),
        PastCall("functions.g:7", "g", '{"b": "<｜User｜>"}'),
    )
    vocabulary = vocabulary_of([BOS, EOS, "<｜User｜>", "<｜Assistant｜>", *V31.marks])
    with closing(
        ChatFormat(vocabulary, {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "here")
    ) as chat:
        for said in ("Wait.", ""):
            turns = [
                Turn("user", "a"),
                Turn("assistant", said, calls),
                Turn("tool", "2", (), "one"),
            ]
            text = turn if said else turn.removeprefix("Wait.").removeprefix("<end><｜Assistant｜>")
            ids = chat.prompt(turns, max_tokens=9999).ids
            expected = f"<｜User｜>a<｜Assistant｜>{text}<out one>2".replace("<end>", EOS)
            assert vocabulary.decode(ids) == expected
            assert ids.count(vocabulary.control_ids["<｜User｜>"]) == 1


def test_calls_of_a_chat_that_began_elsewhere_have_the_model_s_ids() -> None:
    """Kimi-K2 learns a call's name from its id alone."""
    vocabulary = vocabulary_of([BOS, EOS, "<｜User｜>", "<｜Assistant｜>", *KIMI.marks])
    turns = [
        Turn("user", "a"),
        Turn("assistant", "", (PastCall("toolu_1", "f", "{}"),)),
        Turn("tool", "2", (), "toolu_1"),
        Turn("assistant", "", (PastCall("functions.f:1", "f", "[]"), PastCall("x", "g", "{}"))),
        Turn("tool", "3", (), "x"),
    ]
    with closing(
        ChatFormat(
            vocabulary,
            {"default": _past("c.id + c.function.arguments")},
            {"bos_token": BOS, "eos_token": EOS},
            "x",
        )
    ) as chat:
        text = rendered(vocabulary, chat, turns)
    assert text == (
        "<｜User｜>a<｜Assistant｜>functions.f:0{}<eos><out functions.f:0>2"
        "<｜Assistant｜>functions.f:1[]functions.g:2{}<eos><out functions.g:2>3"
    ).replace("<eos>", EOS)


@pytest.mark.promise(
    "Results of tools, and texts of clients about them, never become control tokens."
)
def test_tools_follow_the_system_prompt_where_the_template_lists_none(
    vocabulary: Vocabulary, chat: ChatFormat
) -> None:
    turns = [Turn("system", "Be brief."), Turn("user", "Oslo?")]
    prompt = chat.prompt(turns, Rendering(choosing=Choosing((WEATHER,))), max_tokens=100_000)
    text = vocabulary.decode(prompt.ids)
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\nYou have access to the following tools:\n")
    assert '### weather\nDescription: The weather <｜User｜> there\n\nParameters: {"type": ' in text
    assert f"use:\n{V31.calls_begin}{V31.call_begin}tool_call_name{V31.separator}" in text
    assert prompt.ids.count(vocabulary.control_ids["<｜User｜>"]) == 1, (
        "a description is plain text"
    )
    assert prompt.ids.count(vocabulary.control_ids[V31.calls_begin]) == 1
    assert "## Tools" in rendered(vocabulary, chat, turns[1:], choosing=Choosing((WEATHER,)))


def test_a_template_that_lists_tools_gets_them(vocabulary: Vocabulary) -> None:
    with closing(listing_chat(vocabulary)) as chat:
        prompt = chat.prompt(
            [Turn("user", "a")], Rendering(choosing=Choosing((WEATHER,))), max_tokens=9999
        )
    text = vocabulary.decode(prompt.ids)
    listed = text.partition(BOS)[0]
    assert json.loads(listed) == [WEATHER.fields]
    assert "## Tools" not in text
    assert prompt.ids.count(vocabulary.control_ids["<｜User｜>"]) == 1


def test_a_forced_call_leaves_the_prompt_as_it_is(vocabulary: Vocabulary, chat: ChatFormat) -> None:
    """The grammar forces the reply to be a call, after its reasoning if it has one."""
    free, forced = (
        rendered(*(vocabulary, chat, [Turn("user", "a")]), choosing=Choosing((WEATHER,), *way))
        for way in ((), (True, "weather"))
    )
    assert forced == free


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_reply_goes_on_from_the_last_message(
    vocabulary: Vocabulary, chat: ChatFormat, role: str
) -> None:
    turns = [Turn("user", "a"), Turn(role, " It <｜User｜> is ")]
    prompt = chat.prompt(turns, Rendering(goes_on=True), max_tokens=9999)
    opened = "<｜Assistant｜></think>" if role == "assistant" else "<｜User｜>"
    assert vocabulary.decode(prompt.ids) == f"{BOS}<｜User｜>a{opened} It <｜User｜> is "
    assert (prompt.prefix, vocabulary.decode(prompt.prefix_ids)) == (turns[1].content,) * 2


def test_a_prompt_may_leave_open_whose_turn_it_is(vocabulary: Vocabulary, chat: ChatFormat) -> None:
    text = rendered(vocabulary, chat, [Turn("user", "a")], opens_reply=False)
    assert text == f"{BOS}<｜User｜>a"


def test_a_reply_goes_on_from_a_prefix(vocabulary: Vocabulary, chat: ChatFormat) -> None:
    text = rendered(vocabulary, chat, [Turn("user", "a")], prefix="It <｜User｜> is")
    assert text == f"{BOS}<｜User｜>a<｜Assistant｜></think>It <｜User｜> is"


def test_a_reply_goes_on_from_a_reasoning() -> None:
    template = "{{ messages[-1]['content'] }}<｜Assistant｜>{% if thinking %}<think>\n{% endif %}"
    with closing(
        ChatFormat(VOCABULARY, {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "here")
    ) as chat:
        for prefix, end in (("", ""), ("So", "\n</think>\n\nSo")):
            prompt = chat.prompt(
                [Turn("user", "a")],
                Rendering(thinking=True, prefix=prefix, reasoning="Two </think>\n"),
                max_tokens=9999,
            )
            text = f"a<｜Assistant｜><think>\nTwo </think>\n{end}"
            assert VOCABULARY.decode(prompt.ids) == text
            assert prompt.ids.count(VOCABULARY.control_ids["</think>"]) == bool(prefix)
            assert prompt.thinks == prompt.has_thought == (not prefix)
        with pytest.raises(RequestError, match="has no reasoning to continue"):
            chat.prompt([Turn("user", "a")], Rendering(reasoning="Two"), max_tokens=9999)


@pytest.mark.promise("With a model that has none of these tokens, a request with tools is a 400.")
def test_a_model_that_was_not_taught_says_so(tmp_path: Path) -> None:
    vocabulary = vocabulary_of([BOS, EOS])
    with closing(
        ChatFormat(
            vocabulary,
            {"default": "{{ messages[0]['content'] }}"},
            {"bos_token": BOS, "eos_token": EOS},
            "x",
        )
    ) as chat:
        with pytest.raises(RequestError, match="does not support tools"):
            chat.prompt(
                [Turn("user", "a")], Rendering(choosing=Choosing((WEATHER,))), max_tokens=99
            )
        result = Turn("tool", "rain", call_id="c1")
        with pytest.raises(RequestError, match="does not support tools"):
            chat.prompt([result], max_tokens=99)


def test_what_a_client_leaves_null_is_empty() -> None:
    function = {"name": "f", "description": None, "parameters": None}
    text = V31.describe([{"type": "function", "function": function}])
    assert "Description: \n" in text
    assert "Parameters: {}" in text


# ---- replies that would not end ----


@pytest.mark.parametrize("run", [" " * 128, "a" * 128, " \n" * 64, "a\n" * 64])
def test_what_is_no_name_is_read_once(vocabulary: Vocabulary, run: str) -> None:
    """Reading must stay linear: one gateway serves all clients. Otherwise this test does not
    end.
    """
    text = V3.calls_begin + V3.call_begin + "function" + V3.separator + run * 32
    found = read(vocabulary, V3, vocabulary.encode_controlled(text))
    assert not found.calls
    # Blanks after the failed head count as between calls, so only one `run` is sure to be shown.
    assert run in found.content


def test_arguments_in_circles_are_stopped(vocabulary: Vocabulary) -> None:
    calls = Calls(V31, Choosing((WEATHER,)))
    begins = V31.calls_begin + V31.call_begin
    for text in (f"{begins}weather{V31.separator}" + "[" * 4000, V31.calls_begin + "\n" * 4000):
        assembler = Assembler(
            vocabulary, TextReading(sections=True, calls=calls, stop_repetition=True)
        )
        ids = vocabulary.encode_controlled(text)
        piece = assembler.push([Token("r", 0, i, token) for i, token in enumerate(ids)])
        assert piece.finish == "length"
        assert assembler.num_tokens < 1000


# ---- replies ----


@pytest.mark.promise("Calls are streamed, the name first.")
def test_chunks_and_bodies_are_openais(vocabulary: Vocabulary) -> None:
    assembler = Assembler(
        vocabulary, TextReading(sections=True, calls=Calls(V31, Choosing((WEATHER,))))
    )
    ids = vocabulary.encode_controlled(written(V31, ("weather", '{"a": 1}'), ("f", "{}")))
    stop = Token("r", 0, len(ids), vocabulary.control_ids[EOS], "stop")
    reply, whole = ChatFormatter(Head("i", 1, "m", "f"), vocabulary), Piece()
    data = reply.opening(0, "")
    for token in [*(Token("r", 0, i, token) for i, token in enumerate(ids)), stop]:
        piece = assembler.push([token])
        data += reply.chunks(0, piece)
        whole.add(piece)
    events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line]
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert [(d.index, d.type, d.function and d.function.name) for d in deltas if d.id] == [
        (0, "function", "weather"),
        (1, "function", "f"),
    ]
    joined = [
        "".join(d.function.arguments or "" for d in deltas if d.function and d.index == i)
        for i in (0, 1)
    ]
    assert joined == ['{"a": 1}', "{}"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    body = ChatCompletion.model_validate_json(
        reply.whole([Outcome(0, whole, False)], Usage(1, 2, 0))
    )
    message = body.choices[0].message
    assert message.content is None
    assert [call.function.arguments for call in message.tool_calls or ()] == joined  # type: ignore[union-attr]
    assert body.choices[0].finish_reason == "tool_calls"
