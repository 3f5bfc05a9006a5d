"""Agent of a node: starts, watches and ends its processes, as the supervisor on another host
orders.

The agent reads a Joining as one JSON line on standard input, because arguments would show the
secret in it. Another line follows if another supervisor takes over. The agent makes its own run
folder: for the processes that it starts, it plays the part of the supervisor on their host. Every
order names all processes that should run, so a lost order does no lasting harm (roles/nodes). The
agent ends, with all its processes, when the run ends, when its node is released, when another agent
has replaced it, at SIGTERM or SIGINT, or after `cluster.lease_s` without orders.

    python -m hadal.runtime.agent < joining.json
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import msgspec

from hadal.core.config import AGENT_BEAT_S
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.nodes import (
    Address,
    NodeNews,
    NodeOrders,
    Printed,
    ProcessNews,
    ProcessOrder,
)
from hadal.core.messages.units import Sighting, Suspect
from hadal.roles.nodes import agent_name
from hadal.runtime.addresses import address_path, read_address, socket_path, write_address
from hadal.runtime.devices import cpu_kind
from hadal.runtime.process.forks import (
    API_KEYS,
    API_KEYS_FILE,
    UNIT_MODULES,
    Forks,
    Left,
    Output,
    Started,
    environment,
    reap_others,
    start_here,
)
from hadal.runtime.process.logs import start_log
from hadal.runtime.process.process import (
    EXIT_LEASE,
    FOLDER_PREFIX,
    Run,
    epoch_arguments,
    raise_descriptor_limit,
    remove_stale_folders,
    versions,
    write_run,
)
from hadal.runtime.process.signals import read_signals, signal_pipe
from hadal.runtime.process.watch import look_at
from hadal.runtime.topology import GATEWAY_MODULE, UNIT_MODULE, gateway_nodes, judge_of
from hadal.runtime.transfer.pool import remove_shared_memory, remove_stale_shared_memory
from hadal.runtime.wire import ZmqWire
from hadal.runtime.wire_sockets import Network

log = logging.getLogger("hadal.agent")

MAX_LINES = 10_000
"""Unsent output lines kept per process; further lines drop the oldest."""
MAX_LINE_BYTES = 1 << 14
"""Longest output line kept; the rest is cut off."""
MAX_LINES_SENT = 200
"""Largest number of lines of one process in one message."""
_QUICK_S = 0.02
"""Time between polls while the fork server warms up, a process starts (its address file shows that
it listens) or ends, or output is unsent.
"""
_LAST_WORDS_S = 0.2
"""Longest wait for the rest of an ended process's output: a child of it may keep the pipe open."""
_KILL_S = 5.0
"""Time that the processes killed at the agent's end may take to disappear, all together."""
_NICE = -10
"""Niceness of the agent, if permitted: it runs ahead of all processes of default priority."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Joining:
    """Input of an agent at its start, and when another supervisor takes the run over."""

    node: int
    """Number of the node in the deployment."""
    address: str
    """Address of this host as other hosts see it. Processes listen for other hosts only there."""
    supervisor: Address
    """Address of the supervisor; its epoch number is the run's term."""
    run: Run
    api_keys: str = ""
    """API keys for the gateways, as the supervisor has them; empty on a node without gateways."""
    api_keys_file: str = ""
    """File with more API keys. The gateway with the front reads it and sends them to the others."""


@dataclass
class _NodeProcess:
    """A process of this node."""

    order: ProcessOrder
    process: Started
    code: int | None = None
    signalled: int = 0
    address: Address | None = None
    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    reader: threading.Thread | None = None
    ended_s: float | None = None
    """Time at which its end was found; the exit code is reported after the last output."""

    def news(self) -> ProcessNews:
        """Return the process's state without `waited_s`, which `look_at` has to measure."""
        return ProcessNews(
            self.order.name,
            self.order.epoch_number,
            self.process.pid,
            self.code,
            address=self.address,
        )


