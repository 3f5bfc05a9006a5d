"""The meaning of a request's token for its end, and the history that its sampler needs.

Shared by both leaders.
"""

from __future__ import annotations

from hadal.core.messages.generation import Generation, Key
from hadal.core.messages.units import Returned
from hadal.core.plans import Sampling
from hadal.core.seams import Send

STOP = "stop"
LENGTH = "length"
History = tuple[tuple[int, ...], tuple[int, ...]]


def finish_of(generation: Generation, index: int, token: int) -> str | None:
    """How the output ends with `token` at `index`; None if it goes on. A stop id counts from
    `min_tokens` on.
    """
    if token in generation.stop_ids and index + 1 > generation.min_tokens:
        return STOP
    return LENGTH if index + 1 >= generation.max_tokens else None


def given_back(unit: str, key: Key, reason: str) -> Send:
    """The front is to try an attempt elsewhere, or later."""
    return Send("front", Returned(unit, *key, reason))


def has_other_weights(generation: Generation, fingerprint: str) -> bool:
    """Whether an attempt was meant for a unit whose KV is not of this fingerprint, as the one that
    had the name before.
    """
    asked = generation.fingerprint
    return asked != fingerprint and bool(asked and fingerprint)


def has_penalty(sampling: Sampling) -> bool:
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


def needs_output(sampling: Sampling) -> bool:
    """Whether what is drawn depends on the output so far."""
    return has_penalty(sampling) or sampling.grammar is not None


def history_of(generation: Generation) -> History:
    """Prompt and output for the sampler; empty where nothing asks for them, as they are long."""
    sampling = generation.sampling
    return (
        generation.prompt if has_penalty(sampling) else (),
        generation.output if needs_output(sampling) else (),
    )
