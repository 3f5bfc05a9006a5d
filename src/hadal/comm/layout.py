"""Sizes in bytes of dispatch and combine: per row, message, step and buffer. Pure arithmetic, no tensors.

    normal        head 16 | row of every pair int32 | expert slot of every pair int32 | rows: one per token and rank
    low latency   head 16 | messages: (token int32, expert slot int32, 8 spare bytes), row: one per token and expert
    combine       rows: one per token and expert, in the order they were dispatched, both modes

`deepep_*` are DeepEP's own sizes: its messages equal ours, but its buffers have a fixed place for
every message. Sources: DeepEP csrc/config.hpp and internode_ll.cu; DeepSeek-V3 (arXiv 2412.19437)
3.3.3 for the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hadal.core.row_bytes import row_bytes

HEAD_BYTES = 16
"""Bytes of a message's head; four int32: rows, pairs, layer, kind of message."""
PAIR_BYTES = 8
"""Bytes per pair in a normal message: its row and its expert slot."""
MESSAGE_HEAD_BYTES = 16
"""Bytes of a low-latency message's head; DeepEP's is equal."""

DISPATCH_FORMATS = ("fp32", "fp8", "fp8_pow2")
MODES = ("normal", "low_latency")


@dataclass(frozen=True)
class MessageLayout:
    """Message sizes by dispatch format and hidden size. Raises ValueError for an unknown format."""

    dispatch_format: str
    hidden_size: int

    def __post_init__(self) -> None:
        if self.dispatch_format not in DISPATCH_FORMATS:
            raise ValueError(
                f"{self.dispatch_format!r} is not a format; use {', '.join(DISPATCH_FORMATS)}."
            )

    @cached_property
    def back_format(self) -> str:
        """Return the format of returned rows: FP8 is returned as BF16."""
        return "fp32" if self.dispatch_format == "fp32" else "bf16"

    @cached_property
    def row_bytes(self) -> int:
        """Return the bytes of a dispatched row."""
        return row_bytes(self.hidden_size, self.dispatch_format)

    @cached_property
    def message_bytes(self) -> int:
        """Return the bytes of a low-latency message: 7,408 for FP8 at hidden size 7168."""
        return MESSAGE_HEAD_BYTES + self.row_bytes

    @cached_property
    def back_bytes(self) -> int:
        """Return the bytes of a returned row: 14,336 for BF16 at hidden size 7168."""
        return row_bytes(self.hidden_size, self.back_format)

    def dispatch_bytes(
        self, mode: str, num_rows: int, num_pairs: int, num_messages: int = 1
    ) -> int:
        """Return the bytes of the message to one peer: `num_rows` distinct tokens in `num_pairs`
        (token, expert) pairs. For several messages, give their sums and `num_messages`.
        """
        heads = num_messages * HEAD_BYTES
        if mode == "low_latency":
            return heads + num_pairs * self.message_bytes
        return heads + num_pairs * PAIR_BYTES + num_rows * self.row_bytes

    def combine_bytes(self, num_pairs: int) -> int:
        """Return the bytes of the message back from one peer."""
        return num_pairs * self.back_bytes

    def expected_bytes(
        self, mode: str, num_rows: Sequence[int], num_pairs: Sequence[int]
    ) -> tuple[int, int]:
        """Return the (dispatch, combine) bytes of one layer between a rank and its peers, for the
        rank's tokens only.

        `num_rows[i]` and `num_pairs[i]` count this rank's tokens for its i-th peer; the rank itself
        is left out.
        """
        dispatch = sum(
            self.dispatch_bytes(mode, n, p) for n, p in zip(num_rows, num_pairs, strict=True)
        )
        return dispatch, sum(map(self.combine_bytes, num_pairs))


def mean_rows(num_tokens: int, top_k: int, num_ranks: int) -> float:
    """Return the expected number of distinct tokens that a rank sends to one other rank, if routing
    is uniform; for prices and plans.
    """
    return num_tokens * (1.0 - (1.0 - 1.0 / num_ranks) ** top_k)


def most_pairs(max_tokens: int, top_k: int, num_held: int) -> int:
    """Return the most pairs that a rank may send to a rank with `num_held` experts: a token uses
    one replica of an expert.
    """
    return max_tokens * min(top_k, num_held)


@dataclass(frozen=True)
class LowLatencyBuffers:
    """Bytes of one set of a rank's buffers for low-latency mode. Two sets are allocated once, one
    per live micro-batch.
    """

    send: int
    recv: int
    send_back: int
    recv_back: int
    decoded: int
    """Bytes of the FP32 rows for the experts."""

    @property
    def total(self) -> int:
        return 2 * (self.send + self.recv + self.send_back + self.recv_back + self.decoded)


def low_latency_buffers(
    layout: MessageLayout, max_tokens: int, top_k: int, num_ranks: int, num_held: int
) -> LowLatencyBuffers:
    """Return the buffer sizes if each of `num_ranks` ranks has up to `num_held` experts per layer."""
    from_peer = most_pairs(max_tokens, top_k, num_held)
    peers = num_ranks - 1
    received = peers * from_peer + max_tokens * min(top_k, num_held)
    rows = peers * from_peer + max_tokens
    return LowLatencyBuffers(
        send=num_ranks * HEAD_BYTES + max_tokens * top_k * layout.message_bytes,
        recv=peers * (HEAD_BYTES + from_peer * layout.message_bytes),
        send_back=received * layout.back_bytes,
        recv_back=max_tokens * top_k * layout.back_bytes,
        decoded=rows * 4 * layout.hidden_size,
    )


def deepep_buffer_bytes(max_tokens: int, hidden_size: int, num_replicas: int) -> int:
    """Return the size of DeepEP's low-latency RDMA buffer: 2 x (send + receive + signals), sized
    for BF16 both ways.

    2.15 GB for 128 tokens, hidden size 7168 and 288 replicas.
    """
    dispatch = MESSAGE_HEAD_BYTES + max(2 * hidden_size, hidden_size + hidden_size // 128 * 4)
    combine = 2 * hidden_size + hidden_size // 128 * 4
    send = max(max_tokens * dispatch, num_replicas * max_tokens * combine)
    recv = num_replicas * max_tokens * max(dispatch, combine)
    signals = -(-num_replicas * 4 // 128) * 128
    return 2 * (send + recv + signals)
