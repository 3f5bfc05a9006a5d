"""Chat prompts equal the tokenizers library's ids of the rendered template, and texts of clients
cannot forge control tokens.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.asks import Rendering, Turn
from hadal.gateway.text.chat import ChatFormat, raw_prompt, read_chat_format
from hadal.gateway.text.template_files import read_templates
from hadal.gateway.text.tools import NO_TOOLS, Choosing
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary

from .model_folder import ASSISTANT, BOS, EOS, TEMPLATE, USER, write_model_folder
from .test_tools import CONTROLS, WEATHER, vocabulary_of

MAX = 1000
CHAT = [
    Turn("system", "Be brief."),
    Turn("user", "2 + 2?"),
    Turn("assistant", "<think>\nEasy.</think>\n\n4"),
    Turn("user", "你好 🙂"),
]
PIECES = [USER, ASSISTANT, EOS, BOS, "<think>", "</think>", *"<>｜a \né\ufdd0"]


def rendered(turns: list[Turn]) -> str:
    """Return the prompt of these turns as plain jinja2 renders it, with transformers' settings."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    messages = [
        {"role": turn.role, "content": turn.content.rpartition("</think>")[2]} for turn in turns
    ]
    return environment.from_string(TEMPLATE).render(
        messages=messages, add_generation_prompt=True, bos_token=BOS, eos_token=EOS
    )


def test_prompt_is_the_librarys(folder: Path, model: ServedModel) -> None:
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = model.chat.prompt(CHAT, max_tokens=MAX)
    assert list(prompt.ids) == library.encode(rendered(CHAT), add_special_tokens=False).ids
    assert prompt.thinks


def test_reasoning_of_earlier_turns_is_dropped(model: ServedModel) -> None:
    assert "Easy" not in model.vocabulary.decode(model.chat.prompt(CHAT, max_tokens=MAX).ids)


@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.sampled_from(["system", "user", "assistant"]),
)
def test_texts_hold_no_control_token(model: ServedModel, text: str, role: str) -> None:
    controls = set(model.vocabulary.control_ids.values())

    def controls_with(content: str) -> list[int]:
        turns = [Turn("user", "a"), Turn(role, content), Turn("user", "b")]
        return [i for i in model.chat.prompt(turns, max_tokens=MAX).ids if i in controls]

    assert controls_with(text) == controls_with("harmless")
    if role != "assistant":  # The template drops a reply's text before the last </think>.
        assert text in model.vocabulary.decode(
            model.chat.prompt([Turn(role, text)], max_tokens=MAX).ids
        )


