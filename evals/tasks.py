"""Tasks that the shipped model is taught and tested on: made from a seed, checked by exact answer.

`sample` makes an example, `side` returns its side of the split, `is_correct` judges a reply. The
trainer uses examples of the side "train" only, `python -m evals` the others. Pure: the random
generator is passed in. Independent of models, tokens and HTTP.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.calling import a_plan, calling, needless, whole
from evals.dates import dates
from evals.filling import filling
from evals.followup import followup
from evals.frames import Said, load
from evals.letters import letters, reverse
from evals.lists import sort
from evals.numbers import arithmetic
from evals.smalltalk import DECLINES, NO_DECIMALS, decline, long_text, talk, too_long
from evals.texts import reading
from evals.wordings import Source, is_one_in
from evals.words import Turn, num_pieces

_SINGLE: dict[str, Callable[[Source], Turn]] = {
    "arithmetic": arithmetic,
    "sort": sort,
    "reverse": reverse,
    "letters": letters,
    "dates": dates,
    "reading": reading,
    "talk": talk,
}
TASKS = (*_SINGLE, "followup", "decline")
"""Tasks of chats with plain texts."""
ALL_TASKS = (*TASKS, "long", "tools", "schema")
SIDES = ("frames", "wordings", "contents", "train")
"""Sides of the split, by the held-out part of an example: a frame, else a wording, else its
content; "train" if none is.
"""
_CONTENT_ONE_IN = 20
_SYSTEM = load("tasks", Said)["system"]
_MOST_PIECES = 3800
"""Largest size of a long prompt, in pieces (estimated tokens): with its reply it must fit in 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with a user's message or with tool results, and the expected reply.

    `messages` are OpenAI-style dicts without the last reply; earlier replies carry no reasoning.
    The reply is a text, or tool calls. `keys` name the contents of the last question and of the
    turn it refers to, independent of their wording. The split depends on these keys and on the
    frames and wordings used there. Earlier turns do not count: with many turns, nearly every
    example would be held out.
    """

    messages: tuple[dict[str, Any], ...]
    reasoning: str
    answer: str
    task: str
    keys: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    forced: str = ""
    schema: dict[str, Any] | None = None
    frames: tuple[str, ...] = ()
    held_frames: tuple[str, ...] = ()
    held_wordings: tuple[str, ...] = ()
    also_right: tuple[str, ...] = ()
    """Other correct answers."""


def sample(rng: random.Random, task: str, trained_only: bool = False) -> Example:
    """Return a random example of a task. One in ten has earlier, unrelated turns; in the task "long", four in
    ten have them. `trained_only`: use no held-out frame.

    Raises ValueError if the task is not one of ALL_TASKS.
    """
    source = Source(rng.getrandbits(64), trained_only)
    if task == "long":
        system, history, last = _long(source)
    else:
        system, history = _before(source)
        last = _turns(source, task)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages += history
    for turn in last[:-1]:
        messages += _as_messages(turn)
    turn = last[-1]
    messages += [{"role": "user", "content": turn.question}, *turn.before]
    return Example(
        tuple(messages),
        turn.reasoning,
        turn.answer,
        task,
        tuple(key for each in last for key in each.key.splitlines()),
        turn.tools,
        turn.calls,
        turn.forced,
        turn.schema,
        tuple(source.frames),
        tuple(source.held_frames),
        tuple(source.held_wordings),
    )


def side(example: Example) -> str:
    """Return the example's side, one of SIDES."""
    if example.held_frames:
        return "frames"
    if example.held_wordings:
        return "wordings"
    return "contents" if any(is_one_in(key, _CONTENT_ONE_IN) for key in example.keys) else "train"


def held_out(example: Example) -> bool:
    """Return True if training never sees this example."""
    return side(example) != "train"


def sample_split(rng: random.Random, task: str, want_held_out: bool) -> Example:
    """Return a random example that is held out, or one that is not."""
    while True:
        example = sample(rng, task, trained_only=not want_held_out)
        if held_out(example) == want_held_out:
            return example


