"""The TCP mesh: every byte in its place in any order of posting; every failure is reported."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hadal.comm.group import PeerLost
from hadal.comm.mesh import frames as frames
from hadal.comm.mesh import poller
from hadal.comm.mesh.inbox import MAX_IN_FLIGHT
from hadal.comm.mesh.link import FrameWriter, Link
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.handshake import NONCE_BYTES, TAG_BYTES, Handshake
from hadal.core.plans import Member
from tests.fresh import fresh
from tests.unit.comm.groups import DEADLINE_S, KEY, form_all, member, mesh_threads, run_threads
from tests.waiting import join, wait_until

SIZES = (0, 0, 1, 23, 1000, 65_511, 65_512, 65_513, 300_000, 2_000_000)
"""Sizes around the staging area (64 KiB less a header), and larger than any socket buffer."""
NEVER_S = 3600.0
SHORT_S = 0.4
SEEDS = [1, 2, fresh().randrange(1 << 30)]


def pattern(sender: int, receiver: int, step: int, size: int) -> Tensor:
    """Return bytes that depend on sender, receiver, step and size."""
    period = ((torch.arange(251) * 31 + sender * 7 + receiver * 3 + step) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size]


def size_of(seed: int, sender: int, receiver: int, step: int) -> int:
    return random.Random(f"{seed} {sender} {receiver} {step}").choice(SIZES)


def shuffle(group: MeshGroup, seed: int, num_steps: int, first: int = 0) -> tuple[int, int]:
    """Run random exchanges, up to three in flight, half into fixed buffers; return bytes both ways."""
    peers = [rank for rank in group.members if rank != group.rank]
    pace = random.Random(f"{seed} {group.rank}")
    flying: list[tuple[int, object, Callable[[], dict[int, Tensor]]]] = []
    out = into = 0
    for step in range(first, first + num_steps):
        sends = {
            peer: pattern(group.rank, peer, step, size_of(seed, group.rank, peer, step))
            for peer in peers
        }
        recvs = (
            {peer: torch.zeros(max(SIZES), dtype=torch.uint8) for peer in peers}
            if step % 2
            else None
        )
        out += sum(tensor.numel() for tensor in sends.values())
        flying.append((step, recvs, group.exchange(sends, recvs).wait))
        while len(flying) > pace.randrange(4) or (step == first + num_steps - 1 and flying):
            at, buffers, wait = flying.pop(0)
            for peer, got in wait().items():
                expected = pattern(peer, group.rank, at, size_of(seed, peer, group.rank, at))
                assert torch.equal(got, expected), (seed, at, peer)
                assert (
                    buffers is None
                    or got.numel() == 0
                    or got.data_ptr() == buffers[peer].data_ptr()
                )  # type: ignore[index]
                into += got.numel()
    return out, into


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_byte_arrives_where_it_belongs(num_ranks: int, seed: int) -> None:
    print("seed", seed)
    with mesh_threads(num_ranks) as groups:
        counts = run_threads(
            [
                lambda group=group: shuffle(group, seed, 6 if num_ranks < 8 else 2)
                for group in groups
            ]
        )  # type: ignore[misc]
        assert [(group.bytes_sent, group.bytes_received) for group in groups] == counts
        assert sum(out for out, _ in counts) == sum(into for _, into in counts)


def exchange_sized(group: MeshGroup, size: int, room: int | None = None) -> None:
    peers = [rank for rank in group.members if rank != group.rank]
    recvs = None if room is None else {peer: torch.empty(room, dtype=torch.uint8) for peer in peers}
    sends = {peer: pattern(group.rank, peer, 0, size) for peer in peers}
    for peer, got in group.exchange(sends, recvs).wait().items():
        assert torch.equal(got, pattern(peer, group.rank, 0, size))


def test_a_rank_may_be_ahead_by_exchanges_not_posted_yet() -> None:
    """Send before the receiver posts: small, large and empty payloads, some into fixed buffers; one has
    arrived only in part by then.
    """
    sizes = [10, 4_000_000, 0, 300_000]

    def ahead(group: MeshGroup) -> None:
        waits = [group.exchange({1: pattern(0, 1, step, size)}) for step, size in enumerate(sizes)]
        assert [exchange.wait()[1].numel() for exchange in waits] == [1] * len(sizes)

    def behind(group: MeshGroup) -> None:
        wait_until(lambda: group.bytes_received >= sizes[0], "the first has come early")
        for step, size in enumerate(sizes):
            recvs = {0: torch.zeros(max(sizes), dtype=torch.uint8)} if step % 2 else None
            got = group.exchange({0: torch.ones(1, dtype=torch.uint8)}, recvs).wait()[0]
            assert torch.equal(got, pattern(0, 1, step, size))
            assert recvs is None or got.data_ptr() == recvs[0].data_ptr()

    with mesh_threads(2) as (first, second):
        run_threads([lambda: ahead(first), lambda: behind(second)])


def test_what_comes_too_early_and_too_much_waits_in_the_socket() -> None:
    sizes = [50 << 20, 30 << 20, 1000]

    def ahead(group: MeshGroup) -> None:
        waits = [
            group.exchange({1: torch.full((size,), step, dtype=torch.uint8)})
            for step, size in enumerate(sizes)
        ]
        for exchange in waits:
            exchange.wait()

    def behind(group: MeshGroup) -> None:
        paused = group._links[0]
        wait_until(lambda: paused.is_paused, "one waits in the socket")
        for step, size in enumerate(sizes):
            got = group.exchange({0: torch.ones(1, dtype=torch.uint8)}).wait()[0]
            assert got.numel() == size
            assert bool((got == step).all())

    with mesh_threads(2) as (first, second):
        run_threads([lambda: ahead(first), lambda: behind(second)])


def test_bytes_travel_while_both_compute() -> None:
    """Check without a call of `wait` that the mesh's own thread moves bytes and records the interval."""
    with mesh_threads(2) as groups:
        exchanges = [
            group.exchange({1 - group.rank: torch.zeros(8 << 20, dtype=torch.uint8)})
            for group in groups
        ]
        wait_until(lambda: all(exchange.is_done for exchange in exchanges), "all bytes have come")
        intervals = [exchange.interval for exchange in exchanges]
        assert all(interval.start_s < interval.end_s for interval in intervals)
        for exchange in exchanges:
            exchange.wait()
        assert [exchange.interval for exchange in exchanges] == intervals


