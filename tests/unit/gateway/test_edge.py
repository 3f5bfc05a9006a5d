"""Rules for every request: its id, the host names and origins that are answered, and its line in
the access log.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from hadal.core.config import GatewayConfig
from hadal.core.messages.units import Returned
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.guard import host_name
from hadal.runtime.process.logs import JSON, LineFormatter

from .scenes import error_of, events, scene
from .world import CHAT

LOCAL = {"bound_host": "127.0.0.1"}


@pytest.mark.promise(
    "A server without keys on this machine answers only to this machine's names and "
    "pages; [gateway] allowed_hosts and cors_origins add others."
)
async def test_a_local_server_without_keys_answers_to_its_own_names(model: ServedModel) -> None:
    """DNS rebinding makes a web page's own host name lead to this server. The page's requests then
    send that name in their Host header.
    """
    async with scene(model, **LOCAL, settings=GatewayConfig(allowed_hosts=("box.lan",))) as it:
        for host in (
            "localhost:8000",
            "127.0.0.1",
            "127.0.0.2:80",
            "[::1]:8000",
            "a.localhost",
            "box.lan",
            "BOX.lan",
        ):
            assert (await it.client.get("/v1/models", headers={"Host": host})).status_code == 200
        for host in (
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8000",
            "",
            "[::2]",
            "10.0.0.1",
        ):
            for path in ("/v1/models", "/health", "/metrics", "/audit"):
                error_of(await it.client.get(path, headers={"Host": host}), 421, "unknown_host")
        assert it.units.submitted == []


async def test_a_network_without_keys_is_answered_by_address_and_by_known_names(
    model: ServedModel,
) -> None:
    settings = GatewayConfig(allowed_hosts=("llm.example",))
    async with scene(model, bound_host="0.0.0.0", settings=settings) as it:
        for host in ("10.0.0.1:8000", "[fd00::2]:8000", "llm.example", "localhost:8000"):
            reply = await it.client.get("/v1/models", headers={"Host": host})
            assert reply.status_code == 200, host
        for host in ("evil.example", "10.0.0.1.evil.example", ""):
            reply = await it.client.get("/v1/files", headers={"Host": host})
            error_of(reply, 421, "unknown_host")
        for origin in ("https://evil.example", "http://localhost:3000", "http://10.0.0.2"):
            headers = {"Host": "10.0.0.1", "Origin": origin}
            error_of(await it.chat(headers=headers), 403, "origin_not_allowed")
        headers = {"Host": "10.0.0.1", "Origin": "http://10.0.0.1"}
        assert (await it.chat(headers=headers)).status_code == 200, "its own page"


async def test_with_keys_any_name_will_do(model: ServedModel) -> None:
    async with scene(model, keys=("k",), **LOCAL) as it:
        headers = {"Host": "llm.example", "Authorization": "Bearer k"}
        assert (await it.client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.promise(
    "A server without keys on this machine answers only to this machine's names and "
    "pages; [gateway] allowed_hosts and cors_origins add others."
)
async def test_pages_of_other_origins(model: ServedModel) -> None:
    async with scene(
        model, **LOCAL, settings=GatewayConfig(cors_origins=("https://chat.example",))
    ) as it:

        def headers(origin: str) -> dict[str, str]:
            return {"Host": "localhost:8000", "Origin": origin}

        names = "authorization, x-stainless-os"
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
        for origin in ("http://localhost:3000", "http://127.0.0.1:5173", "https://chat.example"):
            reply = await it.client.options(
                "/v1/chat/completions", headers={**headers(origin), **asks}
            )
            assert reply.status_code == 204
            assert reply.headers["access-control-allow-origin"] == origin
            assert "POST" in reply.headers["access-control-allow-methods"]
            assert reply.headers["access-control-allow-headers"] == names
            reply = await it.chat(headers=headers(origin))
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (
                200,
                origin,
            )
        evil = ("https://evil.example", "null", "http://localhost.evil.example", "http://[")
        for origin in evil:
            for reply in (
                await it.client.options(
                    "/v1/chat/completions", headers={**headers(origin), **asks}
                ),
                await it.chat(headers=headers(origin)),
            ):
                error_of(reply, 403, "origin_not_allowed")
                assert "access-control-allow-origin" not in reply.headers
        assert len(it.units.submitted) == 3
        for path, methods in (
            ("/v1/models", {"GET", "HEAD", "OPTIONS"}),
            ("/v1/completions", {"POST", "OPTIONS"}),
        ):
            reply = await it.client.options(path, headers={"Host": "localhost"})
            assert reply.status_code == 204
            assert set(reply.headers["allow"].split(", ")) == methods


@pytest.mark.promise(
    "Every reply has an X-Request-Id, and every request has a line in the log. "
    "--log-format json writes the log as JSON."
)
async def test_request_ids_come_back(model: ServedModel) -> None:
    async with scene(model) as it:
        for path, status in (("/v1/models", 200), ("/nothing", 404), ("/v1/chat/completions", 405)):
            reply = await it.client.get(path, headers={"X-Request-Id": "mine-1"})
            assert (reply.status_code, reply.headers["x-request-id"]) == (status, "mine-1")
        made = set()
        for bad in ("", "a b", "x" * 129, "\u00e9"):
            reply = await it.client.post(
                "/v1/completions", content=b"{", headers={"X-Request-Id": bad.encode()}
            )
            made.add(reply.headers["x-request-id"])
        assert len(made) == 4
        assert all(len(one) == 32 for one in made)
        body = {**CHAT, "stream": True}
        reply = await it.client.post(
            "/v1/chat/completions", json=body, headers={"X-Request-Id": "s"}
        )
        assert events(reply)
        assert reply.headers["x-request-id"] == "s"


@pytest.mark.parametrize("kind", ["on", "off"])
async def test_access_log(model: ServedModel, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    async with scene(model, settings=GatewayConfig(access_log=kind)) as it:
        with caplog.at_level(logging.INFO, "hadal.access"):
            headers = {"X-Request-Id": "mine-1"}
            reply = await it.chat(headers=headers)
            await it.client.get("/no%0Athing")
            for path in ("/health", "/v1/explain_cache"):
                assert (await it.client.get(path)).status_code == 200
    records = [record for record in caplog.records if record.name == "hadal.access"]
    if kind == "off":
        assert not records
        return
    first, second = records  # Successes of endpoints that monitors poll are logged at debug level.
    num_tokens = reply.json()["usage"]["completion_tokens"]
    assert first.getMessage().startswith("POST /v1/chat/completions 200 ")
    assert first.getMessage().endswith(f"ms {num_tokens} tokens, tenant everyone")
    assert second.getMessage().startswith("GET /no?thing 404 ")


@pytest.mark.promise(
    "Every reply has an X-Request-Id, and every request has a line in the log. "
    "--log-format json writes the log as JSON."
)
async def test_lines_about_a_request_carry_its_id(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Log lines of the request's own task, and lines about messages of units, have the id."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(LineFormatter("gateway", JSON))
    logger = logging.getLogger("hadal")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    caplog.set_level(logging.INFO, "hadal")
    async with scene(model) as it:
        it.units.go.clear()
        headers = {"X-Request-Id": "mine-1"}
        asking = asyncio.create_task(it.chat(headers=headers))
        while not it.units.prefilling:
            await asyncio.sleep(0)
        ((name, attempt),) = it.units.prefilling
        it.units.prefilling.clear()
        it.units.tell(Returned("prefill-0", name, attempt, "step failed: no luck"))
        it.units.go.set()
        reply = (await asking).json()
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    back, access = (one for one in told if one.get("request_id") == "mine-1")
    assert (back["unit"], back["level"]) == ("prefill-0", "info")
    assert "no luck" in back["message"]
    assert (access["status"], access["path"]) == (200, "/v1/chat/completions")
    assert access["tokens"] == reply["usage"]["completion_tokens"]
    assert access["reply_id"] == reply["id"]
    assert access["process"] == "gateway"


async def test_the_addresses_that_people_try(model: ServedModel) -> None:
    async with scene(model) as it:
        for path in ("/", "/v1", "/v1/"):
            assert "POST /v1/chat/completions" in (await it.client.get(path)).json()["endpoints"]
        assert (await it.client.get("/v1/models/")).json() == (
            await it.client.get("/v1/models")
        ).json()


@pytest.mark.promise("it opens with a key that has the right operator, as /audit and /trace do")
async def test_what_counts_all_tenants_is_for_operators(model: ServedModel) -> None:
    async with scene(
        model, keys=("one", "two", "three operator"), settings=GatewayConfig(open_metrics=False)
    ) as it:
        for path in ("/audit", "/trace", "/metrics"):
            error_of(await it.client.get(path), 401, "missing_api_key")
            error_of(
                await it.client.get(path, headers={"Authorization": "Bearer one"}),
                403,
                "not_an_operator",
            )
        assert (await it.client.get("/health")).status_code == 200

        for path in ("/audit", "/metrics"):
            assert (
                await it.client.get(path, headers={"Authorization": "Bearer three"})
            ).status_code == 200


def test_host_names() -> None:
    assert [host_name(host) for host in ("A:1", "[::1]:8", "[::1", "", "a")] == [
        "a",
        "::1",
        "::1",
        "",
        "a",
    ]
