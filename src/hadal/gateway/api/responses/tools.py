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

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from hadal.gateway.api.base import check_depth, refuse
from hadal.gateway.api.fields import log_once
from hadal.gateway.api.responses.calls import (
    CALL_TYPES,
    CUSTOM,
    FUNCTION,
    INPUT,
    LOCAL_SHELL,
    PATCH,
    SEARCH,
    SHELL,
    CallName,
)
from hadal.gateway.api.responses.known_tools import SCHEMAS, object_of
from hadal.gateway.text.tools import (
    MAX_HELD_BYTES,
    Choosing,
    Tool,
    ToolWords,
    check_num_tools,
    checked_tools,
    read_choice,
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
_WORDS = ToolWords(
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


class Skill(msgspec.Struct):
    """Instructions in a folder that a shell can read."""

    name: str
    description: str
    path: str


class LocalEnvironment(msgspec.Struct):
    """Environment of a shell that the client runs."""

    type: Literal["local"]
    skills: list[Skill] | None = None


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
    listed: tuple[Tool, ...] = ()
    """Tools at the beginning of the prompt: all that no search found."""
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
        calls = [CallName(name, namespace or "", each) for each in (kind, *CALL_TYPES.values())]
        found = next(filter(None, map(self._name_to_flat.get, calls)), None)
        return found or _flat(name, namespace or "")

    @cached_property
    def _name_to_flat(self) -> dict[CallName, str]:
        return {name: flat for flat, name in self.flat_to_name.items()}


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

    def kept(self, *, is_found: bool) -> ResponseTool:
        """Return the tool without its list, but in its namespace. `is_found`: a search found it."""
        tool = msgspec.structs.replace(self.tool, defer_loading=is_found)
        if not self.namespace:
            return tool
        return ResponseTool(
            type=NAMESPACE, name=self.namespace, description=self.about, tools=[tool]
        )


def kept_sources(tools: Sequence[ResponseTool]) -> list[ToolSource]:
    """Return the sources of tools that stay from an earlier response."""
    found: dict[bool, list[ResponseTool]] = {False: [], True: []}
    for tool in tools:
        found[bool((tool.tools or [tool])[0].defer_loading)].append(tool)
    return [ToolSource("previous_response_id.tools", found[each], each) for each in found]


def offered(given: Sequence[ResponseTool], in_items: Sequence[ToolSource]) -> OfferedTools:
    """Read a request's tools: those given at its top, and those in items of the conversation. Raises
    RequestError for an invalid tool.
    """
    sources = [ToolSource("tools", given), *in_items]
    leaves = [(source, [*_leaves(source.where, source.tools)]) for source in sources]
    searches = any(leaf.tool.type == SEARCH for _, found in leaves for leaf in found)
    name_to_leaf: dict[CallName, _Leaf] = {}
    staying: set[CallName] = set()
    listed: set[CallName] = set()
    for source, found in leaves:
        names: set[CallName] = set()
        for leaf in found:
            if leaf.tool.defer_loading and searches and not source.is_found:
                continue
            if leaf.name in names:
                named = "name" if leaf.tool.type in (FUNCTION, CUSTOM) else "type"
                why = f"is {leaf.name.name!r}, as of another tool in the list"
                refuse(f"{leaf.where}.{named}", why)
            names.add(leaf.name)
            name_to_leaf[leaf.name] = leaf
        if source is not sources[0]:
            staying |= names
        if not source.is_found:
            listed |= names
        check_num_tools(len(name_to_leaf), source.where)
    tools, flat_to_name = [], dict[str, CallName]()
    for name, leaf in name_to_leaf.items():
        flat = _unused(_flat(name.name, name.namespace), flat_to_name)
        flat_to_name[flat] = name
        tools.append(_read(leaf, flat))
    num_chars = sum(len(each.input.definition) for each in tools if each.input is not None)
    if num_chars > MAX_HELD_BYTES:
        refuse("tools", f"has grammars of {num_chars} characters; {MAX_HELD_BYTES} are allowed")
    # Without a listed tool the prompt would not have the form of a call: then all are listed.
    return OfferedTools(
        checked_tools(tuple(tools), _WORDS),
        tuple(each for each in tools if flat_to_name[each.name] in listed) or tuple(tools),
        tuple(
            leaf.kept(is_found=name not in listed)
            for name, leaf in name_to_leaf.items()
            if name in staying
        ),
        flat_to_name,
    )


def found_text(found: Sequence[ResponseTool], tools: OfferedTools) -> str:
    """Return the result of a search: names, and tools missing at the beginning of the prompt. That
    beginning therefore stays in the cache.
    """
    names = [tools.flat_of(*leaf.name) for leaf in _leaves("tools", found)]
    if not names:
        return "No tool was found."
    listed = {tool.name for tool in tools.listed}
    shown = {tool.name: tool.fields["function"] for tool in tools.tools if tool.name not in listed}
    texts = [json.dumps(shown[name], ensure_ascii=False) for name in names if name in shown]
    return "\n".join((f"Found tools: {', '.join(names)}", *texts))


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


def choosing(choice: Any, tools: OfferedTools, is_parallel: bool | None) -> Choosing:
    """Read `tool_choice` and `parallel_tool_calls`. Raises RequestError, also for a tool that only a
    provider can run.
    """
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind != "allowed_tools":
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": _chosen(choice, tools)}}
        found = read_choice(choice, tools.tools, is_parallel, _WORDS)
        is_whole = not found.tools or len(tools.listed) == len(tools.tools)
        return found if is_whole else replace(found, listed=tools.listed)
    mode, listed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        refuse("tool_choice", "allowed_tools needs a mode, 'auto' or 'required', and tools")
    names = {_chosen(each, tools) for each in listed}
    allowed = tuple(tool for tool in tools.tools if tool.name in names)
    # The prompt lists the others too, so that it is found in the cache whichever are allowed.
    return replace(read_choice(mode, allowed, is_parallel, _WORDS), listed=tools.listed)


def _chosen(choice: Any, tools: OfferedTools) -> str:
    """Return the offered name of a tool that `tool_choice` names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and _LEFT_OUT.fullmatch(kind):
        why = f"names {kind!r}: only a provider can run it, so it is not offered; name another tool"
        refuse("tool_choice", why)
    name, namespace = kind, None
    if kind in (FUNCTION, CUSTOM):
        name, namespace = choice.get("name"), choice.get("namespace")
    if (
        kind not in (FUNCTION, CUSTOM, SEARCH, LOCAL_SHELL, SHELL, PATCH)
        or not isinstance(name, str)
        or not isinstance(namespace, str | None)
    ):
        others = '{"type": "allowed_tools", ...}'
        why = f"needs 'auto', 'none', {_WORDS.forced}, {_WORDS.named}, or {others}"
        refuse("tool_choice", why)
    flat = tools.flat_of(name, namespace, kind)
    if flat not in tools.flat_to_name:
        refuse(
            "tool_choice", f"is {name[:64]!r}, but no tool of this name is offered at this point"
        )
    return flat


def _leaves(where: str, tools: Sequence[ResponseTool]) -> Iterator[_Leaf]:
    """Yield all tools that may be offered, those of namespaces included."""
    for index, tool in enumerate(tools):
        at = f"{where}[{index}]"
        if _is_left_out(tool):
            log_once("a tool that only a provider can run is ignored", "type", tool.type)
        elif tool.type == SEARCH and tool.execution != "client":
            refuse(f"{at}.execution", "must be 'client' or 'server'")
        elif tool.type != NAMESPACE:
            yield _Leaf(at, "", tool)
        elif not tool.name:
            refuse(f"{at}.name", "is missing; a namespace needs a name")
        else:
            about = tool.description
            for leaf in _leaves(f"{at}.tools", tool.tools or ()):
                if leaf.tool.type not in (FUNCTION, CUSTOM):
                    why = "a namespace has tools of type 'function' and 'custom'"
                    refuse(f"{leaf.where}.type", f"is {leaf.tool.type[:40]!r}; {why}")
                if leaf.namespace:
                    inner = leaf.where.rpartition(".tools[")[0]
                    refuse(f"{inner}.type", "is a namespace within a namespace; move it to tools")
                yield leaf._replace(namespace=tool.name, about=about)
                about = None


def _is_left_out(tool: ResponseTool) -> bool:
    return (
        _LEFT_OUT.fullmatch(tool.type) is not None
        or (tool.type == SEARCH and tool.execution in (None, "server"))
        or (tool.type == SHELL and _is_container(tool.environment))
    )


def _is_container(environment: Any) -> bool:
    kind = environment.get("type") if isinstance(environment, dict) else None
    return isinstance(kind, str) and kind.startswith("container_")


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
    if tool.type not in (FUNCTION, CUSTOM, SEARCH, *SCHEMAS):
        why = "and this server has no schema for it; send a 'function', 'custom' or 'namespace'"
        refuse(f"{where}.type", f"is {tool.type[:40]!r}, {why}")
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        why = "has no 'direct', but the model can only call directly"
        refuse(f"{where}.allowed_callers", why)
    check_depth(tool.parameters, f"{where}.parameters")
    parameters, description, strict = tool.parameters, tool.description, tool.strict
    if tool.type == CUSTOM:
        grammar = tool.format.definition if tool.format is not None else None
        said = [description, f"The input follows this grammar:\n{grammar}" if grammar else None]
        description = "\n\n".join(text for text in said if text)
        parameters, strict = object_of({INPUT: {"type": "string"}}, INPUT), True
    elif tool.type in SCHEMAS:
        description, parameters = SCHEMAS[tool.type]
        description, strict = description + _skills(tool, where), True
    elif tool.type == SEARCH:
        parameters = parameters or object_of({"query": {"type": "string"}}, "query")
        description = (
            description or "Finds more tools. The tools in its result can be called from then on."
        )
    if leaf.about:
        description = f"{leaf.namespace}: {leaf.about}\n\n{description or ''}"
    function = {
        "name": flat or None,
        "description": description,
        "parameters": parameters,
        "strict": strict or None,
    }
    given = {name: value for name, value in function.items() if value is not None}
    read = read_tool({"type": "function", "function": given}, where, _WORDS)
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
        refuse(f"{where}.type", "must be 'text' or 'grammar'")
    if format.syntax not in SYNTAXES:
        refuse(f"{where}.syntax", "must be 'lark' or 'regex'")
    num_chars = len(format.definition or "")
    if not format.definition or num_chars > MAX_DEFINITION_CHARS:
        why = f"has {num_chars} characters; send 1 to {MAX_DEFINITION_CHARS}"
        refuse(f"{where}.definition", why)
    return TextGrammar(INPUT, format.syntax, format.definition)


def _skills(tool: ResponseTool, where: str) -> str:
    """Return the skills of a shell's environment, for its description. Raises RequestError."""
    if tool.type != SHELL or tool.environment is None:
        return ""
    try:
        skills = msgspec.convert(tool.environment, LocalEnvironment).skills
    except msgspec.ValidationError as error:
        why = f'is not {{"type": "local"}}, with skills or without: {error}'
        refuse(f"{where}.environment", why)
    return "".join(
        f"\nSkill {skill.name}, in {skill.path}: {skill.description}" for skill in skills or ()
    )
