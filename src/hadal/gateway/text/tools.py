"""Read tool calls in a model's own format, as they arrive and independent of how they are cut.

Models of one family write a call between control tokens, which users cannot spell
(gateway/text/chat). Those tokens and the chat template determine a model's format. A model with
none of them was not taught to call, and no tools are offered to it.

    DeepSeek-V3, R1    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
                       ```json
                       {"city": "Oslo"}
                       ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
    DeepSeek-V3.1      <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>
                       {...}<｜tool▁call▁end｜> ...
    Kimi-K2            <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0
                       <|tool_call_argument_begin|>{...}<|tool_call_end|> ...

A call counts once its name is complete. A call cut off earlier by the reply's limit is dropped; any
other incomplete call is shown as text, without its marks.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from hadal.core.errors import RequestError
from hadal.gateway.text.schemas import check_schema, plain
from hadal.tokens.grammars import ANY_JSON_OBJECT, CallList, Json, Part
from hadal.tokens.lark import TextGrammar

MAX_TOOLS = 128
MAX_HELD_BYTES = 1 << 17
"""Maximum number of bytes of the schemas that a request's calls follow, without descriptions."""
_FENCED = re.compile(r"\s*([^\s`][^\n`]*?)\s*```(?:json)?[ \t]*(?:\n|(?=[{\[]))")
"""NAME, a line break, a fence. Some models omit the first line break or the second."""
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,3})")
"""Number of a call, counted from 0 within a conversation."""
_MAX_HEAD = 256
"""Maximum number of characters between separator and arguments; a longer text is not a call."""
_BARE = re.compile(r"\s*([^\s`][^\n`]*)\n\s*(?=[{\[])")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """Function offered by a client. `fields`: the original object, for the chat template."""

    name: str
    fields: dict[str, Any]
    is_strict: bool = False
    """True: a request with a schema that cannot be followed is refused."""
    schema_field: str = field(default="", compare=False)
    """Request field with the tool's parameters."""
    schema: dict[str, Any] | None = field(default=None, compare=False)
    """Parameters that a grammar follows: without notes, with all references as plain pointers. None
    for a tool that is not strict before `followed`.
    """
    input: TextGrammar | None = None
    """Grammar of the only argument, instead of a schema."""

    @property
    def arguments(self) -> dict[str, Any] | TextGrammar:
        """Return what a grammar enforces: the grammar of the only argument, or a schema; without one
        to follow, any JSON object.
        """
        if self.input is not None:
            return self.input
        if self.schema is not None:
            return self.schema
        return _NO_ARGUMENTS if self.is_strict else ANY_JSON_OBJECT


@dataclass(frozen=True)
class ToolWords:
    """Words of one API for its tools: errors name fields as the client sent them."""

    function: str
    """Path from a tool to its function's fields."""
    schema: str
    forced: str
    """Value of `tool_choice` that demands some call."""
    named: str
    """Value of `tool_choice` that demands a call of one tool."""
    max_name: int = 64
    """Maximum number of characters of a tool's name."""


CHAT_WORDS = ToolWords(
    ".function", "parameters", "'required'", '{"type": "function", "function": {"name": ...}}'
)


@dataclass(frozen=True)
class Choosing:
    """Tools that a reply may call. `is_forced`: the reply must call one: `name`, if given."""

    tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    name: str = ""
    is_parallel: bool = True
    listed: tuple[Tool, ...] | None = None
    """Tools that the prompt lists before the chat; None: `tools`. They differ if messages of the
    chat add or remove tools.
    """

    @property
    def listing(self) -> tuple[Tool, ...]:
        """Return the tools for the template to list."""
        return self.tools if self.listed is None else self.listed

    @property
    def is_demanded(self) -> bool:
        """Return True if the client relies on a grammar: it forces a call, or a tool is strict."""
        return self.is_forced or any(tool.is_strict for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.name in ("", tool.name))


NO_TOOLS = Choosing()


