"""The grouped experts against their twin, and their promise of equal bits."""

import pytest
import torch
from torch import Tensor

from hadal.kernels.experts import experts
from hadal.reference import experts as twin
from hadal.reference.params import Experts, MlpWeights
from tests.stored import KINDS, stored_experts

pytestmark = pytest.mark.usefixtures("built")
SHAPES = [
    (1, 100, 24, 16, 3),
    (5, 33, 7, 4, 4),
    (17, 64, 32, 9, 2),
    (64, 100, 24, 40, 8),
    (300, 48, 19, 6, 2),
    (3, 1700, 40, 5, 2),
    (40, 512, 520, 6, 2),
]


Case = tuple[Tensor, Experts, Tensor, Tensor]


def case(t: int, d: int, i: int, e: int, k: int, kind: str = "fp32") -> Case:
    made = torch.Generator().manual_seed(t + 1000 * d)
    ids = torch.stack([torch.randperm(e, generator=made)[:k] for _ in range(t)])
    gate_up = torch.randn(e, 2 * i, d, generator=made) / d**0.5
    down = torch.randn(e, d, i, generator=made) / i**0.5
    held = stored_experts(gate_up, down, kind)
    return torch.randn(t, d, generator=made), held, ids, torch.rand(t, k, generator=made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_twin(shape: tuple[int, int, int, int, int], kind: str) -> None:
    inputs = case(*shape, kind)
    bound = 2e-5
    if "rounding" in kind:  # A last bit may round to the next code, 6 % off.
        bound = 2e-2
    torch.testing.assert_close(experts(*inputs), twin.experts(*inputs), rtol=bound, atol=bound)


@pytest.mark.promise(
    "Within one instruction set, a row's result depends on the row alone, not on "
    "batch, tile, thread or width."
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_does_not_depend_on_the_others(
    shape: tuple[int, int, int, int, int], kind: str
) -> None:
    x, held, ids, weights = case(*shape, kind)
    whole = experts(x, held, ids, weights)
    for start, stop in [(index, index + 1) for index in range(min(len(x), 12))] + [
        (0, 2),
        (1, len(x)),
    ]:
        part = experts(x[start:stop], held, ids[start:stop], weights[start:stop])
        assert torch.equal(part, whole[start:stop])


def test_threads_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case(40, 100, 24, 16, 3)
    results = []
    for count in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results.append(experts(*inputs))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_all_tokens_on_one_expert_and_none_at_all() -> None:
    x, held, _, weights = case(50, 20, 12, 5, 1)
    ids = torch.full((50, 1), 4)
    torch.testing.assert_close(experts(x, held, ids, weights), twin.experts(x, held, ids, weights))
    assert experts(x[:0], held, ids[:0], weights[:0]).shape == (0, 20)


def test_large_activations_stay_finite() -> None:
    x, held, ids, weights = case(4, 20, 12, 5, 2)
    y, expected = (kernel(x * 1e4, held, ids, weights) for kernel in (experts, twin.experts))
    assert y.isfinite().all()
    # Bound by the largest result: where large terms cancel, their rounding is all that is left.
    torch.testing.assert_close(y, expected, rtol=0.0, atol=2e-6 * float(expected.abs().max()))


def test_an_empty_slot_is_refused() -> None:
    x, held, ids, weights = case(4, 20, 12, 5, 2)
    ids.fill_(1)
    without = Experts((*held.slots[:4], None))
    assert torch.equal(experts(x, without, ids, weights), experts(x, held, ids, weights))
    ids[3, 1] = 4
    with pytest.raises(ValueError, match="replica"):
        experts(x, without, ids, weights)


def test_experts_of_other_shapes_are_refused_wherever_they_stand() -> None:
    x, held, ids, weights = case(4, 20, 12, 5, 2)
    _, wide, _, _ = case(4, 24, 12, 5, 2)
    with pytest.raises(ValueError, match="20 values, and an expert's gate takes 24"):
        experts(x, Experts((None, *wide.slots[1:])), ids.clamp(min=1), weights)
    with pytest.raises(ValueError, match="gate has shape"):
        experts(x, Experts((*held.slots[:4], wide.slots[4])), ids, weights)
    one = held.slots[0]
    assert one is not None
    with pytest.raises(ValueError, match="down has shape"):
        experts(x, Experts((MlpWeights(one.gate, one.up, one.up),)), ids * 0, weights)


def test_bad_input_is_refused() -> None:
    x, held, ids, weights = case(4, 20, 12, 5, 2)
    with pytest.raises(ValueError, match="expert id"):
        experts(x, held, ids + 5, weights)
    with pytest.raises(ValueError, match="gate"):
        experts(x[:, :10].contiguous(), held, ids, weights)
    with pytest.raises(ValueError, match="weights_TK"):
        experts(x, held, ids, weights[:2])
