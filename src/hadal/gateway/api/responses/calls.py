"""Calls of the Responses API: as items in the client's form, and as arguments in the model's form.

    tool            item               the model's arguments
    function        function_call      the item's own
    custom          custom_tool_call   {"input": text}
    tool_search     tool_search_call   the item's own, which is an object here
    local_shell     local_shell_call   the item's `action`, without its type
    shell           shell_call         the item's `action`
    apply_patch     apply_patch_call   {"operation": the item's own}

Arguments that do not fit their item are shown as a function_call, so that a client sees them.
Values in, values out; independent of the tools of a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

CUSTOM, FUNCTION, SEARCH = "custom", "function", "tool_search"
LOCAL_SHELL, SHELL, PATCH = "local_shell", "shell", "apply_patch"
INPUT = "input"
"""Name of a custom tool's only argument."""
CALL_TYPES = {
    "function_call": FUNCTION,
    "custom_tool_call": CUSTOM,
    "tool_search_call": SEARCH,
    "local_shell_call": LOCAL_SHELL,
    "shell_call": SHELL,
    "apply_patch_call": PATCH,
}
"""Type of an item -> type of the tool that it calls."""
STREAMED = (FUNCTION, CUSTOM)
"""Types of tools with calls that are streamed; an item of another type arrives as a whole."""
TYPE_TO_PREFIX = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
}
"""Type of an item -> prefix of its id."""
_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_BEGINNING = f'{{"{INPUT}":"'
_PIECE = re.compile(r'([^"\\]+)|\\u([0-9a-fA-F]{4})|\\([^u])|(")')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LOCAL_FIELDS = ("command", "timeout_ms", "working_directory", "user")
_SHELL_FIELDS = ("commands", "timeout_ms", "max_output_length")


class CallName(NamedTuple):
    """Name of a tool in the client's form."""

    name: str
    namespace: str = ""
    kind: str = FUNCTION
    """Type of the tool."""


class InputReader:
    """Reader of a custom tool's input from its arguments, as they arrive."""

    def __init__(self) -> None:
        self.is_input = False
        """True once the arguments begin as those of a custom tool."""
        self._held = ""
        """Text that waits for more: an incomplete beginning or escape."""
        self._half = ""
        """First half of a surrogate pair, as hexadecimal digits."""
        self._is_over = False

    def feed(self, text: str) -> str:
        """Return the text of the input that these arguments add."""
        self._held += text
        at = 0
        if not self.is_input:
            found = _HEAD.match(self._held)
            if found is None:
                return ""
            self.is_input, at = True, found.end()
        pieces = []
        while not self._is_over and (found := _PIECE.match(self._held, at)):
            at = found.end()
            plain, code, letter, end = found.groups()
            if code is not None:
                pieces.append(self._char(code))
                continue
            pieces.append(self.rest())
            self._is_over = end is not None
            if letter is not None:
                pieces.append(_ESCAPES.get(letter, letter))
            pieces.append(plain or "")
        self._held = self._held[at:]
        return "".join(pieces)

    def rest(self) -> str:
        """Return the text of half a surrogate pair: its other half does not follow."""
        half, self._half = self._half, ""
        return "\ufffd" if half else ""

    def _char(self, code: str) -> str:
        if self._half and code[:2].lower() in ("dc", "dd", "de", "df"):
            pair, self._half = bytes.fromhex(self._half + code), ""
            return pair.decode("utf-16-be")
        lost = self.rest()
        if code[:2].lower() in ("d8", "d9", "da", "db"):
            self._half = code
            return lost
        char = chr(int(code, 16))
        return lost + ("\ufffd" if "\ud800" <= char <= "\udfff" else char)


def as_arguments(text: str) -> str:
    """Return the input of a custom tool as JSON arguments."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """Return the input of a custom tool from its arguments, also if these are cut off: "" if they
    are cut off before the input begins. Arguments of another form are returned unchanged.
    """
    reader = InputReader()
    text = reader.feed(arguments)
    if reader.is_input or _BEGINNING.startswith("".join(arguments.split())):
        return text + reader.rest()
    found = _object_in(arguments) or {}
    return found[INPUT] if isinstance(found.get(INPUT), str) else arguments


def call_fields(call: CallName, arguments: str) -> dict[str, Any]:
    """Return the fields of a call's item: its type, and the fields of this type."""
    if call.kind in STREAMED:
        name = {"name": call.name} | ({"namespace": call.namespace} if call.namespace else {})
        if call.kind == CUSTOM:
            return {"type": "custom_tool_call", **name, "input": as_input(arguments)}
        return {"type": "function_call", **name, "arguments": arguments}
    found = _object_in(arguments)
    fields = None if found is None else _own_fields(call.kind, found)
    return fields or {"type": "function_call", "name": call.name, "arguments": arguments}


def _own_fields(kind: str, found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of an item with a type of its own; None if the arguments do not fit it."""
    if kind == SEARCH:
        return {"type": "tool_search_call", "execution": "client", "arguments": found}
    if kind == LOCAL_SHELL and _are_texts(found.get("command")):
        action = {name: found.get(name) for name in _LOCAL_FIELDS}
        action |= {"type": "exec", "env": found.get("env") or {}}
        return {"type": "local_shell_call", "action": action}
    if kind == SHELL and _are_texts(found.get("commands")):
        action = {name: found.get(name) for name in _SHELL_FIELDS}
        return {"type": "shell_call", "action": action, "environment": {"type": "local"}}
    operation = found.get("operation")
    if kind == PATCH and isinstance(operation, dict):
        needed = ("path",) if operation.get("type") == "delete_file" else ("path", "diff")
        if all(isinstance(operation.get(name), str) for name in ("type", *needed)):
            return {"type": "apply_patch_call", "operation": operation}
    return None


def arguments_of(
    kind: str, arguments: Any, text: str | None, fields: Mapping[str, Any] | None
) -> str | None:
    """Return a call's arguments in the model's form from an item's `arguments`, its `input`, and
    its `action` or `operation`; None if the one that `kind` needs is missing or not of its type.
    """
    if kind == CUSTOM:
        return as_arguments(text or "")
    if kind == SEARCH and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if kind in (FUNCTION, SEARCH):
        return arguments or "{}" if isinstance(arguments, str | None) else None
    if fields is None:
        return None
    if kind == PATCH:
        return json.dumps({"operation": fields}, ensure_ascii=False)
    kept = _LOCAL_FIELDS if kind == LOCAL_SHELL else _SHELL_FIELDS
    given = {name: fields[name] for name in (*kept, "env") if fields.get(name)}
    return json.dumps(given, ensure_ascii=False)


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(text)  # Other than json it refuses halves of surrogate pairs.
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
