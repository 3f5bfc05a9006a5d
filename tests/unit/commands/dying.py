"""What a process of a pool does if the machine has no memory left for it."""

from __future__ import annotations

import os

from hadal.lab.sim.day.study import Study


def die(study: Study) -> None:
    """End at once: no result, no exception."""
    os._exit(9)
