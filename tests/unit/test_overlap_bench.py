"""The overlap benchmark: its arithmetic and its claims, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import overlap_device
from bench.machine import CLOCK_TICKS, FOREIGN_MAX, foreign_share, parse_usage
from bench.overlap_device import (
    BALANCED,
    DECODE_LIKE,
    HEAD_BYTES,
    DeviceCase,
    VirtualDevice,
    VirtualResult,
    _head,
    claims,
)
from bench.overlap_model import _Echo
from bench.overlap_real import Series, Timed, spread
from bench.overlap_variants import CANDIDATES, DECODE, FULL, PREFILL, SCHEDULED, Variant, cheapest
from hadal.comm.group import Interval
from hadal.model.execute import execute
from hadal.overlap.plan import parse


def stat(busy: int) -> str:
    return f"cpu  {busy - 5} 1 1 900 50 1 1 1 0 0\ncpu0 1 2 3\n"


def test_others_are_what_is_busy_and_not_ours() -> None:
    before, after = parse_usage(stat(100), 10.0), parse_usage(stat(100 + 2 * CLOCK_TICKS), 12.0)
    assert after.busy_s - before.busy_s == pytest.approx(2.0)
    assert foreign_share(before, after, own_s=1.6, num_cores=2) == pytest.approx(0.1)
    assert (
        foreign_share(before, after, own_s=2.5, num_cores=2) == 0.0
    )  # The kernel's ticks are coarse, so the difference may be negative: then the share is 0.


def test_a_pair_counts_when_both_are_clean() -> None:
    clean, dirty = FOREIGN_MAX, FOREIGN_MAX + 0.01
    series = Series(
        [
            {"a": Timed(3.0, clean), "b": Timed(2.0, clean)},
            {"a": Timed(9.0, dirty), "b": Timed(2.0, clean)},
            {"a": Timed(4.0, clean), "b": Timed(9.0, dirty)},
        ]
    )
    assert series.ratios("a", "b") == [1.5]
    assert series.seconds("a") == [3.0, 4.0]
    assert series.median_s("b") == 2.0
    assert series.median_s("c") is None
    assert series.num_dropped(["a", "b"]) == 2
    assert spread([1.0, 3.0, 2.0]) == "2.00 [1.00-3.00]"


def test_a_variant_is_asked_for_as_it_is() -> None:
    for variant in SCHEDULED:
        assert parse(*variant.question()["schedule"]) == variant.schedule


def test_prices_of_the_virtual_cases() -> None:
    """Check the speedups that the virtual device must reach: prices allow them, and the leader
    would choose the schedule that reaches them.
    """
    for case, best, bar in ((BALANCED, PREFILL, 1.85), (DECODE_LIKE, DECODE, 1.6)):
        full, half = case.op_seconds(2.0), case.op_seconds()
        prices = {variant.name: variant.price(full, half, 8) for variant in SCHEDULED}
        assert prices[FULL.name].total_s / prices[best.name].total_s >= bar
        assert cheapest(prices, CANDIDATES) is best


@dataclass
class MadeUpLink:
    """Stand-in for a rank's group of two ranks. Exchanges pass the link one by one, each from the
    device's current time on at the earliest.
    """

    bytes_per_s: float
    rank: int = 0
    members: tuple[int, ...] = (0, 1)
    free_s: float = 0.0
    devices: list[VirtualDevice] = field(default_factory=list)

    def exchange(self, sends: Mapping[int, Tensor]) -> SimpleNamespace:
        start_s = max(self.devices[0].free_s, self.free_s)
        self.free_s = start_s + sum(map(len, sends.values())) / self.bytes_per_s
        tags = {peer: int(data[:HEAD_BYTES].view(torch.int32)[1]) for peer, data in sends.items()}
        received = {peer: _head(peer, tag) for peer, tag in tags.items()}
        return SimpleNamespace(wait=lambda: received, interval=Interval(start_s, self.free_s))


def played(case: DeviceCase, variant: Variant) -> float:
    """Return the seconds in which a virtual device executes a variant."""
    link = MadeUpLink(case.bandwidth_bytes_per_s)
    device = VirtualDevice(link, case, variant.num_micro_batches)  # type: ignore[arg-type]
    link.devices.append(device)
    execute(variant.schedule, case.num_layers, range(variant.num_micro_batches), device.run_op)
    return device.free_s


def test_communication_hides_in_made_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the speedups that `make bench-quick` demands on executed schedules: prefill's two
    micro-batches on a balanced link, decode's five stages with long attention. Each schedule takes
    the time of its price.
    """
    monkeypatch.setattr(overlap_device, "_sleep_until", lambda when_s: None)
    made = []
    for case in (BALANCED, DECODE_LIKE):
        result = VirtualResult(case, 2)
        full, half = case.op_seconds(2.0), case.op_seconds()
        for variant in CANDIDATES:
            seconds = played(case, variant)
            priced_s = variant.price(full, half, case.num_layers).total_s
            assert seconds == pytest.approx(priced_s, rel=1e-6)
            result.seconds[variant.name] = [seconds]
            result.priced_s[variant.name] = priced_s
        made += claims(result)
    assert [claim for claim in made if not claim.is_held] == []
    assert len(made) == 7


def test_a_claim_is_held_or_missed() -> None:
    result = VirtualResult(DECODE_LIKE, 2)
    result.seconds = {FULL.name: [3.0, 3.2], PREFILL.name: [2.0, 1.9], DECODE.name: [2.1, 2.0]}
    result.priced_s = {FULL.name: 3.0, DECODE.name: 1.8}
    assert [str(claim) for claim in claims(result)] == [
        "decode_five hides where attention is long, EP2: 1.50x of sequential, bar 1.5: held",
        "decode_five is ahead where attention is long, EP2: 0.95x of prefill_dual, bar 1: missed",
        "one full batch takes what its price says, decode-like, EP2: 1.000x of its price,"
        " bar at most 1.05: held",
        "decode_five takes what its price says, decode-like, EP2: 1.111x of its price,"
        " bar at most 1.05: missed",
    ]


def test_an_echo_is_ones_own_message() -> None:
    sent, buffer = torch.arange(5, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    assert _Echo({1: sent}, None).wait()[1] is sent
    assert torch.equal(_Echo({1: sent}, {1: buffer}).wait()[1], sent)
    assert torch.equal(buffer[:5], sent)
