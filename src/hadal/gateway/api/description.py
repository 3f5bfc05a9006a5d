"""/openapi.json: description of all endpoints, made from the structs of bodies, errors and Hadal's
own replies.

Most replies in OpenAI's or Anthropic's format have no schema here, only a title: the type of their
Python client that reads them. One row of the table in gateway/endpoints gives an endpoint both its
route and its description, so every served endpoint is described. Depends on OpenAPI 3.1, not on
handlers.
"""

from __future__ import annotations

import http
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from hadal import __version__
from hadal.gateway.api.batches import NewBatch
from hadal.gateway.api.field_rows import Verdict
from hadal.gateway.api.field_table import CHAT as CHAT_FIELDS
from hadal.gateway.api.field_table import COMPLETION as COMPLETION_FIELDS
from hadal.gateway.api.field_table import MESSAGE, rows_of
from hadal.gateway.api.field_table import RESPONSE as RESPONSE_FIELDS
from hadal.gateway.api.messages.request import CountRequest, MessagesRequest
from hadal.gateway.api.openai.request import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from hadal.gateway.api.responses.request import ResponsesRequest
from hadal.gateway.api.shapes import (
    AuditReply,
    CacheReport,
    CacheReports,
    Detokenized,
    Greeting,
    HealthReply,
    ResponseDeleted,
    TokenCount,
    Tokenized,
)
from hadal.gateway.edge.errors import ApiErrorReply, MessageErrorReply

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
ALWAYS = (403, 421)
"""Statuses possible at any path: a server without keys refuses unknown host names and origins."""
GENERATES = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""Error statuses of requests that compute something."""


@dataclass(frozen=True)
class Operation:
    """Description of one method at one path."""

    summary: str
    reply: Any = None
    """Type of the reply, or name of the client's type for it; None: text of `media_type`."""
    body: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = ApiErrorReply
    media_type: str = "application/json"
    other_statuses: tuple[int, ...] = ()
    """Further statuses with the same reply."""
    event: str = ""
    """Name of the client's type that reads an event's data; empty: no stream."""
    needs_key: bool = True
    """Only for the description: the handler checks the key."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Query parameter -> its meaning."""
    body_type: str = "application/json"


class FileUpload(msgspec.Struct, forbid_unknown_fields=True):
    """Form for uploading a file, read by gateway/batch_pages."""

    purpose: Literal["batch"]
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


# Types of OpenAI's and Anthropic's Python clients.
_BATCH, _FILE, _MODEL = (f"openai.types.{name}" for name in ("Batch", "FileObject", "Model"))
_RESPONSES = "openai.types.responses"
_CHATS = "openai.types.chat.ChatCompletion"
_TEXTS = "openai.types.Completion"
_PAGE = "openai.pagination.SyncCursorPage[{}]"
_MODELS = f"openai.pagination.SyncPage[{_MODEL}]"

