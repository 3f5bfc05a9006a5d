"""/openapi.json: what is served, made from the structs that read bodies and those that replies have.

An endpoint is one row of the table in gateway/app, from which both its route and its description
follow; so nothing is served that is not described. Knows OpenAPI 3.1, no handler and no socket.
"""

from __future__ import annotations

import http
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from hadal import __version__
from hadal.gateway.field_table import CHAT as CHAT_FIELDS
from hadal.gateway.field_table import COMPLETION as COMPLETION_FIELDS
from hadal.gateway.field_table import MESSAGE, Verdict, rows_of
from hadal.gateway.field_table import RESPONSE as RESPONSE_FIELDS
from hadal.gateway.messages import CountRequest, MessagesRequest
from hadal.gateway.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NewBatch,
    TokenizeRequest,
)
from hadal.gateway.responses import ResponsesRequest
from hadal.gateway.shapes import (
    ApiErrorReply,
    AuditReply,
    BatchList,
    BatchObject,
    ChatReply,
    Detokenized,
    FileDeleted,
    FileList,
    FileObject,
    FileUpload,
    Greeting,
    HealthReply,
    ItemList,
    MessageErrorReply,
    MessageReply,
    ModelList,
    ModelOrList,
    ResponseDeleted,
    ResponseReply,
    TextReply,
    TokenCount,
    Tokenized,
)

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_STREAM = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
"""Of each event; its `data` is JSON, or [DONE] where OpenAI's older endpoints end."""
ALWAYS = (403, 421)
"""What any path may answer: a server without keys is asked by a name or a page that is not its
own.
"""
GENERATES = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""What may become of a request that computes something."""


@dataclass(frozen=True)
class Operation:
    """What one method at one path does. `reply` None: a text of `media_type`."""

    summary: str
    reply: Any = None
    body: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = ApiErrorReply
    media_type: str = "application/json"
    other_statuses: tuple[int, ...] = ()
    """With which the same reply may come."""
    streams: bool = False
    needs_key: bool = True
    query: Mapping[str, str] = field(default_factory=dict)
    """What may stand behind the question mark, and what it means."""
    body_type: str = "application/json"


CHAT = Operation("A chat's reply.", ChatReply, ChatRequest, GENERATES, streams=True)
COMPLETION = Operation("How a text goes on.", TextReply, CompletionRequest, GENERATES, streams=True)
MESSAGES = Operation(
    "A chat's reply in Anthropic's format.",
    MessageReply,
    MessagesRequest,
    GENERATES,
    MessageErrorReply,
    streams=True,
)
COUNT = Operation(
    "How many tokens a chat has.", TokenCount, CountRequest, GENERATES, MessageErrorReply
)
TOKENIZE = Operation("The tokens of a prompt or a chat.", Tokenized, TokenizeRequest, GENERATES)
DETOKENIZE = Operation("The text of some tokens.", Detokenized, DetokenizeRequest, GENERATES)
RESPONSES = Operation(
    "A chat's reply as items, which may be kept to go on from.",
    ResponseReply,
    ResponsesRequest,
    GENERATES,
    streams=True,
)
RESPONSE = Operation("A response that is kept.", ResponseReply, errors=(400, 404))
RESPONSE_DELETED = Operation("Keep a response no longer.", ResponseDeleted, errors=(404,))
RESPONSE_INPUT = Operation(
    "What a response was asked.",
    ItemList,
    errors=(400, 404),
    query={
        "order": "asc or desc, which is the default",
        "limit": "how many items at most: 1 to 100, 20 if left out",
        "after": "the id of the item that the page begins behind",
    },
)
_LATEST = {
    "after": "the last id of the page before",
    "limit": "how many there are in a page at most",
}
FILE_UPLOADED = Operation(
    "Keep a file of requests.",
    FileObject,
    FileUpload,
    (400, 408, 413, 415, 429),
    body_type="multipart/form-data",
)
FILES = Operation(
    "The files that are kept, the latest first.",
    FileList,
    errors=(400, 404),
    query={**_LATEST, "purpose": "those for it alone", "order": "asc: the oldest first"},
)
FILE = Operation("A file, without its contents.", FileObject, errors=(404,))
FILE_DELETED = Operation("Keep a file no longer.", FileDeleted, errors=(404,))
FILE_CONTENT = Operation("A file's contents.", media_type="application/octet-stream", errors=(404,))
BATCH_CREATED = Operation(
    "Have a file's requests answered within a day.",
    BatchObject,
    NewBatch,
    (400, 404, 408, 413, 415, 429),
)
BATCHES = Operation("The batches, the latest first.", BatchList, errors=(400, 404), query=_LATEST)
BATCH_READ = Operation("A batch as it stands.", BatchObject, errors=(404,))
BATCH_CANCELLED = Operation("Begin no more of a batch.", BatchObject, errors=(404, 409))
MODELS = Operation("The models that are served.", ModelList)
MODEL = Operation("A model.", ModelOrList, errors=(404,))
ROOT = Operation("What this server is.", Greeting, needs_key=False)
HEALTH = Operation(
    "Whether requests can be answered.", HealthReply, other_statuses=(503,), needs_key=False
)
OPENAPI = Operation("This description.", dict[str, Any], needs_key=False)
METRICS = Operation(
    "Metrics for Prometheus.", media_type="text/plain", errors=(500, 503), needs_key=False
)
AUDIT = Operation("What every unit has in use.", AuditReply, other_statuses=(500,), errors=(503,))
STATUS = Operation(
    "What the console shows of the deployment.",
    dict[str, Any],
    errors=(503,),
    query={"experts": "units of many ranks, with commas between, whose experts are wanted"},
)
TRACE = Operation(
    "What a unit's next steps do, and when.",
    dict[str, Any],
    errors=(400, 404, 429, 503, 504),
    query={
        "unit": "the unit, decode-0 if left out",
        "steps": "how many steps",
        "wait_s": "how long to wait for them",
    },
)


BODY_TO_API: dict[type[msgspec.Struct], str] = {
    ChatRequest: CHAT_FIELDS,
    CompletionRequest: COMPLETION_FIELDS,
    ResponsesRequest: RESPONSE_FIELDS,
    MessagesRequest: MESSAGE,
    CountRequest: MESSAGE,
}
"""Body -> its API in the table of fields."""


def _drop_refused(component: dict[str, Any], api: str) -> None:
    """Take out of a body's schema what its endpoint refuses: APIs share structs."""
    rows = rows_of(api)
    for name in [*component.get("properties", ())]:
        if name in rows and rows[name].verdict is Verdict.REFUSED:
            del component["properties"][name]


