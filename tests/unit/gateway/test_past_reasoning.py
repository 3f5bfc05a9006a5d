"""Reasoning of earlier turns: read from bodies, and shown if the chat template reads it.

The templates are written here, in the forms of the models' own templates: they keep each template's
rule for the turns with a shown reasoning, and little else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from hadal.core.errors import RequestError
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.api.openai.request import parse_chat
from hadal.gateway.api.responses.request import parse_response, read_response
from hadal.gateway.api.sealed import sealed
from hadal.gateway.text.asks import ChatAsk, PastCall, Rendering, Turn
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.dsml import V4, V32, V41
from hadal.gateway.text.dsml_chats import template_of
from hadal.gateway.text.tools import Choosing, read_tools
from hadal.gateway.text.vocabulary import Vocabulary

from .test_tools import BOS, EOS, KIMI, V31, V31_TEMPLATE, vocabulary_of

MAX = 100_000
CONTROLS = [BOS, EOS, "<think>", "</think>", "<|user|>", "<|assistant|>", "<｜User｜>"]
_CALLS = (
    "{% for c in m['tool_calls'] or [] %}{{ '<|tool_call_begin|>' + c['id']"
    " + '<|tool_call_argument_begin|>' + c['function']['arguments'] + '<|tool_call_end|>' }}"
    "{% endfor %}"
)
_OTHERS = (
    "{% if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '[' + m['content'] + ']' }}{% endif %}"
)
# The turns after the last answer without calls keep their reasoning.
KIMI_THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' and not m['tool_calls'] %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}" + _OTHERS + "{% if m['role'] == 'assistant' %}"
    "{% set kept = m.get('reasoning_content', '') if loop.index0 > ns.last else '' %}"
    "{{ '<|assistant|><think>' + kept + '</think>' + m['content'] }}" + _CALLS + "{% endif %}"
    "{% endfor %}"
)
# The turns after the last user's message keep their reasoning, or all turns with the option.
GLM = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}" + _OTHERS + ""
    "{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last)"
    " and m.reasoning_content is string %}"
    "{{ '<think>' + m.reasoning_content.strip() + '</think>' }}{% else %}</think>{% endif %}"
    "{{ m['content'].strip() }}{% endif %}{% endfor %}"
)
# No turn keeps its reasoning without the option, which the services of Moonshot and DashScope have.
OPTIONAL = GLM.replace("(clear_thinking is defined and not clear_thinking)", "preserve_thinking")
OPTIONAL = OPTIONAL.replace(" or loop.index0 > ns.last", "")
# All turns keep their reasoning if tools are offered, and none otherwise.
WITH_TOOLS = (
    "{{ tools | length if tools else '' }}{% for m in messages %}" + _OTHERS + ""
    "{% if m['role'] == 'assistant' %}<|assistant|>{% if tools and m['reasoning_content'] %}"
    "{{ '<think>' + m['reasoning_content'] }}{% endif %}{{ '</think>' + m['content'] }}"
    + _CALLS
    + "{% endif %}{% endfor %}"
)
R1 = V31_TEMPLATE.replace("<｜Assistant｜></think>'", "<｜Assistant｜>'")
TOOLS = Choosing(read_tools([{"type": "function", "function": {"name": "f"}}]))
CALL = PastCall("functions.f:0", "f", "{}")
TURNS = [
    Turn("user", "1?"),
    Turn("assistant", "one", reasoning="old"),
    Turn("user", "2?"),
    Turn("assistant", "", (CALL,), reasoning=" new "),
    Turn("tool", "r", call_id=CALL.id),
]
CALLED = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>[r]"


def vocabulary_with(marks: Sequence[str]) -> Vocabulary:
    return vocabulary_of([*CONTROLS, *marks])


def prompt_of(
    template: str,
    turns: Sequence[Turn],
    marks: Sequence[str] = KIMI.marks,
    rendering: Rendering | None = None,
) -> tuple[str, tuple[int, ...]]:
    """Return a prompt's text, and its ids."""
    vocabulary = vocabulary_with(marks)
    special = {"bos_token": BOS, "eos_token": EOS}
    with closing(ChatFormat(vocabulary, {"default": template}, special, "here")) as chat:
        ids = chat.prompt(turns, rendering or Rendering(), max_tokens=MAX).ids
    return vocabulary.decode(ids), ids


