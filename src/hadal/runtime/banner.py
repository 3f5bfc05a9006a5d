"""What `hadal serve` shows at its start: who runs, which model, how much memory, and the line to
try.

In colour on a terminal, plain elsewhere. Formats values; looks at nothing itself.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from hadal import __version__
from hadal.core.balance import OFF
from hadal.core.config import ROLES, units_of
from hadal.core.handshake import is_near
from hadal.core.messages import BLOCK_TOKENS
from hadal.runtime.cache_plan import cache_rows
from hadal.runtime.child import Phase
from hadal.runtime.ledger_place import shown
from hadal.runtime.logs import fields
from hadal.runtime.resolve import Resolved
from hadal.runtime.status import Status
from hadal.runtime.topology import rank_name, unit_of

log = logging.getLogger(__name__)

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
                    " computed in FP32"
                ),
            ),
        ]
        rows += [(name, text) for name, text in self._process_rows(status)]
        rows += [
            (
                "memory",
                (
                    f"weights {_bytes(memory.weight_bytes)}, KV {_bytes(memory.kv_bytes)} shared"
                    f" by {_plural(sum(memory.num_ranks), 'rank')}"
                ),
            ),
            (
                "",
                (
                    f"prefill {_blocks(memory.prefill.kv_blocks)}, decode"
                    f" {_blocks(memory.decode.kv_blocks)} a rank"
                ),
            ),
            *self._cache_rows(),
            ("ledger", self._ledger()),
            ("address", f"{status.url}/v1" + (" (needs an API key)" if self._needs_key else "")),
        ]
        if not is_near(deployment.host):
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
            unit, rank = unit_of(name)
            if process.phase == Phase.RESTING:
                if rank is None:
                    yield name, "rests until the fleet needs it"
                continue
            text = f"pid {process.pid}"
            if process.role in ROLES and rank is None:
                units = units_of(deployment, process.role)
                text += f", {_plural(units.threads, 'thread')}, up to {units.max_requests} requests"
                if units.ranks > 1:
                    pids = [status.processes[rank_name(unit, r)].pid for r in range(units.ranks)]
                    text += f" a rank; {units.ranks} ranks: pid {_range(pids)}"
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
    """The same for a log that programs read: two lines with what a person would look for."""
    known = fields(
        url=status.url, pids={name: process.pid for name, process in status.processes.items()}
    )
    if status.ready:
        log.info("ready in %.1f s", status.elapsed_s, extra=known)
    else:
        log.info("Hadal %s starts", __version__, extra=known)


def _range(pids: list[int]) -> str:
    """Neighbours are shortened: processes that were started one after the other."""
    if pids == list(range(pids[0], pids[0] + len(pids))):
        return f"{pids[0]}-{pids[-1]}"
    return ", ".join(map(str, pids))


def _blocks(num_blocks: int) -> str:
    return f"{num_blocks} blocks ({(num_blocks - 1) * BLOCK_TOKENS} tokens)"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _count(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
