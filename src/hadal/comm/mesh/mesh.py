"""Exchange between the ranks of a unit over TCP: one framed, full-duplex connection per pair of
ranks, without a rendezvous.

The calling thread sends small messages itself. The thread that waits for data reads them. While no
thread waits (the rank computes), a background thread reads, and sends what did not fit at once. So
transfers overlap computation, and a small exchange costs one wake-up.

A formation fails as a whole and at once: by the end of any member's connection, a deadline, a
member's ABORT, or `abort`. Once PeerLost is raised, the buffers given to the formation are never
accessed again. Connections outlive a formation; frames of an older one are dropped. Does not depend
on tokens or experts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from hadal.comm.group import PeerLost
from hadal.comm.host_waits import HostWaits
from hadal.comm.mesh.frames import (
    ABORT,
    CHALLENGE,
    DATA,
    HELLO,
    Frame,
    FrameError,
    Hello,
    hello_claim,
    pack_abort,
    pack_header,
    pack_hello,
    unpack_abort,
    unpack_hello,
)
from hadal.comm.mesh.inbox import Inbox, MeshExchange, TooLargeError, bytes_of
from hadal.comm.mesh.link import Link, PauseLink
from hadal.comm.mesh.poller import POLL_S, Poller
from hadal.comm.mesh.refusals import Refusals
from hadal.core.plans import Member, Waited

PURPOSE = "mesh 2"
"""Purpose of the key (core/handshake.key_of)."""
MAX_PENDING = 256
"""Maximum number of accepted connections that have not sent a HELLO, or are in a later formation."""


class MeshFormation:
    """One formation: its members, their exchanges, and its failure. Protected by the group's lock."""

    def __init__(self, number: int, rank: int, others: Mapping[int, Member]) -> None:
        self.number = number
        self.members = tuple(sorted({rank, *others}))
        self.peers = tuple(sorted(others))
        self.inbox = Inbox()
        self.lost: set[int] = set()
        """Members with a closed connection."""
        self.failure: tuple[tuple[int, ...], str] | None = None
        """Lost ranks and the reason."""
        self.abort = b""
        """ABORT message for the peers; empty before a failure, or if peers need no notice."""
        self._epochs = {rank: member.epoch for rank, member in others.items()}

    def expects(self, rank: int, epoch: str) -> bool:
        """Return whether the process (rank, epoch) is another member."""
        return self._epochs.get(rank) == epoch

    def fail(self, ranks: tuple[int, ...], reason: str, *, notifies: bool) -> None:
        """Record the formation's failure."""
        self.failure = (ranks, reason)
        self.abort = pack_abort(self.number, ranks, reason) if notifies else b""


