"""Tools of the Responses API that the client runs and describes by their type alone."""

from __future__ import annotations

from typing import Any

from hadal.gateway.api.responses.calls import LOCAL_SHELL, PATCH, SHELL


def object_of(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object without other properties."""
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
    return object_of(properties, "type", *fields)


SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    LOCAL_SHELL: (
        "Runs a command on the user's computer and returns its output.",
        object_of(
            {"command": _TEXTS, "working_directory": _TEXT, "timeout_ms": _NUMBER}, "command"
        ),
    ),
    SHELL: (
        "Runs shell commands on the user's computer and returns what they print.",
        object_of(
            {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"
        ),
    ),
    PATCH: (
        "Creates, changes or deletes one file. In a diff each line begins with '+' (added), '-'"
        " (removed) or a space (unchanged); a line '@@' begins each changed place.",
        object_of(
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