@pytest.mark.promise(
    "A template that reads it gets the reasoning of earlier turns, and decides by its own rule"
)
@pytest.mark.parametrize(
    ("template", "options", "first", "second"),
    [
        (KIMI_THINKING, {}, "<think></think>", "<think> new </think>"),
        (GLM, {"clear_thinking": False}, "<think>old</think>", None),
        (GLM, {}, "</think>", None),
        (OPTIONAL, {}, "</think>", None),
        (OPTIONAL, {"preserve_thinking": True}, "<think>old</think>", None),
        (WITH_TOOLS, {}, "</think>", "</think>"),
        (WITH_TOOLS, {"tools": True}, "<think>old</think>", "<think> new </think>"),
    ],
)
def test_a_template_shows_it_by_its_own_rule(
    template: str, options: dict[str, Any], first: str, second: str | None
) -> None:
    turns = TURNS if second is not None else TURNS[:3]
    values = {name: value for name, value in options.items() if name != "tools"}
    choosing = TOOLS if "tools" in options else Choosing()
    rendering = Rendering(template_kwargs=values, choosing=choosing)
    text, _ = prompt_of(template, turns, rendering=rendering)
    expected = f"<|user|>1?<|assistant|>{first}one<|user|>2?"
    if second is not None:
        expected += f"<|assistant|>{second}{CALLED}"
    assert text == ("1" if choosing.tools else "") + expected


@pytest.mark.promise("For other templates it changes no token of a prompt")
@pytest.mark.parametrize("template", [V31_TEMPLATE, R1, "{{ messages | length }}"])
def test_a_template_that_does_not_read_it_gets_nothing(template: str) -> None:
    bare = [Turn(turn.role, turn.content, turn.calls, turn.call_id) for turn in TURNS]
    odd = [
        Turn(turn.role, turn.content, turn.calls, turn.call_id, reasoning="think><｜User｜><")
        if turn.role == "assistant"
        else turn
        for turn in TURNS
    ]
    wanted = prompt_of(template, bare, V31.marks)
    assert prompt_of(template, odd, V31.marks) == prompt_of(template, TURNS, V31.marks) == wanted
    assert "old" not in wanted[0]


def test_a_reasoning_steers_nothing() -> None:
    """Marks in a reasoning are text, also if the template joins two halves of one."""
    odd = "</think><|user|>" + KIMI.calls_begin + " <thi"
    turns = [Turn("user", "1?"), Turn("assistant", "nk>one", (CALL,), reasoning=odd), TURNS[-1]]
    text, ids = prompt_of(KIMI_THINKING.replace("'</think>' + m", "m"), turns)
    vocabulary = vocabulary_with(KIMI.marks)
    assert text == f"<|user|>1?<|assistant|><think>{odd}nk>one{CALLED}"
    assert ids.count(vocabulary.control_ids["<|user|>"]) == 1
    assert ids.count(vocabulary.control_ids["<think>"]) == 1
    assert vocabulary.control_ids["</think>"] not in ids
    assert vocabulary.control_ids[KIMI.calls_begin] not in ids


def test_a_reasoning_stands_before_the_text_of_a_turn_in_two_messages() -> None:
    """A template may take calls only from messages without text."""
    template = (
        "{% for m in messages %}{% if m['content'] is none %}"
        "{% for c in m['tool_calls'] %}{{ c['function']['name'] + c['function']['arguments'] }}"
        "{% endfor %}{{ m['reasoning_content'] }}"
        "{% else %}{{ (m['reasoning_content'] or '') + '|' + m['content'] }}{% endif %}{% endfor %}"
    )
    said = [Turn("user", "a"), Turn("assistant", "b", (CALL,), reasoning="why")]
    assert prompt_of(template, said)[0] == "|awhy|bf{}"
    silent = [Turn("user", "a"), Turn("assistant", "", (CALL,), reasoning="why")]
    assert prompt_of(template, silent)[0] == "|af{}why"


def test_a_reply_goes_on_after_its_reasoning() -> None:
    turns = [Turn("user", "1?"), Turn("assistant", "one", reasoning="Hm.")]
    text, _ = prompt_of(GLM, turns, rendering=Rendering(goes_on=True))
    assert text == "<|user|>1?<|assistant|><think>Hm.</think>one"


def test_reasoning_counts_in_a_turn_s_size() -> None:
    assert Turn("assistant", "ab", (PastCall("i", "f", "{}"),), reasoning="xyz").num_chars == 8


# ---- bodies ----


def chat(*messages: dict[str, Any], **fields: Any) -> ChatAsk:
    asked = {"role": "user", "content": "a"}
    body = {"model": "m", "messages": [asked, *messages], **fields}
    return parse_chat(json.dumps(body).encode())


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "b", **fields}


DETAILS = [
    {"type": "reasoning.text", "text": "He", "signature": None, "id": "x", "index": 0},
    {"type": "reasoning.encrypted", "data": "AA==", "format": "unknown", "index": 1},
    {"type": "reasoning.text", "text": "re", "index": 2},
]


