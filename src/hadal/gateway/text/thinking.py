"""Read a request's options for thinking (reasoning), in the forms of all services.

    thinking, enable_thinking, reasoning.enabled      think or do not
    reasoning_effort, reasoning.effort                amount of thinking; "none": do not think
    thinking_budget and its other names               maximum number of reasoning tokens
    thinking.keep, preserve_thinking and others       show the reasoning of all earlier turns
    chat_template_kwargs                              the template's switches, if no other is set

Two fields for one setting with different values raise RequestError (400), as does effort "none"
with thinking enabled; chat_template_kwargs never conflict. Independent of templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError

T = TypeVar("T")
TemplateValue = bool | int | float | str | None
_MOST = 2**63 - 1
_Budget = Annotated[int, Meta(ge=-1, le=_MOST)]
_Count = Annotated[int, Meta(ge=1, le=_MOST)]
_BUDGETS = (
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "reasoning_budget",
    "reasoning_budget_tokens",
)
_TYPES: dict[str, bool | None] = {
    "enabled": True,
    "disabled": False,
    "between_tools": False,
    "adaptive": None,
    "auto": None,
}
"""Type of a switch -> think or do not; None leaves it to the template. "between_tools" is
Anthropic's: no thinking, and notes between calls, which models here write as text.
"""
_CONTEXTS = {"all_turns": True, "current_turn": False}
"""Value of reasoning.context -> the prompt has the reasoning of all earlier turns."""
_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}
"""Effort -> value of the template's variable `reasoning_effort` (DeepSeek's guide to the thinking
mode, autumn 2026). A template that does not use the variable has only one way of thinking.
"""


class ThinkingSwitch(msgspec.Struct):
    """Value of `thinking` in APIs of DeepSeek, Anthropic, Zhipu, Moonshot and Fireworks."""

    type: str
    budget_tokens: _Count | None = None
    keep: Literal["all"] | None = None
    """Moonshot's field: the prompt has the reasoning of all earlier turns."""
    clear_thinking: bool | None = None
    """Zhipu's field. False: the prompt has the reasoning of all earlier turns."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """Field of /v1/messages. "omitted": thinking blocks have no text. Nothing is summarized."""


class ReasoningOptions(msgspec.Struct):
    """Value of `reasoning` in OpenAI's Responses API, OpenRouter and Together."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: _Count | None = None
    exclude: bool | None = None
    """True: the reply omits its reasoning."""
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    """Field of /v1/responses: earlier turns that have their reasoning in the prompt."""


class ThinkingFields(msgspec.Struct, kw_only=True):
    """Fields by which clients of all services switch thinking."""

    thinking: bool | ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: str | None = None
    thinking_budget: _Budget | None = None
    thinking_token_budget: _Budget | None = None
    thinking_budget_tokens: _Budget | None = None
    reasoning_budget: _Budget | None = None
    reasoning_budget_tokens: _Budget | None = None
    preserve_thinking: bool | None = None
    """DashScope's field. True: the prompt has the reasoning of all earlier turns."""
    reasoning_history: Literal["interleaved", "preserved"] | None = None
    """Fireworks' field. "preserved": the prompt has the reasoning of all earlier turns."""
    chat_template_kwargs: dict[str, TemplateValue] | None = None


@dataclass(frozen=True)
class Thinking:
    """Thinking options of a request."""

    is_on: bool | None = None
    """True: think; False: do not; None: the chat template decides."""
    template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    budget: int | None = None
    """Maximum number of reasoning tokens; None: only the reply's limit applies."""
    budget_field: str = ""
    """Request field that set `budget`."""
    switch_field: str = ""
    """Request field that demands thinking; "" if none does. An effort does not demand it."""


