"""Hooks for schemathesis: name the served model, keep replies short, and read good replies and
streams with the client types that /openapi.json names.

Two requests of three name the served model, because a request with a random name is refused before
any other check. Empty `messages` or `input`, which the schema allows, get one message.
"""

from __future__ import annotations

import json
import os
from typing import Any

import schemathesis

from tests.reply_types import read

MODEL = "HADAL_TESTED_MODEL"
MAX_TOKENS = 4
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and len(repr(body)) % 3:
        body["model"] = os.environ[MODEL]
    for name in ("messages", "input"):
        if body.get(name) == []:
            body[name] = [{"role": "user", "content": "hi"}]
    for name in _LIMITS:
        value = body.get(name)
        # Larger integers, which clients cannot hold, stay in the request.
        if type(value) is int and MAX_TOKENS < value < 2**63:
            body[name] = MAX_TOKENS


@schemathesis.check
def read_by_its_client(context: Any, response: Any, case: Any) -> None:
    """Read a good reply, or each event of a stream, with the client type that its schema names."""
    path = case.operation.schema.raw_schema["paths"][case.operation.path]
    operation = path.get(case.method.lower())
    if operation is None or response.status_code != 200:
        return
    content = operation["responses"]["200"]["content"]
    kind = response.headers["content-type"][0].partition(";")[0]
    schema = content[kind]["schema"]
    if kind == "application/json" and "title" in schema:
        read(schema["title"], response.json())
    if kind != "text/event-stream":
        return
    name = schema["properties"]["data"]["title"]
    for line in response.text.splitlines():
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        fields = json.loads(data)
        if "error" not in fields and fields.get("type") != "ping":
            read(name, fields, is_event=True)
