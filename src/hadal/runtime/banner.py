"""What `hadal serve` shows at its start: who runs, which model, how much memory, and the line to
try.

In colour on a terminal, plain elsewhere. Formats values; looks at nothing itself.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from hadal import __version__
from hadal.comm.layout import MessageLayout, deepep_buffer_bytes, low_latency_buffers, mean_rows
from hadal.core.balance import AUTO, OFF
from hadal.core.config import (
    DECODE,
    PREFILL,
    ROLES,
    Deployment,
    UnitsConfig,
    num_drafts_max,
    units_of,
)
from hadal.core.handshake import is_near
from hadal.core.model_config import ModelConfig
from hadal.overlap.plan import SCHEDULES
from hadal.roles.leaders import first_placement
from hadal.runtime.ledger.store import shown
from hadal.runtime.memory import RankMemory, cache_rows, gb, max_step_tokens, mode_of, pools_text
from hadal.runtime.process.child import ProcessPhase, Status
from hadal.runtime.process.logs import fields
from hadal.runtime.resolve import Resolved
from hadal.runtime.topology import (
    CONSOLE,
    UnitNodes,
    gateway_names,
    gateway_nodes,
    num_nodes,
    place_units,
    ranges,
    rank_name,
    unit_and_rank,
)

# What `hadal serve --dry-run` prints: where every rank would lie, what it would hold, and what
# would travel.
#
# In colour on a terminal, plain elsewhere. Builds the placement and the layouts that ranks would
# use; starts nothing, reads no weights, allocates no buffer.


Row = tuple[str, str]
_SHOWN = 8
"""Units, experts and layers shown one by one; of more, the first ones and how many."""


def print_plan(resolved: Resolved, reasons: Sequence[str], console: Console | None = None) -> None:
    """Print the whole plan; `reasons`: why it cannot be run."""
    console = console or Console(highlight=False, soft_wrap=True)
    place = "a cluster" if resolved.deployment.cluster.spans_hosts else "this host"
    for title, rows in sections(resolved):
        console.print(Text(f"\n{title}", style="bold"))
        for name, text in rows:
            console.print(Text(f"  {name:<14}", style="dim") + Text(text))
    console.print()
    for warning in resolved.memory.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
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
        memory = resolved.memory.prefill if role == PREFILL else resolved.memory.decode
        yield f"{role}: memory of a rank", list(_memory(role, resolved, memory))
        if units.ranks > 1:
            yield f"{role}: experts", list(_experts(role, resolved))
            yield f"{role}: dispatch and combine", list(_exchange(role, resolved))
        yield f"{role}: schedule", list(_schedule(units))
        if role == DECODE and (text := _drafts(deployment, resolved.config)):
            yield "decode: drafts", [("made", text)]
    yield "cache: KV that outlives its request", cache_rows(deployment, resolved.memory)


def _topology(resolved: Resolved) -> Iterator[Row]:
    deployment = resolved.deployment
    placed = place_units(deployment)
    total = sum(unit.num_ranks for unit in placed)
    where = "GPUs" if deployment.device == "cuda" else "processes on CPUs"
    nodes = num_nodes(placed)
    yield "in all", f"{total} ranks ({where}) on {nodes} {'node' if nodes == 1 else 'nodes'}"
    yield "transport", f"{deployment.transport}, dispatch in {deployment.dispatch_format}"
    yield "hand-over", deployment.handover
    if names := gateway_names(deployment)[deployment.gateway.processes :]:
        found = gateway_nodes(deployment)
        yield (
            "gateways",
            f"{', '.join(names)} on {'nodes' if len(found) > 1 else 'node'} {ranges(found)}",
        )
    if deployment.fleet.is_on:
        counts = [
            f"{units_of(deployment, role).units} to {deployment.num_units_max(role)} {role}"
            for role in ROLES
        ]
        yield (
            "fleet",
            f"{counts[0]} and {counts[1]} units, as they are needed; shown with all of them",
        )
    for role in ROLES:
        of_role = [unit for unit in placed if unit.role == role]
        for unit in of_role[:_SHOWN]:
            ranks = f"EP{unit.num_ranks}" if unit.num_ranks > 1 else "1 rank"
            yield unit.name, f"{ranks}, {_nodes(unit)}"
        if len(of_role) > _SHOWN:
            yield "", f"and {len(of_role) - _SHOWN} more of the same"


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


def _memory(role: str, resolved: Resolved, memory: RankMemory) -> Iterator[Row]:
    deployment, config = resolved.deployment, resolved.config
    units = units_of(deployment, role)
    if resolved.memory.mapped_bytes is not None:
        stored = _PRECISIONS.get(resolved.precision, resolved.precision)
        precision = f"mapped as stored{', ' + stored if stored else ''}; ranks of a host share them"
    else:
        is_fp8 = deployment.device == "cuda" and config.weight_block_size is not None
        precision = "FP8 matrices, the rest BF16" if is_fp8 else "FP32"
    yield (
        "weights",
        (
            f"{gb(memory.weight_bytes)} ({precision}): {gb(memory.expert_bytes)} experts, "
            f"{gb(memory.fixed_bytes)} all else"
        ),
    )
    yield "KV", f"{gb(memory.kv_bytes)}: {memory.kv_blocks} blocks, {memory.kv_tokens} tokens"
    if memory.comm_bytes:
        yield (
            "buffers",
            f"{gb(memory.comm_bytes)} for dispatch and combine, {mode_of(role, units)} mode",
        )
    if memory.staged_bytes:
        yield (
            "staging",
            f"{gb(memory.staged_bytes)}: one layer's experts once more, while replicas move",
        )
    if memory.spare_bytes:
        yield "spare", f"{gb(memory.spare_bytes)}: room for the experts of a node that is lost"
    if memory.kept_bytes:
        yield (
            "drafts",
            f"{gb(memory.kept_bytes)}: hidden states of a block for each request at work",
        )
    limit = f" of {deployment.device_memory_gb:.0f} GB" if deployment.device_memory_gb else ""
    yield "together", f"{gb(memory.total_bytes)}{limit}"
    per_node = min(units.ranks, units.ranks_per_node)
    if per_node > 1:
        yield "a node", f"{gb(per_node * memory.total_bytes)}, {per_node} ranks"


def _experts(role: str, resolved: Resolved) -> Iterator[Row]:
    config = resolved.config
    placement = first_placement(resolved.deployment, resolved.config, role)
    problems = placement.check()
    assert not problems, problems
    units = units_of(resolved.deployment, role)
    total = config.n_routed_experts + units.redundant_experts
    routed, shared = placement.num_expert_slots, config.n_shared_experts
    yield "a rank", f"{routed} routed + {shared} shared, in each of {placement.num_layers} layers"
    yield (
        "replicas",
        f"{total} a layer: {config.n_routed_experts} experts, {units.redundant_experts} redundant",
    )
    first_layer = config.first_k_dense_replace
    for rank in range(min(units.ranks, 2)):
        held = placement.slot_to_expert_LRS[0, rank].tolist()
        yield f"rank {rank}", f"layer {first_layer}: {_ids(held)}"
    for layer in range(min(2, placement.num_layers) if units.redundant_experts else 0):
        counts = Counter(placement.slot_to_expert_LRS[layer].reshape(-1).tolist())
        several = sorted(expert for expert, count in counts.items() if count > 1)
        yield "twice" if not layer else "", f"layer {first_layer + layer}: {_ids(several)}"
    if units.redundant_experts:
        yield "", "and so on, others in each layer, until loads are known"


def _ids(experts: Sequence[int]) -> str:
    """A few one by one, rows of neighbours as ranges, of many the first and how many."""
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
    yield "dispatch", f"{layout.message_bytes:,} bytes a message ({deployment.dispatch_format})"
    yield "combine", f"{layout.back_bytes:,} bytes a row ({layout.back_format})"
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
    yield (
        "a layer",
        (
            f"{gb(round(out))} out, {gb(round(back))} back for {tokens} tokens of a rank, spread"
            " evenly"
        ),
    )


def _schedule(units: UnitsConfig) -> Iterator[Row]:
    if units.ranks == 1 or units.overlap == "sequential":
        yield "sequential", str(SCHEDULES["sequential"]).partition(" ")[2]
        return
    for name, schedule in SCHEDULES.items():
        if units.overlap in ("auto", name):
            yield name, str(schedule).partition(" ")[2]
    if units.overlap == "auto":
        yield "chosen", "the cheapest by price for each step's batch"
    yield "split", f"in two micro-batches from {units.min_split_tokens} tokens on a rank"


def _drafts(deployment: Deployment, config: ModelConfig) -> str:
    """Empty where none are made."""
    most = num_drafts_max(deployment, config)
    if not most:
        return ""
    number = f"up to {most}, as many as pay," if deployment.decode.drafts == AUTO else str(most)
    return f"{number} a request and step, by the model's MTP module; no token changes by them"


log = logging.getLogger(__name__)

OPEN_TO_ALL = "no API keys: whoever reaches it may ask it and operate it (--api-keys-file)"
_PRECISIONS = {"F8_E4M3": "FP8 E4M3, block-scaled", "BF16": "BF16", "F32": "FP32", "F16": "FP16"}


class Banner:
    """Prints the plan when the processes are started, and one line when all are ready."""

    def __init__(
        self, resolved: Resolved, *, needs_key: bool, console: Console | None = None
    ) -> None:
        self._resolved = resolved
        self._needs_key = needs_key
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    def __call__(self, status: Status) -> None:
        if status.ready:
            self._console.print(Text(f"ready in {status.elapsed_s:.1f} s", style="bold green"))
            return
        self._console.print(Text(f"\nHadal {__version__}", style="bold"))
        for name, text in self.rows(status):
            self._console.print(Text(f"{name:<11}", style="dim") + Text(text))
        for warning in self._resolved.memory.warnings:
            self._console.print(Text(f"warning: {warning}", style="yellow"))
        self._console.print(Text(f"\n{self.curl(status.url)}\n", style="cyan"))

    def rows(self, status: Status) -> list[tuple[str, str]]:
        """(what, how much) of the plan."""
        resolved = self._resolved
        deployment, config, memory = resolved.deployment, resolved.config, resolved.memory
        rows = [
            (
                "model",
                (
                    f"{deployment.model_name}: {_count(memory.num_parameters)} parameters, "
                    f"{_count(memory.num_parameters_active)} for a token"
                ),
            ),
            (
                "",
                (
                    f"{config.num_hidden_layers} layers, {config.n_routed_experts} experts of which"
                    f" {config.num_experts_per_tok}, context {config.max_position_embeddings}"
                ),
            ),
            (
                "",
                (
                    f"checkpoint {_PRECISIONS.get(resolved.precision, resolved.precision)},"
                    f" activations in {resolved.deployment.compute.upper()}"
                ),
            ),
        ]
        rows += [(name, text) for name, text in self._process_rows(status)]
        if text := _drafts(deployment, config):
            rows.append(("drafts", text))
        rows += [
            (
                "memory",
                (
                    f"weights {_bytes(memory.weight_bytes)}, KV {_bytes(memory.kv_bytes)} shared"
                    f" by {_plural(sum(memory.num_ranks), 'rank')}"
                ),
            ),
            ("", pools_text(memory)),
            *self._cache_rows(),
            ("ledger", self._ledger()),
            ("address", f"{status.url}/v1" + (" (needs an API key)" if self._needs_key else "")),
        ]
        if status.console_url:
            rows.append(("pages", f"{status.console_url} (chat), {status.console_url}/console"))
        if not is_near(deployment.host) and not self._needs_key:
            rows.append(("", OPEN_TO_ALL))
        elif not is_near(deployment.host):
            opened = ["/health", *(["/metrics"] if deployment.gateway.open_metrics else [])]
            asks = (
                "; gateway.open_metrics = false asks for one"
                if deployment.gateway.open_metrics
                else ""
            )
            rows.append(
                (
                    "",
                    (
                        f"{' and '.join(opened)} {'are' if asks else 'is'} open to whoever reaches"
                        f" it, without a key{asks}"
                    ),
                )
            )
        return rows

    def _cache_rows(self) -> Iterator[tuple[str, str]]:
        for index, (where, text) in enumerate(
            cache_rows(self._resolved.deployment, self._resolved.memory)
        ):
            yield ("" if index else "cache"), f"{where}: {text}"

    def _ledger(self) -> str:
        url = self._resolved.deployment.ledger.url
        return "off" if url == OFF else f"{shown(url)}; see hadal report"

    def _process_rows(self, status: Status) -> Iterator[tuple[str, str]]:
        deployment = self._resolved.deployment
        for name, process in status.processes.items():
            unit, rank = unit_and_rank(name)
            if process.phase == ProcessPhase.RESTING:
                if rank is None:
                    yield name, "rests until the fleet needs it"
                continue
            if name == CONSOLE:
                continue  # It starts when the others are ready; its address is what people need.
            text = f"pid {process.pid}" if process.pid else "when its node is there"
            if process.role in ROLES and rank is None:
                units = units_of(deployment, process.role)
                text += f", {_plural(units.threads, 'thread')}"
                if process.cores:
                    text += f" on cores {ranges(process.cores)}"
                text += f", up to {units.max_requests} requests"
                if units.ranks > 1:
                    pids = [status.processes[rank_name(unit, r)].pid for r in range(units.ranks)]
                    text += f" a rank; {units.ranks} ranks"
                    text += f": pid {ranges(pids)}" if all(pids) else ""
            if rank is None:
                yield name, text

    def curl(self, url: str) -> str:
        """A command that asks the model something."""
        body = {
            "model": self._resolved.deployment.model_name,
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        }
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._needs_key else ""
        data = shlex.quote(json.dumps(body))
        return (
            f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d"
            f" {data}"
        )


def log_status(status: Status) -> None:
    """Log the status where programs read the log: two lines with what a person would look for."""
    known = fields(
        url=status.url, pids={name: process.pid for name, process in status.processes.items()}
    )
    if status.ready:
        log.info("ready in %.1f s", status.elapsed_s, extra=known)
    else:
        log.info("Hadal %s starts", __version__, extra=known)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _count(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
