"""ASGI application: a route per path of gateway/endpoints, behind the guard of all requests.

Every error leaves in the form of an ApiError. Independent of what the endpoints do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hadal.core.errors import HadalError
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.edge.errors import ApiError, as_api_error
from hadal.gateway.edge.guard import Edge
from hadal.gateway.endpoints import Endpoint, EndpointHandler, endpoints_of
from hadal.gateway.generate import Generate


def routes_of(endpoints: Sequence[Endpoint]) -> list[Route]:
    """Return a route per path, with all the methods served there."""
    by_path: dict[str, dict[str, EndpointHandler | Generate]] = {}
    for each in endpoints:
        for path in (each.path, *each.also):
            by_path.setdefault(path, {})[each.method] = each.handler
    return [
        Route(path, _by_method(handlers), methods=[*handlers]) for path, handlers in by_path.items()
    ]


def _by_method(handlers: Mapping[str, EndpointHandler | Generate]) -> EndpointHandler | Generate:
    first, *others = handlers.values()
    if not others:
        return first

    async def answer(request: Request) -> Response:
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        assert not isinstance(handler, Generate), "it has its path to itself"
        return await handler(request)

    return answer


def make_app(gateway: Gateway, more: Sequence[Endpoint] = ()) -> ASGIApp:
    """Return the ASGI application; `more`: endpoints in addition to the gateway's own."""
    app = Starlette(
        routes=routes_of(endpoints_of(gateway, more)),
        exception_handlers={
            HTTPException: _on_http_error,
            HadalError: _on_error,
            ClientDisconnect: _on_leave,
            Exception: _on_bug,
        },
        lifespan=_no_lifespan,
    )
    return Edge(
        app,
        gateway.deployment.gateway,
        gateway.bound_host,
        has_keys=not gateway.tenancy.keys.is_open,
        now=gateway.clock.now,
    )


@asynccontextmanager
async def _no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HadalError)
    return _refusal(as_api_error(error), request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    if error.status_code == 404:
        return _refusal(
            ApiError(
                404,
                f"{path} does not exist; /openapi.json lists the endpoints.",
                code="not_found",
            ),
            path,
        )
    if error.status_code == 405 and method == "OPTIONS":
        return Response(
            status_code=204, headers={"Allow": f"{(error.headers or {}).get('Allow', '')}, OPTIONS"}
        )
    if error.status_code == 405 and "sec-websocket-version" in request.headers:
        return _refusal(
            ApiError(
                426,
                f"{path} does not support WebSockets; send POST requests over HTTP.",
                code="upgrade_required",
                headers={"Upgrade": "HTTP/1.1", "Connection": "Upgrade"},  # RFC 9110, 15.5.22.
            ),
            path,
        )
    if error.status_code == 405:
        return _refusal(
            ApiError(
                405,
                f"{path} does not support {method}; send {(error.headers or {}).get('Allow', 'other methods')}."
                " /openapi.json lists the endpoints.",
                code="method_not_allowed",
                headers=dict(error.headers or {}),
            ),
            path,
        )
    return _refusal(
        ApiError(error.status_code, error.detail, headers=dict(error.headers or {})), path
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer any other error, a bug of ours; the server logs it when it is raised again."""
    return _refusal(as_api_error(HadalError(str(error))), request.url.path)


async def _on_leave(request: Request, error: Exception) -> Response:
    """Answer a client that left while its body was read: the answer is not sent."""
    return Response(status_code=499)


def _refusal(error: ApiError, path: str) -> Response:
    body = error.body_at(path)
    return Response(body, error.status, error.headers, media_type="application/json")