class MeshGroup:
    """One rank's end of the mesh. Listens from its creation; peers connect to `port`.

    `form`, `exchange` and `wait` are called by one thread; `abort`, `lost` and `close` by any.
    `on_lost(rank)` is called once per rank and formation, by the thread that finds the loss: it
    must be short and must not call back.
    """

    def __init__(
        self,
        rank: int,
        epoch: str,
        *,
        key: bytes,
        host: str = "127.0.0.1",
        deadline_s: float,
        on_lost: Callable[[int], None] | None = None,
        congestion: str | None = None,
    ) -> None:
        """`key`: the deployment's key for PURPOSE; a peer without it is refused (core/handshake)."""
        self.rank = rank
        self.epoch = epoch
        self.deadline_s = deadline_s
        self.bytes_sent = 0
        """Bytes of exchanges' payloads sent, without headers."""
        self.bytes_received = 0
        self.refusals = Refusals("mesh", f"rank {rank}")
        self._on_lost = on_lost
        self._lock = threading.Lock()
        """Lock for table look-ups and copies of early payloads; not held while a socket is used."""
        self._links: dict[int, Link] = {}
        self._pending: list[Link] = []
        self.formation = MeshFormation(-1, rank, {})
        self.formation.fail((), "no formation was formed", notifies=False)
        self._waits = HostWaits()
        self._is_closing = False
        self._poller = Poller(f"mesh-{rank}", host, self, self._accepted, congestion, key)
        self.port = self._poller.port
        self._poller.start()

    @property
    def members(self) -> tuple[int, ...]:
        """Return the living ranks of this formation, ascending (Group.members)."""
        return self.formation.members

    # ---- called by a rank ----
    def form(self, formation: int, members: Sequence[Member]) -> None:
        """Start a formation. Raises PeerLost naming the members not reached within the deadline,
        and ValueError if this rank is no member or the formation is not newer than the last.
        """
        others = {member.rank: member for member in members if member.rank != self.rank}
        if self.rank not in {member.rank for member in members}:
            raise ValueError(f"rank {self.rank} is not among the members of formation {formation}.")
        if formation <= self.formation.number:
            raise ValueError(f"formation {formation} is not newer than {self.formation.number}.")
        self._waits.form(self.rank, members)
        with self._poller.turn:
            self._start_formation(formation, others)
            deadline_s = time.monotonic() + self.deadline_s
            for rank, member in sorted(others.items()):
                self._greet(rank, member)
            while missing := [rank for rank in sorted(others) if not self._is_ready(rank)]:
                self._raise_failure()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._fail(tuple(missing), f"not reached within {self.deadline_s} s")
                    continue
                self._poller.pump(min(left_s, POLL_S))
            self._raise_failure()

    def exchange(
        self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor] | None = None
    ) -> MeshExchange:
        """Start an exchange, as in Group. Raises PeerLost if the formation has failed already."""
        self._raise_failure()
        formation = self.formation
        peers = formation.peers
        if sends.keys() != set(peers) or (recvs is not None and recvs.keys() != set(peers)):
            raise ValueError(f"an exchange needs one tensor for each of the ranks {peers}.")
        views = {peer: bytes_of(sends[peer]) for peer in peers}
        exchange = MeshExchange(peers, recvs, self._wait_for)
        try:
            with self._lock:
                formation.inbox.post(exchange)
                links = [self._links[peer] for peer in peers]
        except TooLargeError as error:
            self._fail((), str(error))
            self._raise_failure()
        # Start with the next rank: if all started with rank 0, it would be a bottleneck.
        at = sum(peer < self.rank for peer in peers)
        num_sent = 0
        for link in links[at:] + links[:at]:
            view = views[link.rank]
            head = pack_header(DATA, formation.number, exchange.sequence, len(view))
            self.bytes_sent += len(view)
            num_sent += link.send(head, view, exchange)
        with self._lock:
            exchange.num_unsent -= num_sent
        for link in links:
            if link.is_paused:
                link.receive()
        return exchange

    def abort(self) -> None:
        """Fail this formation's exchanges, or its forming, now; the other members are notified."""
        self._fail((), "aborted")

    def lost(self) -> tuple[int, ...]:
        """Return the members with a connection that ended in this formation."""
        with self._lock:
            return tuple(sorted(self.formation.lost))

    def take_waits(self) -> Waited:
        """Return the waiting times since the last call (Group.take_waits)."""
        return self._waits.take()

    def close(self) -> None:
        """Close every connection and end the thread. The other members see a loss."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            if self.formation.failure is None:
                self.formation.fail((), "closed", notifies=False)
        self._poller.close()

    def _wait_for(self, exchange: MeshExchange) -> None:
        """Return when the exchange is done. Raises PeerLost."""
        if not exchange.is_done:
            began_s = time.perf_counter()
            deadline_s = time.monotonic() + self.deadline_s
            with self._poller.turn:
                while not exchange.is_done and self._awaits(exchange):
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        self._time_out(exchange)
                    else:
                        self._poller.pump(min(left_s, POLL_S))
            self._waits.add(began_s, time.perf_counter(), exchange.peer_to_arrived_s)
            if not exchange.is_done:
                self._raise_failure()
                raise PeerLost((), "the exchange is of an older formation")
        with self._lock:
            self.formation.inbox.retire(exchange)

    def _awaits(self, exchange: MeshExchange) -> bool:
        formation = self.formation
        return formation.failure is None and formation.inbox.holds(exchange)

    def _time_out(self, exchange: MeshExchange) -> None:
        with self._lock:
            # Peers that did not deliver; if all did, peers that do not read.
            silent = exchange.missing or {
                rank for rank, link in self._links.items() if link.is_sending
            }
        self._fail(tuple(sorted(silent)), f"nothing within {self.deadline_s} s")

    # ---- reported by links: comm/mesh/link.Owner ----
    def begin(self, link: Link, frame: Frame) -> memoryview | None:
        """Return the memory for a payload; None if its formation is over or has failed."""
        if not link.is_proven and frame.kind not in (CHALLENGE, HELLO):
            raise FrameError("it sent a frame before the end of its handshake")
        if frame.kind != DATA:
            return memoryview(bytearray(frame.num_bytes))
        try:
            with self._lock:
                formation = self.formation
                if link.formation < frame.formation or frame.formation > formation.number:
                    raise FrameError(f"data of formation {frame.formation} before its HELLO")
                if frame.formation < formation.number or formation.failure is not None:
                    return None
                # Set under the lock, so that a thread that posts the exchange later sees it and
                # resumes the link.
                link.is_paused = formation.inbox.is_full_for(frame)
                if link.is_paused:
                    raise PauseLink
                return formation.inbox.memory_for(link.rank, frame)
        except TooLargeError as error:
            self._fail((), str(error), formation=frame.formation)
            return None

    def ended(self, link: Link, frame: Frame, payload: memoryview | None) -> None:
        """Handle a complete frame."""
        if payload is None:
            return
        if frame.kind == CHALLENGE:
            with self._lock:
                link.challenged(bytes(payload))
                is_hello_due, link.is_hello_due = link.is_hello_due, False
            if is_hello_due:
                self._send_hello(link)
        elif frame.kind == HELLO:
            hello, claim, proof = unpack_hello(frame.formation, bytes(payload))
            if not link.handshake.is_proof(proof, claim):
                raise FrameError("it does not hold this deployment's secret")
            link.is_proven = True
            self._hello(link, frame.formation, hello)
        elif frame.kind == ABORT:
            ranks, reason = unpack_abort(bytes(payload))
            link.aborted = (frame.formation, ranks, f"rank {link.rank}: {reason}")
            self._heed_abort(link)
        else:
            try:
                with self._lock:
                    formation = self.formation
                    if frame.formation != formation.number or formation.failure is not None:
                        return
                    self.bytes_received += frame.num_bytes
                    formation.inbox.complete(link.rank, frame)
            except TooLargeError as error:
                self._fail((), str(error), formation=frame.formation)
            self._poller.wake()

    def sent(self, exchange: MeshExchange) -> None:
        """Count an exchange's frame that was sent after a delay."""
        with self._lock:
            exchange.num_unsent -= 1
        self._poller.wake()

    def broken(self, link: Link, reason: str) -> None:
        """Handle the end of a connection."""
        with self._lock:
            if link.is_broken:
                return
            self._poller.doom(link)
            if link in self._pending:
                self._pending.remove(link)
            formation = self.formation
            is_member = (
                self._links.get(link.rank) is link
                and link.rank in formation.peers
                and not self._is_closing
            )
            is_news = is_member and link.rank not in formation.lost
            if is_news:
                formation.lost.add(link.rank)
        if not link.is_proven and link.rank < 0:
            self.refusals.count(reason)
        if is_news:
            self._fail((link.rank,), reason, formation=formation.number)
            if self._on_lost is not None:
                self._on_lost(link.rank)

    # ---- forming ----
    def _start_formation(self, formation: int, others: Mapping[int, Member]) -> None:
        """Drop the state of the earlier formation, and connections that are no longer needed."""
        with self._lock:
            if self._is_closing:
                raise PeerLost((), "closed")
            self.formation = MeshFormation(formation, self.rank, others)
            stale = [
                link
                for rank, link in self._links.items()
                if rank not in others or link.epoch != others[rank].epoch or link.is_broken
            ]
            for link in stale:
                del self._links[link.rank]
            late = [link for link in self._pending if link.rank >= 0 and link.formation < formation]
            self._pending = [link for link in self._pending if link not in late]
            for link in stale + late:
                if not link.is_broken:
                    self._poller.doom(link)
        # Only after the switch: before it, a frame of the earlier formation could still begin.
        self._retire()
        self._poller.reap()

    def _greet(self, rank: int, member: Member) -> None:
        """Send HELLO on a connection; open one to a higher rank if there is none."""
        with self._lock:
            waiting = [
                link for link in self._pending if (link.rank, link.epoch) == (rank, member.epoch)
            ]
            link = self._links.get(rank)
        if waiting:
            self._adopt(waiting[-1])
            link = waiting[-1]
        elif link is not None:
            self._send_hello(link)
        elif self.rank < rank:
            link, reason = self._poller.connect(member.host, member.port, rank, member.epoch)
            with self._lock:
                self._links[rank] = link
            if reason:
                self.broken(link, reason)
            else:
                self._send_hello(link)
        if link is not None:
            self._heed_abort(link)
            if link.formation > self.formation.number:
                self._fail(
                    (), f"rank {rank} is in formation {link.formation} already", notifies=False
                )

    def _accepted(self, link: Link) -> None:
        with self._lock:
            self._pending.append(link)
            # Proven connections stay, so that strangers who only connect cannot displace them.
            unproven = (other for other in self._pending if not other.is_proven)
            oldest = next(unproven, self._pending[0]) if len(self._pending) > MAX_PENDING else None
        if oldest is not None:
            self.broken(oldest, "too many connections")

    def _send_hello(self, link: Link) -> None:
        with self._lock:
            formation = self.formation.number
            link.is_hello_due = not link.handshake.is_challenged
            if link.is_hello_due:
                return
        claim = hello_claim(formation, Hello(self.rank, self.epoch, link.rank, link.epoch))
        link.send(pack_hello(formation, claim, link.handshake.proof(claim)))
        with self._lock:
            link.hello_formation = max(link.hello_formation, formation)
            abort = self.formation.abort if formation == self.formation.number else b""
        if abort:
            link.send(abort)

    def _hello(self, link: Link, formation: int, hello: Hello) -> None:
        """Handle a peer's HELLO for `formation`. Raises FrameError if its identity is wrong, or if
        it expects another process here.
        """
        if (hello.to_rank, hello.to_epoch) != (self.rank, self.epoch):
            raise FrameError(
                f"rank {hello.rank} expects rank {hello.to_rank} ({hello.to_epoch}) here"
            )
        is_new = link.rank < 0
        if not is_new and (hello.rank, hello.epoch) != (link.rank, link.epoch):
            raise FrameError(
                f"rank {link.rank} ({link.epoch}) sent a HELLO of rank {hello.rank} ({hello.epoch})"
            )
        if is_new and formation < self.formation.number:
            raise FrameError(f"rank {hello.rank} is still in formation {formation}")
        with self._lock:
            link.rank, link.epoch = hello.rank, hello.epoch
            link.formation = max(link.formation, formation)
            ours = self.formation.number
            is_expected = formation == ours and self.formation.expects(hello.rank, hello.epoch)
            is_ahead = formation > ours and self._links.get(hello.rank) is link
        if is_ahead:  # The peer has given up our formation.
            self._fail(
                (),
                f"rank {hello.rank} is in formation {formation} already",
                notifies=False,
                formation=ours,
            )
        elif is_new and is_expected:
            self._adopt(link)
        self._poller.wake()

    def _adopt(self, link: Link) -> None:
        """Make a pending connection the one to its peer."""
        with self._lock:
            if link not in self._pending:
                return
            self._pending.remove(link)
            old = self._links.get(link.rank)
            self._links[link.rank] = link
            if old is not None and not old.is_broken:
                self._poller.doom(old)
        self._send_hello(link)

    def _is_ready(self, rank: int) -> bool:
        link = self._links.get(rank)
        return link is not None and link.formation == self.formation.number

    # ---- failing ----
    def _heed_abort(self, link: Link) -> None:
        formation, ranks, reason = link.aborted
        if formation == self.formation.number and self._links.get(link.rank) is link:
            self._fail(ranks, reason, notifies=False, formation=formation)

    def _fail(
        self,
        ranks: tuple[int, ...],
        reason: str,
        *,
        notifies: bool = True,
        formation: int | None = None,
    ) -> None:
        """End the formation if it has not ended. The waiting thread raises PeerLost; the peers are
        notified.

        `formation`: the formation that the caller saw fail; a later one is not affected.
        """
        with self._lock:
            ours = self.formation
            if ours.failure is not None or formation not in (None, ours.number):
                return
            ours.fail(ranks, reason, notifies=notifies)
            # Peers get ABORT only after our HELLO: they would refuse any frame before it.
            links = [
                link
                for rank in ours.peers
                if (link := self._links.get(rank)) is not None
                and link.hello_formation == ours.number
            ]
        if ours.abort:
            for link in links:
                link.send(ours.abort)
        self._poller.wake()

    def _raise_failure(self) -> None:
        failure = self.formation.failure
        if failure is not None:
            self._retire()
            raise PeerLost(*failure)

    def _retire(self) -> None:
        """Make sure that no buffer of this formation is accessed any more."""
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.retire()
