"""The ranks of a unit as one exchange over torch.distributed: gloo between CPUs, NCCL between GPUs.

A formation is a process group of its own, named after its members, who meet through a store: on one
host a FileStore in the unit's folder, between hosts the TCPStore of the lowest of them. They wait
for each other there, where an abort ends the wait; connecting, once all are there, is torch's own
and takes its deadline if a member dies just then. Everything is sent as uint8: gloo knows no
float8. An exchange is its counts, then its bytes; `recvs` only say where these bytes go.

    gloo   two process groups, one for each direction between two ranks: one alone is half duplex. Sends and receives
           are run by a thread of ours, in order, so that they go on under computation. CUDA tensors
           pass through pinned memory.
    nccl   all_to_all_single on a side stream; the host waits for the counts, then for nothing until `wait`.

Gloo sometimes leaves a survivor of a killed peer waiting for its timeout, comm/mesh does not;
`abort` from outside ends such a wait within POLL_S. Knows no tokens.
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
"""How long an aborted formation's thread may take to end before it is left alone: its connections
are closed.
"""
POLL_S = 0.05
GATHER_POLL_S = 0.005
_COUNT_TAG, _DATA_TAG, _ABORT_TAG = 1, 2, 3

log = logging.getLogger(__name__)


class TorchExchange:
    """One exchange under way: done, or failed, when its thread says so."""

    def __init__(
        self, group: TorchGroup, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None
    ) -> None:
        self.sends = dict(sends)
        self.recvs = None if recvs is None else dict(recvs)
        self.received: dict[int, Tensor] = {}
        self.error: PeerLost | None = None
        self.is_done = threading.Event()
        self.ready: torch.cuda.Event | None = None
        """NCCL: recorded behind the bytes, on the side stream."""
        self.start_s = self.end_s = time.perf_counter()
        self._group = group

    def wait(self) -> dict[int, Tensor]:
        """Return what each peer sent. Raises PeerLost."""
        self._group.await_exchange(self)
        return {rank: self.received[rank] for rank in sorted(self.received)}

    @property
    def interval(self) -> Interval:
        return Interval(self.start_s, self.end_s)


class TorchGroup:
    """A rank's end of a process group. `backend` "gloo" or "nccl"; `folder`: shared by the unit's
    ranks.

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
        """`host`: the address that gloo binds, and where others meet at this rank's store if it is
        none of loopback. Nothing that goes between hosts so is authenticated or encrypted.

        Raises ValueError if the backend cannot be had.
        """
        if backend not in ("gloo", "nccl"):
            raise ValueError(
                f"{backend!r} is no backend of torch.distributed that is known here: gloo or nccl."
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
        """This formation was given up, perhaps while it was being formed."""
        self._work: queue.Queue[TorchExchange | None] = queue.Queue(MAX_IN_FLIGHT)
        self._thread: threading.Thread | None = None
        self._link: GlooLink | NcclLink | None = None

    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Leave the group before, and meet these members. Raises PeerLost, naming all others: torch
        does not say who is missing.
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
        """See Group."""
        self._raise_failure()
        others = {rank for rank in self.members if rank != self.rank}
        if sends.keys() != others or (recvs is not None and recvs.keys() != others):
            raise ValueError(
                f"an exchange needs a tensor for each of {sorted(others)}, and no other."
            )
        exchange = TorchExchange(self, sends, recvs)
        if not others:
            exchange.is_done.set()
        elif isinstance(self._link, NcclLink):
            self._do(
                self._link, exchange
            )  # Queued on the device: the host's thread goes on by itself.
        else:
            try:
                self._work.put_nowait(exchange)
            except queue.Full:
                raise ValueError(f"more than {MAX_IN_FLIGHT} exchanges are in flight.") from None
        return exchange

    def await_exchange(self, exchange: TorchExchange) -> None:
        """Return when it is done. Raises PeerLost."""
        deadline_s = time.monotonic() + self.deadline_s
        while not exchange.is_done.wait(POLL_S):
            self._raise_failure()
            if time.monotonic() > deadline_s:
                others = tuple(rank for rank in self.members if rank != self.rank)
                self._fail(PeerLost(others, f"nothing within {self.deadline_s} s"))
        if exchange.error is not None:
            raise (
                self._failure or exchange.error
            )  # The first reason; aborted operations follow from it.
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
        """Always empty: torch.distributed notices nothing without an exchange."""
        return ()

    def take_waits(self) -> Waited:
        """Always none: torch.distributed reports no times of arrival."""
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
        if exchange.error is not None and link is self._link:  # Else it comes too late to matter.
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
            # Exchanges that are queued fail one by one; then there is room for the end.
            while thread.is_alive() and time.monotonic() < until_s:
                try:
                    self._work.put(None, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            thread.join(JOIN_TIMEOUT_S)
            if thread.is_alive():
                log.warning("%s still waits in the formation before", thread.name)
        link, self._link = self._link, None
        if link is not None:
            link.close()


class MeetingPlace:
    """Store in which the members of a formation meet: a file of the unit's folder on one host, the
    lowest member's TCPStore between hosts.
    """

    def __init__(self, rank: int, folder: Path, host: str) -> None:
        self.folder = folder
        self._rank = rank
        self._own_store = None if is_near(host) else _listening_store(host)
        self.port = self._own_store.port if self._own_store else 0
        """Port of this rank's store; 0: members meet in a file."""

    def meet(
        self,
        formation: int,
        members: Sequence[Member],
        timeout_s: float,
        is_aborted: Callable[[], bool],
    ) -> Store:
        """Wait until all members are there. Raises PeerLost naming those that are not."""
        # A leader that was started anew counts from 1 again: only the processes make the name
        # unique.
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
                raise PeerLost(missing, f"not there within {timeout_s} s")
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
    """Two gloo process groups: lower rank to higher through the first, higher to lower through the
    second.
    """

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
        # Without one, gloo asks what the host's name resolves to.
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
        """Counts, then bytes. Raises PeerLost."""
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
        """The tensor, or pinned memory for it: gloo moves CPU memory."""
        if tensor.device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor) if is_filled else pinned

    def _move(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], tag: int) -> None:
        works = []  # Receives first: a gloo send moves nothing until its receive is there.
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
        """Close every connection: whatever waits here, and at a peer for this rank, fails at once.

        ProcessGroupGloo.abort leaves a receive under way waiting. A receive that times out closes
        all connections of its group, so one is posted that nobody answers.
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
        """Queue it on the side stream. Returns when the counts are known."""
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
                raise PeerLost((), "aborted")  # The counts are whatever lay there.
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
                    piece.record_stream(
                        compute
                    )  # It was made on the side stream, and is read on this one.
                    exchange.received[rank] = piece
            exchange.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            exchange.ready.record(self._stream)

    def abort(self) -> None:
        """End the communicator: what is queued on the device returns with whatever lies there."""
        self._is_aborted = True
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.is_initialized():
            abort()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _listening_store(host: str) -> TCPStore:
    """A store at a free port of this address, and at no other address."""
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
