"""Dispatch of tokens to the ranks of their experts, and combine of the results; each has separate calls
to start and to finish.

    handle = comm.dispatch(x_TD, ids_TK, layer)      tokens leave
    received = handle.finish_dispatch()              x_ND and (row, expert slot) of M pairs, of all ranks, own included
    handle.start_combine(y_MD)                       the experts' outputs leave, a row per pair
    routed_TD = handle.finish_combine(weights_TK)    weighted and added here, FP32, by ascending expert id

Results are bit-identical for every number of ranks, placement, mode and order of arrival, if the
experts' outputs are: every row, the rank's own included, passes through the same codec, and only the
source adds rows. Tokens per expert slot are counted while unpacking. Does not depend on schedules or
time; the group handles connections and deadlines.

Shapes: T tokens, D hidden, K chosen, N received rows, M received pairs, P pairs sent, R ranks of
the deployment, L MoE layers, S expert slots of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hadal.comm.codec import Codec, MessageError
from hadal.comm.group import Exchange, Group, Interval
from hadal.comm.installed import NO_PLACEMENT, InstalledPlacement
from hadal.comm.layout import MODES, MessageLayout
from hadal.comm.low_latency import Buffers, LowLatencyMode
from hadal.comm.normal import NormalMode
from hadal.core.errors import InvariantError
from hadal.core.placement import Placement
from hadal.core.plans import NO_LINK_BYTES, LinkBytes
from hadal.kernels.codec import MAX_TOP_K
from hadal.kernels.message import Arrived, unpack
from hadal.kernels.route import route
from hadal.reference.route import Route

MAX_LIVE = 2
"""Maximum number of live handles: one per micro-batch."""


@dataclass(frozen=True, slots=True)
class Received:
    """Input of a rank's experts. Valid until the handle is finished: then the memory is reused."""

    x_ND: Tensor
    """FP32 rows: the rank's own first, then each peer's, by ascending rank."""
    row_M: Tensor
    """int64 index into x_ND, per pair."""
    expert_slot_M: Tensor
    """int64 local expert slot of this rank, per pair."""


