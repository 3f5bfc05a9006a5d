"""For every test: none writes into the home folder of whoever runs it, and torch draws the same
numbers every time.
"""

import os
import sys

import pytest

from hadal.runtime.ledger.store import LEDGER_VARIABLE
from tests.fresh import RUN, VARIABLE

os.environ[LEDGER_VARIABLE] = (
    "off"  # Also for the processes that tests start; those that want a ledger say where.
)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """A test that wants others seeds a generator of its own, and says so when it fails."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_report_header() -> str:
    return f"fresh seeds: {VARIABLE}={RUN} draws them again"
