"""A pool's server before strangers: they get nothing, hold up nobody, and leave nothing."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from hadal.runtime import kv_frames, kv_server
from hadal.runtime.kv_frames import VERSION, Ask, AskNixl, BadPeer, connect, receive_frame, receive_head, send_frame
from hadal.runtime.kv_pool import KvPool, remove_segments
from hadal.runtime.kv_server import KvServer
from tests.unit.runtime.kv_peers import RUN, make_pool

KEY = b"0123456789abcdef"
NUM_BLOCKS = 41


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = make_pool(RUN, "prefill-0", NUM_BLOCKS)
    yield made
    made.close()
    remove_segments(RUN)


@pytest.fixture
def server(pool: KvPool) -> Iterator[KvServer]:
    before = threading.active_count()
    made = KvServer(pool, "127.0.0.1", KEY, lease_s=20.0)
    yield made
    assert made.close(5.0)
    assert threading.active_count() == before


def soon() -> float:
    return time.monotonic() + 10.0


def answer_to(server: KvServer, data: bytes) -> bytes:
    """All that comes back before the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        found = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(1 << 16):
                found += more
        except OSError as error:  # It closed with some of ours unread, before or after we had said all.
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
        return found


def hello(key: bytes = KEY, version: int = VERSION) -> bytes:
    return struct.pack("<8sH16s", b"HADALKVT", version, key)


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, b"\0" * 26, hello(b"another run's ke"), hello()[:20]]
)
def test_a_stranger_gets_no_answer(server: KvServer, data: bytes) -> None:
    assert answer_to(server, data) == b""


def test_another_version_is_told_so(server: KvServer) -> None:
    assert answer_to(server, hello(version=VERSION + 1)) == struct.pack("<8sH", b"HADALKVT", VERSION)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(struct.pack("<8sH", b"HADALKVT", VERSION + 1), "version 2"), (b"HTTP/1.1 400 Bad Request", "not the server")],
)
def test_a_server_of_another_version_or_kind_is_given_up(answer: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(1 << 12)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(BadPeer, match=reason):
            connect("127.0.0.1", listener.getsockname()[1], KEY, soon())
        thread.join(10)


@pytest.mark.parametrize(
    "body", [b"\xff\xff", b"\x91\xa5Other", b"\x93\xa3Ask\x91\x01\x01", b"\x81\xa1a\x01", b"\x91\xa7AskNixl"]
)
def test_what_cannot_be_read_or_done_ends_the_connection(server: KvServer, body: bytes) -> None:
    greeting = answer_to(server, hello())
    assert answer_to(server, hello() + frame(body)) == greeting
    assert answer_to(server, hello() + struct.pack("<I", 1 << 31)) == greeting


@pytest.mark.parametrize(
    "ask",
    [
        Ask((1,), (0, 0), (0,)), Ask((NUM_BLOCKS,), (0,), (0,)), Ask((-1,), (0,), (0,)), Ask((1,), (0,), (1,)),
        Ask((1,), (0,), (-1,)),
    ],
)  # fmt: skip
def test_a_lease_that_does_not_fit_is_refused_and_the_next_is_served(server: KvServer, ask: Ask) -> None:
    connection, _ = connect("127.0.0.1", server.port, KEY, soon())
    with connection:
        send_frame(connection, ask)
        assert receive_head(connection, soon())[0] == kv_frames.REFUSED
        send_frame(connection, Ask((1,), (1,), (0,)))
        assert receive_head(connection, soon())[0] == kv_frames.FREED


def test_nixl_that_is_not_there_is_not_offered(server: KvServer) -> None:
    connection, about = connect("127.0.0.1", server.port, KEY, soon())
    with connection:
        assert not about.has_nixl
        send_frame(connection, AskNixl())
        with pytest.raises(ConnectionError):
            receive_frame(connection, soon())


def test_one_who_takes_nothing_is_let_go(server: KvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_frames, "SILENCE_S", 0.2)
    connection, _ = connect("127.0.0.1", server.port, KEY, soon())
    with connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        ids = tuple(range(1, NUM_BLOCKS)) * 20
        send_frame(connection, Ask(ids, (0,) * len(ids), tuple(range(100))))
        deadline_s = soon()
        while server.num_connections:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_one_who_asks_nothing_is_let_go(server: KvServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_server, "IDLE_S", 0.2)
    connection, _ = connect("127.0.0.1", server.port, KEY, soon())
    with connection, pytest.raises(ConnectionError):
        receive_frame(connection, soon(), 10.0)


def test_more_than_it_serves_wait_until_others_leave(pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_server, "MAX_CONNECTIONS", 2)
    server = KvServer(pool, "127.0.0.1", KEY, lease_s=20.0)
    held = [connect("127.0.0.1", server.port, KEY, soon())[0] for _ in range(2)]
    with pytest.raises(TimeoutError):
        connect("127.0.0.1", server.port, KEY, time.monotonic() + 0.3)
    held.pop().close()
    connect("127.0.0.1", server.port, KEY, soon())[0].close()
    held.pop().close()
    assert server.close(5.0)


def test_closing_breaks_off_what_is_being_sent(pool: KvPool) -> None:
    server = KvServer(pool, "127.0.0.1", KEY, lease_s=20.0)
    connection, _ = connect("127.0.0.1", server.port, KEY, soon())
    ids = tuple(range(1, NUM_BLOCKS)) * 20
    send_frame(connection, Ask(ids, (0,) * len(ids), tuple(range(100))))
    receive_head(connection, soon())
    assert server.close(5.0)
    assert server.num_connections == 0
    connection.close()
