"""Real sockets: clients that stall, send too much, do not read, or leave."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from hadal.gateway import process
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge import connection
from hadal.gateway.edge.connection import GatewayProtocol
from hadal.gateway.edge.descriptors import LOG_PERIOD_S, MIN_RESERVED, ConnectionLimit
from hadal.gateway.edge.intake import Patience
from tests.waiting import DEADLINE_S, wait_until

from .serving import Serving, serving
from .world import spell

CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
LONG = {**CHAT, "stream": True, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}
ENDLESS = {**LONG, "ignore_eos": True}
"""Stream without end. Without `ignore_eos` the gateway would stop it, because it repeats itself."""


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list to which each packet is added after the server has processed it."""
    packets: list[bytes] = []
    plain = GatewayProtocol.data_received

    def data_received(protocol: GatewayProtocol, data: bytes) -> None:
        plain(protocol, data)
        packets.append(data)

    monkeypatch.setattr(GatewayProtocol, "data_received", data_received)
    return packets


def connect(it: Serving, data: bytes) -> socket.socket:
    made = socket.create_connection(it.address, timeout=DEADLINE_S)
    made.sendall(data)
    return made


def read_all(made: socket.socket) -> bytes:
    data = b""
    while chunk := made.recv(65536):
        data += chunk
    return data


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


@pytest.mark.parametrize(
    "data", [b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /h"]
)
def test_headers_that_do_not_end(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.1)
    with serving(model, spell(model, "a")) as it, connect(it, data) as made:
        assert b" 408 Request Timeout\r\n" in read_all(made)


def test_headers_without_end(model: ServedModel) -> None:
    with serving(model, spell(model, "a")) as it:
        made = connect(it, b"GET /health HTTP/1.1\r\nX: " + b"a" * 300_000)
        with made:
            try:
                assert b" 431 " in read_all(made)
            except ConnectionResetError:
                return  # Closed before all was sent: the refusal is lost on the way.


def wait_ended(made: socket.socket, data: bytes) -> None:
    """Send `data` again and again until the server ends the connection."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while True:
            made.sendall(data)
            time.sleep(0.005)


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("before", [b"0\r\n", b"1;", b"2\r\nab\r\n0\r\n"])
@pytest.mark.parametrize("more", [b"a: xxxxxxxxxxxxxx\r\n", b"x"])
def test_what_frames_a_body_is_counted_as_a_head_is(
    model: ServedModel, before: bytes, more: bytes
) -> None:
    """Trailers and chunk extensions have the length limit of headers. The client has no key, and
    its request was already answered.
    """
    with (
        serving(model, spell(model, "a"), keys=("mine",)) as it,
        connect(it, CHUNKED + before) as made,
    ):
        wait_ended(made, more * 1000)


def test_a_request_that_was_answered_does_not_go_on_for_ever(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", 0.3)
    with (
        serving(model, spell(model, "a"), keys=("mine",)) as it,
        connect(it, CHUNKED) as made,
    ):
        wait_ended(made, b"1\r\na\r\n")


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /health HTTP/1.1\r\nHo"])
def test_what_comes_behind_a_request_does_not_end_its_answer(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, received: list[bytes], behind: bytes
) -> None:
    """The header timeout passes while the answer is still being streamed."""
    monkeypatch.setattr(connection, "HEADERS_S", 0.1)
    plain_late, late = GatewayProtocol._headers_late, threading.Event()

    def headers_late(protocol: GatewayProtocol) -> None:
        plain_late(protocol)
        late.set()

    monkeypatch.setattr(GatewayProtocol, "_headers_late", headers_late)
    body = {**CHAT, "max_tokens": 40, "stream": True}
    with serving(model, spell(model, "a", then_stop=False)) as it:
        units = it.world.units
        units.held_at = 3
        with connect(it, post(body)) as made:
            wait_until(lambda: units.decoding, "it is answered")
            made.sendall(behind)
            wait_until(lambda: behind in received, "it is there")
            wait_until(lambda: late.is_set() or not behind.strip(), "its time is over")
            units.let_go()
            data = b""
            while b"data: [DONE]" not in data:
                piece = made.recv(65536)
                assert piece, data
                data += piece
    assert b" 408 " not in data.partition(b"data: [DONE]")[0]


def test_headers_that_come_all_at_once_are_counted_too(model: ServedModel) -> None:
    """The headers are already complete when their length is checked."""
    with serving(model, spell(model, "a")) as it:
        data = b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"
        with connect(it, data) as made:
            assert b" 431 " in read_all(made).partition(b"\r\n")[0]


@pytest.mark.parametrize("cut", [1, 20, 150, 10_000])
def test_an_offer_of_http_2_keeps_the_body(
    model: ServedModel, received: list[bytes], cut: int
) -> None:
    """`curl --http2` and Java's client send this. The body used to be lost: the answer was 400."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings:"
        b" AAMAAABkAAQAAP__\r\n"
    )
    data = post({**CHAT, "max_tokens": 3}).replace(b"Host: a\r\n", b"Host: a\r\n" + offer)
    with serving(model, spell(model, "a")) as it, connect(it, data[:cut]) as made:
        wait_until(lambda: received, "the first part is there")
        made.sendall(data[cut:])
        assert read_all(made).startswith(b"HTTP/1.1 200 OK")