def lose(group: MeshGroup, act: Callable[[], object]) -> PeerLost:
    with pytest.raises(PeerLost) as caught:
        act()
    with pytest.raises(PeerLost):  # Every later exchange fails, too.
        group.exchange(
            {
                peer: torch.empty(0, dtype=torch.uint8)
                for peer in group.members
                if peer != group.rank
            }
        )
    return caught.value


@pytest.mark.parametrize("sizes", [(6_000_000, 1000), (1000, 10)])
def test_a_payload_too_large_fails_the_generation_and_harms_nothing(sizes: tuple[int, int]) -> None:
    with mesh_threads(2) as groups:
        size, room = sizes
        errors = run_threads(
            [
                lambda group=group: lose(group, lambda: exchange_sized(group, size, room))
                for group in groups
            ]
        )  # type: ignore[misc]
        assert all(f"{size} bytes for a buffer of {room}" in str(error) for error in errors)
        form_all(groups, 2)  # The connections still work.
        run_threads([lambda group=group: exchange_sized(group, size) for group in groups])  # type: ignore[misc]


def test_abort_ends_what_is_under_way_on_all_ranks() -> None:
    """Abort once ranks 0 and 1 have exchanged large payloads and wait for rank 2, which never posts."""
    with mesh_threads(3, deadline_s=NEVER_S) as groups:

        def abort() -> None:
            wait_until(
                lambda: all(group.bytes_received >= 6_000_000 for group in groups[:2]),
                "both wait for rank 2 alone",
            )
            groups[0].abort()

        *errors, _ = run_threads(
            [
                lambda group=group: lose(group, lambda: exchange_sized(group, 6_000_000))
                for group in groups[:2]
            ]
            + [abort]
        )  # type: ignore[misc]
        assert [error.ranks for error in errors] == [(), ()]
        assert "aborted" in str(errors[1])
        for formation in (2, 3):
            form_all(groups, formation)
            run_threads([lambda group=group: exchange_sized(group, 100_000) for group in groups])  # type: ignore[misc]
        assert [group.lost() for group in groups] == [()] * 3


