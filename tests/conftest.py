"""For every test: none writes into the home folder of whoever runs it, and torch draws the same
numbers every time. The command line is declared once for all of them.
"""

import functools
import os
import sys

import hypothesis
import pytest
import typer.testing

from hadal.runtime.ledger.store import LEDGER_VARIABLE
from tests.fresh import RUN, VARIABLE

os.environ[LEDGER_VARIABLE] = (
    "off"  # Also for the processes that tests start; those that want a ledger say where.
)
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("hadal", deadline=None)
hypothesis.settings.load_profile("hadal")
# Typer declares every command anew whenever a test calls one, 25 ms of the 30 that most calls take.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """A test that wants others seeds a generator of its own, and says so when it fails."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_report_header() -> str:
    return f"fresh seeds: {VARIABLE}={RUN} draws them again"
