"""OpenAI's Responses API: read its bodies.

    input items --ResponsesRequest--> ResponseAsk --> ChatAsk       Piece --PartFold--> output items

A conversation is a list of items: messages, reasoning, calls, their results, and tools that are
offered from there on. A request can continue a kept response (gateway/desk/kept) by its id, as the
whole conversation is kept with it. A request may also reference single output items of a kept
response instead of sending them. Independent of tokens, sockets and clocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.gateway.api.base import (
    MAX_MESSAGES,
    Common,
    Extensions,
    JsonSchema,
    ResponseFormat,
    check_metadata,
    common_fields,
    extensions,
    read_format,
    refuse,
)
from hadal.gateway.api.decoding import NO_SCHEMA, decode
from hadal.gateway.api.field_table import RESPONSE
from hadal.gateway.api.fields import check_fields
from hadal.gateway.api.responses.items import (
    REFERENCE,
    InputItem,
    ItemTurns,
    check_type,
    needed_text,
    sources_in,
    turns_of,
    without_earlier_reasoning,
)
from hadal.gateway.api.responses.tools import (
    OfferedTools,
    ResponseTool,
    choosing,
    kept_sources,
    offered,
)
from hadal.gateway.text.asks import INT64_MAX, AnswerFormat, ChatAsk, Rendering, Turn
from hadal.gateway.text.thinking import ReasoningOptions, read_thinking

ENCRYPTED = "reasoning.encrypted_content"
"""Value of `include`: reasoning items have their text in a form that clients send back."""
_IN_ITEM = re.compile(r"input\[(\d+)\]\.")
_OF_PROVIDERS = (
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Values of `include` for items that no reply of this server has. Clients send them with tools that
are left out.
"""


class TextFormat(msgspec.Struct):
    """Format of the answer's text: "text", "json_object" or "json_schema"."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = NO_SCHEMA
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Extensions, kw_only=True):
    """Body of /v1/responses."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    """True: keep the response, so that a client can fetch it and continue from it. Default true."""
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: str | None = None


@dataclass(frozen=True)
class ResponseAsk:
    """Checked body of /v1/responses. `chat.turns`: turns of its input only."""

    request: ResponsesRequest
    chat: ChatAsk
    tools: OfferedTools
    read: ItemTurns

    def after(self, turns: tuple[Turn, ...]) -> ChatAsk:
        """Return the chat with earlier `turns` before the request's input. Raises RequestError."""
        self._check_calls(turns)
        instructions = self.request.instructions
        first = (Turn("system", instructions),) if instructions else ()
        whole = (*first, *turns, *self.chat.turns)
        if len(whole) > MAX_MESSAGES:
            raise RequestError(
                f"The conversation has {len(whole)} messages; at most {MAX_MESSAGES} are allowed.",
                "input",
            )
        if (self.request.reasoning or ReasoningOptions()).context == "current_turn":
            whole = without_earlier_reasoning(whole)
        return replace(self.chat, turns=whole)

    def _check_calls(self, turns: tuple[Turn, ...]) -> None:
        """Raise RequestError for an output of a call that the conversation does not have before."""
        known: set[str] = set()
        for turn in (*turns, *self.chat.turns):
            known.update(call.id for call in turn.calls)
            if turn.call_id in self.read.call_to_path and turn.call_id not in known:
                path = self.read.call_to_path[turn.call_id]
                raise RequestError(
                    f"{path}: no earlier item is a call with the id {turn.call_id[:80]!r}; send the call"
                    " before its output.",
                    path,
                )


def read_response(body: bytes) -> ResponsesRequest:
    """Read a body of /v1/responses. Raises RequestError."""
    named = check_fields(body, RESPONSE)
    try:
        request = named.read(lambda: decode(named.body, ResponsesRequest))
    except RequestError as error:
        _check_type_at(error.param or "", named.body)
        raise
    if len(request.input) > MAX_MESSAGES and not isinstance(request.input, str):
        refuse("input", f"has {len(request.input)} items; at most {MAX_MESSAGES} are allowed")
    return request


def _check_type_at(path: str, body: bytes) -> None:
    """Raise RequestError if `path` lies in an item of an unsupported type: its fields may have the
    names of other items' fields, and other values.
    """
    if found := _IN_ITEM.match(path):
        kind = decode(body, dict[str, Any])["input"][int(found[1])].get("type")
        if isinstance(kind, str):
            check_type(kind, found[0].removesuffix("."))


