"""Replies of /responses: one object, or the events of a stream that build it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hadal.core.plans import Sampling
from hadal.gateway.api.parts import PartChange, PartFold, PartKind, PartStage, ReplyPart, parts_of
from hadal.gateway.api.reply import KEEP_ALIVE, Head, Outcome, Usage
from hadal.gateway.api.responses.calls import (
    CALL_TYPES,
    CUSTOM,
    STREAMED,
    TYPE_TO_PREFIX,
    InputReader,
    as_input,
    call_fields,
)
from hadal.gateway.api.responses.request import (
    ENCRYPTED,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from hadal.gateway.api.responses.tools import OfferedTools, shown
from hadal.gateway.api.sealed import sealed
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.asks import PastCall, Turn
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.thinking import ReasoningOptions
from hadal.gateway.text.vocabulary import Vocabulary

_NO_TOOLS = OfferedTools()
INCOMPLETE = {"length": "max_output_tokens"}
_encode = msgspec.json.Encoder().encode


def turn_of(parts: Sequence[ReplyPart]) -> Turn:
    """Return the assistant's turn, for continuing the conversation."""
    text, reasoning = (
        "".join(part.text for part in parts if part.kind is kind)
        for kind in (PartKind.TEXT, PartKind.REASONING)
    )
    calls = (
        PastCall(part.call_id, part.name, part.text) for part in parts if part.kind is PartKind.CALL
    )
    return Turn("assistant", text, tuple(calls), reasoning=reasoning)


