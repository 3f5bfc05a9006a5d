"""/openapi.json is true: it describes every route and every reply. The clients' types that it names
read every reply and every event of a stream.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from hadal.gateway.app import make_app, routes_of
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.guard import Edge
from hadal.gateway.endpoints import endpoints_of
from hadal.runtime.batches import BatchStore
from hadal.runtime.ledger.address import ledger_url
from tests.reply_types import read

from .event_streams import named_events
from .fake_units import FakeUnits
from .scenes import events, scene
from .tool_model import calls_then, tool_model
from .world import CHAT, gateway_of, spell, world

COMPLETION = {"model": "small", "prompt": "once", "max_tokens": 3}
MESSAGE = {**CHAT, "max_tokens": 60}
RESPONSE = {"model": "small", "input": "2 + 2?"}
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 2, "return_token_ids": True}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "logprobs": 2, "n": 2, "return_token_ids": True}),
    ("/v1/completions", {**COMPLETION, "logprobs": 1, "echo": True}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, "max_tokens": 2}),
    ("/v1/messages", {**MESSAGE, "stop_sequences": ["answer"]}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "max_output_tokens": 2}),
    ("/v1/responses", {**RESPONSE, "metadata": {"a": "b"}, "instructions": "Add."}),
]
"""Paths and bodies of requests with replies that may also be streamed."""
FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
CALLED = [
    ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
    (
        "/v1/messages",
        {**MESSAGE, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
    ),
    ("/v1/responses", {**RESPONSE, "tools": [{"type": "function", **FUNCTION}]}),
    ("/v1/responses", {**RESPONSE, "tools": [{"type": "custom", "name": "weather"}]}),
]
"""Requests that are answered by a call of a tool."""


def store_in(folder: Path) -> BatchStore:
    return BatchStore(ledger_url(str(folder / "batches.sqlite")))


async def test_every_route_is_described(model: ServedModel, tmp_path: Path) -> None:
    """The application and the description are made from one table: a new route needs a row in it."""
    async with scene(model, store=store_in(tmp_path)) as it:
        described = (await it.client.get("/openapi.json")).json()["paths"]
        assert isinstance(it.app, Edge)
        app = it.app._app
        assert isinstance(app, Starlette)
        known = {
            (path, method.upper())
            for own, operations in described.items()
            for method, operation in operations.items()
            for path in (own, *operation.get("x-also-at", ()))
        }
        for route in app.routes:
            assert isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}:
                path = route.path.replace(":path}", "}")
                also = {(each.replace(":path}", "}"), how) for each, how in known}
                assert (path, method) in also, f"{method} {route.path} is in no row"
        assert ("/v1/batches/{batch_id}/cancel", "POST") in known


def check(document: dict[str, Any], shown: str, reply: httpx.Response) -> None:
    """Check a reply against its description at the path `shown`."""
    operation = document["paths"][shown][reply.request.method.lower()]
    content = operation["responses"][str(reply.status_code)]["content"]
    schema = content["application/json"]["schema"] | {"components": document["components"]}
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(reply.json())
    if "title" in schema:
        read(schema["title"], reply.json())


def check_events(document: dict[str, Any], path: str, reply: httpx.Response) -> None:
    """Check a stream's events against the description of their data."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    is_named = path in ("/v1/messages", "/v1/responses")
    found = named_events(reply.content) if is_named else events(reply)
    assert len(found) > 2
    for fields in found:
        read(data["title"], fields, is_event=True)


def test_routes_are_the_table_s(model: ServedModel) -> None:
    gateway = gateway_of(model, FakeUnits(spell(model, "a")))
    make_app(gateway)
    endpoints = endpoints_of(gateway)
    for each in endpoints:
        for path in (each.path, *each.also):
            (route,) = [one for one in routes_of(endpoints) if one.path == path]
            assert each.method in (route.methods or ())
    gateway.service.close()


@pytest.mark.promise(
    "GET /openapi.json describes every endpoint (OpenAPI 3.1), generated from the "
    "structs that parse bodies"
)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        *((path, body, 200) for path, body in ASKED),
        ("/v1/chat/completions", {**CHAT, "n": 0}, 400),
        ("/v1/completions", {**COMPLETION, "prompt_logprobs": 2}, 200),
        ("/v1/messages", CHAT, 400),
        ("/v1/messages/count_tokens", MESSAGE, 200),
        ("/v1/messages/count_tokens", {}, 400),
        ("/v1/responses", {}, 400),
        ("/v1/tokenize", {"prompt": "once", "return_token_strs": True}, 200),
        ("/v1/tokenize", {}, 400),
        ("/v1/detokenize", {"tokens": [5, 6]}, 200),
        ("/v1/models", None, 200),
        ("/v1/models/small", None, 200),
        ("/v1/models/other", None, 404),
        ("/v1/models/", None, 200),
        ("/openapi.json", None, 200),
        ("/health", None, 200),
        ("/audit", None, 200),
        ("/v1", None, 200),
        ("/trace", None, 404),
        ("/v1/responses/resp_1", None, 404),
        ("/v1/files", None, 200),
        ("/v1/files/file-1", None, 404),
        ("/v1/batches", None, 200),
        ("/v1/batches", {}, 400),
        ("/v1/batches", {**BATCH, "input_file_id": "a\0b"}, 404),
        ("/v1/batches/batch_1", None, 404),
    ],
)
async def test_a_reply_is_what_is_described(
    model: ServedModel, tmp_path: Path, path: str, body: dict[str, Any] | None, status: int
) -> None:
    async with scene(model, store=store_in(tmp_path)) as it:
        document = (await it.client.get("/openapi.json")).json()
        method = "GET" if body is None else "POST"
        query = {"wait_s": "0"} if path == "/trace" else {}
        reply = await it.client.request(method, path, json=body, params=query)
        assert reply.status_code == status, reply.text
        shown = next(
            own
            for own in document["paths"]
            if own == path or (own.endswith("}") and path.startswith(own.partition("{")[0]))
        )
        check(document, shown, reply)
        for _, other in document["paths"][shown].items():
            assert other["summary"]


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_events_are_what_is_described(
    model: ServedModel, path: str, body: dict[str, Any]
) -> None:
    async with scene(model) as it:
        document = (await it.client.get("/openapi.json")).json()
        options: dict[str, Any] = {}
        if "completions" in path:
            options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for more in ({}, options):
            asked = {**body, "stream": True, **more}
            check_events(document, path, await it.client.post(path, json=asked))


