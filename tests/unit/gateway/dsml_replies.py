"""Replies in DSML, well formed and broken, and a fuzz of their reader.

python -m tests.unit.gateway.dsml_replies [replies] [seed]      prints what was tried and found
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from hadal.core.messages.generation import Token
from hadal.gateway.text.dsml import FORMS, Dsml
from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.dsml_reader import TAG
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.tools import Choosing
from hadal.gateway.text.vocabulary import Vocabulary

from .test_tools import BOS, EOS, WEATHER, Read, vocabulary_of

CONTROLS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>"]
TOKEN = vocabulary_of([*CONTROLS, MARK])
"""Vocabulary in which the mark is a token."""
SPELLED = vocabulary_of(CONTROLS)
"""Vocabulary in which the mark is spelled out."""
NUM_CUT = 50
"""Number of replies that are cut at every byte."""


def written(form: Dsml, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls as a model of the family writes them."""
    begin, end = f"<{MARK}{form.gap}", f"</{MARK}{form.gap}"
    text = f"\n\n<{MARK}{form.block}>\n"
    for name, arguments in calls:
        text += f'{begin}invoke name="{name}">\n'
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value, ensure_ascii=False)
            text += f'{begin}parameter name="{key}" string="{str(is_text).lower()}">'
            text += f"{shown}{end}parameter>\n"
        text += f"{end}invoke>\n"
    return text + f"</{MARK}{form.block}>"


@dataclass(frozen=True)
class Reading:
    """Options for reading a reply."""

    vocabulary: Vocabulary
    form: Dsml
    finish: str = "stop"
    """Without "stop", the reply ends at its length limit."""
    has_tools: bool = True
    is_parallel: bool = True

    def read(self, text: str, cut: int | None = None) -> Read:
        """Return the reply of this text: byte by byte or, with `cut`, in as few tokens as there can
        be with a cut before this byte.
        """
        ids: Sequence[int] = ids_of(text, self.vocabulary)
        token_bytes = list(self.vocabulary.token_bytes)
        if cut is not None:
            ids = _joined(_runs(text, self.vocabulary), cut, token_bytes)
        vocabulary = SimpleNamespace(
            token_bytes=token_bytes,
            control_ids=self.vocabulary.control_ids,
            mark_ids=self.vocabulary.mark_ids,
            hidden_ids=self.vocabulary.hidden_ids,
            marks=self.vocabulary.marks,
        )
        choosing = Choosing((WEATHER,), is_parallel=self.is_parallel)
        calls = Calls(self.form, choosing) if self.has_tools else None
        reading = TextReading(sections=True, has_tags=True, calls=calls, logprobs=True)
        assembler = Assembler(cast(Vocabulary, vocabulary), reading)
        tokens = [Token("r", 0, i, token) for i, token in enumerate(ids)]
        if self.finish == "stop":
            tokens.append(Token("r", 0, len(tokens), vocabulary.control_ids[EOS], "stop"))
        result = Read()
        for token in tokens:
            result.add(assembler.push([token]))
        result.add(assembler.end("length"))
        return result


@cache
def _runs(text: str, vocabulary: Vocabulary) -> tuple[bytes | int, ...]:
    """Return a reply's control tokens, and the bytes between them."""
    runs: list[bytes | int] = []
    for token in ids_of(text, vocabulary):
        if token > 255:
            runs.append(token)
        elif runs and isinstance(runs[-1], bytes):
            runs[-1] += bytes([token])
        else:
            runs.append(bytes([token]))
    return tuple(runs)


def _joined(runs: Sequence[bytes | int], cut: int, token_bytes: list[bytes]) -> list[int]:
    """Return one token for each run of bytes, appended to `token_bytes`, and two for the run that
    has byte `cut` within it.
    """
    joined: list[int] = []
    for run in runs:
        if isinstance(run, int):
            joined.append(run)
            continue
        parts = [run[:cut], run[cut:]] if 0 < cut < len(run) else [run]
        cut -= len(run)
        joined += range(len(token_bytes), len(token_bytes) + len(parts))
        token_bytes += parts
    return joined


def _pieces(rng: random.Random, form: Dsml) -> Iterator[str]:
    """Yield parts for odd replies."""
    spelled = MARK.replace("D", "D\0")
    """The mark spelled out, where it is a token; NUL ends up nowhere."""
    mark = rng.choice([MARK, MARK, MARK, spelled, f"｜DS{MARK}ML｜", f"｜DS{spelled}ML｜"])
    yield rng.choice(["a", " b ", "\n", "\n\n", "é🙂", "<", "</", '"', ">", "｜", "\\", '{"a": 1}'])
    yield rng.choice(["<think>", "</think>", mark, f"<{mark}", f"</{mark}", "\\u" + "ff5cDSML｜"])
    gap = rng.choice(["", " ", form.gap])
    block = rng.choice([form.block, "function_calls", "tool_calls", " calls", "call"])
    yield f"<{mark}{block}>"
    yield f"</{mark}{block}>"
    name = rng.choice(["weather", "", f"we{mark}ather", f"<{mark}{block}>", 'a"b', "n" * 600])
    yield f'<{mark}{gap}invoke name="{name}">'
    yield f"</{mark}{gap}invoke>"
    kind = rng.choice([' string="true"', ' string="false"', "", ' string="maybe"'])
    yield f'<{mark}{gap}parameter name="{name}"{kind}>'
    yield f"</{mark}{gap}parameter>"


