"""Read JSON bodies into typed values, strictly. Bytes in, values or a RequestError out."""

from __future__ import annotations

import re
import threading
from typing import Any, TypeVar

import msgspec

from hadal.core.errors import RequestError

T = TypeVar("T")
NO_SCHEMA = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
"""Default of a raw value. A factory, so that /openapi.json omits it: raw JSON fits no schema."""
_KIND_TO_DECODER: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()
_PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""Half of a surrogate pair, as a JSON escape."""


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return the decoder for a kind of body, created once.

    msgspec inspects a type when it is first decoded. If a second thread decodes the same type
    meanwhile, the process crashes (0.22, SIGSEGV). A body is decoded in the event loop or in a
    tokenising thread, depending on its endpoint and size.
    """
    with _lock:
        if kind not in _KIND_TO_DECODER:
            _KIND_TO_DECODER[kind] = msgspec.json.Decoder(kind)
        return _KIND_TO_DECODER[kind]


def decode(body: bytes, kind: type[T]) -> T:
    """Read a JSON body into `kind`. Raises RequestError for any invalid bytes."""
    try:
        body.decode("utf-8")  # msgspec validates only strings that it keeps.
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _PATH.search(message)
        # `$.messages[0].content` -> messages[0].content; `[...]` stands for "some item or key".
        param = None if found is None else found["path"].removeprefix("$").removeprefix(".") or None
        if found is None:
            missing = re.search(r"missing required field `(?P<field>[^`]*)`", message)
            param = missing["field"] if missing else None
        said = _PATH.sub("", message)
        raise RequestError(f"{param or 'The body'}: {said[:1].lower()}{said[1:]}.", param) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except msgspec.DecodeError as error:
        if half := _HALF.search(body):
            raise RequestError(
                f"A text in the body has {half[0].decode()}, half of a surrogate pair, which is not a"
                " character. Leave it out."
            ) from None
        raise RequestError(f"The body is not valid JSON: {error}.") from None
