"""All endpoints of a gateway: method, path, handler and description of each.

Routes (gateway/app) and /openapi.json are made from this list. To add an endpoint, add a line here
and an Operation in gateway/api/description. Generating endpoints come from gateway/desk/dialects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hadal import __version__
from hadal.gateway.api.description import (
    AUDIT,
    COUNT,
    DETOKENIZE,
    EXPLAIN_CACHE,
    EXPLAIN_CACHE_LIST,
    HEALTH,
    METRICS,
    MODEL,
    MODELS,
    OPENAPI,
    RESPONSE,
    RESPONSE_DELETED,
    RESPONSE_INPUT,
    ROOT,
    STATUS,
    TOKENIZE,
    TRACE,
    Operation,
    document,
)
from hadal.gateway.api.messages.refusals import in_anthropics_words
from hadal.gateway.api.messages.request import parse_count
from hadal.gateway.api.responses.items import input_page
from hadal.gateway.api.shapes import (
    CacheReports,
    Greeting,
    HealthReply,
    ResponseDeleted,
    TokenCount,
)
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.dialects import dialects_of
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.kept import KeptResponse
from hadal.gateway.edge.errors import ApiError, Shape
from hadal.gateway.edge.guard import SEEN
from hadal.gateway.generate import Generate

EndpointHandler = Callable[[Request], Awaitable[Response]]


async def _page(gateway: Gateway, request: Request, media_type: str) -> Response:
    """Answer with a page of the process with the front. Raises HadalError."""
    status, body = await gateway.link.page(request.url.path, request.query_params)
    return Response(body, status, media_type=media_type)


def _models_pages(gateway: Gateway) -> tuple[EndpointHandler, EndpointHandler]:
    """Return handlers for the list of models (it has one), and for a model by its name."""
    name = gateway.service.model.name
    model = {"id": name, "object": "model", "created": gateway.created, "owned_by": "hadal"}

    async def list_models(request: Request) -> Response:
        tenant = gateway.tenancy.tenant_of(request.headers)
        return _json({"object": "list", "data": [model] if tenant.may_ask(name) else []})

    async def get_model(request: Request) -> Response:
        tenant = gateway.tenancy.tenant_of(request.headers)
        asked = request.path_params["model_id"]
        if not asked:  # "/v1/models/"
            return await list_models(request)
        if asked != name or not tenant.may_ask(name):
            raise ApiError(
                404,
                f"The model {asked[:100]!r} does not exist; {name!r} is served here.",
                param="model",
                code="model_not_found",
            )
        return _json(model)

    return list_models, get_model


def _answering(
    gateway: Gateway,
    answer: Callable[[bytes, Tenant], Awaitable[Shape]],
    counts: str = "",
) -> EndpointHandler:
    """Return a handler of requests that start no generation, within the tenant's limits.
    `counts`: field of the answer with the number of tokens to draw from the tenant's quota.
    """

    async def endpoint(request: Request) -> Response:
        tenant = gateway.tenancy.tenant_of(request.headers)
        request.scope[SEEN].tenant = tenant.name
        body = await gateway.intake.body_of(request, tenant.name)
        with gateway.intake.permits.take(tenant.name):
            if counts:
                await gateway.link.check_counting(tenant.name)
            reply = await answer(body, tenant)
            if counts:
                gateway.link.counted(tenant.name, getattr(reply, counts))
            return _json(reply)

    return endpoint


@dataclass(frozen=True)
class Endpoint:
    """Handler of one method at one path, and at the paths of `also`."""

    method: str
    path: str
    handler: EndpointHandler | Generate
    about: Operation
    also: tuple[str, ...] = ()


def _generating(gateway: Gateway) -> list[Endpoint]:
    """Return an endpoint for each dialect."""
    endpoints = []
    for dialect in dialects_of(gateway):
        path, *also = dialect.paths
        handler = Generate(gateway, dialect)
        endpoints.append(Endpoint("POST", path, handler, dialect.describe(), tuple(also)))
    return endpoints


def _responses_pages(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints for kept responses."""

    async def get(request: Request) -> Response:
        if request.query_params.get("stream") not in (None, "false"):
            raise ApiError(
                400, "stream is not supported for a stored response; leave it out.", param="stream"
            )
        return Response((await found(request, "body")).body, media_type="application/json")

    async def delete(request: Request) -> Response:
        await found(request, deletes=True)
        response_id = request.path_params["response_id"]
        return _json(ResponseDeleted(response_id, "response", True))

    async def items(request: Request) -> Response:
        kept = await found(request, "input")
        data = msgspec.json.decode(kept.input, type=list[dict[str, Any]])
        return _json(input_page(data, request.query_params))

    async def found(request: Request, part: str = "", *, deletes: bool = False) -> KeptResponse:
        tenant, response_id = (
            gateway.tenancy.tenant_of(request.headers),
            request.path_params["response_id"],
        )
        request.scope[SEEN].tenant = tenant.name
        kept = await gateway.responses.get(tenant.name, response_id, part, deletes=deletes)
        if kept is None:
            raise ApiError(
                404,
                f"The response {response_id[:80]!r} is not stored for this API key.",
                param="response_id",
                code="response_not_found",
            )
        return kept

    path = "/responses/{response_id}"
    inputs = f"{path}/input_items"
    return [
        Endpoint("GET", f"/v1{path}", get, RESPONSE, (path,)),
        Endpoint("DELETE", f"/v1{path}", delete, RESPONSE_DELETED, (path,)),
        Endpoint("GET", f"/v1{inputs}", items, RESPONSE_INPUT, (inputs,)),
    ]


