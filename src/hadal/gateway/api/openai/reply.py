"""Replies in OpenAI's format: whole bodies, and the chunks of a stream.

A stream's chunks are joined from parts encoded once, since almost every token needs a chunk. A
chunk has all tokens since the last chunk, so clients must count tokens by `usage`, not by chunks.
Depends on the API's JSON, not on the source of tokens or on sockets.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from hadal.core.messages.generation import Token
from hadal.gateway.api.reply import KEEP_ALIVE, Head, Outcome, Usage, failure
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.piece import Piece, ScoredPrompt
from hadal.gateway.text.stream import new_decoder
from hadal.gateway.text.tools import CallDelta
from hadal.gateway.text.vocabulary import Vocabulary

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
"""Lowest log-probability written: JSON has no minus infinity, and OpenAI uses this value."""

_encode = msgspec.json.Encoder().encode

_DELTAS = {
    "content": b'"delta":{"reasoning_content":null,"content":',
    "reasoning_content": b'"delta":{"content":"","reasoning_content":',
}
"""Each delta has both keys, and `content` is always a string. DeepSeek's own published client looks
for reasoning in every chunk, and adds up the content of chunks without reasoning.
"""

_LAST_DELTA = b'"delta":{"content":"","reasoning_content":null},"logprobs":null,"finish_reason":'


class _Glue:
    """Encoder of chunks: data: {head, "choices":[{"index":I, BODY}], tail}"""

    def __init__(self, head: Head, kind: str) -> None:
        fields = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._open = b"data: " + _encode(fields)[:-1] + b',"choices":['
        self._includes_usage = head.include_usage
        self._has_usage_so_far = head.include_usage and head.has_usage_so_far
        self._usage = b',"usage":null' if head.include_usage else b""
        self._starts: dict[int, bytes] = {}

    def chunk(self, index: int, body: bytes, more: bytes = b"") -> bytes:
        """Return a chunk of a choice. `more`: fields beside the choices, each after a comma."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._open + b'{"index":%d,' % index
        return start + body + b"}]" + more + self._usage + b"}\n\n"

    def count(self, usage: Usage | None) -> None:
        """Set the usage of the following chunks, if each chunk has one."""
        if self._has_usage_so_far and usage is not None:
            self._usage = b',"usage":' + _encode(usage.fields())

    def usage(self, usage: Usage) -> bytes:
        return self._open + b'],"usage":' + _encode(usage.fields()) + b"}\n\n"

    def end(self, usage: Usage) -> bytes:
        return (self.usage(usage) if self._includes_usage else b"") + DONE


