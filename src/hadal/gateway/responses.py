"""OpenAI's Responses API: bodies and replies.

    input items --ResponsesRequest--> ResponseAsk --> ChatAsk           Piece --PartFold--> output items

A conversation is a list of items: messages, calls of functions, what came of them, and reasoning, which
is not read again. A response that is kept (gateway/desk/kept) can be gone on from by its id; what is kept is
the conversation up to its end, so nothing else need be there then. What it said may be named, item by
item, instead of sent. Knows no tokens, no sockets and no clock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.core.plans import Sampling
from hadal.gateway.decoding import NO_SCHEMA, decode
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.field_table import RESPONSE
from hadal.gateway.fields import check_fields
from hadal.gateway.openai import (
    INT64_MAX,
    MAX_MESSAGES,
    MAX_PARTS,
    AnswerFormat,
    ChatAsk,
    Common,
    Extensions,
    JsonSchema,
    PastCall,
    ResponseFormat,
    Turn,
    check_metadata,
    common_fields,
    extensions,
    is_ascending,
    list_page,
    read_format,
    read_limit,
)
from hadal.gateway.parts import PartChange, PartFold, PartKind, PartStage, ReplyPart, parts_of
from hadal.gateway.replies import KEEP_ALIVE, Head, Outcome, Usage
from hadal.gateway.response_tools import (
    TOOL_WORDS,
    OfferedTools,
    ResponseTool,
    as_arguments,
    as_input,
    choice_of,
    offered,
    shown,
)
from hadal.gateway.text.stream import Piece
from hadal.gateway.text.thinking import ReasoningOptions, read_thinking
from hadal.gateway.text.tools import read_choice, read_tools
from hadal.gateway.text.vocabulary import Vocabulary

REFERENCE = "item_reference"
"""The type of an item that names another."""


class ItemPart(msgspec.Struct, omit_defaults=True):
    """A part of a message's content: input_text, output_text or refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """An item of a conversation: a "message", a "function_call" or "custom_tool_call" and its output,
    "reasoning", or an "item_reference" to one that a response has. Without a type it is a message.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    """Input of a custom tool's call."""
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    status: str | None = None
    id: str | None = None


class TextFormat(msgspec.Struct):
    """What the answer's text is: "text", "json_object" or "json_schema"."""

    type: str
    name: str | None = None
    schema: msgspec.Raw = NO_SCHEMA
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Extensions, kw_only=True):
    """A body of /v1/responses."""

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
    """Keep the response, so that it can be asked for and gone on from; true if left out."""
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: str | None = None


@dataclass(frozen=True)
class ResponseAsk:
    """A body of /v1/responses, checked. `chat.turns` are those of its input alone."""

    request: ResponsesRequest
    chat: ChatAsk

    def after(self, turns: tuple[Turn, ...]) -> ChatAsk:
        """The chat behind what was said before. Raises RequestError."""
        instructions = self.request.instructions
        first = (Turn("system", instructions),) if instructions else ()
        whole = (*first, *turns, *self.chat.turns)
        if len(whole) > MAX_MESSAGES:
            raise RequestError(
                f"The conversation has {len(whole)} messages; at most {MAX_MESSAGES} are allowed.",
                "input",
            )
        return replace(self.chat, turns=whole)


def read_response(body: bytes) -> ResponsesRequest:
    """Read a body of /v1/responses. Raises RequestError."""
    named = check_fields(body, RESPONSE)
    request = named.read(lambda: decode(named.body, ResponsesRequest))
    if len(request.input) > MAX_MESSAGES and not isinstance(request.input, str):
        raise RequestError(
            f"input has {len(request.input)} items; at most {MAX_MESSAGES} are allowed.", "input"
        )
    return request


def references_of(request: ResponsesRequest) -> list[str]:
    """Ids of the items that a request names instead of sending them. Raises RequestError for one that
    is named twice: what a request stands for is not to be much longer than the request.
    """
    if isinstance(request.input, str):
        return []
    ids: dict[str, None] = {}
    for index, item in enumerate(request.input):
        if item.type == REFERENCE and item.id:
            if item.id in ids:
                raise RequestError(
                    f"input[{index}].id: the item {item.id[:80]!r} is named twice.",
                    f"input[{index}].id",
                )
            ids[item.id] = None
    return list(ids)


class _Said(msgspec.Struct):
    """Of a response: the items that it said."""

    output: list[msgspec.Raw]


class _Named(msgspec.Struct):
    id: str = ""


