"""Errors that the console's pages get when a gateway refuses a request."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hadal.apps.console.asking import AskError, Asking


async def _refuse(request: Request) -> JSONResponse:
    body = await request.json()
    error = {"message": "Full.", "param": None}
    return JSONResponse({"error": error}, body["status"], headers=body["headers"])


REFUSING = Starlette(routes=[Route("/v1/chat/completions", _refuse, methods=["POST"])])


@pytest.mark.promise("the page asks again, five times at most, unless you stop it")
@pytest.mark.parametrize(
    ("status", "headers", "again_s"),
    [
        (503, {"Retry-After": "2"}, 2.0),
        (429, {"Retry-After": "30"}, 30.0),
        (503, {}, None),
        (503, {"Retry-After": "Fri, 27 Nov 2026 07:28:00 GMT"}, None),
        (401, {"Retry-After": "2"}, None),
    ],
)
async def test_a_refusal_says_when_to_ask_again(
    status: int, headers: dict[str, str], again_s: float | None
) -> None:
    asking = Asking("http://here")
    transport = httpx.ASGITransport(REFUSING)
    asking._client = httpx.AsyncClient(transport=transport, base_url="http://here")
    with pytest.raises(AskError, match="Full") as caught:
        await anext(asking.stream({"status": status, "headers": headers}, ""))
    await asking.close()
    error = caught.value
    assert (str(error), error.status, error.again_s) == ("Full.", status, again_s)