class ChatFormatter:
    """Format of /chat/completions."""

    keep_alive = KEEP_ALIVE

    def __init__(self, head: Head, vocabulary: Vocabulary) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._glue = _Glue(head, "chat.completion.chunk")

    def begin(self, usage: Usage) -> bytes:
        self._glue.count(usage)
        return b""

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        ids = b',"prompt_token_ids":' + _encode(prompt_ids) if prompt_ids and not index else b""
        return self._glue.chunk(
            index,
            b'"delta":{"role":"assistant","content":"","reasoning_content":null},'
            b'"logprobs":null,"finish_reason":null',
            ids,
        )

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        self._glue.count(usage)
        ids = _token_ids_body(piece)
        bodies = [*self._bodies(piece)]
        if ids and not bodies:
            bodies = [_LAST_DELTA + b"null"]  # The tokens' text is held back or hidden.
        return b"".join(
            self._glue.chunk(index, body if at else body + ids) for at, body in enumerate(bodies)
        )

    def _bodies(self, piece: Piece) -> Iterator[bytes]:
        if (piece.reasoning or piece.reasoning_tokens) and not self._head.omits_reasoning:
            yield self._delta("reasoning_content", piece.reasoning, piece.reasoning_tokens)
        if piece.content or piece.content_tokens:
            yield self._delta("content", piece.content, piece.content_tokens)
        for call in piece.calls:
            delta = {
                "content": "",
                "reasoning_content": None,
                "tool_calls": [_call_delta(call)],
            }
            yield b'"delta":' + _encode(delta) + b',"logprobs":null,"finish_reason":null'
        if piece.finish is not None:
            yield _LAST_DELTA + _encode(piece.finish)

    def _delta(self, name: str, text: str, tokens: list[Token]) -> bytes:
        logprobs = b"null"
        if tokens:
            logprobs = _encode(self._logprobs(**{name: tokens}))
        return (
            _DELTAS[name] + _encode(text) + b'},"logprobs":' + logprobs + b',"finish_reason":null'
        )

    def usage(self, usage: Usage) -> bytes:
        return self._glue.usage(usage)

    def end(self, usage: Usage) -> bytes:
        return self._glue.end(usage)

    def failure(self, error: ApiError) -> bytes:
        return failure(error)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        head, prompt_ids = self._head, outcomes[0].prompt_ids
        return _encode(
            {
                "id": head.id,
                "object": "chat.completion",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.fingerprint,
                **({"prompt_token_ids": prompt_ids} if prompt_ids else {}),
                "choices": [self._choice(outcome) for outcome in outcomes],
                "usage": usage.fields(),
            }
        )

    def _choice(self, outcome: Outcome) -> dict[str, Any]:
        piece, hides = outcome.piece, self._head.omits_reasoning
        message: dict[str, Any] = {
            "role": "assistant",
            "content": piece.content,
            "reasoning_content": piece.reasoning if outcome.reasoned and not hides else None,
            "refusal": None,
        }
        if piece.calls:
            message["content"] = piece.content or None
            message["tool_calls"] = _whole_calls(piece.calls)
        logprobs = None
        if piece.content_tokens or piece.reasoning_tokens:
            reasoning = () if hides else piece.reasoning_tokens
            logprobs = self._logprobs(piece.content_tokens, reasoning)
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
        """Return log-probabilities. A chunk and a whole reply have the same keys; OpenAI's
        description requires `refusal`.
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
    """Format of /completions."""

    keep_alive = KEEP_ALIVE

    def __init__(self, head: Head, vocabulary: Vocabulary) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._glue = _Glue(head, "text_completion")
        self._offset_of: dict[int, int] = {}
        """Choice -> position in its text where its next token starts."""
        self._decoder_of: dict[int, codecs.IncrementalDecoder] = {}

    def begin(self, usage: Usage) -> bytes:
        self._glue.count(usage)
        return b""

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        self._offset_of[index] = len(prefix)
        if not prefix and not prompt_ids:
            return b""
        ids = b',"prompt_token_ids":' + _encode(prompt_ids) if prompt_ids else b""
        return self._text(index, prefix, b"null", b"null" + ids)

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        self._glue.count(usage)
        if not piece and not piece.token_ids:
            return b""
        if piece.prompt is not None:
            logprobs = _encode(self._prompt_logprobs(index, piece.prompt))
            data = self._text(index, piece.prompt.text, logprobs, b"null")
            return data + self.chunks(index, dataclasses.replace(piece, prompt=None))
        logprobs = b"null"
        if piece.content_tokens:
            logprobs = _encode(self._logprobs(index, piece.content_tokens))
        finish = _encode(piece.finish) + _token_ids_body(piece)
        return self._text(index, piece.content, logprobs, finish)

    def _text(self, index: int, text: str, logprobs: bytes, finish: bytes) -> bytes:
        return self._glue.chunk(
            index,
            b'"text":' + _encode(text) + b',"logprobs":' + logprobs + b',"finish_reason":' + finish,
        )

    def usage(self, usage: Usage) -> bytes:
        return self._glue.usage(usage)

    def end(self, usage: Usage) -> bytes:
        return self._glue.end(usage)

    def failure(self, error: ApiError) -> bytes:
        return failure(error)

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        head = self._head
        choices = []
        for outcome in outcomes:
            piece, prompt, index = outcome.piece, outcome.piece.prompt, outcome.index
            self._offset_of[index] = len(outcome.prefix)
            logprobs: dict[str, list[Any]] | None = None
            if prompt is not None and prompt.is_echoed:
                logprobs = self._prompt_logprobs(index, prompt)
            if piece.content_tokens:
                own = self._logprobs(index, piece.content_tokens)
                logprobs = {name: [*(logprobs or {}).get(name, ()), *own[name]] for name in own}
            choice = {
                "index": index,
                "text": outcome.prefix + (prompt.text if prompt else "") + piece.content,
                "logprobs": logprobs,
                "finish_reason": piece.finish,
            }
            if prompt is not None and prompt.is_listed:
                choice["prompt_logprobs"] = self._listed(prompt)
            if outcome.prompt_ids:
                choice["prompt_token_ids"] = outcome.prompt_ids
            choices.append(choice | _token_ids(piece))
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

    def _prompt_logprobs(self, index: int, prompt: ScoredPrompt) -> dict[str, list[Any]]:
        """Return the log-probabilities of an echoed prompt. The first token has none. A token that
        the text does not show, such as the one that begins every text, does not advance the offset.
        """
        texts = [self._name_of(token) for token in prompt.ids]
        decoder, at, offsets = new_decoder("replace"), 0, []
        for token in prompt.ids:
            offsets.append(at)
            text = decoder.decode(_bytes_of(self._vocabulary, token))
            at += len(text) if prompt.text.startswith(text, at) else 0
        self._offset_of[index] = len(prompt.text)
        tops: list[dict[str, float] | None] = [None]
        for text, score in zip(texts[1:], prompt.scores, strict=True):
            tops.append(self._tops(text, score.logprob, score.top))
        return {
            "tokens": texts,
            "token_logprobs": [None, *(_finite(score.logprob) for score in prompt.scores)],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _listed(self, prompt: ScoredPrompt) -> list[Any]:
        """Return the prompt's log-probabilities in vLLM's form: null for the first token, then one
        object by token id per position, with the prompt's own token first.
        """
        entries: list[Any] = [None]
        for token, score in zip(prompt.ids[1:], prompt.scores, strict=True):
            ranked = [(token, score.logprob, score.rank)]
            ranked += [
                (other, logprob, rank)
                for rank, (other, logprob) in enumerate(score.top, 1)
                if other != token
            ]
            entries.append(
                {
                    str(other): {
                        "logprob": _finite(logprob),
                        "rank": rank,
                        "decoded_token": _bytes_of(self._vocabulary, other).decode(
                            "utf-8", "replace"
                        ),
                    }
                    for other, logprob, rank in ranked
                }
            )
        return entries

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        texts, offsets, tops = [], [], []
        at = self._offset_of.get(index, 0)
        decoder = self._decoder_of.setdefault(index, new_decoder("replace"))
        for token in tokens:
            text = self._name_of(token.token)
            texts.append(text)
            offsets.append(at)
            if token.token not in self._vocabulary.hidden_ids:
                at += len(decoder.decode(_bytes_of(self._vocabulary, token.token)))
            tops.append(self._tops(text, token.logprob, token.top))
        self._offset_of[index] = at
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name_of(self, token: int) -> str:
        """Return a token's text, or its bytes if it is part of a character, as OpenAI's older
        models do. So different bytes have different names.
        """
        raw = _bytes_of(self._vocabulary, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _tops(
        self, name: str, logprob: float | None, top: Iterable[tuple[int, float]]
    ) -> dict[str, float]:
        """Return name -> log-probability of the likeliest tokens, and of the text's own token."""
        best = {self._name_of(other): _finite(other_logprob) for other, other_logprob in top}
        return {**best, name: _finite(logprob)}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_called(call, "")}


def _called(call: CallDelta, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Return the complete calls from their deltas."""
    return [
        _called(call, "".join(each.arguments for each in deltas if each.index == call.index))
        for call in deltas
        if call.id
    ]


def _token_ids(piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.token_ids} if piece.token_ids else {}


def _token_ids_body(piece: Piece) -> bytes:
    """Return the token ids as the last field of a chunk's choice; empty if there are none."""
    return b',"token_ids":' + _encode(piece.token_ids) if piece.token_ids else b""


def _bytes_of(vocabulary: Vocabulary, token: int) -> bytes:
    return vocabulary.token_bytes[token] if 0 <= token < len(vocabulary) else b""


def _finite(logprob: float | None) -> float:
    return (
        max(logprob, _LOWEST_LOGPROB)
        if logprob is not None and logprob == logprob
        else _LOWEST_LOGPROB
    )
