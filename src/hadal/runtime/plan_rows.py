"""Plan of a deployment as rows: topology, memory per rank, experts, messages, schedule and cache.

The start-up banner and `hadal serve --dry-run` print these rows, and `hadal model` similar ones, in
colour on a terminal and plain elsewhere. Builds the placement and the layouts that ranks would use;
starts nothing, reads no weights, allocates no buffer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.text import Text

from hadal.comm.layout import MessageLayout, deepep_buffer_bytes, low_latency_buffers, mean_rows
from hadal.core.balance import AUTO, OFF
from hadal.core.config import DECODE, ROLES, Deployment, UnitsConfig, num_drafts_max, units_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.overlap.plan import SCHEDULES
from hadal.roles.leaders import first_placement
from hadal.runtime.amounts import gb, millions, plural
from hadal.runtime.memory import MemoryPlan, max_step_tokens, mode_of
from hadal.runtime.pool_sizes import NUM_SCRATCH_BLOCKS
from hadal.runtime.resolve import Resolved
from hadal.runtime.topology import (
    UnitNodes,
    gateway_names,
    gateway_nodes,
    num_nodes,
    place_units,
    ranges,
)

Row = tuple[str, str]
"""(name, text); a row without a name continues the row above it."""
_PRECISIONS = {"F8_E4M3": "FP8 E4M3, block-scaled", "BF16": "BF16", "F32": "FP32", "F16": "FP16"}
_SHOWN = 8
"""Longest list of units or experts shown in full; of a longer one, the first ones and a count."""


def console_for(file: TextIO) -> Console:
    """Return a console that neither wraps rows nor colours their values."""
    return Console(file=file, highlight=False, soft_wrap=True)


def named(name: str, texts: Sequence[str]) -> list[Row]:
    """Return the texts as rows; only the first has the name."""
    return [("" if index else name, text) for index, text in enumerate(texts)]


def print_rows(console: Console, rows: Iterable[Row], width: int) -> None:
    """Print rows; `width`: columns of their names."""
    for name, text in rows:
        console.print(Text(f"{name:<{width}}", style="dim") + Text(text))


def print_sections(
    console: Console, found: Iterable[tuple[str, list[Row]]], width: int = 14
) -> None:
    """Print (title, rows); `width`: columns of the rows' names."""
    for title, rows in found:
        console.print(Text(f"\n{title}", style="bold"))
        print_rows(console, ((f"  {name}", text) for name, text in rows), 2 + width)


def print_warnings(console: Console, memory: MemoryPlan) -> None:
    """Print a line for each warning of a plan."""
    for warning in memory.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def print_plan(resolved: Resolved, reasons: Sequence[str], console: Console | None = None) -> None:
    """Print the whole plan; `reasons`: why it cannot run, one sentence each."""
    console = console or console_for(sys.stdout)
    place = "a cluster" if resolved.deployment.cluster.spans_hosts else "this host"
    print_sections(console, sections(resolved))
    console.print()
    print_warnings(console, resolved.memory)
    for reason in reasons:
        console.print(Text(f"cannot run on {place}: {reason}", style="yellow"))
    if not reasons:
        console.print(Text(f"{place} can run it", style="green"))


def sections(resolved: Resolved) -> Iterator[tuple[str, list[Row]]]:
    """Yield (title, rows) of the plan."""
    deployment = resolved.deployment
    yield f"{deployment.model_name}: topology", list(_topology(resolved))
    for role in ROLES:
        units = units_of(deployment, role)
        yield f"{role}: memory of a rank", list(_memory(role, resolved))
        if units.ranks > 1:
            yield f"{role}: experts", list(_experts(role, resolved))
            yield f"{role}: dispatch and combine", list(_exchange(role, resolved))
        yield f"{role}: schedule", list(_schedule(units))
        if role == DECODE and (text := drafts_text(deployment, resolved.config)):
            yield "decode: drafts", [("made", text)]
    yield "cache: KV that outlives its request", cache_rows(deployment, resolved.memory)


def _topology(resolved: Resolved) -> Iterator[Row]:
    deployment = resolved.deployment
    placed = place_units(deployment)
    total = sum(unit.num_ranks for unit in placed)
    where = "GPUs" if deployment.device == "cuda" else "processes on CPUs"
    nodes = num_nodes(placed)
    yield "ranks", f"{total} ranks ({where}) on {plural(nodes, 'node')}"
    yield "transport", f"{deployment.transport}, dispatch in {deployment.dispatch_format}"
    yield "KV transfer", deployment.handover
    if names := gateway_names(deployment)[deployment.gateway.processes :]:
        found = gateway_nodes(deployment)
        nodes_of_gateways = f"{'nodes' if len(found) > 1 else 'node'} {ranges(found)}"
        yield "gateways", f"{', '.join(names)} on {nodes_of_gateways}"
    if deployment.fleet.is_on:
        counts = [
            f"{units_of(deployment, role).units} to {deployment.num_units_max(role)} {role}"
            for role in ROLES
        ]
        yield (
            "fleet",
            f"{counts[0]} and {counts[1]} units, by demand; all of them are listed",
        )
    for role in ROLES:
        of_role = [unit for unit in placed if unit.role == role]
        for unit in of_role[:_SHOWN]:
            ranks = f"EP{unit.num_ranks}" if unit.num_ranks > 1 else "1 rank"
            yield unit.name, f"{ranks}, {_nodes(unit)}"
        if len(of_role) > _SHOWN:
            yield "", f"and {len(of_role) - _SHOWN} more like these"


