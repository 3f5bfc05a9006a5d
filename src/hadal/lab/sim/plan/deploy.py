"""Plan as a deployment file: the fields that `hadal serve` reads, and their comments."""

from __future__ import annotations

import math

from hadal.core.balance import AUTO
from hadal.core.config import (
    DECODE,
    PREFILL,
    Deployment,
    FleetConfig,
    LedgerConfig,
    LimitsConfig,
    UnitsConfig,
)
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.plan.plan import DeploymentPlan, RolePlan
from hadal.lab.sim.plan.traffic import Traffic
from hadal.lab.sim.plan.units import BATCH_MAX, SLOTS_OVER, decode_kv_bytes, prefill_kv_bytes
from hadal.lab.sim.world.units import kv_blocks, token_bytes

QUEUE_S = 20.0
"""Length of the front's queue, in seconds of arrivals at the peak; at least 512 requests."""
MIB = 2**20


def deployment_of(
    plan: DeploymentPlan, *, model: str = "", num_prefill: int = 0, num_decode: int = 0
) -> Deployment:
    """Return the deployment of the whole fleet, or of `num_prefill` and `num_decode` units if both
    are given. `model`: folder of the checkpoint.
    """
    is_part = bool(num_prefill and num_decode)
    prefill, decode, hardware = plan.prefill, plan.decode, plan.hardware
    traffic, unit = plan.traffic, plan.prefill_unit
    slots = min(BATCH_MAX, math.ceil(plan.decode_unit.batch * SLOTS_OVER))
    prompts = prompts_max(unit.chunk_tokens, traffic)
    most = (num_prefill, num_decode) if is_part else (prefill.num_peak, decode.num_peak)
    running = most[0] * prefill.num_ranks * prompts + most[1] * decode.num_ranks * slots
    arrivals = QUEUE_S * traffic.requests_per_s * traffic.peak

    drafts, decode_model = plan.decode_unit.mtp_tokens, plan.decode_unit.model

    def pool_bytes(model: StepModel, role: str) -> float:
        """Return the size of a simulated rank's KV pool."""
        return kv_blocks(model, drafts, role) * BLOCK_TOKENS * token_bytes(model, drafts)

    def units(
        role: RolePlan,
        model: StepModel,
        num: int,
        num_requests: int,
        kv_bytes: float,
        drafts: int = 0,
    ) -> UnitsConfig:
        return UnitsConfig(
            num,
            ranks=role.num_ranks,
            ranks_per_node=hardware.gpus_per_node,
            redundant_experts=model.num_redundant,
            drafts=drafts,
            kv_memory_mb=max(1, int(kv_bytes // MIB)),
            max_requests=num_requests,
            max_waiting=max(256, 2 * num_requests),
        )

    return Deployment(
        model=model,
        chunk_tokens=unit.chunk_tokens,
        dispatch_format="fp8_pow2",
        transport="deepep",
        handover="nixl",
        device="cuda",
        device_memory_gb=hardware.hbm_bytes / 1e9,
        prefill=units(
            prefill,
            unit.model,
            num_prefill if is_part else prefill.num_least,
            prompts,
            min(pool_bytes(unit.model, PREFILL), prefill_kv_bytes(unit.model, unit.chunk_tokens)),
        ),
        decode=units(
            decode,
            decode_model,
            num_decode if is_part else decode.num_least,
            slots,
            min(
                pool_bytes(decode_model, DECODE),
                decode_kv_bytes(decode_model, slots * (1 + drafts), drafts),
            ),
            drafts,
        ),
        limits=LimitsConfig(max_running=running, max_queued=max(512, math.ceil(arrivals))),
        ledger=LedgerConfig(gpu_hour_usd=plan.rent.usd, gpu=hardware.name),
        fleet=FleetConfig() if is_part or plan.rules.is_static else _fleet(plan),
    )


def prompts_max(chunk_tokens: int, traffic: Traffic) -> int:
    """Return a prefill rank's most concurrent prompts: as many as fill four steps, at least 16."""
    return max(16, math.ceil(4.0 * chunk_tokens / traffic.tokens_new))


def _fleet(plan: DeploymentPlan) -> FleetConfig:
    prefill, decode = plan.prefill, plan.decode
    return FleetConfig(
        mode=AUTO,
        prefill_max=prefill.num_peak,
        decode_max=decode.num_peak,
        prefill_tokens_per_s=float(round(prefill.unit_tokens_per_s)),
        decode_tokens_per_s=float(round(decode.unit_tokens_per_s)),
        prefill_use=round(prefill.use, 4),
        decode_use=round(decode.use, 4),
        start_s=plan.rules.start_s,
        hold_s=plan.rules.hold_s,
        period_s=60.0,
    )


def heading_of(plan: DeploymentPlan) -> list[str]:
    """Return the comment lines at the top of the file."""
    traffic = plan.traffic
    lines = [
        (
            f"Planned for {traffic.name}: {traffic.requests_per_s:,.4g} requests/s on average,"
            f" {traffic.tokens_in:,.0f} tokens in,"
        ),
        f"{traffic.tokens_out:,.0f} out; {plan.slo}.",
        f"{plan}.",
        (
            f"{plan.nodes_mean:.1f} nodes on average, {plan.nodes_peak:g} at the peak:"
            f" ${plan.cost_usd:,.0f} a day at ${plan.rent.usd:g} per GPU-hour."
        ),
        "",
        "    hadal serve --config THIS-FILE --model FOLDER --dry-run",
    ]
    if traffic.cached_share:
        lines += [
            "",
            (
                f"The plan assumes that {traffic.cached_share:.1%} of prompt tokens are"
                " cached: set --cache-folder to a file system that all"
            ),
            "nodes mount, and --cache-mb to a sufficient size.",
        ]
    if num := plan.decode_unit.mtp_tokens:
        lines += [
            "",
            (
                f"The plan assumes {num} MTP draft token(s) per request and decode step,"
                f" each accepted in {plan.mtp_accept:.0%} of cases if all before it were."
            ),
        ]
    if plan.decode_unit.model.expert_dtype != "fp8":
        lines += ["", "The plan assumes experts in FP4, which `hadal serve` cannot load yet."]
    return lines


def notes_of(plan: DeploymentPlan) -> dict[str, str]:
    """Return field -> comment that explains its value."""
    prefill, decode, unit = plan.prefill, plan.decode, plan.decode_unit
    why = "more do not fit beside the weights" if unit.is_memory_bound else "more would be slower"
    notes = {
        "chunk_tokens": "maximum number of tokens per rank in a prefill step",
        "prefill.ranks": f"{prefill.unit_nodes:g} nodes",
        "decode.ranks": f"{decode.unit_nodes:g} nodes",
        "prefill.redundant_experts": f"{plan.prefill_unit.model.num_expert_slots} expert slots"
        " per rank",
        "decode.redundant_experts": f"{unit.model.num_expert_slots} expert slots per rank",
        "decode.max_requests": f"planned {unit.batch} at {unit.tpot_s * 1e3:.1f} ms per token;"
        f" {why}",
    }
    if plan.rules.is_static:
        return notes
    return notes | {
        "prefill.units": "minimum, at night",
        "decode.units": "minimum",
        "fleet.prefill_max": "at the peak",
        "fleet.prefill_tokens_per_s": (
            f"per unit; {1.0 - plan.traffic.cached_share:.1%} of them computed"
        ),
        "fleet.decode_tokens_per_s": "per unit at its planned batch",
        "fleet.prefill_use": "headroom for TTFT and for uneven arrivals",
        "fleet.decode_use": "headroom for uneven arrivals",
    }
