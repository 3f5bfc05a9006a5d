"""Tool calls in DSML, the form of DeepSeek-V3.2, V4 and V4.1.

    V3.2   <｜DSML｜function_calls>
           <｜DSML｜invoke name="weather">
           <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
           <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
           </｜DSML｜invoke>
           </｜DSML｜function_calls>
    V4     the same in <｜DSML｜tool_calls>
    V4.1   with a space after each mark: <｜DSML｜ calls>, <｜DSML｜ invoke name="weather">

A value is plain text with string="true", else JSON. dsml_chats renders chats, dsml_grammar has the
rules of a call's parameters, dsml_reader reads replies. Independent of chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hadal.gateway.text.dsml_grammar import MARK, Tags, parameters
from hadal.gateway.text.tools import Choosing
from hadal.tokens.grammars import AnyText, CallList, Part, pattern_of


@dataclass(frozen=True)
class Dsml:
    """Form of calls in one family of models."""

    name: str
    block: str
    """Name of the block of calls, with the space before it."""
    instructions: tuple[str, str]
    """Text of the system prompt before and after the list of tools."""
    gap: str = ""
    """Space after a mark."""
    omits_blank: bool = False
    """True: a call without parameters has no blank line."""
    prefix: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (MARK,)

    def opens(self, mark_to_id: Mapping[str, int]) -> tuple[int, ...]:
        """Return the token from which calls are constrained; none if the mark is no token."""
        return (mark_to_id[MARK],) if MARK in mark_to_id else ()

    def closes(self, mark_to_id: Mapping[str, int]) -> int:
        """Return -1: the reply ends after its calls, so no token leads back to free text."""
        return -1

    def has_call(self, text: str, arguments: str) -> bool:
        """Return True if a rendered text contains the values of these arguments as parameters."""
        return all(f">{value}</" in text for value in json.loads(arguments).values())

    def describe(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the text that lists tools after the system prompt, for templates that list none.
        Marks in it keep their function.
        """
        before, behind = self.instructions
        listed = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        return "\n\n" + before + "\n".join(listed) + behind

    def call_list(
        self,
        choosing: Choosing,
        mark_to_id: Mapping[str, int],
        *,
        is_opened: bool = False,
        is_only: bool = True,
    ) -> CallList:
        """Return the grammar rules for calling the allowed tools. `is_opened`: they begin with the
        mark's token. `is_only`: without calls the reply follows another rule, or is not allowed.
        """
        tags = Tags(mark_to_id.get(MARK), self.gap)
        blocks = Tags(tags.mark, "")
        first, *rest = blocks.begin(f"{self.block}>\n")
        begin: tuple[Part, ...] = (re.compile(r"\n{0,2}" + pattern_of(str(first))), *rest)
        free = None
        if is_opened and rest:
            begin = (*rest,)
        elif not is_only and not rest:
            begin = (AnyText(MARK, str(first)),)
            free = AnyText(MARK, "")
        calls = tuple(
            (
                *tags.begin(f'invoke name="{tool.name}">\n'),
                *parameters(tool.arguments, replace(tags, is_strict=tool.is_strict)),
                *_after_blank(tags.end("invoke>\n")),
            )
            for tool in choosing.callable
        )
        end = blocks.end(f"{self.block}>")
        return CallList(begin, end, "", calls, not choosing.is_parallel, free)


def _after_blank(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return parts that a line break may precede."""
    first, *rest = parts
    return re.compile(r"\n?" + pattern_of(str(first))), *rest


def _v4_instructions(block: str, gap: str) -> tuple[str, str]:
    begin, end = f"<{MARK}{gap}", f"</{MARK}{gap}"
    return (
        "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can"
        f' invoke tools by writing a "<{MARK}{block}>" block like the following:\n\n'
        f'<{MARK}{block}>\n{begin}invoke name="$TOOL_NAME">\n'
        f'{begin}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        f"{end}parameter>\n...\n{end}invoke>\n"
        f'{begin}invoke name="$TOOL_NAME2">\n...\n{end}invoke>\n</{MARK}{block}>\n\n'
        'String parameters should be specified as is and set `string="true"`. For all other types'
        " (numbers, booleans, arrays, objects), pass the value in JSON format and set"
        ' `string="false"`.\n\n'
        "If thinking_mode is enabled (triggered by <think>), you MUST output your complete"
        " reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\n"
        "Otherwise, output directly after </think> with tool calls or final response.\n\n"
        "### Available Tool Schemas\n\n",
        "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke"
        " tool calls.\n",
    )


V32 = Dsml(
    "deepseek-v3.2",
    "function_calls",
    (
        "## Tools\nYou have access to a set of tools you can use to answer the user's question.\n"
        f'You can invoke functions by writing a "<{MARK}function_calls>" block like the following'
        f" as part of your reply to the user:\n<{MARK}function_calls>\n"
        f'<{MARK}invoke name="$FUNCTION_NAME">\n'
        f'<{MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        f"</{MARK}parameter>\n...\n</{MARK}invoke>\n"
        f'<{MARK}invoke name="$FUNCTION_NAME2">\n...\n</{MARK}invoke>\n</{MARK}function_calls>\n'
        "String and scalar parameters should be specified as is without any escaping or quotes,"
        ' while lists and objects should use JSON format. The "string" attribute should be set to'
        ' "true" for string type parameters and "false" for other types (numbers, booleans,'
        " arrays, objects).\n"
        "If the thinking_mode is enabled, then after function results you should strongly consider"
        " outputting a thinking block. Here is an example:\n"
        f"<{MARK}function_calls>\n...\n</{MARK}function_calls>\n"
        "<function_results>\n...\n</function_results>\n<think>...thinking about results</think>\n"
        "Here are the functions available in JSONSchema format:\n<functions>\n",
        "\n</functions>\n",
    ),
)
V4 = Dsml("deepseek-v4", "tool_calls", _v4_instructions("tool_calls", ""), omits_blank=True)
V41 = Dsml("deepseek-v4.1", " calls", _v4_instructions(" calls", " "), " ")
FORMS = {each.name: each for each in (V32, V4, V41)}
