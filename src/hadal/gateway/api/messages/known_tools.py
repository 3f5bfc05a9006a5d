"""Client-run tools with schemas that Anthropic documents: bash, the text editor and memory. A client
sends only their type and name.

    {"type": "bash_20250124", "name": "bash"}  -->  the function `bash` with its schema

Independent of requests: type in, description and schema out.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class KnownTool(NamedTuple):
    """Name that the type requires, and the function as the model sees it."""

    name: str
    description: str
    schema: dict[str, Any]


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: first and last line of a file, counted from 1; -1 is its end.",
}
_BASH = KnownTool(
    "bash",
    "Run a command in a bash session that lasts for the whole conversation.",
    _schema(
        {
            "command": _text("Command to run. Required, except with restart."),
            "restart": {"type": "boolean", "description": "True: restart the session."},
        }
    ),
)


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*names], "description": "Command to run."}


def _editor(name: str, *more_commands: str, inserted: str) -> KnownTool:
    """Return a text editor. `inserted`: argument with the text that insert inserts."""
    properties = {
        "command": _commands("view", "create", "str_replace", "insert", *more_commands),
        "path": _text("Absolute path of the file or folder."),
        "view_range": _RANGE,
        "file_text": _text("For create: the file's content."),
        "old_str": _text("For str_replace: text to replace. It must occur once in the file."),
        "new_str": _text("For str_replace: text to put in its place."),
        "insert_line": {
            "type": "integer",
            "description": "For insert: line after which the text is inserted; 0 is the beginning.",
        },
    }
    if inserted == "new_str":
        properties["new_str"] = _text("For str_replace and insert: the new text.")
    else:
        properties[inserted] = _text("For insert: text to insert.")
    about = "View, create and edit text files, and list folders."
    return KnownTool(name, about, _schema(properties, "command", "path"))


_MEMORY = KnownTool(
    "memory",
    "Read and change files that stay between conversations. All paths begin with /memories.",
    _schema(
        {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": _text("Path of the file or folder, for all commands except rename."),
            "view_range": _RANGE,
            "file_text": _text("For create: the file's content."),
            "old_str": _text("For str_replace: text to replace."),
            "new_str": _text("For str_replace: text to put in its place."),
            "insert_line": {
                "type": "integer",
                "description": "For insert: line at which the text is inserted.",
            },
            "insert_text": _text("For insert: text to insert."),
            "old_path": _text("For rename: the current path."),
            "new_path": _text("For rename: the new path."),
        },
        "command",
    ),
)
_EARLY_EDITOR = _editor("str_replace_editor", "undo_edit", inserted="new_str")
_EDITOR = _editor("str_replace_based_edit_tool", inserted="insert_text")
KNOWN_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _EARLY_EDITOR,
    "text_editor_20250124": _EARLY_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
"""Type -> tool (Anthropic's pages on the bash, text editor and memory tools, and its SDK 2.14)."""
WITH_LENGTH = "text_editor_20250728"
"""The only type with `max_characters`."""
