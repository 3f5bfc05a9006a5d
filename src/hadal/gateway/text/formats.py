"""Turn the required format of an answer (response_format, tools) into a grammar for the ranks.

Unsupported schemas are refused here, before anything is computed; those of tools that are not
strict are left out instead. Checking a malicious schema may be expensive, so a separate process
does it within limits.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hadal.core.errors import RequestError
from hadal.gateway.text.asks import AnswerFormat
from hadal.gateway.text.stream import Calls
from hadal.gateway.text.template import Checked, ConfinedProcess
from hadal.gateway.text.tools import (
    MAX_HELD_BYTES,
    Choosing,
    Tool,
    followed,
    num_schema_bytes,
)
from hadal.tokens.escapes import GrammarError
from hadal.tokens.grammars import (
    ANY_JSON_OBJECT,
    MARK_IDS,
    arguments_text,
    calls_text,
    grammar_text,
)
from hadal.tokens.lark import TextGrammar

CPU_S = 0.25
"""Maximum processor time for checking a grammar. A rank takes as long to build a grammar, and its
step waits. Of 608 third-party schemas, the slowest took 0.05 s.
"""
TOOLS_CPU_S = 2.0
"""Maximum processor time for checking the schemas and grammars of one request's tools. 128 tools
with 100 KiB took 0.4 s.
"""
_KEPT = 4096
"""Number of grammars with a remembered result."""
_KEPT_INPUTS = 64
"""Number of clients' grammars with remembered forms: each has at most about 0.5 MiB, as CPU_S ends
longer work.
"""
_MAX_WHY_CHARS = 160

LogOnce = Callable[[str, str, str], None]
"""Logs (event, name, value), once for each event and value."""


class Formats:
    """Checked grammars. Used by one thread at a time, that of the grammars lane."""

    def __init__(self, log_once: LogOnce) -> None:
        """`log_once` logs schemas of tools that are not followed."""
        self._log_once = log_once
        self._process: ConfinedProcess | None = None
        self._checked: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a grammar and a prefix -> reason why it is not supported; "": it is."""
        self._inputs: OrderedDict[TextGrammar, TextGrammar] = OrderedDict()
        """Grammar of a client -> the same with its forms."""

    def text(self, wanted: AnswerFormat, *, follows_reasoning: bool, prefix: str = "") -> str:
        """Return the text of the format's grammar. `prefix`: the beginning of the answer. Raises
        RequestError for an unsupported schema, ApiError 503 if the check cannot run.
        """
        plain = grammar_text(wanted.schema, follows_reasoning=False)
        # With line breaks allowed after reasoning, a schema that no text satisfies would pass.
        self._check_content(plain, wanted, "" if follows_reasoning else prefix)
        if not follows_reasoning:
            return plain
        text = grammar_text(wanted.schema, follows_reasoning=True)
        if prefix:
            self._check_content(text, wanted, prefix)
        return text

    def calls_text(
        self,
        calls: Calls,
        mark_to_id: Mapping[str, int],
        wanted: AnswerFormat | None = None,
        *,
        follows_reasoning: bool = False,
        is_opened: bool = False,
        prefix: str = "",
    ) -> str:
        """Return the grammar's text for a reply of tool calls, or of the format `wanted` instead.
        `is_opened`: for calls within a free reply. Raises as `text` does; errors in a strict tool's
        parameters name the tool.
        """
        content = None
        if wanted is not None:
            content = ANY_JSON_OBJECT if wanted.schema is None else wanted.schema
            self._check_content(grammar_text(content, follows_reasoning=False), wanted, prefix)
        is_only = calls.choosing.is_forced or is_opened or wanted is not None

        def combined(choosing: Choosing) -> tuple[str, str]:
            """Return the grammar's text, and why it is not supported."""
            checked, text = (
                calls_text(
                    calls.format.call_list(choosing, ids, is_opened=is_opened, is_only=is_only),
                    content=content,
                    follows_reasoning=follows_reasoning,
                    is_opened=is_opened,
                )
                for ids in (_stand_ins(calls.format.marks, mark_to_id), mark_to_id)
            )
            return text, self._check(checked).why

        choosing = self._followed(calls.choosing)
        text, why = combined(choosing)
        if why and any(tool.schema is not None and not tool.is_strict for tool in choosing.tools):
            text, why = combined(self._strict_only(choosing, why))
        if why:
            raise RequestError(
                f"tools: the schemas of these tools cannot be combined: {why}.", "tools"
            )
        return text

    def _followed(self, choosing: Choosing) -> Choosing:
        """Return the tools without the schemas that cannot be followed, and log these; grammars of
        clients have the forms that calls need. Raises RequestError for a grammar, and for the schema
        of a strict tool.
        """
        left_s, num_bytes = TOOLS_CPU_S, 0
        name_to_tool = {tool.name: tool for tool in choosing.tools}
        for tool in sorted(choosing.callable, key=lambda tool: not tool.is_strict):
            why = ""
            if not tool.is_strict:
                tool, why = followed(tool, MAX_HELD_BYTES - num_bytes)
            if tool.input is not None and left_s > 0:
                tool, cpu_s = self._with_forms(tool, tool.input)
                left_s -= cpu_s
            num_bytes += num_schema_bytes(tool)
            if tool.schema is not None and left_s > 0:
                why, cpu_s = self._check(arguments_text(tool.arguments))
                left_s -= cpu_s
            elif tool.schema is not None:
                why = f"checking all schemas takes more than {TOOLS_CPU_S:g} s of processor time"
            if why and tool.is_strict:
                raise RequestError(
                    f"Invalid schema for tool {tool.name!r}: {why}.", tool.schema_field
                )
            name_to_tool[tool.name] = self._any_object(tool, why) if why else tool
        return replace(choosing, tools=tuple(name_to_tool.values()))

    def _with_forms(self, tool: Tool, given: TextGrammar) -> tuple[Tool, float]:
        """Return the tool with its grammar in the forms that calls have, and the processor time of
        reading it. Raises RequestError with the parser's words for a grammar that cannot be
        followed.
        """
        cpu_s, read = 0.0, self._inputs.pop(given, None)
        if read is None:
            try:
                escaped, plain, cpu_s = self._confined().forms_of(given.syntax, given.definition)
            except GrammarError as error:
                raise RequestError(
                    f"Invalid grammar for tool {tool.name!r}: {error}.", tool.schema_field
                ) from None
            read = replace(given, escaped=escaped, plain=plain)
        self._inputs[given] = read
        if len(self._inputs) > _KEPT_INPUTS:
            self._inputs.popitem(last=False)
        return replace(tool, input=read), cpu_s

    def _strict_only(self, choosing: Choosing, why: str) -> Choosing:
        """Return the tools with the schemas of strict ones only."""
        tools = (
            tool if tool.is_strict or tool.schema is None else self._any_object(tool, why)
            for tool in choosing.tools
        )
        return replace(choosing, tools=tuple(tools))

    def _any_object(self, tool: Tool, why: str) -> Tool:
        """Return a tool with any JSON object as arguments, and log this."""
        said = " ".join(why.split())[:_MAX_WHY_CHARS]
        self._log_once(f"a tool's calls may have any JSON object, since {said}", "tool", tool.name)
        return replace(tool, schema=None)

    def _check_content(self, text: str, wanted: AnswerFormat, prefix: str) -> None:
        if why := self._check(text, prefix).why:
            raise RequestError(
                f"Invalid schema for {wanted.field} {wanted.name!r}: {why}.", wanted.field
            )

    def _check(self, text: str, prefix: str = "") -> Checked:
        key = hashlib.sha256(
            f"{len(prefix)} {prefix}{text}".encode("utf-8", "surrogatepass")
        ).digest()
        if (why := self._checked.get(key)) is not None:
            self._checked.move_to_end(key)
            return Checked(why, 0.0)
        found = self._confined().check(text, prefix)
        self._checked[key] = found.why
        if len(self._checked) > _KEPT:
            self._checked.popitem(last=False)
        return found

    def _confined(self) -> ConfinedProcess:
        if self._process is None:
            self._process = ConfinedProcess("", "formats", cpu_s=CPU_S)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()


def _stand_ins(marks: Sequence[str], mark_to_id: Mapping[str, int]) -> dict[str, int]:
    """Return mark -> id for checking a grammar, for marks that are tokens of the model."""
    return {
        mark: stand_in
        for mark, stand_in in zip(marks, MARK_IDS, strict=False)
        if mark in mark_to_id
    }
