"""Chat templates of DeepSeek-V3.2, V4 and V4.1, for folders without one.

`gateway/text/chat` renders them like a folder's own. Their words and their order are from the
makers' encoders, because the models were trained with these: `encoding_dsv32.py` in V3.2's folder,
deepseek-recipe 0.2 for V4 and V4.1.

    V3.2   keeps reasoning after the last user message
    V4     keeps all reasoning if tools are offered, else none; all system messages come first,
           but in /v1/messages one between turns is a reminder within the user's turn
    V4.1   as V4, but a system message stays in its place

A folder's files and tokens select the form; the model's name does not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hadal.core.documents import MAX_CONFIG_BYTES, read_text
from hadal.core.errors import CheckpointError
from hadal.gateway.text.dsml import V4, V32, V41, Dsml
from hadal.gateway.text.dsml_grammar import MARK
from hadal.tokens.added import read_config

_ENCODERS = ("encoding/encoding_*.py", "encoding_*.py")
"""Places of a maker's encoder in a model's folder."""
_KINDS = {"deepseek_v4": V4, "deepseek_v41": V41}
"""`model_type` of config.json -> form of its chats."""
_SYSTEM, _REMINDER = "<｜System｜>", "<｜latest_reminder｜>"
"""Control tokens that V4.1 and V4 have, and V3.2 does not."""
_V32_BLOCK = re.compile(r"function_calls>")
_V41_BLOCK = re.compile(r"(?:DSML｜|[\"'}>]) calls\b")


def form_in(text: str) -> Dsml | None:
    """Return the form of calls in a chat template or a maker's encoder; None: another form."""
    if "DSML" not in text:
        return None
    if _V32_BLOCK.search(text):
        return V32
    return V41 if _V41_BLOCK.search(text) else V4


def form_of_folder(folder: Path, tokens: dict[str, int]) -> Dsml | None:
    """Return the form of a folder without a chat template; None: it has none, as base models.
    `tokens`: text -> id of its added tokens. Raises CheckpointError.
    """
    for pattern in _ENCODERS:
        for path in sorted(folder.glob(pattern)):
            text = read_text(path, "encoder", MAX_CONFIG_BYTES, error=CheckpointError)
            if (form := form_in(text)) is not None:
                return form
    if MARK not in tokens:
        return None
    kind = read_config(folder, "config.json").get("model_type")
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if _SYSTEM in tokens:
        return V41
    return V4 if _REMINDER in tokens else V32


_BEGIN, _USER, _ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
_END = "<｜end▁of▁sentence｜>"


def _shown(text: str) -> str:
    """Return the template's expression for a text."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return "{{ '" + escaped + "' }}"


_SORTED = "message.tool_calls | sort(attribute='id', case_sensitive=true)"
"""Calls of a turn by their ids, as V4's converter orders them; ids that we make ascend."""


def _calls(form: Dsml) -> str:
    """Return the part of a template that writes the calls of `message`."""
    open_, close = f"<{MARK}{form.gap}", f"</{MARK}{form.gap}"
    parameter = (
        _shown(f'{open_}parameter name="')
        + "{{ key }}"
        + "{% if value is string %}"
        + _shown('" string="true">')
        + "{{ value }}{% else %}"
        + _shown('" string="false">')
        + "{{ value | tojson }}{% endif %}"
        + _shown(f"{close}parameter>\n")
    )
    empty = "" if form.omits_blank else "{% if not arguments %}" + _shown("\n") + "{% endif %}"
    return (
        "{% if message.tool_calls %}"
        + _shown(f"\n\n<{MARK}{form.block}>\n")
        + ("{% for call in " + (_SORTED if form is V4 else "message.tool_calls") + " %}")
        # Arguments that are no JSON object are one text, as in the maker's converter.
        + "{% set arguments = call.function.arguments if call.function.arguments is mapping"
        + " else {'arguments': call.function.arguments if call.function.arguments is string"
        + " else call.function.arguments | tojson} %}"
        + _shown(f'{open_}invoke name="')
        + "{{ call.function.name }}"
        + _shown('">\n')
        + "{% for key, value in arguments | items %}"
        + parameter
        + "{% endfor %}"
        + empty
        + _shown(f"{close}invoke>\n")
        + "{% endfor %}"
        + _shown(f"</{MARK}{form.block}>")
        + "{% endif %}"
    )


