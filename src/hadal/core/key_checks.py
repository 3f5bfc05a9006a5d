"""Checks of the keys of a model's JSON files against the table in `model_keys`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hadal.core import model_keys
from hadal.core.documents import shown
from hadal.core.errors import CheckpointError
from hadal.core.model_keys import ConfigKey, Table, Use


def check_object(
    found: Any, path: str, table: Table, source: str, accepted: Collection[str] = ()
) -> None:
    """Check each key of an object inside config.json against its table.

    Raises CheckpointError if `found` is not an object, if a key is unknown and not accepted, or for
    a FIXED key as `check_fixed` does.
    """
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{source}: {path} is {shown(found)}; an object is needed.")
    for key in model_keys.unknown(found, table):
        name = f"{path}.{key}"
        if name not in accepted:
            raise CheckpointError(
                f"{source}: {name} is {shown(found[key])}, a key that Hadal does not know: it may"
                f" change every token. --accept-config {name} serves the model without it."
            )
    for key, row in table.items():
        if row.use is Use.FIXED:
            check_fixed(found, key, row, source, f"{path}.{key}")


def check_fixed(
    fields: Mapping[str, Any], key: str, row: ConfigKey, source: str, name: str
) -> None:
    """Raise CheckpointError if a FIXED key has an unsupported value, or is missing but required."""
    value = fields.get(key, row.default)
    if value is model_keys.REQUIRED:
        raise CheckpointError(f"{source}: {name} is missing; {row.allowed[0]!r} is needed.")
    if key in fields and not model_keys.is_allowed(row, value):
        # 1.0 and 1 are equal, so only one is shown.
        served = list(dict.fromkeys(one for one in row.allowed if one is not None))
        needed = " or ".join(map(repr, served)) or "nothing"
        raise CheckpointError(
            f"{source}: {name} is {shown(value)}; this architecture needs {needed} ({row.source})."
        )
