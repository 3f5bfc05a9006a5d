"""`hadal serve` whose ranks are devices (bench/balance_device); everything else is as it is.

    python -m bench.balance_serve serve --config FILE --run-folder FOLDER

The supervisor starts every process by a module's name; here the ranks' is another. Only units of
several ranks have processes of that kind: leader and gateway, and a unit of one rank, run as
always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hadal.cli import app
from hadal.runtime.process.child import Child
from hadal.runtime.supervisor import supervisor

DEVICE = "bench.balance_device"


class DeviceChild(Child):
    """A child whose module is the bench's where it is a rank."""

    def __init__(self, name: str, role: str, arguments: Sequence[str], *more: Any) -> None:
        module, *rest = arguments
        super().__init__(name, role, [DEVICE if "--rank" in rest else module, *rest], *more)


if __name__ == "__main__":
    supervisor.Child = DeviceChild  # type: ignore[assignment, attr-defined]
    app()