_LIST_V32 = "{{ tools | map(attribute='function') | map('tojson') | join('\\n') }}"
_LIST_V4 = (
    "{% for tool in tools %}"
    "{{ {'name': tool.function.name, 'description': tool.function.description or '',"
    " 'parameters': tool.function.parameters or {}} | tojson }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)


def _tools(form: Dsml) -> str:
    """Return the part of a template that lists the tools, if there are any."""
    listed = _LIST_V32 if form is V32 else _LIST_V4
    before, behind = (_shown(text) for text in form.instructions)
    return "{% if tools %}" + _shown("\n\n") + before + listed + behind + "{% endif %}"


def _v32() -> str:
    opens = (
        "{% if add_generation_prompt or not loop.last %}"
        "BEFORE{% if thinks and loop.index0 >= ns.last %}<think>{% else %}</think>{% endif %}"
        "{% endif %}"
    )
    return (
        "{% set thinks = thinking is defined and thinking %}"
        "{% set ns = namespace(last=-1) %}"
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        + _BEGIN
        + "{% if messages[0].role != 'system' %}"
        + _tools(V32)
        + "{% endif %}{% for message in messages %}"
        "{% if message.role == 'system' %}{{ message.content }}"
        "{% if loop.first %}" + _tools(V32) + "{% endif %}"
        "{% elif message.role == 'user' %}"
        + _USER
        + "{{ message.content }}"
        + opens.replace("BEFORE", _ASSISTANT)
        + "{% elif message.role == 'tool' %}"
        "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}"
        + _shown("\n\n<function_results>")
        + "{% endif %}"
        + _shown("\n<result>")
        + "{{ message.content }}</result>"
        "{% if loop.last or loop.nextitem.role != 'tool' %}"
        + _shown("\n</function_results>")
        + opens.replace("BEFORE", _shown("\n\n"))
        + "{% endif %}"
        "{% else %}"
        "{% if thinks and loop.index0 > ns.last %}"
        "{{ message.reasoning_content or '' }}</think>{% endif %}"
        "{{ message.content or '' }}" + _calls(V32) + _END + "{% endif %}{% endfor %}"
    )


_RESULTS = (  # Results of one turn's calls, in the order of the calls.
    "{% if loop.previtem is undefined or loop.previtem.role != 'tool' %}"
    "{% set found = namespace(results=[], rest=[]) %}"
    "{% for other in messages[loop.index0:] %}{% if other.role != 'tool' %}{% break %}{% endif %}"
    "{% set found.rest = found.rest + [other] %}{% endfor %}"
    "{% for id in ns.ids %}{% for other in found.rest %}"
    "{% if other.tool_call_id == id and other not in found.results %}"
    "{% set found.results = found.results + [other] %}{% endif %}{% endfor %}{% endfor %}"
    "{% for other in found.rest %}{% if other not in found.results %}"
    "{% set found.results = found.results + [other] %}{% endif %}{% endfor %}"
    "{% for other in found.results %}"
    "{% set ns.pieces = ns.pieces + ['<tool_result>' ~ other.content ~ '</tool_result>'] %}"
    "{% endfor %}{% endif %}"
)


def _user_turn(form: Dsml) -> str:
    """Return the part that writes the collected texts of a user's turn."""
    texts = "ns.pieces | select | join('\\n\\n')" if form is V4 else "ns.pieces | join('\\n\\n')"
    return "{% if ns.pieces %}" + _USER + "{{ " + texts + " }}{% set ns.pieces = [] %}{% endif %}"


_ASSISTANT_TURN = (
    _ASSISTANT + "{% if thinks and tools %}<think>{{ message.reasoning_content or '' }}{% endif %}"
    "</think>{{ message.content or '' }}"
)
_IDS = "{% set ns.ids = (message.tool_calls or []) | map(attribute='id') | list %}"
_OPENING = (
    "{% if add_generation_prompt %}"
    + _ASSISTANT
    + "{% if thinks %}<think>{% else %}</think>{% endif %}{% endif %}"
)


def _format(any_object: str) -> str:
    """Return the part that shows the answer's schema. `any_object`: text for any JSON object."""
    return (
        "{% if response_schema is defined %}{% if response_schema == {'type': 'object'} %}"
        + _shown(any_object)
        + "{% else %}"
        + _shown(_FORMAT_HEAD)
        + "{{ response_schema | tojson }}{% endif %}{% endif %}"
    )


_FORMAT_HEAD = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
_DEFAULTS = (
    "{% set thinks = thinking if thinking is defined else true %}"
    "{% set effort = reasoning_effort if reasoning_effort is defined else 'high' %}"
)
_V4_HIGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to"
    " resolve the root cause, rigorously stress-testing your logic against all potential paths,"
    " edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step,"
    " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
    " unchecked.\n\n"
)
_V4_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance:"
    " exhaustively decompose the problem into its most fundamental components, trace every causal"
    " chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles"
    " and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


