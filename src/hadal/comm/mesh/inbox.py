"""Destinations of the payloads of a formation's exchanges: buffers of an exchange that is posted,
or our own memory until it is.

Does not depend on sockets. All methods that change state are called under the group's lock, so they
do not wait; MeshExchange.wait does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hadal.comm.group import Interval
from hadal.comm.mesh.frames import Frame, FrameError

MAX_IN_FLIGHT = 8
"""Maximum number of exchanges posted and not waited for."""
MAX_EARLY_BYTES = 64 << 20
"""Maximum number of bytes held for exchanges not posted here yet, over all peers; beyond it, frames
wait in the socket.
"""


class TooLargeError(Exception):
    """A payload does not fit its fixed buffer."""

    def __init__(self, rank: int, num_bytes: int, room: int) -> None:
        super().__init__(f"rank {rank} sent {num_bytes} bytes for a buffer of {room}")


class MeshExchange:
    """One running exchange. Its fields change only under the group's lock."""

    def __init__(
        self,
        peers: tuple[int, ...],
        recvs: Mapping[int, Tensor] | None,
        wait_for: Callable[[MeshExchange], None],
    ) -> None:
        self.sequence = -1
        self.recvs = recvs
        self.received: dict[int, Tensor] = {}
        """Rank -> its payload, incomplete while the rank is in `missing`."""
        self.missing = set(peers)
        self.peer_to_arrived_s: dict[int, float] = {}
        self.num_unsent = len(peers)
        self.start_s = self.end_s = time.perf_counter()
        self._peers = peers
        self._wait_for = wait_for

    @property
    def is_done(self) -> bool:
        return not self.missing and not self.num_unsent

    def wait(self) -> dict[int, Tensor]:
        """Return each peer's bytes; for fixed buffers, the filled prefix. Raises PeerLost."""
        self._wait_for(self)
        return {peer: self.received[peer] for peer in self._peers}

    @property
    def interval(self) -> Interval:
        """Return the time from posting to the last byte received, even if no thread waited for it."""
        return Interval(self.start_s, self.end_s)


class Inbox:
    """The exchanges of one formation, by their sequence number."""

    def __init__(self) -> None:
        self.next_sequence = 0
        self._exchanges: dict[int, MeshExchange] = {}
        self._early: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        """(sequence, rank) -> payload of an exchange not posted yet, and whether it is complete."""
        self._early_bytes = 0

    def post(self, exchange: MeshExchange) -> None:
        """Assign the next number to an exchange, and deliver payloads that arrived early. Raises
        TooLargeError; ValueError if too many are in flight.
        """
        if len(self._exchanges) >= MAX_IN_FLIGHT:
            raise ValueError(f"at most {MAX_IN_FLIGHT} exchanges can be in flight.")
        exchange.sequence = self.next_sequence
        self.next_sequence += 1
        self._exchanges[exchange.sequence] = exchange
        for peer in tuple(exchange.missing):
            found = self._early.get((exchange.sequence, peer))
            if found is not None and found[1]:  # If it is incomplete, `complete` delivers it.
                self._deliver(exchange, peer)

    def holds(self, exchange: MeshExchange) -> bool:
        return self._exchanges.get(exchange.sequence) is exchange

    def retire(self, exchange: MeshExchange) -> None:
        """Remove an exchange that was waited for."""
        if self.holds(exchange):
            del self._exchanges[exchange.sequence]

    def is_full_for(self, frame: Frame) -> bool:
        """Return whether the frame is early and the early payloads leave no space for it."""
        is_early = frame.sequence not in self._exchanges
        return (
            is_early
            and self._early_bytes > 0
            and self._early_bytes + frame.num_bytes > MAX_EARLY_BYTES
        )

    def memory_for(self, rank: int, frame: Frame) -> memoryview:
        """Return the memory for a payload. Raises TooLargeError; FrameError if invalid."""
        exchange = self._exchanges.get(frame.sequence)
        if exchange is None:
            return self._early_memory_for(rank, frame)
        if rank not in exchange.missing or rank in exchange.received:
            raise FrameError(f"a second payload for exchange {frame.sequence}")
        if exchange.recvs is None:
            tensor = torch.empty(frame.num_bytes, dtype=torch.uint8)
        else:
            tensor = _prefix(exchange.recvs[rank], rank, frame.num_bytes)
        exchange.received[rank] = tensor
        return bytes_of(tensor)

    def _early_memory_for(self, rank: int, frame: Frame) -> memoryview:
        # A peer cannot be further ahead than its exchanges in flight: it then waits for us.
        if not self.next_sequence <= frame.sequence <= self.next_sequence + MAX_IN_FLIGHT:
            raise FrameError(
                f"data of exchange {frame.sequence}, while {self.next_sequence} is next"
            )
        if (frame.sequence, rank) in self._early:
            raise FrameError(f"a second payload for exchange {frame.sequence}")
        self._early_bytes += frame.num_bytes
        tensor = torch.empty(frame.num_bytes, dtype=torch.uint8)
        self._early[frame.sequence, rank] = (tensor, False)
        return bytes_of(tensor)

    def complete(self, rank: int, frame: Frame) -> None:
        """Handle a complete payload in the memory from `memory_for`. Raises TooLargeError."""
        exchange = self._exchanges.get(frame.sequence)
        key = (frame.sequence, rank)
        if exchange is None:
            self._early[key] = (self._early[key][0], True)
        elif key in self._early:
            self._deliver(exchange, rank)
        else:
            _arrived(exchange, rank)

    def _deliver(self, exchange: MeshExchange, rank: int) -> None:
        early, _ = self._early.pop((exchange.sequence, rank))
        self._early_bytes -= early.numel()
        if exchange.recvs is not None:
            buffer = _prefix(exchange.recvs[rank], rank, early.numel())
            # Not by torch: a buffer made in inference mode may only be written in that mode, and
            # modes are per thread.
            bytes_of(buffer)[:] = bytes_of(early)
            early = buffer
        exchange.received[rank] = early
        _arrived(exchange, rank)


def _arrived(exchange: MeshExchange, rank: int) -> None:
    exchange.missing.discard(rank)
    exchange.end_s = exchange.peer_to_arrived_s[rank] = time.perf_counter()


def bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _prefix(buffer: Tensor, rank: int, num_bytes: int) -> Tensor:
    if num_bytes > buffer.numel():
        raise TooLargeError(rank, num_bytes, buffer.numel())
    return buffer[:num_bytes]
