"""Chats in the form that each model of the family was trained on, through our renderer.

The templates are written here, in the forms of the models' own templates; the expected texts are
written by hand. Sources: DeepSeek's model cards (V3, R1, V3.1), Moonshot's template in llama.cpp
(Kimi-K2, Moonlight), Ollama's tests of its GLM-4.7 renderer, ai-sage's template in llama.cpp
(GigaChat3).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hadal.gateway.text.asks import Rendering, Turn
from hadal.gateway.text.chat import ChatFormat, read_chat_format
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary

MAX = 10_000
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONTROLS = (
    *(BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"),
    *("<|im_middle|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|role_sep|>", "<|message_sep|>", "<s>"),
)

_DEEPSEEK = (
    "{% set ns = namespace(system='', first=true) %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = ns.system + ('' if ns.first else '\n\n') + m['content'] %}"
    "{% set ns.first = false %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + OPENED + m['content'].split('</think>')[-1] + eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + BEGUN }}{% endif %}"
)
TEMPLATES = {
    "DeepSeek-V3": _DEEPSEEK.replace("OPENED", "''").replace("BEGUN", "''"),
    "DeepSeek-R1": _DEEPSEEK.replace("OPENED", "''").replace("BEGUN", "'<think>\n'"),
    "DeepSeek-V3.1": (
        "{% if thinking is not defined %}{% set thinking = false %}{% endif %}"
        + _DEEPSEEK.replace("OPENED", "'</think>'").replace(
            "BEGUN", "('<think>' if thinking else '</think>')"
        )
    ),
    "Kimi-K2": (
        "{% if tools -%}{{ '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson -}}"
        "{{ '<|im_end|>' }}{%- endif -%}"
        "{%- for m in messages -%}"
        "{%- if loop.first and m['role'] != 'system' -%}"
        "{{ '<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>' }}"
        "{%- endif -%}"
        "{{ '<|im_' + m['role'] + '|>' + m['role'] + '<|im_middle|>' }}"
        "{%- if m['content'] is string -%}{{ m['content'] + '<|im_end|>' }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}"
    ),
    "GLM-4.7-Flash": (
        "[gMASK]<sop>\n"
        "{%- macro visible(content) -%}{{ content if content is string else '' }}{%- endmacro -%}\n"
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}\n"
        "{% for m in messages %}\n"
        "{%- if m.role == 'user' -%}<|user|>{{ visible(m.content) }}\n"
        "{%- elif m.role == 'assistant' -%}<|assistant|>\n"
        "{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}\n"
        "{%- set content = visible(m.content) %}\n"
        "{%- if thought and ((clear_thinking is defined and not clear_thinking)"
        " or loop.index0 > ns.last) -%}{{ '<think>' + thought.strip() + '</think>' }}\n"
        "{%- else -%}{{ '</think>' }}{%- endif -%}\n"
        "{%- if content.strip() -%}{{ content.strip() }}{%- endif -%}\n"
        "{%- elif m.role == 'system' -%}<|system|>{{ visible(m.content) }}\n"
        "{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}\n"
        "    <|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking)"
        " else '<think>' -}}\n"
        "{%- endif -%}\n"
    ),
    "GigaChat3-10B-A1.8B": (
        "{%- macro render(message, role=None) -%}\n"
        "    {{- (role or message['role']) + marks.role_sep + (message['content'] or '') +"
        " marks.message_sep -}}\n"
        "{%- endmacro -%}\n"
        "{%- set marks = namespace(role_sep='<|role_sep|>\n', message_sep='<|message_sep|>\n\n') -%}\n"
        "{%- set OWN -%}\nRULES\n{%- endset -%}\n"
        "{{- bos_token -}}\n"
        "{{- render({'role': 'developer system', 'content': OWN}) -}}\n"
        "{%- if messages and messages[0]['role'] == 'system' -%}\n"
        "    {{- render(messages[0]) -}}\n"
        "    {%- set messages = messages[1:] -%}\n"
        "{%- endif -%}\n"
        "{%- for m in messages -%}\n"
        "    {{- render(m) -}}\n"
        "    {%- if loop.last and add_generation_prompt and m['role'] != 'assistant' -%}\n"
        "        {{- 'assistant' + marks.role_sep -}}\n"
        "    {%- endif -%}\n"
        "{%- endfor -%}\n"
    ),
}
FIRST = {
    "DeepSeek-V3": BOS,
    "DeepSeek-R1": BOS,
    "DeepSeek-V3.1": BOS,
    "Kimi-K2": "[BOS]",
    "GLM-4.7-Flash": None,
    "GigaChat3-10B-A1.8B": "<s>",
}
ASKED = [Turn("user", "2 + 2?")]
SYSTEM = [Turn("system", "Be brief."), *ASKED]
AGAIN = [*SYSTEM, Turn("assistant", "<think>Easy.</think>4"), Turn("user", "And 3 + 3?")]
RULES = "developer system<|role_sep|>\nRULES<|message_sep|>\n\n"
KIMI_DEFAULT = "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"

# (model, turns, thinking, the prompt, True if the reply starts inside the reasoning)
EXPECTED: list[tuple[str, list[Turn], bool | None, str, bool]] = [
    ("DeepSeek-V3", ASKED, None, f"{BOS}<｜User｜>2 + 2?<｜Assistant｜>", False),
    (
        "DeepSeek-V3",
        AGAIN,
        None,
        f"{BOS}Be brief.<｜User｜>2 + 2?<｜Assistant｜>4{EOS}<｜User｜>And 3 + 3?<｜Assistant｜>",
        False,
    ),
    ("DeepSeek-R1", ASKED, None, f"{BOS}<｜User｜>2 + 2?<｜Assistant｜><think>\n", True),
    (
        "DeepSeek-R1",
        AGAIN,
        True,
        f"{BOS}Be brief.<｜User｜>2 + 2?<｜Assistant｜>4{EOS}<｜User｜>And 3 + 3?<｜Assistant｜><think>\n",
        True,
    ),
    # R1 has no switch for thinking: the prompt closes the reasoning before it starts.
    (
        "DeepSeek-R1",
        ASKED,
        False,
        f"{BOS}<｜User｜>2 + 2?<｜Assistant｜><think>\n\n</think>\n\n",
        False,
    ),
    ("DeepSeek-V3.1", ASKED, None, f"{BOS}<｜User｜>2 + 2?<｜Assistant｜></think>", False),
    ("DeepSeek-V3.1", ASKED, False, f"{BOS}<｜User｜>2 + 2?<｜Assistant｜></think>", False),
    ("DeepSeek-V3.1", SYSTEM, True, f"{BOS}Be brief.<｜User｜>2 + 2?<｜Assistant｜><think>", True),
    (
        "DeepSeek-V3.1",
        AGAIN,
        True,
        f"{BOS}Be brief.<｜User｜>2 + 2?<｜Assistant｜></think>4{EOS}"
        "<｜User｜>And 3 + 3?<｜Assistant｜><think>",
        True,
    ),
    (
        "Kimi-K2",
        ASKED,
        None,
        f"{KIMI_DEFAULT}<|im_user|>user<|im_middle|>2 + 2?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        False,
    ),
    (
        "Kimi-K2",
        AGAIN,
        False,
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>2 + 2?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>4<|im_end|>"
        "<|im_user|>user<|im_middle|>And 3 + 3?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        False,
    ),
    ("GLM-4.7-Flash", ASKED, None, "[gMASK]<sop><|user|>2 + 2?<|assistant|><think>", True),
    ("GLM-4.7-Flash", ASKED, False, "[gMASK]<sop><|user|>2 + 2?<|assistant|></think>", False),
    (
        "GLM-4.7-Flash",
        AGAIN,
        True,
        "[gMASK]<sop><|system|>Be brief.<|user|>2 + 2?<|assistant|></think>4"
        "<|user|>And 3 + 3?<|assistant|><think>",
        True,
    ),
    (
        "GigaChat3-10B-A1.8B",
        ASKED,
        None,
        f"<s>{RULES}user<|role_sep|>\n2 + 2?<|message_sep|>\n\nassistant<|role_sep|>\n",
        False,
    ),
    (
        "GigaChat3-10B-A1.8B",
        AGAIN,
        None,
        f"<s>{RULES}system<|role_sep|>\nBe brief.<|message_sep|>\n\n"
        "user<|role_sep|>\n2 + 2?<|message_sep|>\n\n"
        "assistant<|role_sep|>\n4<|message_sep|>\n\n"
        "user<|role_sep|>\nAnd 3 + 3?<|message_sep|>\n\nassistant<|role_sep|>\n",
        False,
    ),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a vocabulary of bytes and the control tokens of all models' chats."""
    folder = tmp_path_factory.mktemp("bytes")
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    (folder / "tiktoken.model").write_text("".join(lines))
    decoder = {str(256 + i): {"content": content} for i, content in enumerate(CONTROLS)}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder})
    )
    return read_vocabulary(folder)