def items_in(bodies: Sequence[bytes], ids: Sequence[str], max_bytes: int) -> dict[str, InputItem]:
    """Of what these responses said the items that have one of `ids`, by id. Raises RequestError if
    they are longer than `max_bytes`, as a body that sent them would be.
    """
    found: dict[str, InputItem] = {}
    wanted, num_bytes = set(ids), 0
    for body in bodies:
        for raw in msgspec.json.decode(body, type=_Said).output:
            item_id = msgspec.json.decode(raw, type=_Named).id
            if item_id not in wanted:
                continue
            num_bytes += len(raw)
            if num_bytes > max_bytes:
                raise RequestError(
                    f"input names items of more than {max_bytes} bytes; name fewer.", "input"
                )
            found[item_id] = msgspec.json.decode(raw, type=InputItem)
    return found


def parse_response(request: ResponsesRequest, known: Mapping[str, InputItem]) -> ResponseAsk:
    """Check a request; `known`: the items that it may name, by id. Raises RequestError."""
    if not isinstance(request.input, str):
        items = [_referred(item, index, known) for index, item in enumerate(request.input)]
        request = msgspec.structs.replace(request, input=items)
    _check_options(request)
    text = request.text or TextOptions()
    verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
    thinking = read_thinking(request, variables=verbosity)
    tools = offered(request.tools or [])
    choosing = read_choice(
        choice_of(request.tool_choice, tools),
        read_tools(tools.given, TOOL_WORDS),
        request.parallel_tool_calls,
        TOOL_WORDS,
    )
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
        turns_of(request.input, tools),
        thinking.is_on,
        thinking.template_kwargs,
        choosing,
        budget=thinking.budget,
        budget_field=thinking.budget_field,
        switch_field=thinking.switch_field,
    )
    return ResponseAsk(request, chat)


def _referred(item: InputItem, index: int, known: Mapping[str, InputItem]) -> InputItem:
    if item.type != REFERENCE:
        return item
    item_id = _needed(item.id, f"input[{index}].id")
    if item_id not in known:
        raise RequestError(
            f"input[{index}].id: no response that is kept here for this API key said an item"
            f" {item_id[:80]!r}; send the item itself.",
            f"input[{index}].id",
        )
    return known[item_id]


def _check_options(request: ResponsesRequest) -> None:
    if request.truncation not in (None, "disabled"):
        raise RequestError(
            "truncation: nothing is left out of a prompt here; send 'disabled', and a shorter input"
            " if it is too long.",
            "truncation",
        )
    for entry in request.include or ():
        if entry != "reasoning.encrypted_content":  # There is none: the reasoning is in the clear.
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


MAX_LISTED = 100
"""Items of an input on one page."""
_TEXTS = ("input_text", "output_text", "text")
_NO_TOOLS = OfferedTools()
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ITEMS = "message, function_call, custom_tool_call, their outputs, reasoning and item_reference"


def turns_of(items: str | Sequence[InputItem], tools: OfferedTools = _NO_TOOLS) -> tuple[Turn, ...]:
    """Items as turns: calls belong to the assistant's message before them. Raises RequestError."""
    if isinstance(items, str):
        return (Turn("user", items),)
    if not items:
        raise RequestError("input is empty; send a text or a list of items.", "input")
    turns: list[Turn] = []
    behind: dict[int, list[str]] = {}
    """By turn: what an assistant says behind its calls. It stands before what came of them."""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type in ("function_call", "custom_tool_call"):
            is_custom = item.type == "custom_tool_call"
            call = PastCall(
                _needed(item.call_id, f"{where}.call_id"),
                tools.flat_of(_needed(item.name, f"{where}.name"), item.namespace),
                as_arguments(item.input or "") if is_custom else item.arguments or "{}",
            )
            if turns and turns[-1].role == "assistant":
                turns[-1] = replace(turns[-1], calls=(*turns[-1].calls, call))
            else:
                turns.append(Turn("assistant", "", (call,)))
        elif item.type in _OUTPUTS:
            output = _text_of(item.output, f"{where}.output")
            turns.append(Turn("tool", output, call_id=_needed(item.call_id, f"{where}.call_id")))
        elif item.type == "message":
            turn = Turn(_role_of(item, where), _text_of(item.content, f"{where}.content"))
            if turn.role == "assistant" and turns and turns[-1].calls:
                behind.setdefault(len(turns) - 1, []).append(turn.content)
            else:
                turns.append(turn)
        elif item.type != "reasoning":  # Which is not read again.
            raise RequestError(
                f"{where}.type is {item.type[:40]!r}; {_ITEMS} are supported.", f"{where}.type"
            )
    for at, texts in behind.items():
        turns[at] = replace(turns[at], content="".join((turns[at].content, *texts)))
    if not turns:
        raise RequestError("input holds nothing to reply to; send a message.", "input")
    return tuple(turns)


