"""Tools of the Responses API in the model's form.

    function                     offered by its name
    namespace                    its tools are offered as NAMESPACE__NAME
    custom                       a function of one text, which follows the tool's grammar if any
    local_shell, shell,          functions with schemas of this server; the client runs them
    apply_patch, tool_search
    web_search and others        left out, as only a provider can run them; the log names each once

Tools come from `tools`, from additional_tools items, and from the results of a client's tool
search. A later definition of a name replaces an earlier one, so that a prompt's tools keep their
order. Values in, values out; independent of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from hadal.core.errors import RequestError
from hadal.gateway.api.base import check_depth
from hadal.gateway.api.fields import log_once
from hadal.gateway.api.responses.calls import (
    CUSTOM,
    FUNCTION,
    INPUT,
    LOCAL_SHELL,
    PATCH,
    SEARCH,
    SHELL,
    CallName,
)
from hadal.gateway.text.tools import (
    MAX_HELD_BYTES,
    Tool,
    ToolWords,
    check_num_tools,
    checked_tools,
    read_tool,
)
from hadal.tokens.lark import MAX_DEFINITION_CHARS, SYNTAXES, TextGrammar

MAX_FLAT_CHARS = 128
"""Longest name of an offered tool."""
NAMESPACE = "namespace"
_LEFT_OUT = re.compile(
    r"(?:web_search|web_search_preview|file_search|code_interpreter|image_generation|mcp"
    r"|programmatic_tool_calling)(?:_\d{4}_\d\d_\d\d)?"
)
"""Types of tools that only a provider can run; some end with a date."""
_ODD = re.compile(r"[^A-Za-z0-9_-]")
TOOL_WORDS = ToolWords(
    "",
    "parameters",
    "'required'",
    '{"type": "function", "name": ...}',
    max_name=MAX_FLAT_CHARS,
)


class InputFormat(msgspec.Struct):
    """Format of a custom tool's input: "text", or "grammar" with a definition."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, kw_only=True):
    """Tool as the client describes it, of any type."""

    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    tools: list[ResponseTool] | None = None
    """Tools of a namespace."""
    format: InputFormat | None = None
    """Format of a custom tool's input."""
    execution: str | None = None
    """Side that runs a tool search: "client", or "server" (the default), a provider."""
    environment: Any = None
    """Place of a shell: {"type": "local"} or none, or a provider's container. Other tools have one of
    another form.
    """
    defer_loading: bool | None = None
    """True: the tool is offered once a client's tool search has found it."""
    allowed_callers: list[str] | None = None


class ToolSource(NamedTuple):
    """List of tools, from the request or from one of its items."""

    where: str
    """Path of the list."""
    tools: Sequence[ResponseTool]
    is_found: bool = False
    """True: a tool search found them."""


@dataclass(frozen=True)
class OfferedTools:
    """Tools of a request that the model is offered."""

    tools: tuple[Tool, ...] = ()
    staying: tuple[ResponseTool, ...] = ()
    """Tools of items, in the client's form. A conversation that continues still offers them."""
    flat_to_name: Mapping[str, CallName] = field(default_factory=dict)
    """Name offered to the model -> the client's name."""

    def name_of(self, flat: str) -> CallName:
        """Return the client's name for a tool that the model calls `flat`."""
        return self.flat_to_name.get(flat, CallName(flat))

    def flat_of(self, name: str, namespace: str | None, kind: str) -> str:
        """Return the name by which a tool is offered to the model, or was in an earlier turn. Of two
        tools with this name, one of type `kind` is preferred.
        """
        named = {
            call.kind: flat
            for flat, call in self.flat_to_name.items()
            if (call.name, call.namespace) == (name, namespace or "")
        }
        return named.get(kind) or next(iter(named.values()), _flat(name, namespace or ""))


