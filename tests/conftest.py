"""Set-up for every test. No test writes into its user's home folder, torch draws the same numbers
each time, and the command line is declared once for all tests. The level decides which tests run
and how large they are (`levels`). A test that hangs fails with the stacks of all processes
(`stacks`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import typer.testing

from hadal.runtime.ledger.address import LEDGER_VARIABLE
from tests import levels, needs, stacks
from tests.fresh import RUN, VARIABLE
from tests.waiting import Hang

os.environ[LEDGER_VARIABLE] = (
    "off"  # Also for processes that tests start; tests that want a ledger set its place.
)
stacks.mark()
levels.set_examples()
# Typer declares every command again at each call in a test: 25 ms of the 30 ms that most calls
# take.
typer.testing._get_command = functools.cache(typer.testing._get_command)
HANGS = (Hang, TimeoutError, subprocess.TimeoutExpired, httpx.TimeoutException)
TIMED_OUT = "from pytest-timeout"


def pytest_configure(config: pytest.Config) -> None:
    levels.declare(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    levels.choose(config, items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            needs.need(name)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, HANGS) or TIMED_OUT in str(error):
        found = error.stacks if isinstance(error, Hang) else stacks.dump()
        report.sections.append(("Stacks of all processes", found))
    return report


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seed torch. A test that wants other numbers seeds its own generator, and prints the seed."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_report_header() -> str:
    return f"fresh seeds: {VARIABLE}={RUN} draws them again"
