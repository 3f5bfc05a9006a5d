"""Refusals in the form that OpenAI's clients expect: a status and {"error": {message, type, param,
code}}. On Anthropic's paths they have the form that Anthropic's clients expect.

Depends on the error classes, HTTP statuses and Anthropic's paths, not on sockets.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from hadal.core.errors import HadalError, RequestError
from hadal.core.messages.generation import RateLimits


class Shape(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Object that allows no fields besides its own. A field with a default may be missing."""


class ErrorFields(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiErrorReply(Shape):
    """Error as OpenAI's clients expect it."""

    error: ErrorFields


class MessageErrorFields(Shape):
    type: str
    message: str
    details: dict[str, Any] = {}


class MessageErrorReply(Shape):
    """Error as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessageErrorFields


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MESSAGE_TYPES = {
    **_TYPES,
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
"""Error types by status: Anthropic's names, or OpenAI's where Anthropic has none."""
UNTHREADED = "thread_unsupported_request"
"""Error code; Anthropic's clients then send whole conversations instead of thread references."""
_MESSAGE_PATHS = re.compile(r"(/anthropic)?(/v1)?/messages(/.*)?")


class ApiError(HadalError):
    """Error reply. `headers` are sent with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> bytes:
        """Return the JSON body as OpenAI's clients expect it."""
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, other)
        fields = ErrorFields(str(self), kind, self.param, self.code)
        return msgspec.json.encode(ApiErrorReply(fields))

    @property
    def message_body(self) -> bytes:
        """Return the JSON body as Anthropic's clients expect it."""
        kind = _MESSAGE_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        details: dict[str, Any] = {}
        if self.code == UNTHREADED:
            details = {"error_code": self.code, "unsupported": [self.param]}
        fields = MessageErrorFields(kind, str(self), details)
        return msgspec.json.encode(MessageErrorReply("error", fields))

    def body_at(self, path: str) -> bytes:
        """Return the JSON body of a refusal, in the form for clients of this path."""
        return self.message_body if is_anthropics(path) else self.body


def is_anthropics(path: str) -> bool:
    """Return True if the path belongs to Anthropic's API."""
    return _MESSAGE_PATHS.fullmatch(path) is not None


def retry_after(seconds: float | None) -> dict[str, str]:
    """Return the Retry-After header in whole seconds, as HTTP requires (RFC 9110, 10.2.3)."""
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def limit_headers(limits: RateLimits | None) -> dict[str, str]:
    """Return headers with a tenant's quota and its remaining part, under OpenAI's names."""
    headers = {}
    for what, most, left, reset_s in (
        (
            ("requests", limits.requests, limits.requests_left, limits.requests_reset_s),
            ("tokens", limits.tokens, limits.tokens_left, limits.tokens_reset_s),
        )
        if limits is not None
        else ()
    ):
        if most is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(most)
            headers[f"x-ratelimit-remaining-{what}"] = str(left)
            headers[f"x-ratelimit-reset-{what}"] = span(reset_s)
    return headers


def span(seconds: float) -> str:
    """Format a time as in OpenAI's headers: "6m0s", "1.2s", "20ms"."""
    millis = math.ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    return f"{minutes}m{rest // 1000}s" if minutes else f"{rest / 1000:g}s"


def sentence(reason: str) -> str:
    """Return the reason with a capital first letter, as messages begin."""
    return reason[:1].upper() + reason[1:]


def overloaded(
    status: int,
    message: str,
    retry_after_s: float | None,
    code: str | None = None,
    limits: RateLimits | None = None,
) -> ApiError:
    """Return a 429 (this client's limit or the queue is full), a 503 (service unavailable), or a
    400 of a quota that never admits the request.
    """
    headers = {**retry_after(retry_after_s), **limit_headers(limits)}
    return ApiError(status, message, code=code, headers=headers)


def as_api_error(error: HadalError) -> ApiError:
    """Map the error classes to statuses; errors that the client did not cause become 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    return internal_error()


def internal_error() -> ApiError:
    return ApiError(
        500, "The server failed to handle this request; see its log.", code="internal_error"
    )
