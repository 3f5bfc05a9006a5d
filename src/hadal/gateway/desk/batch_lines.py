"""Lines of a batch's input file: the requests, and the errors in them.

Reads only the API's JSON; uses no store and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hadal.runtime.batches import BatchLine

MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""Maximum number of wrong lines listed for a batch's input."""


def read_lines(
    pieces: Iterator[bytes], endpoint: str, max_lines: int, max_bytes: int
) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return a file's requests to an endpoint, and its errors. `max_bytes`: largest body."""
    lines: list[BatchLine] = []
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, raw in enumerate(_lines_of(pieces), 1):
        if not raw.strip():
            continue
        if len(lines) == max_lines:
            said = f"The file has more than {max_lines} requests; split it."
            errors.append(line_error("too_many_requests", said, None, number))
            break
        line = _line_of(raw, number, endpoint, max_bytes)
        if isinstance(line, BatchLine) and line.custom_id in seen:
            said = (
                f"The custom_id {line.custom_id[:100]!r} occurs twice; every request needs its own."
            )
            line = line_error("duplicate_custom_id", said, "custom_id", number)
        if isinstance(line, BatchLine):
            seen.add(line.custom_id)
            lines.append(line)
        elif len(errors) < MAX_ERRORS:
            errors.append(line)
    if not lines and not errors:
        errors.append(line_error("empty_file", "The file contains no requests.", None, None))
    return lines, errors


def _lines_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []  # Pieces of the current line, joined only once.
    for piece in pieces:
        first, *rest = piece.split(b"\n")
        held.append(first)
        if rest:
            yield b"".join(held)
            yield from rest[:-1]
            held = [rest[-1]]
    if last := b"".join(held):
        yield last


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(_InputLine).decode


def _line_of(raw: bytes, number: int, endpoint: str, max_bytes: int) -> BatchLine | dict[str, Any]:
    """Return a line, or the error in it."""
    try:
        line = _decode_line(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return line_error(
            "invalid_json_line", f"The line is not a valid batch request: {error}.", None, number
        )
    except RecursionError:
        return line_error("invalid_json_line", "The line is nested too deeply.", None, number)
    if "\0" in line.custom_id:
        return line_error(
            "invalid_custom_id", "custom_id contains a null character.", "custom_id", number
        )
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        said = f"custom_id needs 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return line_error("invalid_custom_id", said, "custom_id", number)
    if line.method != "POST":
        return line_error("invalid_method", "method must be 'POST'.", "method", number)
    if line.url != endpoint:
        said = f"url is {line.url[:100]!r}; the batch's endpoint is {endpoint!r}."
        return line_error("mismatched_endpoint", said, "url", number)
    body = bytes(line.body)
    if not body.startswith(b"{"):
        return line_error("invalid_body", "body must be a JSON object.", "body", number)
    if len(body) > max_bytes:
        said = f"body has more than {max_bytes} bytes."
        return line_error("body_too_large", said, "body", number)
    return BatchLine(number, line.custom_id, body)


def line_error(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
