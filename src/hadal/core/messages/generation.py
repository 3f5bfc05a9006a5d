"""One generation, its tokens and its deliveries: values used in all conversations about requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from hadal.core.plans import Sampling, Score


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One generation as units receive it. `output` has the tokens that earlier attempts made; they
    are streamed already.
    """

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    """Maximum number of output tokens in total, `output` included."""
    stop_ids: tuple[int, ...]
    min_tokens: int
    """Stop ids are forbidden before this many output tokens."""
    sampling: Sampling
    attempt: int
    """Number of the attempt, raised by each requeue. Replies about older attempts are dropped."""
    priority: int = 0
    """Larger numbers run sooner, as if they had arrived some seconds earlier; so none starves."""
    arrived_s: float = 0.0
    """Arrival time on the front's clock, which orders the queue."""
    salt: bytes = b""
    """Salt of the tenant: KV is shared only under the same salt."""
    num_public: int = 0
    """Number of leading tokens, in whole blocks, with KV shared under kv/names.PUBLIC."""
    chain: bytes = b""
    """Names of the full blocks of prompt + output, set by the front; empty: cache nothing."""
    attempt_id: int = 0
    """Id of the attempt in Tokens, assigned by the front with Decode and unique among fronts."""
    tenant: str = ""
    """Name of the tenant, independent of its salt: scarce resources are shared among tenants."""
    fingerprint: str = ""
    """Fingerprint of the KV for this attempt (UnitUp), under which `chain` names its blocks. Empty: any."""
    weight: float = 1.0
    """Weight of the tenant when scarce resources are shared (policy/fairness)."""


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of one request. `index` is the number of tokens before it, so that a duplicate
    or a gap is detected.
    """

    request_id: str
    attempt: int
    index: int
    token: int
    finish: str | None = None
    """None while the request continues; "stop" (a stop id) or "length"."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Closing(msgspec.Struct, frozen=True, array_like=True):
    """Units of a request's last attempt, for the ledger; empty if no unit of the role had it."""

    prefill_unit: str
    decode_unit: str
    num_retries: int


class RateLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of a tenant's quota and what is left of them, for a reply's headers. None: no limit."""

    requests: int | None = None
    """Maximum number of requests at once."""
    requests_left: int = 0
    tokens: int | None = None
    """Maximum number of tokens per minute."""
    tokens_left: int = 0
    requests_reset_s: float = 0.0
    """Seconds until the whole quota is available again, as far as known."""
    tokens_reset_s: float = 0.0


class PrefixSources(msgspec.Struct, frozen=True, array_like=True):
    """Places of a prompt's KV that was not used, in tokens, to explain a miss of the cache."""

    num_recomputed: int = 0
    """Tokens on disk that were computed, since computing was predicted to be faster."""
    num_elsewhere: int = 0
    """Most tokens in memory of another prefill unit, if these are more than were found."""


class Deliver(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Effect of the front (core/seams): new tokens for the stream of one request, or its end.
    Exactly one delivery of a request is `final`. Forwarded if the stream is in another process
    (Delivered).
    """

    request_id: str
    tokens: tuple[Token, ...]
    final: bool = False
    error: str | None = None
    """Reason for which the request ended unfinished; set only in a final delivery."""
    error_status: int = 500
    retry_after_s: float | None = None
    """Seconds until a retry makes sense; set with 429 and 503."""
    num_cached: int = 0
    """Prompt tokens that were not computed; sent with the first token."""
    closing: Closing | None = None
    """Units that worked on the request; sent with the final delivery of an admitted one."""
    limits: RateLimits | None = None
    """Limits of a tenant with a quota; sent once, on admission (without tokens) or with a refusal."""
    error_code: str = ""
    """Error code for programs; empty: the status suffices."""
    scores: tuple[Score, ...] = ()
    """Scores of the prompt's tokens from the second on; sent with the first token, if requested."""
    sources: PrefixSources | None = None
    """Places of the prompt's unused KV; sent with the first token unless all are 0."""


def text_of(generation: Generation) -> tuple[int, ...]:
    """Return prompt and output. In simulations the prompt is a range, and so is the result: only
    its length is meaningful.
    """
    prompt: Sequence[int] = generation.prompt
    if isinstance(prompt, range):
        return cast("tuple[int, ...]", range(len(prompt) + len(generation.output)))
    return generation.prompt + generation.output


Key = tuple[str, int]
"""Attempt of a request: (request id, attempt number)."""
