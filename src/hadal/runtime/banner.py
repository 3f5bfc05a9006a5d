"""Start-up banner of `hadal serve`: model, processes, memory, address, and a command to try.

Formats values that it is given; inspects nothing itself.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Iterator

from rich.text import Text

from hadal import __version__
from hadal.core.balance import OFF
from hadal.core.config import ROLES, units_of
from hadal.core.handshake import is_near
from hadal.runtime.amounts import plural
from hadal.runtime.ledger.address import shown
from hadal.runtime.plan_rows import (
    Row,
    cache_rows,
    console_for,
    drafts_text,
    model_texts,
    named,
    pools_text,
    print_rows,
    print_warnings,
    totals_text,
)
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.logs import fields
from hadal.runtime.process.status import Status
from hadal.runtime.resolve import Resolved
from hadal.runtime.topology import CONSOLE, ranges, rank_name, unit_and_rank

log = logging.getLogger(__name__)

OPEN_TO_ALL = "no API keys: every client that reaches it may use and operate it (--api-keys-file)"


class Banner:
    """Printer of the plan when the processes are started, and of one line when all are ready."""

    def __init__(self, resolved: Resolved, *, needs_key: bool) -> None:
        self._resolved = resolved
        self._needs_key = needs_key
        self._console = console_for(sys.stderr)

    def __call__(self, status: Status) -> None:
        if status.ready:
            self._console.print(Text(f"ready in {status.elapsed_s:.1f} s", style="bold green"))
            return
        self._console.print(Text(f"\nHadal {__version__}", style="bold"))
        print_rows(self._console, self.rows(status), 11)
        print_warnings(self._console, self._resolved.memory)
        self._console.print(Text(f"\n{self.curl(status.url)}\n", style="cyan"))

    def rows(self, status: Status) -> list[Row]:
        """Return the plan as rows (name, text)."""
        resolved = self._resolved
        deployment, memory = resolved.deployment, resolved.memory
        rows = named("model", model_texts(resolved))
        rows += self._process_rows(status)
        if text := drafts_text(deployment, resolved.config):
            rows.append(("drafts", text))
        rows += [
            *named("memory", [totals_text(memory), pools_text(memory)]),
            *named("cache", [": ".join(row) for row in cache_rows(deployment, memory)]),
            ("ledger", self._ledger()),
            ("address", f"{status.url}/v1" + (" (needs an API key)" if self._needs_key else "")),
        ]
        if status.console_url:
            rows.append(("pages", f"{status.console_url} (chat), {status.console_url}/console"))
        if not is_near(deployment.host) and not self._needs_key:
            rows.append(("", OPEN_TO_ALL))
        elif not is_near(deployment.host):
            is_open = deployment.gateway.open_metrics
            opened = "/health and /metrics need" if is_open else "/health needs"
            asks = "; with gateway.open_metrics = false, /metrics needs one" if is_open else ""
            rows.append(("", f"{opened} no API key{asks}"))
        return rows

    def _ledger(self) -> str:
        url = self._resolved.deployment.ledger.url
        return "off" if url == OFF else f"{shown(url)}; see hadal report"

    def _process_rows(self, status: Status) -> Iterator[Row]:
        deployment = self._resolved.deployment
        for name, process in status.processes.items():
            unit, rank = unit_and_rank(name)
            if process.phase == ProcessPhase.RESTING:
                if rank is None:
                    yield name, "starts when the fleet needs it"
                continue
            if name == CONSOLE:
                continue  # It starts last; the row `pages` has its address.
            text = f"pid {process.pid}" if process.pid else "starts when its node is found"
            if process.role in ROLES and rank is None:
                units = units_of(deployment, process.role)
                text += f", {plural(units.threads, 'thread')}"
                if process.cores:
                    text += f" on cores {ranges(process.cores)}"
                text += f", up to {units.max_requests} requests"
                if units.ranks > 1:
                    pids = [status.processes[rank_name(unit, r)].pid for r in range(units.ranks)]
                    text += f" per rank; {units.ranks} ranks"
                    text += f": pid {ranges(pids)}" if all(pids) else ""
            if rank is None:
                yield name, text

    def curl(self, url: str) -> str:
        """Return a command that sends the model a request."""
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
    """Log the start, or that all processes are ready, as one structured line."""
    known = fields(
        url=status.url, pids={name: process.pid for name, process in status.processes.items()}
    )
    if status.ready:
        log.info("ready in %.1f s", status.elapsed_s, extra=known)
    else:
        log.info("Hadal %s starts", __version__, extra=known)
