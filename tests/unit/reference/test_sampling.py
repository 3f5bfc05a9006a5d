"""The meaning of sampling parameters, against straightforward formulas."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hadal.reference.sampling import SLOT, TOKEN_VALUE, SlotTable, adjust, kept, pick, uniform


def slots_of(num_slots: int, **columns: object) -> np.ndarray:
    """Return greedy slots without options other than `columns`: field -> its value, or one per slot."""
    slots_S = np.zeros(num_slots, SLOT)
    defaults = {"top_p": 1.0, "repetition": 1.0, "num_logprobs": -1}
    for name, values in (defaults | columns).items():
        slots_S[name] = values
    return slots_S


def test_uniform_repeats_and_is_uniform() -> None:
    seeds = np.repeat(np.arange(40, dtype=np.uint64), 1000)
    indices = np.tile(np.arange(1000, dtype=np.uint64), 40)
    u = uniform(seeds, indices)
    assert np.array_equal(u, uniform(seeds, indices))
    assert np.array_equal(u[::7], uniform(seeds[::7], indices[::7]))
    assert ((u >= 0) & (u < 1)).all()
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 150  # 99 degrees of freedom: p < 0.0007 beyond it.


def test_uniform_streams_of_neighbouring_seeds_differ() -> None:
    index = np.arange(1000, dtype=np.uint64)
    streams = [uniform(np.full(1000, seed, np.uint64), index) for seed in (0, 1, 2, 2**64 - 1)]
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert not np.intersect1d(a, b).size, "one stream is the other, shifted"
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.12
    for stream in streams:
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.12


def expected_kept(p: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that stay, by the definition: one row, no ties."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        total, mass, nucleus = sum(p[i] for i in kept), 0.0, []
        for i in kept:
            if nucleus and mass >= top_p * total:
                break
            nucleus.append(i)
            mass += p[i]
        kept = nucleus
    return {i for i in kept if p[i] >= min_p * p[order[0]]}


@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(2, 40),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 5, 100]),
            st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_what_stays(seed: int, vocabulary: int, rows: list[tuple[int, float, float]]) -> None:
    logits = torch.randn(
        len(rows), vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
    logits *= 2
    top_k, top_p, min_p = zip(*rows, strict=True)
    slot_B = slots_of(len(rows), temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    p = kept(logits, slot_B)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    expected = torch.zeros_like(p)
    for row, (k, mass, least) in enumerate(rows):
        stays = sorted(expected_kept(weights[row].tolist(), k, mass, float(np.float32(least))))
        expected[row, stays] = weights[row, stays]
    assert torch.equal(p, expected)


def test_ties_at_the_edge_all_stay() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.2, 0.3, 0.2, 0.0]]).log()
    for top_k, top_p in ((2, 1.0), (0, 0.4)):
        p = kept(logits, slots_of(1, temperature=1.0, top_k=top_k, top_p=top_p))
        assert p[0].nonzero()[:, 0].tolist() == [1, 2, 3, 4]


def test_pick_inverts_the_distribution() -> None:
    p = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]]).expand(6, -1)
    u = torch.tensor([0.0, 0.49, 0.5, 0.74, 0.76, 1.0 - 2**-53], dtype=torch.float64)
    assert pick(p, u).tolist() == [1, 1, 3, 3, 4, 4]


def test_pick_never_takes_what_has_no_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2000, 9, generator=generator) * (torch.rand(2000, 9, generator=generator) < 0.3)
    p[:, 4] += 1e-30
    u = torch.rand(2000, generator=generator, dtype=torch.float64)
    u[:200], u[200:400] = 0.0, 1 - 2**-53
    assert (p.gather(1, pick(p, u)[:, None]) > 0).all()


def test_penalties() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]]).expand(2, -1)
    seen = torch.tensor([[True, True, False, False], [False, False, False, True]])
    none = torch.zeros(2, 4, dtype=torch.int32)
    slots_S, no_bias, both = (
        slots_of(2, repetition=[2.0, 4.0]),
        np.empty(0, TOKEN_VALUE),
        np.arange(2),
    )
    ours = adjust(logits, both, SlotTable(slots_S, no_bias, none, seen))
    assert ours.tolist() == [[1.0, -4.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.125]]
    slots_S = slots_of(2, frequency=[0.5, 0.0], presence=[0.25, 1.0])
    counts = torch.tensor([[0, 1, 3, 0], [2, 0, 0, 0]], dtype=torch.int32)
    ours = adjust(logits, both, SlotTable(slots_S, no_bias, counts, counts > 0))
    assert ours.tolist() == [[2.0, -2.75, -0.75, 0.5], [1.0, -2.0, 1.0, 0.5]]
