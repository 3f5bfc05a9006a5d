"""What replies are made of, as /openapi.json tells it: a struct for each kind of JSON object.

Replies are glued from bytes where it matters (gateway/replies), so nothing is encoded from these; the
tests read every reply with them and refuse a field that is not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Json = dict[str, Any]


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object without other fields than it names."""


# OpenAI's: chats and texts.


class ScoredToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenScores(ScoredToken):
    top_logprobs: list[ScoredToken]


class ChatScores(Shape):
    """Log-probabilities, where they were asked for."""

    content: list[TokenScores]
    reasoning_content: list[TokenScores]
    refusal: None


class MadeFunction(Shape):
    name: str
    arguments: str


class MadeCall(Shape):
    id: str
    type: Literal["function"]
    function: MadeFunction


class ReplyMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    refusal: None
    tool_calls: list[MadeCall] = []


class ChatChoice(Shape):
    index: int
    message: ReplyMessage
    logprobs: ChatScores | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = []


class PromptDetails(Shape):
    cached_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class TokenUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails


class ChatReply(Shape):
    """A reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] = []


class TextScores(Shape):
    """Log-probabilities as the older endpoint has them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Shape):
    index: int
    text: str
    logprobs: TextScores | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, Json] | None] = []


class TextReply(Shape):
    """A reply of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: TokenUsage


class ModelEntry(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelEntry]


class ModelOrList(Shape):
    """A model, or all of them where the name is empty."""

    object: Literal["model", "list"]
    id: str = ""
    created: int = 0
    owned_by: str = ""
    data: list[ModelEntry] = []


class ErrorFields(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiErrorReply(Shape):
    """An error as OpenAI's clients expect it."""

    error: ErrorFields


# OpenAI's: responses.


class OutputItem(Shape):
    """Reasoning, a message or a call of a function."""

    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    type: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    summary: list[Any] = []
    content: list[Json] = []
    role: str = "assistant"
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""
    input: str = ""


class InputDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseReply(Shape):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: Json | None
    incomplete_details: Json | None
    instructions: str | None
    frequency_penalty: float
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: None
    reasoning: Json
    safety_identifier: None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: Json
    tool_choice: Any
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseDeleted(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ListPage(Shape):
    """A page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemList(ListPage):
    """Items of a response's input."""

    data: list[Json]


# OpenAI's: files and batches.


class FileUpload(Shape):
    """The form that brings a file."""

    purpose: Literal["batch"]
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class FileObject(Shape):
    """A file, without its contents."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(ListPage):
    data: list[FileObject]


class FileDeleted(Shape):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Shape):
    """What is wrong with a line of a batch's input, or with all of it."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Shape):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(Shape):
    total: int
    completed: int
    failed: int


class BatchObject(Shape):
    """A batch as it stands."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "failed",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(ListPage):
    data: list[BatchObject]


# Anthropic's.


class MessageUsage(Shape):
    """Tokens of the prompt that a cache had are counted apart."""

    input_tokens: int
    cache_creation: dict[str, int]
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    server_tool_use: None
    inference_geo: None
    service_tier: Literal["standard"]


class ThinkingPart(Shape, tag="thinking"):
    thinking: str
    signature: str


class TextPart(Shape, tag="text"):
    text: str
    citations: list[Json]


class ToolUsePart(Shape, tag="tool_use"):
    id: str
    name: str
    input: Json
    caller: Json


class MessageReply(Shape):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingPart | TextPart | ToolUsePart]
    stop_reason: (
        Literal[
            "end_turn",
            "max_tokens",
            "stop_sequence",
            "tool_use",
            "model_context_window_exceeded",
        ]
        | None
    )
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


class MessageErrorFields(Shape):
    type: str
    message: str
    details: Json = {}


class MessageErrorReply(Shape):
    """An error as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessageErrorFields


# Hadal's own.


class Greeting(Shape):
    """What this server is."""

    server: str
    model: str
    endpoints: list[str]


class HealthReply(Shape):
    """Whether requests can be answered, and what is missing."""

    status: Literal["starting", "ready", "degraded", "draining"]
    model: str
    units_up: dict[str, int]
    units_wanted: dict[str, int]
    ranks_up: dict[str, int]
    ranks_wanted: dict[str, int]
    missing: list[str]
    nodes: list[str] = []


class AuditReply(Shape):
    """What every unit has in use, and what does not add up."""

    problems: list[str]
    units: dict[str, dict[str, int]]
