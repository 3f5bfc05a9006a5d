"""System messages between other turns, in /v1/messages: their place in the prompt of any template."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.gateway.desk.service import read_served_model
from hadal.gateway.text.asks import PastCall, Rendering, Turn
from hadal.gateway.text.dsml import FORMS, V4, V41
from hadal.gateway.text.dsml_chats import template_of
from hadal.gateway.text.places import PromptPart
from hadal.gateway.text.reminders import in_place

from .model_folder import ASSISTANT, TEMPLATE, USER, write_model_folder

MOVING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"
    + TEMPLATE.replace("{{ m['content'] }}{% elif", "{% elif", 1)
)
"""Template that writes all system messages at the beginning, as DeepSeek's do."""
STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('only the first message may be a system message') }}{% endif %}{% endfor %}"
    + TEMPLATE
)
TURNS = (
    Turn("system", "Rules."),
    Turn("user", "Hi."),
    Turn("system", "Be brief in all answers."),
    Turn("assistant", "Hello."),
    Turn("user", "And?"),
    Turn("system", "Now."),
    Turn("assistant", "Bye."),
)


@pytest.mark.promise("A message of role `system` between the others keeps its place in the prompt")
@pytest.mark.parametrize("template", [TEMPLATE, MOVING, STRICT, *map(template_of, FORMS.values())])
def test_a_system_message_keeps_its_place(tmp_path: Path, template: str) -> None:
    model = read_served_model(write_model_folder(tmp_path / "m", template=template), "small")
    assert model.chat is not None
    rendering = Rendering(opens_reply=False, keeps_places=True)

    def text(turns: tuple[Turn, ...]) -> str:
        assert model.chat is not None
        return model.vocabulary.decode(model.chat.prompt(turns, rendering, max_tokens=4000).ids)

    texts = [text(TURNS[:number]) for number in (3, 4, 5, 6, 7)]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter), "each turn only adds to the prompt"
    keeps = template in (TEMPLATE, template_of(V4), template_of(V41))
    order = (
        ["Rules.", "Hi.", "Be brief in all answers."]
        if keeps
        else ["Rules.", "Be brief in all answers.", "Hi."]
    )
    parts = [texts[-1].index(part) for part in (*order, "Hello.", "And?", "Now.", "Bye.")]
    assert parts == sorted(parts)
    assert texts[-1].count(USER) == 2
    assert texts[-1].count(ASSISTANT) == 2
    # V4.1 keeps such a message as it is. V4's template makes the reminders itself.
    num = 0 if template in (TEMPLATE, template_of(V41)) else 2 if keeps else 1
    assert texts[-1].count("<system-reminder>") == num
    said = text(TURNS[:6])
    assert ASSISTANT not in said[said.index("And?") : said.index("Now.")], "not the model's words"


@pytest.mark.parametrize("template", [TEMPLATE, MOVING, template_of(V4)])
def test_a_reminder_has_the_number_of_its_message(tmp_path: Path, template: str) -> None:
    """An explanation of a miss in the cache names the message as the client numbers it."""
    model = read_served_model(write_model_folder(tmp_path / "m", template=template), "small")
    assert model.chat is not None
    prompt = model.chat.prompt(TURNS, Rendering(keeps_places=True), max_tokens=4000)
    text, places = model.vocabulary.decode(prompt.ids).encode(), prompt.find_places()
    for index, turn in enumerate(TURNS):
        assert places.at(text.index(turn.content.encode())) == PromptPart(turn.role, index)


def test_a_system_message_goes_into_the_turn_before_it() -> None:
    call = PastCall("a", "f", "{}")
    turns = (
        Turn("system", "0"),
        Turn("system", "1"),
        Turn("user", "2"),
        Turn("assistant", "", (call,)),
        Turn("tool", "3", call_id="a"),
        Turn("system", "4"),
        Turn("assistant", "5", reasoning="r"),
        Turn("system", "6"),
        Turn("user", "7"),
        Turn("user", "8"),
    )
    assert in_place(turns) == (
        *turns[:4],
        Turn("tool", "3\n<system-reminder>\n4\n</system-reminder>", call_id="a"),
        turns[6],
        Turn("user", "<system-reminder>\n6\n</system-reminder>\n7"),
        turns[-1],
    )


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=8))
def test_texts_keep_their_order(roles: list[str]) -> None:
    turns = tuple(Turn(role, f"<{at}>") for at, role in enumerate(roles))
    edited = in_place(turns)
    whole = "".join(turn.content for turn in edited)
    first = re.match("(s*)(u+)(s+)(?![su])", "".join(role[0] for role in roles))
    if first is not None:  # The system's messages behind the first of the user come before it.
        begun, behind = first.end(1), first.end(2)
        turns = (
            *turns[:begun],
            *turns[behind : first.end()],
            *turns[begun:behind],
            *turns[first.end() :],
        )
    places = [whole.index(turn.content) for turn in turns]
    assert places == sorted(places)
    num_first = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    num_system = max(1, num_first) if first is not None else num_first
    assert [turn.role for turn in edited].count("system") == num_system


def test_conversations_with_other_first_words_share_the_system_s_messages() -> None:
    found = [
        in_place((Turn("system", "0"), Turn("user", words), Turn("system", "1")))
        for words in ("a", "b")
    ]
    assert found == [(Turn("system", "0\n\n1"), Turn("user", words)) for words in ("a", "b")]
