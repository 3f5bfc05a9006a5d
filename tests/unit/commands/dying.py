"""A pool process that ends abruptly, as on a machine without free memory."""

from __future__ import annotations

import os

from hadal.lab.sim.day.study import Study


def die(study: Study) -> None:
    """End the process immediately: no result, no exception."""
    os._exit(9)
