"""The number of speculative tokens: the best is found, kept, and dropped when it no longer pays."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from hadal.core.drafts import compared
from hadal.policy.drafts import PROBE_STEPS, DraftChooser


class Machine:
    """Simulated steps: their time depends on the number of drafts, and chance decides which are right."""

    def __init__(self, seconds: tuple[float, ...], seed: int, noise: float = 0.05) -> None:
        self.seconds = seconds
        self.random = Random(seed)
        self.noise = noise
        self.used: Counter[int] = Counter()
        self.time_s = self.num_tokens = 0.0
        self._checked = 0

    def run(self, chooser: DraftChooser, num_steps: int, right: float, requests: int = 1) -> None:
        for _ in range(num_steps):
            drafts = chooser.choose(requests)
            self.used[drafts] += 1
            # A step checks the drafts of the last one and makes new ones.
            seconds = (self.seconds[self._checked] + self.seconds[drafts]) / 2
            seconds *= 1 + self.noise * self.random.gauss(0.0, 1.0)
            num_right = [0] * requests
            for request in range(requests):
                while num_right[request] < self._checked and self.random.random() < right:
                    num_right[request] += 1
            seen = compared(np.full(requests, self._checked), np.array(num_right))
            chooser.done(requests, self._checked, drafts, [seconds], seen)
            self._checked = drafts
            self.time_s += seconds
            self.num_tokens += requests + sum(num_right)


def best(seconds: tuple[float, ...], right: float) -> float:
    """Return the tokens/s of a request with the best fixed number of drafts."""
    return max(
        sum(right**place for place in range(num + 1)) / seconds[num] for num in range(len(seconds))
    )


@pytest.mark.promise(
    "Every number is tried now and then, for 4 to 20 steps; a number that is 2 % better is taken."
)
@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("seconds", [(1.0, 1.2, 1.4), (1.0, 1.5, 2.0), (1.0, 1.9, 2.8)])
def test_the_best_number_is_found_and_trials_cost_little(
    seconds: tuple[float, ...], right: float, requests: int
) -> None:
    machine, chooser = Machine(seconds, seed=1), DraftChooser(2)
    machine.run(chooser, 400, right, requests)
    machine.time_s = machine.num_tokens = 0.0
    machine.run(chooser, 4000, right, requests)
    reached = machine.num_tokens / machine.time_s / requests / best(seconds, right)
    assert reached >= 0.975, machine.used


@pytest.mark.promise(
    "Every number is tried now and then, for 4 to 20 steps; a number that is 2 % better is taken."
)
def test_nothing_right_costs_one_percent_at_most() -> None:
    machine, chooser = Machine((1.0, 1.6, 2.2), seed=2), DraftChooser(2)
    machine.run(chooser, 400, 0.0)
    machine.time_s = machine.num_tokens = 0.0
    machine.run(chooser, 4000, 0.0)
    assert machine.num_tokens / machine.time_s >= 0.99


def test_drafts_are_given_up_when_they_become_wrong_and_come_again() -> None:
    machine, chooser = Machine((1.0, 1.3, 1.6), seed=3), DraftChooser(2)
    machine.run(chooser, 600, 0.97)
    assert machine.used[2] > 400
    machine.used.clear()
    machine.time_s = machine.num_tokens = 0.0
    machine.run(chooser, 2000, 0.0)
    assert machine.used[0] > 1850
    assert machine.num_tokens / machine.time_s >= 0.97
    machine.used.clear()
    machine.run(chooser, 1500, 0.97)
    assert machine.used[2] > 800


@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("seed", range(5))
def test_a_fall_is_noticed_within_steps(requests: int, seed: int) -> None:
    """Make drafts wrong after a while: at most ten steps' time is lost, not the length of the memory."""
    machine, chooser = Machine((1.0, 1.6, 2.2), seed), DraftChooser(2)
    machine.run(chooser, 600, 0.97, requests)
    machine.time_s = machine.num_tokens = 0.0
    machine.run(chooser, 60, 0.0, requests)
    assert machine.time_s - machine.num_tokens / requests <= 10.0


def test_a_fixed_number_is_always_made() -> None:
    chooser = DraftChooser(3, is_fixed=True)
    assert {chooser.choose(number) for number in range(50)} == {3}
    none = DraftChooser(0)
    assert {none.choose(number) for number in range(50)} == {0}
    none.done(1, 0, 0, [0.1], ())


def test_sizes_are_learned_apart() -> None:
    """Learn by batch size: the best number for one request is not the best for many."""
    small = Machine((1.0, 1.1, 1.2), 4)
    large = Machine((1.0, 2.0, 3.0), 4)
    chooser = DraftChooser(2)
    for _ in range(30):
        small.run(chooser, 60, 0.9, 1)
        large.run(chooser, 60, 0.9, 32)
    assert small.used[2] > 1200, small.used
    assert large.used[0] > 1200, large.used


def test_what_was_tried_and_right_is_counted_by_place() -> None:
    chooser = DraftChooser(2)
    chooser.done(4, 2, 2, [0.1], ((4, 3), (3, 1)))
    chooser.done(4, 2, 0, [0.1], ((4, 2), (2, 2)))
    assert (chooser.num_tried, chooser.num_right) == ([8, 5], [5, 3])
    assert 1.0 < chooser.tokens(1) < chooser.tokens(2) < 3.0


def test_a_trial_is_judged_by_its_own_drafts_however_many_steps_are_under_way() -> None:
    """Report steps three plans late: accepted drafts of the current number do not count for one more."""
    chooser, under_way = DraftChooser(2), [0, 0, 0]
    for _ in range(60):  # A first draft is always right and pays; a second never is.
        under_way.append(chooser.choose(1))
        checked, made = under_way[-4], under_way[-3]
        seconds = (1.0, 1.1, 1.9)[checked]
        seen = compared(np.array([checked]), np.array([min(checked, 1)]))
        chooser.done(1, checked, made, [seconds], seen)
    last_trial = [1, *under_way[3:], 1]
    lengths = [
        len(run) for run in "".join(map(str, last_trial)).replace("0", "1").split("1") if run
    ]
    assert lengths
    assert max(lengths) <= PROBE_STEPS


def test_a_trial_lasts_as_many_steps_in_plans_of_several() -> None:
    """Plan several steps at once: a plan repeats the choice, and a trial ends with its last step."""
    chooser, made = DraftChooser(1), []
    while len(made) < 400:
        drafts = chooser.choose(1)
        steps = min(8, chooser.num_passes_left)
        chooser.repeated(1, steps - 1)
        made += [drafts] * steps
        nothing = compared(np.array([drafts]), np.array([0]))
        chooser.done(1, drafts, drafts, [1.0 + drafts] * steps, nothing)
    trials = [len(run) for run in "".join(map(str, made)).split("0") if run]
    assert trials
    assert set(trials) == {PROBE_STEPS}
