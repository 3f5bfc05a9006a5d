"""/openapi.json is true: every route is in it, and every reply is what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
from hadal.runtime.ledger.store import ledger_url

from .fake_units import FakeUnits
from .scenes import scene
from .world import CHAT, gateway_of, spell

COMPLETION = {"model": "small", "prompt": "once", "max_tokens": 3}
MESSAGE = {**CHAT, "max_tokens": 60}
RESPONSE = {"model": "small", "input": "2 + 2?"}
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}


def store_in(folder: Path) -> BatchStore:
    return BatchStore(ledger_url(str(folder / "batches.sqlite")))


async def test_every_route_is_described(model: ServedModel, tmp_path: Path) -> None:
    """Whoever adds one to the application adds it to the table, from which both follow."""
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
    "GET /openapi.json describes every endpoint (OpenAPI 3.1), made from the structs that"
    " read bodies"
)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, **LOGPROBS, "n": 2, "return_token_ids": True}, 200),
        ("/v1/chat/completions", {**CHAT, "n": 0}, 400),
        ("/v1/completions", COMPLETION, 200),
        ("/v1/completions", {**COMPLETION, "logprobs": 2, "n": 2}, 200),
        ("/v1/messages", MESSAGE, 200),
        ("/v1/messages", {**MESSAGE, "stop_sequences": ["answer"]}, 200),
        ("/v1/messages", CHAT, 400),
        ("/v1/messages/count_tokens", MESSAGE, 200),
        ("/v1/messages/count_tokens", {}, 400),
        ("/v1/responses", RESPONSE, 200),
        ("/v1/responses", {**RESPONSE, "max_output_tokens": 2}, 200),
        ("/v1/responses", {**RESPONSE, "metadata": {"a": "b"}, "instructions": "Add."}, 200),
        ("/v1/responses", {}, 400),
        ("/v1/models", None, 200),
        ("/v1/models/small", None, 200),
        ("/v1/models/other", None, 404),
        ("/openapi.json", None, 200),
        ("/health", None, 200),
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
        responses = document["paths"][shown][method.lower()]["responses"]
        content = responses[str(status)]["content"]
        schema = content["application/json"]["schema"] | {"components": document["components"]}
        Draft202012Validator.check_schema(schema)
        Draft202012Validator(schema).validate(reply.json())
        for _, other in document["paths"][shown].items():
            assert other["summary"]


async def test_files_and_batches_are_as_described(model: ServedModel, tmp_path: Path) -> None:
    async with scene(model, store=store_in(tmp_path)) as it:
        document = (await it.client.get("/openapi.json")).json()

        async def ask(method: str, path: str, shown: str = "", **given: Any) -> Any:
            reply = await it.client.request(method, path, **given)
            assert reply.status_code == 200, reply.text
            operation = document["paths"][shown or path][method.lower()]
            content = operation["responses"]["200"]["content"]
            if "application/json" not in content:
                return reply.text
            schema = content["application/json"]["schema"]
            Draft202012Validator({**schema, "components": document["components"]}).validate(
                reply.json()
            )
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
    "GET /openapi.json describes every endpoint (OpenAPI 3.1), made from the structs that"
    " read bodies"
)
async def test_bodies_are_described_as_they_are_read(model: ServedModel) -> None:
    """What the examples above send is what the description allows; what is refused, it forbids
    where a type can say so.
    """
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
    """It is plain JSON: no float that is no number, no reference that leads nowhere."""
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
