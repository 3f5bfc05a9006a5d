"""Jinja as transformers provides it to chat templates: the same tags, globals, filters and tests.

Source: transformers 5.23, `utils/chat_template_utils.py`. It is Jinja's immutable sandbox with the
tags `break`, `continue` and `generation`, a `tojson` that escapes nothing for HTML,
`raise_exception` and `strftime_now`, and narrower `dict` and `namespace`.
tests/unit/gateway/test_same_prompts.py compares prompts.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def parsed(text: str) -> jinja2.Template:
    """Parse a chat template. Raises Jinja's errors."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


class _GenerationTag(Extension):
    """Tag around an assistant's text, used for training. Rendering keeps its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse to the tag's end. Names set inside are not visible after it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_shown"), [], [], body)
        return block.set_lineno(line)

    def _shown(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """Callable `dict` without attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys` of the arguments."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` without attributes that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        # No parameter `self`: a template may set an attribute of that name.
        own, given = args[0], dict(*args[1:], **values)
        for name in given:
            _check_name(name)
        Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace cannot have the attribute {name!r}, because it begins with _"
        )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON. Jinja's own filter escapes < and >."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
