"""Test pulls over TCP through a wire that breaks and corrupts: missing chunks are requested again,
and corrupt bytes never count.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hadal.core.handshake import key_of
from hadal.runtime.transfer import tcp
from hadal.runtime.transfer.peers import TRIES, Channel, NotProven
from hadal.runtime.transfer.pool import KvPool, PoolAddress, PoolError, remove_shared_memory
from hadal.runtime.transfer.tcp import (
    CHUNK_BYTES,
    PURPOSE,
    KvServer,
    PullChunks,
    TcpTransfer,
    blocks_per_chunk,
    checksum,
)
from tests.unit.runtime.kv_peers import RUN, SelfGrants, is_written, lease_of, make_pool
from tests.waiting import DEADLINE_S, deadline, join

NUM_BLOCKS = 41
"""Number of blocks: five chunks of eight, and block 0."""
IDS = tuple(range(1, NUM_BLOCKS))
SECRET = b"0123456789abcdef"
KEY = key_of(SECRET, PURPOSE)
PROXY = "127.0.0.2"
GRANTS = SelfGrants(SECRET, "decode-0")

Spoil = Callable[[int, bytes], bytes | None]
"""(bytes sent on this connection before, next bytes) -> bytes to pass on; None: break the
connection.
"""


class Proxy:
    """Proxy between a puller and a server, on the same port of another address, as both prove the
    port that they see; `spoils[i]` gets the server's bytes on connection i.
    """

    def __init__(self, port: int, *spoils: Spoil) -> None:
        self._to = port
        self._spoils = list(spoils)
        self._listener = socket.create_server((PROXY, port))
        self._ends: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            _shut(end)
        join(*self._threads)
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            self._ends += [near, far]
            self.num_connections += 1
            spoil = self._spoils.pop(0) if self._spoils else _leave
            for source, target, change in ((near, far, _leave), (far, near, spoil)):
                self._threads.append(
                    threading.Thread(target=_pass_on, args=(source, target, change))
                )
                self._threads[-1].start()


def _leave(count: int, data: bytes) -> bytes:
    return data


def _pass_on(source: socket.socket, target: socket.socket, spoil: Spoil) -> None:
    count = 0
    try:
        while data := source.recv(1 << 16):
            changed = spoil(count, data)
            if changed is None:
                break
            target.sendall(changed)
            count += len(data)
    except OSError:
        return  # The other thread shut down both.
    _shut(source)
    _shut(target)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The end may be shut down already.
        end.shutdown(socket.SHUT_RDWR)


def break_after(num_bytes: int) -> Spoil:
    return lambda count, data: data if count + len(data) < num_bytes else None


def flip_at(at: int) -> Spoil:
    def flip(count: int, data: bytes) -> bytes:
        if count <= at < count + len(data):
            changed = bytearray(data)
            changed[at - count] ^= 16
            return bytes(changed)
        return data

    return flip


@pytest.fixture
def pools() -> Iterator[tuple[KvPool, KvPool]]:
    source, own = make_pool(RUN, "prefill-0", NUM_BLOCKS), make_pool(RUN, "decode-0", NUM_BLOCKS)
    own.cache[:] = bytes(len(own.cache))
    yield source, own
    source.close()
    own.close()
    remove_shared_memory(RUN)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the chunks of every request."""
    seen: list[tuple[int, ...]] = []
    send_frame = Channel.send_frame

    def note(channel: Channel, frame: Any, *views: memoryview, **options: Any) -> None:
        if isinstance(frame, PullChunks):
            seen.append(frame.chunks)
        send_frame(channel, frame, *views, **options)

    monkeypatch.setattr(Channel, "send_frame", note)
    return seen