def is_correct(
    example: Example, text: str, calls: Sequence[tuple[str, dict[str, Any]]] = ()
) -> bool:
    """Return True if the reply, without any reasoning before it, is right: exactly the answer or one of
    `also_right`; any of DECLINES if the answer is one of them; an equal object if JSON is requested; the
    same calls in any order if calls are expected or made.
    """
    said = text.rsplit("</think>", 1)[-1].strip()
    if example.calls or calls:
        return _sorted(calls) == _sorted(example.calls)
    if example.task == "schema":
        try:
            # Compared as texts, because 1 == True in Python.
            return _canonical(json.loads(said)) == _canonical(json.loads(example.answer))
        except ValueError:
            return False
    if example.answer in DECLINES:
        return said in DECLINES
    return said == example.answer or said in example.also_right


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _sorted(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return sorted(_canonical([name, arguments]) for name, arguments in calls)


def _turns(source: Source, task: str) -> list[Turn]:
    """Return the turns of a task: one, or two if the second refers to the first."""
    if task in _SINGLE:
        return [_SINGLE[task](source)]
    if task == "followup":
        return list(followup(source))
    if task == "decline":
        return [decline(source)]
    if task == "tools":
        return _untooled(source) if source.chance(0.38) else [calling(source)]
    if task == "schema":
        return [filling(source)]
    raise ValueError(f"no task {task!r}; choose one of {', '.join(ALL_TASKS)}")


def _untooled(source: Source) -> list[Turn]:
    """Return turns that are answered without a tool, although tools are offered."""
    kind = source.random()
    if kind < 0.15:
        first, then = followup(source)
        return [first, needless(source, then)]
    if kind < 0.3:
        # A calculator might accept the decimals that the model cannot read.
        turn = source.until(lambda: decline(source), lambda turn: turn.reasoning != NO_DECIMALS)
    else:
        turn = _any_turn(source)
    return [needless(source, turn)]


def _any_turn(source: Source) -> Turn:
    return _SINGLE[source.choice(tuple(_SINGLE))](source)


def _as_messages(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]


def _earlier(source: Source) -> list[dict[str, Any]]:
    """Return an earlier turn and its reply."""
    with source.aside():
        if source.chance(0.08):
            return whole(a_plan(source))
        return _as_messages(decline(source) if source.chance(0.1) else _any_turn(source))


def _system(source: Source) -> str:
    with source.aside():
        return source.frame(_SYSTEM)


def _before(source: Source) -> tuple[str, list[dict[str, Any]]]:
    """Return a system prompt and earlier turns; mostly both are empty."""
    system = ""
    if source.chance(0.14):
        count = source.choice((1, 1, 1, 2, 3, 5))
        system = " ".join(_system(source) for _ in range(count))
    num_turns = 0
    if source.chance(0.1):
        num_turns = (
            source.choice((1, 1, 1, 2, 2, 3)) if source.chance(0.93) else source.randint(4, 9)
        )
    return system, [message for _ in range(num_turns) for message in _earlier(source)]


def _long(source: Source) -> tuple[str, list[dict[str, Any]], list[Turn]]:
    """Return (system prompt, earlier messages, last turns) of up to 3,800 pieces: a text that is too long, or
    a task with much other text before it.
    """
    size = source.randint(300, _MOST_PIECES - 150)
    kind = source.random()
    if kind < 0.4:
        return "", [], [too_long(source, size)]
    turn = decline(source) if source.chance(0.1) else _any_turn(source)
    left = size - num_pieces(turn.question)
    if kind < 0.6:
        parts = [long_text(source, max(100, int(left))), _system(source)]
        return " ".join(parts[:: source.choice((1, -1))]), [], [turn]
    history: list[dict[str, Any]] = []
    while True:
        messages = _earlier(source)
        left -= sum(_num_pieces(message) for message in messages)
        if left < 0 and history:
            return "", history, [turn]
        history += messages


def _num_pieces(message: dict[str, Any]) -> float:
    """Return the size of a message in pieces (estimated tokens), with its calls and all marks."""
    size = num_pieces(message["content"]) + 2
    for call in message.get("tool_calls", ()):
        function = call["function"]
        size += num_pieces(function["name"]) + num_pieces(function["arguments"]) + 5
    return size
