"""Errors as HTTP replies: status, error type, fields and headers. Internal texts are not shown."""

from __future__ import annotations

import json

import pytest

from hadal.core.errors import HadalError, InvariantError, RequestError
from hadal.gateway.edge.errors import ApiError, as_api_error, overloaded


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("bad", "n", "c"), 400, "invalid_request_error"),
        (overloaded(503, "full", 1.5), 503, "overloaded_error"),
        (InvariantError("secret"), 500, "server_error"),
        (HadalError("secret"), 500, "server_error"),
        (overloaded(429, "full", 0.1), 429, "rate_limit_error"),
        (ApiError(418, "teapot"), 418, "invalid_request_error"),
    ],
)
def test_statuses(error: HadalError, status: int, kind: str) -> None:
    made = as_api_error(error)
    fields = json.loads(made.body)["error"]
    assert made.status == status
    assert fields["type"] == kind
    assert "secret" not in fields["message"]


def test_fields_and_headers() -> None:
    made = as_api_error(RequestError("bad", "n", "c"))
    assert json.loads(made.body) == {
        "error": {"message": "bad", "type": "invalid_request_error", "param": "n", "code": "c"}
    }
    assert overloaded(503, "full", 1.5).headers == {"Retry-After": "2"}
    assert overloaded(503, "full", None).headers == {}
