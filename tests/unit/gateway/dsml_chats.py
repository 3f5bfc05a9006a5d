"""Drawn chats, and how the makers' own encoders render them.

V3.2's encoder is in SGLang's wheel, which needs torch builds of its own; so its renderings are
recorded, from the wheel itself. This command compares the record with a wheel, or writes it anew:

    pip download --no-deps sglang
    PYTHONPATH=src python -m tests.unit.gateway.dsml_chats sglang-*.whl [--write]
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadal.gateway.text.asks import PastCall, Turn
from hadal.gateway.text.dsml import V32, Dsml

RECORD = Path(__file__).parent / "dsv32_renderings.json"
NUM_RECORDED = 300
NUM_WHOLE = 8
"""Number of recorded chats with their whole text; of the others there is a hash."""
_ENCODER = "sglang/srt/entrypoints/openai/encoding_dsv32.py"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d <b>",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "g_2",
            "description": "é",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
_TEXTS = ["", "a", " b\n", "é\n\nx", "<x>", "1 < 2", "'q' \\n \"z\"", "{{ 1 }}", "</tool_result>"]


@dataclass(frozen=True)
class DrawnChat:
    """One chat and its options."""

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]]
    thinking: bool
    effort: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the turns as /chat/completions has them."""
        return [_message(turn) for turn in self.turns]


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    return message


class _Drawer:
    """Drawer of one chat."""

    def __init__(self, rng: random.Random, form: Dsml) -> None:
        self.rng = rng
        self.is_v32 = form is V32
        self.turns: list[Turn] = []
        self.num_calls = 0

    def text(self, default: str = "") -> str:
        return self.rng.choice(_TEXTS) or default

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(7)
        if kind < 5 or depth > 2:
            return [self.text(), self.rng.randint(-5, 5), 1.5, None, True][kind % 5]
        if kind == 5:
            return [self.value(depth + 1) for _ in range(2)]
        return {self.text("k"): self.value(depth + 1)}

    def user(self) -> None:
        self.turns.append(Turn("user", self.text("u")))

    def assistant(self, calls: tuple[PastCall, ...] = ()) -> None:
        # V3.2's encoder needs a reasoning or calls after the last user message.
        reasoning = self.rng.choice(["", "R\n", "why"]) or ("z" if self.is_v32 else "")
        self.turns.append(Turn("assistant", self.text("y"), calls, reasoning=reasoning))

    def calls(self) -> None:
        """Add a turn with calls and their results."""
        calls = []
        for _ in range(self.rng.randint(1, 3)):
            names = {
                self.text("k").strip().replace("\n", " ") for _ in range(self.rng.randint(0, 3))
            }
            arguments = {name: self.value() for name in sorted(names)}
            shown = json.dumps(arguments, ensure_ascii=False)
            calls.append(PastCall(f"c{self.num_calls:02}", self.rng.choice("fg"), shown))
            self.num_calls += 1
        self.assistant(tuple(calls))
        if not self.is_v32:  # V3.2's encoder has results as they come, the others by their calls.
            self.rng.shuffle(calls)
        self.turns += [Turn("tool", self.text(), call_id=call.id) for call in calls]

    def chat(self) -> DrawnChat:
        rng = self.rng
        if rng.random() < 0.6:
            self.turns.append(Turn("system", self.text("s")))
        self.user()
        for _ in range(rng.randint(0, 4)):
            kind = rng.random()
            if kind < 0.15 and not self.is_v32:
                self.turns.append(Turn("system", self.text("m")))
            if kind < 0.3:
                self.user()
            elif kind < 0.6:
                self.assistant()
                self.user()
            else:
                self.calls()
                if rng.random() < 0.4:
                    self.assistant()
                    self.user()
        tools = TOOLS if rng.random() < 0.7 else []
        effort = rng.choice(["", "low", "high", "max"])
        return DrawnChat(tuple(self.turns), tools, rng.random() < 0.6, effort)


def drawn_chat(seed: int, form: Dsml) -> DrawnChat:
    """Return the chat of this seed, within the limits of the form's encoder."""
    return _Drawer(random.Random(seed), form).chat()


def by_v32(encode: Callable[..., str], chat: DrawnChat) -> str:
    """Return the chat as V3.2's encoder renders it; SGLang adds tools in the same way."""
    messages = chat.messages
    if chat.tools:
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["tools"] = chat.tools
    return encode(messages, thinking_mode="thinking" if chat.thinking else "chat")


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(wheel: str, *options: str) -> None:
    """Compare the record with a wheel, or write it."""
    module = types.ModuleType("encoding_dsv32")
    with zipfile.ZipFile(wheel) as opened:
        exec(compile(opened.read(_ENCODER), _ENCODER, "exec"), module.__dict__)
    texts = [by_v32(module.encode_messages, drawn_chat(seed, V32)) for seed in range(NUM_RECORDED)]
    record = {
        "source": f"{Path(wheel).name}: {_ENCODER}",
        "texts": texts[:NUM_WHOLE],
        "hashes": list(map(hash_of, texts)),
    }
    if "--write" in options:
        RECORD.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n")
    old = json.loads(RECORD.read_text())
    num_equal = sum(a == b for a, b in zip(old["hashes"], record["hashes"], strict=True))
    print(f"{num_equal} of {len(texts)} chats equal the record")


if __name__ == "__main__":
    main(*sys.argv[1:])
