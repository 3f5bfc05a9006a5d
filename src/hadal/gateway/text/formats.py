"""Turn the required format of an answer (response_format, tools) into a grammar for the ranks.

Unsupported schemas are refused here, before anything is computed. Checking a malicious schema may
be expensive, so a separate process does it within limits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from hadal.core.errors import RequestError
from hadal.gateway.text.asks import AnswerFormat
from hadal.gateway.text.stream import Calls
from hadal.gateway.text.template import ConfinedProcess
from hadal.gateway.text.tools import Tool
from hadal.tokens.grammars import ANY_JSON_OBJECT, MARK_IDS, calls_text, grammar_text

CPU_S = 0.25
"""Maximum processor time for checking a grammar, or _TOGETHER tools' schemas. A rank takes as long
to build a grammar, and its step waits. Of 608 third-party schemas, the slowest took 0.05 s.
"""
_TOGETHER = 16
"""Number of tool schemas checked together within CPU_S."""
_KEPT = 256
"""Number of valid grammars that are remembered."""


class Formats:
    """Checked grammars. Used by one thread at a time, that of the grammars lane."""

    def __init__(self) -> None:
        self._process: ConfinedProcess | None = None
        self._good: OrderedDict[tuple[str, ...], None] = OrderedDict()

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
        `is_opened`: for calls within a free reply. Raises as `text` does; errors in a tool's
        parameters name the tool.
        """
        content = None
        if wanted is not None:
            content = ANY_JSON_OBJECT if wanted.schema is None else wanted.schema
            self._check_content(grammar_text(content, follows_reasoning=False), wanted, prefix)
        choosing, format = calls.choosing, calls.format
        strict = [tool for tool in choosing.callable if tool.is_strict]
        for first in range(0, len(strict), _TOGETHER):
            group = strict[first : first + _TOGETHER]
            self._check_tools(group)
        looked_at, followed = (
            calls_text(
                format.call_list(choosing, ids),
                content=content,
                follows_reasoning=follows_reasoning,
                is_opened=is_opened,
            )
            for ids in (dict(zip(format.marks, MARK_IDS, strict=False)), mark_to_id)
        )
        if (found := self._check((looked_at,))) is not None:
            raise RequestError(
                f"tools: the schemas of these tools cannot be combined: {found[1]}.", "tools"
            )
        return followed

    def _check_tools(self, tools: Sequence[Tool]) -> None:
        texts = tuple(grammar_text(tool.arguments, follows_reasoning=False) for tool in tools)
        if (found := self._check(texts)) is None:
            return
        at, why = found
        if at < 0:
            names = ", ".join(repr(tool.name) for tool in tools)
            raise RequestError(f"Invalid schemas for tools {names}: {why}.", "tools")
        raise RequestError(
            f"Invalid schema for tool {tools[at].name!r}: {why}.", tools[at].schema_field
        )

    def _check_content(self, text: str, wanted: AnswerFormat, prefix: str) -> None:
        if (found := self._check((text,), prefix)) is not None:
            raise RequestError(
                f"Invalid schema for {wanted.field} {wanted.name!r}: {found[1]}.", wanted.field
            )

    def _check(self, texts: tuple[str, ...], prefix: str = "") -> tuple[int, str] | None:
        key = (*texts, prefix)
        if key not in self._good:
            if self._process is None:
                self._process = ConfinedProcess("", "formats", cpu_s=CPU_S)
            if (found := self._process.check(texts, prefix)) is not None:
                return found
        self._good[key] = None
        self._good.move_to_end(key)
        if len(self._good) > _KEPT:
            self._good.popitem(last=False)
        return None

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