class ExpertComm:
    """One rank's part of expert parallelism. `group` None: a single rank with all experts.

    Raises ValueError if dispatch_format, mode or top_k is invalid. Not thread-safe: one compute
    thread calls it.
    """

    def __init__(
        self,
        group: Group | None,
        *,
        hidden_size: int,
        top_k: int,
        dispatch_format: str,
        mode: str,
        max_tokens: int,
        device: str = "cpu",
        near: range | None = None,
    ) -> None:
        """`near`: ranks of this rank's node; None: all ranks."""
        if mode not in MODES:
            raise ValueError(f"{mode!r} is not a mode; use one of {', '.join(MODES)}.")
        if not 1 <= top_k <= MAX_TOP_K or max_tokens < 1:
            raise ValueError(
                f"top_k {top_k} must be 1 to {MAX_TOP_K}, and max_tokens {max_tokens} at least 1."
            )
        self.layout = MessageLayout(dispatch_format, hidden_size)
        self.mode = mode
        self.rank = 0
        self.peers: tuple[int, ...] = ()
        self._group = group
        self._top_k = top_k
        self._max_tokens = max_tokens
        self._device = device
        self._codec = Codec(self.layout)
        self._normal = NormalMode(self._codec, device)
        self._low_latency: LowLatencyMode | None = None
        self._installed = InstalledPlacement(NO_PLACEMENT, (0,), device)
        self._near = near
        self._link_bytes: LinkByteCount | None = None
        """None if there are no peers."""
        self._free: list[int] = []

    def install(self, placement: Placement) -> None:
        """Use a placement and the group's current members; call it after each `group.form`. Earlier
        handles become void.

        Raises ValueError if an expert has no living replica, or if a rank holds one twice or is no
        member.
        """
        self.rank = self._group.rank if self._group is not None else 0
        members = self._group.members if self._group is not None else (0,)
        self.peers = tuple(member for member in members if member != self.rank)
        self._installed = InstalledPlacement(placement, members, self._device)
        self._free = list(range(MAX_LIVE))
        near = range(placement.num_ranks) if self._near is None else self._near
        self._link_bytes = (
            LinkByteCount(self.layout, self.mode, self.rank, self.peers, near)
            if self.peers
            else None
        )
        self._low_latency = None
        if self.mode == "low_latency" and self.peers:
            # Sized for all expert slots, filled or not: `install_layer` may fill more of them.
            self._low_latency = LowLatencyMode(
                self._codec,
                self._device,
                max_tokens=self._max_tokens,
                top_k=self._top_k,
                peers=self.peers,
                num_held=placement.num_expert_slots,
            )

    def install_layer(self, layer: int, placement: Placement) -> None:
        """Replace one MoE layer's placement by another with equally many expert slots, between two
        steps. The layer's counts restart at 0.

        Raises ValueError as `install`; nothing has changed then.
        """
        self._installed.install_layer(layer, placement)

    def take_counts(self) -> Tensor:
        """Return the pairs received per own expert slot and MoE layer since the last call, int64
        [L, S] on the CPU.
        """
        return self._installed.counts.take()

    def take_link_bytes(self) -> LinkBytes:
        """Return the bytes of this rank's tokens to its peers and back, since the last call or the
        start of the formation.
        """
        return NO_LINK_BYTES if self._link_bytes is None else self._link_bytes.take()

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, layer: int) -> Handle:
        """Send every token to the ranks of its experts; `layer` counts MoE layers. T may be 0.

        x_TD and ids_TK must not change before finish_dispatch and finish_combine, which read the
        rank's own rows from them. Raises ValueError if an id is out of range, shapes do not fit, or
        T exceeds max_tokens in low-latency mode.
        """
        num_tokens = x_TD.shape[0]
        if tuple(x_TD.shape) != (num_tokens, self.layout.hidden_size) or tuple(ids_TK.shape) != (
            num_tokens,
            self._top_k,
        ):
            raise ValueError(
                f"x {list(x_TD.shape)} and ids {list(ids_TK.shape)} do not fit hidden size "
                f"{self.layout.hidden_size} and top {self._top_k}."
            )
        if self.mode == "low_latency" and num_tokens > self._max_tokens:
            raise ValueError(
                f"low-latency buffers cannot hold {num_tokens} tokens, only {self._max_tokens}."
            )
        if not self._free:
            raise InvariantError(f"{MAX_LIVE} dispatches are live already: finish one first.")
        way = route(ids_TK, self._installed.replicas[layer], layer + self.rank)
        if self._link_bytes is not None:
            self._link_bytes.add(way)
        index = self._free.pop(0)
        handle = Handle(self, index, x_TD, ids_TK, way, layer)
        handle._send()
        return handle

    def abandon(self) -> None:
        """Drop the live handles after a step failed. With peers, the formation is over too."""
        self._free = list(range(MAX_LIVE))


