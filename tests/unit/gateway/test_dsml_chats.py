"""Chats of models without a chat template, compared with their makers' encoders: V3.2's as recorded
(tests/unit/gateway/dsml_chats.py), deepseek-recipe for V4 and V4.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest

from hadal.commands.served import read_served_text
from hadal.gateway.api.messages.request import parse_messages
from hadal.gateway.text.asks import PastCall, Rendering, Turn
from hadal.gateway.text.chat import ChatFormat, read_chat_format
from hadal.gateway.text.dsml import FORMS, V4, V32, V41, Dsml
from hadal.gateway.text.dsml_chats import form_in, template_of
from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.tools import Choosing, format_of, read_tools
from hadal.gateway.text.vocabulary import read_vocabulary

from .dsml_chats import RECORD, TOOLS, DrawnChat, drawn_chat, hash_of
from .dsml_replies import CONTROLS, SPELLED, TOKEN, written
from .model_folder import write_model_folder
from .test_tools import V31, tokenizer_of

MAX = 1 << 20
NUM_CHATS = 150
ENCODINGS = {
    V4.name: ("DeepSeek-V4-Pro", recipe.DeepseekV4Encoding),
    V41.name: ("DeepSeek-V4.1-Flash", recipe.DeepseekV41Encoding),
}


@pytest.fixture(scope="module")
def chats() -> Iterator[dict[str, ChatFormat]]:
    """Yield the chats of all forms."""
    found = {
        name: ChatFormat(TOKEN, {"default": template_of(form)}, {}, "here")
        for name, form in FORMS.items()
    }
    yield found
    for chat in found.values():
        chat.close()


def rendered(chat: ChatFormat, drawn: DrawnChat, **more: Any) -> str:
    tools = read_tools(drawn.tools) if drawn.tools else ()
    kwargs = {"reasoning_effort": drawn.effort} if drawn.effort else {}
    rendering = Rendering(drawn.thinking, kwargs, Choosing(tools))
    return TOKEN.decode(chat.prompt(drawn.turns, rendering, max_tokens=MAX, **more).ids)


def by_recipe(form: Dsml, drawn: DrawnChat, **more: Any) -> str:
    """Return the chat as deepseek-recipe renders it."""
    model, encoding = ENCODINGS[form.name]
    switch = {"type": "enabled" if drawn.thinking else "disabled"}
    body = {"model": model, "messages": drawn.messages, "thinking": switch, **more}
    if drawn.tools:
        body["tools"] = drawn.tools
    if drawn.effort and drawn.thinking:
        body["reasoning_effort"] = drawn.effort
    asked = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    return str(encoding().render_conversation(asked.conversation).prompt)


def test_v32_chats_are_as_its_own_encoder_renders_them(chats: dict[str, ChatFormat]) -> None:
    record = json.loads(RECORD.read_text())
    for seed, text in enumerate(record["texts"]):
        assert rendered(chats[V32.name], drawn_chat(seed, V32)) == text, seed
    for seed, found in enumerate(record["hashes"]):
        drawn = drawn_chat(seed, V32)
        assert hash_of(rendered(chats[V32.name], drawn)) == found, (seed, drawn)


@pytest.mark.parametrize("form", [V4, V41], ids=lambda form: form.name)
def test_v4_chats_are_as_the_makers_converter_renders_them(
    chats: dict[str, ChatFormat], form: Dsml
) -> None:
    for seed in range(NUM_CHATS):
        drawn = drawn_chat(seed, form)
        assert rendered(chats[form.name], drawn) == by_recipe(form, drawn), (seed, drawn)


@pytest.mark.parametrize("form", [V4, V41], ids=lambda form: form.name)
def test_a_system_message_between_turns_is_placed_as_the_makers_converter_places_it(
    chats: dict[str, ChatFormat], form: Dsml
) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "R"}
    body = {
        "model": ENCODINGS[form.name][0],
        "max_tokens": 9,
        "system": "S",
        "thinking": {"type": "disabled"},
        "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "system", "content": "M"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "N"},
            {"role": "user", "content": "c"},
        ],
    }
    asked = parse_messages(json.dumps(body).encode())
    ids = chats[form.name].prompt(asked.turns, asked.rendering, max_tokens=MAX).ids
    converted = recipe.MessagesRequest(body).convert(recipe.ConversionOptions())
    encoding = ENCODINGS[form.name][1]()
    assert TOKEN.decode(ids) == encoding.render_conversation(converted.conversation).prompt


@pytest.mark.parametrize("form", [V4, V41], ids=lambda form: form.name)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    "schema", [None, {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}]
)
def test_the_schema_of_an_answer_is_shown_as_the_makers_converter_shows_it(
    chats: dict[str, ChatFormat],
    form: Dsml,
    tools: list[dict[str, Any]],
    schema: dict[str, Any] | None,
) -> None:
    drawn = DrawnChat((Turn("system", "JSON."), Turn("user", "a")), tools, True)
    wanted: dict[str, Any] = {"type": "json_object"}
    if schema is not None:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found = rendered(chats[form.name], drawn, schema=schema or {"type": "object"})
    assert found == by_recipe(form, drawn, response_format=wanted)


@pytest.mark.parametrize("form", [V4, V41], ids=lambda form: form.name)
@pytest.mark.parametrize("reasoning", ["", "so far"])
def test_a_reply_goes_on_from_a_prefix(
    chats: dict[str, ChatFormat], form: Dsml, reasoning: str
) -> None:
    asked = DrawnChat((Turn("user", "a"),), [], True)
    rendering = Rendering(True, prefix="The", reasoning=reasoning)
    prompt = chats[form.name].prompt(asked.turns, rendering, max_tokens=MAX)
    begun = Turn("assistant", "The", reasoning=reasoning)
    body = DrawnChat((*asked.turns, begun), [], True).messages
    body[-1]["prefix"] = True
    model, encoding = ENCODINGS[form.name]
    converted = recipe.ChatCompletionRequest({"model": model, "messages": body}).convert(
        recipe.ConversionOptions()
    )
    expected = encoding().render_conversation(converted.conversation).prompt
    assert TOKEN.decode(prompt.ids) == expected
    assert not prompt.thinks


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_a_user_types_steers_nothing(chats: dict[str, ChatFormat], form: Dsml) -> None:
    """Marks in a user's text, a result, a name or a value are plain text of the prompt."""
    marks = "".join(CONTROLS) + MARK + written(form, ("f", {"a": MARK}))

    def steering(text: str) -> list[int]:
        name = text.replace('"', "")
        call = PastCall("c", "f", json.dumps({"a": text, name: [text]}))
        turns = [
            Turn("system", text),
            Turn("user", text),
            Turn("assistant", text.replace("</think>", ""), (call,), reasoning=text),
            Turn("tool", text, call_id="c"),
        ]
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        rendering = Rendering(True, choosing=Choosing(read_tools([tool])))
        ids = chats[form.name].prompt(turns, rendering, max_tokens=MAX).ids
        return [i for i in ids if i > 255]

    assert steering(marks) == steering("harmless")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_public_system_prompt_ends_before_anything_of_the_user(
    chats: dict[str, ChatFormat], form: Dsml
) -> None:
    turns = [Turn("system", "Be kind."), Turn("user", "a")]
    prompt = chats[form.name].prompt(turns, max_tokens=MAX, is_public=True)
    assert "Be kind." in TOKEN.decode(prompt.ids[: prompt.num_public])
    assert "<｜User｜>" not in TOKEN.decode(prompt.ids[: prompt.num_public])


