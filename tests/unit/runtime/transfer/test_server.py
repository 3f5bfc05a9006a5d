"""Test a pool's server against strangers: they get nothing, delay no client, and leave nothing
behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from hadal.core.handshake import NONCE_BYTES, PROOF_BYTES, Handshake, key_of
from hadal.core.messages.units import KvLease
from hadal.runtime.transfer import peers
from hadal.runtime.transfer.grants import Grant
from hadal.runtime.transfer.peers import MAX_UNPROVEN, Channel, NotProven, open_channel
from hadal.runtime.transfer.pool import KvPool, remove_shared_memory
from hadal.runtime.transfer.tcp import (
    PURPOSE,
    AboutPool,
    AskNixl,
    ChunkHead,
    ChunksEnd,
    KvServer,
    PullChunks,
)
from tests.unit.runtime.kv_peers import RUN, SelfGrants, make_pool
from tests.waiting import DEADLINE_S, deadline, wait_until

SECRET = b"0123456789abcdef"
KEY = key_of(SECRET, PURPOSE)
GRANTS = SelfGrants(SECRET, "decode-0")
NUM_BLOCKS = 41
MAGIC = b"HADALP01"
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = CHALLENGE_BYTES + PROOF_BYTES
HEARD = msgspec.msgpack.Decoder(AboutPool | ChunkHead | ChunksEnd)
CLAIM = b"decode-0".ljust(128, b"\0")


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = make_pool(RUN, "prefill-0", NUM_BLOCKS)
    yield made
    made.close()
    remove_shared_memory(RUN)


@pytest.fixture
def server(pool: KvPool) -> Iterator[KvServer]:
    before = running_threads()
    made = KvServer(pool, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    yield made
    assert made.close(DEADLINE_S)
    assert running_threads() == before


def running_threads() -> set[threading.Thread]:
    """Return all threads except the pool's own, which ends by itself."""
    return {thread for thread in threading.enumerate() if thread.name != "touch"}


def answer_to(server: KvServer, data: bytes) -> bytes:
    """Return all bytes that the server sends before it closes the connection."""
    with socket.create_connection(
        ("127.0.0.1", server.peers.port), timeout=DEADLINE_S
    ) as connection:
        found = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                found += more
        except OSError as error:  # The server closed with unread data, maybe before all was sent.
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
        return found


def connect(
    server: KvServer, key: bytes = KEY, name: str = "decode-0", deadline_s: float | None = None
) -> tuple[Channel, AboutPool]:
    """Connect; return a channel for requests, and the server's first message."""
    deadline_s = deadline() if deadline_s is None else deadline_s
    channel = open_channel("127.0.0.1", server.peers.port, key, name, deadline_s)
    try:
        about = hear(channel, deadline_s)
    except OSError:
        channel.close()
        raise
    assert isinstance(about, AboutPool)
    return channel, about


def hear(channel: Channel, deadline_s: float | None = None) -> AboutPool | ChunkHead | ChunksEnd:
    found = channel.receive_frame(HEARD, deadline() if deadline_s is None else deadline_s)
    assert isinstance(found, AboutPool | ChunkHead | ChunksEnd)
    return found


def connecting(connection: socket.socket, key: bytes) -> tuple[Handshake, bytes]:
    """Return the connecting side of a handshake, and its first bytes."""
    port, nonce = connection.getpeername()[1], os.urandom(NONCE_BYTES)
    return Handshake(key, nonce, is_connector=True, port=port), MAGIC + nonce


def take_answer(handshake: Handshake, connection: socket.socket) -> bytes:
    answer = connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    handshake.challenged(answer[len(MAGIC) : CHALLENGE_BYTES])
    return answer


@pytest.mark.parametrize("size", [0, 3, CHALLENGE_BYTES - 1, CHALLENGE_BYTES, 10_000])
def test_a_stranger_gets_no_answer(server: KvServer, size: int) -> None:
    assert answer_to(server, b"GET / HTTP/1.1\r\n\r\n".ljust(size, b"x")[:size]) == b""


@pytest.mark.promise("Processes authenticate each other before they send anything over TCP")
def test_who_holds_another_secret_is_refused_and_counted(server: KvServer) -> None:
    other = key_of(b"another run's ke", PURPOSE)
    for _ in range(3):
        with pytest.raises(NotProven, match="secret"):
            connect(server, other)
    # The owner proves itself first: a puller that skips this check gets no further.
    for _ in range(3):
        with socket.create_connection(
            ("127.0.0.1", server.peers.port), timeout=DEADLINE_S
        ) as connection:
            handshake, challenge = connecting(connection, other)
            connection.sendall(challenge)
            take_answer(handshake, connection)
            connection.sendall(CLAIM + handshake.proof(CLAIM))
            assert connection.recv(1) == b""
    wait_until(lambda: server.peers.refusals.num_refused >= 3, "they are counted")
    connect(server)[0].close()