def test_two_requests_in_one_packet(model: ServedModel) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: a\r\n"
    both = get + b"\r\n" + get + b"Connection: close\r\n\r\n"
    with serving(model, spell(model, "a")) as it, connect(it, both) as made:
        assert read_all(made).count(b"HTTP/1.1 200 OK") == 2


def test_no_http(model: ServedModel) -> None:
    with (
        serving(model, spell(model, "a")) as it,
        connect(it, b"\x16\x03\x01nonsense\r\n\r\n") as made,
    ):
        head, _, body = read_all(made).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_requests_one_after_the_other(model: ServedModel) -> None:
    with (
        serving(model, spell(model, "a")) as it,
        httpx.Client(base_url=it.url, timeout=DEADLINE_S) as client,
    ):
        for _ in range(5):
            assert (
                client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}).status_code
                == 200
            )
            assert client.post("/v1/chat/completions", content=b"{").status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves(model: ServedModel, stream: bool) -> None:
    with serving(model, spell(model, "a", then_stop=False), step_s=0.005) as it:
        made = connect(it, post({**CHAT, "stream": stream, "max_tokens": 4000, "n": 2}))
        wait_until(lambda: len(it.world.units.decoding) == 2, "both choices are decoded")
        made.close()
        wait_until(lambda: not it.world.units.num_held, "nothing is left of them")
        assert len(set(it.world.units.cancelled)) == 2