ENCODER = f"dsml_token = '{MARK}'\ntext = \"<{{dsml_token}}BLOCK>\"\n"
"""Part of a maker's encoder; BLOCK is the name of the block of calls."""


def folder_of(folder: Path, *tokens: str, kind: str = "", encoder: str = "") -> ChatFormat | None:
    """Return the chats of a model's folder without a template, with these files and tokens."""
    write_model_folder(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of([*CONTROLS[:4], *tokens])))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if kind:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    if encoder:
        (folder / "encoding").mkdir()
        (folder / "encoding/encoding_x.py").write_text(ENCODER.replace("BLOCK", encoder))
    return read_chat_format(folder, read_vocabulary(folder))


@pytest.mark.promise(
    "A folder without a chat template has the chats of V3.2, V4 or V4.1 if it brings their encoder"
)
@pytest.mark.parametrize(
    ("tokens", "kind", "encoder", "form"),
    [
        ((MARK,), "", "", V32),
        ((), "", "function_calls", V32),
        ((MARK, *V31.marks), "deepseek_v32", "", V32),
        ((MARK, "<｜latest_reminder｜>"), "", "", V4),
        ((MARK, "<｜latest_reminder｜>"), "", "function_calls", V32),
        ((MARK,), "deepseek_v4", "", V4),
        ((), "", "tool_calls", V4),
        ((MARK, "<｜latest_reminder｜>", "<｜System｜>"), "", "", V41),
        ((MARK, "<｜System｜>"), "deepseek_v4", "", V4),
        ((MARK,), "deepseek_v41", "", V41),
        ((), "", " calls", V41),
        ((), "", "", None),
        ((), "deepseek_v32", "", None),
        (V31.marks, "deepseek_v32", "", None),
    ],
)
def test_a_folder_s_files_and_tokens_select_the_form(
    tmp_path: Path, tokens: tuple[str, ...], kind: str, encoder: str, form: Dsml | None
) -> None:
    chat = folder_of(tmp_path, *tokens, kind=kind, encoder=encoder)
    assert (chat is None) == (form is None)
    if chat is not None:
        with closing(chat):
            assert chat.tools is form
            assert chat.has_reasoning
            prompt = chat.prompt([Turn("user", "a")], Rendering(False), max_tokens=MAX)
            text = read_vocabulary(tmp_path).decode(prompt.ids)
            assert text.endswith("<｜User｜>a<｜Assistant｜></think>")