def test_frames_of_an_older_generation_are_never_mistaken_for_newer_ones() -> None:
    """Abort rank 0 in the middle of a large frame, and reuse the frame's memory."""
    with mesh_threads(2) as groups:
        for formation in range(2, 6):
            data = pattern(0, 1, formation, 12_000_000)
            groups[0].exchange({1: data})
            groups[0].abort()
            lose(groups[0], lambda: exchange_sized(groups[0], 1))
            data.zero_()
            form_all(groups, formation)
            run_threads([lambda group=group: exchange_sized(group, 1_000_000) for group in groups])  # type: ignore[misc]


def test_an_idle_loss_is_told_and_the_place_is_taken_by_another() -> None:
    told: list[int] = []
    with mesh_threads(3, on_lost=told.append) as groups:
        groups[2].close()
        wait_until(
            lambda: all(group.lost() == (2,) for group in groups[:2]) and len(told) == 2,
            "both know and were told",
        )
        assert told == [2, 2]
        assert lose(groups[0], lambda: exchange_sized(groups[0], 1)).ranks == (2,)
        form_all(groups[:2], 2)
        run_threads([lambda group=group: exchange_sized(group, 1000) for group in groups[:2]])  # type: ignore[misc]
        groups[2] = MeshGroup(2, "another", key=KEY, deadline_s=DEADLINE_S)
        form_all(groups, 3)
        run_threads([lambda group=group: exchange_sized(group, 1000) for group in groups])  # type: ignore[misc]


def test_a_loss_in_the_generation_before_does_not_end_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Delay the end of a rank's connection until the others have formed again without that rank."""
    with mesh_threads(3) as groups:
        fail, held, seen, go_on = groups[0]._fail, [], threading.Event(), threading.Event()

        def late(*arguments: object, **options: object) -> None:
            # Delay only losses that this thread notices itself: rank 1's report arrives under that
            # connection's lock.
            if not held and options.get("notifies", True):
                held.append(arguments)
                seen.set()
                assert go_on.wait(DEADLINE_S)
            fail(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(groups[0], "_fail", late)
        groups[2].close()
        assert seen.wait(DEADLINE_S)
        # The polling thread is blocked; the forming thread polls for itself.
        form_all(groups[:2], 2)
        go_on.set()
        run_threads([lambda group=group: shuffle(group, 5, 4) for group in groups[:2]])  # type: ignore[misc]


def test_a_silent_peer_is_named_at_the_deadline() -> None:
    with mesh_threads(3) as groups:
        exchanges = []
        for group in groups[:2]:
            group.deadline_s = SHORT_S  # Forming is done.
            peers = [rank for rank in range(3) if rank != group.rank]
            exchanges.append(group.exchange({peer: torch.zeros(10).byte() for peer in peers}))
        wait_until(
            lambda: all(len(each.missing) == 1 for each in exchanges), "rank 2 alone is silent"
        )
        errors = run_threads(
            [
                lambda group=group, each=each: lose(group, each.wait)
                for group, each in zip(groups, exchanges, strict=False)
            ]
        )  # type: ignore[misc]
        assert [error.ranks for error in errors] == [(2,), (2,)]


@pytest.mark.parametrize("absent", [0, 2])
def test_forming_names_who_is_not_reached(absent: int) -> None:
    """Form with a dead peer as a member. If it should connect, the error at the deadline names it;
    otherwise its port refuses the connection.
    """
    with mesh_threads(3) as groups:
        members = [member(group) for group in groups]
        groups[absent].close()
        first, last = (group for group in groups if group.rank != absent)
        first.deadline_s = SHORT_S

        def form_first() -> PeerLost:
            link = first._links[last.rank]
            wait_until(lambda: link.formation == 2, "the other one has come")
            return lose(first, lambda: first.form(2, members))

        errors = run_threads([lambda: lose(last, lambda: last.form(2, members)), form_first])
        assert [error.ranks for error in errors] == [(absent,), (absent,)]


def test_who_is_someone_else_is_not_let_in() -> None:
    with mesh_threads(2) as groups:
        groups[0].deadline_s = SHORT_S
        wrong = [member(groups[0]), Member(1, "older", "127.0.0.1", groups[1].port)]
        assert lose(groups[0], lambda: groups[0].form(2, wrong)).ranks == (1,)
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            frames.pack_header(frames.DATA, 1, 0, 5) + b"12345",
        ):
            with socket.create_connection(
                ("127.0.0.1", groups[0].port), timeout=DEADLINE_S
            ) as stranger:
                stranger.sendall(data)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(1 << 12):  # The rank's challenge, and no more.
                        pass
        groups[0].deadline_s = DEADLINE_S
        form_all(groups, 3)
        run_threads([lambda group=group: exchange_sized(group, 1000) for group in groups])  # type: ignore[misc]


