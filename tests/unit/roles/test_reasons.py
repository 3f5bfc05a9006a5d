"""Test that reasons keep their kind when details follow."""

from hadal.core.plans import NO_TOKEN, NOT_FINITE
from hadal.roles.reasons import (
    BACKOFF_MAX_S,
    BACKOFF_S,
    LEASE_EXPIRED,
    PREEMPTED,
    PULL_FAILED,
    QUEUE_FULL,
    RANK_LOST,
    TOO_LONG,
    answer_to,
    kind_of,
    void,
)


def test_kind() -> None:
    assert kind_of(f"{PULL_FAILED}: the pool is gone: really") == PULL_FAILED
    assert kind_of(PULL_FAILED) == PULL_FAILED


def test_what_the_front_does_about_each() -> None:
    assert answer_to(f"{TOO_LONG}: 900 tokens", 0).is_final
    assert answer_to(void(f"{NO_TOKEN}: logit_bias"), 0).is_final
    assert answer_to(void(f"{NOT_FINITE}: its logits"), 0).is_final
    assert answer_to(void("a rank is slow"), 0) == (False, True, BACKOFF_S)
    assert answer_to(PREEMPTED, 3) == (False, False, 0.0)
    assert answer_to(QUEUE_FULL, 3) == answer_to(LEASE_EXPIRED, 0) == (False, False, 2 * BACKOFF_S)
    assert answer_to(RANK_LOST, 3) == (False, True, 0.0)
    found = [answer_to(PULL_FAILED, n).delay_s for n in (0, 1, 9)]
    assert found == [BACKOFF_S, 2 * BACKOFF_S, BACKOFF_MAX_S]