def _nodes(unit: UnitNodes) -> str:
    first, last = unit.nodes[0], unit.nodes[-1]
    if first != last:
        return f"nodes {first}-{last}, {unit.num_ranks // len(unit.nodes)} ranks each"
    last_rank = unit.first_device + unit.num_ranks - 1
    return (
        f"node {first}, devices {unit.first_device}-{last_rank}"
        if unit.num_ranks > 1
        else f"node {first}"
    )


def _memory(role: str, resolved: Resolved) -> Iterator[Row]:
    deployment, config, memory = resolved.deployment, resolved.config, resolved.memory.of(role)
    units = units_of(deployment, role)
    if resolved.memory.mapped_bytes is not None:
        stored = _PRECISIONS.get(resolved.precision, resolved.precision)
        precision = f"mapped as stored{', ' + stored if stored else ''}; ranks of a host share them"
    else:
        is_fp8 = deployment.device == "cuda" and config.weight_block_size is not None
        precision = "FP8 matrices, the rest BF16" if is_fp8 else "FP32"
    experts, fixed = gb(memory.expert_bytes), gb(memory.fixed_bytes)
    yield "weights", f"{gb(memory.weight_bytes)} ({precision}): {experts} experts, {fixed} the rest"
    yield "KV", f"{gb(memory.kv_bytes)}: {memory.kv_blocks} blocks, {memory.kv_tokens} tokens"
    for name, num_bytes, text in (
        ("buffers", memory.comm_bytes, f" for dispatch and combine, {mode_of(role, units)} mode"),
        (
            "staging",
            memory.staged_bytes,
            ": a second copy of one layer's experts, while replicas move",
        ),
        ("spare", memory.spare_bytes, ": for experts that the rank takes over when a node is lost"),
        ("drafts", memory.kept_bytes, ": hidden states of one block per running request"),
    ):
        if num_bytes:
            yield name, f"{gb(num_bytes)}{text}"
    limit = f" of {deployment.device_memory_gb:.0f} GB" if deployment.device_memory_gb else ""
    yield "total", f"{gb(memory.total_bytes)}{limit}"
    per_node = min(units.ranks, units.ranks_per_node)
    if per_node > 1:
        yield "per node", f"{gb(per_node * memory.total_bytes)}, {per_node} ranks"


def _experts(role: str, resolved: Resolved) -> Iterator[Row]:
    config = resolved.config
    placement = first_placement(resolved.deployment, resolved.config, role)
    problems = placement.check()
    assert not problems, problems
    units = units_of(resolved.deployment, role)
    total = config.n_routed_experts + units.redundant_experts
    routed, shared = placement.num_expert_slots, config.n_shared_experts
    yield "per rank", f"{routed} routed + {shared} shared, in each of {placement.num_layers} layers"
    yield (
        "replicas",
        f"{total} per layer: {config.n_routed_experts} experts, {units.redundant_experts} redundant",
    )
    first_layer = config.first_k_dense_replace
    for rank in range(min(units.ranks, 2)):
        held = placement.slot_to_expert_LRS[0, rank].tolist()
        yield f"rank {rank}", f"layer {first_layer}: {_ids(held)}"
    for layer in range(min(2, placement.num_layers) if units.redundant_experts else 0):
        counts = Counter(placement.slot_to_expert_LRS[layer].reshape(-1).tolist())
        several = sorted(expert for expert, count in counts.items() if count > 1)
        yield "replicated" if not layer else "", f"layer {first_layer + layer}: {_ids(several)}"
    if units.redundant_experts:
        yield "", "and so on: each layer replicates other experts, until loads are measured"


def _ids(experts: Sequence[int]) -> str:
    """Return expert ids as text: a run as a range, a long list as its first ids and the count."""
    numbers = np.asarray(experts)
    if len(numbers) > 2 and (np.diff(numbers) == 1).all():
        return f"{numbers[0]}-{numbers[-1]}"
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    return shown if len(numbers) <= _SHOWN else f"{shown} ... ({len(numbers)} in all)"


