"""Drawing tokens against the slow twin: the same tokens for any sampling parameters."""

from __future__ import annotations

from types import ModuleType

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
    RowMasks,
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
    """Draw slots, each with many random sampling parameters at once."""
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
    """Return one slot without parameters other than `columns`."""
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


def draw_rows(
    module: ModuleType,
    logits_BV: Tensor,
    slots_B: np.ndarray,
    indices_B: np.ndarray,
    table: SlotTable,
    masks: RowMasks | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw each row by itself, with slot `slots_B[b]` and index `indices_B[b]`; a slot may recur."""
    slots_S = table.slots_S[slots_B]
    slots_S["index"] = indices_B
    history = [
        None if of_slots is None else of_slots[torch.from_numpy(slots_B)]
        for of_slots in (table.counts_SV, table.seen_SV)
    ]
    each = np.arange(len(slots_B))
    rows = SlotTable(slots_S, table.bias, *history)
    num_B, at_N, rows_N, best_NK = module.sample(
        logits_BV, each, np.ones_like(each), each, rows, masks
    )
    assert num_B.tolist() == [1] * len(each)
    assert at_N.tolist() == each.tolist()
    assert (rows.slots_S["index"] - indices_B).tolist() == (rows_N["status"] == DRAWN).tolist()
    return rows_N, best_NK


def assert_equal_draws(
    logits_BV: Tensor,
    slots_B: np.ndarray,
    indices_B: np.ndarray,
    table: SlotTable,
    masks: RowMasks | None = None,
) -> np.ndarray:
    """Compare the draws with the twin's; return the status of each row."""
    (ours, our_best), (expected, best) = (
        draw_rows(module, logits_BV, slots_B, indices_B, table, masks)
        for module in (sampling, twin)
    )
    assert ours["status"].tolist() == expected["status"].tolist()
    assert ours["token"].tolist() == expected["token"].tolist()
    num_best_B = table.slots_S["num_logprobs"][slots_B]
    for row in np.flatnonzero((ours["status"] == DRAWN) & (num_best_B >= 0)):
        count = num_best_B[row]
        assert ours["logprob"][row] == pytest.approx(expected["logprob"][row], rel=1e-5, abs=1e-5)
        assert our_best["token"][row, :count].tolist() == best["token"][row, :count].tolist()
        found = our_best["value"][row, :count]
        assert found == pytest.approx(best["value"][row, :count], rel=1e-5, abs=1e-5)
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


def masks_of(rng: np.random.Generator, vocabulary: int) -> tuple[RowMasks, np.ndarray]:
    """Return masks that rows share (some rows have none), and the allowed tokens by row."""
    is_allowed_MV = rng.random((5, vocabulary)) < rng.choice([0.02, 0.5, 1.0], (5, 1))
    of_R = rng.integers(-1, 5, NUM_ROWS)
    num_words = -(-vocabulary // 32)
    padded_MV = np.zeros((5, 32 * num_words), np.bool_)
    padded_MV[:, :vocabulary] = is_allowed_MV
    bits_MW = np.packbits(padded_MV, axis=1, bitorder="little").view(np.uint32)
    is_allowed_RV = np.where((of_R >= 0)[:, None], is_allowed_MV[of_R], True)
    return RowMasks(bits_MW, of_R), is_allowed_RV


@pytest.mark.parametrize("kind", ["usual", "flat", "equal", "ties", "broken"])
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 300, 1536, 4097])
def test_masked_rows_equal_their_twin_and_draw_what_is_allowed(kind: str, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(3):
        table, x_BV = table_of(rng, vocabulary), logits_of(rng, kind, vocabulary)
        masks, is_allowed_RV = masks_of(rng, vocabulary)
        slots_B, indices_B = rng.permutation(NUM_ROWS), rng.integers(0, 10_000, NUM_ROWS)
        status = assert_equal_draws(x_BV, slots_B, indices_B, table, masks)
        rows_B, _ = draw_rows(sampling, x_BV, slots_B, indices_B, table, masks)
        is_drawn = status == DRAWN
        assert is_allowed_RV[is_drawn.nonzero()[0], rows_B["token"][is_drawn]].all()
        assert (status[~is_allowed_RV.any(1)] != DRAWN).all()


@pytest.mark.promise(
    "If the answer without a schema would satisfy it, the constrained answer has the same tokens."
)
def test_a_mask_that_allows_what_is_drawn_changes_nothing() -> None:
    """Mask all but the drawn token: log-probabilities stay, too; they ignore masks."""
    rng = np.random.default_rng(5)
    table, x_BV = table_of(rng, 300), logits_of(rng, "usual", 300)
    slots = np.arange(NUM_ROWS)
    table.slots_S["temperature"], table.slots_S["num_logprobs"] = 0.0, 3
    free, best = draw_rows(sampling, x_BV, slots, slots, table)
    bits_MW = np.zeros((NUM_ROWS, 10), np.uint32)
    bits_MW[slots, free["token"] // 32] = np.uint32(1) << (free["token"] % 32).astype(np.uint32)
    rows, other = draw_rows(sampling, x_BV, slots, slots, table, RowMasks(bits_MW, slots))
    assert rows.tobytes() == free.tobytes()
    assert other.tobytes() == best.tobytes()


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
    rows_B, _ = draw_rows(sampling, x_BV, slots_B, np.arange(NUM_ROWS), plain_table(**columns))
    assert rows_B["token"].tolist() == x_BV.argmax(-1).tolist()


def test_the_only_word_there_is_is_drawn() -> None:
    x_BV = torch.full((1, 300), -torch.inf)
    x_BV[0, 77] = -1e30
    table = plain_table(temperature=1.0, top_p=0.9, top_k=9)
    zeros = np.zeros(1, np.int64)
    rows_B, best_BN = draw_rows(sampling, x_BV, zeros, zeros, table)
    assert rows_B[0].item() == (77, 0.0, DRAWN)
    assert best_BN[0].tolist() == [(77, 0.0), (0, -np.inf), (1, -np.inf)]


def test_greedy_takes_the_first_of_equals() -> None:
    x_BV = torch.zeros(1, 301)
    x_BV[0, [300, 40, 41]] = 2.0
    zeros = np.zeros(1, np.int64)
    rows_B, best_BN = draw_rows(sampling, x_BV, zeros, zeros, plain_table())
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
    """Compare bits and log-probabilities; rows may be strided, and several may be of one slot."""
    team = library.team(num_threads)
    monkeypatch.setattr(library, "team", lambda: team)
    rng = np.random.default_rng(3)
    table, wide_BV = table_of(rng, 1000), logits_of(rng, "flat", 1100)
    x_BV = wide_BV[:, 30:1030]
    slots_B = rng.integers(0, 9, NUM_ROWS)
    indices_B = np.arange(NUM_ROWS)
    table.slots_S["num_logprobs"] = 3
    rows_B, best_BN = draw_rows(sampling, x_BV, slots_B, indices_B, table)
    for b in range(NUM_ROWS):
        one = slice(b, b + 1)
        row, best = draw_rows(sampling, x_BV[one].clone(), slots_B[one], indices_B[one], table)
        assert row.tobytes() == rows_B[one].tobytes()
        assert best.tobytes() == best_BN[one].tobytes()


@pytest.mark.promise(
    "A draft is right if and only if the sampler draws the same token at that seed, "
    "index and logits."
)
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_slot_are_drawn_while_the_next_was_fed_what_was_drawn(seed: int) -> None:
    """Compare with one row at a time: the same tokens, no more rows, the same histories and indices."""
    rng, vocabulary, num_slots = np.random.default_rng(seed), 40, 9
    slots_B = rng.permutation(num_slots)[:6]
    num_B = rng.integers(1, 5, len(slots_B))
    num_rows = int(num_B.sum())
    x_RV = torch.from_numpy(rng.standard_normal((num_rows, vocabulary), dtype=np.float32) * 9)
    if seed % 4 == 0:
        x_RV[rng.integers(num_rows)] = torch.nan
    tables = []
    for _ in range(3):
        table = table_of(np.random.default_rng(seed), vocabulary, num_slots)
        table.slots_S["num_forbidden"] = table.slots_S["num_bias"] > 0
        table.slots_S["num_bias"] -= table.slots_S["num_forbidden"]
        table.slots_S["min_tokens"] = 2
        tables.append(table)
    one_by_one, ours, expected = tables
    fed_R = rng.integers(0, vocabulary, num_rows)
    drawn: list[tuple[int, ...]] = []
    counts = []
    for first, slot, num in zip(num_B.cumsum() - num_B, slots_B, num_B, strict=True):
        for at in range(first, first + num):
            one = np.array([slot]), np.array([1]), np.array([0])
            _, _, rows, _ = twin.sample(x_RV[at : at + 1], *one, one_by_one)
            drawn.append((at, int(rows["token"][0]), int(rows["status"][0])))
            is_last = at + 1 == first + num or rng.random() < 0.3
            if is_last or rows["status"][0] != DRAWN:
                counts.append(at + 1 - first)
                if at + 1 < first + num:  # Feed a token that was not drawn.
                    fed_R[at + 1] = (rows["token"][0] + 1) % vocabulary
                break
            fed_R[at + 1] = rows["token"][0]
    found = [
        module.sample(x_RV, slots_B, num_B, fed_R, table)
        for module, table in ((sampling, ours), (twin, expected))
    ]
    for num_drawn_B, at_N, rows_N, _ in found:
        assert num_drawn_B.tolist() == counts
        fields = (at_N, rows_N["token"], rows_N["status"])
        assert list(zip(*(of_rows.tolist() for of_rows in fields), strict=True)) == drawn
    best, of_twin = found[0][3], found[1][3]
    for i, slot in enumerate(np.repeat(slots_B, counts)):
        wanted = table.slots_S["num_logprobs"][slot]
        if wanted >= 0 and drawn[i][2] == DRAWN:
            assert best["token"][i, :wanted].tolist() == of_twin["token"][i, :wanted].tolist()
    for table in (ours, expected):
        assert (table.slots_S == one_by_one.slots_S).all()
        assert torch.equal(table.counts_SV, one_by_one.counts_SV)
        assert torch.equal(table.seen_SV, one_by_one.seen_SV)


def test_what_does_not_fit_is_refused() -> None:
    x_BV, two, ones = torch.zeros(2, 50), np.arange(2), np.ones(2, np.int64)
    table = SlotTable(np.repeat(plain_table().slots_S, 2), np.empty(0, TOKEN_VALUE))
    wrong = [
        (two[:1], ones, two, "num_B"),
        (two.astype(np.int32), ones, two, "slots_B"),
        (two - 1, ones, two, "row or slot"),
        (two + 1, ones, two, "row or slot"),
        (np.zeros(2, np.int64), ones, two, "a slot appears twice"),
        (two, ones * 2, two, "row or slot"),
        (two, ones - 1, two, "row or slot"),
        (two[:1], ones[:1], two, "row or slot"),
        (two, ones, two[:1], "fed_R"),
    ]
    for *arrays, message in wrong:
        with pytest.raises(ValueError, match=message):
            sampling.sample(x_BV, *arrays, table)
    for bits_MW, of_R in (
        (np.zeros((1, 1), np.uint32), two - 1),
        (np.zeros((1, 2), np.int32), two - 1),
        (np.zeros((1, 2), np.uint32), two),
        (np.zeros((2, 2), np.uint32)[:, ::-1], two),
        (np.zeros((2, 2), np.uint32), two[:1]),
    ):
        with pytest.raises(ValueError, match=r"mask|bits_MW|of_R"):
            sampling.sample(x_BV, two, ones, two, table, RowMasks(bits_MW, of_R))
    table.seen_SV = torch.zeros(2, 49, dtype=torch.bool)
    with pytest.raises(ValueError, match="seen_SV"):
        sampling.sample(x_BV, two, ones, two, table)
    assert not table.slots_S["index"].any()
