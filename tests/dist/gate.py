"""A gate before the steps of a served unit. A test holds a stream in place until its condition is
met, instead of hoping that the answer is long enough.

    test                      unit
      |-- hold(DECODE, 20)      |   20 more steps, then its compute thread waits
      |                         |   (heartbeats continue; a step of a broken formation does not wait)
      |-- ... looks, kills      |
      |-- open() -------------->|   the next step begins

While a unit is held or counted, each of its plans has one pass of the model, so that a test knows
the token at which a step ends. The gate is a file that every process of a server maps. A test's
server is forked from a process that has imported this module (`served`), which wraps `Compute`. A
server started by the usual command has no gate.
"""

from __future__ import annotations

import functools
import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hadal.core.plans import FormPlan, PrefillPlan
from hadal.roles.decode import shape
from hadal.runtime.compute import Compute
from tests.waiting import PATIENCE_S

VARIABLE = "HADAL_TEST_GATE"
"""Environment variable: path of a server's gate."""
PREFILL, DECODE = 0, 1
_LAYOUT = struct.Struct("<qqqq")
"""Pairs for prefill and decode: the hold's number, and the steps it allows (negative: no limit)."""
_PERIOD_S = 0.002
_HELD_MAX_S = PATIENCE_S
"""Longest hold: a test that ended without opening its gate does not block units forever."""


class Gate:
    """Test side of a gate. All units are free at first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(_LAYOUT.pack(0, -1, 0, -1))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def hold(self, kind: int, after: int = 0) -> None:
        """Hold each unit of a kind (PREFILL or DECODE) after `after` more steps."""
        self._set(kind, after)

    def stepping(self, kind: int, condition: Callable[[], bool]) -> Callable[[], bool]:
        """Return a condition for `wait_until` that allows one more step at each check, then returns
        what `condition` does. Few steps run until it is true, on a slow machine too.
        """

        def look() -> bool:
            self.hold(kind, after=1)
            return condition()

        return look

    def open(self) -> None:
        """Release all units."""
        for kind in (PREFILL, DECODE):
            self._set(kind, -1)

    def _set(self, kind: int, num_steps: int) -> None:
        values = list(_LAYOUT.unpack(self._map))
        values[2 * kind : 2 * kind + 2] = [values[2 * kind] + 1, num_steps]
        self._map[:] = _LAYOUT.pack(*values)


class _Unit:
    """Unit side of a gate, in a process of its own."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size, access=mmap.ACCESS_READ)
        self._hold = 0
        self._num_steps = 0

    @property
    def is_counted(self) -> bool:
        """True while a test limits decode steps."""
        return bool(_LAYOUT.unpack(self._map)[2 * DECODE + 1] >= 0)

    def pass_through(self, compute: Any, kind: int, formation: int) -> None:
        """Wait until a step may begin, its formation is outdated, or _HELD_MAX_S is over."""
        until_s = time.monotonic() + _HELD_MAX_S
        while time.monotonic() < until_s and compute._formation <= formation:
            hold, num_allowed = _LAYOUT.unpack(self._map)[2 * kind : 2 * kind + 2]
            if hold != self._hold:
                self._hold, self._num_steps = hold, 0
            if num_allowed < 0 or self._num_steps < num_allowed:
                break
            time.sleep(_PERIOD_S)
        self._num_steps += 1


def install(path: str) -> None:
    """Wrap `Compute` so that every step of this process and its forks passes the gate."""
    plain_run, plain_passes = Compute._run, shape.passes_of
    opened = functools.lru_cache(maxsize=1)(lambda: _Unit(path))

    def run(self: Any, item: Any) -> Any:
        plan, _, formation = item
        if not isinstance(plan, FormPlan):
            kind = PREFILL if isinstance(plan, PrefillPlan) else DECODE
            opened().pass_through(self, kind, formation)
        return plain_run(self, item)

    def passes(pass_s: float) -> int:
        return 1 if opened().is_counted else plain_passes(pass_s)

    Compute._run = run  # type: ignore[method-assign]
    shape.passes_of = passes
