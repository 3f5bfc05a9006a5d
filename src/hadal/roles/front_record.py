"""One request as the front knows it, from Submit to its last Deliver."""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages import Generation
from hadal.core.request import State
from hadal.core.seams import Closing
from hadal.policy.batching import turn_s

Place = tuple[float, int, str]
"""In the queue: whose turn is first, then who came first."""


@dataclass(slots=True)
class Record:
    """One request from Submit to its last Deliver."""

    generation: Generation
    number: int
    """In the order of arrival."""
    deadline_s: float
    output: list[int]
    """Its tokens so far; empty where the front keeps no text."""
    num_output: int = 0
    """Tokens so far. While it is seated (roles/front_running), this and `num_blocks` are counted
    there.
    """
    state: State = State.QUEUED
    attempt: int = 0
    prefill_unit: str | None = None
    decode_unit: str | None = None
    last_units: tuple[str, str] = ("", "")
    """Prefill and decode units of the attempt that was placed last; empty: none."""
    ahead: tuple[int, int] = (-1, 0)
    """The attempt whose KV its decode unit was told to pull early, and tokens of it."""
    num_cached: int = 0
    """Positions that its prefill unit was taken to have when it was sent there."""
    not_before_s: float = 0.0
    num_retries: int = 0
    is_fitted: bool = False
    """`max_tokens` was checked against what the units can hold."""
    num_blocks: int = 0
    """Counted against decode while it is placed: its tokens and the one that comes."""
    row: int = -1
    """Where it is seated; negative: nowhere."""

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def place(self) -> Place:
        """In the queue; the same when it comes back."""
        return (
            turn_s(self.generation.arrived_s, self.generation.priority),
            self.number,
            self.request_id,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.generation.prompt) + self.num_output

    @property
    def closing(self) -> Closing:
        return Closing(*self.last_units, self.attempt - self.generation.attempt)
