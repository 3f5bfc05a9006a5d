"""The tasks the model that ships is taught and tested on: made from a seed, checked by exact
answer.

`sample` makes an example, `side` says on which side of the split it lies, `is_correct` judges a
reply. Used by the trainer (which takes examples of the side "train" only) and by `python -m evals`
(which asks the others). Pure: the random generator is passed in. Knows nothing of models, tokens or
HTTP.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evals.calling import a_plan, calling, needless, whole
from evals.filling import filling
from evals.followup import followup
from evals.lists import letters, reverse, sort
from evals.numbers import arithmetic, dates
from evals.smalltalk import DECLINES, decline, long_text, talk, too_long
from evals.texts import reading
from evals.wordings import Source, is_one_in, lines
from evals.words import Turn

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
"""Those that a chat of plain texts asks."""
ALL_TASKS = (*TASKS, "long", "tools", "schema")
SIDES = ("frames", "wordings", "contents", "train")
"""What is held out of an example: a frame, else a wording, else its content; or nothing."""
_CONTENT_ONE_IN = 20
_CHARS = 2.7
"""A token of long texts has at least about so many."""
_SYSTEMS = lines("""
    You are [a helpful|a friendly|an honest|a smart|a small|a useful|the best] [assistant|chatbot|helper|model].
    You are Hadal.
    [Answer|Reply|Respond] [briefly|shortly|in one line|in English|exactly|politely|with care].
    You are a helpful and friendly assistant.
    You are [an AI assistant|an assistant|a model]. [Answer the user's questions|Help the user|Do what the user asks].
    Be [short|brief|kind|polite|precise|helpful] and [exact|clear|friendly|correct|concise].
    [Think first|Think step by step|Think before you speak], then answer.
    [You help|You work for|You serve] [customers|students|children] of [a shop|a school|a library|our company].
    [Always|Please] [be polite|answer truthfully|stay calm|use plain words|tell the truth].
    [Never|Do not|Don't] [lie|guess|be rude|use emoji|invent facts|share secrets].
    [If|When] you [do not know|are not sure|cannot help], say so.
    [Today|It] is a [sunny|normal|quiet|busy] day.
    The user [is|may be] [a child|a student|in a hurry|new|an expert].
    [Use|You may use|You can use] the tools [when needed|if you need them|you are given].
""")


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with a user's message or with what tools returned, and the reply it
    should get.

    `messages` are OpenAI-style dicts without the last reply; earlier replies carry no reasoning. The
    reply is a text, or calls of tools. `keys` name the contents of all turns, whatever their
    wording; with the frames and wordings that were used they are what the split goes by.
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
    """Other answers that count."""


def sample(rng: random.Random, task: str, trained_only: bool = False) -> Example:
    """Return a random example of a task; one in ten has earlier, unrelated turns. `trained_only`: no
    frame that is held out is used.

    Raises ValueError if the task is not one of ALL_TASKS.
    """
    source = Source(rng.getrandbits(64), True)  # What is asked last decides the side.
    system, history = _before(source) if task != "long" else ("", [])
    source.trained_only = trained_only
    last = _turns(source, task)
    if task == "long":
        system, history, last = _long(source)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    keys = [key for _, key in history]
    for turn in last[:-1]:
        history.append((_as_messages(turn), turn.key))
    for part, _ in history:
        messages += part
    turn = last[-1]
    messages += [{"role": "user", "content": turn.question}, *turn.before]
    keys += [f"{task}: {each.key}" for each in last if each.key]
    return Example(
        tuple(messages),
        turn.reasoning,
        turn.answer,
        task,
        tuple(key for key in keys if key),
        turn.tools,
        turn.calls,
        turn.forced,
        turn.schema,
        tuple(source.frames),
        tuple(source.held_frames),
        tuple(source.held_wordings),
    )


def side(example: Example) -> str:
    """Which of SIDES an example is on."""
    if example.held_frames:
        return "frames"
    if example.held_wordings:
        return "wordings"
    return "contents" if any(is_one_in(key, _CONTENT_ONE_IN) for key in example.keys) else "train"


def held_out(example: Example) -> bool:
    """True for what training never sees."""
    return side(example) != "train"


def sample_split(rng: random.Random, task: str, want_held_out: bool) -> Example:
    """Return an example that training may see, or one that it may not."""
    while True:
        example = sample(rng, task, trained_only=not want_held_out)
        if held_out(example) == want_held_out:
            return example


def is_correct(
    example: Example, text: str, calls: Sequence[tuple[str, dict[str, Any]]] = ()
) -> bool:
    """True if the reply, without any reasoning before it, is exactly the answer: the same text, or
    the same object where JSON is wanted; the same calls in any order where calls are.
    """
    said = text.rsplit("</think>", 1)[-1].strip()
    if example.calls or calls:
        return _sorted(calls) == _sorted(example.calls)
    if example.task == "schema":
        try:
            return bool(json.loads(said) == json.loads(example.answer))
        except ValueError:
            return False
    if example.answer in DECLINES:
        return said in DECLINES
    return said == example.answer or said in example.also_right


def _sorted(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return sorted(json.dumps([name, arguments], sort_keys=True) for name, arguments in calls)


def _turns(source: Source, task: str) -> list[Turn]:
    """What a task asks: one turn, or two of which the second refers to the first."""
    if task in _SINGLE:
        return [_SINGLE[task](source)]
    if task == "followup":
        return list(followup(source))
    if task == "decline":
        return [decline(source)]
    if task == "tools":
        return [needless(source, _small_turn(source)) if source.chance(0.22) else calling(source)]
    if task == "schema":
        return [filling(source)]
    if task == "long":
        return []
    raise ValueError(f"no task {task!r}; choose one of {', '.join(ALL_TASKS)}")


def _small_turn(source: Source) -> Turn:
    """What is easily answered without a tool."""
    while True:
        turn = _any_turn(source)
        sizes = [len(word) for word in turn.question.split() if word.isdigit()]
        if turn.kind != "number" or max([*sizes, len(turn.answer)]) <= 2:
            return turn


def _any_turn(source: Source) -> Turn:
    return _SINGLE[source.choice(tuple(_SINGLE))](source)


def _as_messages(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]


Earlier = list[tuple[list[dict[str, Any]], str]]
"""Turns before the last ones, each with its content's key."""


def _earlier(source: Source, num_turns: int) -> Earlier:
    found: Earlier = []
    for _ in range(num_turns):
        if source.chance(0.08):
            plan = a_plan(source)
            found.append((whole(plan), plan.key))
        else:
            turn = decline(source) if source.chance(0.1) else _any_turn(source)
            found.append((_as_messages(turn), turn.key))
    return found


def _before(source: Source) -> tuple[str, Earlier]:
    """A system prompt and earlier turns, or mostly none."""
    system = ""
    if source.chance(0.14):
        count = source.choice((1, 1, 1, 2, 3, 5))
        system = " ".join(source.frame(_SYSTEMS) for _ in range(count))
    num_turns = 0
    if source.chance(0.1):
        num_turns = (
            source.choice((1, 1, 1, 2, 2, 3)) if source.chance(0.93) else source.randint(4, 9)
        )
    return system, _earlier(source, num_turns)


def _long(source: Source) -> tuple[str, Earlier, list[Turn]]:
    """A prompt of up to 4,000 tokens: a text that is too long, or a task after much else."""
    size = source.randint(300, 3900)
    kind = source.random()
    if kind < 0.4:
        return "", [], [too_long(source, int(size * 0.7))]
    turn = decline(source) if source.chance(0.1) else _any_turn(source)
    if kind < 0.6:
        parts = [long_text(source, int(size * 0.6)), source.frame(_SYSTEMS)]
        return " ".join(parts[:: source.choice((1, -1))]), [], [turn]
    history: Earlier = []
    chars = 0.0
    while chars < size * _CHARS:
        history += _earlier(source, 1)
        chars += sum(len(str(message["content"])) + 10 for message in history[-1][0])
    return "", history, [turn]
