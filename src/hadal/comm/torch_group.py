"""Exchange between the ranks of a unit over torch.distributed: gloo between CPUs, NCCL between GPUs.

Each formation has its own process group, named after its members. Members meet in a store: on one
host a FileStore in the unit's folder, between hosts the TCPStore of the lowest rank. They wait
there for each other; an abort ends the wait. Torch then connects them, for its whole deadline if a
member dies at that moment. Everything is sent as uint8, because gloo does not support float8. An
exchange sends its counts, then its bytes; `recvs` only sets where the bytes are written.

    gloo   two process groups, one per direction between two ranks: a single one is half duplex. Our own thread
           runs sends and receives, in order, so that they overlap computation. CUDA tensors pass through pinned
           memory.
    nccl   all_to_all_single on a side stream; the host waits for the counts, then for nothing until `wait`.

After a peer is killed, gloo sometimes leaves a survivor waiting for its timeout (comm/mesh does not);
`abort` from outside ends such a wait within POLL_S. Does not depend on tokens.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from hadal.comm.group import Interval, PeerLost
from hadal.core.handshake import is_near
from hadal.core.plans import NO_WAIT, Member, Waited

MAX_IN_FLIGHT = 8
JOIN_TIMEOUT_S = 2.0
"""Time that an aborted formation's thread may take to end. After it the thread is left alone; its
connections are closed.
"""
POLL_S = 0.05
GATHER_POLL_S = 0.005
_COUNT_TAG, _DATA_TAG, _ABORT_TAG = 1, 2, 3

log = logging.getLogger(__name__)


class TorchExchange:
    """One running exchange. `is_done` is set when it has ended or failed; with NCCL, when its bytes
    are queued, and `ready` shows the end.
    """

    def __init__(
        self, group: TorchGroup, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None
    ) -> None:
        self.sends = dict(sends)
        self.recvs = None if recvs is None else dict(recvs)
        self.received: dict[int, Tensor] = {}
        self.error: PeerLost | None = None
        self.is_done = threading.Event()
        self.ready: torch.cuda.Event | None = None
        """NCCL event on the side stream, recorded after the bytes."""
        self.start_s = self.end_s = time.perf_counter()
        self._group = group

    def wait(self) -> dict[int, Tensor]:
        """Return each peer's bytes. Raises PeerLost."""
        self._group.await_exchange(self)
        return {rank: self.received[rank] for rank in sorted(self.received)}

    @property
    def interval(self) -> Interval:
        return Interval(self.start_s, self.end_s)