def test_a_folder_s_own_template_comes_first(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of([*CONTROLS, MARK])))
    (folder / "encoding_x.py").write_text(ENCODER.replace("BLOCK", "function_calls"))
    chat = read_chat_format(folder, read_vocabulary(folder))
    assert chat is not None
    with closing(chat):
        assert chat.tools is None, "its template knows no calls"


COMMUNITY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{{ '<｜Assistant｜>' }}"
    "{% for c in m.tool_calls %}{{ '<" + MARK + "invoke name=\"' + c.function.name + '\">' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<" + MARK + 'parameter name="\' + k + \'" string="true">\' + v }}'
    "{{ '</" + MARK + "parameter>' }}{% endfor %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{# <" + MARK + "BLOCK> #}"
)


@pytest.mark.parametrize(
    ("block", "form"), [("function_calls", V32), ("tool_calls", V4), (" calls", V41)]
)
def test_a_template_of_others_selects_the_form_by_its_marks(block: str, form: Dsml) -> None:
    template = COMMUNITY.replace("BLOCK", block)
    with closing(ChatFormat(TOKEN, {"default": template}, {}, "here")) as chat:
        assert chat.tools is form
        call = PastCall("c", "f", '{"city": "Oslo"}')
        turns = [Turn("user", "a"), Turn("assistant", "", (call,)), Turn("tool", "b", call_id="c")]
        text = TOKEN.decode(chat.prompt(turns, max_tokens=MAX).ids)
    assert f'name="city" string="true">Oslo</{MARK}parameter>' in text, "arguments as an object"


def test_other_templates_have_other_forms() -> None:
    assert form_in("{{ messages }}```json") is None
    assert format_of([*V31.marks, MARK], "{{ messages }}") is V31


def test_the_model_command_names_the_form(tmp_path: Path) -> None:
    chat = folder_of(tmp_path, MARK, "<think>", "</think>")
    assert chat is not None
    chat.close()
    shown = read_served_text(tmp_path, ())
    assert (shown.tools, shown.thinks) == (V32.name, True)
    assert V32.name in shown.template


def test_without_the_mark_s_token_marks_are_plain_text() -> None:
    with closing(ChatFormat(SPELLED, {"default": template_of(V32)}, {}, "here")) as chat:
        call = PastCall("c", "f", '{"a": "b"}')
        turns = [Turn("user", "a"), Turn("assistant", "", (call,)), Turn("tool", "b", call_id="c")]
        text = SPELLED.decode(chat.prompt(turns, max_tokens=MAX).ids)
    assert written(V32, ("f", {"a": "b"})) in text