def pull_through(pools: tuple[KvPool, KvPool], *spoils: Spoil) -> tuple[str | None, int]:
    """Pull through a proxy; return the error and the number of connections."""
    source, own = pools
    server = KvServer(source, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    proxy = Proxy(server.peers.port, *spoils)
    link = TcpTransfer(PoolAddress(source.name, source.birth, PROXY, proxy.port), KEY, GRANTS)
    try:
        return link.pull(
            own, lease_of(server.address, *IDS), IDS, deadline()
        ), proxy.num_connections
    finally:
        link.peer.close()
        proxy.close()
        assert server.close(DEADLINE_S)


def test_a_broken_connection_is_asked_for_what_is_missing(
    pools: tuple[KvPool, KvPool], asked: list[tuple[int, ...]]
) -> None:
    error, num_connections = pull_through(pools, break_after(3 << 20))
    assert error is None
    assert num_connections == 2
    assert asked[0] == (0, 1, 2, 3, 4)
    assert asked[1][-1] == 4
    assert 0 < len(asked[1]) < 5
    assert all(is_written(pools[1], i, i, 0) for i in IDS)


def test_a_connection_that_breaks_again_and_again_fails(pools: tuple[KvPool, KvPool]) -> None:
    with pytest.raises(ConnectionError):
        pull_through(pools, *[break_after(1 << 19)] * TRIES)


@pytest.mark.parametrize("at", [300_000, (2 << 20) + 5000, (4 << 20) + (1 << 19)])
def test_a_chunk_with_a_flipped_bit_is_fetched_again(
    pools: tuple[KvPool, KvPool], asked: list[tuple[int, ...]], at: int
) -> None:
    error, num_connections = pull_through(pools, flip_at(at))
    assert error is None
    assert num_connections == 1
    assert len(asked) == 2
    assert asked[1] == (at >> 20,)
    assert all(is_written(pools[1], i, i, 0) for i in IDS)


def test_a_chunk_that_never_adds_up_voids_the_pull(
    pools: tuple[KvPool, KvPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = itertools.count()  # Sender and receiver get different sums.
    monkeypatch.setattr(tcp, "checksum", lambda views: next(sums))
    error, _ = pull_through(pools)
    assert "checksums" in (error or "")


def test_a_server_that_talks_nonsense_is_given_up(pools: tuple[KvPool, KvPool]) -> None:
    with pytest.raises(NotProven):
        pull_through(pools, lambda count, data: b"\xff" * len(data))


def test_a_pool_that_took_the_port_is_not_taken_for_the_one_before(
    pools: tuple[KvPool, KvPool],
) -> None:
    source, own = pools
    server = KvServer(source, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    link = TcpTransfer(
        PoolAddress(source.name, "00" * 8, "127.0.0.1", server.peers.port), KEY, GRANTS
    )
    with pytest.raises(PoolError, match="in its place"):
        link.pull(own, lease_of(server.address, 1), (1,), deadline())
    assert server.close(DEADLINE_S)
    assert not any(own.cache)


@contextlib.contextmanager
def linked(source: KvPool) -> Iterator[tuple[KvServer, TcpTransfer]]:
    """Open a pool's server, and a link to it."""
    server = KvServer(source, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    address = PoolAddress(source.name, source.birth, "127.0.0.1", server.peers.port)
    link = TcpTransfer(address, KEY, GRANTS)
    try:
        yield server, link
    finally:
        link.peer.close()
        assert server.close(DEADLINE_S)


def test_a_connection_closed_while_idle_is_made_again(pools: tuple[KvPool, KvPool]) -> None:
    source, own = pools
    with linked(source) as (server, link):
        assert link.pull(own, lease_of(server.address, 1), (1,), deadline()) is None
        for connection in list(server.peers._connection_to_thread):
            connection.shutdown(socket.SHUT_RDWR)
        assert link.pull(own, lease_of(server.address, 2), (2,), deadline()) is None
        assert link.pull(own, lease_of(server.address, 2), (2,), deadline(1e9)) is None


def test_a_deadline_that_is_over_is_an_error(pools: tuple[KvPool, KvPool]) -> None:
    source, own = pools
    with linked(source) as (server, link), pytest.raises(TimeoutError):
        link.pull(own, lease_of(server.address, 1), (1,), deadline(-1.0))


def test_a_chunk_is_a_block_at_least() -> None:
    assert blocks_per_chunk(1 << 10) == 1024
    assert blocks_per_chunk(CHUNK_BYTES) == 1
    assert blocks_per_chunk(61 * 64 * 576 * 2) == 1


def test_a_checksum_is_of_the_bytes_whatever_pieces_they_lie_in() -> None:
    data = bytearray(os.urandom(100_000))
    view = memoryview(data)
    whole = checksum([view])
    assert checksum([view[:1], view[1:70_000], view[70_000:]]) == whole
    data[99_999] ^= 1
    assert checksum([view[:50_000], view[50_000:]]) != whole