def _v4() -> str:
    return (
        _DEFAULTS
        + _BEGIN
        + "{% if thinks and effort == 'max' %}"
        + _shown(_V4_MAX)
        + "{% elif thinks and effort != 'low' %}"
        + _shown(_V4_HIGH)
        + "{% endif %}"
        "{% set reminds = system_reminders is defined and system_reminders %}"
        "{{ (messages[:1] if reminds else messages) | selectattr('role', 'equalto', 'system')"
        " | map(attribute='content') | select | join('\\n\\n') }}"
        + _tools(V4)
        + _format(
            "\n\nYou are a helpful assistant designed to output JSON.\n"
            "## Response Format:\n\nReply with JSON object ONLY."
        )
        + "{% set ns = namespace(pieces=[], ids=[]) %}"
        "{% set rest = messages[(messages[0].role == 'system') | int:] if reminds"
        " else messages | rejectattr('role', 'equalto', 'system') | list %}"
        "{% for message in rest %}"
        "{% if message.role == 'user' %}{% set ns.pieces = ns.pieces + [message.content] %}"
        "{% elif message.role == 'system' %}{% if message.content %}"
        "{% set ns.pieces = ns.pieces + ['<system-reminder>\\n' ~ message.content"
        " ~ '\\n</system-reminder>'] %}{% endif %}"
        "{% elif message.role == 'tool' %}"
        + _RESULTS.replace(
            "messages[loop.index0:]",
            "rest[loop.index0:]",
        )
        + "{% else %}"
        + _user_turn(V4)
        + _ASSISTANT_TURN
        + _calls(V4)
        + _END
        + _IDS.replace("| list", "| sort(case_sensitive=true)")
        + "{% endif %}{% endfor %}"
        + _user_turn(V4)
        + _OPENING
    )


def _v41() -> str:
    head = (
        "{% if thinks %}Reasoning Effort: "
        "{{ {'low': 50, 'max': 100}.get(effort, 75) }}"
        + _shown(" (range 1-100, the higher the value, the more thorough the reasoning)\n\n")
        + "{% endif %}"
    )
    more = _tools(V41) + _format(_FORMAT_HEAD + '{"type": "json_object"}')
    return (
        _DEFAULTS
        + _BEGIN
        + "{% set ns = namespace(pieces=[], ids=[]) %}"
        + "{% set has_head = thinks or tools or response_schema is defined %}"
        + "{% if has_head and messages[0].role != 'system' %}"
        + _SYSTEM
        + head
        + more
        + "{% endif %}{% for message in messages %}"
        "{% if message.role == 'user' %}{% set ns.pieces = ns.pieces + [message.content] %}"
        "{% elif message.role == 'tool' %}" + _RESULTS + "{% else %}" + _user_turn(V41) + "{% if"
        " message.role == 'system' %}"
        "{% if message.content or (loop.first and has_head) %}"
        + _SYSTEM
        + "{% if loop.first %}"
        + head
        + "{% endif %}{{ message.content }}{% if loop.first %}"
        + more
        + "{% endif %}{% endif %}{% else %}"
        + _ASSISTANT_TURN
        + _calls(V41)
        + _END
        + _IDS
        + "{% endif %}{% endif %}{% endfor %}"
        + _user_turn(V41)
        + _OPENING
    )


def template_of(form: Dsml) -> str:
    """Return the form's chat template."""
    make: dict[str, Any] = {V32.name: _v32, V4.name: _v4, V41.name: _v41}
    text: str = make[form.name]()
    return text
