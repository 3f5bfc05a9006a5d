"""Levels of the suite: which tests a run includes, and how large they are.

    test    `make test`, 9 minutes on two quiet cores: one case of every promise
    more    `make test-more`, 30 minutes: the tests marked `more`, and properties with more examples
    all     `make test-all`, hours: everything, at full sizes

Without a level (`pytest FILE`) all tests run except those marked `full`, at the sizes of `test`.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

VARIABLE = "HADAL_LEVEL"
LEVEL = os.environ.get(VARIABLE, "")
LEVELS = ("test", "more", "all")
FULL = LEVEL == "all"
MORE = LEVEL in ("more", "all")
NUM_SEEDS = int(os.environ.get("HADAL_SEEDS", "20" if FULL else "5" if MORE else "0"))
"""Number of fresh seeds, besides the fixed ones, for a test that runs worlds."""
EXAMPLES = {"all": 2000, "more": 200}
"""Level -> number of examples that hypothesis draws for each property test."""
FEW_EXAMPLES = 20
SLOW_S = 5.0
"""Seconds on a quiet machine above which a test has the mark `slow`, with a reason."""
MARKS = (
    "more(why): left out of `make test`, run by `make test-more`",
    "full: sizes that take minutes; run by `make test-all` only",
    f"slow(why): takes more than {SLOW_S:.0f} s on a quiet machine",
    "campaign(why): run by `make test` and, larger, by `make test-more`",
    "promise(sentence): holds this sentence of README or docs (docs/testing.md)",
    "needs(tool, ...): left out where a tool is missing (tests/needs.py)",
)


def set_examples() -> None:
    """Load the one profile of hypothesis, without a deadline: times depend on the machine's load."""
    hypothesis.settings.register_profile(
        "hadal", deadline=None, max_examples=EXAMPLES.get(LEVEL, FEW_EXAMPLES)
    )
    hypothesis.settings.load_profile("hadal")


def is_taken(item: pytest.Item) -> bool:
    """Return whether the level includes a test."""
    is_more, is_full = (item.get_closest_marker(name) is not None for name in ("more", "full"))
    if LEVEL == "all":
        return True
    if LEVEL == "more":
        has_sizes = item.get_closest_marker("campaign") is not None or _is_property(item)
        return (is_more or has_sizes) and not is_full
    return not is_full and not (LEVEL == "test" and is_more)


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reduce `items` to the tests of the level."""
    taken = [item for item in items if is_taken(item)]
    left = [item for item in items if not is_taken(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = taken


def declare(config: pytest.Config) -> None:
    """Declare the marks."""
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