class _CodeForks:
    """Fork server for a node's processes. It has imported the code of the last rollout."""

    def __init__(self, forks: Forks, folder: Path, niceness: int) -> None:
        self._forks = forks
        self._niceness = niceness
        """Niceness of forked processes; the agent's own is lower."""
        # The fork server's cleanup removes only the folder, not the pools: other agents of this run
        # may share the host, and the next run here removes stale pools.
        self._left = Left([], [str(folder)])
        self._environment = environment()
        self._num_rollouts: int | None = None
        """Number of rollouts in the last order; None before the first."""
        forks.clear_after(self._left)

    @property
    def is_warming(self) -> bool:
        return self._forks.is_warming

    @property
    def pid(self) -> int:
        return self._forks.pid

    def renew(self, num_rollouts: int) -> None:
        """After a rollout, replace the fork server by one that imports the code installed now."""
        if self._num_rollouts not in (None, num_rollouts):
            self._forks.close()
            self._forks = _agent_forks()
            if self._forks.pid:  # It would inherit the agent's priority.
                os.setpriority(os.PRIO_PROCESS, self._forks.pid, self._niceness)
            self._forks.clear_after(self._left)
        self._num_rollouts = num_rollouts

    def start(self, name: str, arguments: list[str], told: dict[str, str]) -> Started:
        """Start a process; `told` is added to the agent's own environment."""
        return start_here(name, arguments, {**self._environment, **told}, forks=self._forks)

    def close(self) -> None:
        self._forks.close()


class _Mirror:
    """Address files, in the node's folder, of processes that run elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: set[str] = set()
        self._unwritten: dict[str, Address] | None = None
        """Addresses not written to the folder yet; None if all are."""

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def write(self, addresses: dict[str, Address] | None) -> None:
        """Write the addresses of processes elsewhere, for this node's processes. None: retry the
        addresses that could not be written. Raises OSError. `addresses` may include a process that
        is about to end here, if its successor runs elsewhere.
        """
        if addresses is not None:
            self._unwritten = addresses
        if self._unwritten is None:
            return
        for name in self._names - self._unwritten.keys():
            address_path(self._folder, name).unlink(missing_ok=True)
        for name, address in self._unwritten.items():
            write_address(self._folder, name, address)
        self._names, self._unwritten = set(self._unwritten), None

    def drop(self, name: str) -> None:
        """Remove a name's address elsewhere: a process of this node has the name from now on."""
        address_path(self._folder, name).unlink(missing_ok=True)
        self._names.discard(name)


