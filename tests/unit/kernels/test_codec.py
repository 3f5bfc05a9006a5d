"""Rows between ranks, and routing: kernels give the twins' bits, twins the format's."""

import pytest
import torch
from torch import Tensor

from hadal.core.row_bytes import row_bytes
from hadal.kernels import codec as ops
from hadal.kernels.route import route
from hadal.reference import codec as slow
from hadal.reference import route as slow_route
from hadal.reference.route import Replicas
from tests.fresh import fresh

FORMATS = ("fp32", "bf16", "fp8", "fp8_pow2")
SEEDS = [1, 2, fresh().randrange(1 << 30)]


def awkward(num_rows: int, hidden: int, seed: int) -> Tensor:
    """Draw rows of magnitudes from 1e-9 to 1e6, with zeros, groups of zeros, and values halfway between
    two codes.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10 ** (torch.rand(num_rows, 1, generator=generator) * 15 - 9)
    x = torch.randn(num_rows, hidden, generator=generator) * magnitudes
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    if num_rows > 1:
        x[0] = 0
        x[1] = torch.arange(hidden) / 16 * (448 / hidden)
    return x


def encoded(
    module: object, x: Tensor, index: Tensor | None, row_format: str, stride: int = 0
) -> Tensor:
    num_bytes = row_bytes(x.shape[1], row_format)
    num_rows = len(x) if index is None else len(index)
    rows = torch.full((num_rows, num_bytes + stride), 255, dtype=torch.uint8)
    module.encode(x, index, rows[:, stride:], row_format)  # type: ignore[attr-defined]
    return rows


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("hidden", [1, 6, 130, 192, 512])
def test_kernels_give_the_twins_bits(built: None, row_format: str, hidden: int, seed: int) -> None:
    x = awkward(9, hidden, seed)
    index = torch.randint(0, 9, (13,), generator=torch.Generator().manual_seed(seed)).int()
    for picked, gap in ((None, 0), (index, 0), (index, 20)):
        rows = encoded(ops, x, picked, row_format, gap)
        assert torch.equal(rows, encoded(slow, x, picked, row_format, gap)), seed
        fast, twin = torch.empty(len(rows), hidden), torch.empty(len(rows), hidden)
        ops.decode(rows[:, gap:], fast, row_format)
        slow.decode(rows[:, gap:], twin, row_format)
        assert torch.equal(fast, twin), seed


def test_every_e4m3_code_is_its_value(built: None) -> None:
    """Encode all codes, and every value half-way between two neighbours, which rounds to even."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values[values.isfinite()].unique()
    halves = (finite[1:] + finite[:-1]) / 2
    x = torch.cat(
        (finite, halves, torch.nextafter(halves, torch.tensor(1e9)), torch.tensor([448.0]))
    )
    want = x.to(torch.float8_e4m3fn).float()
    # A group with amax 448 has scale 1.
    padded = torch.full((-(-len(x) // 127), 128), 448.0)
    padded[:, :127] = torch.nn.functional.pad(x, (0, padded.shape[0] * 127 - len(x))).view(-1, 127)
    out = torch.empty_like(padded)
    ops.decode(encoded(ops, padded, None, "fp8"), out, "fp8")
    assert torch.equal(out[:, :127].flatten()[: len(x)], want)


@pytest.mark.parametrize("row_format", ["fp8", "fp8_pow2"])
def test_fp8_error_is_within_its_bound(row_format: str) -> None:
    x = awkward(40, 300, 5)
    out = torch.empty_like(x)
    rows = encoded(ops, x, None, row_format)
    ops.decode(rows, out, row_format)
    scales = rows[:, 300:].contiguous().view(torch.float32)
    if row_format == "fp8_pow2":
        assert (torch.frexp(scales).mantissa == 0.5).all()
    amax = (
        torch.nn.functional.pad(x.abs(), (0, 84))
        .view(40, 3, 128)
        .amax(2)
        .repeat_interleave(128, 1)[:, :300]
    )
    # Error bound: half a step, 2^-4 of the value, or half of the smallest code. A power-of-two scale
    # is up to 2x as large.
    step = amax.clamp(min=1e-4) / 448 * (2 if row_format == "fp8_pow2" else 1)
    assert ((out - x).abs() <= torch.maximum(x.abs() / 16, step * 2**-10) * 1.0001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("module", [ops, slow])
def test_what_is_not_finite_stays_so(module: object, bad: float) -> None:
    x = torch.ones(2, 200)
    x[1, 150] = bad
    for row_format in FORMATS:
        out = torch.empty_like(x)
        module.decode(encoded(module, x, None, row_format), out, row_format)  # type: ignore[attr-defined]
        assert out[0].isfinite().all()
        assert not out[1, 150].isfinite()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row_format", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden"), [(0, 2, 8), (1, 1, 5), (7, 8, 300), (20, 3, 192)]
)
def test_weighted_sum_is_one_rounding_per_addition(
    built: None, row_format: str, num_tokens: int, top_k: int, hidden: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = awkward(num_tokens * top_k, hidden, seed)
    rows = encoded(ops, y, None, row_format)
    at = torch.randperm(num_tokens * top_k, generator=generator).view(num_tokens, top_k).int()
    ids = torch.stack(
        [torch.randperm(16, generator=generator)[:top_k] for _ in range(num_tokens)]
        or [torch.zeros(top_k, dtype=torch.int64)]
    )[:num_tokens]
    weights = torch.rand(num_tokens, top_k, generator=generator) * 3
    fast, twin = torch.empty(num_tokens, hidden), torch.empty(num_tokens, hidden)
    ops.weighted_sum(rows, row_format, at, ids, weights, fast)
    slow.weighted_sum(rows, row_format, at, ids, weights, twin)
    assert torch.equal(fast, twin), seed
    # The order of a token's choices changes nothing.
    order = torch.randperm(top_k, generator=generator)
    ops.weighted_sum(rows, row_format, at[:, order], ids[:, order], weights[:, order], fast)
    assert torch.equal(fast, twin), seed


def random_replicas(
    num_experts: int, num_ranks: int, num_expert_slots: int, generator: torch.Generator
) -> Replicas:
    counts = torch.randint(1, 4, (num_experts,), generator=generator)
    slots = torch.randint(0, num_ranks * num_expert_slots, (num_experts, 3), generator=generator)
    return Replicas(slots.int(), counts.int(), num_ranks, num_expert_slots)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_ranks"), [(0, 2, 3), (1, 1, 1), (33, 4, 5), (64, 8, 144)]
)
def test_route_equals_its_twin(
    built: None, num_tokens: int, top_k: int, num_ranks: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    replicas = random_replicas(12, num_ranks, 4, generator)
    ids = torch.randint(0, 12, (num_tokens, top_k), generator=generator)
    fast, twin = route(ids, replicas, seed % 100), slow_route.route(ids, replicas, seed % 100)
    assert (fast.num_pairs_R, fast.num_rows_R) == (twin.num_pairs_R, twin.num_rows_R)
    for name in ("token_P", "row_P", "expert_slot_P", "token_N", "at_TK", "expert_slot_TK"):
        assert torch.equal(getattr(fast, name), getattr(twin, name)), (name, seed)


@pytest.mark.parametrize("module", ["fast", "twin"])
def test_route_refuses_unknown_experts(module: str) -> None:
    function = route if module == "fast" else slow_route.route
    replicas = Replicas(
        torch.zeros((3, 1), dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32), 1, 3
    )
    for bad in (-1, 3, 1):
        with pytest.raises(ValueError, match="expert"):
            function(torch.tensor([[0, bad]]), replicas, 0)


def test_rows_out_of_range_are_refused(built: None) -> None:
    x, at = torch.zeros(3, 8), torch.tensor([[3]], dtype=torch.int32)
    with pytest.raises(ValueError, match="row"):
        ops.encode(x, at[0], torch.zeros((1, 32), dtype=torch.uint8), "fp32")
    with pytest.raises(ValueError, match="row"):
        ops.weighted_sum(
            x.view(torch.uint8), "fp32", at, at.long(), x[:1, :1].contiguous(), torch.empty(1, 8)
        )


def test_shapes_are_checked() -> None:
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="rows_NB"):
        ops.encode(x, None, torch.zeros((3, 31), dtype=torch.uint8), "fp32")
    with pytest.raises(ValueError, match="format"):
        ops.encode(x, None, torch.zeros((3, 32), dtype=torch.uint8), "fp4")
    with pytest.raises(ValueError, match="summed"):
        ops.weighted_sum(torch.zeros((3, 8), dtype=torch.uint8), "fp8", x.int(), x.long(), x, x)
