"""A request as every API states it: its turns or prompts, its format, and its sampling.

The APIs' bodies are read into these values (gateway/api); text is made of them here. Knows no JSON.
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
"""The `cache_salt` that shares a chat's leading system messages with everybody."""


@dataclass(frozen=True)
class PastCall:
    """A call of a tool that an assistant made. `arguments`: JSON as text, as it wrote them."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message of a chat: role system, user, assistant or tool, and its text."""

    role: str
    content: str
    calls: tuple[PastCall, ...] = ()
    """An assistant's."""
    call_id: str = ""
    """Which call a tool's message is the result of."""
    name: str = ""
    """Of who says it, for templates that show it."""

    @property
    def num_chars(self) -> int:
        """Length of its texts."""
        return len(self.content) + sum(len(call.name) + len(call.arguments) for call in self.calls)


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer's text must be."""

    name: str
    schema: dict[str, Any] | None
    """None: any JSON object."""
    field: str = "response_format"
    """By which it was asked for."""


@dataclass(frozen=True)
class CommonFields:
    """What both endpoints ask of the engine. None: the model's or the deployment's default."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    max_name: str
    """The field that `max_tokens` was asked for by."""
    prompt_name: str
    """The field that the prompt was given by."""
    min_tokens: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    sampling: Sampling
    """Everything but temperature, top_p, top_k and seed, which have defaults of their own."""
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    stop_repetition: bool = True
    priority: int = 0
    """Larger is sooner among those that wait."""
    cache_salt: str | None = None
    """None: what the tenant's other requests leave behind is reused, and the other way round."""
    format: AnswerFormat | None = None
    """None: any text."""
    omits_reasoning: bool = False
    """The reply says that the model thinks, and not what."""
    ends_with_room: bool = False
    """More tokens may be asked for than the context, or the server's limit, has room for: the answer
    ends there.
    """
    has_usage_so_far: bool = False
    """With `include_usage`: each chunk of a stream has the usage so far."""


@dataclass(frozen=True)
class Rendering:
    """How the chat template renders a chat, and where in the reply the prompt ends."""

    thinking: bool | None = None
    """Whether the model thinks; False closes the reasoning before it starts. None: as the chat
    template has it.
    """
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    choosing: Choosing = NO_TOOLS
    prefix: str = ""
    """Beginning of the reply, which goes on from there and has no other reasoning."""
    reasoning: str = ""
    """Beginning of the reply's reasoning; without a prefix, the reply goes on from there."""
    opens_reply: bool = True
    """The template may say which turn comes next."""
    goes_on: bool = False
    """The prompt ends where the last turn's text does, and the reply goes on from there."""


PLAIN = Rendering()
"""A rendering as the template has it, of nothing but turns."""


@dataclass(frozen=True)
class ChatAsk:
    """A body of /chat/completions, checked."""

    ask: CommonFields
    turns: tuple[Turn, ...]
    rendering: Rendering = PLAIN
    budget: int | None = None
    """Most tokens of its reasoning; None: no limit of their own."""
    budget_field: str = ""
    """Field that asked for the budget."""
    switch_field: str = field(default="", compare=False)
    """Field that demands thinking, if one does."""


@dataclass(frozen=True)
class CompletionAsk:
    """A body of /completions, checked."""

    ask: CommonFields
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    has_echoed_logprobs: bool = False
    """Those of the prompt's tokens stand before those of the reply's."""
    has_prompt_logprobs: bool = False
    """vLLM's form of them."""
    suffix: str | None = None
    """What follows what is asked for; None: nothing has to."""


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model wants to be sampled where a client does not say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: of all tokens."""


def with_defaults(ask: CommonFields, own: SamplingDefaults, seed: int, index: int) -> Sampling:
    """The sampling of choice `index`: the model's own where the client gave none, and a seed for
    itself.
    """
    return msgspec.structs.replace(
        ask.sampling,
        temperature=own.temperature if ask.temperature is None else ask.temperature,
        top_p=own.top_p if ask.top_p is None else ask.top_p,
        top_k=own.top_k if ask.top_k is None else ask.top_k,
        seed=(seed + index) & INT64_MAX,
    )
