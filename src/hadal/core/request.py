"""A request's life as a table: (state, transition) -> state, and the resources that each state
owns.

The front applies it to every request; a pair that is not in the table is a bug and raises.
"""

from __future__ import annotations

from enum import StrEnum

from hadal.core.errors import InvariantError


class State(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    RETRYING = "retrying"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Transition(StrEnum):
    """Event in a request's life."""

    PLACE = "place"
    FIRST_TOKEN = "first_token"
    PULLED = "pulled"
    FINISH = "finish"
    CANCEL = "cancel"
    LOSE = "lose"
    REQUEUE = "requeue"


OWNS: dict[State, frozenset[str]] = {
    State.QUEUED: frozenset(),
    State.PREFILLING: frozenset({"prefill_unit"}),
    State.TRANSFERRING: frozenset({"prefill_unit", "decode_unit"}),
    State.DECODING: frozenset({"decode_unit"}),
    State.RETRYING: frozenset(),
    State.FINISHED: frozenset(),
    State.CANCELLED: frozenset(),
}

_NEXT: dict[tuple[State, Transition], State] = {
    (State.QUEUED, Transition.PLACE): State.PREFILLING,
    (State.PREFILLING, Transition.FIRST_TOKEN): State.TRANSFERRING,
    (State.PREFILLING, Transition.FINISH): State.FINISHED,
    (State.TRANSFERRING, Transition.PULLED): State.DECODING,
    (State.DECODING, Transition.FINISH): State.FINISHED,
    (State.RETRYING, Transition.REQUEUE): State.QUEUED,
    **{
        (state, Transition.LOSE): State.RETRYING
        for state in (State.PREFILLING, State.TRANSFERRING, State.DECODING)
    },
    **{
        (state, Transition.CANCEL): State.CANCELLED
        for state in (
            State.QUEUED,
            State.PREFILLING,
            State.TRANSFERRING,
            State.DECODING,
            State.RETRYING,
        )
    },
}


def next_state(state: State, move: Transition) -> State:
    """Return the state after `move`. Raises InvariantError for a pair that is not in the table."""
    try:
        return _NEXT[state, move]
    except KeyError:
        raise InvariantError(f"a request that is {state} cannot {move}") from None
