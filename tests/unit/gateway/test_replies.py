"""The types of OpenAI's own client read every chunk and every body."""

from __future__ import annotations

import json
import math

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hadal.core.messages.generation import Token
from hadal.gateway.api.openai.reply import ChatFormatter, CompletionFormatter
from hadal.gateway.api.reply import Head, Outcome, Usage
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.piece import Piece

HEAD = Head("id-1", 5, 'a "model"', "hadal-test")
USAGE = Usage(10, 7, 3)
NASTY = 'quote " backslash \\ newline \n zero \x00 emoji 🙂 line separator \u2028'


def chunks_of(data: bytes) -> list[dict[str, object]]:
    assert data.endswith(b"\n\n")
    return [json.loads(part.removeprefix(b"data: ")) for part in data.split(b"\n\n")[:-1]]


def test_chat_chunks(model: ServedModel) -> None:
    reply = ChatFormatter(HEAD, model.vocabulary)
    token = Token("r", 0, 0, 70, None, -math.inf, ((71, -1.5), (10**6, math.nan)))
    piece = Piece(NASTY, "b" + NASTY, [token], [token], "stop")
    chunks = [
        ChatCompletionChunk.model_validate(chunk)
        for chunk in chunks_of(reply.opening(2, "") + reply.chunks(2, piece))
    ]
    assert [chunk.choices[0].index for chunk in chunks] == [2] * 4
    assert chunks[0].model == 'a "model"'
    assert chunks[1].choices[0].delta.reasoning_content == NASTY  # type: ignore[attr-defined]
    assert chunks[2].choices[0].delta.content == "b" + NASTY
    assert chunks[3].choices[0].finish_reason == "stop"
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    assert all(
        "reasoning_content" in delta and isinstance(delta["content"], str) for delta in deltas
    )
    assert chunks[2].choices[0].logprobs is not None
    entry = (chunks[2].choices[0].logprobs.content or [])[0]
    assert entry.logprob == -9999.0
    assert [other.logprob for other in entry.top_logprobs] == [-1.5, -9999.0]
    assert bytes(entry.bytes or ()) == model.vocabulary.token_bytes[70]


def test_chat_body(model: ServedModel) -> None:
    outcomes = [
        Outcome(0, Piece("r", NASTY, finish="stop"), True),
        Outcome(1, Piece("", "c", finish="length"), False),
    ]
    body = ChatCompletion.model_validate_json(
        ChatFormatter(HEAD, model.vocabulary).whole(outcomes, USAGE)
    )
    assert body.choices[0].message.content == NASTY
    assert body.choices[0].message.reasoning_content == "r"  # type: ignore[attr-defined]
    assert body.choices[1].message.reasoning_content is None  # type: ignore[attr-defined]
    fields = json.loads(ChatFormatter(HEAD, model.vocabulary).whole(outcomes, USAGE))["choices"]
    assert all(
        choice["message"]["refusal"] is None for choice in fields
    )  # OpenAI's description requires the key.
    assert body.usage is not None
    assert body.usage.total_tokens == 17
    assert body.usage.completion_tokens_details is not None
    assert body.usage.completion_tokens_details.reasoning_tokens == 3


def test_usage_chunk(model: ServedModel) -> None:
    for reply, kind in (
        (ChatFormatter(HEAD, model.vocabulary), ChatCompletionChunk),
        (CompletionFormatter(HEAD, model.vocabulary), Completion),
    ):
        (fields,) = chunks_of(reply.usage(USAGE))
        chunk = kind.model_validate(fields)
        assert chunk.choices == []
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == 10


def test_parts_of_characters_have_names_of_their_own_and_offsets_in_the_text(
    model: ServedModel,
) -> None:
    """The four byte tokens of an emoji arrive in two pieces."""
    reply = CompletionFormatter(HEAD, model.vocabulary)
    ids = model.vocabulary.encode_plain("a🙂 b")
    assert len(ids) > 4
    tops = [((0, -0.1), (token, -5.0)) for token in ids]
    tokens = [Token("r", 0, i, t, None, -5.0, tops[i]) for i, t in enumerate(ids)]
    told = chunks_of(
        reply.chunks(0, Piece("", "a", [], tokens[:3]))
        + reply.chunks(0, Piece("", "🙂 b", [], tokens[3:], "stop"))
    )
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in told]
    names = [name for each in logprobs for name in each["tokens"]]
    parts = [name for name in names if name.startswith("bytes:")]
    assert bytes.fromhex("".join(parts).replace("bytes:", "").replace("\\x", "")) == "🙂".encode()
    offsets = [at for each in logprobs for at in each["text_offset"]]
    assert offsets[names.index("a")] == 0
    assert offsets[-1] == len("a🙂 b") - len(names[-1])
    for each in logprobs:
        for name, logprob, top in zip(
            each["tokens"], each["token_logprobs"], each["top_logprobs"], strict=True
        ):
            assert top[name] == logprob
            assert len(top) == 2, "the likeliest is beside it"


def test_completion(model: ServedModel) -> None:
    reply = CompletionFormatter(HEAD, model.vocabulary)
    tokens = [
        Token("r", 0, i, token, None, -0.5, ((token, -0.5), (72, -2.0)))
        for i, token in enumerate((70, 71))
    ]
    body = Completion.model_validate_json(
        reply.whole([Outcome(0, Piece("", "xy", [], tokens, "stop"), False, "pre")], USAGE)
    )
    assert body.choices[0].text == "prexy"
    logprobs = body.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [3, 3 + len(model.vocabulary.decode([70]))]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert all(len(top) == 2 for top in logprobs.top_logprobs or ())
    # OpenAI sends finish_reason null until a stream's end, which the client's types do not allow.
    chunks = [
        Completion.model_construct(**chunk)
        for chunk in chunks_of(reply.opening(0, "pre") + reply.chunks(0, Piece("", NASTY)))
    ]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "pre" + NASTY
    assert reply.opening(0, "") == reply.chunks(0, Piece()) == b""