class _Leaf(NamedTuple):
    """Tool that is no namespace, with its place."""

    where: str
    namespace: str
    tool: ResponseTool
    about: str | None = None
    """Description of the namespace, for its first tool."""

    @property
    def name(self) -> CallName:
        kind = self.tool.type
        name = self.tool.name or "" if kind in (FUNCTION, CUSTOM) else kind
        return CallName(name, self.namespace, kind)

    @property
    def alone(self) -> ResponseTool:
        """Return the tool without its list, but in its namespace."""
        if not self.namespace:
            return self.tool
        return ResponseTool(
            type=NAMESPACE, name=self.namespace, description=self.about, tools=[self.tool]
        )


def offered(given: Sequence[ResponseTool], in_items: Sequence[ToolSource]) -> OfferedTools:
    """Read a request's tools: those given at its top, and those in items of the conversation. Raises
    RequestError for an invalid tool.
    """
    sources = [ToolSource("tools", given), *in_items]
    leaves = [(source, [*_leaves(source.where, source.tools)]) for source in sources]
    searches = any(leaf.tool.type == SEARCH for _, found in leaves for leaf in found)
    name_to_leaf: dict[CallName, _Leaf] = {}
    staying: set[CallName] = set()
    for source, found in leaves:
        names: set[CallName] = set()
        for leaf in found:
            if leaf.tool.defer_loading and searches and not source.is_found:
                continue
            if leaf.name in names:
                raise RequestError(
                    f"tools: two tools have the name {leaf.name.name!r}; names must be unique.",
                    f"{leaf.where}.name",
                )
            names.add(leaf.name)
            name_to_leaf[leaf.name] = leaf
        if source is not sources[0]:
            staying |= names
    check_num_tools(len(name_to_leaf))
    tools, flat_to_name = [], dict[str, CallName]()
    for name, leaf in name_to_leaf.items():
        flat = _unused(_flat(name.name, name.namespace), flat_to_name)
        flat_to_name[flat] = name
        tools.append(_read(leaf, flat))
    num_chars = sum(len(each.input.definition) for each in tools if each.input is not None)
    if num_chars > MAX_HELD_BYTES:
        raise RequestError(
            f"tools: the grammars have {num_chars} characters; at most {MAX_HELD_BYTES} are allowed.",
            "tools",
        )
    kept = tuple(leaf.alone for name, leaf in name_to_leaf.items() if name in staying)
    return OfferedTools(checked_tools(tuple(tools), TOOL_WORDS), kept, flat_to_name)


def names_in(tools: Sequence[ResponseTool]) -> list[CallName]:
    """Return the names of all tools that may be offered."""
    return [leaf.name for leaf in _leaves("tools", tools)]


