"""TOML tables as frozen dataclasses: known names only, of the right type, and an error that says
where.

A field is an int, float, str or bool, a tuple of one of those (written as an array), or another
dataclass (a table).
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hadal.core.documents import MAX_TOML_BYTES, parse_toml, problem_of, read_text, shown
from hadal.core.errors import ConfigError

T = TypeVar("T")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError, naming `what` was to be read."""
    return parse_toml(read_text(path, what, MAX_TOML_BYTES), str(path))


def build(kind: type[T], fields: dict[str, Any], where: str, base: T | None = None) -> T:
    """Make a `kind` of what a table says. What it does not say is as in `base`, in inner tables
    too, or without one as by default. Raises ConfigError.
    """
    types = get_type_hints(kind)
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in fields:
        if name not in known:
            raise ConfigError(f"{where}: unknown field {shown(name)}. Known: {', '.join(known)}.")
    values = {
        name: _value(types[name], value, where, name, getattr(base, name, None))
        for name, value in fields.items()
    }
    if base is not None:
        return dataclasses.replace(base, **values)  # type: ignore[type-var]
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if not has_default and each.name not in fields:
            raise ConfigError(f"{where}: {each.name} is missing.")
    return kind(**values)


def _value(kind: Any, value: Any, where: str, name: str, base: Any = None) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name} must be a table.")
        return build(kind, value, f"{where}: {name}", base)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {name} is {shown(value)}; an array is needed.")
        return tuple(_value(get_args(kind)[0], one, where, name) for one in value)
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"{where}: {name} is {shown(value)}; a value of type {kind.__name__} is needed."
        )
    if (problem := problem_of(value)) is not None:
        raise ConfigError(f"{where}: {name} {problem}.")
    return float(value) if kind is float else value