@pytest.fixture(scope="module")
def chats(
    vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ChatFormat]]:
    """Yield each model's chat format, read from a chat_template.jinja or from a field of
    tokenizer_config.json.
    """
    formats = {}
    for number, (name, template) in enumerate(TEMPLATES.items()):
        folder = tmp_path_factory.mktemp("chat")
        config: dict[str, Any] = {"bos_token": FIRST[name], "eos_token": EOS}
        if number % 2:
            config["chat_template"] = template
        else:
            (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        formats[name] = read_chat_format(folder, vocabulary)
    yield formats
    for chat in formats.values():
        chat.close()


@pytest.mark.promise(
    "Chats of V3, R1, V3.1, Kimi-K2, GLM-4.7-Flash and GigaChat3 are compared with "
    "prompts written by hand"
)
@pytest.mark.parametrize(("name", "turns", "thinking", "text", "thinks"), EXPECTED)
def test_a_chat_is_as_the_model_learnt_it(
    chats: dict[str, ChatFormat],
    vocabulary: Vocabulary,
    name: str,
    turns: list[Turn],
    thinking: bool | None,
    text: str,
    thinks: bool,
) -> None:
    prompt = chats[name].prompt(turns, Rendering(thinking=thinking), max_tokens=MAX)
    assert vocabulary.decode(prompt.ids) == text
    assert list(prompt.ids) == vocabulary.encode_controlled(text), "control tokens are tokens"
    assert prompt.thinks == thinks


@pytest.mark.promise("For other templates it changes no token of a prompt")
@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_is_shown_where_the_model_learnt_it(
    chats: dict[str, ChatFormat], vocabulary: Vocabulary, name: str
) -> None:
    """Only GLM-4.7's template reads it: by default, after the last message of a user."""
    system, asked, answer, again = AGAIN
    shown = Turn("assistant", "4", reasoning="Easy.")
    for options in ({}, {"clear_thinking": False}):
        rendering = Rendering(template_kwargs=options)
        bare, prompt = (
            chats[name].prompt([system, asked, turn, again], rendering, max_tokens=MAX).ids
            for turn in (answer, shown)
        )
        if name == "GLM-4.7-Flash" and options:
            assert "<|assistant|><think>Easy.</think>4<|user|>" in vocabulary.decode(prompt)
        else:
            assert prompt == bare
    assert chats[name].reads_reasoning() == (name == "GLM-4.7-Flash")


@pytest.mark.promise(
    "Results of tools, and texts of clients about them, never become control tokens."
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_user_types_steers_nothing(
    chats: dict[str, ChatFormat], vocabulary: Vocabulary, name: str
) -> None:
    controls = set(vocabulary.control_ids.values())

    def steering(content: str) -> list[int]:
        prompt = chats[name].prompt([Turn("user", content)], max_tokens=MAX)
        return [i for i in prompt.ids if i in controls]

    assert steering("".join(CONTROLS)) == steering("harmless")


def test_json_in_a_template_is_as_transformers_writes_it(vocabulary: Vocabulary) -> None:
    template = "{{ messages[0] | tojson }} {{ {'b': '<ü>'} | tojson(ensure_ascii=True) }}"
    with closing(
        ChatFormat(vocabulary, {"default": template}, {"bos_token": "", "eos_token": ""}, "here")
    ) as chat:
        ids = chat.prompt([Turn("user", "a > b & ü")], max_tokens=MAX).ids
    assert vocabulary.decode(ids) == '{"role": "user", "content": "a > b & ü"} {"b": "<\\u00fc>"}'


def test_a_template_may_hold_a_long_text_of_its_own(vocabulary: Vocabulary) -> None:
    rules = "Answer in verse. " * 1000
    with closing(
        ChatFormat(
            vocabulary,
            {"default": rules + "{{ messages[0]['content'] }}"},
            {"bos_token": "", "eos_token": ""},
            "x",
        )
    ) as it:
        ids = it.prompt([Turn("user", "hi")], max_tokens=100_000).ids
    assert vocabulary.decode(ids) == rules + "hi"
