"""Malformed bodies never cause a 500 or a hang of a running server, which still answers afterwards."""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dist.serving import Server
from tests.unit.gateway.malformed import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGES_FIELDS,
    RESPONSES_FIELDS,
    bodies,
)
from tests.waiting import DEADLINE_S, PATIENCE_S

pytestmark = pytest.mark.more("tests/unit/gateway/test_malformed.py has it without a server")
TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture
def model(server: Server) -> str:
    return server.model


PATH_TO_BODIES: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": (TEXT, CHAT_FIELDS),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 2}, COMPLETION_FIELDS),
    "/v1/messages": (TEXT, MESSAGES_FIELDS),
    "/anthropic/v1/messages/count_tokens": (TEXT, MESSAGES_FIELDS),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, RESPONSES_FIELDS),
}
"""Path -> (a body that is accepted, strategies for its fields)."""


# All examples share the server; each leaves it clean.
@settings(
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ]
)
@pytest.mark.parametrize("path", PATH_TO_BODIES)
@given(st.data())
def test_bodies(client: httpx.Client, model: str, path: str, data: st.DataObject) -> None:
    valid, fields = PATH_TO_BODIES[path]
    body = data.draw(bodies({"model": model, **valid}, fields))
    reply = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
    if reply.status_code != 200:
        own = {"message", "type"}
        expected = own if "/messages" in path else own | {"param", "code"}
        assert set(reply.json()["error"]) == expected


def exchange(server: Server, data: bytes) -> bytes:
    """Send raw bytes; return the reply's beginning, read until its headers end or the server closes."""
    url = urllib.parse.urlsplit(server.url)
    with socket.create_connection(
        (url.hostname or "", url.port or 0), timeout=DEADLINE_S
    ) as connection:
        connection.sendall(data)
        received = b""
        while b"\r\n\r\n" not in received and (chunk := connection.recv(65536)):
            received += chunk
        return received


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (HEAD + b"Content-Length: -5\r\n\r\n", 400),
        (HEAD + b"Content-Length: 0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (HEAD.replace(b"application/json", b"\xff\xfe") + b"Content-Length: 2\r\n\r\n{}", 415),
    ],
    ids=range(9),
)
def test_raw_bytes(server: Server, data: bytes, status: int) -> None:
    assert exchange(server, data).split(b" ", 2)[1] == str(status).encode()


def test_endless_body_without_length(server: Server) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert exchange(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 70).startswith(
        b"HTTP/1.1 413"
    )


def test_body_that_is_cut_off(server: Server, client: httpx.Client) -> None:
    """The client disconnects within its body: no reply is possible, and nothing may leak."""
    url = urllib.parse.urlsplit(server.url)
    for _ in range(20):
        with socket.create_connection(
            (url.hostname or "", url.port or 0), timeout=DEADLINE_S
        ) as connection:
            connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    assert client.get("/health").status_code == 200


def test_it_still_answers(client: httpx.Client, model: str) -> None:
    reply = client.post("/v1/chat/completions", json={"model": model, **TEXT})
    assert reply.status_code == 200
    failed = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("hadal_requests_total") and 'status="500"' in line
    ]
    assert failed, "they are counted from 0"
    assert all(line.endswith(" 0.0") for line in failed), failed
