"""Seeds that are new in every run, and the same again when the run is repeated.

    HADAL_FRESH=NUMBER make test        draws what the run with this number drew

pytest prints the number at its head. A draw depends on it, on the place in the file and on the
test, not on which other tests run, so a test alone draws what it drew among all.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from random import Random, SystemRandom

VARIABLE = "HADAL_FRESH"
ANSWERS = "HADAL_ANSWERS"
"""Environment variable: a folder of the run in which its processes keep what the plain loop answered,
each for the others. Without it each process computes for itself.
"""
FULL = os.environ.get("HADAL_FULL") == "1"
"""Sizes of `make test-all`; `make test` runs a slice of the same tests."""
NUM_SEEDS = int(os.environ.get("HADAL_SEEDS", "5" if FULL else "3"))
"""Fresh ones beside the fixed ones, of a test that runs worlds."""
RUN = os.environ.get(VARIABLE) or str(SystemRandom().randrange(2**48))
os.environ[VARIABLE] = (
    RUN  # For the other processes of this run (pytest-xdist): they draw the same.
)
_num_drawn: Counter[str] = Counter()


def fresh() -> Random:
    """A generator for one draw, or for all of a test's."""
    caller = sys._getframe(1)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    caller_name = f"{caller.f_globals['__name__']}:{caller.f_lineno} {test}"
    _num_drawn[caller_name] += 1
    return Random(f"{RUN} {caller_name} {_num_drawn[caller_name]}")