CHAT = Operation(
    "Create a chat completion.", _CHATS, ChatRequest, GENERATES, event=f"{_CHATS}Chunk"
)
COMPLETION = Operation("Complete a prompt.", _TEXTS, CompletionRequest, GENERATES, event=_TEXTS)
MESSAGES = Operation(
    "Create a message, in Anthropic's format.",
    "anthropic.types.Message",
    MessagesRequest,
    GENERATES,
    MessageErrorReply,
    event="anthropic.types.RawMessageStreamEvent",
)
COUNT = Operation(
    "Count the tokens of a chat.", TokenCount, CountRequest, GENERATES, MessageErrorReply
)
TOKENIZE = Operation("Tokenize a prompt or a chat.", Tokenized, TokenizeRequest, GENERATES)
DETOKENIZE = Operation("Convert token ids to text.", Detokenized, DetokenizeRequest, GENERATES)
RESPONSES = Operation(
    "Create a response, and store it for follow-up requests unless store is false.",
    f"{_RESPONSES}.Response",
    ResponsesRequest,
    GENERATES,
    event=f"{_RESPONSES}.ResponseStreamEvent",
)
RESPONSE = Operation("Get a stored response.", f"{_RESPONSES}.Response", errors=(400, 404))
RESPONSE_DELETED = Operation("Delete a stored response.", ResponseDeleted, errors=(404,))
EXPLAIN_CACHE = Operation(
    "Explain why a request's prompt was not found in the cache.", CacheReport, errors=(404,)
)
EXPLAIN_CACHE_LIST = Operation(
    "List the latest requests with their explanations.", CacheReports, errors=(404,)
)
RESPONSE_INPUT = Operation(
    "List the input items of a stored response.",
    f"{_RESPONSES}.ResponseItemList",
    errors=(400, 404),
    query={
        "order": "asc or desc (default)",
        "limit": "maximum number of items: 1 to 100, default 20",
        "after": "id of the item before the first one of this page",
    },
)
_LATEST = {
    "after": "last id of the previous page",
    "limit": "maximum number of objects in a page",
}
FILE_UPLOADED = Operation(
    "Upload a file of requests.",
    _FILE,
    FileUpload,
    (400, 408, 413, 415, 429),
    body_type="multipart/form-data",
)
FILES = Operation(
    "List the stored files, newest first.",
    _PAGE.format(_FILE),
    errors=(400, 404),
    query={**_LATEST, "purpose": "only files with this purpose", "order": "asc: oldest first"},
)
FILE = Operation("Get a file's description, without its contents.", _FILE, errors=(404,))
FILE_DELETED = Operation("Delete a file.", "openai.types.FileDeleted", errors=(404,))
FILE_CONTENT = Operation(
    "Get a file's contents.", media_type="application/octet-stream", errors=(404,)
)
BATCH_CREATED = Operation(
    "Create a batch: the requests of a file, answered within a day.",
    _BATCH,
    NewBatch,
    (400, 404, 408, 413, 415, 429),
)
BATCHES = Operation(
    "List the batches, newest first.", _PAGE.format(_BATCH), errors=(400, 404), query=_LATEST
)
BATCH_READ = Operation("Get a batch and its progress.", _BATCH, errors=(404,))
BATCH_CANCELLED = Operation(
    "Cancel a batch: its remaining requests are not started.", _BATCH, errors=(404, 409)
)
MODELS = Operation("List the served models.", _MODELS)
MODEL = Operation(
    "Get a model; list all models if the name is empty.", f"{_MODEL} | {_MODELS}", errors=(404,)
)
ROOT = Operation("Get the server's name, its model and its endpoints.", Greeting, needs_key=False)
HEALTH = Operation(
    "Get the health of the deployment.", HealthReply, other_statuses=(503,), needs_key=False
)
OPENAPI = Operation("Get this description.", dict[str, Any], needs_key=False)
METRICS = Operation(
    "Get metrics for Prometheus.", media_type="text/plain", errors=(500, 503), needs_key=False
)
AUDIT = Operation(
    "Get the resources in use of each unit.", AuditReply, other_statuses=(500,), errors=(503,)
)
STATUS = Operation(
    "Get the deployment's status, as the console shows it.",
    dict[str, Any],
    errors=(503,),
    query={"experts": "comma-separated units; their expert placements are included"},
)
TRACE = Operation(
    "Trace the next steps of a unit.",
    dict[str, Any],
    errors=(400, 404, 429, 503, 504),
    query={
        "unit": "the unit, default decode-0",
        "steps": "number of steps",
        "wait_s": "maximum wait for the steps, seconds",
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
    """Remove the fields that an endpoint refuses from its body's schema: APIs share structs."""
    rows = rows_of(api)
    for name in [*component.get("properties", ())]:
        if name in rows and rows[name].verdict is Verdict.REFUSED:
            del component["properties"][name]


class Described(Protocol):
    """Row of the table of endpoints."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def also(self) -> tuple[str, ...]: ...
    @property
    def about(self) -> Operation: ...


def document(rows: Iterable[Described], model: str, *, is_open: bool) -> dict[str, Any]:
    """Return the OpenAPI document. `is_open`: no key is needed."""
    rows = tuple(rows)
    kinds: dict[Any, None] = {}
    for row in rows:
        about = row.about
        kinds |= dict.fromkeys(
            kind
            for kind in (about.body, about.reply, about.error)
            if kind is not None and not isinstance(kind, str)
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
            "description": f"Serves {model}. docs/api.md lists other services' fields that have no effect"
            " here or are rejected. The title of a reply in another service's format, or of an"
            " event's data, is the type in that service's Python client.",
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
    schema: dict[str, Any] = {"type": "string"}
    if about.reply is not None:
        is_named = isinstance(about.reply, str)
        schema = _read_as(about.reply) if is_named else kind_to_schema[about.reply]
    content = {about.media_type: {"schema": schema}}
    if about.event:
        content["text/event-stream"] = {"schema": _stream_of(about.event)}
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


def _read_as(name: str) -> dict[str, Any]:
    """Return the schema of an object that the client's type of this name reads."""
    return {"type": "object", "title": name}


def _stream_of(name: str) -> dict[str, Any]:
    """Return the schema of an event. Its data is JSON that the client's type of this name reads, or
    [DONE] at the end of OpenAI's older endpoints.
    """
    properties = {"event": {"type": "string"}, "data": {"type": "string", "title": name}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _name(row: Described) -> str:
    words = re.findall(r"[a-z0-9_]+", _PARAMETER.sub(r"by_\1", row.path))
    return "_".join([row.method.lower(), *words])
