"""Dispatch and combine between ranks in threads: the same bits for every width, placement, mode and
order of arrival, the reference twin's result, and the bytes that the formula predicts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from hadal.comm.codec import MessageError
from hadal.comm.expert_comm import ExpertComm
from hadal.comm.layout import MessageLayout
from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.errors import InvariantError
from hadal.core.placement import Placement, spread, without
from hadal.reference import codec as slow
from hadal.reference.exchange import all_to_all
from tests.fresh import fresh
from tests.unit.comm.groups import mesh_threads, run_threads
from tests.unit.comm.queues import QueueGroup, in_threads, queue_groups

LAYERS, EXPERTS, HIDDEN, TOP_K, TOKENS = 2, 16, 192, 3, 37
SEEDS = [1, 2, fresh().randrange(1 << 30)]
MODES = ("normal", "low_latency")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Scene:
    """Tokens with their experts; an expert's output for a row depends on that row alone."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    gain_ED: Tensor

    def expert(self, expert: Tensor | int, x_ND: Tensor) -> Tensor:
        return x_ND * self.gain_ED[expert] + x_ND * x_ND * 0.25


def scene(seed: int, num_tokens: int = TOKENS, num_experts: int = EXPERTS) -> Scene:
    g = torch.Generator().manual_seed(seed)
    used = num_experts - 1  # One expert gets no token.
    ids = [torch.randperm(used, generator=g)[:TOP_K] for _ in range(num_tokens)]
    return Scene(
        torch.randn(num_tokens, HIDDEN, generator=g),
        torch.stack(ids),
        torch.rand(num_tokens, TOP_K, generator=g),
        torch.randn(num_experts, HIDDEN, generator=g),
    )


def cuts(num_ranks: int, seed: int) -> list[slice]:
    """Return each rank's tokens: uneven slices, and none for the last of several ranks."""
    inner = np.sort(
        np.random.default_rng(seed).integers(0, TOKENS + 1, max(num_ranks - 2, 0))
    ).tolist()
    borders = [0, *inner, TOKENS] + ([TOKENS] if num_ranks > 1 else [])
    return [slice(a, b) for a, b in itertools.pairwise(borders)]


def make(
    group: QueueGroup | None, dispatch_format: str, mode: str, placement: Placement
) -> ExpertComm:
    comm = ExpertComm(
        group,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        dispatch_format=dispatch_format,
        mode=mode,
        max_tokens=TOKENS,
    )
    comm.install(placement)
    return comm


def run(
    scene: Scene,
    dispatch_format: str,
    mode: str,
    placement: Placement,
    lost: tuple[int, ...] = (),
    seed: int = 0,
) -> tuple[Tensor, dict[int, QueueGroup]]:
    """Run all tokens through the living ranks, two micro-batches interleaved; return outputs [L, T, D]."""
    members = [rank for rank in range(placement.num_ranks) if rank not in lost]
    groups = queue_groups(members, seed)
    shares = dict(zip(members, cuts(len(members), seed), strict=True))

    def work(rank: int) -> Tensor:
        own = shares[rank]
        half = (own.start + own.stop) // 2
        comm = make(
            groups[rank] if placement.num_ranks > 1 else None, dispatch_format, mode, placement
        )
        layers = []
        for layer in range(placement.num_layers):
            slot_to_expert = torch.from_numpy(
                placement.slot_to_expert_LRS[layer, rank].astype(np.int64)
            )
            parts = [slice(own.start, half), slice(half, own.stop)]
            handles = [comm.dispatch(scene.x_TD[part], scene.ids_TK[part], layer) for part in parts]
            for handle in handles:
                received = handle.finish_dispatch()
                handle.start_combine(
                    scene.expert(
                        slot_to_expert[received.expert_slot_M], received.x_ND[received.row_M]
                    )
                )
            routed = [
                h.finish_combine(scene.weights_TK[part])
                for h, part in zip(handles, parts, strict=True)
            ]
            layers.append(torch.cat(routed))
            assert (handles[0].dispatch_interval is None) == (len(members) == 1)
            assert (handles[1].combine_interval is None) == (len(members) == 1)
        return torch.stack(layers)

    routed = in_threads(work, members)
    return torch.cat([routed[rank] for rank in members], dim=1), groups


