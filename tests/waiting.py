"""Waits of tests. Other tests read no clock (tests/test_tidy.py has the exceptions).

A test waits for a condition and asserts order and outcome, never a time, because durations depend
on the machine's load. The deadline is generous and only turns a hang into a failure, which
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
DEADLINE_S = 600.0
"""Time after which a wait counts as hanging. Below pytest's timeout, so that the message names it."""
PATIENCE_S = 2 * DEADLINE_S
"""Limit for what runs beside a wait (requests, held steps, collectives): the wait fails first, and its
error says more.
"""
_FIRST_PERIOD_S, _LAST_PERIOD_S = 0.0005, 0.01
"""First and longest pause between two checks, seconds; a condition that is true soon is noticed soon."""


class Hang(AssertionError):
    """A wait that reached its deadline."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.stacks = stacks.dump()
        """Stacks of all processes now, because the test ends some of them before its report."""


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
    """Return the first true value of `condition`, a function or coroutine function. Raises Hang, which
    names `what`, at the deadline.
    """
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
    """Wait for the ends of threads. Raises Hang if one still runs at the deadline."""
    for thread in threads:
        thread.join(DEADLINE_S)
        if thread.is_alive():
            raise Hang(f"after {DEADLINE_S:.0f} s {thread.name} still runs")


def deadline(seconds: float = DEADLINE_S) -> float:
    """Return a monotonic time, `seconds` from now, for code under test that takes a deadline."""
    return time.monotonic() + seconds


def unix_now() -> float:
    """Return the Unix time, for code under test that takes one."""
    return time.time()
