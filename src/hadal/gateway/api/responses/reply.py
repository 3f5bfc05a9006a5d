"""Replies of /responses: one object, or the events of a stream that build it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hadal.core.plans import Sampling
from hadal.gateway.api.parts import PartChange, PartFold, PartKind, PartStage, ReplyPart, parts_of
from hadal.gateway.api.reply import KEEP_ALIVE, Head, Outcome, Usage
from hadal.gateway.api.responses.request import ResponsesRequest, TextFormat, TextOptions
from hadal.gateway.api.responses.tools import as_input, offered, shown
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.asks import PastCall, Turn
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.thinking import ReasoningOptions
from hadal.gateway.text.vocabulary import Vocabulary

INCOMPLETE = {"length": "max_output_tokens"}
_encode = msgspec.json.Encoder().encode


def turn_of(parts: Sequence[ReplyPart]) -> Turn:
    """Return the assistant's turn, for continuing the conversation."""
    text = "".join(part.text for part in parts if part.kind is PartKind.TEXT)
    calls = (
        PastCall(part.call_id, part.name, part.text) for part in parts if part.kind is PartKind.CALL
    )
    return Turn("assistant", text, tuple(calls))


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
    ) -> None:
        """`keep` is called with the response and its turn before the client receives the response;
        None: do not store it. `sampling`: the effective options, including the model's defaults.
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
        """Return the output items. All but the last are complete, even if the reply is not."""
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
        """Return the part's item id, from which `response_id_of` computes the response's id."""
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
                return b""  # The text is known only once its JSON is complete.
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
        # Parts before the last one are complete, even if all arrived in one piece.
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
    """Return the id of the response that contains an item; None for a foreign id."""
    match = _ITEM_ID.fullmatch(item_id)
    return None if match is None else f"resp_{match[1]}"


def _format_fields(format: TextFormat) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": format.type}
    if format.type == "json_schema":
        fields |= {"name": format.name, "schema": format.schema, "strict": format.strict}
    return fields


def _choice_fields(choice: Any) -> Any:
    """Return `tool_choice` without unknown fields."""
    if isinstance(choice, dict):
        return {"type": "function", "name": choice.get("name")}
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
    }
