"""Tools of a request for /v1/messages: those at its top, and changes that its messages make.

    tools             offered from the start, and listed at the prompt's beginning
    defer_loading     offered once a tool_reference or a tool_addition names the tool
    tool_addition     offered from this message on; it may bring the definition
    tool_removal      not offered from this message on

The beginning of the prompt never changes, so that its KV is found in the cache: the prompt shows a
later tool where the conversation adds it. Only the calls that a reply may make follow the changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hadal.core.errors import RequestError
from hadal.gateway.api.base import check_depth, refuse
from hadal.gateway.api.messages.known_tools import KNOWN_TOOLS, WITH_LENGTH
from hadal.gateway.text.tools import (
    Choosing,
    Tool,
    ToolWords,
    check_num_tools,
    checked_tools,
    read_choice,
    read_tool,
)

_WORDS = ToolWords(
    "", "input_schema", "one of type 'any'", 'one of {"type": "tool", "name": ...}', max_name=128
)
_CLIENTS = ("bash_", "text_editor_", "memory_", "computer_", "browser_")
"""Type prefixes of tools that the client runs, with schemas defined by Anthropic."""


class ClientTool(msgspec.Struct, kw_only=True):
    """Function offered by the client."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,128}$")] | None = None
    """Every served tool has one; some types that are not served have none."""
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """True: the tool is offered only once a message names it."""
    max_characters: Annotated[int, Meta(ge=1)] | None = None
    """Number of characters of a file that the client's text editor shows."""


class NamedTool(msgspec.Struct, tag="tool_reference"):
    """Tool of a change, by its name."""

    name: str


class DefinedTool(msgspec.Struct, tag="tool_definition"):
    """Tool of a change, by its definition."""

    definition: ClientTool


class ToolReference(msgspec.Struct, tag="tool_reference"):
    """Reference to a deferred tool that a search found. The tool is offered from then on."""

    tool_name: str


class ToolAdditionBlock(msgspec.Struct, tag="tool_addition"):
    """Tool that is offered from here on."""

    tool: NamedTool | DefinedTool


class ToolRemovalBlock(msgspec.Struct, tag="tool_removal"):
    """Tool that is not offered from here on."""

    tool: NamedTool


class ToolChoice(msgspec.Struct):
    """Policy for tool calls: "auto", "any" (must call), "tool" (must call `name`), or "none"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AvailableTools:
    """Tools offered at one point of a conversation. It is read from its first message to its last;
    each method returns the text that the prompt shows at this point.
    """

    def __init__(self, tools: Sequence[ClientTool]) -> None:
        """Raises RequestError."""
        read = [_read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        check_num_tools(sum(not tool.defer_loading for tool in tools))
        self._known: dict[str, Tool] = {}
        """Name -> tool, for all tools of the request so far."""
        for tool in read:
            if tool.name in self._known:
                raise RequestError(
                    f"tools: two tools have the name {tool.name!r}; names must be unique.", "tools"
                )
            self._known[tool.name] = tool
        self._listed = tuple(
            tool for tool, asked in zip(read, tools, strict=True) if not asked.defer_loading
        )
        self._offered = {tool.name: tool for tool in self._listed}
        self._shown = dict(self._offered)
        """Name -> tool as the prompt shows it so far."""

    def refer(self, name: str, where: str) -> str:
        """Offer a tool that a search found. Raises RequestError for an unknown name."""
        return self._add(self._named(name, where))

    def add(self, change: NamedTool | DefinedTool, where: str) -> str:
        """Offer a tool. Raises RequestError."""
        if isinstance(change, NamedTool):
            return self._add(self._named(change.name, f"{where}.name"))
        tool = _read(change.definition, f"{where}.definition")
        self._known[tool.name] = tool
        return self._add(tool)

    def remove(self, change: NamedTool, where: str) -> str:
        """Withdraw a tool. Raises RequestError for an unknown name."""
        tool = self._named(change.name, f"{where}.name")
        if self._offered.pop(tool.name, None) is None:
            return ""
        return f"The tool {tool.name} can no longer be called.\n"

    def choosing(self, choice: ToolChoice) -> Choosing:
        """Return the tools of the reply, after all changes. Raises RequestError."""
        offered = tuple(self._offered.values())
        check_num_tools(len(offered))
        found = read_choice(
            _choice_of(choice),
            checked_tools(offered, _WORDS),
            not choice.disable_parallel_tool_use,
            _WORDS,
        )
        # Without a listed tool the prompt would not have the form of a call: then all are listed.
        if choice.type == "none" or offered == self._listed or not self._listed:
            return found
        return replace(found, listed=self._listed)

    def _named(self, name: str, where: str) -> Tool:
        if name not in self._known:
            raise RequestError(
                f"{where}: tools has no tool {name[:64]!r}; send its definition in tools.", where
            )
        return self._known[name]

    def _add(self, tool: Tool) -> str:
        self._offered[tool.name] = tool
        text = f"The tool {tool.name} can be called now.\n"
        if self._shown.get(tool.name) is not tool:
            self._shown[tool.name] = tool
            text += json.dumps(tool.fields["function"], ensure_ascii=False) + "\n"
        return text


def _read(tool: ClientTool, where: str) -> Tool:
    """Return a tool in OpenAI's form, which chat templates expect. Raises RequestError."""
    description, schema = tool.description, tool.input_schema
    if tool.type not in (None, "custom"):
        description, schema = _known(tool, tool.type, where)
    elif tool.max_characters is not None:
        refuse(f"{where}.max_characters", f"is only for tools of type {WITH_LENGTH!r}")
    if tool.name is None:
        refuse(f"{where}.name", "is missing")
    function: dict[str, Any] = {"name": tool.name}
    if description is not None:
        function["description"] = description
    if schema is None:
        refuse(f"{where}.input_schema", "is missing; send a JSON schema")
    check_depth(schema, f"{where}.input_schema")
    function["parameters"] = schema
    if tool.strict:
        function["strict"] = True
    return read_tool({"type": "function", "function": function}, where, _WORDS)


def _known(tool: ClientTool, type: str, where: str) -> tuple[str, dict[str, Any]]:
    """Return description and schema of a tool of Anthropic's types. Raises RequestError."""
    if type not in KNOWN_TOOLS:
        runs = "the client runs; this server does not have the schema of that type"
        if not type.startswith(_CLIENTS):
            runs = "a provider would have to run; this server runs no tools"
        refuse(
            f"{where}.type",
            f"is {type[:40]!r}, which {runs}. Send a tool with an input_schema, or one of these"
            f" types: {', '.join(KNOWN_TOOLS)}",
        )
    known = KNOWN_TOOLS[type]
    if tool.name != known.name:
        refuse(f"{where}.name", f"is {tool.name!r}; a tool of type {type!r} is {known.name!r}")
    for field in ("input_schema", "description"):
        if getattr(tool, field) is not None:
            refuse(f"{where}.{field}", f"is fixed for tools of type {type!r}; leave it out")
    if tool.max_characters is None:
        return known.description, known.schema
    if type != WITH_LENGTH:
        refuse(f"{where}.max_characters", f"is only for tools of type {WITH_LENGTH!r}")
    shown = f"{known.description} A file is shown up to {tool.max_characters} characters."
    return shown, known.schema


def _choice_of(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