class Handle:
    """One dispatch and its combine. Call finish_dispatch, start_combine, finish_combine in turn."""

    def __init__(
        self, comm: ExpertComm, index: int, x_TD: Tensor, ids_TK: Tensor, way: Route, layer: int
    ) -> None:
        self._comm = comm
        self._index = index
        self._x_TD = x_TD.contiguous()
        self._ids_TK = ids_TK
        self._route = way
        self._layer = layer
        self._buffers: Buffers | None = None
        self._exchange: Exchange | None = None
        self._num_from: dict[int, int] = {}
        """Rank -> pairs received from it, in Received's order."""
        self._back: Tensor | None = None
        self._outputs: Tensor | None = None
        """Outputs of the experts while they are sent: FP32 rows are sent without a copy."""
        self.dispatch_interval: Interval | None = None
        """Time on the link; None without peers."""
        self.combine_interval: Interval | None = None

    def _send(self) -> None:
        comm = self._comm
        if not comm.peers:
            return
        assert comm._group is not None
        what = (self._x_TD, self._route, comm._installed.num_expert_slots, self._layer, comm.peers)
        if comm._low_latency is not None:
            self._buffers = comm._low_latency.sets[self._index]
            self._exchange = comm._group.exchange(
                comm._low_latency.pack(self._buffers, *what), self._buffers.recv
            )
        else:
            self._exchange = comm._group.exchange(comm._normal.pack(self._index, *what))

    def finish_dispatch(self) -> Received:
        """Wait for the peers' tokens and return the experts' input. Raises PeerLost, or
        MessageError if a peer is in another step.
        """
        comm = self._comm
        messages: Mapping[int, Tensor] = {}
        if self._exchange is not None:
            messages = self._exchange.wait()
            self.dispatch_interval = self._exchange.interval
        mode = comm._low_latency or comm._normal
        arrived: list[Arrived] = []
        self._num_from = {comm.rank: self._route.num_pairs_R[comm.rank]}
        for peer in comm.peers:
            rows, pairs = mode.read(messages[peer], self._layer, peer)
            arrived.append((messages[peer], rows, pairs))
            self._num_from[peer] = pairs
        return self._unpack(mode, arrived)

    def _unpack(self, mode: NormalMode | LowLatencyMode, arrived: list[Arrived]) -> Received:
        """Decode the rank's own rows and the received ones into one tensor."""
        comm, own = self._comm, self._own_part()
        token_N, row_P, expert_slot_P = own
        own_rows, own_pairs = token_N.shape[0], row_P.shape[0]
        num_rows = own_rows + sum(rows for _, rows, _ in arrived)
        num_pairs = own_pairs + sum(pairs for _, _, pairs in arrived)
        hidden = comm.layout.hidden_size
        if self._buffers is not None:
            x_ND = self._buffers.decoded_ND[:num_rows]
        else:
            decoded = comm._normal.buffer(self._index, "decoded", num_rows * 4 * hidden)
            x_ND = decoded.view(torch.float32).view(num_rows, hidden)
        row_M = torch.empty(num_pairs, dtype=torch.int64, device=comm._device)
        expert_slot_M = torch.empty_like(row_M)
        if not unpack(
            arrived,
            self._x_TD,
            own,
            mode.message_format,
            comm._installed.counts.rows_S[self._layer],
            row_M,
            expert_slot_M,
            x_ND,
        ):
            self._own_rows(token_N, x_ND[:own_rows])
            row_M[:own_pairs], expert_slot_M[:own_pairs] = row_P, expert_slot_P
            row, pair = own_rows, own_pairs
            for message, rows, pairs in arrived:
                mode.decode(message, pairs, x_ND[row : row + rows])
                row_P, expert_slot_P = mode.lists(message, pairs)
                row_M[pair : pair + pairs], expert_slot_M[pair : pair + pairs] = (
                    row_P + row,
                    expert_slot_P,
                )
                row, pair = row + rows, pair + pairs
            comm._installed.counts.add(self._layer, expert_slot_M)
        return Received(x_ND, row_M, expert_slot_M)

    def _own_part(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (token of every row, row of every pair, expert slot of every pair) for the rank's
        own tokens and experts.
        """
        way, rank = self._route, self._comm.rank
        row, pair = sum(way.num_rows_R[:rank]), sum(way.num_pairs_R[:rank])
        pairs = slice(pair, pair + way.num_pairs_R[rank])
        return (
            way.token_N[row : row + way.num_rows_R[rank]],
            way.row_P[pairs],
            way.expert_slot_P[pairs],
        )

    def _own_rows(self, token_N: Tensor, out_ND: Tensor) -> None:
        """Write the rank's own rows after encoding and decoding, as for rows of a peer, so that
        results do not depend on the number of ranks.
        """
        comm = self._comm
        message = torch.empty(
            len(token_N) * comm.layout.row_bytes, dtype=torch.uint8, device=comm._device
        )
        comm._codec.encode(self._x_TD, token_N, message, 0, comm.layout.row_bytes)
        comm._codec.decode(message, 0, comm.layout.row_bytes, out_ND)

    def start_combine(self, y_MD: Tensor) -> None:
        """Send the experts' unweighted outputs back, in the order of Received's pairs. y_MD must
        not change afterwards.
        """
        comm, way, back_bytes = self._comm, self._route, self._comm.layout.back_bytes
        num_received = sum(self._num_from.values())
        if y_MD.shape[0] != num_received:
            raise ValueError(f"{y_MD.shape[0]} outputs do not fit {num_received} received pairs.")
        y_MD = self._outputs = y_MD.contiguous()
        num_pairs = way.at_TK.numel()
        if self._buffers is not None:
            self._back = self._buffers.recv_back[: num_pairs * back_bytes]
        else:
            self._back = comm._normal.buffer(self._index, "recv_back", num_pairs * back_bytes)
        slices, at = {}, 0
        for rank, count in enumerate(way.num_pairs_R):
            slices[rank] = self._back[at : at + count * back_bytes]
            at += count * back_bytes
        own_pairs = self._num_from[comm.rank]
        comm._codec.encode_back(y_MD[:own_pairs], slices[comm.rank])
        if not comm.peers:
            return
        assert comm._group is not None
        message = self._outgoing(y_MD[own_pairs:])
        sends, at = {}, 0
        for peer in comm.peers:
            size = self._num_from[peer] * back_bytes
            sends[peer] = message[at : at + size]
            at += size
        self._exchange = comm._group.exchange(sends, {peer: slices[peer] for peer in comm.peers})

    def _outgoing(self, y_PD: Tensor) -> Tensor:
        """Return the peers' rows as bytes; FP32 without a copy."""
        comm = self._comm
        if comm.layout.back_format == "fp32":
            return y_PD.view(torch.uint8).flatten()
        size = y_PD.shape[0] * comm.layout.back_bytes
        if self._buffers is not None:
            message = self._buffers.send_back[:size]
        else:
            message = comm._normal.buffer(self._index, "send_back", size)
        comm._codec.encode_back(y_PD, message)
        return message

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        """Wait for the experts' outputs and return their weighted sums, routed [T, D], FP32. Raises
        PeerLost, or MessageError if a peer returned another number of bytes.
        """
        comm = self._comm
        assert self._back is not None
        if comm.peers:
            assert self._exchange is not None
            arrived = self._exchange.wait()
            self.combine_interval = self._exchange.interval
            for peer in comm.peers:
                num_bytes = arrived[peer].numel()
                expected_bytes = comm.layout.combine_bytes(self._route.num_pairs_R[peer])
                if num_bytes != expected_bytes:
                    raise MessageError(
                        f"rank {peer} returned {num_bytes} bytes; {expected_bytes} were expected."
                    )
        routed_TD = comm._codec.combine(
            self._back, self._route.at_TK, self._ids_TK, weights_TK.float().contiguous()
        )
        self._back = self._exchange = self._outputs = None
        comm._free.append(self._index)
        return routed_TD


class LinkByteCount:
    """Counter of the bytes of a rank's tokens on the links of one formation, within its node and
    beyond it.

    Adding is cheap: a layer adds a few integers that packing has computed anyway, and bytes are
    computed once per step. `near`: ranks of this rank's node, contiguous, including itself.
    """

    def __init__(
        self, layout: MessageLayout, mode: str, rank: int, peers: Sequence[int], near: range
    ) -> None:
        self._layout = layout
        self._mode = mode
        self._rank = rank
        self._near = slice(near.start, near.stop)
        num_near = sum(peer in near for peer in peers)
        self._num_peers = num_near, len(peers) - num_near
        self._clear()

    def _clear(self) -> None:
        self._num_dispatches = 0
        self._near_rows = self._near_pairs = self._rows = self._pairs = 0

    def add(self, way: Route) -> None:
        """Add a dispatch and its combine."""
        pairs, rank = way.num_pairs_R, self._rank
        self._num_dispatches += 1
        self._near_pairs += sum(pairs[self._near]) - pairs[rank]
        self._pairs += way.at_TK.numel() - pairs[rank]
        if self._mode == "normal":  # Otherwise one row per pair.
            rows = way.num_rows_R
            self._near_rows += sum(rows[self._near]) - rows[rank]
            self._rows += sum(rows) - rows[rank]

    def take(self) -> LinkBytes:
        """Return the bytes since the last call."""
        near, far = (num_peers * self._num_dispatches for num_peers in self._num_peers)
        rows, pairs = self._rows - self._near_rows, self._pairs - self._near_pairs
        layout, mode = self._layout, self._mode
        link_bytes = LinkBytes(
            (
                layout.dispatch_bytes(mode, self._near_rows, self._near_pairs, near),
                layout.dispatch_bytes(mode, rows, pairs, far),
            ),
            (layout.combine_bytes(self._near_pairs), layout.combine_bytes(pairs)),
        )
        self._clear()
        return link_bytes
