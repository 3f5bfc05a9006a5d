"""Inputs and outputs of `hadal plan`: traffic, prices, deployments, plan.json. Plans nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hadal.core.config import to_toml
from hadal.core.documents import MAX_TABLE_BYTES, MAX_TOML_BYTES, parse_toml, read_text, shown
from hadal.core.errors import ConfigError
from hadal.lab.sim.plan.deploy import deployment_of, heading_of, notes_of
from hadal.lab.sim.plan.measure import Measured
from hadal.lab.sim.plan.plan import DeploymentPlan
from hadal.lab.sim.plan.rows import Row
from hadal.lab.sim.plan.traces import azure, mooncake
from hadal.lab.sim.plan.traffic import Traffic, traffic_from, traffic_of


def read_traffic(path: Path | None) -> Traffic:
    """Read a table (.toml) or a trace: Mooncake's JSON lines (.jsonl, .jsonl.gz) or Azure's CSV
    (.csv, .csv.gz). None: DeepSeek's day. Raises ValueError that names the problem in the file.
    """
    if path is None:
        return Traffic(kv_length=4989.0)
    name = path.name.lower()
    limit = MAX_TOML_BYTES if name.endswith(".toml") else MAX_TABLE_BYTES
    text = read_text(path, "traffic", limit, hint="--example-traffic prints an example.")
    try:
        if name.endswith(".toml"):
            return traffic_of(parse_toml(text, path.name))
        if name.endswith((".jsonl", ".jsonl.gz")):
            return traffic_from(mooncake(text.splitlines()), path.name)
        if name.endswith((".csv", ".csv.gz")):
            return traffic_from(azure(text.splitlines()), path.name)
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error
    raise ValueError(
        f"{path} is not a traffic file: use .toml (see --example-traffic), Mooncake's"
        " .jsonl or .jsonl.gz, or Azure's .csv."
    )


def read_prices(given: Sequence[str]) -> dict[str, float]:
    """Parse prices such as `h20=1.2` to hardware -> dollars per GPU-hour. Raises ValueError."""
    found = {}
    for part in (part for text in given for part in text.split(",")):
        name, _, usd = part.partition("=")
        try:
            found[name.strip().lower()] = float(usd)
        except ValueError:
            raise ValueError(
                f"--price {shown(part)}: write dollars per GPU-hour, such as h20=1.2."
            ) from None
    return found


def write_plans(
    folder: Path, plans: Sequence[DeploymentPlan], report: dict[str, Any], model: str
) -> list[Path]:
    """Write a deployment file per plan, best first, and plan.json. Return the paths. Raises
    ValueError if the folder cannot be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate(plans, 1):
            prefill, decode = plan.prefill.num_ranks, plan.decode.num_ranks
            path = folder / f"{number}_{plan.hardware.name}_ep{prefill}_ep{decode}.toml"
            path.write_text(
                to_toml(deployment_of(plan, model=model), heading_of(plan), notes_of(plan)),
                encoding="utf-8",
            )
            paths.append(path)
        (folder / "plan.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error
    return [*paths, folder / "plan.json"]


def plan_object(plan: DeploymentPlan) -> dict[str, Any]:
    """Return a plan as a JSON object. Names of fields contain their unit of measure, if any."""
    decode, prefill = plan.decode_unit, plan.prefill_unit
    return {
        "hardware": plan.hardware.name,
        "usd_per_gpu_hour": plan.rent.usd,
        "cost_usd_day": plan.cost_usd,
        "usd_per_million_tokens_out": plan.usd_per_million_out,
        "gpu_hours_day": plan.gpu_hours,
        "nodes_mean": plan.nodes_mean,
        "nodes_peak": plan.nodes_peak,
        "prefill": {
            "ranks": plan.prefill.num_ranks,
            "redundant_experts": prefill.model.num_redundant,
            "experts_dtype": prefill.model.expert_dtype,
            "chunk_tokens": prefill.chunk_tokens,
            "units_peak": plan.prefill.num_peak,
            "units_least": plan.prefill.num_least,
            "use": plan.prefill.use,
            "tokens_per_s": plan.prefill.unit_tokens_per_s,
            "step_s": prefill.step_s,
            "ttft_s": prefill.ttft_s,
        },
        "decode": {
            "ranks": plan.decode.num_ranks,
            "redundant_experts": decode.model.num_redundant,
            "experts_dtype": decode.model.expert_dtype,
            "mtp_tokens": decode.mtp_tokens,
            "batch": decode.batch,
            "is_memory_bound": decode.is_memory_bound,
            "units_peak": plan.decode.num_peak,
            "units_least": plan.decode.num_least,
            "use": plan.decode.use,
            "tokens_per_s": plan.decode.unit_tokens_per_s,
            "tpot_s": decode.tpot_s,
            "schedule": decode.price.schedule.name,
        },
        "extrapolated": list(plan.extrapolated),
    }


def row_object(row: Row) -> dict[str, Any]:
    return {
        "dimension": row.dimension,
        "value": row.value,
        "cost_usd_day": row.cost_usd,
        "why": row.why,
        "plan": None if row.plan is None else plan_object(row.plan),
    }


def measured_object(plan: DeploymentPlan, measured: Measured) -> dict[str, Any]:
    """Return the simulator's measurements of a plan as a JSON object."""
    ttft, tpot = measured.ttft_s, measured.tpot_s
    return {
        "plan": str(plan),
        "prefill_units": measured.num_prefill,
        "decode_units": measured.num_decode,
        "requests_per_s": measured.requests_per_s,
        "prefill_load": measured.prefill_load,
        "decode_load": measured.decode_load,
        "is_full_load": measured.is_full,
        "seconds": measured.seconds,
        "requests": measured.num_requests,
        "ttft_s": {"mean": ttft.mean, "p50": ttft.p50, "p90": ttft.p90, "p99": ttft.p99},
        "tpot_s": {"mean": tpot.mean, "p50": tpot.p50, "p90": tpot.p90, "p99": tpot.p99},
        "requests_per_rank": measured.requests_per_rank,
        "kv_length_mean": measured.kv_length,
        "problem": measured.problem(plan),
    }