def test_wrong_use_is_refused() -> None:
    with mesh_threads(2) as groups:
        with pytest.raises(ValueError, match="newer"):
            groups[0].form(1, [member(group) for group in groups])
        with pytest.raises(ValueError, match="not among"):
            groups[0].form(2, [member(groups[1])])
        with pytest.raises(ValueError, match="for each"):
            groups[0].exchange({})
        empty = torch.empty(0, dtype=torch.uint8)
        for _ in range(MAX_IN_FLIGHT):
            groups[0].exchange({1: empty})
        with pytest.raises(ValueError, match="in flight"):
            groups[0].exchange({1: empty})
    with pytest.raises(PeerLost):
        groups[0].exchange({1: empty})


def test_nothing_is_left_behind() -> None:
    with mesh_threads(2):
        pass  # Objects made once per process are made now.
    num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with mesh_threads(4) as groups:
            groups[3].close()
            form_all(groups[:3], 2)
    assert threading.active_count() == num_threads
    assert len(os.listdir("/proc/self/fd")) == num_fds


class Stranger:
    """A stranger on the rank's port: it has all public facts, but not the key."""

    def __init__(self, port: int, key: bytes = b"not the key of the groups ......") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        head = self.socket.recv(frames.HEADER_BYTES, socket.MSG_WAITALL)
        self.challenge = self.socket.recv(
            frames.unpack_header(memoryview(head), 0).num_bytes, socket.MSG_WAITALL
        )
        self.handshake = Handshake(key, os.urandom(NONCE_BYTES), is_connector=True, port=port)
        self.handshake.challenged(self.challenge)
        self.claim = frames.hello_claim(1, frames.Hello(1, "e1", 0, "e0"))
        self.hello = frames.pack_hello(1, self.claim, self.handshake.proof(self.claim))

    def say(self, *data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(frames.pack_challenge(self.handshake.nonce) + b"".join(data))

    def is_thrown_out(self) -> bool:
        with contextlib.closing(self.socket), contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 12):
                pass
        return True


@pytest.mark.promise("Processes authenticate each other before they send anything over TCP")
def test_who_knows_everything_but_the_secret_is_refused_and_disturbs_nobody() -> None:
    """Send forged, replayed, reflected and altered hellos beside exchanges, which continue."""
    with mesh_threads(2) as groups:
        port = groups[0].port
        # A hello as overheard by the stranger: correct, but bound to its own connection.
        true = Stranger(port, KEY)
        abort = frames.pack_abort(1, (1,), "give up")
        data = frames.pack_header(frames.DATA, 1, 0, 5) + b"12345"
        for number in range(40):
            stranger = Stranger(port)
            altered = bytearray(true.hello)
            altered[frames.HEADER_BYTES + number % (len(altered) - frames.HEADER_BYTES)] ^= 1
            lies: list[tuple[bytes, ...]] = [
                (stranger.hello,),
                (true.hello,),
                (bytes(altered),),
                (abort,),
                (data,),
                (stranger.hello, abort, data),
                (frames.pack_hello(1, stranger.claim, b""),),
                (frames.pack_challenge(stranger.challenge),),
            ]
            stranger.say(*lies[number % len(lies)])
            assert stranger.is_thrown_out()
            run_threads([lambda group=group: exchange_sized(group, 1000) for group in groups])  # type: ignore[misc]
        true.socket.close()
        assert groups[0].refusals.num_refused >= 40
        assert groups[0].lost() == groups[1].lost() == ()
        assert groups[0].formation.number == 1


def test_strangers_that_only_connect_keep_nobody_out() -> None:
    with mesh_threads(2) as groups:
        idle = [
            socket.create_connection(("127.0.0.1", groups[1].port), timeout=DEADLINE_S)
            for _ in range(300)
        ]
        form_all(groups, 2)
        with contextlib.closing(
            MeshGroup(0, "another", key=KEY, deadline_s=DEADLINE_S)
        ) as successor:
            groups[0].close()
            form_all([successor, groups[1]], 3)
            run_threads(
                [lambda group=group: exchange_sized(group, 10) for group in (successor, groups[1])]
            )  # type: ignore[misc]
        for connection in idle:
            connection.close()


