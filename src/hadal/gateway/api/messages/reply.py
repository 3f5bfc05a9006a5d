"""Replies of /messages: one body, or the events of a stream.

message_start, then for each block content_block_start, content_block_delta ..., content_block_stop,
then message_delta and message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from hadal.gateway.api.messages.edits import report
from hadal.gateway.api.parts import PartChange, PartFold, PartKind, PartStage, ReplyPart, parts_of
from hadal.gateway.api.reply import Head, Outcome, Usage
from hadal.gateway.api.sealed import sealed
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.edits import AppliedEdit
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.vocabulary import Vocabulary

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
NOT_JSON = "INVALID_JSON"
"""Key for a call's arguments that are not a JSON object, where an object is required. Anthropic's
guide to streamed tool calls names this key. Calls that were cut off have such arguments.
"""
_encode = msgspec.json.Encoder().encode


class MessagesFormatter:
    """Format of /v1/messages, for one choice."""

    keep_alive = PING

    def __init__(
        self,
        head: Head,
        vocabulary: Vocabulary,
        *,
        max_tokens: int,
        context_tokens: int,
        hides_reasoning: bool = False,
        edits: Sequence[AppliedEdit] | None = None,
    ) -> None:
        """`max_tokens`: the client's limit. `hides_reasoning`: there are no thinking blocks.
        `edits`: edits to report; None: no report.
        """
        self._head = head
        self._hides_reasoning = hides_reasoning
        self._edits = edits
        self._max_tokens = max_tokens
        self._context_tokens = context_tokens
        self._fold = PartFold()
        self._last = Piece()

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._message([], None, None, usage))

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        return b""

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        changes = self._fold.take(self._shown(piece))
        if piece.finish is not None:
            changes += self._fold.end()
            self._last = piece
        data = b"".join(map(self._events, changes))
        # Shows the client that the stream is alive while the model thinks.
        return data or (PING if piece.reasoning else b"")

    def end(self, usage: Usage) -> bytes:
        reason = {
            "stop_reason": self._reason(self._last, usage),
            "stop_sequence": self._last.stop,
        }
        fields = {"delta": reason, "usage": _usage(usage), **self._reported()}
        return _event("message_delta", **fields) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.message_body + b"\n\n"

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        piece = outcomes[0].piece
        content = [self._block(part) for part in parts_of(self._shown(piece))]
        message = self._message(content, self._reason(piece, usage), piece.stop, usage)
        return _encode({**message, **self._reported()})

    def _shown(self, piece: Piece) -> Piece:
        return replace(piece, reasoning="") if self._hides_reasoning else piece

    def _reported(self) -> dict[str, Any]:
        return {} if self._edits is None else {"context_management": report(self._edits)}

    def _signature(self, part: ReplyPart) -> str:
        """Return the signature of a thinking block. It carries a text that the block omits."""
        if self._head.omits_reasoning:
            return sealed(part.text, self._head.id)
        return self._head.id

    def _reason(self, piece: Piece, usage: Usage) -> str | None:
        # A reply with tool calls ends with tool_use, even if it met a stop sequence.
        if piece.stop is not None and piece.finish == "stop":
            return "stop_sequence"
        num_tokens = usage.num_prompt_tokens + usage.num_output_tokens
        is_full = num_tokens == self._context_tokens and usage.num_output_tokens < self._max_tokens
        if piece.finish == "length" and is_full:
            return "model_context_window_exceeded"
        return STOP_REASONS.get(piece.finish or "")

    def _message(
        self, content: list[Any], reason: str | None, stop: str | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": _usage(usage),
        }

    def _block(self, part: ReplyPart) -> dict[str, Any]:
        """Return a complete block."""
        text = part.text
        if part.kind is PartKind.REASONING:
            shown = "" if self._head.omits_reasoning else text
            return {"type": "thinking", "thinking": shown, "signature": self._signature(part)}
        if part.kind is PartKind.TEXT:
            return _text_block(text)
        return _call_block(part, _object_of(text))

    def _events(self, change: PartChange) -> bytes:
        part, kind = change.part, change.part.kind
        if change.stage is PartStage.BEGUN:
            return _event("content_block_start", index=part.index, content_block=_opened(part))
        if change.stage is PartStage.GROWN:
            if kind is PartKind.REASONING and self._head.omits_reasoning:
                return PING  # Shows the client that the stream is alive.
            field, delta = _DELTAS[kind]
            return _delta(part.index, {"type": delta, field: change.text})
        signature = b""
        if kind is PartKind.REASONING:
            signed_as = {"type": "signature_delta", "signature": self._signature(part)}
            signature = _delta(part.index, signed_as)
        return signature + _event("content_block_stop", index=part.index)


_DELTAS = {
    PartKind.REASONING: ("thinking", "thinking_delta"),
    PartKind.TEXT: ("text", "text_delta"),
    PartKind.CALL: ("partial_json", "input_json_delta"),
}


def _opened(part: ReplyPart) -> dict[str, Any]:
    """Return a block without content, as a stream opens it."""
    if part.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind is PartKind.TEXT:
        return _text_block("")
    return _call_block(part, {})


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def _call_block(part: ReplyPart, input: Any) -> dict[str, Any]:
    """Return a call's block. `caller` is always direct, as no programs of a model run here."""
    call = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": input}
    return {**call, "caller": {"type": "direct"}}


def _object_of(arguments: str) -> Any:
    """Return a call's arguments as the model wrote them. Blank arguments become {}; any other text
    that is not a JSON object is returned as {NOT_JSON: text}.
    """
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {NOT_JSON: arguments} if arguments.strip() else {}
    return msgspec.Raw(arguments.encode())


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage. Input tokens exclude cached ones, and include those written to a cache."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        "server_tool_use": None,
        "inference_geo": None,
        "service_tier": "standard",
        **usage.explained,
    }


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)
