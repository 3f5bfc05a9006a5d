"""Summary of the units' caches: names of the blocks that each unit can reuse from its memory.

The units' Cached messages keep it up to date. It only helps to route prompts. A unit looks up its
real blocks itself, so a lost, duplicated or late message costs time and never a token. Blocks on
disk are not in it: every unit of a deployment reads the same folder, so the disk favours no unit.

The summary keeps half of a name, 8 of its 16 bytes. Two blocks share that half by chance about once
in 10^8 years, and the only harm is a wrong guess.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from hadal.core.cache import NAME_BYTES
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.units import Cached

_STRIDE = NAME_BYTES // 8


@dataclass(slots=True)
class CacheSummary:
    """Cached block names of one unit that is up."""

    epoch: str
    num_blocks: int
    """Largest number of blocks that the unit's pools have had: a limit for the number of names."""
    keys: dict[int, None] = field(default_factory=dict)
    """Halved names in the order in which they were reported; the earliest are forgotten first."""


class FrontCache:
    """Summaries by unit; a unit that is down has none. About 100 bytes per block of the units' pools."""

    def __init__(self) -> None:
        self._units: dict[str, CacheSummary] = {}

    def up(self, unit: str, epoch: str, num_blocks: int) -> None:
        """Add an empty summary for a started or restarted unit, which will report its blocks."""
        self._units[unit] = CacheSummary(epoch, num_blocks)

    def down(self, unit: str) -> None:
        """Remove a unit, since its memory is gone."""
        self._units.pop(unit, None)

    def update(self, message: Cached, num_blocks: int) -> None:
        """Apply a Cached message; ignore one of an earlier process of the unit. `num_blocks` is the
        unit's current number of blocks.
        """
        held = self._units.get(message.unit)
        if held is None or held.epoch != message.epoch:
            return
        held.num_blocks = max(held.num_blocks, num_blocks)
        if message.is_whole:
            held.keys.clear()
        for key in _keys(message.dropped):
            held.keys.pop(key, None)
        held.keys.update(dict.fromkeys(_keys(message.added)))
        # More names than blocks: a message that dropped some was lost.
        for key in list(islice(held.keys, max(0, len(held.keys) - held.num_blocks))):
            del held.keys[key]

    def num_names(self, unit: str) -> int:
        """Return the number of blocks that the unit has reported and not dropped."""
        held = self._units.get(unit)
        return len(held.keys) if held is not None else 0

    def prefixes(self, chain: bytes, units: Iterable[str]) -> dict[str, int]:
        """Return unit -> tokens of the longest cached prefix of the chain's text, if it has one."""
        keys = _keys(chain)
        if not keys:
            return {}
        unit_to_tokens = {}
        for unit in units:
            held = self._units.get(unit)
            num_blocks = _num_first(keys, held.keys) if held is not None else 0
            if num_blocks:
                unit_to_tokens[unit] = num_blocks * BLOCK_TOKENS
        return unit_to_tokens

    def check(self, unit_to_epoch: Mapping[str, str]) -> list[str]:
        """Return problems; empty if just the units that are up have summaries, within their sizes."""
        problems = []
        if {unit: held.epoch for unit, held in self._units.items()} != dict(unit_to_epoch):
            problems.append(
                f"there are summaries of {sorted(self._units)}, and {sorted(unit_to_epoch)} are up"
            )
        for unit, held in self._units.items():
            if len(held.keys) > held.num_blocks:
                problems.append(
                    f"the summary of {unit} has {len(held.keys)} named blocks of {held.num_blocks}"
                )
        return problems


def _keys(names: bytes) -> array[int]:
    return array("Q", names)[::_STRIDE]


def _num_first(keys: array[int], known: Mapping[int, None]) -> int:
    """Return the number of known keys before the first unknown one."""
    for index, key in enumerate(keys):
        if key not in known:
            return index
    return len(keys)
