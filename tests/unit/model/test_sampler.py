"""Drawing tokens: distributions, independence of the batch, history, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hadal.core.plans import NO_TOKEN, NOT_FINITE, Sampling
from hadal.model.sampler import Drawn, Sampler

V = 50
GREEDY = Sampling(temperature=0.0)


def logits_of(rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def draw_one(sampling: Sampling, logits_V: torch.Tensor, index: int = 0, **history: object) -> int:
    sampler = Sampler(1, V)
    sampler.join(0, sampling, index, **history)  # type: ignore[arg-type]
    return int(sampler.draw(logits_V[None], np.array([0])).tokens[0])


def test_greedy_rows() -> None:
    sampler, logits = Sampler(8, V), logits_of(5)
    for slot in range(8):
        sampler.join(slot, GREEDY, 0)
    drawn = sampler.draw(logits, np.array([7, 1, 0, 3, 2]))
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()
    assert (drawn.draws, drawn.failed) == ({}, {})


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=1.7),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """Compare 20,000 draws with the softmax, cut as the parameters say: a chi-square test."""
    num_draws, logits_V = 20_000, logits_of(1, seed=4)[0]
    p = (logits_V.double() / sampling.temperature).softmax(-1)
    order = p.argsort(descending=True)
    ranked = p[order]
    kept = torch.ones(V, dtype=torch.bool)
    if sampling.top_k:
        kept &= torch.arange(V) < sampling.top_k
    if sampling.top_p < 1:
        ranked = ranked * kept / (ranked * kept).sum()
        kept &= ranked.cumsum(-1) - ranked < sampling.top_p
    kept &= ranked >= sampling.min_p * ranked[0]
    expected = torch.zeros(V, dtype=torch.float64)
    expected[order[kept]] = p[order[kept]] / p[order[kept]].sum()
    sampler = Sampler(num_draws, V)
    for slot in range(num_draws):
        sampler.join(
            slot,
            Sampling(
                *[getattr(sampling, f) for f in ("temperature", "top_p", "top_k", "min_p")],
                seed=slot // 100,
            ),
            slot % 100,
        )
    tokens = sampler.draw(logits_V.expand(num_draws, -1), np.arange(num_draws)).tokens
    counts = np.bincount(tokens, minlength=V)
    assert not counts[(expected == 0).numpy()].any()
    support = (expected * num_draws >= 5).numpy()
    wanted = (expected * num_draws).numpy()[support]
    chi_square, freedom = ((counts[support] - wanted) ** 2 / wanted).sum(), int(support.sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.promise(
    "The draw at output index i depends on the request's seed, i and the row's logits "
    "alone, so batching never changes it."
)
def test_a_draw_depends_on_seed_and_index_alone() -> None:
    """Draw from the same row alone, in a batch, in another slot and after another history."""
    logits = logits_of(64, seed=7)
    sampling = Sampling(temperature=1.3, top_p=0.95, seed=1234567890123)
    alone = [draw_one(sampling, logits[3], index) for index in range(30)]
    assert len(set(alone)) > 3
    rng = np.random.default_rng(0)
    for index in range(30):
        slots = rng.permutation(64)
        sampler = Sampler(64, V)
        for slot in range(64):
            other = Sampling(
                temperature=float(rng.random() * 2),
                top_k=int(rng.integers(0, 9)),
                seed=int(rng.integers(99)),
                top_p=float(rng.choice([0.3, 1.0])),
                presence_penalty=float(rng.choice([0, 1])),
            )
            sampler.join(slot, other, int(rng.integers(0, 50)))
        sampler.join(int(slots[3]), sampling, index)
        assert sampler.draw(logits, slots).tokens[3] == alone[index]


def test_a_retry_goes_on_where_it_stopped() -> None:
    steps = [logits_of(1, seed=i) for i in range(20)]
    sampling = Sampling(
        temperature=1.0,
        seed=-5,
        frequency_penalty=0.7,
        presence_penalty=0.2,
        repetition_penalty=1.2,
    )
    prompt = [3, 4, 5]
    sampler = Sampler(2, V)
    sampler.join(1, sampling, 0, prompt=prompt)
    whole = [int(sampler.draw(step, np.array([1])).tokens[0]) for step in steps]
    for cut in range(1, 20):
        later = Sampler(3, V)
        later.join(2, sampling, cut, prompt=prompt, output=whole[:cut])
        found = [int(later.draw(step, np.array([2])).tokens[0]) for step in steps[cut:]]
        assert found == whole[cut:]


def test_penalties_over_prompt_and_output() -> None:
    """Compare greedy draws with penalties with the formula, token by token."""
    sampling = Sampling(
        temperature=0.0, frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.5
    )
    prompt, output = [1, 2, 2], [7]
    sampler = Sampler(4, V)
    sampler.join(0, GREEDY, 0)
    sampler.join(3, sampling, 1, prompt=prompt, output=output)
    for step in range(40):
        logits = logits_of(2, seed=100 + step % 3, scale=1.0)
        expected = logits[1].clone()
        for token in range(V):
            if token in prompt or token in output:
                expected[token] = (
                    expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
                )
            expected[token] -= 0.9 * output.count(token) + 0.4 * (token in output)
        drawn = sampler.draw(logits.clone(), np.array([0, 3]))
        assert drawn.tokens.tolist() == [int(logits[0].argmax()), int(expected.argmax())]
        output.append(int(drawn.tokens[1]))
    assert len(set(output)) > 10


def test_a_slot_forgets_who_had_it() -> None:
    sampler, logits = Sampler(1, V), logits_of(1)
    best = int(logits.argmax())
    heavy = Sampling(
        temperature=0.0, presence_penalty=2.0, logit_bias=((best, -100.0),), repetition_penalty=3.0
    )
    sampler.join(0, heavy, 0, prompt=[best], output=[best], stop_ids=[best], min_tokens=9)
    assert sampler.draw(logits, np.array([0])).tokens[0] != best
    sampler.leave(0)
    sampler.join(0, GREEDY, 0)
    assert sampler.draw(logits, np.array([0])).tokens[0] == best
    sampler.join(0, Sampling(temperature=0.0, presence_penalty=2.0), 0, output=[])
    assert sampler.draw(logits, np.array([0])).tokens[0] == best


def test_logit_bias() -> None:
    logits = logits_of(1)[0]
    found = draw_one(
        Sampling(temperature=0.0, logit_bias=((17, 100.0), (10**6, 5.0), (-1, 5.0))), logits
    )
    assert found == 17
    best = int(logits.argmax())
    banned = Sampling(temperature=1.0, logit_bias=((best, -100.0),))
    assert all(draw_one(banned, logits, index) != best for index in range(200))


def test_stop_ids_are_forbidden_until_min_tokens() -> None:
    logits = logits_of(1)
    best, second = logits[0].topk(2).indices.tolist()
    sampler = Sampler(1, V)
    sampler.join(0, GREEDY, 1, stop_ids=[best, V + 3], min_tokens=3)
    found = [int(sampler.draw(logits, np.array([0])).tokens[0]) for _ in range(4)]
    assert found == [second, second, best, best]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(4, seed=2)
    sampler = Sampler(4, V)
    for slot, count in enumerate((-1, 0, 3, V + 9)):
        sampler.join(
            slot, Sampling(temperature=0.0, num_logprobs=count, logit_bias=((9, 50.0),)), 0
        )
    drawn = sampler.draw(logits, np.array([0, 1, 2, 3]))
    assert drawn.tokens.tolist() == [9] * 4
    assert sorted(drawn.draws) == [1, 2, 3]
    expected = logits.log_softmax(-1)
    for slot, count in ((1, 0), (2, 3), (3, V)):
        draw = drawn.draws[slot]
        assert draw.logprob == pytest.approx(float(expected[slot, 9]), abs=1e-6)
        best = expected[slot].topk(count)
        assert [token for token, _ in draw.top] == best.indices.tolist()
        assert [value for _, value in draw.top] == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(seed=3), Sampling(temperature=0.0, num_logprobs=2)]
)
def test_broken_logits_fail_their_row_alone(value: float, sampling: Sampling) -> None:
    logits = logits_of(3)
    clean = logits.clone()
    logits[1, 20] = value

    def drawn(logits_BV: torch.Tensor) -> Drawn:
        sampler = Sampler(9, V)
        for slot in (4, 8, 6):
            sampler.join(slot, sampling, 0)
        return sampler.draw(logits_BV, np.array([4, 8, 6]))

    broken, good = drawn(logits), drawn(clean)
    assert list(broken.failed) == [8]
    assert "finite" in broken.failed[8]
    assert broken.tokens[[0, 2]].tolist() == good.tokens[[0, 2]].tolist()
    assert not good.failed
    assert set(broken.draws) == set(good.draws) - {1}


def test_a_request_that_leaves_itself_nothing_to_draw_is_told_from_broken_weights() -> None:
    """Tell two errors apart: a retry cannot help a request that has excluded every token."""
    logits = logits_of(3)
    logits[2, 20] = float("nan")
    sampler = Sampler(3, V)
    for slot in (0, 2):
        sampler.join(slot, Sampling(seed=3), 0, stop_ids=range(V), min_tokens=5)
    sampler.join(1, Sampling(seed=3), 0)
    failed = sampler.draw(logits, np.array([0, 1, 2])).failed
    assert set(failed) == {0, 2}
    assert failed[0].startswith(f"{NO_TOKEN}: ")
    assert failed[2].startswith(f"{NOT_FINITE}: ")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5e-324),
        Sampling(temperature=2.0),
        Sampling(top_p=5e-324),
        Sampling(min_p=1.0),
        Sampling(repetition_penalty=0.01),
        Sampling(repetition_penalty=10.0),
        Sampling(frequency_penalty=2.0, presence_penalty=2.0),
        Sampling(frequency_penalty=-2.0, presence_penalty=-2.0),
        Sampling(logit_bias=tuple((token, -100.0) for token in range(V))),
        Sampling(logit_bias=((0, 100.0),)),
        Sampling(
            temperature=5e-324,
            top_p=5e-324,
            min_p=1.0,
            repetition_penalty=0.01,
            frequency_penalty=-2.0,
        ),
    ],
)
def test_no_field_at_its_bound_leaves_nothing_to_draw(sampling: Sampling) -> None:
    """Draw at the API's bounds, with huge logits and a token repeated 100,000 times."""
    sampler = Sampler(1, V)
    sampler.join(0, sampling, 0, prompt=range(V), output=[7] * 100_000)
    assert sampler.draw(logits_of(1, scale=1e4), np.array([0])).failed == {}


def test_all_tokens_at_minus_infinity_fail() -> None:
    sampler = Sampler(1, V)
    sampler.join(0, Sampling(), 0)
    assert list(sampler.draw(torch.full((1, V), float("-inf")), np.array([0])).failed) == [0]


def test_logits_are_not_changed() -> None:
    logits = logits_of(2)
    before, sampler = logits.clone(), Sampler(2, V)
    sampler.join(
        0, Sampling(logit_bias=((1, 5.0),), presence_penalty=1.0, num_logprobs=3), 0, output=[4]
    )
    sampler.join(1, Sampling(top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.3), 0, prompt=[4])
    sampler.draw(logits, np.array([0, 1]))
    assert torch.equal(logits, before)