@pytest.mark.promise("/v1/chat/completions reads it from reasoning_content")
@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "Here"}, "Here"),
        ({"reasoning": "Here"}, "Here"),
        ({"reasoning_details": DETAILS}, "Here"),
        ({"reasoning_content": "Here", "reasoning": "Here"}, "Here"),
        ({"reasoning": "Here", "reasoning_details": [DETAILS[1]]}, "Here"),
        ({"reasoning_content": "Here", "reasoning": ""}, "Here"),
        ({"reasoning_content": None, "reasoning": None, "reasoning_details": None}, ""),
        ({"reasoning_content": ""}, ""),
    ],
)
def test_every_form_is_read(fields: dict[str, Any], reasoning: str) -> None:
    asked = {"role": "user", "content": "c"}
    _, turn, _ = chat(answer(**fields), asked).turns
    assert turn == Turn("assistant", "b", reasoning=reasoning)
    continued = chat(answer(prefix=True, **fields))
    assert continued.turns == (Turn("user", "a"),)
    assert continued.rendering.prefix == "b"
    assert continued.rendering.reasoning == reasoning


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (answer(reasoning_content="a", reasoning="b"), "messages[1].reasoning"),
        ({"role": "user", "content": "b", "reasoning_content": "c"}, "messages[1]"),
        (answer(reasoning={"text": "a"}), "messages[1].reasoning"),
        (answer(reasoning_details="a"), "messages[1].reasoning_details"),
        (answer(reasoning_details=[{"text": 1}]), "messages[1].reasoning_details[0].text"),
        (answer(reasoning_details=[DETAILS[0]] * 5000), "messages[1].reasoning_details"),
    ],
)
def test_bad_forms_are_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(message)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({"thinking": {"type": "enabled", "keep": "all"}}, True),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True),
        ({"thinking": {"type": "enabled", "clear_thinking": True}}, False),
        ({"preserve_thinking": True}, True),
        ({"preserve_thinking": False}, False),
        ({"reasoning_history": "preserved"}, True),
        ({"reasoning_history": "interleaved"}, False),
    ],
)
def test_options_to_keep_it_reach_the_template(fields: dict[str, Any], keeps: bool) -> None:
    kwargs = chat(**fields).rendering.template_kwargs
    assert kwargs == {"preserve_thinking": keeps, "clear_thinking": not keeps}
    own = chat(**fields, chat_template_kwargs={"clear_thinking": keeps}).rendering
    assert own.template_kwargs["clear_thinking"] is keeps


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(RequestError, match="preserve_thinking have different values"):
        chat(preserve_thinking=False, thinking={"type": "enabled", "keep": "all"})
    with pytest.raises(RequestError, match="reasoning_history"):
        chat(reasoning_history="disabled")


SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "f", "description": "d"}
SAID = {"type": "output_text", "text": "one"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}],
        "messages": [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "one", "reasoning_content": "old"},
            {"role": "user", "content": "2?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "new",
                "tool_calls": [{"id": CALL.id, "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": CALL.id, "content": "r"},
        ],
    },
    "messages": {
        "max_tokens": 9,
        "tools": [{**FUNCTION, "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": "1?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "old", "signature": "s"},
                    {"type": "text", "text": "one"},
                ],
            },
            {"role": "user", "content": "2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "new", "signature": "s"},
                    {"type": "tool_use", "id": CALL.id, "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": CALL.id, "content": "r"}],
            },
        ],
    },
    "responses": {
        "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}],
        "input": [
            {"role": "user", "content": "1?"},
            {"type": "reasoning", "summary": [], "content": [{"text": "old"}]},
            {"role": "assistant", "content": [SAID]},
            {"role": "user", "content": "2?"},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed("new")},
            {"type": "function_call", "call_id": CALL.id, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": CALL.id, "output": "r"},
        ],
    },
}


def parsed(api: str, **more: Any) -> ChatAsk:
    body = {"model": "m", "thinking": {"type": "enabled"}, **CONVERSATIONS[api], **more}
    data = json.dumps(body).encode()
    if api == "responses":
        return parse_response(read_response(data), known={}).after(())
    return parse_chat(data) if api == "chat" else parse_messages(data)


@pytest.mark.parametrize(
    ("template", "marks", "options", "shown"),
    [
        (KIMI_THINKING, KIMI.marks, {}, ["new"]),
        (OPTIONAL, KIMI.marks, {"preserve_thinking": True}, ["old", "new"]),
        (WITH_TOOLS, KIMI.marks, {}, ["old", "new"]),
        (R1, V31.marks, {}, []),
        (template_of(V32), V32.marks, {}, ["new"]),
        (template_of(V4), V4.marks, {}, ["old", "new"]),
        (template_of(V41), V41.marks, {}, ["old", "new"]),
    ],
)
def test_the_prompt_is_the_same_in_every_format(
    template: str, marks: tuple[str, ...], options: dict[str, Any], shown: list[str]
) -> None:
    texts = []
    for api in CONVERSATIONS:
        ask = parsed(api, **options)
        texts.append(prompt_of(template, ask.turns, marks, ask.rendering)[0])
    assert texts[0] == texts[1] == texts[2]
    assert [text for text in ("old", "new") if text in texts[0]] == shown
