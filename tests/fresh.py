"""Seeds that are new in every run, and equal when a run is repeated.

    HADAL_FRESH=NUMBER make test        draws what the run with this number drew

pytest prints the number in its header. A draw depends on it, on the place in the file and on the
test, not on which other tests run. A test therefore draws the same numbers alone and among all.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from random import Random, SystemRandom
from types import FrameType

import pytest

from tests.levels import FULL, NUM_SEEDS

VARIABLE = "HADAL_FRESH"
ANSWERS = "HADAL_ANSWERS"
"""Environment variable: the run's folder in which its processes share the answers of the plain
loop. Without it each process computes its own.
"""
RUN = os.environ.get(VARIABLE) or str(SystemRandom().randrange(2**48))
os.environ[VARIABLE] = (
    RUN  # Other processes of this run (pytest-xdist) must draw the same numbers as this one.
)
_num_drawn: Counter[str] = Counter()


def fresh() -> Random:
    """Return a generator for one draw, or for all draws of a test."""
    return _generator(sys._getframe(1))


def seeds(num: int, num_more: int, num_full: int = 0) -> list[object]:
    """Return a test's seeds: in `make test` those below `num`; in `make test-more` the next ones, below
    `num_more`, and NUM_SEEDS fresh ones; in `make test-all` all of these and those below `num_full`.
    """
    more, new = pytest.mark.more("further seeds"), pytest.mark.campaign("fresh seeds")
    random = _generator(sys._getframe(1))
    return [
        *(pytest.param(seed) for seed in range(num)),
        *(pytest.param(seed, marks=more) for seed in range(num, num_more)),
        *(pytest.param(seed) for seed in range(num_more, num_full if FULL else 0)),
        *(pytest.param(random.randrange(2**40), marks=new) for _ in range(NUM_SEEDS)),
    ]


def _generator(caller: FrameType) -> Random:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    caller_name = f"{caller.f_globals['__name__']}:{caller.f_lineno} {test}"
    _num_drawn[caller_name] += 1
    return Random(f"{RUN} {caller_name} {_num_drawn[caller_name]}")
