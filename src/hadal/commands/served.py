"""Tokenizer and chat templates of a folder, read as a gateway reads them, for `hadal model` and
`hadal serve --dry-run`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.gateway.desk.service import read_served_model
from hadal.gateway.text.chat import THINK_CLOSE, THINK_OPEN
from hadal.gateway.text.template_files import read_templates
from hadal.runtime.memory import why_not_fit
from hadal.runtime.pool_sizes import Room
from hadal.runtime.resolve import check_complete, plan, why_not_run


@dataclass(frozen=True)
class ServedText:
    """Chat template, tools, reasoning and context of a model, as its gateway reads them."""

    template: str
    """Names of the chat templates and their file, or the form of chats without one; empty if the
    model has no chats.
    """
    tools: str
    """Name of the model's format for tool calls; empty if it cannot call tools."""
    thinks: bool
    """True if the model can mark its reasoning."""
    context_tokens: int
    """Maximum number of tokens of a prompt and its reply together."""


def read_served_text(folder: Path, accepted: Collection[str]) -> ServedText:
    """Read tokenizer, templates and defaults as the gateway does. Raises CheckpointError."""
    model = read_served_model(folder, folder.name, accepted)
    templates, source = read_templates(folder)
    tools = ""
    if model.chat is not None:
        tools = model.chat.tools.name if model.chat.tools is not None else ""
        model.chat.close()
    named = f"{', '.join(templates)} in {Path(source).name}" if templates else ""
    if model.chat is not None and not templates:
        named = f"none in the folder; chats have the form of {tools}"
    text = "".join(templates.values())
    has_tokens = {THINK_OPEN, THINK_CLOSE} <= model.vocabulary.control_ids.keys()
    thinks = model.chat is not None and (has_tokens or THINK_OPEN in text or not templates)
    return ServedText(named, tools, thinks, model.context_tokens)


def why_not_served(folder: Path, accepted: Collection[str], memory_bytes: int | None) -> str:
    """Return why `hadal serve --model FOLDER` would not start; empty if it would. `memory_bytes`:
    memory of another machine; None: this one.
    """
    try:
        room = None if memory_bytes is None else Room(memory_bytes, memory_bytes)
        resolved = plan(Deployment(model=str(folder), accept_config=tuple(accepted)), room)
        check_complete(resolved)
        read_served_text(folder, accepted)
    except ConfigError as error:
        return str(error)
    if memory_bytes is not None:
        return why_not_fit(resolved.memory, memory_bytes) or ""
    return next(iter(why_not_run(resolved)), "")