class Described(Protocol):
    """A row of the table."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def also(self) -> tuple[str, ...]: ...
    @property
    def about(self) -> Operation: ...


def document(rows: Iterable[Described], model: str, *, is_open: bool) -> dict[str, Any]:
    """The description. `is_open`: no key is needed."""
    rows = tuple(rows)
    kinds: dict[Any, None] = {}
    for row in rows:
        about = row.about
        kinds |= dict.fromkeys(
            kind for kind in (about.body, about.reply, about.error) if kind is not None
        )
    schemas, components = msgspec.json.schema_components(
        tuple(kinds), ref_template="#/components/schemas/{name}"
    )
    kind_to_schema = dict(zip(kinds, schemas, strict=True))
    for kind, api in BODY_TO_API.items():
        _drop_refused(components.get(kind.__name__, {}), api)
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        path = paths.setdefault(_PARAMETER.sub(r"{\1}", row.path), {})
        path[row.method.lower()] = _operation(row, kind_to_schema, is_open=is_open)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hadal",
            "version": __version__,
            "description": f"Serves {model}. docs/api.md lists the fields of other services that change"
            " nothing here, and those that are refused by name.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(
    row: Described, kind_to_schema: Mapping[Any, Any], *, is_open: bool
) -> dict[str, Any]:
    about = row.about
    schema = {"type": "string"} if about.reply is None else kind_to_schema[about.reply]
    content = {about.media_type: {"schema": schema}} | (_STREAM if about.streams else {})
    responses = {
        str(status): {"description": http.HTTPStatus(status).phrase, "content": content}
        for status in (200, *about.other_statuses)
    }
    refusal = {"application/json": {"schema": kind_to_schema[about.error]}}
    statuses = (*about.errors, *ALWAYS, *((401, 503) if about.needs_key else ()))
    for status in sorted(set(statuses) - {200, *about.other_statuses}):
        responses[str(status)] = {
            "description": http.HTTPStatus(status).phrase,
            "content": refusal,
        }
    operation: dict[str, Any] = {
        "summary": about.summary,
        "operationId": _name(row),
        "responses": responses,
        "security": [{"bearer": []}, {"key": []}] if about.needs_key and not is_open else [],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(row.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": said, "schema": {"type": "string"}}
        for name, said in about.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if about.body is not None:
        body = {about.body_type: {"schema": kind_to_schema[about.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    if row.also:
        operation["x-also-at"] = list(row.also)
    return operation


def _name(row: Described) -> str:
    words = re.findall(r"[a-z0-9_]+", _PARAMETER.sub(r"by_\1", row.path))
    return "_".join([row.method.lower(), *words])
