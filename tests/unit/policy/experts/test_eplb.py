"""EPLB's interface: same arguments, same arrays."""

import numpy as np
import torch

from hadal.policy.experts.balance import rebalance_experts


def test_arrays_mean_what_eplbs_mean() -> None:
    loads = np.random.default_rng(7).lognormal(size=(3, 16))
    physical, logical, counts = rebalance_experts(loads, 24, 4, 2, 8)
    assert physical.shape == (3, 24)
    assert counts.sum(axis=1).tolist() == [24] * 3
    assert logical.shape == (3, 16, counts.max())
    for layer in range(3):
        for expert in range(16):
            slots = logical[layer, expert]
            assert (slots[counts[layer, expert] :] == -1).all()
            assert (physical[layer, slots[: counts[layer, expert]]] == expert).all()
    # Hierarchical: a group of 4 experts is on one node of 12 slots.
    groups = physical.reshape(3, 2, 12) // 4
    assert all(not set(a) & set(b) for a, b in groups.tolist())


def test_tensors_in_tensors_out() -> None:
    loads = torch.rand(2, 8, generator=torch.Generator().manual_seed(1))
    ours = rebalance_experts(loads, 12, 1, 1, 4)
    plain = rebalance_experts(loads.double().numpy(), 12, 1, 1, 4)
    for tensor, array in zip(ours, plain, strict=True):
        assert tensor.dtype == torch.int64
        assert (tensor.numpy() == array).all()


def test_more_slots_than_experts_leaves_none_empty() -> None:
    physical, _, counts = rebalance_experts(np.ones((1, 2)), 12, 1, 1, 4)
    assert (physical >= 0).all()
    assert counts.sum() == 12


def test_slots_do_not_pass_through_the_loads_own_type() -> None:
    """Use the published decode size: bfloat16 cannot represent odd slot numbers from 257 on."""
    loads = torch.rand(1, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    for ours, wider in zip(
        rebalance_experts(loads, 288, 8, 18, 144),
        rebalance_experts(loads.float(), 288, 8, 18, 144),
        strict=True,
    ):
        assert torch.equal(ours, wider)