def shown(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Return a request's tools for its reply, without tools of providers."""
    kept = []
    for tool in tools:
        if _is_left_out(tool):
            continue
        fields = {
            name: value
            for name in tool.__struct_fields__
            if (value := getattr(tool, name)) is not None
        }
        if tool.tools is not None:
            fields["tools"] = shown(tool.tools)
        if tool.type == FUNCTION:
            fields |= {"parameters": tool.parameters, "strict": tool.strict}
        kept.append(fields)
    return kept


class ReadChoice(NamedTuple):
    """`tool_choice` in /chat/completions' form."""

    choice: Any
    allowed: frozenset[str] | None = None
    """Names that the model may call; None: all that are offered."""


def read_tool_choice(choice: Any, tools: OfferedTools) -> ReadChoice:
    """Read `tool_choice`. Raises RequestError for a tool that only a provider can run."""
    if not isinstance(choice, dict):
        return ReadChoice(choice)
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        if choice.get("mode") not in ("auto", "required") or not isinstance(listed, list):
            raise RequestError(
                "tool_choice: allowed_tools needs a mode, 'auto' or 'required', and tools.",
                "tool_choice",
            )
        return ReadChoice(choice["mode"], frozenset(_chosen(each, tools) for each in listed))
    flat = _chosen(choice, tools)
    return ReadChoice({"type": "function", "function": {"name": flat}})


def _chosen(choice: Any, tools: OfferedTools) -> str:
    """Return the offered name of a tool that `tool_choice` names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and _LEFT_OUT.fullmatch(kind):
        raise RequestError(
            f"tool_choice: only a provider can run {kind!r}, so it is not offered to the model; name"
            " another tool.",
            "tool_choice",
        )
    name, namespace = kind, None
    if kind in (FUNCTION, CUSTOM):
        name, namespace = choice.get("name"), choice.get("namespace")
    if (
        kind not in (FUNCTION, CUSTOM, SEARCH, LOCAL_SHELL, SHELL, PATCH)
        or not isinstance(name, str)
        or not isinstance(namespace, str | None)
    ):
        raise RequestError(
            f"tool_choice: send 'auto', 'none', {TOOL_WORDS.forced}, {TOOL_WORDS.named}, or"
            ' {"type": "allowed_tools", ...}.',
            "tool_choice",
        )
    flat = tools.flat_of(name, namespace, kind)
    if flat not in tools.flat_to_name:
        raise RequestError(
            f"tool_choice: tools has no tool {name[:64]!r}; send one of their names.", "tool_choice"
        )
    return flat


def _leaves(where: str, tools: Sequence[ResponseTool]) -> Iterator[_Leaf]:
    """Yield all tools that may be offered, those of namespaces included."""
    for index, tool in enumerate(tools):
        at = f"{where}[{index}]"
        if _is_left_out(tool):
            log_once("a tool that only a provider can run is ignored", "type", tool.type)
        elif tool.type != NAMESPACE:
            yield _Leaf(at, "", tool)
        elif not tool.name:
            raise RequestError(f"{at}.name is missing; a namespace needs a name.", f"{at}.name")
        else:
            about = tool.description
            for leaf in _leaves(f"{at}.tools", tool.tools or ()):
                if leaf.tool.type not in (FUNCTION, CUSTOM):
                    raise RequestError(
                        f"{leaf.where}.type is {leaf.tool.type[:40]!r}; a namespace has tools of type"
                        " 'function' and 'custom'.",
                        f"{leaf.where}.type",
                    )
                if leaf.namespace:
                    inner = leaf.where.rpartition(".tools[")[0]
                    raise RequestError(
                        f"{inner} is a namespace within a namespace; move it to tools.",
                        f"{inner}.type",
                    )
                yield leaf._replace(namespace=tool.name, about=about)
                about = None


def _is_left_out(tool: ResponseTool) -> bool:
    return (
        _LEFT_OUT.fullmatch(tool.type) is not None
        or (tool.type == SEARCH and tool.execution != "client")
        or (tool.type == SHELL and _environment(tool).get("type", "local") != "local")
    )


def _environment(tool: ResponseTool) -> dict[str, Any]:
    return tool.environment if isinstance(tool.environment, dict) else {}


def _flat(name: str, namespace: str) -> str:
    if not namespace or not name:
        return name  # A tool without a name is refused.
    return _ODD.sub("_", f"{namespace}__{name}")[:MAX_FLAT_CHARS]


def _unused(flat: str, taken: Mapping[str, CallName]) -> str:
    number, name = 0, flat
    while name in taken:
        number += 1
        name = f"{flat[: MAX_FLAT_CHARS - 4]}_{number}"
    return name


def _read(leaf: _Leaf, flat: str) -> Tool:
    """Return a tool in the model's form. Raises RequestError."""
    where, tool = leaf.where, leaf.tool
    if tool.type not in (FUNCTION, CUSTOM, SEARCH, *_SCHEMAS):
        raise RequestError(
            f"{where}.type is {tool.type[:40]!r}, and this server has no schema for it; send a tool of"
            " type 'function', 'custom' or 'namespace'.",
            f"{where}.type",
        )
    if tool.type == SHELL and not isinstance(tool.environment, dict | None):
        raise RequestError(
            f'{where}.environment is not an object; send {{"type": "local"}}.',
            f"{where}.environment",
        )
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        raise RequestError(
            f"{where}.allowed_callers has no 'direct', but the model can only call directly.",
            f"{where}.allowed_callers",
        )
    check_depth(tool.parameters, f"{where}.parameters")
    parameters, description, strict = tool.parameters, tool.description, tool.strict
    if tool.type == CUSTOM:
        grammar = tool.format.definition if tool.format is not None else None
        said = [description, f"The input follows this grammar:\n{grammar}" if grammar else None]
        description = "\n\n".join(text for text in said if text)
        parameters, strict = _object_of({INPUT: {"type": "string"}}, INPUT), True
    elif tool.type in _SCHEMAS:
        description, parameters = _SCHEMAS[tool.type]
        description, strict = description + _skills(tool), True
    elif tool.type == SEARCH:
        parameters = parameters or _object_of({"query": {"type": "string"}}, "query")
        description = description or "Finds more tools. Those that it finds can be called then."
    if leaf.about:
        description = f"{leaf.namespace}: {leaf.about}\n\n{description or ''}"
    function = {
        "name": flat or None,
        "description": description,
        "parameters": parameters,
        "strict": strict or None,
    }
    given = {name: value for name, value in function.items() if value is not None}
    read = read_tool({"type": "function", "function": given}, where, TOOL_WORDS)
    held = _grammar(leaf)
    if held is None:
        return read
    return replace(read, input=held, schema_field=f"{where}.format.definition")


def _grammar(leaf: _Leaf) -> TextGrammar | None:
    """Return the grammar of a custom tool's input, if it has one. Raises RequestError."""
    format, where = leaf.tool.format, f"{leaf.where}.format"
    if leaf.tool.type != CUSTOM or format is None or format.type == "text":
        return None
    if format.type != "grammar":
        raise RequestError(f"{where}.type must be 'text' or 'grammar'.", f"{where}.type")
    if format.syntax not in SYNTAXES:
        raise RequestError(f"{where}.syntax must be 'lark' or 'regex'.", f"{where}.syntax")
    num_chars = len(format.definition or "")
    if not format.definition or num_chars > MAX_DEFINITION_CHARS:
        raise RequestError(
            f"{where}.definition has {num_chars} characters; send 1 to {MAX_DEFINITION_CHARS}.",
            f"{where}.definition",
        )
    return TextGrammar(INPUT, format.syntax, format.definition)


def _skills(tool: ResponseTool) -> str:
    """Return the skills of a shell's environment, for its description."""
    skills = _environment(tool).get("skills")
    return "".join(
        f"\nSkill {skill.get('name')}, in {skill.get('path')}: {skill.get('description')}"
        for skill in (skills if isinstance(skills, list) else ())
        if isinstance(skill, dict)
    )


def _object_of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}


def _operation(kind: str, *fields: str) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **dict.fromkeys(fields, _TEXT)}
    return _object_of(properties, "type", *fields)


_SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    LOCAL_SHELL: (
        "Runs a command on the user's computer and returns its output.",
        _object_of(
            {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}, "command"
        ),
    ),
    SHELL: (
        "Runs shell commands on the user's computer and returns what they print.",
        _object_of(
            {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"
        ),
    ),
    PATCH: (
        "Creates, changes or deletes one file. In a diff each line begins with '+' (added), '-'"
        " (removed) or a space (unchanged); a line '@@' begins each changed place.",
        _object_of(
            {
                "operation": {
                    "anyOf": [
                        _operation("create_file", "path", "diff"),
                        _operation("update_file", "path", "diff"),
                        _operation("delete_file", "path"),
                    ]
                }
            },
            "operation",
        ),
    ),
}
"""Type of a tool that the client runs -> its description and its parameters."""
