"""The arithmetic of sampling against straightforward formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.model import sampler
from hadal.model.sampler import draw, nucleus, penalise_counts, penalise_repetition, pick, uniform


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
    """Tokens that stay, by the definition, one row, no ties."""
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


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocabulary=st.integers(2, 40),
    candidates=st.sampled_from([1, 3, 1024]),
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
def test_what_stays_and_what_is_drawn(
    seed: int, vocabulary: int, candidates: int, rows: list[tuple[int, float, float]]
) -> None:
    """However few candidates are looked at first: the nucleus is the definition's, and a draw is
    the whole row's.
    """
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(len(rows), vocabulary, generator=generator).mul(2).exp()
    u = torch.rand(len(rows), generator=generator, dtype=torch.float64)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    top_p, min_p = top_p.double(), min_p.float()
    expected = torch.zeros_like(p)
    for row, (k, mass, least) in enumerate(rows):
        stays = sorted(expected_kept(p[row].tolist(), k, mass, float(np.float32(least))))
        expected[row, stays] = p[row, stays]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_NUM_CANDIDATES", candidates)
        ranked = (top_k > 0) | (top_p < 1)
        if ranked.any():
            ids, kept = nucleus(p[ranked], top_k[ranked], top_p[ranked], min_p[ranked])
            assert torch.equal(torch.zeros_like(p[ranked]).scatter(1, ids, kept), expected[ranked])
        drawn = draw(p, top_k.numpy(), top_p.numpy(), min_p.numpy(), u.numpy())
        assert torch.equal(drawn, pick(expected, u))


@pytest.mark.parametrize("candidates", [1, 2, 3, 16])
def test_ties_at_the_edge_all_stay(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_NUM_CANDIDATES", candidates)
    p = torch.tensor([[0.1, 0.2, 0.2, 0.3, 0.2, 0.0]])
    one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1)
    for top_k, top_p in ((2, one), (0, 0.4 * one)):
        ids, kept = nucleus(p, torch.tensor([top_k]), top_p, none)
        assert sorted(ids[kept > 0].tolist()) == [1, 2, 3, 4]


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
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    seen = torch.tensor([[True, True, False, False], [False, False, False, True]])
    ours = penalise_repetition(logits, seen, torch.tensor([2.0, 4.0]))
    assert ours.tolist() == [[1.0, -4.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.125]]
    counts = torch.tensor([[0, 1, 3, 0], [2, 0, 0, 0]])
    ours = penalise_counts(logits, counts, torch.tensor([0.5, 0.0]), torch.tensor([0.25, 1.0]))
    assert ours.tolist() == [[2.0, -2.75, -0.75, 0.5], [1.0, -2.0, 1.0, 0.5]]
