"""Expert placement of `hadal balance`: reads measured loads from a JSON file, and returns the plan
as JSON or as text bars.

Shapes: T steps of a window, L layers, E logical experts, R ranks, S expert slots of a rank.
"""

from __future__ import annotations

import json
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np

from hadal.core.arrays import Floats
from hadal.core.documents import MAX_TABLE_BYTES, parse_json, read_text
from hadal.core.placement import EMPTY, Placement, spread
from hadal.policy.experts.balance import Cluster, ExpertPlan, balance, balancedness, rank_loads
from hadal.progress import Bar

HEIGHTS = "▁▂▃▄▅▆▇█"
"""Characters for a rank's load, lowest first."""
MAX_BAR_CHARS = 50
MARGIN_CHARS = 18
"""Characters left of a bar, for its name and number."""
MOST_TOKENS = 1e18
"""Maximum number of tokens per expert: a million years at 30,000 tokens/s."""


def plan_text(
    loads: Path,
    current: Path | None,
    num_ranks: int,
    num_nodes: int,
    num_expert_slots: int,
    *,
    is_json: bool,
    **how: Any,
) -> str:
    """Return the command's output: the plan for the loads in a file, as JSON or as bars. The bars
    compare it with the `current` placement, or with experts in order. `how`: further arguments of
    policy/experts/balance. Raises ValueError for unsuitable values, and ConfigError for unreadable
    files.
    """
    window = loads_of(_read_json(loads))
    cluster = cluster_of(window, num_ranks, num_nodes, num_expert_slots)
    before = split = None
    if current is not None:
        today = _read_json(current)
        before = placement_of(today, window, cluster)
        split = split_of(today, before)
    start_s = time.perf_counter()
    with Bar("hadal balance") as bar:
        bar.update("placing experts")
        plan = balance(window, cluster, current=before, **how)
    elapsed_ms = 1e3 * (time.perf_counter() - start_s)
    if is_json:
        return json.dumps(as_json(plan, window, before, elapsed_ms))
    width = shutil.get_terminal_size().columns
    return bars(plan, window, cluster, before, elapsed_ms, split, width=width)


def _read_json(path: Path) -> Any:
    """Return the JSON value of a file, gzipped or not. Raises ConfigError."""
    return parse_json(read_text(path, "JSON", MAX_TABLE_BYTES), str(path))


def loads_of(value: Any) -> Floats:
    """Return loads [L, E] or [T, L, E], from a matrix or an object's `tokens_per_expert`. Raises
    ValueError for other values.
    """
    if isinstance(value, dict):
        if "tokens_per_expert" not in value:
            found = ", ".join(list(map(str, value))[:5]) or "nothing"
            raise ValueError(f"the loads are an object without tokens_per_expert (it has {found}).")
        value = value["tokens_per_expert"]
    try:
        loads = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "the loads are not a matrix: give one row of token counts per layer, all rows"
            " equally long."
        ) from error
    if loads.ndim not in (2, 3) or not loads.size:
        raise ValueError(
            f"the loads have shape {list(loads.shape)}; give [layers, experts] or [steps,"
            " layers, experts]."
        )
    wrong = np.argwhere(~np.isfinite(loads) | (loads < 0))
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise ValueError(
            f"the load at {list(at)} is {loads[at]:g}; loads are numbers of tokens, 0 or more."
        )
    if loads.max() > MOST_TOKENS:
        raise ValueError(f"the load of one expert is {loads.max():g} tokens, too many to add up.")
    return loads


def cluster_of(loads: Floats, num_ranks: int, num_nodes: int, num_expert_slots: int) -> Cluster:
    """Return a cluster of ranks with `num_expert_slots` each. If that is at least the number of
    experts, it is taken as the total of all ranks, because a rank with every expert needs no expert
    parallelism. Raises ValueError if sizes do not divide evenly.
    """
    if num_ranks > 1 and num_expert_slots >= loads.shape[-1]:
        if num_expert_slots % num_ranks:
            raise ValueError(
                f"{num_expert_slots} slots do not divide evenly among {num_ranks} ranks."
            )
        num_expert_slots //= num_ranks
    return Cluster.even(num_ranks, num_nodes, num_expert_slots)


def placement_of(value: Any, loads: Floats, cluster: Cluster) -> Placement:
    """Return the placement with `physical_to_logical` rows [L, R*S], rank by rank. Raises
    ValueError if the rows do not fit the loads and cluster.
    """
    rows = value.get("physical_to_logical") if isinstance(value, dict) else value
    num_layers, num_experts = loads.shape[-2:]
    num_ranks = len(cluster.expert_slots)
    try:
        slots = np.asarray(rows, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "the current placement is not a matrix; give the output of --json, or its rows."
        ) from error
    if slots.ndim != 2 or not slots.size or len(slots) != num_layers or slots.shape[1] % num_ranks:
        raise ValueError(
            f"the current placement has shape {list(slots.shape)}; give {num_layers}"
            f" layers of slots, equally many for each of {num_ranks} ranks."
        )
    if not ((slots >= EMPTY) & (slots < num_experts) & (slots == np.floor(slots))).all():
        raise ValueError(f"the current placement has experts outside 0 to {num_experts - 1}.")
    return Placement(num_experts, slots.reshape(num_layers, num_ranks, -1).astype(np.int16))