async def test_calls_are_what_is_described() -> None:
    with tool_model() as model:
        script = calls_then("weather", '{"city":"Oslo"}', str)
        async with world(model, script) as it:
            document = (await it.client.get("/openapi.json")).json()
            for path, body in CALLED:
                reply = await it.client.post(path, json=body)
                assert "weather" in reply.text.replace('"tools":', "", 1)
                check(document, path, reply)
                reply = await it.client.post(path, json={**body, "stream": True})
                check_events(document, path, reply)
            await it.settle()


async def test_a_kept_response_is_as_described(model: ServedModel) -> None:
    async with scene(model) as it:
        document = (await it.client.get("/openapi.json")).json()
        made = (await it.client.post("/v1/responses", json=RESPONSE)).json()
        path, shown = f"/v1/responses/{made['id']}", "/v1/responses/{response_id}"
        check(document, shown, await it.client.get(path))
        check(document, f"{shown}/input_items", await it.client.get(f"{path}/input_items"))
        check(document, shown, await it.client.delete(path))


async def test_files_and_batches_are_as_described(model: ServedModel, tmp_path: Path) -> None:
    async with scene(model, store=store_in(tmp_path)) as it:
        document = (await it.client.get("/openapi.json")).json()

        async def ask(method: str, path: str, shown: str = "", **given: Any) -> Any:
            reply = await it.client.request(method, path, **given)
            assert reply.status_code == 200, reply.text
            if shown.endswith("/content"):
                return reply.text
            check(document, shown or path.partition("?")[0], reply)
            return reply.json()

        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": b"{}"}}
        file = await ask("POST", "/v1/files", **form)
        content = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]
        assert content.keys() == {"multipart/form-data"}
        one, shown = f"/v1/files/{file['id']}", "/v1/files/{file_id}"
        assert await ask("GET", one, shown) == file
        assert await ask("GET", f"{one}/content", f"{shown}/content") == "{}"
        assert (await ask("GET", "/v1/files?limit=1&order=asc", "/v1/files"))["data"] == [file]
        batch = await ask("POST", "/v1/batches", json={**BATCH, "input_file_id": file["id"]})
        one, shown = f"/v1/batches/{batch['id']}", "/v1/batches/{batch_id}"
        assert await ask("GET", one, shown) == batch
        assert (await ask("GET", "/v1/batches"))["data"] == [batch]
        cancelled = await ask("POST", f"{one}/cancel", f"{shown}/cancel")
        assert cancelled["status"] == "cancelling"
        assert await ask("DELETE", f"/v1/files/{file['id']}", "/v1/files/{file_id}")


@pytest.mark.promise(
    "GET /openapi.json describes every endpoint (OpenAPI 3.1), generated from the "
    "structs that parse bodies"
)
async def test_bodies_are_described_as_they_are_read(model: ServedModel) -> None:
    """Accepted bodies satisfy the description; refused ones violate it if types can express it."""
    async with scene(model) as it:
        document = (await it.client.get("/openapi.json")).json()

        def validator(path: str) -> Draft202012Validator:
            operation = document["paths"][path]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            return Draft202012Validator({**schema, "components": document["components"]})

        for path, good in (
            ("/v1/chat/completions", {**CHAT, **LOGPROBS}),
            ("/v1/completions", COMPLETION),
            ("/v1/messages", MESSAGE),
            ("/v1/responses", RESPONSE),
        ):
            validator(path).validate(good)
            for bad in ({}, {**good, "model": 1}, {**good, "temperature": 3}, {**good, "top_p": 0}):
                assert not validator(path).is_valid(bad)
                reply = await it.client.post(path, json=bad)
                assert reply.status_code == 400


async def test_keys_are_described_where_they_are_needed(model: ServedModel, tmp_path: Path) -> None:
    async with scene(model, keys=("k",), store=store_in(tmp_path)) as it:
        document = (await it.client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                url = re.sub(r"\{\w+\}", "a", path)
                reply = await it.client.request(method, url, json={})
                assert (reply.status_code == 401) == bool(operation["security"]), (method, path)


async def test_the_document_can_be_encoded_anew(model: ServedModel) -> None:
    """The document has no NaN or infinity, no reference without a schema, and no unused schema."""
    async with scene(model) as it:
        raw = (await it.client.get("/openapi.json")).content
        document = msgspec.json.decode(raw)
        names = set(document["components"]["schemas"])

        def references(value: Any) -> list[str]:
            if isinstance(value, dict):
                own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
                return own + [one for each in value.values() for one in references(each)]
            if isinstance(value, list):
                return [one for each in value for one in references(each)]
            return []

        used = {one.rpartition("/")[2] for one in references(document)}
        assert used <= names
        assert names - used == set(), "described and used by nothing"