def drawn(rng: random.Random, form: Dsml, is_short: bool = False) -> str:
    """Return sound calls with parts missing or added. `is_short`: one call at most."""
    odd = f'x <{MARK}{form.gap}parameter name="y" string="true">z</ {MARK} w'
    values: dict[str, Any] = {"city": rng.choice(["Oslo", odd, "</think>"]), "n": [odd]}
    call, other = ("weather", values), (rng.choice(["time", f"ti{MARK}me"]), {})
    if is_short:
        del values[rng.choice(["city", "n"])]
    sound = written(form, *rng.choice([[call], [other]]) if is_short else [call, other])
    parts = [part for line in sound.splitlines(keepends=True) for part in line.partition(">")]
    for _ in range(rng.randint(0, 6)):
        at = rng.randint(0, len(parts))
        if rng.random() < 0.7:
            parts[at:at] = [rng.choice([*_pieces(rng, form)])]
        else:
            del parts[at : at + rng.randint(1, 3)]
    before = rng.choice(["", "Let me see.", "<think>Hm.</think>Well\n", f"Say {MARK} <{MARK}x>"])
    return before + "".join(parts) + rng.choice(["", "", " Done.", "<", f"<{MARK}"])


@cache
def ids_of(text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the tokens of a reply. NUL makes no token: it breaks a mark that is spelled out."""
    ids: list[int] = []
    for part in text.split("\0"):
        ids += vocabulary.encode_controlled(part)
    return tuple(ids)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from _texts([*value.keys(), *value.values()])


def leaks(found: Read, *, is_whole: bool) -> list[str]:
    """Return the texts of a reply that contain a mark, and arguments that are not an object of
    JSON though the call was not cut (`is_whole`).
    """
    texts = [found.content, found.reasoning, *(text for call in found.calls for text in call)]
    wrong = []
    for number, (_, arguments) in enumerate(found.calls):
        try:
            value = json.loads(arguments)
        except ValueError:
            if is_whole or number < len(found.calls) - 1:
                wrong.append(arguments)
            continue
        texts += _texts(value)
        wrong += [] if isinstance(value, dict) else [arguments]
    return wrong + [text for text in texts if MARK in text or TAG in text]


@dataclass
class Tried:
    """Counts of a fuzz."""

    replies: int = 0
    cuts: int = 0
    calls: int = 0
    with_marks: int = 0
    """Replies with a mark in a name or a value."""
    leaks: list[tuple[str, list[str]]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    """Replies that differ between cuts."""

    def __str__(self) -> str:
        return (
            f"{self.replies} replies, {self.with_marks} of them with marks in names or values,"
            f" {self.calls} calls, {self.cuts} cuts: {len(self.leaks)} leaks,"
            f" {len(self.differing)} differ by cuts"
        )


def fuzz(num_replies: int, seed: int = 0) -> Tried:
    """Read drawn replies of all forms, with both vocabularies, and count what is wrong."""
    tried, rng = Tried(), random.Random(seed)
    for number in range(num_replies):
        form = rng.choice([*FORMS.values()])
        vocabulary = rng.choice([TOKEN, SPELLED])
        finish = rng.choice(["stop", "stop", "length"])
        has_tools, is_parallel = rng.random() < 0.85, rng.random() < 0.85
        reading = Reading(vocabulary, form, finish, has_tools, is_parallel)
        text = drawn(rng, form, is_short=number < NUM_CUT)
        found = reading.read(text)
        tried.replies += 1
        tried.calls += len(found.calls)
        tried.with_marks += any(each in text for each in (f"we{MARK}", f"x <{MARK}", f"ti{MARK}"))
        if wrong := leaks(found, is_whole=finish == "stop"):
            tried.leaks.append((text, wrong))
        if number < NUM_CUT:
            for cut in range(1, len(text.replace("\0", "").encode())):
                tried.cuts += 1
                if not same(found, reading.read(text, cut)):
                    tried.differing.append(f"{cut}: {text}")
    return tried


def same(one: Read, other: Read) -> bool:
    """Return True if two replies are equal, apart from the ids of their calls."""
    return [one.content, one.reasoning, one.calls, one.finish] == [
        other.content,
        other.reasoning,
        other.calls,
        other.finish,
    ]


if __name__ == "__main__":
    print(fuzz(*map(int, sys.argv[1:])) if len(sys.argv) > 1 else fuzz(2000))