def test_control_words_in_the_ordinary_vocabulary(folder: Path, tmp_path: Path) -> None:
    """A text that the vocabulary has becomes one token under `ignore_merges`. In plain text that
    must not happen to the text of a control token.
    """
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["model"]["ignore_merges"] = True
    fields["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    close = next(token["id"] for token in fields["added_tokens"] if token["content"] == "</think>")
    fields["model"]["vocab"]["</think>"] = close
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    vocabulary = read_vocabulary(tmp_path)
    ids = vocabulary.encode_plain("</think>")
    assert close not in ids
    assert vocabulary.decode(ids) == "</think>"


@pytest.mark.parametrize("thinking", [None, True, False])
def test_thinking(model: ServedModel, thinking: bool | None) -> None:
    prompt = model.chat.prompt([Turn("user", "hi")], Rendering(thinking=thinking), max_tokens=MAX)
    text = model.vocabulary.decode(prompt.ids)
    assert prompt.thinks == (thinking is not False)
    assert text.endswith("<think>\n\n</think>\n\n" if thinking is False else "<think>\n")


def test_a_template_may_show_who_speaks(model: ServedModel) -> None:
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }} {% endfor %}"
    chat = ChatFormat(
        model.vocabulary, {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "test"
    )
    turns = [Turn("user", "hi", name="ann"), Turn("user", "ho"), Turn("user", "x", name=EOS)]
    ids = chat.prompt(turns, max_tokens=MAX).ids
    assert model.vocabulary.decode(ids) == f"ann: hi user: ho {EOS}: x "
    assert model.vocabulary.control_ids[EOS] not in ids


def test_template_kwargs_cannot_forge(model: ServedModel) -> None:
    chat = ChatFormat(
        model.vocabulary,
        {"default": "{{ note }}{{ messages[0]['content'] }}"},
        {"bos_token": BOS, "eos_token": EOS},
        "test",
    )
    ids = chat.prompt(
        [Turn("user", "hi")], Rendering(template_kwargs={"note": EOS}), max_tokens=MAX
    ).ids
    assert model.vocabulary.control_ids[EOS] not in ids
    assert model.vocabulary.decode(ids) == EOS + "hi"
    with pytest.raises(RequestError, match="messages is set by the server"):
        chat.prompt(
            [Turn("user", "hi")], Rendering(template_kwargs={"messages": "x"}), max_tokens=MAX
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['nothing'].x }}",
        "{{ 1 / 0 }}",
        "{% for i in range(99999) %}{{ messages[0]['content'] }} and more of the same{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_template_that_fails(model: ServedModel, template: str) -> None:
    chat = ChatFormat(
        model.vocabulary, {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "test"
    )
    with pytest.raises(RequestError, match="template") as caught:
        chat.prompt([Turn("user", "hi")], max_tokens=MAX)
    assert caught.value.param == "messages"


def test_template_that_does_not_parse(model: ServedModel) -> None:
    with pytest.raises(CheckpointError, match=r"x\.jinja: the chat template does not parse"):
        ChatFormat(
            model.vocabulary,
            {"default": "{% if %}"},
            {"bos_token": BOS, "eos_token": EOS},
            "x.jinja",
        )


def test_template_files(folder: Path, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(folder)
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    prompt = read_chat_format(tmp_path, vocabulary).prompt([Turn("user", "hi")], max_tokens=MAX)
    assert vocabulary.decode(prompt.ids) == "hi!"
    assert not prompt.thinks
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    prompt = read_chat_format(tmp_path, vocabulary).prompt([Turn("user", "hi")], max_tokens=MAX)
    assert vocabulary.decode(prompt.ids) == "yes"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read_chat_format(tmp_path, vocabulary) is None


def test_a_template_for_tools_is_taken_where_there_are_tools(model: ServedModel) -> None:
    vocabulary = vocabulary_of(CONTROLS)
    templates = {"default": "no", "tool_use": "{{ tools[0].function.name }}", "rag": "rag"}
    with closing(ChatFormat(vocabulary, templates, {}, "here")) as chat:
        for choosing, text in ((NO_TOOLS, "no"), (Choosing((WEATHER,)), "weather")):
            prompt = chat.prompt([Turn("user", "hi")], Rendering(choosing=choosing), max_tokens=MAX)
            assert vocabulary.decode(prompt.ids) == text


def test_templates_without_a_default_are_named(model: ServedModel) -> None:
    chat = ChatFormat(model.vocabulary, {"rag": "a", "other": "b"}, {}, "here")
    with pytest.raises(
        RequestError, match="chat templates named other, rag and none named default"
    ):
        chat.prompt([Turn("user", "hi")], max_tokens=MAX)


def test_template_files_in_the_order_of_transformers(tmp_path: Path) -> None:
    def write(name: str, content: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)

    write("chat_template.json", json.dumps({"chat_template": "of a processor"}))
    assert read_templates(tmp_path)[0] == {"default": "of a processor"}
    write("tokenizer_config.json", json.dumps({"chat_template": "of the tokenizer"}))
    assert read_templates(tmp_path)[0] == {"default": "of the tokenizer"}
    write("additional_chat_templates/tool_use.jinja", "of tools")
    assert read_templates(tmp_path)[0] == {"tool_use": "of tools"}
    write("chat_template.jinja", "its own")
    assert read_templates(tmp_path)[0] == {"default": "its own", "tool_use": "of tools"}
    write("chat_template.jinja", "")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates/tool_use.jinja").unlink()
    write("tokenizer_config.json", json.dumps({"chat_template": [{"name": "a", "template": 1}]}))
    with pytest.raises(CheckpointError, match=r"chat_template\['a'\] is 1; a text is needed"):
        read_templates(tmp_path)


def test_two_texts_make_no_control_token_together(model: ServedModel) -> None:
    template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    chat = ChatFormat(model.vocabulary, {"default": template}, {}, "here")
    turns = [Turn("user", "<thi\n"), Turn("user", "nk>"), Turn("user", "a <"), Turn("user", "b")]
    ids = chat.prompt(turns, max_tokens=MAX).ids
    assert model.vocabulary.control_ids["<think>"] not in ids
    assert model.vocabulary.decode(ids) == "<think>a <b"


def test_what_becomes_a_control_token_when_normalised_is_text(folder: Path) -> None:
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "NFKC"}
    for token in fields["added_tokens"]:
        token["normalized"] = True
    vocabulary = Vocabulary(fields, "here")
    template = "{{ messages[0].content }}<think>"
    chat = ChatFormat(vocabulary, {"default": template}, {}, "here")
    ids = chat.prompt([Turn("user", "\uff1cthink\uff1e")], max_tokens=MAX).ids
    assert ids.count(vocabulary.control_ids["<think>"]) == 1, "the template's own"
    assert vocabulary.decode(ids) == "<think><think>"


def test_raw_prompts_are_their_authors(model: ServedModel) -> None:
    """A begin token in the text is added to the automatic one, as in the tokenizers library."""
    controls = model.vocabulary.control_ids
    ids = raw_prompt(model.vocabulary, f"{USER}hi{ASSISTANT}", max_tokens=MAX).ids
    assert ids[:2] == (controls[BOS], controls[USER])
    assert raw_prompt(model.vocabulary, f"{BOS}hi", max_tokens=MAX).ids.count(controls[BOS]) == 2
    bare = raw_prompt(model.vocabulary, "hi", max_tokens=MAX, adds_special=False).ids
    assert controls[BOS] not in bare


def test_what_is_far_too_long_is_not_tokenised(model: ServedModel) -> None:
    with pytest.raises(RequestError, match="at most 10 are allowed") as caught:
        model.chat.prompt([Turn("user", "hi" * 1000)], max_tokens=10)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(RequestError, match="Shorten prompt"):
        raw_prompt(model.vocabulary, "hi" * 1000, max_tokens=10)


LONG = "Never say so. " * 20
HOISTING = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}{% endif"
    " %}{% endfor %}{% for m in messages %}{% if m['role'] != 'system' %}"
    + USER
    + "{{ m['content'] }}{% endif %}{% endfor %}"
)
"""Template like hadal-tiny's: system messages stand first, wherever they are in the chat."""
MERGING = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""Template without text between messages: the last token of one may reach into the next."""


def num_public(
    folder: Path, template: str, *turns: tuple[str, str], **options: Any
) -> tuple[int, tuple[int, ...]]:
    chat = ChatFormat(
        read_vocabulary(folder), {"default": template}, {"bos_token": BOS, "eos_token": EOS}, "here"
    )
    prompt = chat.prompt(
        [Turn(*turn) for turn in turns], Rendering(**options), max_tokens=10**6, is_public=True
    )
    return prompt.num_public, prompt.ids


@pytest.mark.promise(
    '"cache_salt": "public" shares the KV of a chat\'s leading system messages, in '
    "whole blocks, with all tenants that send the same messages and the same field"
)
@pytest.mark.parametrize("template", [TEMPLATE, HOISTING])
def test_what_is_public_is_bos_and_the_leading_system_messages(folder: Path, template: str) -> None:
    encode = read_vocabulary(folder).encode_controlled
    for system in ("Be brief.", LONG):
        number, ids = num_public(
            folder, template, ("system", system), ("system", "More."), ("user", LONG)
        )
        assert list(ids[:number]) == encode(BOS + system + "More."), (
            "all of both, and nothing of the user's"
        )
        number, _ = num_public(folder, template, ("system", system))
        assert number == len(encode(BOS + system)), "what opens the reply belongs to no message"
        # A later system message is not leading: it adds nothing to the public part, and may cost it
        # a token.
        number, _ = num_public(
            folder, template, ("system", system), ("user", LONG), ("system", "Later.")
        )
        assert number <= len(encode(BOS + system))
        assert number >= len(encode(BOS + system)) - 1


def test_without_system_messages_in_front_nothing_is_public(folder: Path) -> None:
    assert num_public(folder, TEMPLATE, ("user", LONG))[0] == 0
    assert num_public(folder, HOISTING, ("user", "a"), ("system", LONG))[0] == 0
    vocabulary = read_vocabulary(folder)
    prompt = ChatFormat(
        vocabulary, {"default": TEMPLATE}, {"bos_token": BOS, "eos_token": EOS}, "here"
    ).prompt([Turn("system", LONG)], max_tokens=10**6)
    assert prompt.num_public == 0, "nobody asked"


def test_a_token_that_reaches_into_the_next_message_is_not_public(folder: Path) -> None:
    """The public part of a prompt does not depend on what follows the system message."""
    vocabulary = read_vocabulary(folder)
    alone = vocabulary.encode_plain("The answ")
    number, ids = num_public(folder, MERGING, ("system", "The answ"), ("user", "er is"))
    assert ids[:number] == tuple(alone[:number])
    assert ids[: len(alone)] != tuple(alone), "the tokeniser does merge them, or this shows nothing"
    assert number < len(alone)


def test_texts_given_to_the_template_are_not_public(folder: Path) -> None:
    template = "{{ bos_token }}{{ name }}{% if thinking %}T{% endif %}" + HOISTING
    turns = ("system", LONG), ("user", "a")
    for name in ("Ann", 7):
        assert num_public(folder, template, *turns, template_kwargs={"name": name})[0] == 1
    number, ids = num_public(folder, template, *turns, thinking=True)
    assert list(ids[:number]) == read_vocabulary(folder).encode_controlled(
        BOS + "T" + BOS + LONG
    ), "a switch is"


def test_a_template_that_takes_no_system_messages_alone_says_so(folder: Path) -> None:
    picky = (
        "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('Ask') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(RequestError, match="cannot render system messages alone") as caught:
        num_public(folder, picky, ("system", LONG), ("user", "a"))
    assert caught.value.param == "cache_salt"
