"""Replies as OpenAI's clients read them: whole bodies, and the chunks of a stream.

A stream's chunks are glued from pieces that were encoded once, since one is written for nearly
every token. A chunk holds all the tokens that came since the last one, so `usage` counts tokens and
a count of chunks does not. Knows the API's JSON, nothing of where tokens come from or of sockets.
"""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Send

from hadal.core.messages import RateLimits, Token
from hadal.core.seams import Deliver
from hadal.gateway.errors import ApiError, limit_headers, retry_after, sentence
from hadal.gateway.far_host import FarHost
from hadal.gateway.host import Host
from hadal.gateway.mailbox import Mailbox
from hadal.gateway.service import Choice, Work
from hadal.gateway.stream import Piece, ScoredPrompt, new_decoder
from hadal.gateway.tools import CallDelta
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
    prompt_ids: tuple[int, ...] = ()
    """The prompt's tokens, where they were asked for."""


@dataclass(frozen=True)
class Head:
    """What every chunk of a reply repeats."""

    id: str
    created: int
    model: str
    fingerprint: str
    include_usage: bool = False
    omits_reasoning: bool = False
    has_usage_so_far: bool = False
    """Each chunk has the usage so far, besides the last one."""


class ReplyFormat(Protocol):
    """One endpoint's JSON, and its events.

    begin, opening of every choice, chunks ..., then end or failure      a stream
    whole                                                                a reply in one piece
    """

    keep_alive: bytes
    """What a stream says while there is nothing to say."""

    def begin(self, usage: Usage) -> bytes:
        """What comes before all choices."""
        ...

    def opening(self, index: int, prefix: str, prompt_ids: tuple[int, ...] = ()) -> bytes:
        """The chunk that opens a choice; empty where there is none. `prompt_ids`: tokens of its
        prompt, where they were asked for.
        """
        ...

    def chunks(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """What some tokens brought. `usage`: that of the whole request so far."""
        ...

    def end(self, usage: Usage) -> bytes:
        """What follows the last chunk."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        ...

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
        self._includes_usage = head.include_usage
        self._has_usage_so_far = head.include_usage and head.has_usage_so_far
        self._usage = b',"usage":null' if head.include_usage else b""
        self._starts: dict[int, bytes] = {}

    def chunk(self, index: int, body: bytes, more: bytes = b"") -> bytes:
        """Return a chunk of a choice. `more`: fields beside the choices, with a comma before each."""
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


def failure(error: ApiError) -> bytes:
    """How a stream of OpenAI's says that it cannot go on."""
    return b"data: " + error.body + b"\n\n"


class ChatFormatter:
    """/chat/completions."""

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
            bodies = [_LAST_DELTA + b"null"]  # Tokens whose text is held back, or is not shown.
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

    keep_alive = KEEP_ALIVE

    def __init__(self, head: Head, vocabulary: Vocabulary) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._glue = _Glue(head, "text_completion")
        self._offset_of: dict[int, int] = {}
        """Where the next token of each choice starts in its text."""
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
            if prompt is not None and prompt.is_told:
                choice["prompt_logprobs"] = self._told(prompt)
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
        """Of its first token nobody knows how likely it is. One that the text does not show, as that
        which begins every text, is nowhere in it.
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

    def _told(self, prompt: ScoredPrompt) -> list[Any]:
        """As vLLM has it: by id, the token's own first."""
        told: list[Any] = [None]
        for token, score in zip(prompt.ids[1:], prompt.scores, strict=True):
            ranked = [(token, score.logprob, score.rank)]
            ranked += [
                (other, logprob, rank)
                for rank, (other, logprob) in enumerate(score.top, 1)
                if other != token
            ]
            told.append(
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
        return told

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
        """Its text; of a part of a character its bytes, as OpenAI's older models have it. So no two
        are called the same.
        """
        raw = _bytes_of(self._vocabulary, token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _tops(
        self, name: str, logprob: float | None, top: Iterable[tuple[int, float]]
    ) -> dict[str, float]:
        """The likeliest ones by name, the token's own among them."""
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
    """What the deltas add up to."""
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


# Send one reply, streamed or whole, while its generations run.
#
# A stream's first bytes wait for the first token or the first keep-alive, so that a refusal by the
# front still gets a status of its own; from then on errors are events of the stream. Knows ASGI's
# send; makes no JSON.


log = logging.getLogger("hadal.gateway")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks of a stream.
]
_WAIT_S = 60.0
_GRACE_S = 5.0
"""The front ends a request that is late; this is how much later it is ended without the front."""
_CODES = {
    400: "context_length_exceeded",
    429: "overloaded",
    500: "engine_error",
    503: "overloaded",
    504: "request_timeout",
}


@dataclass
class Times:
    """When things happened to a request, in the clock's seconds."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    is_read: bool = False
    """The request's body became generations, which the front has."""


@dataclass
class Meter:
    """What one choice's deliveries said besides text.

    Tokens of one delivery come together, and the first one comes by itself, out of prefill. So the
    time from first to last, over the tokens after the first, is the mean time between two whatever
    number a step draws.
    """

    num_cached: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None


class ClientGone(Exception):
    """The client closed the connection, or does not read: there is nobody to answer."""


async def send_within(timeout_s: float, send: Send, message: Message) -> None:
    """Hand a message to the server, which waits while its buffer is full. Raises ClientGone."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except TimeoutError:
        raise ClientGone("the client does not read") from None


class Reply:
    """The running choices of one HTTP request."""

    def __init__(
        self,
        work: Work,
        mailbox: Mailbox,
        host: Host | FarHost,
        reply_format: ReplyFormat,
        times: Times,
        now: Callable[[], float],
        *,
        timeout_s: float,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        self.times = times
        self.work = work
        self.mailbox = mailbox
        self._host = host
        self._format = reply_format
        self._now = now
        self._timeout_s = timeout_s
        self._deadline_s = times.start_s + timeout_s + _GRACE_S
        """Time at which the reply fails, unless a delivery comes before."""
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._num_open = len(work.choices)
        self.meters = [Meter() for _ in work.choices]
        """A meter for each choice."""
        self._limits: RateLimits | None = None

    @property
    def usage(self) -> Usage:
        """Counted so far."""
        assemblers = [choice.assembler for choice in self.work.choices]
        return Usage(
            self.work.num_prompt_tokens,
            sum(assembler.num_tokens for assembler in assemblers),
            sum(assembler.num_reasoning_tokens for assembler in assemblers),
            # Choices stand together by prompt. A prompt counts once, so what its first choice found
            # is what counts.
            sum(meter.num_cached for meter in self.meters[:: self.work.ask.n]),
        )

    async def send_whole(self, send: Send) -> int:
        """Wait for every choice, then send one JSON body; returns the status. Raises ApiError,
        ClientGone.
        """
        pieces = [Piece() for _ in self.work.choices]
        while self._num_open:
            for index, deliver in await self._take(_WAIT_S):
                pieces[index].add(self._assemble(index, deliver))
        outcomes = [
            Outcome(
                index,
                piece,
                choice.assembler.num_reasoning_tokens > 0,
                choice.prefix,
                self._prompt_ids(choice),
            )
            for index, (choice, piece) in enumerate(zip(self.work.choices, pieces, strict=True))
        ]
        body = self._format.whole(outcomes, self.usage)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._limit_headers(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, body, more=False)
        return 200

    async def send_stream(self, send: Send) -> int:
        """Send events as tokens come; returns 200, or the status of an error sent in the stream.

        Raises ApiError (before the first byte only), ClientGone.
        """
        deliveries = await self._take(self._keep_alive_s)
        # An error in the first delivery gets a status of its own.
        for _, deliver in deliveries:
            self._raise_error(deliver)
        headers = [*_STREAM_HEADERS, *self._limit_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not deliveries:
            await self._send(send, self._format.keep_alive)
        try:
            pieces = self._pieces(deliveries)  # They say what a cache had of the prompt.
            data = self._format.begin(self.usage)
            data += b"".join(
                self._format.opening(i, choice.prefix, self._prompt_ids(choice))
                for i, choice in enumerate(self.work.choices)
            )
            data += self._chunks(pieces)
            while self._num_open:
                if data:
                    await self._send(send, data)
                deliveries = await self._take(self._keep_alive_s)
                pieces = self._pieces(deliveries)
                data = self._chunks(pieces) if deliveries else self._format.keep_alive
            await self._send(send, data + self._format.end(self.usage), more=False)
        except ApiError as error:
            await self._send(send, self._format.failure(error), more=False)
            return error.status
        return 200

    def _chunks(self, pieces: dict[int, Piece]) -> bytes:
        """One write for all that is ready."""
        usage = self.usage if self.work.ask.has_usage_so_far else None
        return b"".join(self._format.chunks(index, piece, usage) for index, piece in pieces.items())

    def _prompt_ids(self, choice: Choice) -> tuple[int, ...]:
        return choice.generation.prompt if self.work.ask.return_token_ids else ()

    def _pieces(self, deliveries: list[tuple[int, Deliver]]) -> dict[int, Piece]:
        """By choice: the tokens of one that came together share an event."""
        pieces: dict[int, Piece] = {}
        for index, deliver in deliveries:
            piece = self._assemble(index, deliver)
            if index in pieces:
                pieces[index].add(piece)
            else:
                pieces[index] = piece
        return pieces

    def _assemble(self, index: int, deliver: Deliver) -> Piece:
        self._raise_error(deliver)
        choice = self.work.choices[index]
        assembler = choice.assembler
        if assembler.finish is not None:
            return Piece()
        meter = self.meters[index]
        meter.num_cached += deliver.num_cached
        is_first = bool(deliver.tokens) and meter.first_token_s is None
        if deliver.tokens:
            self.times.last_token_s = meter.last_token_s = self._now()
            if meter.first_token_s is None:
                meter.first_token_s = meter.last_token_s
                self.times.first_token_s = self.times.first_token_s or meter.first_token_s
        piece = assembler.push(() if choice.is_prompt_only else deliver.tokens)
        if choice.scored is not None and is_first:
            piece.prompt = dataclasses.replace(choice.scored, scores=deliver.scores)
        if piece.finish is None and deliver.final:
            piece.add(assembler.end("length"))
        if piece.finish is not None:
            self._num_open -= 1
            if assembler.period:
                log.info(
                    "the reply repeats %d tokens without end and is stopped after %d",
                    assembler.period,
                    assembler.num_tokens,
                )
            if (
                not deliver.final
            ):  # A stop string, or a text in circles: the engine does not know of it.
                self._host.cancel(self.mailbox, choice.generation.request_id)
        return piece

    def _raise_error(self, deliver: Deliver) -> None:
        if deliver.error is not None:
            raise ApiError(
                deliver.error_status,
                sentence(deliver.error),
                code=deliver.error_code or _CODES.get(deliver.error_status),
                headers={**retry_after(deliver.retry_after_s), **limit_headers(deliver.limits)},
            )

    def _limit_headers(self) -> list[tuple[bytes, bytes]]:
        headers = limit_headers(self._limits)
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _take(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        """What came, or nothing after so long. That a tenant with a quota was let in is no news."""
        until_s = self._now() + timeout_s
        while True:
            deliveries = await self._take_any(max(0.0, until_s - self._now()))
            news = [(i, one) for i, one in deliveries if one.final or one.tokens or not one.limits]
            for _, deliver in deliveries:
                self._limits = deliver.limits or self._limits
            if news or not deliveries:
                return news

    async def _take_any(self, timeout_s: float) -> list[tuple[int, Deliver]]:
        now_s = self._now()
        if now_s >= self._deadline_s:
            raise ApiError(
                504,
                f"The request waited {self._timeout_s:g} s for a token.",
                code="request_timeout",
            )
        deliveries = await self.mailbox.take(min(timeout_s, self._deadline_s - now_s))
        if deliveries:
            self._deadline_s = self._now() + self._timeout_s + _GRACE_S
        if self.mailbox.gone:
            raise ClientGone("the client closed the connection")
        return deliveries

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body; a client that does not read is left."""
        message = {"type": "http.response.body", "body": data, "more_body": more}
        await send_within(self._send_timeout_s, send, message)
        # After the last byte the server reports the end of the connection in the same way; that is
        # no failure.
        if more and self.mailbox.gone:
            raise ClientGone("the client closed the connection")
