"""A study: the published day by default; an impossible value is an error when it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hadal.core.balance import NO_MOVES, OFF, TURNS
from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.day.study import Study, UnitsStudy
from hadal.lab.sim.sessions import LogNormal, SystemPrompt, WorkloadParams

DAY = Study()


def units(role: str, **changes: Any) -> dict[str, UnitsStudy]:
    return {role: replace(DAY.units_of(role), **changes)}


def part(name: str, **changes: Any) -> dict[str, Any]:
    return {name: replace(getattr(DAY, name), **changes)}


def test_the_default_is_the_published_fleet() -> None:
    """Check prefill EP32 on 4 nodes with 32 redundant experts, decode EP144 on 18 (DeepSeek's
    overview).
    """
    rules = DAY.rules()
    assert (rules.prefill.unit_nodes, rules.decode.unit_nodes) == (4, 18)
    bundles = 9
    most = (
        bundles * (rules.prefill.num_bundle * 4 + rules.decode.num_bundle * 18)
        + rules.prefill.num_extra * 4
    )
    assert most == 278, "the published peak is nine bundles and what stands beside them"
    assert DAY.step_model(PREFILL, 1.0).num_expert_slots == 9
    assert DAY.step_model(DECODE, 1.0).num_expert_slots == 2
    assert (DAY.gpu_hour_usd, DAY.prices, DAY.hardware) == (2.0, "deepseek-reasoner-flat", "h800")


def test_what_is_simulated_is_configured_as_it_would_serve() -> None:
    study = replace(
        DAY,
        **units(DECODE, request_balance=TURNS, expert_balance=OFF, max_requests=7),
        chunk_tokens=999,
    )
    made = study.deployment(3, 2)
    assert (made.prefill.units, made.decode.units) == (3, 2)
    assert (made.prefill.ranks, made.decode.ranks) == (32, 144)
    found = (made.decode.request_balance, made.decode.expert_balance, made.decode.max_requests)
    assert found == (TURNS, OFF, 7)
    assert made.prefill.request_balance == "auto"
    assert made.chunk_tokens == 999
    # A default limit must not refuse a day's peak.
    assert made.limits.max_running >= 100_000


def test_nodes_are_those_of_the_hardware() -> None:
    """Count nodes of GB200: a tray has 4 GPUs."""
    assert replace(DAY, hardware="gb200").rules().decode.unit_nodes == 36


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hardware": "h900"}, "use one of h800"),
        ({"prices": "1/2"}, "HIT/MISS/OUT"),
        ({"gpu_hour_usd": -1.0}, "use 0 or more"),
        ({"gpu_hour_usd": float("nan")}, "use 0 or more"),
        ({"tpot_ms": 0.0}, "tpot_ms is 0.0; it must be above 0"),
        ({"tpot_ms": float("inf")}, "tpot_ms is inf; it must be a finite number"),
        ({"tpot_ms": float("nan")}, "tpot_ms is nan; it must be a finite number"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"drafts": -1}, "drafts is -1; it must be at least 0"),
        ({"drafts": 4}, "drafts"),
        ({"mtp_accept": 1.5}, "mtp_accept is 1.5; it must be from 0 to 1"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0; it must be at least 1"),
        (part("cache", disk_pb=-1.0), "cache.disk_pb is -1.0"),
        (part("cache", sample=0.5), "cache.sample is 0.5; it must be at least 1"),
        (part("cache", policy="fifo"), "use one of arc, lru"),
        (part("window", seconds=0.0), "window.seconds is 0.0; it must be above 0"),
        (part("window", settle_s=-1.0), "window.settle_s is -1.0"),
        (part("window", first_token_s=-1.0), "window.first_token_s"),
        (part("window", back_s=-1.0), "window.back_s"),
        (part("fleet", noise=-0.1), "fleet.noise"),
        (part("fleet", start_s=-1.0), "start_s"),
        (part("fleet", start_spread=1.5), "fleet.start_spread is 1.5; it must be from 0 to 1"),
        (
            part("fleet", start_fail_share=1.0),
            "fleet.start_fail_share is 1.0; it must be from 0 to below 1",
        ),
        (part("fleet", hours_between_failures=-1.0), "fleet.hours_between_failures"),
        (part("fleet", nodes_max=10), "the minimum of 5 prefill"),
        (units(PREFILL, request_balance=NO_MOVES), "prefill: request_balance is 'no_moves'"),
        (units(DECODE, request_balance="best"), "one of auto, no_moves, off, turns"),
        (units(DECODE, expert_balance="best"), "expert_balance is 'best'"),
        (units(DECODE, ranks=0), "unit_nodes is 0"),
        (units(DECODE, ranks=100), "100 ranks"),
        (units(DECODE, redundant_experts=1), "do not divide evenly among 144"),
        (
            units(PREFILL, redundant_experts=-32),
            "prefill.redundant_experts is -32; it must be at least 0",
        ),
        (units(DECODE, max_requests=0), "decode.max_requests is 0; it must be at least 1"),
        (units(DECODE, ranks=2, redundant_experts=0), "no memory left for KV with 128 experts"),
        (units(DECODE, bundle=0), "for both roles, or 0 for both"),
        (units(DECODE, use=1.5), "use is 1.5"),
        (units(DECODE, units_min=0), "num_min is 0"),
    ],
)
def test_what_cannot_be_says_so_at_birth(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        replace(DAY, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"share_r1": 1.1}, "share_r1 is 1.1; it must be a probability"),
        ({"sessions_per_day": 0.0}, "above 0"),
        ({"continue_share": 0.9}, "above 1"),
        ({"message": LogNormal(-10.0, 1.0, 10.0)}, "message is LogNormal"),
        ({"think_s": LogNormal(10.0, -1.0, 10.0)}, "think_s is LogNormal"),
        ({"reason_short": (0.3,)}, "reason_short must be a probability and two numbers"),
        ({"reason_short": (1.3, 1.0, 1.0)}, "reason_short must be a probability"),
        ({"reason_long": (0.0, 1.0)}, "reason_long two numbers above 0"),
        ({"shares": (1.0,)}, "shares has 1 numbers; give 24"),
        ({"shares": (0.0,) * 24}, "24 numbers above 0"),
        ({"system_prompts": ()}, "add up to 1"),
        ({"system_prompts": (SystemPrompt(1.5, 0), SystemPrompt(-0.5, 0))}, "both 0 or more"),
        ({"token_s": 0.0}, "token_s above 0"),
        ({"context": 0}, "context must be at least 2"),
    ],
)
def test_a_workload_that_cannot_be_says_so_at_birth(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(WorkloadParams(), **changes)


def test_all_is_sold_at_the_asked_prices() -> None:
    membership = replace(DAY, prices="1/2/3").model_prices()
    assert (
        membership.of("deepseek-chat").standard.out
        == membership.of("deepseek-reasoner").standard.out
        == 3_000_000
    )
