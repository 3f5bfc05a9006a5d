"""Tools of the Responses API in the model's form, and the model's calls in the client's form.

    function                  offered by its name
    namespace                 its functions are offered as NAMESPACE__NAME; calls have both names
    custom                    offered as a function of one text, the `input` of the client's call
    web_search and others     left out, as only a provider can run them; logged if at the top

Values in, values out; independent of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.base import check_depth
from hadal.gateway.api.fields import log_once
from hadal.gateway.text.tools import ToolWords

MAX_FLAT_CHARS = 128
"""Longest name of an offered tool."""
_LEFT_OUT = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
    "tool_search",
)
"""Prefixes of the types of tools that only a provider can run; some types end with a date."""
_ODD = re.compile(r"[^A-Za-z0-9_-]")
_INPUT = "input"
TOOL_WORDS = ToolWords(
    "",
    "parameters",
    "'required'",
    '{"type": "function", "name": ...}',
    max_name=MAX_FLAT_CHARS,
)


class ResponseTool(msgspec.Struct, kw_only=True):
    """Tool as the client describes it: a function, a namespace, a custom tool, or a provider's."""

    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | None = None
    """Tools of a namespace."""
    format: dict[str, Any] | None = None
    """Grammar of a custom tool's input: part of its description, not enforced."""


class CallName(NamedTuple):
    """Name of a tool in the client's form."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True)
class OfferedTools:
    """Tools of a request that the model is offered."""

    given: tuple[dict[str, Any], ...] = ()
    """Tools in the form of /chat/completions."""
    flat_to_name: Mapping[str, CallName] = field(default_factory=dict)
    """Name offered to the model -> the client's name."""

    def name_of(self, flat: str) -> CallName:
        """Return the client's name for a tool that the model calls `flat`."""
        return self.flat_to_name.get(flat, CallName(flat))

    def flat_of(self, name: str, namespace: str | None) -> str:
        """Return the name by which a tool is offered to the model, or was in an earlier turn."""
        for flat, call in self.flat_to_name.items():
            if (call.name, call.namespace) == (name, namespace or ""):
                return flat
        return _flat(name, namespace or "")


def offered(tools: Sequence[ResponseTool]) -> OfferedTools:
    """Read a request's tools. Raises RequestError for an invalid tool."""
    given: list[dict[str, Any]] = []
    flat_to_name: dict[str, CallName] = {}
    for where, namespace, tool in _each(tools):
        is_custom = tool.type == "custom"
        flat = tool.name or ""
        if namespace and tool.name:
            flat = _unused(_flat(tool.name, namespace), flat_to_name)
        given.append(_function(tool, flat, where, is_custom=is_custom))
        flat_to_name.setdefault(flat, CallName(tool.name or "", namespace, is_custom))
    return OfferedTools(tuple(given), flat_to_name)


def shown(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Return a request's tools for its reply, without those left out at the top level."""
    return [
        {name: value for name, value in msgspec.to_builtins(tool).items() if value is not None}
        | (
            {"parameters": tool.parameters, "strict": tool.strict}
            if tool.type == "function"
            else {}
        )
        for tool in tools
        if not _is_left_out(tool)
    ]


def as_arguments(text: str) -> str:
    """Return the input of a custom tool as JSON arguments."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """Return the input of a custom tool from its JSON arguments; other texts are unchanged."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


def choice_of(choice: Any, tools: OfferedTools) -> Any:
    """Return `tool_choice` in /chat/completions' form."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        name, namespace = choice.get("name"), choice.get("namespace")
        if isinstance(name, str) and isinstance(namespace, str | None):
            name = tools.flat_of(name, namespace)
        return {"type": "function", "function": {"name": name}}
    return choice


def _each(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, str, ResponseTool]]:
    """Yield (path, namespace, tool) for all offered tools."""
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if _is_left_out(tool):
            log_once("a tool that only a provider can run is ignored", "type", tool.type)
        elif tool.type != "namespace":
            yield where, "", tool
        elif not tool.name:
            raise RequestError(
                f"{where}.name is missing; a namespace needs a name.", f"{where}.name"
            )
        else:
            for at, inner in enumerate(tool.tools or ()):
                if inner.type == "namespace":
                    raise RequestError(
                        f"{where}.tools[{at}] is a namespace within a namespace; move it to tools.",
                        f"{where}.tools[{at}].type",
                    )
                if not _is_left_out(inner):
                    yield f"{where}.tools[{at}]", tool.name, inner


def _is_left_out(tool: ResponseTool) -> bool:
    return tool.type.startswith(_LEFT_OUT)


def _flat(name: str, namespace: str) -> str:
    return _ODD.sub("_", f"{namespace}__{name}" if namespace else name)[:MAX_FLAT_CHARS]


def _unused(flat: str, taken: Mapping[str, CallName]) -> str:
    number, name = 0, flat
    while name in taken:
        number += 1
        name = f"{flat[: MAX_FLAT_CHARS - 4]}_{number}"
    return name


def _function(tool: ResponseTool, flat: str, where: str, *, is_custom: bool) -> dict[str, Any]:
    if tool.type not in ("function", "custom"):
        raise RequestError(
            f"{where}.type is {tool.type[:40]!r}, and this server has no schema for it; send a tool of"
            " type 'function', 'custom' or 'namespace'.",
            f"{where}.type",
        )
    check_depth(tool.parameters, f"{where}.parameters")
    parameters, description, strict = tool.parameters, tool.description, tool.strict
    if is_custom:
        grammar = (tool.format or {}).get("definition")
        said = [description, f"The input follows this grammar:\n{grammar}" if grammar else None]
        description = "\n\n".join(text for text in said if text)
        parameters = {
            "type": "object",
            "properties": {_INPUT: {"type": "string"}},
            "required": [_INPUT],
            "additionalProperties": False,
        }
        strict = True
    function = {
        "name": flat or None,
        "description": description,
        "parameters": parameters,
        "strict": strict or None,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }
