"""The failure detector: when a silent process is given up, and what excuses its silence."""

from __future__ import annotations

import pytest

from hadal.policy.suspicion import (
    MOST,
    TOGETHER,
    UNSEEN,
    Silence,
    are_all_late,
    is_frozen,
    pause_s,
    start_is_over,
)

TIMEOUT_S = 1.5


@pytest.mark.promise(
    "Time without a processor does not count, nor does time in which the failure "
    "detector itself did not run."
)
@pytest.mark.parametrize(
    ("silent_s", "starved", "is_given_up"),
    [
        (1.4, 0.0, False),
        (1.6, 0.0, True),
        (1.6, 0.2, False),
        (10.0, 0.8, True),
        (10.0, 0.9, False),
        (10.0, 7.0, False),  # Waits of many threads add up.
        (MOST * TIMEOUT_S + 0.1, 7.0, True),
    ],
)
def test_time_without_a_processor_does_not_count(
    silent_s: float, starved: float, is_given_up: bool
) -> None:
    assert is_frozen(Silence(silent_s, starved), TIMEOUT_S) == is_given_up


@pytest.mark.promise(
    "Processes that are all late at the same time get more time; a stopped process "
    "gets none beyond its timeout."
)
def test_a_stopped_process_is_excused_by_nothing() -> None:
    stopped = Silence(1.6, 1.0, is_stopped=True)
    assert is_frozen(stopped, TIMEOUT_S, are_all_late=True)
    assert not is_frozen(Silence(1.4, 0.0, is_stopped=True), TIMEOUT_S)


def test_a_host_that_does_not_answer_is_waited_for() -> None:
    assert not is_frozen(Silence(UNSEEN * TIMEOUT_S - 0.1), TIMEOUT_S)
    assert is_frozen(Silence(UNSEEN * TIMEOUT_S + 0.1), TIMEOUT_S)


@pytest.mark.promise(
    "Processes that are all late at the same time get more time; a stopped process "
    "gets none beyond its timeout."
)
def test_those_that_are_late_together_are_waited_for() -> None:
    assert are_all_late([0.7, 0.9, 5.0], TIMEOUT_S)
    assert not are_all_late([0.7, 0.9, 0.1], TIMEOUT_S)
    assert not are_all_late([5.0], TIMEOUT_S)  # A single process has none to be compared with.
    assert not is_frozen(Silence(TOGETHER * TIMEOUT_S - 0.1, 0.0), TIMEOUT_S, are_all_late=True)
    assert is_frozen(Silence(TOGETHER * TIMEOUT_S + 0.1, 0.0), TIMEOUT_S, are_all_late=True)


def test_a_judge_that_was_not_called_stood_still_itself() -> None:
    assert pause_s(0.12, 0.1) == 0.0
    assert pause_s(4.0, 0.1) == 4.0


def test_a_start_takes_as_long_as_it_could_not_run() -> None:
    assert start_is_over(61.0, 0.0, 60.0)
    assert not start_is_over(200.0, 150.0, 60.0)
    assert start_is_over(TOGETHER * 60.0 + 1.0, 1e6, 60.0)
