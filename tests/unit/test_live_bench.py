"""Test the parts of bench/balance_live: gauges, claims, prompts, and ops that are made to take a set time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench import balance_device
from bench.balance_device import DEVICE, DeviceChild, Overruns, lasting, num_positions, num_rows
from bench.balance_live import DECODE_DEVICE, claims
from bench.live_load import LONGEST, balance_of, lognormal_lengths, task_prompts
from bench.live_rounds import BOTH, EXPERTS, OFF, REQUESTS, Scene, Served, Variant, Window
from bench.server import Running
from hadal.comm.expert_comm import Received
from hadal.core.config import Deployment, UnitsConfig
from hadal.model.block import MicroBatch
from hadal.runtime.supervisor import supervisor
from hadal.runtime.supervisor.options import Options
from hadal.runtime.topology import launch_plan


def test_gauges_of_a_unit() -> None:
    metrics = {
        'hadal_balance{objective="kv",unit="decode-0"}': 0.5,
        'hadal_balance{objective="kv",unit="decode-1"}': 0.7,
        'hadal_balance{unit="decode-0",objective="experts"}': 0.9,
        'hadal_steps_total{unit="decode-0"}': 4.0,
    }
    assert balance_of(metrics, "decode-0") == {"kv": 0.5, "experts": 0.9}


def test_balancing_is_claimed_of_virtual_devices_alone() -> None:
    def served(variant: Variant, tokens_per_s: float, **balance: float) -> Served:
        return Served(variant, cast("Running", None), [Window(tokens_per_s, 10.0, balance)])

    decode = [
        served(OFF, 100.0, experts=0.5, kv=0.8),
        served(EXPERTS, 110.0, experts=0.7, kv=0.8),
        served(REQUESTS, 105.0, experts=0.5, kv=0.72),
        served(BOTH, 120.0, experts=0.7, kv=0.9),
    ]
    scene = Scene("EP4", "decode", 4, [], 48, DECODE_DEVICE)
    assert [str(claim) for claim in claims(scene, decode)] == [
        "moved experts give ranks equal loads, EP4: 1.40x of the balance without, bar 1: held",
        "moved requests give ranks equal KV, EP4: 0.90x of the balance without, bar 1: missed",
        "balancers serve more, EP4: 1.20x of tokens/s without, bar 1: held",
    ]
    prefill = [served(OFF, 100.0, time=0.5), served(REQUESTS, 1.0), served(BOTH, 90.0)]
    assert [str(claim) for claim in claims(replace(scene, role="prefill"), prefill)] == [
        "steps cut by cost give ranks equal times, EP4: not measured, bar 1",
        "balancers serve more, EP4: 0.90x of tokens/s without, bar 1: missed",
    ]
    assert claims(replace(scene, device=None), []) == []


def test_ranks_alone_are_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "Child", DeviceChild)
    for plan in launch_plan(Deployment(decode=UnitsConfig(ranks=2))):
        child = supervisor._child(plan, Options(), tmp_path, 1)
        is_device = child._arguments[0] == DEVICE
        assert is_device == plan.name.startswith("decode-0."), plan.name
        assert child._arguments[1:] == plan.arguments


def test_prompts_are_as_long_as_asked_for() -> None:
    lengths = [10, 400, 2000, *lognormal_lengths(5, 200.0, 1.0, seed=1)]
    prompts = task_prompts("sort", lengths, seed=3)
    assert prompts == task_prompts("sort", lengths, seed=3)
    for prompt, length in zip(prompts, lengths, strict=True):
        assert length <= len(prompt) <= LONGEST
        assert len(prompt) < length + 400


def state_of(**fields: Any) -> MicroBatch:
    return MicroBatch(**{"batch": None, "config": None, "hidden_TD": torch.zeros(0, 4)} | fields)


def test_an_op_lasts_as_long_as_its_rows_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: 5.0, sleep=slept_s.append)
    monkeypatch.setattr(balance_device, "time", clock)
    rows = Received(
        torch.zeros(3, 4), torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    )
    calls = []

    def op(state: MicroBatch, layer: Any, layer_index: int) -> None:
        calls.append(layer_index)
        state.received = None  # The real op does this too, so rows are counted before it runs.

    overruns = Overruns()  # It counts only ops with work.
    lasting(op, num_rows, 0.01, overruns)(state_of(received=rows), None, 2)  # type: ignore[arg-type]
    assert slept_s == pytest.approx([0.06])
    assert (calls, overruns.num_ops, overruns.num_late) == ([2], 1, 0)
    lasting(op, num_rows, 0.01, overruns)(state_of(), None, 3)  # type: ignore[arg-type]
    assert (overruns.num_ops, overruns.num_late) == (1, 0)  # The op had no work.
    lasting(op, num_rows, 0.0, overruns)(state_of(received=rows), None, 4)  # type: ignore[arg-type]
    assert (overruns.num_ops, overruns.num_late) == (2, 1)


def test_a_rank_without_tokens_attends_to_nothing() -> None:
    assert num_positions(state_of()) == 0


@pytest.mark.parametrize("number", [1, 2])
def test_lengths_repeat(number: int) -> None:
    assert lognormal_lengths(8, 100.0, 1.5, seed=number) == lognormal_lengths(
        8, 100.0, 1.5, seed=number
    )
    assert all(
        16 <= length <= LONGEST for length in lognormal_lengths(500, 300.0, 2.0, seed=number)
    )
