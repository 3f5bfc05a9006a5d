"""Records of the ledger, frozen values: how a generation ended, and which nodes a unit occupied.

Times are wall-clock unix seconds, supplied by callers with a clock; `micros` converts them to whole
microseconds, in which all sums are made. Token counts and money are integers, so a sum is exact in
any grouping.
"""

from __future__ import annotations

import msgspec

CANCELLED = "cancelled"
"""`RequestFact.end` of a generation that ended because its client disconnected."""
FINISHES = ("stop", "length", "tool_calls")
"""`RequestFact.end` of a complete generation. Other values are CANCELLED, or the HTTP status
of an error in digits.
"""
BATCH_MODEL = "/batch"
"""Suffix of a model's name in facts of batches, which have prices of their own."""
REFUSALS = ("429", "503")
"""Statuses of a rejection, if no unit had the request (`RequestFact.is_refused`)."""


def micros(time_s: float) -> int:
    """Return whole microseconds. A float of unix seconds has a resolution of 0.24 microseconds."""
    return round(time_s * 1e6)


def sum_kv_tokens(num_prompt: int, num_output: int) -> int:
    """Return the sum of KV lengths over a generation's output tokens: token i (from 0) is drawn
    over num_prompt + i positions.
    """
    return num_output * num_prompt + num_output * (num_output - 1) // 2


class RequestFact(msgspec.Struct, frozen=True, array_like=True):
    """End of one generation, or refusal of a request with an unread body. Raises ValueError when
    made with impossible counts or times, or without an id.

    A prompt is billed once it is answered: `tokens_hit + tokens_miss` is its length if a first
    token was made, else 0. If a prompt has several choices, only one choice's fact counts it.
    """

    request_id: str
    tenant: str
    """Name of the tenant; not a secret (gateway/desk/salts)."""
    model: str
    tokens_hit: int
    """Prompt positions with KV found in the cache."""
    tokens_miss: int
    """Prompt positions that were computed."""
    tokens_out: int
    """Output tokens that were streamed."""
    kv_tokens: int
    """Sum of KV lengths over the output tokens (`sum_kv_tokens`)."""
    end: str
    """One of FINISHES, CANCELLED, or the status of an error."""
    received_s: float
    completed_s: float
    """End of the generation; the prices of this time apply."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_unit: str = ""
    """Unit that prefilled the last attempt; empty: none did."""
    decode_unit: str = ""
    num_retries: int = 0
    """Attempts after the first, including those after preemptions."""
    income_pico_usd: int = 0
    """Amount charged, in 10^-12 dollars: price (micro-dollars per million tokens) times tokens, summed."""

    def __post_init__(self) -> None:
        counts = (
            self.tokens_hit,
            self.tokens_miss,
            self.tokens_out,
            self.kv_tokens,
            self.num_retries,
        )
        if min(counts) < 0:
            raise ValueError(f"the fact of {self.request_id!r} has a negative count: {counts}.")
        if (self.first_token_s is None) != (self.tokens_out == 0) or (
            self.last_token_s is None
        ) != (self.first_token_s is None):
            raise ValueError(
                f"the fact of {self.request_id!r} has {self.tokens_out} tokens; its times of the"
                " first and last token do not fit that."
            )
        if (
            self.first_token_s is not None
            and self.last_token_s is not None
            and self.last_token_s < self.first_token_s
        ):
            raise ValueError(
                f"the fact of {self.request_id!r} has its last token before its first."
            )
        if not self.request_id:
            raise ValueError("a fact needs the id of its request.")

    @property
    def tokens_in(self) -> int:
        """Prompt tokens that are billed."""
        return self.tokens_hit + self.tokens_miss

    @property
    def is_refused(self) -> bool:
        """True if the request was rejected. A request that a unit had and that ended with such a
        status has failed instead.
        """
        return self.end in REFUSALS and not self.is_billed and not self.prefill_unit

    @property
    def is_billed(self) -> bool:
        """True if the request has any billed tokens."""
        return self.tokens_in + self.tokens_out > 0


class NodesFact(msgspec.Struct, frozen=True, array_like=True):
    """Interval in which a unit was up. Recorded again with a later `to_s` while it stays up.

    A unit occupies `num_ranks / ranks_per_node` nodes, a fraction if it does not fill one: two
    ranks of 8 are a quarter of a node, whether GPUs or processes on a CPU. Ranks that die and
    return count throughout, because they are paid for. Raises ValueError when made with impossible
    values.
    """

    unit: str
    epoch: str
    """Epoch of the unit's process: a restarted unit begins another interval."""
    role: str
    """"prefill" or "decode"."""
    num_ranks: int
    ranks_per_node: int
    from_s: float
    to_s: float
    gpu: str = ""
    """Hardware that a rank runs on."""
    gpu_hour_micro_usd: int = 0
    """Price of one rank for an hour, in 10^-6 dollars."""
    model: str = ""
    """Model that the unit serves; empty if it serves several."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1 or self.gpu_hour_micro_usd < 0:
            raise ValueError(
                f"{self.unit} has {self.num_ranks} ranks, {self.ranks_per_node} per node, at"
                f" {self.gpu_hour_micro_usd} micro-dollars per GPU-hour; ranks must be at least 1,"
                " the price at least 0."
            )
        if self.to_s < self.from_s:
            raise ValueError(
                f"{self.unit} was up until {self.to_s}, which is before its start at {self.from_s}."
            )


Fact = RequestFact | NodesFact


class PackedFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts sent to a file or another process."""

    requests: tuple[RequestFact, ...] = ()
    nodes: tuple[NodesFact, ...] = ()


def pack(facts: list[Fact]) -> PackedFacts:
    """Return the facts grouped by kind, each kind in its given order."""
    return PackedFacts(
        tuple(fact for fact in facts if isinstance(fact, RequestFact)),
        tuple(fact for fact in facts if isinstance(fact, NodesFact)),
    )
