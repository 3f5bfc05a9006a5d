"""Ends of outputs by their tokens, returns of attempts to the front, and the history for a sampler.

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
    """Return how the output ends with `token` at `index`; None if it goes on. A stop id ends it
    only after `min_tokens` other tokens.
    """
    if token in generation.stop_ids and index + 1 > generation.min_tokens:
        return STOP
    return LENGTH if index + 1 >= generation.max_tokens else None


def returned(unit: str, key: Key, reason: str) -> Send:
    """Return the message by which a leader returns an attempt to the front, which retries it or
    ends its request (roles/reasons).
    """
    return Send("front", Returned(unit, *key, reason))


def has_other_weights(generation: Generation, fingerprint: str) -> bool:
    """Return whether an attempt was meant for another KV fingerprint, such as this unit's before a
    rollout. False if either fingerprint is empty.
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
    """Return whether the sampler needs the output so far to draw the next token."""
    return has_penalty(sampling) or sampling.grammar is not None


def history_of(generation: Generation) -> History:
    """Return prompt and output for the sampler; empty if it does not need them, as they are long."""
    sampling = generation.sampling
    return (
        generation.prompt if has_penalty(sampling) else (),
        generation.output if needs_output(sampling) else (),
    )