def read_thinking(
    request: ThinkingFields,
    *,
    output_effort: str | None = None,
    variables: Mapping[str, TemplateValue] | None = None,
) -> Thinking:
    """Read a request's switches. Raises RequestError.

    `output_effort`: effort of Anthropic's output_config, which alone does not switch thinking on.
    `variables`: further variables for the template.
    """
    options = request.reasoning or ReasoningOptions()
    switch_field, is_on = _one(
        [
            ("thinking", _switch(request.thinking)),
            ("enable_thinking", request.enable_thinking),
            ("reasoning.enabled", options.enabled),
        ]
    )
    demands = switch_field if is_on else ""
    effort_field, effort = _one(
        [
            ("reasoning_effort", request.reasoning_effort),
            ("reasoning.effort", options.effort),
            ("output_config.effort", output_effort),
        ]
    )
    values = dict(variables or {})
    if effort == "none":
        if is_on:
            raise RequestError(
                f"{effort_field} is 'none', but thinking is enabled; send one of them.",
                effort_field,
            )
        is_on = False
    elif effort is not None:
        values["reasoning_effort"] = _known_effort(effort, effort_field)
    if (keeps := _keeps_all(request)) is not None:
        values |= {"preserve_thinking": keeps, "clear_thinking": not keeps}
    kwargs = values | (request.chat_template_kwargs or {})
    for key in ("thinking", "enable_thinking"):
        value = kwargs.get(key)
        if is_on is None and isinstance(value, bool):
            is_on = value
    asks = effort is not None and effort_field != "output_config.effort"
    if is_on is None and (asks or options.max_tokens is not None):
        is_on = True
    budget_field, budget = _budget(request, options)
    return Thinking(is_on, kwargs, budget, budget_field, demands)


def _keeps_all(request: ThinkingFields) -> bool | None:
    """Return True if the template should show the reasoning of all earlier turns, as far as it has
    an option for that; None: by its default.
    """
    switch = request.thinking if isinstance(request.thinking, ThinkingSwitch) else None
    clears = None if switch is None else switch.clear_thinking
    history = request.reasoning_history
    options = request.reasoning or ReasoningOptions()
    _, keeps = _one(
        [
            ("thinking.keep", None if switch is None or switch.keep is None else True),
            ("thinking.clear_thinking", None if clears is None else not clears),
            ("preserve_thinking", request.preserve_thinking),
            ("reasoning_history", None if history is None else history == "preserved"),
            ("reasoning.context", _CONTEXTS.get(options.context or "")),
        ]
    )
    return keeps


def _switch(value: bool | ThinkingSwitch | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    if value.type not in _TYPES:
        raise RequestError(
            f"thinking.type is {value.type[:40]!r}; use {', '.join(map(repr, _TYPES))}.",
            "thinking.type",
        )
    return _TYPES[value.type]


def _known_effort(effort: str, name: str) -> str:
    if effort not in _EFFORTS:
        raise RequestError(
            f"{name} is {effort[:40]!r}; use {', '.join(map(repr, _EFFORTS))}, or 'none' for an"
            " answer without thinking.",
            name,
        )
    return _EFFORTS[effort]


def _budget(request: ThinkingFields, options: ReasoningOptions) -> tuple[str, int | None]:
    switch = request.thinking if isinstance(request.thinking, ThinkingSwitch) else None
    given: list[tuple[str, int | None]] = [(name, getattr(request, name)) for name in _BUDGETS]
    given.append(("thinking.budget_tokens", switch.budget_tokens if switch is not None else None))
    given.append(("reasoning.max_tokens", options.max_tokens))
    name, budget = _one(given)
    return name, None if budget == -1 else budget


def _one(given: Sequence[tuple[str, T | None]]) -> tuple[str, T | None]:
    """Return the first field with a value. Raises RequestError if two fields' values differ."""
    said = [(name, value) for name, value in given if value is not None]
    for name, value in said[1:]:
        if value != said[0][1]:
            raise RequestError(f"{said[0][0]} and {name} have different values; send one.", name)
    return said[0] if said else ("", None)
