"""Console frames of `hadal simulate --frames`: a few seconds of the published fleet at its peak of
278 nodes.

The serving roles run in simulated time (lab/sim/world): single requests, and a rank that dies and
returns. The fleet's state results from its decisions over the hours before, on the published
demand. Income and cost are a ledger's report of the requests answered in these seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hadal.core.config import DECODE, PREFILL, ROLES, Deployment
from hadal.core.facts import NodesFact, RequestFact, micros, sum_kv_tokens
from hadal.core.messages.fleet import Demand
from hadal.core.messages.units import UnitDown, UnitUp
from hadal.core.overview import Buckets, FleetSeen, Overview, UnitExperts
from hadal.core.placement import spread
from hadal.core.seams import StartUnit, StopUnit, Tick
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.gateway.desk.trace import TraceReply
from hadal.lab.perf.trace import traced_step
from hadal.lab.sim.day.published import DemandCurve
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.expert_loads import balanced, draw_loads
from hadal.lab.sim.world.faults import RanksDie, WorldFaults
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.world import FleetWorld
from hadal.lab.simulate.stages import expert_ranks
from hadal.policy.demand import DAY_S
from hadal.progress import Bar
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.fleet.fleet import Fleet
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.status import ProcessEnd, ProcessStatus, Status
from hadal.runtime.topology import GATEWAY, ProcessPlan, launch_plan
from hadal.stats.report import BY, report
from hadal.stats.tally import Tally

NUM_PREFILL, NUM_DECODE = 29, 9
"""Units at the published peak of 278 nodes: 29 of 4 nodes and 9 of 18."""
_SECONDS, _FRAME_S = 6.0, 0.5
_NUM_FRAMES = int(_SECONDS / _FRAME_S)
_REQUESTS_PER_S = 340
_DIES = RanksDie(1.5, "decode-0", (17,), form_s=0.5, back_s=2.5)
_MODEL = "deepseek-v3"
_TENANTS = ("search", "assistant", "batch")
_BOUNDS_S = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_FLEET_HOURS = 6
_BEIJING_S = 8 * 3600
PEAK_UNIX_S = 1_740_636_000.0
"""27 February 2025, 14:00 in Beijing: a busy hour of the published day."""
_DEMAND_S = 60.0


def world_frames(study: Study, unix_s: float) -> Iterator[ConsoleFrame]:
    """Yield the frames of a simulation that begins at `unix_s`."""
    config = study.deployment(NUM_PREFILL, NUM_DECODE)
    placed = {role: ranks.imbalance for role, ranks in expert_ranks(study).items()}
    rng = np.random.default_rng(study.seed)
    requests = _requests(rng)
    world = FleetWorld(
        config,
        {role: study.step_model(role, placed[role]) for role in ROLES},
        requests,
        faults=WorldFaults(ranks=(_DIES,)),
    )
    plans = [plan for plan in launch_plan(config) if plan.role in (*ROLES, GATEWAY)]
    experts = {"decode-0": _experts(config, rng)}
    fleet = _fleet(study, unix_s)
    with Bar("frames", _NUM_FRAMES) as bar:
        for number in range(1, _NUM_FRAMES + 1):
            now_s = number * _FRAME_S
            world.run(now_s)
            overview = Overview(
                unix_s + now_s,
                _MODEL,
                "degraded" if _is_dead(now_s) else "ready",
                ("decode-0.17",) if _is_dead(now_s) else (),
                {PREFILL: NUM_PREFILL, DECODE: NUM_DECODE},
                {PREFILL: config.prefill.ranks, DECODE: config.decode.ranks},
                world.front.snapshot(),
                _latency(world, now_s),
                experts,
                {PREFILL: config.prefill.ranks_per_node, DECODE: config.decode.ranks_per_node},
            )
            money = _money(study, config, world, unix_s, now_s)
            status = _status(plans, unix_s, now_s)
            yield ConsoleFrame(
                unix_s + now_s,
                overview,
                status,
                fleet,
                money,
                traces={
                    unit: TraceReply(unit, (traced_step(number, 0.0, price),))
                    for unit, price in world.last_steps().values()
                },
                place="simulated, 278 nodes",
            )
            bar.update(f"{now_s:g} of {_SECONDS:g} s simulated", done=number)


def _requests(rng: np.random.Generator) -> Requests:
    """Draw requests with 3,800 tokens in on average, as published. Outputs are short (120 tokens on
    average, published 1,050), so that requests end within the simulated seconds.
    """
    num = int(_REQUESTS_PER_S * 0.8 * _SECONDS)
    return Requests(
        np.sort(rng.uniform(0.0, 0.8 * _SECONDS, num)),
        rng.integers(200, 7_400, num),
        rng.geometric(1 / 120, num),
    )


def _is_dead(now_s: float) -> bool:
    return _DIES.at_s <= now_s < _DIES.at_s + _DIES.back_s


def _latency(world: FleetWorld, now_s: float) -> dict[str, Buckets]:
    seen, requests = world.seen, world.requests
    with np.errstate(invalid="ignore"):
        first_s = (seen.first_token_s - requests.arrival_s)[seen.first_token_s <= now_s]
        ended = (seen.end_s <= now_s) & (requests.tokens_out > 1)
        per_s = (seen.end_s - seen.first_token_s)[ended] / (requests.tokens_out[ended] - 1)
    return {
        name: Buckets(
            _BOUNDS_S,
            (*(float((values_s <= bound).sum()) for bound in _BOUNDS_S), float(len(values_s))),
        )
        for name, values_s in (("first_token", first_s), ("per_token", per_s))
    }


def _experts(config: Deployment, rng: np.random.Generator) -> UnitExperts:
    """Return a decode unit's balanced experts, with loads that deviate from the planned ones."""
    loads_LE = draw_loads(DECODE, rng)
    units = config.decode
    num_layers, num_experts = loads_LE.shape
    like = spread(num_layers, num_experts, units.ranks, units.redundant_experts)
    placement = balanced(
        loads_LE, DECODE, like, units.redundant_experts, units.ranks_per_node
    ).placement
    nodes = tuple(rank // units.ranks_per_node for rank in range(units.ranks))
    balancer = ExpertBalancer(placement, nodes, is_planning=False)
    table = placement.slot_to_expert_LRS.astype(np.int64)
    num_replicas = placement.by_expert(np.ones(table.shape))
    tokens_LE = 4_000.0 * loads_LE * rng.lognormal(0.0, 0.1, loads_LE.shape)
    layers = np.arange(len(table))[:, None, None]
    each = np.where(table < 0, 0.0, (tokens_LE / np.maximum(num_replicas, 1))[layers, table])
    balancer.counts.window.add(placement, each.astype(np.int64), range(units.ranks))
    return balancer.described()


def _fleet(study: Study, unix_s: float) -> FleetSeen:
    """Return the fleet role's state after the hours before `unix_s` on the published demand."""
    curve, model = DemandCurve(), study.rules()
    peak = max(curve.requests_per_s(hour * 3600.0) for hour in range(24))
    tokens_in = peak * curve.tokens_in_request / (NUM_PREFILL * model.prefill.use)
    tokens_out = peak * curve.tokens_out_request / (NUM_DECODE * model.decode.use)
    begin_s = unix_s - _FLEET_HOURS * 3600
    fleet = Fleet(
        replace(model, period_s=_DEMAND_S),
        prefill_tokens_per_s=tokens_in,
        decode_tokens_per_s=tokens_out,
        day_s=begin_s,
    )
    effects = fleet.start(0.0)
    asked = 0.0
    starting: list[tuple[float, str]] = []
    for minute in range(1, _FLEET_HOURS * 60 + 1):
        now_s = minute * _DEMAND_S
        asked += _DEMAND_S * curve.requests_per_s((begin_s + now_s + _BEIJING_S) % DAY_S)
        totals = round(asked * curve.tokens_in_request), round(asked * curve.tokens_out_request)
        events: list[Any] = [Demand("front-0", *totals, 0, 0, ()), Tick()]
        for effect in effects:
            if isinstance(effect, StartUnit):
                starting.append((now_s + study.fleet.start_s, effect.unit))
            elif isinstance(effect, StopUnit):
                events.append(UnitDown(effect.unit, "it was asked to"))
        events += [
            UnitUp(unit, unit.split("-")[0], f"{unit}-{minute}", 1, 1)
            for up_s, unit in starting
            if up_s <= now_s
        ]
        starting = [(up_s, unit) for up_s, unit in starting if up_s > now_s]
        effects = [effect for event in events for effect in fleet.handle(now_s, event)]
    return fleet.seen(_FLEET_HOURS * 3600.0)


def _money(
    study: Study, config: Deployment, world: FleetWorld, unix_s: float, now_s: float
) -> dict[str, Any]:
    tally, seen, requests = Tally(), world.seen, world.requests
    for number in np.flatnonzero(seen.end_s <= now_s).tolist():
        num_in, num_out = int(requests.tokens_in[number]), int(requests.tokens_out[number])
        hit = int(seen.tokens_hit[number])
        tally.add(
            RequestFact(
                str(number),
                _TENANTS[number % len(_TENANTS)],
                _MODEL,
                hit,
                num_in - hit,
                num_out,
                sum_kv_tokens(num_in, num_out),
                "stop",
                unix_s + float(requests.arrival_s[number]),
                unix_s + float(seen.end_s[number]),
                unix_s + float(seen.first_token_s[number]),
                unix_s + float(seen.end_s[number]),
            )
        )
    nodes = [
        NodesFact(
            f"{role}-{index}",
            "1",
            role,
            units.ranks,
            units.ranks_per_node,
            unix_s,
            unix_s + now_s,
            study.hardware,
            math.floor(study.gpu_hour_usd * 1e6),
            _MODEL,
        )
        for role, units in ((PREFILL, config.prefill), (DECODE, config.decode))
        for index in range(units.units)
    ]
    priced = tally.priced(study.model_prices())
    window = micros(unix_s), micros(unix_s + now_s)
    return {by: report(priced, nodes, *window, by=by).as_json() for by in BY}


def _status(plans: list[ProcessPlan], unix_s: float, now_s: float) -> Status:
    dead = f"{_DIES.unit}.{_DIES.ranks[0]}"
    has_died = now_s >= _DIES.at_s
    processes = {}
    for plan in plans:
        is_it = plan.name == dead and has_died
        phase = ProcessPhase.STARTING if is_it and _is_dead(now_s) else ProcessPhase.READY
        processes[plan.name] = ProcessStatus(
            plan.role,
            phase,
            0,
            2 if is_it else 1,
            "killed by SIGKILL" if is_it else "",
            f"node-{plan.node}" if plan.node is not None else "",
        )
    ends = (ProcessEnd(unix_s + _DIES.at_s, dead, "killed by SIGKILL", False),) if has_died else ()
    return Status("", "simulated", 0, not _is_dead(now_s), False, now_s, processes, ends=ends)
