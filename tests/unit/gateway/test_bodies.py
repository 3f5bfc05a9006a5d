"""Bodies in a content encoding: decoded however they are cut, and never beyond the limit."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import pytest
from backports import zstd
from starlette.requests import Request

from hadal.core.config import LimitsConfig
from hadal.core.errors import RequestError
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge import codings
from hadal.gateway.edge.bodies import read_body
from hadal.gateway.edge.codings import decoder_of
from hadal.gateway.edge.errors import ApiError

from .scenes import error_of, scene

LIMIT = 1 << 16
CODINGS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
BODY = json.dumps({"model": "small", "input": "2 + 2?"}).encode()


async def pieces_of(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.mark.parametrize("coding", CODINGS)
async def test_an_encoded_body_is_read_however_it_is_cut(model: ServedModel, coding: str) -> None:
    encoded = CODINGS[coding](BODY)
    half = len(BODY) // 2
    twice = CODINGS[coding](BODY[:half]) + CODINGS[coding](BODY[half:])
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with scene(model) as it:
        plain = await it.client.post(
            "/v1/responses", content=BODY, headers=headers | {"Content-Encoding": "identity"}
        )
        for data, size in ((encoded, 1), (encoded, 7), (encoded, len(encoded)), (twice, 3)):
            reply = await it.client.post(
                "/v1/responses", content=pieces_of(data, size), headers=headers
            )
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"] == plain.json()["usage"]
        for name in (coding.upper(), f" {coding} ", f"identity, {coding}", f",{coding},"):
            more = {"Content-Encoding": name}
            reply = await it.client.post("/v1/responses", content=encoded, headers=headers | more)
            assert reply.status_code == 200
        twice_coded = CODINGS[coding](encoded)
        for names in ([f"{coding}, {coding}"], [coding, coding], ["br"], ["identity", "br"]):
            lines = [("Content-Type", "application/json")]
            lines += [("Content-Encoding", name) for name in names]
            reply = await it.client.post("/v1/responses", content=twice_coded, headers=lines)
            error_of(reply, 415, "unsupported_media_type")
            assert reply.headers["accept-encoding"] == "zstd, gzip"
        lines = [("Content-Encoding", "identity"), ("Content-Encoding", coding)]
        reply = await it.client.post("/v1/responses", content=encoded, headers=lines)
        assert reply.status_code == 200, reply.text


@pytest.mark.promise("decoded bytes count against the limit of bodies while they come")
@pytest.mark.parametrize("coding", CODINGS)
async def test_a_bomb_is_refused_before_it_is_decoded(model: ServedModel, coding: str) -> None:
    """64 MiB in a few KiB: the memory for it is never taken."""
    bomb = CODINGS[coding](bytes(1 << 26))
    assert len(bomb) < 1 << 17
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    limits = LimitsConfig(max_body_bytes=len(bomb) + LIMIT)
    async with scene(model, limits=limits) as it:
        tracemalloc.start()
        reply = await it.client.post("/v1/responses", content=bomb, headers=headers)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        error_of(reply, 413, "body_too_large")
        assert most < 1 << 24
        small = LimitsConfig(max_body_bytes=LIMIT)
    for size, status in ((LIMIT, 400), (LIMIT + 1, 413)):
        async with scene(model, limits=small) as it:
            data = CODINGS[coding](b"x" * size)
            reply = await it.client.post("/v1/responses", content=data, headers=headers)
            assert reply.status_code == status, reply.text


async def test_nothing_is_awaited_behind_the_end_of_a_large_body() -> None:
    messages = [{"type": "http.request", "body": bytes(LIMIT), "more_body": True}] * 2
    messages += [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, object]:
        return messages.pop(0)  # An IndexError if it is asked for more.

    for _ in range(2):
        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(ApiError) as caught:
            await read_body(request, LIMIT)
        assert (caught.value.status, messages) == (413, [])
        messages = [{"type": "http.request", "body": bytes(LIMIT + 1), "more_body": False}]


@pytest.mark.parametrize("coding", CODINGS)
async def test_what_is_cut_or_no_such_data_is_refused(model: ServedModel, coding: str) -> None:
    encoded = CODINGS[coding](BODY)
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with scene(model) as it:
        for data in (encoded[:-1], encoded[:9], b"", BODY, encoded + b"more"):
            reply = await it.client.post("/v1/responses", content=data, headers=headers)
            message = error_of(reply, 400)["message"]
            assert coding in message, (data, message)


def test_a_window_beyond_that_of_http_is_refused() -> None:
    """RFC 9659: a decoder needs no more than 8 MiB."""
    options = {zstd.CompressionParameter.window_log: 27}
    compressor = zstd.ZstdCompressor(options=options)
    data = compressor.compress(random.Random(1).randbytes(100)) + compressor.flush()
    decoder = decoder_of("zstd")
    assert decoder is not None
    with pytest.raises(RequestError, match="zstd"):
        list(decoder.pieces(data))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_body_has_few_parts(coding: str) -> None:
    for num, is_read in ((64, True), (65, False)):
        decoder = decoder_of(coding)
        assert decoder is not None
        data = CODINGS[coding](b"a") * num
        if is_read:
            assert b"".join(decoder.pieces(data)) == b"a" * num
        else:
            with pytest.raises(RequestError, match="more than 64"):
                list(decoder.pieces(data))


def test_all_that_a_chunk_holds_comes() -> None:
    """A decoder may hold more decoded data than one piece has."""
    text = zlib.compress(b"") + bytes(3 << 20)
    for coding, compress in CODINGS.items():
        decoder = decoder_of(coding)
        assert decoder is not None
        pieces = [*decoder.pieces(compress(text))]
        assert b"".join(pieces) == text
        assert max(map(len, pieces)) <= 1 << 18
        assert decoder.is_complete


def test_without_its_package_zstd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codings, "HAS_ZSTD", False)
    with pytest.raises(ApiError, match=r"backports\.zstd") as refused:
        decoder_of("zstd")
    assert refused.value.status == 415
    assert (refused.value.headers or {})["Accept-Encoding"] == "gzip"
    assert decoder_of("gzip") is not None