class TorchGroup:
    """One rank's end of a process group. `backend` is "gloo" or "nccl"; `folder` is shared by the
    unit's ranks.

    `form`, `exchange` and `wait` are called by one thread, `abort`, `lost` and `close` by any.
    """

    def __init__(
        self,
        rank: int,
        *,
        backend: str,
        folder: Path,
        deadline_s: float,
        device: str = "cpu",
        host: str = "127.0.0.1",
    ) -> None:
        """`host`: the address that gloo binds and, unless it is a loopback address, that of this
        rank's store. Traffic between hosts is neither authenticated nor encrypted.

        Raises ValueError if the backend is unavailable.
        """
        if backend not in ("gloo", "nccl"):
            raise ValueError(
                f"the backend of torch.distributed is {backend!r}; it must be gloo or nccl."
            )
        if backend == "nccl" and not torch.cuda.is_available():
            raise ValueError("nccl needs a CUDA device, and torch sees none; use gloo or tcp.")
        if backend == "nccl" and torch.device(device).index is None:
            raise ValueError(
                f"nccl needs a device with its index, such as cuda:0; it got {device!r}."
            )
        self.rank = rank
        self.members: tuple[int, ...] = (rank,)
        self.formation = -1
        self.deadline_s = deadline_s
        self._backend = backend
        self._host = host
        self._place = MeetingPlace(rank, folder, host)
        self.port = self._place.port
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._failure: PeerLost | None = PeerLost((), "no formation was formed")
        self._is_aborted = False
        """True if this formation was given up, perhaps while being formed."""
        self._work: queue.Queue[TorchExchange | None] = queue.Queue(MAX_IN_FLIGHT)
        self._thread: threading.Thread | None = None
        self._link: GlooLink | NcclLink | None = None

    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Leave the earlier group and connect to these members. Raises PeerLost naming the members
        that did not arrive in the store, or all others if connecting failed: torch does not report
        which rank is missing.
        """
        if formation <= self.formation:
            raise ValueError(f"formation {formation} is not newer than {self.formation}.")
        ranks = tuple(sorted(member.rank for member in members))
        if self.rank not in ranks:
            raise ValueError(f"rank {self.rank} is not among the members of formation {formation}.")
        self._leave("formed anew")
        self.formation, self.members = formation, ranks
        self._is_aborted = False
        others = tuple(rank for rank in ranks if rank != self.rank)
        try:
            if others:
                store = self._place.meet(
                    formation, members, self.deadline_s, lambda: self._is_aborted
                )
                self._link = self._connect(store, ranks)
        except (RuntimeError, ValueError) as error:
            raise PeerLost(others, f"not reached within {self.deadline_s} s: {error}") from error
        self._work = queue.Queue(MAX_IN_FLIGHT)
        with self._lock:
            if self._is_aborted:
                raise PeerLost((), "aborted")
            self._failure = None
        self._thread = threading.Thread(
            target=self._run,
            args=(self._work, self._link),
            name=f"torch-group-{self.rank}",
            daemon=True,
        )
        self._thread.start()

    def _connect(self, store: Store, ranks: tuple[int, ...]) -> GlooLink | NcclLink:
        if self._backend == "nccl":
            return NcclLink(store, self.rank, ranks, self.deadline_s, self._device)
        return GlooLink(store, self.rank, ranks, self.deadline_s, self._device, self._host)

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> TorchExchange:
        """Start an exchange, as in Group."""
        self._raise_failure()
        others = {rank for rank in self.members if rank != self.rank}
        if sends.keys() != others or (recvs is not None and recvs.keys() != others):
            raise ValueError(
                f"an exchange needs one tensor for each of the ranks {sorted(others)}."
            )
        exchange = TorchExchange(self, sends, recvs)
        if not others:
            exchange.is_done.set()
        elif isinstance(self._link, NcclLink):
            self._do(self._link, exchange)  # Queued on the device: the host continues.
        else:
            try:
                self._work.put_nowait(exchange)
            except queue.Full:
                raise ValueError(f"at most {MAX_IN_FLIGHT} exchanges can be in flight.") from None
        return exchange

    def await_exchange(self, exchange: TorchExchange) -> None:
        """Return when the exchange is done. Raises PeerLost."""
        deadline_s = time.monotonic() + self.deadline_s
        while not exchange.is_done.wait(POLL_S):
            self._raise_failure()
            if time.monotonic() > deadline_s:
                others = tuple(rank for rank in self.members if rank != self.rank)
                self._fail(PeerLost(others, f"nothing within {self.deadline_s} s"))
        if exchange.error is not None:
            # The first failure: errors of aborted operations follow from it.
            raise self._failure or exchange.error
        if exchange.ready is not None:
            while not exchange.ready.query():  # type: ignore[no-untyped-call]
                self._raise_failure()
                if time.monotonic() > deadline_s:
                    self._fail(PeerLost((), f"NCCL: nothing within {self.deadline_s} s"))
                time.sleep(0)
            exchange.end_s = time.perf_counter()

    def abort(self) -> None:
        self._fail(PeerLost((), "aborted"))

    def lost(self) -> tuple[int, ...]:
        """Return an empty tuple: torch.distributed detects nothing without an exchange."""
        return ()

    def take_waits(self) -> Waited:
        """Return no times: torch.distributed does not report arrivals."""
        return NO_WAIT

    def close(self) -> None:
        self._leave("closed")

    def _do(self, link: GlooLink | NcclLink, exchange: TorchExchange) -> None:
        try:
            if link is self._link:
                self._raise_failure()
            link.run(exchange)
        except PeerLost as error:
            exchange.error = error
        except (RuntimeError, ValueError) as error:
            exchange.error = PeerLost((), f"{self._backend}: {error}")
        if exchange.error is not None and link is self._link:  # Otherwise the formation is over.
            self._fail(exchange.error)
        exchange.is_done.set()

    def _run(
        self, work: queue.Queue[TorchExchange | None], link: GlooLink | NcclLink | None
    ) -> None:
        while (exchange := work.get()) is not None:
            assert link is not None
            self._do(link, exchange)

    def _fail(self, error: PeerLost) -> None:
        with self._lock:
            self._is_aborted = True
            if self._failure is not None:
                return
            self._failure = error
        link = self._link
        if link is not None:
            link.abort()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _leave(self, reason: str) -> None:
        self._fail(PeerLost((), reason))
        thread, self._thread = self._thread, None
        if thread is not None:
            until_s = time.monotonic() + JOIN_TIMEOUT_S
            # Queued exchanges fail one by one, which makes space in the queue for the end mark.
            while thread.is_alive() and time.monotonic() < until_s:
                try:
                    self._work.put(None, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still waits for an exchange of the previous formation", thread.name)
        link, self._link = self._link, None
        if link is not None:
            link.close()


class MeetingPlace:
    """Store in which the members of a formation meet: a file in the unit's folder on one host, the
    lowest rank's TCPStore between hosts.
    """

    def __init__(self, rank: int, folder: Path, host: str) -> None:
        self.folder = folder
        self._rank = rank
        self._own_store = None if is_near(host) else _listening_store(host)
        self.port = self._own_store.port if self._own_store else 0
        """Port of this rank's store; 0 if members meet in a file."""

    def meet(
        self,
        formation: int,
        members: Sequence[Member],
        timeout_s: float,
        is_aborted: Callable[[], bool],
    ) -> Store:
        """Wait until all members have arrived. Raises PeerLost naming the missing ones."""
        # A restarted leader counts formations from 1 again, so only the members' epochs make the
        # name unique.
        named = sorted((member.rank, member.epoch) for member in members)
        digest = hashlib.blake2s(repr(named).encode(), digest_size=6).hexdigest()
        timeout = timedelta(seconds=timeout_s)
        store = self._store(f"formation-{formation}-{digest}", members, timeout)
        store.set(f"here-{self._rank}", "")
        missing = [rank for rank, _ in named]
        deadline_s = time.monotonic() + timeout_s
        while missing := [rank for rank in missing if not store.check([f"here-{rank}"])]:
            if is_aborted():
                raise PeerLost((), "aborted")
            if time.monotonic() > deadline_s:
                raise PeerLost(missing, f"did not arrive within {timeout_s} s")
            time.sleep(GATHER_POLL_S)
        return store

    def _store(self, name: str, members: Sequence[Member], timeout: timedelta) -> Store:
        first = min(members, key=lambda member: member.rank)
        store: Store
        if self._own_store is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            store = FileStore(str(self.folder / name), len(members))
        elif first.rank == self._rank:
            store = PrefixStore(name, self._own_store)
        else:
            shared = TCPStore(first.host, first.port, is_master=False, timeout=timeout)
            store = PrefixStore(name, shared)
        store.set_timeout(timeout)
        return store


