"""A dispatch format bound to a hidden size: writes rows into messages and reads them. Does not
depend on peers or the order of messages.

Shapes: T tokens, D hidden, N rows, B bytes of a row, P pairs, K chosen. Messages are flat uint8
tensors. Use `shape` or `numel` for a tensor's size: its `len` takes microseconds, and a decode step
would call it thousands of times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hadal.comm.layout import HEAD_BYTES, MessageLayout
from hadal.core.errors import HadalError
from hadal.kernels import codec as ops


class MessageError(HadalError):
    """A peer's message does not fit: the ranks are in different steps or configurations."""


class Codec:
    """Encoder and decoder of rows in one dispatch format."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout = layout
        self.hidden_size = layout.hidden_size

    def encode(
        self, x_TD: Tensor, token_N: Tensor | None, message: Tensor, start: int, stride: int
    ) -> None:
        """Write rows `token_N` of `x_TD` (None: all) into the message, the first at byte `start`,
        then every `stride` bytes.
        """
        num_rows = (x_TD if token_N is None else token_N).shape[0]
        rows_NB = self._rows(message, start, num_rows, stride, self.layout.row_bytes)
        ops.encode(x_TD, token_N, rows_NB, self.layout.dispatch_format)

    def decode(self, message: Tensor, start: int, stride: int, out_ND: Tensor) -> None:
        rows_NB = self._rows(message, start, out_ND.shape[0], stride, self.layout.row_bytes)
        ops.decode(rows_NB, out_ND, self.layout.dispatch_format)

    def encode_back(self, y_PD: Tensor, message: Tensor) -> None:
        """Fill the message with the experts' outputs, in the format of returned rows."""
        ops.encode(
            y_PD, None, message.view(y_PD.shape[0], self.layout.back_bytes), self.layout.back_format
        )

    def combine(self, back: Tensor, at_TK: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return routed [T, D], FP32: the returned rows times the gate's weights, added by
        ascending expert id.
        """
        out_TD = torch.empty((ids_TK.shape[0], self.hidden_size), device=back.device)
        back_PB = back.view(ids_TK.numel(), self.layout.back_bytes)
        ops.weighted_sum(back_PB, self.layout.back_format, at_TK, ids_TK, weights_TK, out_TD)
        return out_TD

    def _rows(
        self, message: Tensor, start: int, num_rows: int, stride: int, num_bytes: int
    ) -> Tensor:
        """Return a view of the rows; the last row may end at the message's end."""
        return message.as_strided(
            (num_rows, num_bytes), (stride, 1), message.storage_offset() + start
        )


def write_head(message: Tensor, num_rows: int, num_pairs: int, layer: int, kind: int) -> None:
    head = torch.tensor((num_rows, num_pairs, layer, kind), dtype=torch.int32)
    message[:HEAD_BYTES].view(torch.int32).copy_(head)


def read_head(message: Tensor, layer: int, kind: int, peer: int) -> tuple[int, int]:
    """Return (rows, pairs). Raises MessageError if it is not this layer's message of this kind."""
    if message.numel() < HEAD_BYTES:
        raise MessageError(
            f"rank {peer} sent {message.numel()} bytes; a message has at least {HEAD_BYTES}."
        )
    num_rows, num_pairs, its_layer, its_kind = ints(message, 0, 4).tolist()
    if (its_layer, its_kind) != (layer, kind) or num_rows < 0 or num_pairs < num_rows:
        raise MessageError(
            f"rank {peer} sent layer {its_layer}, kind {its_kind}, {num_rows} rows of {num_pairs}"
            f" pairs; expected are layer {layer}, kind {kind}, and at least one pair per row."
        )
    return num_rows, num_pairs


def check_size(message: Tensor, num_bytes: int, peer: int) -> None:
    """Raise MessageError if the message is shorter than `num_bytes`."""
    if message.numel() < num_bytes:
        raise MessageError(
            f"rank {peer} sent {message.numel()} bytes; at least {num_bytes} were expected."
        )


def ints(message: Tensor, start: int, count: int) -> Tensor:
    """Return `count` int32 of a message, as a view if the alignment permits it."""
    part = message[start : start + 4 * count]
    return (part if part.storage_offset() % 4 == 0 else part.clone()).view(torch.int32)