def references_of(request: ResponsesRequest) -> list[str]:
    """Return the ids of items that a request references. Raises RequestError for a repeated
    reference, so that the resolved input is not much longer than the request.
    """
    if isinstance(request.input, str):
        return []
    ids: dict[str, None] = {}
    for index, item in enumerate(request.input):
        if item.type == REFERENCE and item.id:
            if item.id in ids:
                raise RequestError(
                    f"input[{index}].id: the item {item.id[:80]!r} is referenced twice; reference it once.",
                    f"input[{index}].id",
                )
            ids[item.id] = None
    return list(ids)


class _Said(msgspec.Struct):
    """Response, reduced to its output items."""

    output: list[msgspec.Raw]


class _ItemId(msgspec.Struct):
    id: str = ""


def items_in(bodies: Sequence[bytes], ids: Sequence[str], max_bytes: int) -> dict[str, InputItem]:
    """Return id -> item, for the items of these responses that have one of `ids`. Raises
    RequestError if they exceed `max_bytes` in total, the limit for bodies.
    """
    found: dict[str, InputItem] = {}
    wanted, num_bytes = set(ids), 0
    for body in bodies:
        for raw in msgspec.json.decode(body, type=_Said).output:
            item_id = msgspec.json.decode(raw, type=_ItemId).id
            if item_id not in wanted:
                continue
            num_bytes += len(raw)
            if num_bytes > max_bytes:
                raise RequestError(
                    f"The items referenced in input exceed {max_bytes} bytes; reference fewer.",
                    "input",
                )
            found[item_id] = msgspec.json.decode(raw, type=InputItem)
    return found


def parse_response(
    request: ResponsesRequest,
    known: Mapping[str, InputItem],
    found: Sequence[ResponseTool] = (),
) -> ResponseAsk:
    """Check a request; `known`: id -> item that it may reference, `found`: tools in items of the
    conversation before. Raises RequestError.
    """
    if not isinstance(request.input, str):
        items = [_referred(item, index, known) for index, item in enumerate(request.input)]
        request = msgspec.structs.replace(request, input=items)
    _check_options(request)
    text = request.text or TextOptions()
    verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
    thinking = read_thinking(request, variables=verbosity)
    tools = offered(request.tools or (), [*kept_sources(found), *sources_in(request.input)])
    calls = choosing(request.tool_choice, tools, request.parallel_tool_calls)
    read = turns_of(request.input, tools)
    format = _format_of(text)
    common = Common(
        model=request.model,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        **extensions(request),
    )
    ask = common_fields(
        common, request.max_output_tokens, "max_output_tokens", format=format, prompt_name="input"
    )
    chat = ChatAsk(
        ask,
        read.turns,
        Rendering(thinking.is_on, thinking.template_kwargs, calls),
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
    )
    return ResponseAsk(request, chat, tools, read)


def _referred(item: InputItem, index: int, known: Mapping[str, InputItem]) -> InputItem:
    if item.type != REFERENCE:
        return item
    item_id = needed_text(item.id, f"input[{index}].id")
    if item_id not in known:
        raise RequestError(
            f"input[{index}].id: no stored response of this API key has an item"
            f" {item_id[:80]!r}; send the item itself.",
            f"input[{index}].id",
        )
    return known[item_id]


def _check_options(request: ResponsesRequest) -> None:
    if request.truncation not in (None, "disabled"):
        why = (
            "is not supported: prompts are never shortened. Send 'disabled', and shorten the input"
        )
        refuse("truncation", why)
    for entry in request.include or ():
        if entry != ENCRYPTED and entry not in _OF_PROVIDERS:
            raise RequestError(
                f"include: {entry[:64]!r} is not supported; leave it out.", "include"
            )
    check_metadata(request.metadata or {})


def _format_of(text: TextOptions) -> AnswerFormat | None:
    given = text.format
    if given is None:
        return None
    schema, beside = None, given.schema
    if given.type == "json_schema":
        schema, beside = JsonSchema(given.name or "", given.schema), msgspec.Raw(b"null")
    try:
        found = read_format(ResponseFormat(given.type, schema, beside))
    except RequestError as error:
        said = str(error).replace("response_format.json_schema", "text.format")
        raise RequestError(said.replace("response_format", "text.format"), "text.format") from None
    return None if found is None else replace(found, field="text.format")