class Agent:
    """Supervision of one node: its processes, its run folder and its wire."""

    def __init__(self, joining: Joining, folder: Path, forks: Forks, niceness: int = 0) -> None:
        self._joining = joining
        self._folder = folder
        self._running: dict[str, _NodeProcess] = {}
        self._ending: dict[str, _NodeProcess] = {}
        """Killed processes that have not ended yet, by name."""
        self._mirror = _Mirror(folder)
        self._heard_s = time.monotonic()
        self._is_over = False
        run = joining.run
        remove_stale_shared_memory()
        remove_stale_folders()
        write_run(folder, run)
        self._forks = _CodeForks(forks, folder, niceness)
        is_gateways = joining.node in gateway_nodes(run.deployment)
        self._may_start = ((GATEWAY_MODULE if is_gateways else UNIT_MODULE,),)
        """Modules that an order may start."""
        self._renewed: deque[Joining] = deque()
        write_address(folder, SUPERVISOR, joining.supervisor)
        self._boot = secrets.token_hex(4)
        name = agent_name(joining.node, self._boot)
        self._wire = ZmqWire(name, folder, network=Network(joining.address, run.secret))
        self._versions = {
            **versions(),
            "cpu": cpu_kind(),
        }
        self._spoke_s = 0.0
        self._said: tuple[ProcessNews, ...] | None = None

    def run(self, signals_fd: int) -> int:
        """Serve until an order or a signal ends it, or the lease expires. Return the exit code."""
        self._wire.wake_on(signals_fd)
        while not self._is_over:
            self._join_successor()
            for message in self._wire.receive(self._wait_s()):
                if isinstance(message, NodeOrders):
                    try:
                        self._ordered(message)
                    except OSError as error:  # E.g. a full disk; orders are repeated.
                        log.error("the supervisor's orders could not be carried out: %s", error)
                elif isinstance(message, Suspect):
                    self._see(message.process)
            if {signal.SIGTERM, signal.SIGINT} & set(read_signals(signals_fd)):
                log.info("ending: received a signal")
                self._is_over = True
            self._reap()
            self._speak(time.monotonic())
            lease_s = self._joining.run.deployment.cluster.lease_s
            if time.monotonic() - self._heard_s > lease_s:
                log.error(
                    "no message from the supervisor for %.0f s; ending this node's processes",
                    lease_s,
                )
                return EXIT_LEASE
        return 0

    def renew(self, joining: Joining) -> None:
        """Queue a Joining, which may name a new supervisor. Called from another thread."""
        self._renewed.append(joining)

    def _join_successor(self) -> None:
        """Switch to the supervisor of the next queued Joining, if its epoch is later than ours."""
        joining = self._renewed.popleft() if self._renewed else self._joining
        if joining.supervisor.epoch_number <= self._joining.supervisor.epoch_number:
            return
        log.info("another supervisor has taken over, at %s", joining.supervisor.endpoint)
        self._joining = joining
        write_run(self._folder, joining.run)  # A rollout may have changed the weights.
        write_address(self._folder, SUPERVISOR, joining.supervisor)
        self._wire.expect(SUPERVISOR, joining.supervisor.epoch_number)
        self._heard_s, self._said = time.monotonic(), None

    def close(self) -> None:
        """Kill the processes that still run, and remove their shared memory."""
        there = {**self._ending, **self._running}
        for running in (*self._running.values(), *self._ending.values()):
            running.process.kill()
        until_s = time.monotonic() + _KILL_S
        for running in (*self._running.values(), *self._ending.values()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, until_s - time.monotonic()))
        self._forks.close()
        self._wire.close()
        for name in there:  # Other agents of this run may share the host.
            remove_shared_memory(self._joining.run.run_id, name)

    def _ordered(self, orders: NodeOrders) -> None:
        self._heard_s = time.monotonic()
        self._is_over |= orders.is_over
        wanted = {order.name: order for order in orders.processes}
        self._mirror.write(orders.addresses)
        for name, running in list(self._running.items()):
            order = wanted.get(name)
            if order is None or order.epoch_number != running.order.epoch_number:
                self._end(name, running)
            elif order.signal not in (0, running.signalled) and running.code is None:
                running.signalled = order.signal
                running.process.send_signal(signal.Signals(order.signal))
        self._forks.renew(orders.num_rollouts)
        if self._forks.is_warming:
            return  # The supervisor repeats its orders; these processes start at the next ones.
        for order in wanted.values():
            # Every process of the deployment has the secret and could forge orders. So an order may
            # start only units or, on a gateway's node, only gateways.
            is_there = order.name in self._running or order.name in self._ending
            if not is_there and order.arguments[:1] in self._may_start:
                self._start(order)

    def _start(self, order: ProcessOrder) -> None:
        log.info("starting %s", order.name)
        self._mirror.drop(order.name)
        arguments = [*order.arguments, *epoch_arguments(self._folder, order.epoch_number)]
        told = {"OMP_NUM_THREADS": str(order.threads)}
        if order.arguments[:1] == (GATEWAY_MODULE,):
            told |= {
                API_KEYS: self._joining.api_keys,
                API_KEYS_FILE: self._joining.api_keys_file,
            }
        process = self._forks.start(order.name, arguments, told)
        running = self._running[order.name] = _NodeProcess(order, process)
        assert process.stdout is not None
        running.reader = threading.Thread(
            target=_keep_lines, args=(process.stdout, running.lines), daemon=True
        )
        running.reader.start()

    def _end(self, name: str, running: _NodeProcess) -> None:
        """Kill a process that is no longer wanted, if it runs. No other process starts under its
        name until it has ended. Does not wait for the end: freeing much memory takes a while.
        """
        del self._running[name]
        if running.code is None:
            log.warning("ending %s: the supervisor no longer orders it on this node", name)
            running.process.kill()
            self._ending[name] = running

    def _clear_after(self, name: str) -> None:
        """Remove a dead process's socket, address and, if no `name.*` runs, shared memory."""
        socket_path(self._folder, name).unlink(missing_ok=True)
        if name not in self._mirror:  # Otherwise the file has its successor's address.
            address_path(self._folder, name).unlink(missing_ok=True)
            self._wire.forget(name)
        if not any(other.startswith(f"{name}.") for other in self._running):
            remove_shared_memory(self._joining.run.run_id, name)

    def _reap(self) -> None:
        own = (*self._running.values(), *self._ending.values())
        reap_others({self._forks.pid, *(each.process.pid for each in own)})
        for name, running in list(self._ending.items()):
            if running.process.poll() is not None:
                del self._ending[name]
                self._clear_after(name)
        for name, running in self._running.items():
            if running.code is not None:
                continue
            if running.address is None:
                running.address = self._address_of(running)
            code = running.process.poll()
            if code is None:
                continue
            if running.ended_s is None:
                running.ended_s = time.monotonic()
                self._clear_after(name)
            is_silent = running.reader is None or not running.reader.is_alive()
            if is_silent or time.monotonic() - running.ended_s > _LAST_WORDS_S:
                running.code = code

    def _address_of(self, running: _NodeProcess) -> Address | None:
        """Return the address at which a process listens; None if it does not listen yet."""
        try:
            address = read_address(address_path(self._folder, running.order.name))
        except OSError:
            return None
        return address if address.epoch_number == running.order.epoch_number else None

    def _speak(self, now_s: float) -> None:
        """Send new output lines, and the processes' state if it changed or the beat is due."""
        # Report the processes first: the supervisor drops output of processes it does not know.
        if self._said is None:
            self._say_news(now_s, self._facts())
        for name, running in self._running.items():
            while running.lines:
                lines = tuple(
                    running.lines.popleft() for _ in range(min(len(running.lines), MAX_LINES_SENT))
                )
                printed = Printed(self._joining.node, name, running.order.epoch_number, lines)
                self._wire.send(SUPERVISOR, printed)
        facts = self._facts()
        if facts != self._said or now_s - self._spoke_s >= AGENT_BEAT_S:
            self._say_news(now_s, facts)

    def _facts(self) -> tuple[ProcessNews, ...]:
        return tuple(running.news() for running in self._running.values())

    def _say_news(self, now_s: float, facts: tuple[ProcessNews, ...]) -> None:
        self._spoke_s, self._said = now_s, facts
        processes = tuple(
            msgspec.structs.replace(news, waited_s=look_at(news.pid).waited_s) for news in facts
        )
        news = NodeNews(
            self._joining.node,
            self._boot,
            Address(0, self._wire.endpoint),
            socket.gethostname(),
            processes,
            self._versions,
        )
        self._wire.send(SUPERVISOR, news)

    def _see(self, name: str) -> None:
        """Report one process's state to its judge (failure detector)."""
        running = self._running.get(name)
        if running is not None and running.code is None:
            state = look_at(running.process.pid)
            self._wire.send(judge_of(name), Sighting(name, state.waited_s, state.is_stopped))

    def _wait_s(self) -> float:
        is_coming_up = any(
            running.lines
            or (running.code is None and running.address is None)
            or (running.code is None and running.ended_s is not None)
            for running in self._running.values()
        )
        return _QUICK_S if is_coming_up or self._forks.is_warming else AGENT_BEAT_S


