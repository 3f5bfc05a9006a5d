"""The format that an answer must have: from a request's response_format to a grammar that ranks
follow.

What cannot be followed is said here, before anything is computed. To look at a schema may cost much,
if it was made for that, so a process of its own does it within limits.
"""

from __future__ import annotations

from collections import OrderedDict

from hadal.core.errors import RequestError
from hadal.gateway.openai import AnswerFormat
from hadal.gateway.template import TemplateProcess
from hadal.tokens.grammars import grammar_text

CPU_S = 0.25
"""Processor time for one grammar; a rank takes as long again, and its step waits. Of 608 schemas of
others the slowest took .05 s.
"""
_KEPT = 256
"""Grammars that are remembered as good ones."""


class Formats:
    """Grammars that were looked at. One thread at a time."""

    def __init__(self) -> None:
        self._process: TemplateProcess | None = None
        self._good: OrderedDict[str, None] = OrderedDict()

    def text(self, wanted: AnswerFormat, *, follows_reasoning: bool) -> str:
        """The text of the format's grammar. Raises RequestError for one that cannot be followed;
        ApiError 503 if that cannot be found out.
        """
        text = grammar_text(wanted.schema, follows_reasoning=follows_reasoning)
        if text not in self._good:
            if self._process is None:
                self._process = TemplateProcess("", "formats", cpu_s=CPU_S)
            why = self._process.check(text)
            if why is not None:
                raise RequestError(
                    f"Invalid schema for {wanted.field} {wanted.name!r}: {why}.", wanted.field
                )
        self._good[text] = None
        self._good.move_to_end(text)
        if len(self._good) > _KEPT:
            self._good.popitem(last=False)
        return text

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
