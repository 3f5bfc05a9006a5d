"""Rotary positions as stated in a config.json: theta, and YaRN's stretched frequencies.

Source: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071. Ambiguous files are read as transformers'
`modeling_rope_utils` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from hadal.core import model_keys
from hadal.core.documents import converted, shown
from hadal.core.errors import CheckpointError
from hadal.core.key_checks import check_object
from hadal.core.model_keys import Use

Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Theta = Annotated[float, Meta(ge=1, le=1e12)]
_Factor = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Mscale = Annotated[float, Meta(ge=0, le=1e3)]


@dataclass(frozen=True)
class RopeScaling:
    """Parameters of YaRN as DeepSeek-V3 uses it; lengths in tokens."""

    factor: _Factor
    original_max_position_embeddings: Tokens
    beta_fast: _Factor = 32.0
    beta_slow: _Factor = 1.0
    mscale: _Mscale | None = None
    mscale_all_dim: _Mscale | None = None
    attention_factor: _Mscale | None = None
    """Factor on cos and sin. None: derived from the two mscales, or from `factor` alone."""
    truncate: bool = True
    """True if the ends of the ramp between fast and slow pairs are rounded to whole numbers."""

    @property
    def temperature(self) -> float:
        """Factor on cos and sin; 1 for V3, in which the two mscales are equal."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax's scale, from mscale_all_dim alone; 1 without it."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def parse_rope(
    objects: Mapping[str, Any],
    own_theta: Callable[[], Any],
    own_length: int | None,
    context: int,
    source: str,
    accepted: Collection[str] = (),
) -> tuple[float, RopeScaling | None]:
    """Return theta and YaRN's parameters; None: plain rotation.

    `objects`: the file's "rope_scaling" and "rope_parameters"; the first not empty is used.
    `own_theta` returns the top-level rope_theta or its default; an object's value takes precedence.
    `own_length`: top-level original_max_position_embeddings, which takes precedence over an
    object's. `context`: max_position_embeddings. Raises CheckpointError that names the key.
    """
    objects = {name: found for name, found in objects.items() if found is not None}
    for name, found in objects.items():
        check_object(found, name, model_keys.ROPE, source, accepted)
    # An empty object counts as a missing one.
    name = next((name for name, found in objects.items() if found), "rope_parameters")
    reader = _RopeObject(objects.get(name) or {}, name, source)
    kind = reader.value("rope_type")
    if kind not in ("default", "yarn"):
        key = "rope_type" if "rope_type" in reader.found else "type"
        raise CheckpointError(
            f"{source}: {name}.{key} is {shown(kind)}; only 'default' and 'yarn' are served."
        )
    where, value = (
        (f"{name}.rope_theta", reader.value("rope_theta"))
        if reader.states("rope_theta")
        else ("rope_theta", own_theta())
    )
    theta = converted(value, Theta, source, where, error=CheckpointError)
    if kind == "default":
        return theta, None
    if theta == 1:
        raise CheckpointError(f"{source}: {where} is 1; YaRN needs a larger value.")
    values = {
        key: reader.value(key)
        for key in RopeScaling.__dataclass_fields__
        if key != "original_max_position_embeddings"
    }
    length = "original_max_position_embeddings"
    stated = reader.value(length) if reader.states(length) else context
    values[length] = stated if own_length is None else own_length
    # transformers reads 0 and null as "not stated".
    for key in ("beta_fast", "beta_slow"):
        values[key] = values[key] or model_keys.ROPE[key].default
    if values["truncate"] is None:
        values["truncate"] = False
    return theta, converted(values, RopeScaling, source, name, error=CheckpointError)


@dataclass(frozen=True)
class _RopeObject:
    found: Mapping[str, Any]
    name: str
    source: str

    def states(self, key: str) -> bool:
        return key in self.found and model_keys.ROPE[key].use is not Use.INERT

    def value(self, key: str) -> Any:
        """Return the key's value, that of its alias, or its default. Raises CheckpointError if the
        key is required and missing.
        """
        aliases = [
            other
            for other, row in model_keys.ROPE.items()
            if row.use is Use.ALIAS and row.of == key
        ]
        if model_keys.ROPE[key].use is Use.USED:
            for each in (key, *aliases):
                if each in self.found:
                    return self.found[each]
        default = model_keys.ROPE[key].default
        if default is model_keys.REQUIRED:
            raise CheckpointError(
                f"{self.source}: {self.name}.{key} is missing; {self.name}.rope_type 'yarn' needs it."
            )
        return default
