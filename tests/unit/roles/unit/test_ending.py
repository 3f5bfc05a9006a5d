"""Test the ends of a request, and the history that the sampler needs."""

from __future__ import annotations

import pytest

from hadal.core.messages.generation import Generation
from hadal.core.plans import Grammar, Sampling
from hadal.roles.unit.tokens import finish_of, history_of

BASE = Generation("r", (1, 2), (3,), 5, (9,), 2, Sampling(), 0)


@pytest.mark.parametrize(
    ("index", "token", "finish"),
    [(1, 9, None), (2, 9, "stop"), (2, 8, None), (4, 8, "length"), (4, 9, "stop"), (0, 9, None)],
)
def test_finish(index: int, token: int, finish: str | None) -> None:
    assert finish_of(BASE, index, token) == finish


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_history_goes_only_where_a_penalty_needs_it(field: str) -> None:
    assert history_of(BASE) == ((), ())
    penalised = Generation("r", (1, 2), (3,), 5, (9,), 2, Sampling(**{field: 0.5}), 0)  # type: ignore[arg-type]
    assert history_of(penalised) == ((1, 2), (3,))


def test_a_grammar_needs_the_output_alone() -> None:
    held = Generation("r", (1, 2), (3,), 5, (9,), 2, Sampling(grammar=Grammar("", (9,))), 0)
    assert history_of(held) == ((), (3,))