class ResponseFormatter:
    """Format of /v1/responses, for one choice."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        head: Head,
        vocabulary: Vocabulary,
        asked: ResponsesRequest,
        keep: Callable[[bytes, Turn], None] | None,
        sampling: Sampling,
        now: Callable[[], float],
        tools: OfferedTools = _NO_TOOLS,
    ) -> None:
        """`keep` is called with the response and its turn before the client receives the response;
        None: do not store it. `sampling`: the effective options, including the model's defaults.
        `tools`: tools offered to the model.
        """
        self._head = head
        self._asked = asked
        self._keep = keep
        self._sampling = sampling
        self._now = now
        self._tools = tools
        self._fold = PartFold()
        self._reader = InputReader()
        """Reader of the input of the custom tool's call that is open."""
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
        """Return the output items. All but the last are complete, even if the reply is not."""
        return [self._item(part, status if part is parts[-1] else "completed") for part in parts]

    def _item(self, part: ReplyPart, status: str, *, is_empty: bool = False) -> dict[str, Any]:
        text = "" if is_empty else part.text
        if part.kind is PartKind.CALL:
            fields = call_fields(self._tools.name_of(part.name), text)
            fields["call_id"] = part.call_id
            if status == "incomplete" and CALL_TYPES[fields["type"]] not in STREAMED:
                status = "completed"  # Only whole arguments have become an item of this type.
        elif part.kind is PartKind.REASONING:
            content = [] if is_empty else [_content_of(part.kind, text)]
            fields = {"type": "reasoning", "summary": [], "content": content}
            if ENCRYPTED in (self._asked.include or ()):
                fields["encrypted_content"] = None if is_empty else sealed(text)
        else:
            content = [] if is_empty else [_content_of(part.kind, text)]
            fields = {"type": "message", "role": "assistant", "content": content}
        return {"id": self._item_id(part, fields["type"]), "status": status, **fields}

    def _item_id(self, part: ReplyPart, kind: str) -> str:
        """Return the part's item id, from which `response_id_of` computes the response's id."""
        prefix = TYPE_TO_PREFIX[kind]
        return f"{prefix}_{self._head.id.removeprefix('resp_')}{part.index:04x}"

    def _events(self, change: PartChange) -> bytes:
        """Return the events of a part's change. A call with an item type of its own is an item only
        once its arguments are complete.
        """
        part = change.part
        if part.kind is PartKind.CALL:
            call = self._tools.name_of(part.name)
            if call.kind in STREAMED:
                return self._call_events(change, is_custom=call.kind == CUSTOM)
            if change.stage is not PartStage.ENDED:
                return b""
            if call_fields(call, part.text)["type"] != "function_call":
                return self._added(part, is_empty=False) + self._done(part)
            grown = PartChange(PartStage.GROWN, part, part.text)
            return self._added(part) + b"".join(
                self._call_events(each, is_custom=False) for each in (grown, change)
            )
        if change.stage is PartStage.BEGUN:
            data = self._added(part)
            begun = _content_of(part.kind, "")
            return data + self._event("response.content_part.added", **self._at(part), part=begun)
        name = "reasoning_text" if part.kind is PartKind.REASONING else "output_text"
        more: dict[str, Any] = {} if part.kind is PartKind.REASONING else {"logprobs": []}
        if change.stage is PartStage.GROWN:
            return self._event(
                f"response.{name}.delta", **self._at(part), delta=change.text, **more
            )
        text, whole = part.text, _content_of(part.kind, part.text)
        data = self._event(f"response.{name}.done", **self._at(part), text=text, **more)
        data += self._event("response.content_part.done", **self._at(part), part=whole)
        return data + self._done(part)

    def _call_events(self, change: PartChange, *, is_custom: bool) -> bytes:
        """Return the events of a call with streamed arguments or a streamed input."""
        part = change.part
        if change.stage is PartStage.BEGUN:
            self._reader = InputReader()
            return self._added(part)
        kind = "custom_tool_call_input" if is_custom else "function_call_arguments"
        item_type = "custom_tool_call" if is_custom else "function_call"
        at = {"item_id": self._item_id(part, item_type), "output_index": part.index}
        if change.stage is PartStage.GROWN:
            text = self._reader.feed(change.text) if is_custom else change.text
            return self._event(f"response.{kind}.delta", **at, delta=text) if text else b""
        if not is_custom:
            name = self._tools.name_of(part.name).name
            data = self._event(f"response.{kind}.done", **at, name=name, arguments=part.text)
            return data + self._done(part)
        text = as_input(part.text)
        rest = self._reader.rest() if self._reader.is_input else text
        data = self._event(f"response.{kind}.delta", **at, delta=rest) if rest else b""
        return data + self._event(f"response.{kind}.done", **at, input=text) + self._done(part)

    def _at(self, part: ReplyPart) -> dict[str, Any]:
        """Return the place of a part's content."""
        kind = "reasoning" if part.kind is PartKind.REASONING else "message"
        place = {"item_id": self._item_id(part, kind), "output_index": part.index}
        return {**place, "content_index": 0}

    def _added(self, part: ReplyPart, *, is_empty: bool = True) -> bytes:
        item = self._item(part, "in_progress", is_empty=is_empty)
        return self._event("response.output_item.added", output_index=part.index, item=item)

    def _done(self, part: ReplyPart) -> bytes:
        # Parts before the last one are complete, even if all arrived in one piece.
        is_cut = part is self._fold.parts[-1] and (self._finish or "") in INCOMPLETE
        item = self._item(part, "incomplete" if is_cut else "completed")
        return self._event("response.output_item.done", output_index=part.index, item=item)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = _encode({"type": name, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        asked, sampling = self._asked, self._sampling
        reasoning = asked.reasoning or ReasoningOptions()
        text = asked.text or TextOptions()
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
            "reasoning": {
                "effort": reasoning.effort,
                "summary": None,
                "context": reasoning.context or "auto",
            },
            "safety_identifier": None,
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": sampling.temperature,
            "text": _text_fields(text),
            "tool_choice": _choice_fields(asked.tool_choice),
            "tools": shown(asked.tools or []),
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


_ITEM_ID = re.compile(
    rf"(?:{'|'.join(TYPE_TO_PREFIX.values())})_(\d{{1,3}}_[0-9a-f]{{32}})[0-9a-f]{{4}}"
)


def response_id_of(item_id: str) -> str | None:
    """Return the id of the response that contains an item; None for a foreign id."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def _text_fields(text: TextOptions) -> dict[str, Any]:
    format = {"type": "text"} if text.format is None else _format_fields(text.format)
    return {"format": format} | ({"verbosity": text.verbosity} if text.verbosity else {})


def _format_fields(format: TextFormat) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        fields |= {"name": format.name, "schema": format.schema, "strict": format.strict}
    return fields


_CHOICE_FIELDS = ("type", "name", "namespace", "mode", "tools")


def _choice_fields(choice: Any) -> Any:
    """Return `tool_choice` without unknown fields."""
    if isinstance(choice, dict):
        return {name: choice[name] for name in _CHOICE_FIELDS if name in choice}
    return choice or "auto"


def _content_of(kind: PartKind, text: str) -> dict[str, Any]:
    """Return the only part of an item's content."""
    if kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        # Tokens written to a cache are input tokens; their own count is always 0.
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        **usage.explained,
    }