def _cache_pages(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints that explain why prompts were not found in the cache."""

    async def one(request: Request) -> Response:
        tenant = gateway.tenancy.tenant_of(request.headers)
        request.scope[SEEN].tenant = tenant.name
        return _json(await gateway.cache_pages.report(tenant, request.path_params["request_id"]))

    async def recent(request: Request) -> Response:
        tenant = gateway.tenancy.tenant_of(request.headers)
        request.scope[SEEN].tenant = tenant.name
        return _json(CacheReports(await gateway.cache_pages.recent(tenant)))

    path = "/explain_cache"
    own = f"{path}/{{request_id}}"
    return [
        Endpoint("GET", f"/v1{path}", recent, EXPLAIN_CACHE_LIST, (path,)),
        Endpoint("GET", f"/v1{own}", one, EXPLAIN_CACHE, (own,)),
    ]


def _token_pages(gateway: Gateway) -> list[Endpoint]:
    """Return the endpoints that turn texts into tokens and back."""
    service = gateway.service
    return [
        Endpoint("POST", f"/v1{path}", _answering(gateway, answer, counts), about, (path,))
        for path, answer, counts, about in (
            ("/tokenize", service.tokenize, "count", TOKENIZE),
            ("/detokenize", service.detokenize, "", DETOKENIZE),
        )
    ]


def endpoints_of(gateway: Gateway, more: Sequence[Endpoint] = ()) -> list[Endpoint]:
    """Return all endpoints, `more` included; routes and /openapi.json follow from this list."""
    service = gateway.service
    list_models, get_model = _models_pages(gateway)
    endpoints = _generating(gateway)
    documents: dict[bool, bytes] = {}

    parse = partial(parse_count, unasked=gateway.deployment.gateway.unasked_thinking)

    async def count(body: bytes, tenant: Tenant) -> TokenCount:
        with in_anthropics_words():
            return await service.count(body, tenant, parse)

    async def openapi(request: Request) -> Response:
        is_open = gateway.tenancy.keys.is_open
        if is_open not in documents:
            made = document(endpoints, service.model.name, is_open=is_open)
            documents[is_open] = msgspec.json.encode(made)
        return Response(documents[is_open], media_type="application/json")

    async def health(request: Request) -> Response:
        status, fields = gateway.readiness.health(gateway.link.snapshot())
        return _json(HealthReply(**fields, model=service.model.name), status)

    async def root(request: Request) -> Response:
        names = [f"{each.method} {each.path}" for each in endpoints if each.path != "/v1"]
        return _json(Greeting(f"Hadal {__version__}", service.model.name, names))

    async def metrics(request: Request) -> Response:
        if not gateway.deployment.gateway.open_metrics:
            gateway.tenancy.check_operator(request.headers)
        return await _page(gateway, request, "text/plain; version=0.0.4; charset=utf-8")

    async def operate(request: Request) -> Response:
        gateway.tenancy.check_operator(request.headers)
        return await _page(gateway, request, "application/json")

    needs_key = not gateway.deployment.gateway.open_metrics
    counts = "/messages/count_tokens"
    model = "/models/{model_id:path}"
    endpoints += [
        Endpoint(
            "POST",
            f"/v1{counts}",
            _answering(gateway, count, "input_tokens"),
            COUNT,
            (counts, f"/anthropic/v1{counts}"),
        ),
        *_token_pages(gateway),
        *_responses_pages(gateway),
        *_cache_pages(gateway),
        *more,
        Endpoint("GET", "/v1/models", list_models, MODELS, ("/models",)),
        Endpoint("GET", f"/v1{model}", get_model, MODEL, (model,)),
        Endpoint("GET", "/openapi.json", openapi, OPENAPI, ("/v1/openapi.json",)),
        Endpoint("GET", "/health", health, HEALTH),
        Endpoint("GET", "/metrics", metrics, replace(METRICS, needs_key=needs_key)),
        Endpoint("GET", "/audit", operate, AUDIT),
        Endpoint("GET", "/trace", operate, TRACE),
        Endpoint("GET", "/status", operate, STATUS),
        # Claude Code asks for the last path, or for "/", before its first request.
        Endpoint("GET", "/v1", root, ROOT, ("/v1/", "/", "/api/hello")),
    ]
    return endpoints


def _json(fields: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(fields), status, media_type="application/json")
