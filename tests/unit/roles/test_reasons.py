"""Reasons keep their kind under details."""

from hadal.roles.reasons import PULL_FAILED, kind_of


def test_kind() -> None:
    assert kind_of(f"{PULL_FAILED}: the pool is gone: really") == PULL_FAILED
    assert kind_of(PULL_FAILED) == PULL_FAILED
