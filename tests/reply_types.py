"""Replies in OpenAI's and Anthropic's formats, read with the types of their Python clients.

Strict: no value is converted. A reply has every field of its type except those in LESS. It has the
fields in MORE, and no other unknown fields than those in ASKED. Independent of endpoints:
/openapi.json names each reply's type.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import anthropic.types  # noqa: F401
import openai.pagination
import openai.types
import openai.types.chat
import openai.types.responses  # noqa: F401
import pydantic

ASKED = {
    "ChatCompletion": {"prompt_token_ids"},
    "ChatCompletionChunk": {"prompt_token_ids"},
    "Choice": {"token_ids"},
    "CompletionChoice": {"prompt_logprobs", "prompt_token_ids", "token_ids"},
    "CompletionUsage": {"cache_explanation"},
    "Message": {"context_management"},
    "MessageDeltaUsage": {"cache_explanation"},
    "MessageTokensCount": {"context_management"},
    "RawMessageDeltaEvent": {"context_management"},
    "ResponseUsage": {"cache_explanation"},
    "Usage": {"cache_explanation"},
}
"""Type -> fields unknown to it that are sent only on request; they are vLLM's, Hadal's own, and of
Anthropic's beta.
"""
MORE = {
    "ChatCompletionMessage": {"reasoning_content"},
    "ChoiceDelta": {"reasoning_content"},
    "ChoiceLogprobs": {"reasoning_content"},
    "CompletionUsage": {"prompt_cache_hit_tokens", "prompt_cache_miss_tokens"},
    "MessageDeltaUsage": {"cache_creation", "inference_geo", "service_tier"},
    "Response": {"frequency_penalty", "presence_penalty", "store"},
    "ResponseCustomToolCall": {"status"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    "SyncCursorPage": {"first_id", "last_id", "object"},
}
"""Type -> fields unknown to it that are always sent: DeepSeek's, and fields in the services'
descriptions that their clients' types lack.
"""
_UNHEARD = {"audio_tokens", "image_tokens", "text_tokens"}
"""Token counts of audio and images, which no model here uses, and of text, which is the rest."""
LESS = {
    "Batch": {"model", "usage"},
    "ChatCompletion": {"metadata", "moderation", "service_tier"},
    "ChatCompletionChunk": {"moderation", "obfuscation", "service_tier", "usage"},
    "ChatCompletionMessage": {"annotations", "audio", "function_call", "tool_calls"},
    "ChoiceDelta": {"function_call", "audio", "refusal", "role", "tool_calls"},
    "ChoiceDeltaToolCall": {"id", "type"},
    "ChoiceDeltaToolCallFunction": {"name"},
    "Completion": {"usage"},
    "CompletionTokensDetails": {
        *("accepted_prediction_tokens", "rejected_prediction_tokens"),
        *_UNHEARD,
    },
    "Delta": {"container", "stop_details"},
    "FileObject": {"status_details"},
    "InputTokensDetails": {"cache_write_tokens_details"},
    "Message": {"diagnostics"},
    "Model": {"shutdown_date"},
    "PromptTokensDetails": {"cache_write_tokens", *_UNHEARD},
    "Reasoning": {"context", "generate_summary", "mode"},
    "Response": {
        *("access_programs", "conversation", "image", "input_transformations", "moderation"),
        *("prompt", "prompt_cache_diagnostics", "prompt_cache_options", "prompt_cache_retention"),
        *("tool_usage", "user"),
    },
    "ResponseCustomToolCall": {"async_", "caller", "namespace"},
    "ResponseFunctionToolCall": {"async_", "caller", "namespace"},
    "ResponseOutputMessage": {"phase"},
    "ResponseReasoningItem": {"encrypted_content"},
    "ResponseTextConfig": {"verbosity"},
    "ToolUseBlock": {"toolset_name"},
    "Usage": {"speed"},
}
"""Type -> fields of that type that a reply may lack."""
ECHOED = {("Response", "tools"), ("Response", "tool_choice"), ("ResponseItemList", "data")}
"""(type, field) in which a reply repeats its client's data, which is not checked."""


def read(name: str, fields: Any, *, is_event: bool = False) -> Any:
    """Return a reply, or an event's data, read as the named type. Raises AssertionError on a mismatch."""
    if name == "openai.types.Completion":
        fields = {
            **fields,
            "choices": [_text_choice(each, is_event=is_event) for each in fields["choices"]],
        }
    try:
        found = _reader(name).validate_json(json.dumps(fields), strict=True)
    except pydantic.ValidationError as error:
        raise AssertionError(str(error)) from error
    _check(found, name)
    return found


@cache
def _reader(name: str) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(name)


def _check(value: Any, where: str) -> None:
    if isinstance(value, list):
        for each in value:
            _check(each, where)
    if not isinstance(value, pydantic.BaseModel):
        return
    kind = type(value).__name__.partition("[")[0]
    sent = value.model_fields_set | set(value.model_extra or ())
    known = set(type(value).model_fields) | MORE.get(kind, set())
    more = sent - known - ASKED.get(kind, set())
    assert not more, f"{where}: {kind} does not know {sorted(more)}"
    less = known - sent - LESS.get(kind, set())
    assert not less, f"{where}: {kind} lacks {sorted(less)}"
    for name in value.model_fields_set:
        if (kind, name) not in ECHOED:
            _check(getattr(value, name), f"{where}.{name}")


def _text_choice(choice: dict[str, Any], *, is_event: bool) -> dict[str, Any]:
    """Return a choice without nulls that OpenAI sends and its client's type forbids: an event's
    finish reason, and the log-probability of a text's first token.
    """
    if is_event:
        choice = {**choice, "finish_reason": choice["finish_reason"] or "stop"}
    if scores := choice["logprobs"]:
        scores = dict(scores)
        for name in ("token_logprobs", "top_logprobs"):
            scores[name] = [entry for entry in scores[name] if entry is not None]
    return {**choice, "logprobs": scores}