@pytest.mark.promise(
    "mesh, KV and experts over TCP prove the secret in a handshake and tag every record"
)
@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_between_hosts_every_frame_is_tagged(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(poller, "is_near", lambda host: False)
    with mesh_threads(3) as groups:
        for _ in range(20):
            run_threads([lambda group=group: exchange_sized(group, size) for group in groups])  # type: ignore[misc]
        form_all(groups, 2)
        run_threads([lambda group=group: exchange_sized(group, size) for group in groups])  # type: ignore[misc]


@pytest.mark.parametrize("how", ["changed", "left out", "repeated"])
def test_between_hosts_a_frame_that_was_spoiled_ends_the_generation(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(poller, "is_near", lambda host: False)
    push = FrameWriter._push

    def spoiled(writer: FrameWriter, item: Any) -> bool:
        if item.is_data and not item.is_tagged:
            assert writer.seal is not None
            if how == "changed":
                item.views[1] = memoryview(bytes(item.views[1])[:-1] + b"\xff")
                item.views.append(
                    memoryview(writer.seal.tag([item.views[0], bytes(len(item.views[1]))]))
                )
                item.is_tagged = True
            elif how == "left out":
                writer.seal.begin()
            else:
                whole = [*item.views, memoryview(writer.seal.tag(item.views))]
                item.views, item.is_tagged = [*whole, *whole], True
        return push(writer, item)

    with mesh_threads(2) as groups:
        monkeypatch.setattr(FrameWriter, "_push", spoiled)
        errors = run_threads(
            [
                lambda group=group: lose(
                    group, lambda: [exchange_sized(group, 1000) for _ in range(2)]
                )
                for group in groups
            ]
        )  # type: ignore[misc]
        assert all(isinstance(error, PeerLost) for error in errors)


def test_an_abort_follows_the_hello_also_where_the_peer_is_slow_to_challenge() -> None:
    """Delay the challenge: an abort sent before HELLO would count as a stranger's and end the link."""
    told: list[int] = []
    groups = [
        MeshGroup(rank, f"e{rank}", key=KEY, deadline_s=DEADLINE_S, on_lost=told.append)
        for rank in range(2)
    ]
    with contextlib.closing(groups[0]), contextlib.closing(groups[1]):
        members = [member(group) for group in groups]
        starved = threading.Event()
        accept = groups[1]._poller._accept

        def late() -> None:
            starved.wait(DEADLINE_S)
            accept()

        groups[1]._poller._accept = late  # type: ignore[method-assign]
        forming = threading.Thread(
            target=lambda: lose(groups[0], lambda: groups[0].form(1, members))
        )
        forming.start()
        wait_until(lambda: groups[0]._links, "rank 0 connects")
        groups[0].abort()
        join(forming)
        starved.set()

        def begin() -> None:
            # form() may return after HELLO alone, if the abort is read a moment later.
            groups[1].form(1, members)
            exchange_sized(groups[1], 1000)

        # The peer learns that this formation failed, and which rank aborted it.
        error = lose(groups[1], begin)
        assert "rank 0: aborted" in str(error)
        assert told == []
        assert groups[1].refusals.num_refused == 0
        form_all(groups, 2)
        run_threads([lambda group=group: exchange_sized(group, 1000) for group in groups])  # type: ignore[misc]


def test_between_hosts_the_peers_challenge_may_be_here_before_ours_has_left() -> None:
    """Check that even then our challenge carries no tag: with one, some formations failed."""
    ours, theirs = socket.socketpair()
    nonce = os.urandom(NONCE_BYTES)
    with (
        contextlib.closing(MeshGroup(0, "e0", key=KEY, deadline_s=1.0)) as owner,
        contextlib.closing(theirs),
    ):
        link = Link(ours, owner, Handshake(KEY, nonce, is_connector=True, port=1, is_sealed=True))
        link.challenged(os.urandom(NONCE_BYTES))
        challenge, abort = frames.pack_challenge(nonce), frames.pack_abort(1, (), "")
        assert link.send(challenge)
        assert theirs.recv(1 << 12) == challenge
        assert link.send(abort)
        assert len(theirs.recv(1 << 12)) == len(abort) + TAG_BYTES
        link.close()
