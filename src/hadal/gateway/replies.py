"""Replies as OpenAI's clients read them: whole bodies, and the chunks of a stream.

A stream's chunks are glued from pieces that were encoded once, since one is written for nearly
every token. A chunk holds all the tokens that came since the last one, so `usage` counts tokens and
a count of chunks does not. Knows the API's JSON, nothing of where tokens come from or of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hadal.core.messages import Token
from hadal.gateway.stream import Piece
from hadal.gateway.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""

_DELTAS = {
    "content": b'"delta":{"reasoning_content":null,"content":',
    "reasoning_content": b'"delta":{"content":"","reasoning_content":',
}
"""Every delta has both keys, and `content` is always a string: DeepSeek's own published client
looks for reasoning in every chunk and adds up the content of those that have none.
"""

_LAST_DELTA = b'"delta":{"content":"","reasoning_content":null},"logprobs":null,"finish_reason":'

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Usage:
    """Tokens of one HTTP request, over all its choices; a prompt counts once however many choices
    it has.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_cache_hit_tokens": self.num_cached_tokens,
            "prompt_cache_miss_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }


@dataclass
class Outcome:
    """A finished choice."""

    index: int
    piece: Piece
    """All of it."""
    reasoned: bool
    prefix: str = ""
    """The prompt's text, where it is echoed."""


@dataclass(frozen=True)
class Head:
    """What every chunk of a reply repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False


class ReplyFormat(Protocol):
    """One endpoint's JSON."""

    def opening(self, index: int, prefix: str) -> bytes:
        """The chunk that opens a choice; empty where there is none."""
        ...

    def chunks(self, index: int, piece: Piece) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...


class _Glue:
    """data: {head, "choices":[{"index":I, BODY}], tail}"""

    def __init__(self, head: Head, kind: str) -> None:
        fields = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._open = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._close = b"}]" + (b',"usage":null' if head.include_usage else b"") + b"}\n\n"
        self._starts: dict[int, bytes] = {}

    def chunk(self, index: int, body: bytes) -> bytes:
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._open + b'{"index":%d,' % index
        return start + body + self._close

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":' + _encode(usage.fields()) + b"}\n\n"


class ChatFormatter:
    """/chat/completions."""

    def __init__(self, head: Head, vocabulary: Vocabulary) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._glue = _Glue(head, "chat.completion.chunk")

    def opening(self, index: int, prefix: str) -> bytes:
        return self._glue.chunk(
            index,
            b'"delta":{"role":"assistant","content":"","reasoning_content":null},'
            b'"logprobs":null,"finish_reason":null',
        )

    def chunks(self, index: int, piece: Piece) -> bytes:
        data = b""
        if piece.reasoning or piece.reasoning_tokens:
            data += self._delta(index, "reasoning_content", piece.reasoning, piece.reasoning_tokens)
        if piece.content or piece.content_tokens:
            data += self._delta(index, "content", piece.content, piece.content_tokens)
        if piece.finish is not None:
            data += self._glue.chunk(index, _LAST_DELTA + _encode(piece.finish))
        return data

    def _delta(self, index: int, name: str, text: str, tokens: list[Token]) -> bytes:
        logprobs = b"null"
        if tokens:
            logprobs = _encode(self._logprobs(**{name: tokens}))
        return self._glue.chunk(
            index,
            _DELTAS[name] + _encode(text) + b'},"logprobs":' + logprobs + b',"finish_reason":null',
        )

    def usage(self, usage: Usage) -> bytes:
        return self._glue.usage(usage)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        head = self._head
        return _encode(
            {
                "id": head.id,
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": [self._choice(outcome) for outcome in outcomes],
                "usage": usage.fields(),
            }
        )

    def _choice(self, outcome: Outcome) -> dict[str, Any]:
        piece = outcome.piece
        message = {
            "role": "assistant",
            "content": piece.content,
            "reasoning_content": piece.reasoning if outcome.reasoned else None,
            "refusal": None,
        }
        logprobs = None
        if piece.content_tokens or piece.reasoning_tokens:
            logprobs = self._logprobs(piece.content_tokens, piece.reasoning_tokens)
        choice = {
            "index": outcome.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
        }
        return choice | _token_ids(piece)

    def _logprobs(
        self, content: Sequence[Token] = (), reasoning_content: Sequence[Token] = ()
    ) -> dict[str, Any]:
        """The same keys in a chunk and in a whole reply; OpenAI's description requires
        `refusal`.
        """
        return {
            "content": [self._logprob(token) for token in content],
            "reasoning_content": [self._logprob(token) for token in reasoning_content],
            "refusal": None,
        }

    def _logprob(self, token: Token) -> dict[str, Any]:
        entry = self._scored(token.token, token.logprob)
        entry["top_logprobs"] = [self._scored(other, logprob) for other, logprob in token.top]
        return entry

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = _bytes_of(self._vocabulary, token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(raw),
        }


class CompletionFormatter:
    """/completions."""

    def __init__(self, head: Head, vocabulary: Vocabulary) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._glue = _Glue(head, "text_completion")
        self._offset_of: dict[int, int] = {}
        """Where the next token of each choice starts in its text."""

    def opening(self, index: int, prefix: str) -> bytes:
        self._offset_of[index] = len(prefix)
        return self._text(index, prefix, b"null", b"null") if prefix else b""

    def chunks(self, index: int, piece: Piece) -> bytes:
        if not piece:
            return b""
        logprobs = b"null"
        if piece.content_tokens:
            logprobs = _encode(self._logprobs(index, piece.content_tokens))
        return self._text(index, piece.content, logprobs, _encode(piece.finish))

    def _text(self, index: int, text: str, logprobs: bytes, finish: bytes) -> bytes:
        return self._glue.chunk(
            index,
            b'"text":' + _encode(text) + b',"logprobs":' + logprobs + b',"finish_reason":' + finish,
        )

    def usage(self, usage: Usage) -> bytes:
        return self._glue.usage(usage)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        head = self._head
        choices = []
        for outcome in outcomes:
            piece = outcome.piece
            self._offset_of[outcome.index] = len(outcome.prefix)
            choices.append(
                {
                    "index": outcome.index,
                    "text": outcome.prefix + piece.content,
                    "logprobs": self._logprobs(outcome.index, piece.content_tokens)
                    if piece.content_tokens
                    else None,
                    "finish_reason": piece.finish,
                }
                | _token_ids(piece)
            )
        return _encode(
            {
                "id": head.id,
                "object": "text_completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                "choices": choices,
                "usage": usage.fields(),
            }
        )

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        texts, offsets, tops = [], [], []
        at = self._offset_of.get(index, 0)
        for token in tokens:
            text = self._text_of(token.token)
            texts.append(text)
            offsets.append(at)
            at += len(text)
            best = {self._text_of(other): _finite(logprob) for other, logprob in token.top}
            tops.append({text: _finite(token.logprob), **best})
        self._offset_of[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _text_of(self, token: int) -> str:
        return _bytes_of(self._vocabulary, token).decode("utf-8", "replace")


def _token_ids(piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.token_ids} if piece.token_ids else {}


def _bytes_of(vocabulary: Vocabulary, token: int) -> bytes:
    return vocabulary.token_bytes[token] if 0 <= token < len(vocabulary) else b""


def _finite(logprob: float | None) -> float:
    return (
        max(logprob, _LOWEST_LOGPROB)
        if logprob is not None and logprob == logprob
        else _LOWEST_LOGPROB
    )