def _agent_forks() -> Forks:
    # A fork server imports its last module only once idle. Repeated, the module is imported now.
    return Forks(environment(), (*UNIT_MODULES, UNIT_MODULES[-1]))


def _keep_lines(output: Output, lines: deque[bytes]) -> None:
    with output as printed:
        lines.extend(line[:MAX_LINE_BYTES] for line in printed)


def _follow_successors(agent: Agent, told: FileIO) -> None:
    for line in told:
        agent.renew(msgspec.json.decode(line, type=Joining))


def main() -> int:
    """Run the agent; return the exit code."""
    try:
        # Unbuffered: a thread waiting for a line would hold a buffer's lock when this process ends.
        told = FileIO(0, closefd=False)
        joining = msgspec.json.decode(told.readline(), type=Joining)
    except msgspec.MsgspecError as error:
        print(
            f"the standard input of this node's agent is not the record of a run: {error}",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    start_log(f"node-{joining.node}", joining.run.log_level, joining.run.log_format)
    raise_descriptor_limit()
    forks, niceness = _agent_forks(), os.getpriority(os.PRIO_PROCESS, 0)
    # The supervisor detects a live node by its beats, so the agent runs ahead of the node's
    # computation where permitted. The fork server keeps the old priority for the processes.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        with signal_pipe(_SIGNALS) as fd:
            agent = Agent(joining, folder, forks, niceness)
            threading.Thread(target=_follow_successors, args=(agent, told), daemon=True).start()
            try:
                return agent.run(fd)
            finally:
                agent.close()
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    finally:
        forks.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
