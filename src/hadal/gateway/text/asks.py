"""Requests in a form common to all APIs: turns or prompts, answer format, and sampling.

gateway/api reads bodies into these values; gateway/text makes prompts of them. Independent of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hadal.core.plans import Sampling
from hadal.gateway.text.thinking import TemplateValue
from hadal.gateway.text.tools import NO_TOOLS, Choosing

INT64_MAX = 2**63 - 1
PUBLIC = "public"
"""`cache_salt` that shares the KV of a chat's leading system messages with all tenants."""


@dataclass(frozen=True)
class PastCall:
    """Tool call made by an assistant. `arguments`: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message of a chat: role (system, user, assistant or tool) and text."""

    role: str
    content: str
    calls: tuple[PastCall, ...] = ()
    """Tool calls in an assistant's turn."""
    call_id: str = ""
    """Id of the call that a tool's message answers."""
    name: str = ""
    """Optional speaker name, passed to the chat template."""
    reasoning: str = ""
    """Reasoning of an assistant's turn, for templates that show earlier reasoning; others omit it."""

    @property
    def num_chars(self) -> int:
        """Return the length of content and reasoning, and of all calls' names and arguments."""
        num_chars = len(self.content) + len(self.reasoning)
        return num_chars + sum(len(call.name) + len(call.arguments) for call in self.calls)


@dataclass(frozen=True)
class AnswerFormat:
    """Required format of an answer's text."""

    name: str
    schema: dict[str, Any] | None
    """Schema of the answer; None: any JSON object."""
    field: str = "response_format"
    """Request field that asked for the format."""


@dataclass(frozen=True)
class CommonFields:
    """Engine options common to all endpoints. None: the model's or the deployment's default."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    max_name: str
    """Request field that sets `max_tokens`."""
    prompt_name: str
    """Request field with the prompt."""
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    sampling: Sampling
    """Sampling options; `with_defaults` adds temperature, top_p, top_k and seed."""
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    stop_repetition: bool = True
    priority: int = 0
    """Requests with larger values leave the queue sooner."""
    cache_salt: str | None = None
    """Separate cache for one of the tenant's users. None: KV is shared within the tenant."""
    explains_cache: bool = False
    """True: the usage explains why a prompt was not found whole in the cache."""
    format: AnswerFormat | None = None
    """Required format of the answer; None: any text."""
    omits_reasoning: bool = False
    """True: the reply omits the text of its reasoning."""
    hides_reasoning: bool = False
    """True: the reply also omits the parts of /v1/messages that would have the reasoning."""
    ends_with_room: bool = False
    """True: max_tokens may exceed the context or the server's limit; the answer then ends there."""
    has_usage_so_far: bool = False
    """True: each chunk of a stream has the usage so far, if `include_usage` is set."""


@dataclass(frozen=True)
class Rendering:
    """Options for rendering a chat, and the part of the reply that the prompt contains."""

    thinking: bool | None = None
    """True or False: think or not; False closes the reasoning. None: the template decides."""
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    choosing: Choosing = NO_TOOLS
    prefix: str = ""
    """Beginning of the reply, which continues from there without further reasoning."""
    reasoning: str = ""
    """Beginning of the reply's reasoning; without a prefix, the reply continues from there."""
    opens_reply: bool = True
    """True: the template may add the header of the assistant's next turn."""
    goes_on: bool = False
    """True: the prompt ends with the last turn's text, and the reply continues it."""
    may_stay_open: bool = False
    """True: with `thinking` False, a reasoning that the template opens all the same stays open."""
    keeps_places: bool = False
    """True: no system message between other turns moves to the prompt's beginning."""


PLAIN = Rendering()
"""Rendering with the template's defaults: no tools, and no beginning of the reply."""


@dataclass(frozen=True)
class ReasoningEdit:
    """Removal of the reasoning of all but the last `keep` turns that have some."""

    keep: int = 1


@dataclass(frozen=True)
class ToolUsesEdit:
    """Removal of the results of all but the last `keep` calls."""

    trigger: int = 100_000
    """The edit is made above this number of tokens, or of calls if `is_by_calls`."""
    is_by_calls: bool = False
    keep: int = 3
    min_tokens: int = 0
    """Minimum number of tokens to remove; an edit that would remove fewer is not made."""
    excluded: frozenset[str] = frozenset()
    """Names of tools with results that stay."""
    excluded_ids: frozenset[str] = frozenset()
    """Ids of calls with results that stay."""
    inputs: bool | frozenset[str] = False
    """True: the arguments of these calls are removed too; names: those of these tools."""


ContextEdit = ReasoningEdit | ToolUsesEdit


@dataclass(frozen=True)
class ChatAsk:
    """Checked body of /chat/completions, or an equal request of another API."""

    ask: CommonFields
    turns: tuple[Turn, ...]
    rendering: Rendering = PLAIN
    budget: int | None = None
    """Maximum number of reasoning tokens; None: no separate limit."""
    budget_field: str = ""
    """Request field that set `budget`."""
    switch_field: str = field(default="", compare=False)
    """Request field that demands thinking; "" if none does."""
    edits: tuple[ContextEdit, ...] | None = None
    """Edits to make before the chat is rendered; None: the client did not mention any."""


@dataclass(frozen=True)
class CompletionAsk:
    """Checked body of /completions."""

    ask: CommonFields
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    has_echoed_logprobs: bool = False
    """True: `logprobs` includes the echoed prompt's tokens, before the reply's."""
    has_prompt_logprobs: bool = False
    """True: log-probabilities of the prompt are wanted in vLLM's form."""
    suffix: str | None = None
    """Text that follows the answer (fill-in-the-middle); None: plain completion."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults of a model, where a client sets none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: sample from all tokens."""


def with_defaults(ask: CommonFields, own: SamplingDefaults, seed: int, index: int) -> Sampling:
    """Return the sampling of choice `index`: defaults for unset values, and its own seed."""
    return msgspec.structs.replace(
        ask.sampling,
        temperature=own.temperature if ask.temperature is None else ask.temperature,
        top_p=own.top_p if ask.top_p is None else ask.top_p,
        top_k=own.top_k if ask.top_k is None else ask.top_k,
        seed=(seed + index) & INT64_MAX,
    )
