"""Prompts equal those of transformers, for chat templates drawn from a seed.

`python -m tests.unit.gateway.test_same_prompts 5000` draws 5000 and prints the outcomes.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.text import chat, template_jinja
from hadal.gateway.text.asks import Rendering, Turn
from hadal.gateway.text.chat import ChatFormat, read_chat_format
from hadal.gateway.text.tools import FORMATS, Choosing, read_tools
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary
from tests.levels import FULL, MORE

from .drawn_templates import draw_messages, draw_words, write_templates
from .model_folder import write_model_folder

V31 = FORMATS["deepseek-v3.1"]
NUM_DRAWS = 3000 if FULL else 600 if MORE else 60
NUM_CHATS = 3


class InThisProcess:
    """Stand-in for a template's own process that renders in this process: starting a process per
    template would take too long.
    """

    def __init__(self, template: str, source: str) -> None:
        try:
            self._template = template_jinja.parsed(template)
        except Exception as error:
            raise CheckpointError(str(error)) from None

    def render(self, messages: Any, values: dict[str, Any], max_chars: int) -> str:
        """Render as the template's own process does."""
        try:
            text = self._template.render(**values, messages=messages)
        except Exception as error:
            raise RequestError(str(error), "messages") from None
        assert len(text) <= max_chars
        return text

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def outcome(seed: int, folder: Path, vocabulary: Vocabulary) -> str:
    """Draw templates and chats, compare the prompts, and return the outcome."""
    rng = Random(seed)
    write_templates(rng, folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    found: str | ChatFormat | None
    try:
        found = read_chat_format(folder, vocabulary)
    except CheckpointError as error:
        found = str(error)
    outcomes = {_of_chat(rng, seed, theirs, found) for _ in range(NUM_CHATS)}
    return " and ".join(sorted(outcomes))


def _of_chat(rng: Random, seed: int, theirs: Any, ours: str | ChatFormat | None) -> str:
    messages = draw_messages(rng)
    for message in messages:
        if message["role"] == "assistant" and rng.random() < 0.5:
            message["reasoning_content"] = draw_words(rng)
    kwargs: dict[str, Any] = {"custom": draw_words(rng)} if rng.random() < 0.3 else {}
    tool = {"type": "function", "function": {"name": "f", "description": draw_words(rng)}}
    tools = [tool] if rng.random() < 0.2 else []
    try:
        wanted = theirs.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **kwargs
        )
    except Exception as error:
        wanted = type(error).__name__
    if isinstance(
        ours, str
    ):  # A template of the folder does not parse, maybe one that this chat does not use.
        return "folder refused"
    assert ours is not None
    turns = [
        Turn(each["role"], each["content"], reasoning=each.get("reasoning_content", ""))
        for each in messages
    ]
    rendering = Rendering(template_kwargs=kwargs, choosing=Choosing(read_tools(tools)))
    found = _prompt(ours, turns, rendering)
    if not ours.reads_reasoning(has_tools=bool(tools)):
        bare = [replace(turn, reasoning="") for turn in turns]
        assert found == _prompt(ours, bare, rendering), (seed, messages)
    if isinstance(found, str) and isinstance(wanted, str):
        return "both refuse the chat"
    assert found == wanted, (seed, messages)
    return "agreed"


def _prompt(ours: ChatFormat, turns: list[Turn], rendering: Rendering) -> list[int] | str:
    """Return a prompt's ids, or the error's text."""
    try:
        return [*ours.prompt(turns, rendering, max_tokens=10**6).ids]
    except RequestError as error:
        return str(error)


def write_folder(folder: Path) -> Path:
    """Write a model's folder with a vocabulary that has the marks of tool calls."""
    path = write_model_folder(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in V31.marks])
    tokenizer.save(str(path))
    return folder


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(chat, "ConfinedProcess", InThisProcess)
    return write_folder(tmp_path)


def test_prompts_are_those_of_transformers(drawn: Path) -> None:
    vocabulary = read_vocabulary(drawn)
    counts = Counter(outcome(seed, drawn, vocabulary) for seed in range(NUM_DRAWS))
    agreed = sum(number for what, number in counts.items() if "agreed" in what)
    assert agreed >= 0.6 * NUM_DRAWS, counts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(chat, "ConfinedProcess", InThisProcess)
        folder = write_folder(Path(name))
        words = read_vocabulary(folder)
        found = Counter(outcome(seed, folder, words) for seed in range(int(sys.argv[1])))
    for what, number in found.most_common():
        print(f"{number:6} {what}")