def listed(items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """The items of an input as they can be asked for, each with an id of its own."""
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    data: list[dict[str, Any]] = []
    taken: set[str] = set()
    for index, item in enumerate(items):
        fields = {name: getattr(item, name) for name in item.__struct_fields__}
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [ItemPart(kind, item.content)]
        if isinstance(content := fields["content"], list):
            fields["content"] = [_listed_part(part) for part in content]
        # Whatever clients' types promise is there, whether it was sent or not.
        if item.type == "reasoning":
            fields["summary"] = item.summary or []
        elif item.type != "message" or item.role == "assistant":
            fields["status"] = item.status or "completed"
        item_id = item.id or f"item_{index}"
        while item_id in taken:  # A client may have given it twice; pages go on from an id.
            item_id = f"{item_id}_{index}"
        taken.add(item_id)
        fields["id"] = item_id
        data.append({name: value for name, value in fields.items() if value is not None})
    return data


def _listed_part(part: ItemPart) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if part.type == "output_text" else {}
    return {**msgspec.to_builtins(part), **more}


def input_page(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of what `listed` gave, as `order`, `limit` and `after` ask for. Raises RequestError."""
    limit = read_limit(query, MAX_LISTED)
    rows = items if is_ascending(query) else items[::-1]
    if after := query.get("after"):
        at = next((index for index, row in enumerate(rows) if row["id"] == after), None)
        if at is None:
            raise RequestError(f"after: there is no item {after[:80]!r} in this input.", "after")
        rows = rows[at + 1 :]
    return list_page(rows[: limit + 1], limit)


def _needed(text: str | None, where: str) -> str:
    if not text:
        raise RequestError(f"{where} is missing.", where)
    return text


def _role_of(item: InputItem, where: str) -> str:
    if item.role not in ("user", "assistant", "system", "developer"):
        raise RequestError(
            f"{where}.role: use 'user', 'assistant', 'system' or 'developer'.", f"{where}.role"
        )
    return "system" if item.role == "developer" else item.role


def _text_of(content: str | Sequence[ItemPart] | None, where: str) -> str:
    if content is None:
        raise RequestError(f"{where} is missing; send a text or a list of parts.", where)
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise RequestError(f"{where} has more than {MAX_PARTS} parts.", where)
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            raise RequestError(
                f"{where}[{index}]: parts of input_text and output_text with a text are supported.",
                f"{where}[{index}]",
            )
        texts.append(text)
    return "".join(texts)


# Replies.


INCOMPLETE = {"length": "max_output_tokens"}
_encode = msgspec.json.Encoder().encode


def turn_of(parts: Sequence[ReplyPart]) -> Turn:
    """What an assistant said, for the conversation to go on from."""
    text = "".join(part.text for part in parts if part.kind is PartKind.TEXT)
    calls = (
        PastCall(part.call_id, part.name, part.text) for part in parts if part.kind is PartKind.CALL
    )
    return Turn("assistant", text, tuple(calls))


class ResponseFormatter:
    """/v1/responses: one choice."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        head: Head,
        vocabulary: Vocabulary,
        asked: ResponsesRequest,
        keep: Callable[[bytes, Turn], None] | None,
        sampling: Sampling,
        now: Callable[[], float],
    ) -> None:
        """`keep` is given the response, and the turn that it is, before the client has it; None: it
        is not kept. `sampling`: how it is drawn, with the model's defaults filled in.
        """
        self._head = head
        self._asked = asked
        self._keep = keep
        self._sampling = sampling
        self._now = now
        self._tools = offered(asked.tools or [])
        self._fold = PartFold()
        self._finish: str | None = None
        self._num_events = 0

    def begin(self, usage: Usage) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        return b""

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        changes = self._fold.take(piece)
        if piece.finish is not None:
            self._finish = piece.finish
            changes += self._fold.end()
        return b"".join(map(self._events, changes))

    def end(self, usage: Usage) -> bytes:
        response = self._ended(self._fold.parts, self._finish, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response("failed", self._items(self._fold.parts, "incomplete"), None)
        failed["error"] = {"code": code, "message": str(error)}
        return self._event("response.failed", response=failed)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        piece = outcomes[0].piece
        return _encode(self._ended(parts_of(piece), piece.finish, usage))

    def _ended(
        self, parts: Sequence[ReplyPart], finish: str | None, usage: Usage
    ) -> dict[str, Any]:
        reason = INCOMPLETE.get(finish or "")
        status = "incomplete" if reason else "completed"
        response = self._response(status, self._items(parts, status), usage)
        response["incomplete_details"] = {"reason": reason} if reason else None
        response["completed_at"] = None if reason else int(self._now())
        if self._keep is not None:
            self._keep(_encode(response), turn_of(parts))
        return response

    def _items(self, parts: Sequence[ReplyPart], status: str) -> list[dict[str, Any]]:
        """All but the last are complete whatever became of the whole."""
        return [self._item(part, status if part is parts[-1] else "completed") for part in parts]

    def _item(self, part: ReplyPart, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        if part.kind is PartKind.CALL:
            call = self._tools.name_of(part.name)
            item |= {"call_id": part.call_id, "name": call.name}
            if call.namespace:
                item["namespace"] = call.namespace
            text = "" if is_empty else part.text
            if call.is_custom:
                return item | {"type": "custom_tool_call", "input": as_input(text)}
            return item | {"type": "function_call", "arguments": text}
        content = [] if is_empty else [_content_of(part.kind, part.text)]
        if part.kind is PartKind.REASONING:
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _item_id(self, part: ReplyPart) -> str:
        """The part's, from which `response_id_of` makes the response's."""
        is_custom = part.kind is PartKind.CALL and self._tools.name_of(part.name).is_custom
        prefix = "ctc" if is_custom else _PREFIXES[part.kind]
        return f"{prefix}_{self._head.id.removeprefix('resp_')}{part.index:04x}"

    def _events(self, change: PartChange) -> bytes:
        part, kind = change.part, change.part.kind
        at = {"item_id": self._item_id(part), "output_index": part.index}
        inner = {**at, "content_index": 0}
        if change.stage is PartStage.BEGUN:
            item = self._item(part, "in_progress", is_empty=True)
            data = self._event("response.output_item.added", output_index=part.index, item=item)
            if kind is not PartKind.CALL:
                part_begun = _content_of(kind, "")
                data += self._event("response.content_part.added", **inner, part=part_begun)
            return data
        if change.stage is PartStage.GROWN:
            if kind is PartKind.REASONING:
                return self._event("response.reasoning_text.delta", **inner, delta=change.text)
            if kind is PartKind.TEXT:
                return self._event(
                    "response.output_text.delta", **inner, delta=change.text, logprobs=[]
                )
            if self._tools.name_of(part.name).is_custom:
                return b""  # The text is known when its JSON is complete.
            return self._event("response.function_call_arguments.delta", **at, delta=change.text)
        text = part.text
        if kind is PartKind.REASONING:
            data = self._event("response.reasoning_text.done", **inner, text=text)
        elif kind is PartKind.TEXT:
            data = self._event("response.output_text.done", **inner, text=text, logprobs=[])
        else:
            data = self._call_done(part, at)
        if kind is not PartKind.CALL:
            whole = _content_of(kind, text)
            data += self._event("response.content_part.done", **inner, part=whole)
        # A part that ended before the last one is complete, though both came in one piece.
        is_cut = part is self._fold.parts[-1] and (self._finish or "") in INCOMPLETE
        status = "incomplete" if is_cut else "completed"
        return data + self._event(
            "response.output_item.done", output_index=part.index, item=self._item(part, status)
        )

    def _call_done(self, part: ReplyPart, at: dict[str, Any]) -> bytes:
        call = self._tools.name_of(part.name)
        if call.is_custom:
            text, event = as_input(part.text), "response.custom_tool_call_input"
            data = self._event(f"{event}.delta", **at, delta=text)
            return data + self._event(f"{event}.done", **at, input=text)
        return self._event(
            "response.function_call_arguments.done", **at, name=call.name, arguments=part.text
        )

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = _encode({"type": name, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        asked, sampling = self._asked, self._sampling
        reasoning = asked.reasoning or ReasoningOptions()
        format = (asked.text or TextOptions()).format
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "frequency_penalty": sampling.frequency_penalty,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if format is None else _format_fields(format)},
            "tool_choice": _choice_fields(asked.tool_choice),
            "tools": shown(asked.tools or []),
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}
_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_(\d{1,3}_[0-9a-f]{32})[0-9a-f]{4}")


def response_id_of(item_id: str) -> str | None:
    """The id of the response that said an item; None for an id that is none of ours."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def _format_fields(format: TextFormat) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        fields |= {"name": format.name, "schema": format.schema, "strict": format.strict}
    return fields


def _choice_fields(choice: Any) -> Any:
    """What was chosen, without whatever else stood there."""
    if isinstance(choice, dict):
        return {"type": "function", "name": choice.get("name")}
    return choice or "auto"


def _content_of(kind: PartKind, text: str) -> dict[str, Any]:
    """The only part of an item's content."""
    if kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        # Nothing is charged for what is written to a cache, nor counted.
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
