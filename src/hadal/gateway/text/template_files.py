"""Chat templates in a model's folder, found at the same places as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hadal.core.documents import MAX_CONFIG_BYTES, read_text, shown
from hadal.core.errors import CheckpointError
from hadal.tokens.added import CONFIG, read_config

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Template names that transformers chooses by itself: the second is for requests with tools."""


def read_templates(folder: Path) -> tuple[dict[str, str], str]:
    """Return the chat templates of a folder by name (none for a base model) and the name of their
    file. Raises CheckpointError.

    As in transformers, template files take precedence over tokenizer_config.json.
    chat_template.json, which processors write, comes last.
    """
    own, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    files = {DEFAULT: own} if own.exists() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in sorted(more.glob("*.jinja"))}
    if files:
        templates = {
            name: read_text(path, "chat template", MAX_CONFIG_BYTES, error=CheckpointError)
            for name, path in files.items()
        }
        return templates, str(own if own.exists() else more)
    for name in (CONFIG, "chat_template.json"):
        found = read_config(folder, name).get("chat_template")
        if found is not None:
            return _by_name(found, folder / name), str(folder / name)
    return {}, str(own)


def _by_name(value: Any, path: Path) -> dict[str, str]:
    """Return name -> template, from one text or [{"name": "default", "template": ...}, ...]."""
    if isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("name"), str) for each in value
    ):
        value = {each["name"]: each.get("template") for each in value}
    templates = value if isinstance(value, dict) else {DEFAULT: value}
    for name, text in templates.items():
        if not isinstance(text, str):
            where = "chat_template" if text is value else f"chat_template[{shown(name)}]"
            raise CheckpointError(f"{path}: {where} is {shown(text)}; a text is needed.")
    return templates
