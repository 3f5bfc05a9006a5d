"""One generation, its tokens and its deliveries: the values that all conversations about requests carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from hadal.core.plans import Sampling, Score


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One generation as the units see it. `output` is non-empty after a retry: what was already
    streamed.
    """

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    """Total output tokens, `output` included."""
    stop_ids: tuple[int, ...]
    min_tokens: int
    """Stop ids are forbidden before this many output tokens."""
    sampling: Sampling
    attempt: int
    """Counts retries. A reply about an older attempt is stale and is dropped."""
    priority: int = 0
    """Larger is sooner. Worth a bounded time of waiting, so nobody starves."""
    arrived_s: float = 0.0
    """When it came to the front, by the front's clock: for the order among those that wait."""
    salt: bytes = b""
    """The tenant's: KV is shared only under the same salt."""
    num_public: int = 0
    """Number of first tokens that are shared under kv/names.PUBLIC instead, as far as they fill
    blocks.
    """
    chain: bytes = b""
    """Names of the full blocks of prompt + output, as the front fills them in; empty where nothing
    is to be cached.
    """
    attempt_id: int = 0
    """The front gives it with Decode. By this number it knows the attempt's tokens again, and no
    other front does.
    """
    tenant: str = ""
    """The tenant's name, whatever its salt: what is scarce is shared among tenants."""
    fingerprint: str = ""
    """Of the KV that this attempt is made of (UnitUp), under which `chain` names its blocks. Empty:
    any.
    """
    weight: float = 1.0
    """The tenant's, by which what is scarce is shared (policy/fairness)."""


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one request. `index` says how many came before it, so a duplicate or a gap
    is noticed.
    """

    request_id: str
    attempt: int
    index: int
    token: int
    finish: str | None = None
    """None while it goes on; "stop" (a stop id) or "length"."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Closing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request was worked on, for the ledger."""

    prefill_unit: str
    """Prefill unit of its last attempt, as `decode_unit`; empty: it got to none."""
    decode_unit: str
    num_retries: int


class RateLimits(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a tenant's quota, as a reply's headers say it. None: there is no such limit."""

    requests: int | None = None
    """At once."""
    requests_left: int = 0
    tokens: int | None = None
    """A minute."""
    tokens_left: int = 0
    requests_reset_s: float = 0.0
    """When all of it can be had again, as far as that is known."""
    tokens_reset_s: float = 0.0


class Deliver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Front only: new tokens, or the end, for the stream of one request. Exactly one of a request
    is `final`. An effect (core/seams), and sent on where the stream is in another process.
    """

    request_id: str
    tokens: tuple[Token, ...]
    final: bool = False
    error: str | None = None
    """Why a final delivery ended it without finishing."""
    error_status: int = 500
    retry_after_s: float | None = None
    """When to try again; it comes with 429 and 503."""
    num_cached: int = 0
    """Prompt tokens that were not computed; they come with the first token."""
    closing: Closing | None = None
    """Where it was worked on; it comes with the final delivery of a request that was let in."""
    limits: RateLimits | None = None
    """Of a tenant with a quota: with the first delivery, which has no token if it was let in."""
    error_code: str = ""
    """For programs; empty: the status says it."""
    scores: tuple[Score, ...] = ()
    """Of the prompt's tokens from the second on; they come with the first token, where they were
    asked for.
    """


def text_of(generation: Generation) -> tuple[int, ...]:
    """Prompt and output. Where nobody reads the text, as in a simulation, the prompt is a range and
    so is this: only its length means something.
    """
    prompt: Sequence[int] = generation.prompt
    if isinstance(prompt, range):
        return cast("tuple[int, ...]", range(len(prompt) + len(generation.output)))
    return generation.prompt + generation.output


Key = tuple[str, int]
"""An attempt: its request's id and its number."""
