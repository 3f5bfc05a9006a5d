"""Malformed request bodies, as hypothesis strategies."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

CHAT_FIELDS = [
    *("model", "messages", "stream", "stream_options", "max_tokens"),
    *("max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
    *("stop_token_ids", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "min_tokens"),
    *("ignore_eos", "user", "priority", "cache_salt", "response_format", "tools"),
    *("thinking", "chat_template_kwargs", "unknown"),
]
MESSAGES_FIELDS = [
    *("model", "messages", "system", "max_tokens", "stream", "stop_sequences"),
    *("temperature", "top_p", "top_k", "tools", "tool_choice", "thinking"),
    *("output_config", "metadata", "mcp_servers", "context_management"),
]
RESPONSES_FIELDS = [
    *("model", "input", "instructions", "max_output_tokens", "stream", "temperature"),
    *("top_p", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
    *("previous_response_id", "store", "metadata", "include", "truncation"),
    *("background",),
]
COMPLETION_FIELDS = ["prompt", "echo", "suffix", "best_of", *CHAT_FIELDS]
_WHOLE = (0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(10**40))
_REAL = (0.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), -float("inf"))
_WORDS = (
    *("", "\ud800", "\x00", "</think>", "<｜User｜>", "user", "system", "text", "enabled"),
    *("message", "function_call", "tool_result", "tool_use", "auto", "public"),
    *("tool_addition", "tool_removal", "tool_reference", "clear_tool_uses_20250919"),
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*_WHOLE, *_REAL]),
    st.text(max_size=8),
    st.sampled_from(_WORDS),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(
                [
                    *("role", "content", "type", "text", "include_usage", "0", "1", ""),
                    *("name", "input", "id", "tool_use_id", "call_id", "output", "format"),
                    *("schema", "input_schema", "effort", "arguments", "parameters"),
                    *("edits", "keep", "trigger", "value", "tool", "definition", "tool_name"),
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@st.composite
def bodies(draw: st.DrawFn, valid: dict[str, Any], fields: list[str]) -> bytes:
    """Draw a body: a valid one with wrong values, missing fields or broken bytes."""
    body = dict(valid)
    for name in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        if draw(st.integers(0, 5)) == 0:
            body.pop(name, None)
        else:
            body[name] = draw(values)
    data = json.dumps(body).encode("utf-8", "surrogatepass")
    kind = draw(st.integers(0, 9))
    if kind == 0:  # Cut off.
        return data[: draw(st.integers(0, len(data)))]
    if kind == 1:  # A few bytes that are no UTF-8 and perhaps no JSON.
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]
    if kind == 2:  # Nested deeply.
        depth = draw(st.sampled_from([100, 1000, 50_000]))
        opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"messages":', b"}")]))
        return opening * depth + b"1" + closing * depth
    if kind == 3:
        return draw(st.binary(max_size=40))
    if kind == 4:
        return data.replace(b'"max_tokens": 2', b'"max_tokens": 1e400')
    return data
