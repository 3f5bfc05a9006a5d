"""What the ledger records: how a generation ended, and which nodes a unit occupied. Frozen values,
said once.

Times are wall-clock unix seconds, given in by whoever has a clock; `micros` makes whole
microseconds of them, in which everything is added up. Token counts and money are integers, so a sum
is exact however it is grouped.
"""

from __future__ import annotations

import msgspec

CANCELLED = "cancelled"
"""How a generation ended whose client left."""
FINISHES = ("stop", "length", "tool_calls")
"""How one ended that is complete. Anything else is the HTTP status of its error, in digits."""
BATCH_MODEL = "/batch"
"""What stands behind a model's name in facts of batches: they have prices of their own."""
REFUSALS = ("429", "503")
"""Statuses of what was not let in, where no unit had it before."""


def micros(time_s: float) -> int:
    """Whole microseconds; a float of unix seconds tells apart 0.24 of one."""
    return round(time_s * 1e6)


def sum_kv_tokens(num_prompt: int, num_output: int) -> int:
    """KV length added up over a generation's output tokens: token i (from 0) is drawn over
    num_prompt + i positions.
    """
    return num_output * num_prompt + num_output * (num_output - 1) // 2


class RequestFact(msgspec.Struct, frozen=True, array_like=True):
    """The end of one generation. Raises ValueError at birth for counts or times that cannot be.

    A prompt is billed once it is answered: `tokens_hit + tokens_miss` is its length if a first
    token came, else 0. Of several choices of one prompt, one bears it.
    """

    request_id: str
    tenant: str
    """A name, no secret (gateway/desk/salts)."""
    model: str
    tokens_hit: int
    """Positions of the prompt whose KV was found."""
    tokens_miss: int
    """The rest of the prompt, which was computed."""
    tokens_out: int
    """Output tokens that were streamed."""
    kv_tokens: int
    """KV length added up over the output tokens (`sum_kv_tokens`)."""
    end: str
    """One of FINISHES, CANCELLED, or the status of an error."""
    received_s: float
    completed_s: float
    """The generation's price is that of this time."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_unit: str = ""
    """Where its last attempt was prefilled; empty: nowhere."""
    decode_unit: str = ""
    num_retries: int = 0
    """Attempts beyond the first, preemptions among them."""
    income_pico_usd: int = 0
    """What was charged, in 10^-12 dollars: price (micro-dollars per million tokens) times tokens,
    added up.
    """

    def __post_init__(self) -> None:
        counts = (
            self.tokens_hit,
            self.tokens_miss,
            self.tokens_out,
            self.kv_tokens,
            self.num_retries,
        )
        if min(counts) < 0:
            raise ValueError(f"the fact of {self.request_id!r} counts less than nothing: {counts}.")
        if (self.first_token_s is None) != (self.tokens_out == 0) or (
            self.last_token_s is None
        ) != (self.first_token_s is None):
            raise ValueError(
                f"the fact of {self.request_id!r} has {self.tokens_out} tokens, and times that"
                " disagree."
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
        """Whether it was not let in. One that a unit had and that ended with this status failed."""
        return self.end in REFUSALS and not self.is_billed and not self.prefill_unit

    @property
    def is_billed(self) -> bool:
        """Whether any token would be missing without it."""
        return self.tokens_in + self.tokens_out > 0


class NodesFact(msgspec.Struct, frozen=True, array_like=True):
    """A unit was up from one time to another. Said again with a later `to_s` while it stays up.

    A unit occupies `num_ranks / ranks_per_node` nodes, a fraction where it does not fill one: two
    ranks of 8 are a quarter of a node, be they GPUs or processes on a CPU. Ranks that died and come
    back count all the while: they are paid for. Raises ValueError at birth.
    """

    unit: str
    epoch: str
    """The life of its process: a unit that was started again is another interval."""
    role: str
    """"prefill" or "decode"."""
    num_ranks: int
    ranks_per_node: int
    from_s: float
    to_s: float
    gpu: str = ""
    """What a rank runs on."""
    gpu_hour_micro_usd: int = 0
    """Price of one rank for an hour, in 10^-6 dollars."""
    model: str = ""
    """The model it serves; empty where it serves several."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1 or self.gpu_hour_micro_usd < 0:
            raise ValueError(
                f"{self.unit} has {self.num_ranks} ranks, {self.ranks_per_node} to a node, at"
                f" {self.gpu_hour_micro_usd} an hour; none of them can be negative, or no rank at"
                " all."
            )
        if self.to_s < self.from_s:
            raise ValueError(
                f"{self.unit} was up until {self.to_s}, before it came at {self.from_s}."
            )


Fact = RequestFact | NodesFact


class PackedFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts on their way to a file or another process."""

    requests: tuple[RequestFact, ...] = ()
    nodes: tuple[NodesFact, ...] = ()


def pack(facts: list[Fact]) -> PackedFacts:
    """Sorted by kind, each in its order."""
    return PackedFacts(
        tuple(fact for fact in facts if isinstance(fact, RequestFact)),
        tuple(fact for fact in facts if isinstance(fact, NodesFact)),
    )
