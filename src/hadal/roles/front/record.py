"""One request in the front's table."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from hadal.core.messages.generation import Closing, Generation
from hadal.core.request import State
from hadal.policy.batching import turn_s
from hadal.policy.fairness import share_weight

QueueKey = tuple[float, int, str]
"""Place in the queue: time of the turn, then order of arrival."""


@dataclass(slots=True)
class Record:
    """One request from Submit to its last Deliver."""

    generation: Generation
    number: int
    """The request's number in the order of arrival."""
    timeout_s: float
    """Longest wait, seconds: from arrival to decode's first token, and for each later token."""
    moved_s: float
    """Time of decode's last token, or of arrival. `Running` has the latest while the request runs.
    """
    output: list[int]
    """Output tokens so far; empty if the front stores no text."""
    num_output: int = 0
    """Number of output tokens so far. `Running` counts it and `num_blocks` while the request runs.
    """
    state: State = State.QUEUED
    attempt: int = 0
    prefill_unit: str | None = None
    decode_unit: str | None = None
    last_units: tuple[str, str] = ("", "")
    """Prefill and decode units of the latest placed attempt; empty string: none."""
    num_cached: int = 0
    """Positions expected in the prefill unit's cache when the request was sent there."""
    num_elsewhere: int = 0
    """Most positions in the cache of another prefill unit that could have taken it then."""
    not_before_s: float = 0.0
    num_retries: int = 0
    is_fitted: bool = False
    """True once `max_tokens` has been checked against the capacity of the units."""
    num_blocks: int = 0
    """Blocks reserved in decode while the request is placed: for its tokens and the next one."""
    num_blocks_taken: int = 0
    """Blocks of requests preempted in its favour while it is queued."""
    is_charged: bool = False
    """True once the prompt is charged to the tenant; a retry computes it again without a charge."""
    row: int = -1
    """Row in `Running`; negative if the request is not there."""
    chains: dict[str, bytes] = field(default_factory=dict)
    """Fingerprint -> chain of the request's text, for fingerprints that it was bound to before."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the request's KV since it was placed; KV of any other is not used for it.
        A new placement may choose another, since all of the text is prefilled again.
        """
        return self.generation.fingerprint

    def bind(self, fingerprint: str) -> None:
        """Bind a queued request to a fingerprint."""
        generation = self.generation
        if generation.fingerprint == fingerprint:
            return
        self.chains[generation.fingerprint] = generation.chain
        chain = self.chains.get(fingerprint, b"")
        self.generation = msgspec.structs.replace(generation, chain=chain, fingerprint=fingerprint)

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def queue_key(self) -> QueueKey:
        """Key that orders the queue; unchanged when the request is requeued."""
        return (
            turn_s(self.generation.arrived_s, self.generation.priority),
            self.number,
            self.request_id,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.generation.prompt) + self.num_output

    @property
    def share_weight(self) -> float:
        """Divisor of the request's cost where tenants share (policy/fairness)."""
        return share_weight(self.generation.weight, self.generation.priority)

    @property
    def closing(self) -> Closing:
        return Closing(*self.last_units, self.attempt - self.generation.attempt)