def test_client_that_does_not_read(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers fill up; then the request is cancelled and the kernel ends the connection."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.3)
    with serving(model, spell(model, "abc", then_stop=False), patience=Patience(send_s=0.2)) as it:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(DEADLINE_S)
        made.connect(it.address)
        with made:
            made.sendall(post({**LONG, "n": 8}))
            wait_until(lambda: it.world.units.cancelled, "it is cancelled")
            wait_until(lambda: not len(it.world.gateway.intake.permits), "the request has ended")


def test_port_without_a_reader_is_stopped_before_much_waits_for_it(model: ServedModel) -> None:
    """The requests are cancelled long before the deadline for sending, here 600 s."""
    slow = {**ENDLESS, "n": 8}
    script = spell(model, "abc", then_stop=False)
    with serving(model, script, patience=Patience(send_s=600.0)) as it, connect(it, post(slow)):
        wait_until(lambda: len(set(it.world.units.cancelled)) == 8, "all are cancelled")
        assert it.world.gateway.link.num_open == 0


def test_port_without_a_reader_is_not_missed_by_others(model: ServedModel) -> None:
    """An unread stream delays no other stream."""
    slow = {**ENDLESS, "n": 4}
    script = spell(model, "abc", then_stop=False)
    with serving(model, script, patience=Patience(send_s=600.0)) as it, connect(it, post(slow)):
        wait_until(lambda: len(it.world.units.submitted) == 4, "the slow one has begun")
        for _ in range(3):
            reply = httpx.post(
                f"{it.url}/v1/chat/completions", json={**CHAT, "max_tokens": 20}, timeout=DEADLINE_S
            )
            assert reply.json()["usage"]["completion_tokens"] == 20
        wait_until(lambda: len(it.world.gateway.intake.permits) == 1, "the slow one is left")


@pytest.mark.promise(
    "A client of HTTP/1.0 gets no chunked body: the end of its reply is the end of the connection."
)
def test_a_client_of_http_1_0_gets_the_body_as_it_is(model: ServedModel) -> None:
    with serving(model, spell(model, "Four.")) as it:
        for fields in ({"stream": True}, {}):
            with connect(it, post({**CHAT, **fields}).replace(b"HTTP/1.1", b"HTTP/1.0")) as made:
                head, _, body = read_all(made).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower()
            assert b"connection: close" in head.lower()
            if fields:
                events = body.decode().split("\n\n")
                assert events[-2:] == ["data: [DONE]", ""]
                assert all(event.startswith("data: {") for event in events[:-2])
            else:
                assert json.loads(body)["choices"]
        with connect(it, b"GET /nothing HTTP/1.0\r\nHost: a\r\n\r\n") as made:
            head, _, body = read_all(made).partition(b"\r\n\r\n")
        assert b" 404 " in head
        assert json.loads(body)["error"]


def test_a_connection_near_the_limit_of_descriptors_gets_503_and_is_counted(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    monkeypatch.setattr(process, "descriptor_limit", lambda: highest + 30 + MIN_RESERVED)
    request = b"GET /metrics HTTP/1.1\r\nHost: a\r\n"
    with serving(model, spell(model, "a")) as it, contextlib.ExitStack() as opened:
        replies: list[bytes] = []
        while len(replies) < 200 and not (replies and b" 503 " in replies[-1]):
            made = opened.enter_context(connect(it, request + b"\r\n"))
            replies.append(made.recv(65536))
        opened.close()  # Their descriptors are free again.

        def counted() -> bytes:
            with connect(it, request + b"Connection: close\r\n\r\n") as asking:
                return read_all(asking)

        answers: list[bytes] = []
        wait_until(
            lambda: answers.append(counted()) or b" 200 " in answers[-1],
            "a connection is served again",
        )
    *served, refusal = replies
    assert served
    assert all(reply.startswith(b"HTTP/1.1 200 ") for reply in served)
    head, _, body = refusal.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 2" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    [count] = [
        float(line.split()[1])
        for line in answers[-1].splitlines()
        if line.startswith(b"hadal_connections_over_limit_total ")
    ]
    assert count == len(answers)
    assert len([line for line in caplog.messages if line.startswith("connections refused")]) == 1


def test_refused_connections_are_logged_once_a_period(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    limit = ConnectionLimit(64, lambda: now_s)
    assert [limit.admits(number) for number in (0, 47)] == [True, True]
    with caplog.at_level(logging.WARNING, "hadal.gateway"):
        assert not any(limit.admits(48) for _ in range(100))
        now_s = LOG_PERIOD_S
        assert not limit.admits(63)
    assert limit.num_refused == 101
    assert [line.partition(" Raise")[0] for line in caplog.messages] == [
        "connections refused, as 49 of 64 descriptors are open: refused=1.",
        "connections refused, as 64 of 64 descriptors are open: refused=100.",
    ]
    assert ConnectionLimit(8000, lambda: 0.0).admits(6999)
    assert not ConnectionLimit(8000, lambda: 0.0).admits(7000)