def test_what_was_said_to_one_connection_is_worth_nothing_on_another(server: KvServer) -> None:
    with socket.create_connection(("127.0.0.1", server.peers.port), timeout=DEADLINE_S) as first:
        handshake, challenge = connecting(first, KEY)
        first.sendall(challenge)
        take_answer(handshake, first)
        said = CLAIM + handshake.proof(CLAIM)
    with socket.create_connection(("127.0.0.1", server.peers.port), timeout=DEADLINE_S) as second:
        second.sendall(challenge)
        assert len(second.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
        second.sendall(said)
        assert second.recv(1) == b""


def test_strangers_that_say_nothing_take_nobodys_place(server: KvServer) -> None:
    idle = [
        socket.create_connection(("127.0.0.1", server.peers.port), timeout=DEADLINE_S)
        for _ in range(3 * MAX_UNPROVEN)
    ]
    connect(server)[0].close()  # No idle connection has been silent for too long.
    wait_until(lambda: server.peers.refusals.num_refused > 0, "the oldest are counted")
    for connection in idle:
        connection.close()


@pytest.mark.parametrize(
    "body", [b"\xff\xff", b"\x91\xa5Other", b"\x93\xa3Ask\x91\x01\x01", b"\x81\xa1a\x01"]
)
def test_what_cannot_be_read_ends_the_connection(server: KvServer, body: bytes) -> None:
    for data in (struct.pack("<I", len(body)) + body, struct.pack("<I", 1 << 31)):
        channel, _ = connect(server)
        channel.connection.sendall(data)
        with pytest.raises(ConnectionError):
            hear(channel)
        channel.close()


def ask_of(
    server: KvServer,
    ids: tuple[int, ...],
    versions: tuple[int, ...],
    chunks: tuple[int, ...],
    reader: str = "decode-0",
) -> PullChunks:
    lease = KvLease(server.address, ids, versions, 64)
    return PullChunks(ids, versions, chunks, GRANTS.grant(reader, lease))


def outcome(server: KvServer, ask: PullChunks, name: str = "decode-0") -> str:
    """Return "chunk", or the outcome that the server's answer begins with."""
    channel, _ = connect(server, name=name)
    with contextlib.closing(channel):
        channel.send_frame(ask)
        head = hear(channel)
        return "chunk" if isinstance(head, ChunkHead) else getattr(head, "outcome", "")


@pytest.mark.promise(
    "A lease names its reader: a grant (proof of the lease) is sent with the message "
    "that passes a lease on"
)
def test_blocks_are_served_under_a_lease_that_names_the_reader(
    server: KvServer, pool: KvPool
) -> None:
    sound = ask_of(server, (1, 2), (0, 0), (0,))
    assert outcome(server, sound) == "chunk"
    part = msgspec.structs.replace(sound, block_ids=(2,), versions=(0,))
    assert outcome(server, part) == "chunk"
    num_refused = server.peers.refusals.num_refused
    beyond = msgspec.structs.replace(sound, block_ids=(1, 3))
    for ask in (
        beyond,
        msgspec.structs.replace(sound, versions=(0, 1)),
        msgspec.structs.replace(sound, grant=Grant()),
        msgspec.structs.replace(sound, grant=Grant((1, 2), (0, 0), bytes(32))),
        msgspec.structs.replace(beyond, grant=Grant((1, 3), (0, 0), sound.grant.tag)),
        ask_of(server, (1, 2), (0, 0), (0,), "decode-1"),
    ):
        assert outcome(server, ask) == "refused"
    assert outcome(server, sound, "decode-1") == "refused"
    assert server.peers.refusals.num_refused == num_refused + 7
    # The freed block may be another's: the old lease gets nothing, and no new lease exists.
    pool.free((2,))
    assert outcome(server, sound) == "freed"
    assert outcome(server, msgspec.structs.replace(sound, versions=(0, 1))) == "refused"


@pytest.mark.parametrize(
    "ask",
    [
        ((1,), (0, 0), (0,)),
        ((NUM_BLOCKS,), (0,), (0,)),
        ((-1,), (0,), (0,)),
        ((1,), (0,), (1,)),
        ((1,), (0,), (-1,)),
    ],
)
def test_a_lease_that_does_not_fit_is_refused_and_the_next_is_served(
    server: KvServer, ask: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
) -> None:
    connection, _ = connect(server)
    with contextlib.closing(connection):
        connection.send_frame(ask_of(server, *ask))
        assert hear(connection) == ChunksEnd("refused")
        connection.send_frame(ask_of(server, (1,), (1,), (0,)))
        assert hear(connection) == ChunksEnd("freed")


def test_nixl_that_is_not_there_is_not_offered(server: KvServer) -> None:
    connection, about = connect(server)
    with contextlib.closing(connection):
        assert not about.has_nixl
        connection.send_frame(AskNixl())
        with pytest.raises(ConnectionError):
            hear(connection)


def test_one_who_takes_nothing_is_let_go(server: KvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, _ = connect(server)
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)
    with contextlib.closing(connection):
        connection.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        ids = tuple(range(1, NUM_BLOCKS)) * 20
        connection.send_frame(ask_of(server, ids, (0,) * len(ids), tuple(range(100))))
        wait_until(lambda: not server.peers.num_connections, "its connection is closed")


def test_one_who_asks_nothing_is_let_go(server: KvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_S", 0.2)
    connection, _ = connect(server)
    with contextlib.closing(connection), pytest.raises(ConnectionError):
        connection.receive_frame(HEARD, deadline(), DEADLINE_S)


def test_more_than_it_serves_wait_until_others_leave(
    pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_CONNECTIONS", 2)
    server = KvServer(pool, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    held = [connect(server)[0] for _ in range(2)]
    with pytest.raises(TimeoutError):
        connect(server, deadline_s=deadline(0.3))
    held.pop().close()
    connect(server)[0].close()
    held.pop().close()
    assert server.close(DEADLINE_S)


def test_closing_breaks_off_what_is_being_sent(pool: KvPool) -> None:
    server = KvServer(pool, "127.0.0.1", SECRET, GRANTS, lease_s=20.0)
    connection, _ = connect(server)
    ids = tuple(range(1, NUM_BLOCKS)) * 20
    connection.send_frame(ask_of(server, ids, (0,) * len(ids), tuple(range(100))))
    assert isinstance(hear(connection), ChunkHead)
    assert server.close(DEADLINE_S)
    assert server.peers.num_connections == 0
    connection.close()