def _exchange(role: str, resolved: Resolved) -> Iterator[Row]:
    deployment, config = resolved.deployment, resolved.config
    units = units_of(deployment, role)
    layout = MessageLayout(deployment.dispatch_format, config.hidden_size)
    tokens, top_k = max_step_tokens(role, deployment, config), config.num_experts_per_tok
    yield "dispatch", f"{layout.message_bytes:,} bytes per message ({deployment.dispatch_format})"
    yield "combine", f"{layout.back_bytes:,} bytes per row ({layout.back_format})"
    if mode_of(role, units) == "low_latency":
        replicas = config.n_routed_experts + units.redundant_experts
        own = low_latency_buffers(layout, tokens, top_k, units.ranks, replicas // units.ranks).total
        deepep = deepep_buffer_bytes(tokens, config.hidden_size, replicas)
        used = "deepep" if deployment.transport == "deepep" else "ours"
        yield (
            "buffers",
            f"{tokens} tokens: DeepEP {deepep / 1e9:.2f} GB, ours {own / 1e9:.2f} GB ({used} used)",
        )
        pairs = tokens * top_k * (units.ranks - 1) / units.ranks
        out, back = pairs * layout.message_bytes, pairs * layout.back_bytes
    else:
        rows = (units.ranks - 1) * mean_rows(tokens, top_k, units.ranks)
        out = rows * layout.row_bytes
        back = tokens * top_k * (units.ranks - 1) / units.ranks * layout.back_bytes
    sent = f"{gb(round(out))} out, {gb(round(back))} back"
    yield "per layer", f"{sent} for {tokens} tokens per rank, spread evenly"


def _schedule(units: UnitsConfig) -> Iterator[Row]:
    if units.ranks == 1 or units.overlap == "sequential":
        yield "sequential", str(SCHEDULES["sequential"]).partition(" ")[2]
        return
    for name, schedule in SCHEDULES.items():
        if units.overlap in ("auto", name):
            yield name, str(schedule).partition(" ")[2]
    if units.overlap == "auto":
        yield "chosen", "the schedule with the lowest estimated cost for each step's batch"
    yield "split", f"into two micro-batches from {units.min_split_tokens} tokens per rank"


def drafts_text(deployment: Deployment, config: ModelConfig) -> str:
    """Return how many drafts (speculative tokens) are made per step; empty if none."""
    most = num_drafts_max(deployment, config)
    if not most:
        return ""
    number = (
        f"up to {most}, as many as save time," if deployment.decode.drafts == AUTO else str(most)
    )
    return f"{number} per request and step, by the model's MTP module; they change no output token"


def model_texts(resolved: Resolved) -> list[str]:
    """Return texts with the model's name and size, its shape, and the precision of its weights."""
    config, memory = resolved.config, resolved.memory
    stored = _PRECISIONS.get(resolved.precision, resolved.precision)
    return [
        f"{resolved.deployment.model_name}: {millions(memory.num_parameters)} parameters,"
        f" {millions(memory.num_parameters_active)} for a token",
        f"{config.num_hidden_layers} layers, {config.n_routed_experts} experts,"
        f" {config.num_experts_per_tok} per token, context {config.max_position_embeddings}",
        f"checkpoint {stored}, activations in {resolved.deployment.compute.upper()}",
    ]


def totals_text(memory: MemoryPlan) -> str:
    """Return the bytes of all ranks together as text."""
    return (
        f"weights {gb(memory.weight_bytes)}, KV {gb(memory.kv_bytes)} for"
        f" {plural(sum(memory.num_ranks), 'rank')}"
    )


def pools_text(memory: MemoryPlan) -> str:
    """Return the blocks and tokens of a rank's pool, by role, as text."""
    sizes = (
        f"{role} {memory.of(role).kv_blocks} blocks ({memory.of(role).kv_tokens} tokens)"
        for role in ROLES
    )
    return f"{', '.join(sizes)} per rank"


def cache_rows(deployment: Deployment, memory: MemoryPlan) -> list[Row]:
    """Return rows (place, KV kept there)."""
    cache = deployment.cache
    if not cache.is_on:
        return [("off", "every prompt is computed from its first token")]
    in_memory = "nothing: blocks are freed with their request"
    if cache.memory != OFF:
        in_memory = (
            f"{memory.prefill.kv_blocks - NUM_SCRATCH_BLOCKS} blocks of a prefill rank,"
            f" {memory.prefill.kv_tokens} tokens, until their blocks are needed"
        )
    on_disk = "nothing: cache.folder is empty"
    if cache.folder:
        num_blocks = cache.disk_mb * 2**20 // memory.block_bytes
        on_disk = (
            f"up to {gb(cache.disk_mb * 2**20)} in {cache.folder}: about {num_blocks} blocks,"
            f" {num_blocks * BLOCK_TOKENS} tokens"
        )
    return [("memory", in_memory), ("disk", on_disk)]
