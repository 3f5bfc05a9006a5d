"""Normal mode: a token goes once to each rank that has experts for it. Sizes are received from the
peers.

Defines how messages are filled and read (layout: comm/layout), not how they are sent. Made for
prefill, with many tokens, where bandwidth matters. Shapes: T tokens, D hidden, P pairs of a
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hadal.comm.codec import Codec, check_size, ints, read_head, write_head
from hadal.comm.layout import HEAD_BYTES, PAIR_BYTES
from hadal.kernels import message as ops
from hadal.kernels.message import NORMAL, MessageFormat
from hadal.reference.route import Route


class NormalMode:
    """Writer and reader of messages. Its buffers only grow, because new memory of this size costs a
    page fault per page.
    """

    def __init__(self, codec: Codec, device: str) -> None:
        self.message_format = MessageFormat(NORMAL, codec.layout.dispatch_format)
        self._codec = codec
        self._device = device
        self._buffers: dict[tuple[int, str], Tensor] = {}

    def buffer(self, index: int, use: str, num_bytes: int) -> Tensor:
        """Return uninitialised uint8 [num_bytes] for the index-th live handle; the same memory
        until that handle is finished.
        """
        held = self._buffers.get((index, use))
        if held is None or len(held) < num_bytes:
            # 25 % more, so that slowly growing batches do not allocate every time.
            held = torch.empty(num_bytes * 5 // 4, dtype=torch.uint8, device=self._device)
            self._buffers[index, use] = held
        return held[:num_bytes]

    def pack(
        self,
        index: int,
        x_TD: Tensor,
        route: Route,
        num_expert_slots: int,
        layer: int,
        peers: Sequence[int],
    ) -> dict[int, Tensor]:
        """Return a message per peer, as slices of the handle's send buffer."""
        layout = self._codec.layout
        # Every size is a multiple of 4, so that heads and lists can be viewed as int32 in place.
        ends = list(
            accumulate(
                layout.dispatch_bytes("normal", route.num_rows_R[p], route.num_pairs_R[p])
                for p in peers
            )
        )
        buffer = self.buffer(index, "send", ends[-1])
        starts = [0, *ends[:-1]]
        messages = {peer: buffer[a:b] for peer, a, b in zip(peers, starts, ends, strict=True)}
        offset_R = [-1] * len(route.num_pairs_R)
        for peer, start in zip(peers, starts, strict=True):
            offset_R[peer] = start
        if not ops.pack(
            x_TD, route, self.message_format, num_expert_slots, layer, offset_R, buffer
        ):
            for peer, message in messages.items():
                self._fill(message, x_TD, route, layer, peer)
        return messages

    def _fill(self, message: Tensor, x_TD: Tensor, route: Route, layer: int, peer: int) -> None:
        num_rows, num_pairs = route.num_rows_R[peer], route.num_pairs_R[peer]
        first_row, first_pair = sum(route.num_rows_R[:peer]), sum(route.num_pairs_R[:peer])
        write_head(message, num_rows, num_pairs, layer, NORMAL)
        if not num_pairs:
            return
        pairs = slice(first_pair, first_pair + num_pairs)
        lists = message[HEAD_BYTES : HEAD_BYTES + num_pairs * PAIR_BYTES].view(torch.int32)
        lists[:num_pairs].copy_(route.row_P[pairs])
        lists[num_pairs:].copy_(route.expert_slot_P[pairs])
        token_N = route.token_N[first_row : first_row + num_rows]
        row_bytes = self._codec.layout.row_bytes
        self._codec.encode(x_TD, token_N, message, HEAD_BYTES + num_pairs * PAIR_BYTES, row_bytes)

    def read(self, message: Tensor, layer: int, peer: int) -> tuple[int, int]:
        """Return (rows, pairs) of a message, after checking its length. Raises MessageError."""
        num_rows, num_pairs = read_head(message, layer, NORMAL, peer)
        check_size(message, self._codec.layout.dispatch_bytes("normal", num_rows, num_pairs), peer)
        return num_rows, num_pairs

    def lists(self, message: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Return (row [P], expert slot [P])."""
        both = ints(message, HEAD_BYTES, 2 * num_pairs)
        return both[:num_pairs], both[num_pairs:]

    def decode(self, message: Tensor, num_pairs: int, out_ND: Tensor) -> None:
        start = HEAD_BYTES + num_pairs * PAIR_BYTES
        self._codec.decode(message, start, self._codec.layout.row_bytes, out_ND)
