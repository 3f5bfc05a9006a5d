"""One request as the front knows it, from Submit to its last Deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from hadal.core.messages.generation import Closing, Generation
from hadal.core.request import State
from hadal.policy.batching import turn_s
from hadal.policy.fairness import share_weight

QueueKey = tuple[float, int, str]
"""A place in the queue: whose turn is first, then who came first."""


@dataclass(slots=True)
class Record:
    """One request from Submit to its last Deliver."""

    generation: Generation
    number: int
    """The request's number in the order of arrival."""
    timeout_s: float
    """Longest wait: in the queue, for the first token, and for each token after."""
    moved_s: float
    """Time of its last token, or of its arrival. While the request runs, `Running` has the newest."""
    output: list[int]
    """Tokens so far; empty where the front keeps no text."""
    num_output: int = 0
    """Tokens so far. While it runs, `Running` counts this and `num_blocks`."""
    state: State = State.QUEUED
    attempt: int = 0
    prefill_unit: str | None = None
    decode_unit: str | None = None
    last_units: tuple[str, str] = ("", "")
    """Prefill and decode units of the attempt that was placed last; empty: none."""
    num_cached: int = 0
    """Positions that its prefill unit was taken to have when it was sent there."""
    not_before_s: float = 0.0
    num_retries: int = 0
    is_fitted: bool = False
    """`max_tokens` was checked against what the units can hold."""
    num_blocks: int = 0
    """Counted against decode while it is placed: its tokens and the one that comes."""
    num_blocks_taken: int = 0
    """Held by what gave way to it, since it waits."""
    is_charged: bool = False
    """Its prompt counts as served to its tenant: a retry's is work again, but not the tenant's."""
    row: int = -1
    """Row among the requests that run; negative: none."""
    chains: dict[str, bytes] = field(default_factory=dict)
    """Fingerprint -> the chain of its text, of those that it was bound to before."""

    @property
    def fingerprint(self) -> str:
        """What it is bound to from being placed on: KV of no other is used for it. Bound anew when
        it is placed again, for then all of its text is prefilled again.
        """
        return self.generation.fingerprint

    def bind(self, fingerprint: str) -> None:
        """Bind one that waits."""
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
        """Key that orders the queue; the same when the request comes back."""
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
        """What its work is divided by where tenants share (policy/fairness)."""
        return share_weight(self.generation.weight, self.generation.priority)

    @property
    def closing(self) -> Closing:
        return Closing(*self.last_units, self.attempt - self.generation.attempt)
