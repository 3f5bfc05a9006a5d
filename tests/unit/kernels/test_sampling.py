"""Drawing tokens against its slow twin: the same tokens, whatever is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hadal.kernels import library, sampling
from hadal.reference import sampling as twin
from hadal.reference.sampling import (
    DRAWN,
    NOT_FINITE,
    NOTHING_LEFT,
    SLOT,
    TOKEN_VALUE,
    SlotTable,
)

pytestmark = pytest.mark.usefixtures("built")

CHOICES: dict[str, list[float]] = {
    "top_p": [1, 1, 1, 0.999999, 0.9, 0.5, 1e-9, 5e-324],
    "temperature": [0, 1e-4, 0.3, 1, 1, 2],
    "min_p": [0, 0, 0.05, 1],
    "presence": [0, 0, 0.5, -2, 2],
    "frequency": [0, 0, 0.3, -2, 2],
    "repetition": [1, 1, 1.1, 0.01, 10],
    "top_k": [0, 0, 1, 2, 50, 1000],
    "num_logprobs": [-1, 0, 1, 5, 20],
}
NUM_ROWS = 16


def table_of(rng: np.random.Generator, vocabulary: int, num_slots: int = NUM_ROWS) -> SlotTable:
    """Slots that ask for all at once, or for some of it."""
    slots_S = np.zeros(num_slots, SLOT)
    for name, values in CHOICES.items():
        slots_S[name] = rng.choice(values, num_slots)
    slots_S["seed"] = rng.integers(0, 2**64, num_slots, dtype=np.uint64)
    slots_S["top_k"] = np.minimum(slots_S["top_k"], vocabulary - 1)
    slots_S["num_logprobs"] = np.minimum(slots_S["num_logprobs"], vocabulary)
    slots_S["num_bias"] = rng.choice([0, 0, 3], num_slots)
    slots_S["bias_begin"] = slots_S["num_bias"].cumsum() - slots_S["num_bias"]
    bias = np.zeros(slots_S["num_bias"].sum(), TOKEN_VALUE)
    bias["token"] = rng.integers(0, vocabulary, len(bias))
    bias["value"] = rng.choice([-np.inf, -100, 0.1, 5], len(bias))
    counts_SV = torch.from_numpy(rng.integers(-40, 9, (num_slots, vocabulary), dtype=np.int32))
    counts_SV.clamp_(min=0)
    seen_SV = (counts_SV > 0) | torch.from_numpy(rng.random((num_slots, vocabulary)) < 0.01)
    return SlotTable(slots_S, bias, counts_SV, seen_SV)


def plain_table(**columns: float) -> SlotTable:
    """One slot that asks for nothing but `columns`."""
    slots_S = np.zeros(1, SLOT)
    for name, value in ({"top_p": 1.0, "repetition": 1.0, "num_logprobs": 3} | columns).items():
        slots_S[name] = value
    return SlotTable(slots_S, np.empty(0, TOKEN_VALUE))


def logits_of(rng: np.random.Generator, kind: str, vocabulary: int) -> Tensor:
    x_BV = torch.from_numpy(rng.standard_normal((NUM_ROWS, vocabulary), dtype=np.float32))
    if kind == "ties":
        return (x_BV * 2).round()
    if kind == "broken":
        x_BV[torch.from_numpy(rng.random(x_BV.shape) < 0.7)] = -torch.inf
        x_BV[0], x_BV[1, -1], x_BV[2, 0] = -torch.inf, torch.nan, torch.inf
        return x_BV
    return x_BV * {"flat": 0.01, "equal": 0.0, "usual": 3.0, "huge": 1e4}[kind]


def assert_equal_draws(
    logits_BV: Tensor, slots_B: np.ndarray, indices_B: np.ndarray, table: SlotTable
) -> np.ndarray:
    """The status of each row."""
    (ours, our_best), (expected, best) = (
        module.sample(logits_BV, slots_B, indices_B, table) for module in (sampling, twin)
    )
    assert ours["status"].tolist() == expected["status"].tolist()
    assert ours["token"].tolist() == expected["token"].tolist()
    num_best_B = table.slots_S["num_logprobs"][slots_B]
    for row in np.flatnonzero((ours["status"] == DRAWN) & (num_best_B >= 0)):
        count = num_best_B[row]
        assert ours["logprob"][row] == pytest.approx(expected["logprob"][row], rel=1e-5, abs=1e-5)
        assert our_best["token"][row, :count].tolist() == best["token"][row, :count].tolist()
        assert our_best["value"][row, :count] == pytest.approx(
            best["value"][row, :count], rel=1e-5, abs=1e-5
        )
    return ours["status"]


@pytest.mark.parametrize("kind", ["usual", "flat", "equal", "ties", "huge", "broken"])
@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 50, 301, 1000, 4097])
def test_sample_equals_its_twin(kind: str, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(2):
        table = table_of(rng, vocabulary)
        slots_B, indices_B = rng.permutation(NUM_ROWS), rng.integers(0, 10_000, NUM_ROWS)
        status = assert_equal_draws(logits_of(rng, kind, vocabulary), slots_B, indices_B, table)
        if kind == "broken":
            assert (status[:3] == NOT_FINITE).all()


@pytest.mark.parametrize("kind", ["usual", "flat", "equal"])
@pytest.mark.parametrize("vocabulary", [8_192, 129_280])
def test_long_rows_equal_their_twin(kind: str, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    table, x_BV = table_of(rng, vocabulary), logits_of(rng, kind, vocabulary)
    assert_equal_draws(x_BV, np.arange(NUM_ROWS), np.arange(NUM_ROWS), table)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-9},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1e-4},
    ],
)
def test_what_leaves_one_token_draws_the_best(columns: dict[str, float]) -> None:
    x_BV = logits_of(np.random.default_rng(0), "usual", 1000)
    slots_B = np.zeros(NUM_ROWS, np.int64)
    assert_equal_draws(x_BV, slots_B, np.arange(NUM_ROWS), plain_table(**columns))
    rows_B, _ = sampling.sample(x_BV, slots_B, np.arange(NUM_ROWS), plain_table(**columns))
    assert rows_B["token"].tolist() == x_BV.argmax(-1).tolist()


def test_the_only_word_there_is_is_drawn() -> None:
    x_BV = torch.full((1, 300), -torch.inf)
    x_BV[0, 77] = -1e30
    table = plain_table(temperature=1.0, top_p=0.9, top_k=9)
    rows_B, best_BN = sampling.sample(x_BV, np.zeros(1, np.int64), np.zeros(1, np.int64), table)
    assert rows_B[0].item() == (77, 0.0, DRAWN)
    assert best_BN[0].tolist() == [(77, 0.0), (0, -np.inf), (1, -np.inf)]


def test_greedy_takes_the_first_of_equals() -> None:
    x_BV = torch.zeros(1, 301)
    x_BV[0, [300, 40, 41]] = 2.0
    rows_B, best_BN = sampling.sample(
        x_BV, np.zeros(1, np.int64), np.zeros(1, np.int64), plain_table()
    )
    assert rows_B["token"].tolist() == [40]
    assert best_BN["token"].tolist() == [[40, 41, 300]]


def test_a_row_that_its_slot_leaves_nothing() -> None:
    table = plain_table(temperature=1.0, num_bias=50)
    table.bias = np.array([(token, -np.inf) for token in range(50)], TOKEN_VALUE)
    x_BV, zeros = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)), np.zeros(2, int)
    x_BV[1, 3] = torch.nan
    assert assert_equal_draws(x_BV, zeros, zeros, table).tolist() == [NOTHING_LEFT, NOT_FINITE]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_is_the_same_alone_and_with_others(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, log-probabilities too; rows may lie apart, and be of one slot."""
    team = library.team(num_threads)
    monkeypatch.setattr(library, "team", lambda: team)
    rng = np.random.default_rng(3)
    table, wide_BV = table_of(rng, 1000), logits_of(rng, "flat", 1100)
    x_BV, slots_B, indices_B = (
        wide_BV[:, 30:1030],
        rng.integers(0, 9, NUM_ROWS),
        np.arange(NUM_ROWS),
    )
    table.slots_S["num_logprobs"] = 3
    rows_B, best_BN = sampling.sample(x_BV, slots_B, indices_B, table)
    for b in range(NUM_ROWS):
        one = slice(b, b + 1)
        row, best = sampling.sample(x_BV[one].clone(), slots_B[one], indices_B[one], table)
        assert row.tobytes() == rows_B[one].tobytes()
        assert best.tobytes() == best_BN[one].tobytes()


def test_what_does_not_fit_is_refused() -> None:
    x_BV, zeros = torch.zeros(2, 50), np.zeros(2, np.int64)
    table = plain_table()
    for slots_B in (zeros[:1], zeros.astype(np.int32), zeros - 1):
        with pytest.raises(ValueError, match=r"slots_B|row index"):
            sampling.sample(x_BV, slots_B, zeros, table)
    table.seen_SV = torch.zeros(1, 49, dtype=torch.bool)
    with pytest.raises(ValueError, match="seen_SV"):
        sampling.sample(x_BV, zeros, zeros, table)