def as_json(
    plan: ExpertPlan, loads: Floats, before: Placement | None, elapsed_ms: float
) -> dict[str, Any]:
    """Return the plan as JSON values, with expert slots rank by rank. `moved_replicas` is null if
    `before` is None.
    """
    num_layers = plan.placement.num_layers
    split = (
        None if plan.split_LRS is None else plan.split_LRS.reshape(num_layers, -1).round(6).tolist()
    )
    mean, worst = _mean_and_worst(plan.balancedness_L, loads)
    return {
        "physical_to_logical": plan.placement.slot_to_expert_LRS.reshape(num_layers, -1).tolist(),
        "split": split,
        "balancedness": {"mean": mean, "worst": worst},
        "moved_replicas": None if before is None else plan.moved_replicas,
        "elapsed_ms": round(elapsed_ms, 3),
    }


def split_of(value: Any, placement: Placement) -> Floats | None:
    """Return the load split [L, R, S] in the output of --json; None if it is even. Raises
    ValueError if it is invalid.
    """
    rows = value.get("split") if isinstance(value, dict) else None
    if rows is None:
        return None
    shape = placement.slot_to_expert_LRS.shape
    try:
        split = np.asarray(rows, np.float64).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the current split is not a matrix of {shape[0]} x {shape[1] * shape[2]} fractions."
        ) from error
    if not ((split >= 0) & (split <= 1)).all():
        raise ValueError("the current split has values outside 0 to 1.")
    return np.asarray(split)


def bars(
    plan: ExpertPlan,
    loads: Floats,
    cluster: Cluster,
    before: Placement | None,
    elapsed_ms: float,
    before_split: Floats | None = None,
    *,
    width: int = 80,
) -> str:
    """Return bars of the balancedness before and after, and the ranks' loads in the layer that was
    worst before (that is worst after, if nothing is known of before), in lines of at most
    max(`width`, 28) characters.
    """
    num_chars = max(10, width - MARGIN_CHARS)
    start = before if before is not None else _in_order(loads, cluster)
    lines = []
    worst_layer = int(np.argmin(plan.balancedness_L))
    if start is not None:
        ours = balancedness(start, loads, before_split, cluster)
        worst_layer = int(np.argmin(ours))
        name = "today" if before is not None else "experts in order"
        lines += [f"before ({name})", *_two_bars(ours, loads, num_chars)]
    lines += ["after", *_two_bars(plan.balancedness_L, loads, num_chars), ""]
    summed = loads if loads.ndim == 2 else loads.sum(axis=0)
    after = rank_loads(plan.placement, summed, plan.split_LRS)[worst_layer]
    label_to_row = {"after": after}
    if start is not None:
        label_to_row = {
            "before": rank_loads(start, summed, before_split)[worst_layer],
            "after": after,
        }
    lines += [f"tokens by rank, layer {worst_layer}", *_rank_rows(label_to_row, num_chars)]
    if before is None:
        moves = (
            "Planned without a current placement; with --current, the output has the"
            " number of replicas to move."
        )
    else:
        moves = (
            f"{plan.moved_replicas:,}"
            f" {'replica moves' if plan.moved_replicas == 1 else 'replicas move'}."
        )
    lines += [
        "",
        *textwrap.wrap(f"{moves} Planned in {elapsed_ms:.1f} ms.", num_chars + MARGIN_CHARS),
    ]
    return "\n".join(lines)


def _rank_rows(label_to_row: dict[str, Floats], num_chars: int) -> list[str]:
    """Return lines with one character per rank for its load, on a common scale, and each row's
    minimum and maximum.
    """
    num_chars -= num_chars % 8 if num_chars > 8 else 0  # Most nodes have 8 ranks.
    top = max(row.max() for row in label_to_row.values()) or 1.0
    lines = []
    for label, row in label_to_row.items():
        heights = np.minimum((row / top * len(HEIGHTS)).astype(int), len(HEIGHTS) - 1)
        text = "".join(HEIGHTS[height] for height in heights)
        for first in range(0, len(text), num_chars):
            last = min(first + num_chars, len(text)) - 1
            ranks = f"{first}-{last}" if len(text) > num_chars else ""
            lines.append(
                f"  {'' if first else label:6} {ranks:>8} {text[first : last + 1]}".rstrip()
            )
    for label, row in label_to_row.items():
        mean = row.mean()
        times = f", {row.max() / mean:.2f}x the mean" if mean > 0 else ""
        lines.append(f"  {label:6} {_tokens(row.min())} to {_tokens(row.max())} tokens{times}")
    return lines


def _tokens(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


def _two_bars(balancedness_L: Floats, loads: Floats, num_chars: int) -> list[str]:
    mean, worst = _mean_and_worst(balancedness_L, loads)
    return [
        f"  {label:6} {value:.4f}   {'█' * round(value * min(num_chars, MAX_BAR_CHARS))}"
        for label, value in (("mean", mean), ("worst", worst))
    ]


def _mean_and_worst(balancedness_L: Floats, loads: Floats) -> tuple[float, float]:
    """Return (mean, minimum) over layers with tokens: rows of dense layers may be all zeros."""
    summed = loads.reshape(-1, *loads.shape[-2:]).sum(axis=(0, 2))
    counted = balancedness_L[summed > 0] if summed.any() else balancedness_L
    return float(counted.mean()), float(counted.min())


def _in_order(loads: Floats, cluster: Cluster) -> Placement | None:
    """Return a placement of experts in order, regardless of loads; None if they do not fit."""
    num_layers, num_experts = loads.shape[-2:]
    total = sum(cluster.expert_slots)
    if total < num_experts or max(cluster.expert_slots) > num_experts:
        return None
    return spread(num_layers, num_experts, len(cluster.expert_slots), total - num_experts)
