"""Waits of tests: the only file in `tests` that reads a clock.

A test waits for a condition and asserts order and outcome, never a time: how long something takes says
how busy the machine is. The deadline is generous and only turns a hang into a failure, which
`tests.stacks` explains with the stack of every process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tests import stacks

T = TypeVar("T")
DEADLINE_S = 180.0
"""Time until a wait counts as a hang. Below pytest's own timeout, so that the message names the wait."""
_FIRST_PERIOD_S, _LAST_PERIOD_S = 0.0005, 0.01
"""Between two looks: what comes at once is seen at once."""


class Hang(AssertionError):
    """A wait that reached its deadline."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.stacks = stacks.dump()
        """Of all processes, as they are now: the test ends some of them before it is reported."""


def wait_until(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Return the first true value of `condition`. Raises Hang, which names `what`, at the deadline."""
    until_s, period_s = time.monotonic() + deadline_s, _FIRST_PERIOD_S
    while not (value := condition()):
        if time.monotonic() > until_s:
            raise Hang(f"after {deadline_s:.0f} s still not: {what}")
        time.sleep(period_s)
        period_s = min(2 * period_s, _LAST_PERIOD_S)
    return value


async def wait_for(
    condition: Callable[[], T | Awaitable[T]], what: str, deadline_s: float = DEADLINE_S
) -> T:
    """Like `wait_until`, in a coroutine; `condition` may be one too."""
    until_s, period_s = time.monotonic() + deadline_s, _FIRST_PERIOD_S
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > until_s:
            raise Hang(f"after {deadline_s:.0f} s still not: {what}")
        await asyncio.sleep(period_s)
        period_s = min(2 * period_s, _LAST_PERIOD_S)


def join(*threads: threading.Thread) -> None:
    """Wait for the ends of threads. Raises Hang if one runs on."""
    for thread in threads:
        thread.join(DEADLINE_S)
        if thread.is_alive():
            raise Hang(f"after {DEADLINE_S:.0f} s {thread.name} still runs")


def deadline(seconds: float = DEADLINE_S) -> float:
    """Monotonic time at which a call shall give up, for code under test that takes a deadline."""
    return time.monotonic() + seconds


def unix_now() -> float:
    """Unix time, for code under test that takes one."""
    return time.time()
