"""Low-latency mode: one message per (token, expert) pair into fixed buffers. Counts are not
exchanged first, and a step allocates no memory for rows.

Defines how messages are filled and read (layout: comm/layout), not how they are sent. Made for
decode, with few tokens, where latency matters. Two sets of buffers serve the two live
micro-batches; a set is free again when its handle is finished. Shapes: T tokens, D hidden, P pairs
of a message, I int32 of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.comm.codec import Codec, check_size, read_head, write_head
from hadal.comm.layout import HEAD_BYTES, MESSAGE_HEAD_BYTES, low_latency_buffers
from hadal.kernels import message as ops
from hadal.kernels.message import LOW_LATENCY, MessageFormat
from hadal.reference.route import Route


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of one micro-batch."""

    send: Tensor
    recv: dict[int, Tensor]
    send_back: Tensor
    recv_back: Tensor
    decoded_ND: Tensor


class LowLatencyMode:
    """Writer and reader of messages in fixed buffers, made once per formation."""

    def __init__(
        self,
        codec: Codec,
        device: str,
        *,
        max_tokens: int,
        top_k: int,
        peers: Iterable[int],
        num_held: int,
    ) -> None:
        self.message_format = MessageFormat(LOW_LATENCY, codec.layout.dispatch_format)
        self._codec = codec
        peers = tuple(peers)
        sizes = low_latency_buffers(codec.layout, max_tokens, top_k, len(peers) + 1, num_held)

        def buffer(num_bytes: int) -> Tensor:
            # Zeroing touches the pages now, not in the first steps.
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        def one_set() -> Buffers:
            recv = buffer(sizes.recv)
            each = sizes.recv // max(len(peers), 1)
            return Buffers(
                send=buffer(sizes.send),
                recv={peer: recv[i * each : (i + 1) * each] for i, peer in enumerate(peers)},
                send_back=buffer(sizes.send_back),
                recv_back=buffer(sizes.recv_back),
                decoded_ND=buffer(sizes.decoded).view(torch.float32).view(-1, codec.hidden_size),
            )

        self.sets = (one_set(), one_set())

    def pack(
        self,
        buffers: Buffers,
        x_TD: Tensor,
        route: Route,
        num_expert_slots: int,
        layer: int,
        peers: Sequence[int],
    ) -> dict[int, Tensor]:
        """Return a message per peer, as slices of the set's send buffer."""
        layout = self._codec.layout
        messages, offset_R, at = {}, [-1] * len(route.num_pairs_R), 0
        for peer in peers:
            size = layout.dispatch_bytes(
                "low_latency", route.num_pairs_R[peer], route.num_pairs_R[peer]
            )
            messages[peer] = buffers.send[at : at + size]
            offset_R[peer] = at
            at += size
        if not ops.pack(
            x_TD, route, self.message_format, num_expert_slots, layer, offset_R, buffers.send
        ):
            for peer, message in messages.items():
                self._fill(message, x_TD, route, layer, peer)
        return messages

    def _fill(self, message: Tensor, x_TD: Tensor, route: Route, layer: int, peer: int) -> None:
        num_pairs, first = route.num_pairs_R[peer], sum(route.num_pairs_R[:peer])
        write_head(message, num_pairs, num_pairs, layer, LOW_LATENCY)
        token_P = route.token_P[first : first + num_pairs]
        heads_PI = self._heads(message, num_pairs)
        heads_PI[:, 0] = token_P
        heads_PI[:, 1] = route.expert_slot_P[first : first + num_pairs]
        heads_PI[:, 2:4] = 0
        stride = self._codec.layout.message_bytes
        self._codec.encode(x_TD, token_P, message, HEAD_BYTES + MESSAGE_HEAD_BYTES, stride)

    def read(self, message: Tensor, layer: int, peer: int) -> tuple[int, int]:
        """Return (rows, pairs) of a message, after checking its length; every pair has a row.
        Raises MessageError.
        """
        num_rows, num_pairs = read_head(message, layer, LOW_LATENCY, peer)
        check_size(
            message, self._codec.layout.dispatch_bytes("low_latency", num_rows, num_pairs), peer
        )
        return num_rows, num_pairs

    def lists(self, message: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Return (row [P], expert slot [P])."""
        return torch.arange(num_pairs, device=message.device), self._heads(message, num_pairs)[:, 1]

    def decode(self, message: Tensor, num_pairs: int, out_ND: Tensor) -> None:
        start = HEAD_BYTES + MESSAGE_HEAD_BYTES
        self._codec.decode(message, start, self._codec.layout.message_bytes, out_ND)

    def _heads(self, message: Tensor, num_pairs: int) -> Tensor:
        """Return the messages as int32, one per row. Buffers and sizes are multiples of 4, so this
        is a view.
        """
        messages = message[HEAD_BYTES : HEAD_BYTES + num_pairs * self._codec.layout.message_bytes]
        return messages.view(torch.int32).view(num_pairs, self._codec.layout.message_bytes // 4)