@dataclass(frozen=True)
class CallDelta:
    """New part of a call: its beginning if it has an id, else more of its arguments."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class CallFormat(Protocol):
    """Form of calls of one family of models."""

    @property
    def name(self) -> str: ...
    @property
    def prefix(self) -> str: ...
    @property
    def marks(self) -> tuple[str, ...]: ...

    def opens(self, mark_to_id: Mapping[str, int]) -> tuple[int, ...]: ...
    def closes(self, mark_to_id: Mapping[str, int]) -> int: ...
    def has_call(self, text: str, arguments: str) -> bool: ...
    def describe(self, tools: Sequence[dict[str, Any]]) -> str: ...
    def call_list(
        self,
        choosing: Choosing,
        mark_to_id: Mapping[str, int],
        *,
        is_opened: bool = False,
        is_only: bool = True,
    ) -> CallList: ...


@dataclass(frozen=True)
class ToolFormat:
    """Form of a call in one family of models: its control tokens and their order."""

    name: str
    calls_begin: str
    calls_end: str
    call_begin: str
    call_end: str
    separator: str
    is_fenced: bool = False
    """True: "function" precedes the separator; the name and a fence of JSON follow it."""
    prefix: str = ""
    """Prefix of a name; the call's number then follows the name: functions.NAME:0."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.calls_begin, self.calls_end, self.call_begin, self.call_end, self.separator)

    def opens(self, mark_to_id: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tokens that begin calls."""
        return mark_to_id[self.calls_begin], mark_to_id[self.call_begin]

    def closes(self, mark_to_id: Mapping[str, int]) -> int:
        """Return the token that ends calls."""
        return mark_to_id[self.calls_end]

    def has_call(self, text: str, arguments: str) -> bool:
        """Return True if a rendered text contains a call's arguments in this form."""
        return arguments in text

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text that lists tools after the system prompt, for templates that list none,
        such as DeepSeek's. Its models were trained with this text (model card of DeepSeek-V3.1,
        "ToolCall"). Control tokens in it keep their function.
        """
        lines = ["", "", "## Tools", "You have access to the following tools:", ""]
        for tool in tools:
            function = tool["function"]
            parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
            description = function.get("description") or ""
            lines += [f"### {function['name']}", f"Description: {description}", ""]
            lines += [f"Parameters: {parameters}", ""]
        call, chaining = (
            f"tool_call_name{self.separator}tool_call_arguments",
            "directly without separators or spaces",
        )
        if self.is_fenced:
            call = f"function{self.separator}tool_call_name\n```json\ntool_call_arguments\n```"
            chaining = "with a newline as separator"
        lines += [
            "IMPORTANT: ALWAYS adhere to this exact format for tool use:",
            f"{self.calls_begin}{self.call_begin}{call}{self.call_end}{{additional_tool_calls}}"
            f"{self.calls_end}",
            "",
            "Where:",
            "- `tool_call_name` must be an exact match to one of the available tools",
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema",
            f"- For multiple tool calls, chain them {chaining}",
        ]
        return "\n".join(lines)

    def call_list(
        self,
        choosing: Choosing,
        mark_to_id: Mapping[str, int],
        *,
        is_opened: bool = False,
        is_only: bool = True,
    ) -> CallList:
        """Return the grammar rules for calling the allowed tools, with these ids of the marks."""
        call_begin, call_end = mark_to_id[self.call_begin], mark_to_id[self.call_end]
        separator = mark_to_id[self.separator]
        calls = []
        for tool in choosing.callable:
            before: tuple[Part, ...] = (tool.name, separator)
            behind: tuple[Part, ...] = (call_end,)
            if self.is_fenced:
                before = ("function", separator, f"{tool.name}\n```json\n")
                behind = ("\n```", call_end)
            elif self.prefix:
                before = (f"{self.prefix}{tool.name}:", _NUMBER, separator)
            calls.append((call_begin, *before, Json(tool.arguments), *behind))
        return CallList(
            (mark_to_id[self.calls_begin],),
            (mark_to_id[self.calls_end],),
            "\n" if self.is_fenced else "",
            tuple(calls),
            is_single=not choosing.is_parallel,
        )


_DEEPSEEK = ToolFormat(
    "deepseek-v3.1",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
FORMATS = {
    each.name: each
    for each in (
        _DEEPSEEK,
        replace(_DEEPSEEK, name="deepseek-v3", is_fenced=True),
        ToolFormat(
            "kimi-k2",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            prefix="functions.",
        ),
    )
}


def format_of(control_tokens: Collection[str], template: str) -> ToolFormat | None:
    """Return the format for these control tokens and this chat template; None if there is none."""
    known = [each for each in FORMATS.values() if set(each.marks) <= set(control_tokens)]
    # V3 and V3.1 share their tokens; V3's template writes a fence in earlier calls.
    fenced = "```json" in template
    return next((each for each in known if each.is_fenced == fenced or each.prefix), None)


def read_tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    """Read the tools of a body of /chat/completions. Raises RequestError."""
    check_num_tools(len(given))
    tools = (read_tool(each, f"tools[{at}]", CHAT_WORDS) for at, each in enumerate(given))
    return checked_tools(tuple(tools))


def check_num_tools(num_tools: int, where: str = "tools") -> None:
    """Raise RequestError for more than MAX_TOOLS tools. `where`: the last list with some of them."""
    if num_tools > MAX_TOOLS:
        said = f"{where}: {num_tools} tools are offered; at most {MAX_TOOLS} are allowed."
        raise RequestError(said, where)


def checked_tools(tools: tuple[Tool, ...], words: ToolWords = CHAT_WORDS) -> tuple[Tool, ...]:
    """Return the tools of a reply. Raises RequestError for two of one name, or for too many bytes
    of strict schemas.
    """
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                f"tools: two tools have the name {name!r}; names must be unique.", "tools"
            )
    num_bytes = sum(num_schema_bytes(tool) for tool in tools if tool.is_strict)
    if num_bytes > MAX_HELD_BYTES:
        raise RequestError(
            f"tools: the {words.schema} fields of strict tools have {num_bytes} bytes; at most"
            f" {MAX_HELD_BYTES} are allowed.",
            "tools",
        )
    return tools


def num_schema_bytes(tool: Tool) -> int:
    """Return the size of the schema that a grammar follows for a tool."""
    return 0 if tool.schema is None else len(json.dumps(tool.schema))


def followed(tool: Tool, most_bytes: int) -> tuple[Tool, str]:
    """Return a tool that is not strict with a schema of at most `most_bytes` to follow, and "". If
    it has none that can be followed, return the tool and the reason; "" if it has none.
    """
    parameters = tool.fields["function"].get("parameters")
    if not parameters:
        return tool, ""
    schema, kinds = plain(parameters), parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        return tool, "its 'type' is not 'object'"
    if len(json.dumps(schema)) > most_bytes:
        return tool, f"the schemas have more than {MAX_HELD_BYTES} bytes"
    try:
        schema = check_schema({**schema, "type": "object"}, "it", tool.schema_field)
    except RequestError as error:
        return tool, str(error)
    return replace(tool, schema=schema), ""


_NAME = re.compile(r"[A-Za-z0-9_-]+")


def read_tool(given: Any, where: str, words: ToolWords) -> Tool:
    """Read one tool, which stands at `where` in the request. Raises RequestError."""
    if not isinstance(given, dict) or given.get("type") != "function":
        raise RequestError(f"{where}.type: only tools of type 'function' are supported.", where)
    function = given.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing; send an object with a name.", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > words.max_name:
        wrong = f"{where}{words.function}.name"
        raise RequestError(
            f"{wrong}: 1 to {words.max_name} letters, digits, underscores and dashes are needed.",
            wrong,
        )
    if not isinstance(function.get("description"), str | None):
        wrong = f"{where}{words.function}.description"
        raise RequestError(f"{wrong} is not a text; send a string.", wrong)
    schema, schema_field = function.get("parameters"), f"{where}{words.function}.{words.schema}"
    if not isinstance(schema, dict | None):
        raise RequestError(f"{schema_field} is not an object; send a JSON schema.", schema_field)
    is_strict = function.get("strict")
    if not isinstance(is_strict, bool | None):
        wrong = f"{where}{words.function}.strict"
        raise RequestError(f"{wrong} is not a boolean; send true or false.", wrong)
    followed = None
    if is_strict and schema:
        followed = check_schema(plain(schema), schema_field, schema_field)
        if schema.get("type") != "object":
            raise RequestError(
                f"{schema_field} of a strict tool needs 'type': 'object'.", schema_field
            )
    fields = {"type": "function", "function": function}
    return Tool(name, fields, bool(is_strict), schema_field, followed)


def read_choice(
    choice: Any,
    tools: tuple[Tool, ...],
    is_parallel: bool | None,
    words: ToolWords = CHAT_WORDS,
) -> Choosing:
    """Read `tool_choice` and `parallel_tool_calls` as in /chat/completions. Raises RequestError."""
    if choice in (None, "auto", "none", "required"):
        if choice == "required" and not tools:
            raise RequestError(
                f"tool_choice is {words.forced}, but no tool is offered; send one that is not deferred and"
                " that the client runs.",
                "tool_choice",
            )
        offered = () if choice == "none" else tools
        return Choosing(offered, choice == "required", "", is_parallel is not False)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "function"
        or not isinstance(name, str)
    ):
        raise RequestError(
            f"tool_choice: send 'auto', 'none', {words.forced}, or {words.named}.",
            "tool_choice",
        )
    if not any(tool.name == name for tool in tools):
        raise RequestError(
            f"tool_choice: no tool {name[:64]!r} is offered at this point; send the name of one that is.",
            "tool_choice",
        )
    return Choosing(tools, True, name, is_parallel is not False)


class At(Enum):
    """Position of a reply in its section of calls."""

    BETWEEN = auto()
    """Before the next call."""
    HEAD = auto()
    """After the mark that begins a call."""
    NAME = auto()
    """After the separator, if a name and a fence follow it."""
    ARGUMENTS = auto()


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CallReader:
    """Reader of one reply's section of calls, from after the mark that begins it. `take` returns
    the same results however the section was cut. Each call has an id of its own.
    """

    def __init__(self, format: ToolFormat, new_id: Callable[[], str] = _new_id) -> None:
        self.format = format
        self.num_calls = 0
        """Calls with a complete name."""
        self.num_ended = 0
        self.is_over = False
        """True from the end of the section until the next one begins."""
        self._is_empty = False
        """True while the current call's arguments are blank."""
        self._new_id = new_id
        self._ids: set[str] = set()
        self._at = At.BETWEEN
        self._raw = ""
        """Text of a call without a complete name, without its marks."""
        self._held = ""
        """Text that waits for more: an incomplete head, or a possible end of a fence."""
        self._deltas: list[CallDelta] = []
        self._shown = ""

    @property
    def is_between(self) -> bool:
        """Return True if no call is open."""
        return self._at is At.BETWEEN

    def mark(self, text: str) -> None:
        """Accept a control token."""
        format = self.format
        if text == format.call_begin:
            self.end()
            self._at = At.HEAD
        elif text == format.separator and self._at is At.HEAD:
            self._read_head()
        elif text in (format.call_end, format.calls_end):
            self.end()
            self.is_over = text == format.calls_end

    def text(self, text: str) -> None:
        """Accept plain text of a call."""
        if self._at is At.ARGUMENTS:
            self._arguments(text)
            return
        self._raw += text
        self._held += text
        if self._at is At.NAME:
            self._read_name()

    def end(self, *, is_complete: bool = True, is_cut: bool = False) -> None:
        """End the current call, if there is one. `is_complete`: the model ended it; `is_cut`: the
        reply's limit did.
        """
        if self._at is At.ARGUMENTS:
            rest, self._held = self._held, ""
            self._add(rest.rstrip().removesuffix("```").rstrip() if self.format.is_fenced else rest)
            if self._is_empty and is_complete:
                self._add("{}")  # Clients parse the arguments as JSON.
            self.num_ended += 1
        elif not is_cut:
            self._shown += self._raw  # It did not become a call.
        self._at, self._raw, self._held = At.BETWEEN, "", ""

    def take(self) -> tuple[list[CallDelta], str]:
        """Return new call deltas, and text that turned out not to be a call."""
        deltas, shown = self._deltas, self._shown
        self._deltas, self._shown = [], ""
        return deltas, shown

    def _read_head(self) -> None:
        """Read the head before the separator: "function", a name, or functions.NAME:0."""
        head, self._held = self._held.strip(), ""
        if self.format.is_fenced:
            self._at = At.NAME
        elif self.format.prefix:
            bare, _, number = head.removeprefix(self.format.prefix).rpartition(":")
            is_numbered = bool(bare) and number.isascii() and number.isdigit()
            self._name(bare if is_numbered else head, int(number) if is_numbered else None)
        else:
            self._name(head)

    def _read_name(self) -> None:
        """Read the name and the fence after the separator. Some models omit the fence."""
        found = _FENCED.match(self._held) or _BARE.match(self._held)
        if found is not None:
            rest = self._held[found.end() :]
            self._name(found[1].strip())
            self._arguments(rest)
        elif len(self._held) > _MAX_HEAD:
            self.end()

    def _name(self, name: str, number: int | None = None) -> None:
        """Count a call once its name is complete. `number`: the number in its head, if any."""
        if not name:
            return
        own = f"{self.format.prefix}{name}:{number}"
        if number is None or own in self._ids:
            own = self._new_id()
        self._ids.add(own)
        self._deltas.append(CallDelta(self.num_calls, "", own, name))
        self.num_calls += 1
        self._at, self._raw, self._held, self._is_empty = At.ARGUMENTS, "", "", True

    def _arguments(self, text: str) -> None:
        text = self._held + text
        end = len(text)
        if self.format.is_fenced:  # A possible end of the fence waits for more text.
            before = text.rstrip()
            end = len(before.removesuffix("```").removesuffix("``").removesuffix("`").rstrip())
        self._held = text[end:]
        self._add(text[:end])

    def _add(self, text: str) -> None:
        if text:
            self._is_empty = self._is_empty and not text.strip()
            self._deltas.append(CallDelta(self.num_calls - 1, text))