class GlooLink:
    """Two gloo process groups: one for sends from lower to higher ranks, one for the reverse."""

    def __init__(
        self,
        store: Store,
        rank: int,
        members: tuple[int, ...],
        deadline_s: float,
        device: torch.device,
        host: str,
    ) -> None:
        self._rank = rank
        self._index = {member: index for index, member in enumerate(members)}
        self._deadline_s = deadline_s
        self._device = device
        self._is_aborted = False
        # Otherwise gloo uses the address to which the host's name resolves.
        nic = ProcessGroupGloo.create_device(hostname=host)
        self._groups: list[Any] = []
        for name in ("up", "down"):
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [nic], timedelta(seconds=deadline_s)
            store_of = PrefixStore(name, store)
            self._groups.append(
                ProcessGroupGloo(store_of, members.index(rank), len(members), options)
            )

    def run(self, exchange: TorchExchange) -> None:
        """Exchange counts, then bytes. Raises PeerLost."""
        peers = sorted(exchange.sends)
        counts = {peer: torch.empty(1, dtype=torch.int64) for peer in peers}
        sizes = {peer: torch.tensor([exchange.sends[peer].numel()]) for peer in peers}
        self._move(sizes, counts, _COUNT_TAG)
        into: dict[int, Tensor] = {}
        for peer in peers:
            num_bytes = int(counts[peer].item())
            if exchange.recvs is None:
                into[peer] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            elif num_bytes <= exchange.recvs[peer].numel():
                into[peer] = exchange.recvs[peer][:num_bytes]
            else:
                room = exchange.recvs[peer].numel()
                raise PeerLost((), f"rank {peer} sent {num_bytes} bytes for a buffer of {room}")
        staged = {peer: self._stage(tensor) for peer, tensor in into.items()}
        sends = {
            peer: self._stage(tensor, is_filled=True) for peer, tensor in exchange.sends.items()
        }
        self._move(sends, staged, _DATA_TAG)
        for peer, tensor in into.items():
            if tensor is not staged[peer]:
                tensor.copy_(staged[peer])
        exchange.end_s = time.perf_counter()
        exchange.received = into

    def _stage(self, tensor: Tensor, is_filled: bool = False) -> Tensor:
        """Return the tensor, or pinned memory for it: gloo moves CPU memory."""
        if tensor.device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor) if is_filled else pinned

    def _move(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> None:
        works = []  # Receives first: a gloo send moves nothing before its receive is posted.
        for peer, tensor in recvs.items():
            if tensor.numel():
                group = self._groups[0 if peer < self._rank else 1]
                works.append((peer, group.recv([tensor], self._index[peer], tag)))
        for peer, tensor in sends.items():
            if tensor.numel():
                group = self._groups[0 if self._rank < peer else 1]
                works.append((peer, group.send([tensor], self._index[peer], tag)))
        for peer, work in works:
            if self._is_aborted:
                raise PeerLost((), "aborted")
            try:
                work.wait(timedelta(seconds=self._deadline_s))
            except RuntimeError as error:
                raise PeerLost(() if self._is_aborted else (peer,), f"gloo: {error}") from error

    def abort(self) -> None:
        """Close every connection, so that all waits here, and those of peers for this rank, fail at
        once.

        ProcessGroupGloo.abort does not end a receive in progress. A receive that times out closes
        all connections of its group, so this posts one that is never answered.
        """
        if self._is_aborted:
            return
        self._is_aborted = True
        others = [index for index in self._index.values() if index != self._index[self._rank]]
        for group in self._groups:
            try:
                group.recv([torch.empty(1, dtype=torch.uint8)], others[0], _ABORT_TAG).wait(
                    timedelta(milliseconds=1)
                )
            except RuntimeError as error:
                log.debug("gloo closed its connections: %s", error)

    def close(self) -> None:
        self._groups.clear()


class NcclLink:
    """One NCCL communicator: the process's default group of torch.distributed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        members: tuple[int, ...],
        deadline_s: float,
        device: torch.device,
    ) -> None:
        self._members = members
        self._rank = rank
        self._device = device
        self._is_aborted = False
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        dist.init_process_group(
            "nccl",
            store=store,
            rank=members.index(rank),
            world_size=len(members),
            timeout=timedelta(seconds=deadline_s),
            device_id=device,
        )

    def run(self, exchange: TorchExchange) -> None:
        """Queue the exchange on the side stream. Returns when the counts are known."""
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            parts = [exchange.sends.get(rank) for rank in self._members]
            sizes = [0 if part is None else part.numel() for part in parts]
            sent = torch.tensor(sizes, device=self._device)
            got = torch.empty_like(sent)
            dist.all_to_all_single(got, sent)
            counts: list[int] = got.tolist()
            if self._is_aborted:
                raise PeerLost((), "aborted")  # The counts are uninitialised memory.
            for rank, count in zip(self._members, counts, strict=True):
                if (
                    exchange.recvs is not None
                    and rank != self._rank
                    and count > exchange.recvs[rank].numel()
                ):
                    room = exchange.recvs[rank].numel()
                    raise PeerLost((), f"rank {rank} sent {count} bytes for a buffer of {room}")
            outgoing = torch.cat([part for part in parts if part is not None])
            incoming = torch.empty(sum(counts), dtype=torch.uint8, device=self._device)
            dist.all_to_all_single(incoming, outgoing, counts, sizes)
            for rank, piece in zip(self._members, torch.split(incoming, counts), strict=True):
                if rank != self._rank:
                    if exchange.recvs is not None:
                        piece = exchange.recvs[rank][: piece.numel()].copy_(piece)
                    piece.record_stream(compute)  # Made on the side stream, read on `compute`.
                    exchange.received[rank] = piece
            exchange.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            exchange.ready.record(self._stream)

    def abort(self) -> None:
        """Abort the communicator: queued operations return with undefined contents."""
        self._is_aborted = True
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.is_initialized():
            abort()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _listening_store(host: str) -> TCPStore:
    """Return a store that listens at a free port of this address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
