"""Pool of servers that tests borrow, by configuration. The tests of a process share one server per
set of options and deployment fields, and every return of a server is audited.

A clean server has no request, no block in use, ledgers that add up, and the processes it was
borrowed with. Its count of output tokens equals its ledger's. A dirty server is ended, and the test
that returned it fails.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections import OrderedDict
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from hadal.runtime.topology import GATEWAY
from tests.dist.serving import Server, finish, launch, metric
from tests.waiting import DEADLINE_S, Hang, wait_until

MAX_IDLE = 2
"""Maximum number of idle servers per pytest process, besides a plain one. Each has at least five processes."""
ALIVE = ("ready", "resting")
"""Phases of processes that run, or that rest and need not run."""
OUTPUT_TOKENS = "hadal_output_tokens_total"


def _key(arguments: tuple[str, ...], fields: dict[str, Any], is_mortal: bool) -> str:
    return json.dumps([arguments, fields, is_mortal], sort_keys=True)


PLAIN = _key((), {}, False)


@dataclass
class Pooled:
    """A server of the pool."""

    key: str
    server: Server
    folder: Path
    api_key: str
    gateways: dict[str, int]
    """Gateway name -> pid at the start. If one was replaced, its token count is lost and not compared."""
    pids: dict[str, int]
    is_mortal: bool
    """True if tests end its processes and others replace them."""


class Pool:
    """All servers of one pytest process that tests borrow."""

    def __init__(self) -> None:
        self._idle: OrderedDict[str, Pooled] = OrderedDict()

    def borrow(
        self, arguments: tuple[str, ...], fields: dict[str, Any], *, is_mortal: bool = False
    ) -> Pooled:
        """Return an idle server of this configuration, or a new one. `is_mortal`: for a test that
        ends processes and waits for their replacements.
        """
        key = _key(arguments, fields, is_mortal)
        pooled = self._idle.pop(key, None)
        if pooled is None:
            # End others first, so that three servers of many ranks never share two cores. The plain
            # server stays, because most files use it.
            others = [other for other in self._idle if other != PLAIN]
            while len(others) >= MAX_IDLE:
                self._end(self._idle.pop(others.pop(0)))
            pooled = self._start(key, arguments, fields, is_mortal)
        pooled.pids = pooled.server.pids()
        return pooled

    def give_back(self, pooled: Pooled) -> None:
        """Audit a borrowed server. Raises AssertionError, after ending it, if it is dirty."""
        pooled.server.gate.open()
        try:
            self._audit(pooled)
        except (AssertionError, httpx.HTTPError) as error:
            log = pooled.server.log()
            self._end(pooled)
            raise AssertionError(
                f"the test left its server dirty: {error}\n{log[-8000:]}"
            ) from error
        self._idle[pooled.key] = pooled

    def end(self, pooled: Pooled) -> None:
        """End a borrowed server, or its remaining processes."""
        pooled.server.gate.open()
        self._end(pooled)

    def close(self) -> None:
        """End all idle servers. Lent ones must have been given back or ended."""
        while self._idle:
            self._end(self._idle.popitem()[1])

    def _start(
        self, key: str, arguments: tuple[str, ...], fields: dict[str, Any], is_mortal: bool
    ) -> Pooled:
        # Sockets need a short path.
        folder = Path(tempfile.mkdtemp(prefix="hadal-p-"))
        # The first key is the audit's: "auditor operator".
        ledger = {"url": str(folder / "ledger.sqlite"), **fields.get("ledger", {})}
        server = launch(folder, arguments, {}, **{**fields, "ledger": ledger})
        server.wait_ready()
        keys = [key.split()[0] for name, key in pairwise(arguments) if name == "--api-key"]
        gateways = _gateways(server.pids())
        return Pooled(key, server, folder, keys[0] if keys else "", gateways, {}, is_mortal)

    def _audit(self, pooled: Pooled) -> None:
        server, headers = pooled.server, pooled.server.headers(pooled.api_key)
        assert server.process.poll() is None, "it has ended"
        if pooled.is_mortal:
            wait_until(
                lambda: (
                    all(one.phase in ALIVE for one in server.status().processes.values())
                    and server.is_healthy()
                ),
                "others have taken the places of its dead processes",
            )
        left = ["nothing was asked"]

        def clean() -> bool:
            reply = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S, headers=headers)
            left[0] = reply.text
            return reply.status_code == 200 and not any(
                unit["num_blocks_used"] or unit["num_requests"]
                for unit in reply.json()["units"].values()
            )

        try:
            wait_until(clean, "no unit has a request or a block in use")
        except Hang:
            raise AssertionError(left[0]) from None
        running = metric(server, "hadal_generations_now", key=pooled.api_key)
        assert running == 0, f"{running:.0f} generations have not ended"
        assert pooled.is_mortal or server.pids() == pooled.pids, "processes were replaced"
        if _gateways(server.pids()) == pooled.gateways:
            check_tokens(server, pooled.api_key)

    def _end(self, pooled: Pooled) -> None:
        try:
            finish(pooled.server)
        finally:
            shutil.rmtree(pooled.folder, ignore_errors=True)


def _gateways(pids: dict[str, int]) -> dict[str, int]:
    return {name: pid for name, pid in pids.items() if name.startswith(GATEWAY)}


def check_tokens(server: Server, key: str = "") -> int:
    """Return the output tokens in an idle server's ledger. Waits, because facts and batch lines are
    written after their request. Raises AssertionError if the metric stays different.
    """
    counts = 0.0, 0

    def agree() -> bool:
        nonlocal counts
        counts = metric(server, OUTPUT_TOKENS, key=key), _tokens_in_ledger(server)
        return counts[0] == counts[1]

    try:
        wait_until(agree, "metric and ledger have the same output tokens")
    except Hang:
        raise AssertionError(
            f"it counted {counts[0]:.0f} output tokens, and its ledger has {counts[1]}"
        ) from None
    return counts[1]


def _tokens_in_ledger(server: Server) -> int:
    """Return the ledger's output tokens; 0 if no ledger exists yet."""
    path = server.folder.parent / "ledger.sqlite"
    try:
        with closing(
            sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=DEADLINE_S)
        ) as ledger:
            rows = ledger.execute("SELECT COALESCE(SUM(tokens_out), 0) FROM hadal_requests")
            return int(rows.fetchone()[0])
    except sqlite3.OperationalError:
        return 0