@pytest.mark.promise(
    "Rounding therefore depends on neither width (number of ranks), placement, mode "
    "nor arrival order: with the same kernels the results are the same bits."
)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8", "fp8_pow2"])
def test_same_bits_for_every_width_placement_mode_and_arrival(
    dispatch_format: str, seed: int
) -> None:
    tokens = scene(seed)
    base, _ = run(tokens, dispatch_format, "normal", spread(LAYERS, EXPERTS, 1))
    for mode in MODES:
        for num_ranks, redundant in ((1, 0), (2, 0), (4, 4), (8, 0), (8, 16)):
            got, _ = run(
                tokens,
                dispatch_format,
                mode,
                spread(LAYERS, EXPERTS, num_ranks, redundant),
                seed=seed,
            )
            assert torch.equal(got, base), (mode, num_ranks, redundant, seed)


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_when_ranks_are_dead(mode: str) -> None:
    tokens = scene(SEEDS[-1])
    base, _ = run(tokens, "fp8", mode, spread(LAYERS, EXPERTS, 1))
    for num_ranks, lost in ((4, (2,)), (8, (0, 5)), (4, (0, 1, 2))):
        placement = without(spread(LAYERS, EXPERTS, num_ranks, 0), lost)
        got, _ = run(tokens, "fp8", mode, placement, lost)
        assert torch.equal(got, base), (lost, SEEDS[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8", "fp8_pow2"])
def test_equals_the_slow_twin(dispatch_format: str, mode: str) -> None:
    tokens = scene(3)

    def there(rows: Tensor) -> Tensor:
        return through(rows, dispatch_format)

    def back(rows: Tensor) -> Tensor:
        return rows if dispatch_format == "fp32" else rows.bfloat16().float()

    shares = dict(enumerate(cuts(4, 3)))
    want = all_to_all(
        {rank: tokens.x_TD[own] for rank, own in shares.items()},
        {rank: tokens.ids_TK[own] for rank, own in shares.items()},
        {rank: tokens.weights_TK[own] for rank, own in shares.items()},
        tokens.expert,
        there,
        back,
    )
    got, _ = run(tokens, dispatch_format, mode, spread(1, EXPERTS, 4, 4), seed=3)
    assert torch.equal(got[0], torch.cat(list(want.values())))


def through(rows: Tensor, dispatch_format: str) -> Tensor:
    """Return rows as they are after dispatch, by the reference codec."""
    if dispatch_format == "fp32":
        return rows
    layout = MessageLayout(dispatch_format, rows.shape[1])
    encoded = torch.empty((len(rows), layout.row_bytes), dtype=torch.uint8)
    out = torch.empty_like(rows)
    slow.encode(rows, None, encoded, dispatch_format)
    slow.decode(encoded, out, dispatch_format)
    return out


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_the_formulas(mode: str) -> None:
    """Compare bytes between ranks with the formula, by dispatch format; also the saving of FP8."""
    totals = {}
    for dispatch_format in ("fp32", "fp8"):
        tokens, placement = scene(4), spread(1, EXPERTS, 4)
        _, groups = run(tokens, dispatch_format, mode, placement, seed=4)
        layout = MessageLayout(dispatch_format, HIDDEN)
        sent = sum(sum(group.sent_bytes) for group in groups.values())
        expected = 0
        for rank, own in enumerate(cuts(4, 4)):
            half = (own.start + own.stop) // 2
            for part in (slice(own.start, half), slice(half, own.stop)):
                # The even placement has expert e on rank e % 4.
                target_TK = tokens.ids_TK[part] % 4
                peers = [peer for peer in range(4) if peer != rank]
                pairs = [int((target_TK == peer).sum()) for peer in peers]
                rows = [int((target_TK == peer).any(1).sum()) for peer in peers]
                expected += sum(layout.expected_bytes(mode, rows, pairs))
        assert sent == expected
        totals[dispatch_format] = sent
    # Hidden size 192 has two scales per 192 values, and rows are short; test_layout has large ones.
    assert totals["fp8"] <= (0.42 if mode == "low_latency" else 0.46) * totals["fp32"]


@pytest.mark.parametrize("mode", MODES)
def test_over_the_mesh(mode: str) -> None:
    """Run over sockets with one idle rank: the bits of a single rank, and the formula's bytes within 2 %."""
    hidden, num_tokens, top_k = 512, 64, 4
    g = torch.Generator().manual_seed(8)
    x_TD = torch.randn(num_tokens, hidden, generator=g)
    weights_TK = torch.rand(num_tokens, top_k, generator=g)
    ids_TK = torch.stack([torch.randperm(EXPERTS, generator=g)[:top_k] for _ in range(num_tokens)])

    def routed(group: MeshGroup | None, placement: Placement) -> tuple[Tensor, int]:
        comm = ExpertComm(
            group,
            hidden_size=hidden,
            top_k=top_k,
            dispatch_format="fp8",
            mode=mode,
            max_tokens=num_tokens,
        )
        comm.install(placement)
        own = slice(0, 0 if comm.rank == 2 else num_tokens)
        before = group.bytes_sent if group is not None else 0
        outputs = []
        for _ in range(3):
            handle = comm.dispatch(x_TD[own], ids_TK[own], 0)
            received = handle.finish_dispatch()
            slots = torch.from_numpy(placement.slot_to_expert_LRS[0, comm.rank].astype(np.int64))
            handle.start_combine(
                received.x_ND[received.row_M] * (1 + slots[received.expert_slot_M])[:, None]
            )
            outputs.append(handle.finish_combine(weights_TK[own]))
        assert torch.equal(outputs[0], outputs[2])
        return outputs[0], (group.bytes_sent if group is not None else 0) - before

    base, _ = routed(None, spread(1, EXPERTS, 1))
    layout = MessageLayout("fp8", hidden)
    with mesh_threads(3) as groups:
        placement = spread(1, EXPERTS, 3, 2)
        results = run_threads([lambda group=group: routed(group, placement) for group in groups])  # type: ignore[misc]
        for rank, (result, _) in enumerate(results):
            assert torch.equal(result, base[: 0 if rank == 2 else num_tokens])
        expected = 0
        for rank in range(2):
            expert_slots_EM, counts_E = placement.replicas(0)
            choice_TK = (np.arange(num_tokens)[:, None] + rank) % counts_E[ids_TK.numpy()]
            target_TK = expert_slots_EM[ids_TK.numpy(), choice_TK] // placement.num_expert_slots
            peers = [peer for peer in range(3) if peer != rank]
            pairs = [int((target_TK == peer).sum()) for peer in peers]
            rows = [int((target_TK == peer).any(1).sum()) for peer in peers]
            expected += 3 * sum(layout.expected_bytes(mode, rows, pairs))
        assert sum(sent for _, sent in results) == pytest.approx(expected, rel=0.02)


def test_replicas_share_the_load() -> None:
    placement = spread(1, 4, 2, 4)
    comm = ExpertComm(
        queue_groups([0, 1])[0],
        hidden_size=4,
        top_k=1,
        dispatch_format="fp32",
        mode="normal",
        max_tokens=64,
    )
    comm.install(placement)
    handle = comm.dispatch(torch.zeros(64, 4), torch.ones(64, 1, dtype=torch.int64), 0)
    assert handle._route.num_pairs_R == [32, 32]


def test_what_callers_can_get_wrong_is_said() -> None:
    placement = spread(1, EXPERTS, 1)
    comm = make(None, "fp8", "low_latency", placement)
    tokens = scene(5)
    with pytest.raises(ValueError, match="expert id"):
        comm.dispatch(tokens.x_TD, tokens.ids_TK + EXPERTS, 0)
    with pytest.raises(ValueError, match="buffers cannot hold"):
        comm.dispatch(
            torch.zeros(TOKENS + 1, HIDDEN), torch.zeros(TOKENS + 1, TOP_K, dtype=torch.int64), 0
        )
    with pytest.raises(ValueError, match="do not fit"):
        comm.dispatch(tokens.x_TD[:, :-1], tokens.ids_TK, 0)
    handle = comm.dispatch(tokens.x_TD, tokens.ids_TK, 0)
    handle.finish_dispatch()
    with pytest.raises(ValueError, match="outputs do not fit"):
        handle.start_combine(torch.zeros(1, HIDDEN))
    comm.dispatch(tokens.x_TD, tokens.ids_TK, 0)
    with pytest.raises(InvariantError, match="live"):
        comm.dispatch(tokens.x_TD, tokens.ids_TK, 0)
    comm.install(placement)  # A new formation voids live handles.
    comm.dispatch(tokens.x_TD, tokens.ids_TK, 0)
    with pytest.raises(ValueError, match="not a mode"):
        make(None, "fp8", "fast", placement)
    with pytest.raises(ValueError, match="is not a format"):
        make(None, "fp4", "normal", placement)
    with pytest.raises(ValueError, match="no replica"):
        make(None, "fp8", "normal", Placement(EXPERTS + 1, placement.slot_to_expert_LRS))
    with pytest.raises(ValueError, match="not members"):
        make(None, "fp8", "normal", spread(1, EXPERTS, 2))


@pytest.mark.parametrize(
    ("modes", "layers"), [(("normal", "normal"), (0, 1)), (("normal", "low_latency"), (0, 0))]
)
def test_ranks_out_of_step_notice(modes: tuple[str, str], layers: tuple[int, int]) -> None:
    tokens, groups, placement = scene(6), queue_groups([0, 1]), spread(2, EXPERTS, 2)

    def work(rank: int) -> bool:
        comm = make(groups[rank], "fp8", modes[rank], placement)
        handle = comm.dispatch(tokens.x_TD, tokens.ids_TK, layers[rank])
        with pytest.raises(MessageError, match="rank"):
            handle.finish_dispatch()
        return True

    in_threads(work, [0, 1])


def test_low_latency_allocates_its_buffers_once() -> None:
    groups, placement, tokens = queue_groups([0, 1]), spread(1, EXPERTS, 2), scene(7)

    def work(rank: int) -> set[int]:
        comm = make(groups[rank], "fp8", "low_latency", placement)
        addresses = set()
        for _ in range(6):
            handle = comm.dispatch(tokens.x_TD, tokens.ids_TK, 0)
            received = handle.finish_dispatch()
            addresses.add(received.x_ND.data_ptr())
            handle.start_combine(received.x_ND[received.row_M])
            handle.finish_combine(tokens.weights_TK)
        return addresses

    for addresses in in_threads(work, [0, 1]).values():
        assert len(addresses) <= 2
