"""The supervisor: the main process of `hadal serve`. Starts gateway and units, restarts what ends, stops all in order.

It sleeps until a signal (a child's end is one), a message or a timer comes. It holds no request and does no work of the
model: whether requests survive a crash is the front's business, who is told UnitDown at once.

    SIGTERM, Ctrl-C   drain: the gateway finishes its streams and ends, then the units are ended
    the same again    end everything now
    SIGKILL           the kernel kills every child (runtime/process)
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hadal.core.config import Deployment, units_of
from hadal.core.errors import ConfigError
from hadal.core.fleet import Demand
from hadal.core.messages import SUPERVISOR, Drain, UnitDown, UnitUp
from hadal.core.rank_messages import RankUp
from hadal.roles.fleet_rules import make_fleet
from hadal.roles.recording import MadeFleet
from hadal.runtime.child import PUT_OFF_S, Child, Phase
from hadal.runtime.fleet import FleetExecutor
from hadal.runtime.kv_pool import remove_segments, remove_stale_segments
from hadal.runtime.listen import open_listener, url_of
from hadal.runtime.probe import Probe
from hadal.runtime.process import API_KEYS, EXIT_CONFIG, LISTEN_FD, Run, write_run
from hadal.runtime.recorder import recorded
from hadal.runtime.resolve import Resolved
from hadal.runtime.signals import read_signals, signal_pipe
from hadal.runtime.status import Status, write_status
from hadal.runtime.topology import process_names, rank_name, unit_of
from hadal.runtime.wire import ZmqWire, socket_path

log = logging.getLogger(__name__)

GATEWAY = "gateway"
FRONT = "front"
EXIT_GAVE_UP = 1
_MAX_WAIT_S = 0.5
_STOP_S = 4.0
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Options:
    """How to run it, as opposed to what to run."""

    run_folder: Path | None = None
    """None: a temporary one, removed at the end."""
    log_dir: Path | None = None
    """None: every process writes to this one's stderr, under its name."""
    log_level: str = "info"
    api_keys: tuple[str, ...] = ()


Announce = Callable[[Status], None]
"""Called once when everything was started and once when everything is ready."""


def serve(resolved: Resolved, options: Options, announce: Announce) -> int:
    """Run until told to stop. Returns the exit code. Raises ConfigError if it cannot even start."""
    for name in remove_stale_segments():
        log.info("removed %s, left by a run that is gone", name)
    host, port = resolved.deployment.host, resolved.deployment.port
    with open_listener(host, port) as listener, _run_folder(options.run_folder) as folder, signal_pipe(_SIGNALS) as fd:
        supervisor = Supervisor(resolved, options, folder, listener, announce)
        try:
            return supervisor.run(fd)
        finally:
            supervisor.close()


class Supervisor:
    """One run: its children, its wire and what it is waiting for."""

    def __init__(
        self, resolved: Resolved, options: Options, folder: Path, listener: socket.socket, announce: Announce
    ) -> None:
        self._deployment = resolved.deployment
        self._folder = folder
        self._listener = listener
        self._announce = announce
        self._run_id = secrets.token_hex(4)
        self._url = url_of(listener, resolved.deployment.host)
        self._started_s = time.monotonic()
        self._was_ready = False
        self._exit_code: int | None = None
        self._drain_until_s: float | None = None
        self._kill_at_once = False
        run = Run(self._run_id, os.getpid(), resolved.deployment, options.log_level, resolved.fingerprint)
        write_run(folder, run)
        self._environment = _environment(options)
        self._wire = ZmqWire(SUPERVISOR, folder)
        self._children = {child.name: child for child in _children(resolved.deployment, folder, options.log_dir)}
        self._probe = Probe(self._url)
        self._fleet = self._make_fleet()

    def run(self, signals_fd: int) -> int:
        """Supervise until stopped or given up. Returns the exit code."""
        self._wire.wake_on(signals_fd)
        self._wire.wake_on(self._probe.fd)
        self._start_due()
        self._announce(self.status())
        while self._exit_code is None:
            messages = self._wire.receive(self._wait_s())
            for number in read_signals(signals_fd):
                self._stop_signal(number)
            for message in messages:
                if isinstance(message, UnitUp):
                    self._ready(message.unit)
                    self._tell_fleet(message)
                elif isinstance(message, Demand):
                    self._tell_fleet(message)
                elif isinstance(message, RankUp):
                    self._ready(rank_name(message.unit, message.rank))
                elif isinstance(message, UnitDown):
                    self._given_up(message)
            if self._probe.take():
                self._ready(GATEWAY)
            self._reap()
            self._kill_late_starters()
            if self._exit_code is None:
                if self._fleet is not None:
                    self._fleet.tick(time.monotonic())
                self._start_due()
                self._end_drain_if_due()
        return self._exit_code

    def close(self) -> None:
        """End every child, politely first unless in a hurry, and remove all that they leave."""
        self._probe.close()
        deadline_s = time.monotonic() + (0.0 if self._kill_at_once else _STOP_S)
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for child in self._children.values():
            if not child.wait(deadline_s - time.monotonic()):
                child.signal(signal.SIGKILL)
                child.wait(_STOP_S)
        self._wire.close()
        remove_segments(self._run_id)
        self._write_status()

    def status(self) -> Status:
        """Who runs, under which pid, since when."""
        now_s = time.monotonic()
        return Status(
            url=self._url,
            run_id=self._run_id,
            supervisor_pid=os.getpid(),
            ready=self._is_ready(),
            draining=self._drain_until_s is not None,
            elapsed_s=now_s - self._started_s,
            processes={child.name: child.status() for child in self._children.values()},
        )

    def _is_ready(self) -> bool:
        return all(child.phase is Phase.READY for child in self._children.values() if child.is_wanted)

    def _make_fleet(self) -> FleetExecutor | None:
        if not self._deployment.fleet.is_on:
            return None
        now_s = time.monotonic()
        made = MadeFleet(time.time() - now_s)
        fleet = recorded(
            make_fleet(self._deployment, made.day_s), SUPERVISOR, made, self._run_id, self._deployment
        )  # fmt: skip
        return FleetExecutor(fleet, self._children, self._wire.send, now_s)

    def _tell_fleet(self, message: Demand | UnitUp) -> None:
        if self._fleet is not None:
            self._fleet.tell(time.monotonic(), message)

    def _start_due(self) -> None:
        now_s = time.monotonic()
        due = [c for c in self._children.values() if c.phase is Phase.WAITING and c.start_at_s <= now_s]
        for child in due:
            if child.name == GATEWAY:
                fd = self._listener.fileno()
                child.start(now_s, {**self._environment, LISTEN_FD: str(fd)}, (fd,))
                self._probe.ask(child.num_starts)
            else:
                threads = units_of(self._deployment, child.role).threads
                child.start(now_s, {**self._environment, "OMP_NUM_THREADS": str(threads)})
        if due:
            self._write_status()

    def _ready(self, name: str) -> None:
        child = self._children.get(name)
        if child is None or child.phase is not Phase.STARTING:
            return
        child.is_ready(time.monotonic())
        log.info("%s is ready after %.1f s", name, child.ready_s - child.started_s)
        if self._is_ready() and not self._was_ready:
            self._was_ready = True
            self._announce(self.status())
        self._write_status()

    def _reap(self) -> None:
        for child in self._children.values():
            now_s = time.monotonic()
            code = child.poll(now_s)
            if code is None:
                continue
            reason = _how(code)
            if child.name == GATEWAY and self._drain_until_s is not None:
                log.log(logging.INFO if code == 0 else logging.WARNING, "the gateway has ended: %s", reason)
                child.phase = Phase.ENDED
                self._exit_code = 0
                continue
            self._clear_after(child)
            why = child.why_give_up(now_s)
            self._tell(child, reason)
            is_asked = self._fleet is not None and self._tell_end(self._fleet, child, now_s, reason)
            log.log(logging.INFO if is_asked else logging.WARNING, "%s ended: %s", child.name, reason)
            if code == EXIT_CONFIG and child.ready_s < child.started_s:
                why = f"{child.name} cannot start"
            if why is not None and self._can_spare(child):
                child.put_off(now_s)
                log.error("%s (%s): its unit goes on without it; next start in %.0f s", why, reason, PUT_OFF_S)
            elif why is not None:
                log.error("giving up: %s (%s)", why, reason)
                self._exit_code = EXIT_CONFIG if code == EXIT_CONFIG else EXIT_GAVE_UP
            self._write_status()

    def _tell_end(self, fleet: FleetExecutor, child: Child, now_s: float, reason: str) -> bool:
        """Tell of a unit's end; True if it, or the unit that it is a rank of, is not wanted."""
        if child.name in fleet.units:
            return fleet.ended(now_s, child.name, reason)
        return not child.is_wanted

    def _can_spare(self, child: Child) -> bool:
        """Whether it is a rank of a unit that works, with other ranks that do, or a unit beside others of a fleet."""
        unit, rank = unit_of(child.name)
        if rank is None and self._fleet is not None and unit in self._fleet.units:
            return self._fleet.has_other(unit)
        if rank is None or self._children[unit].phase is not Phase.READY:
            return False
        ranks = [other for other in self._children.values() if other.name != unit and unit_of(other.name)[0] == unit]
        return any(other.phase is Phase.READY for other in ranks if other is not child)

    def _clear_after(self, child: Child) -> None:
        """Remove what a dead process cannot."""
        name = FRONT if child.name == GATEWAY else child.name
        socket_path(self._folder, name).unlink(missing_ok=True)
        self._wire.forget(name)
        remove_segments(self._run_id, child.name)

    def _tell(self, child: Child, reason: str) -> None:
        """Say that a process is gone to whom it concerns: of a unit the front, of a rank its leader."""
        unit, rank = unit_of(child.name)
        if child.name == GATEWAY:
            return  # The next one's first message says it.
        if rank is not None:
            self._wire.send(unit, UnitDown(child.name, reason))
            return
        self._wire.send(FRONT, UnitDown(child.name, reason))
        for other in self._children.values():
            if other.name != unit and unit_of(other.name)[0] == unit:
                other.replace()  # Its ranks hold KV and steps that nobody remembers.

    def _given_up(self, message: UnitDown) -> None:
        """Kill a unit that the front, or a rank that its leader, finds silent or stuck. A stopped one dies as well."""
        child = self._children.get(message.unit)
        if child is None or child.phase is not Phase.READY:
            return
        is_unit = unit_of(message.unit)[1] is None
        if is_unit and time.monotonic() - child.ready_s < self._deployment.unit_timeout_s:
            return  # It cannot have been silent that long: its predecessor was meant.
        log.warning("%s is killed: %s", child.name, message.reason)
        child.signal(signal.SIGKILL)

    def _kill_late_starters(self) -> None:
        now_s = time.monotonic()
        for child in self._children.values():
            if child.phase is Phase.STARTING and now_s - child.started_s > child.start_timeout_s:
                log.error("%s is killed: not ready after %.0f s", child.name, child.start_timeout_s)
                child.signal(signal.SIGKILL)

    def _stop_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._drain_until_s is not None:
            log.warning("ending at once")
            self._kill_at_once = True
            self._exit_code = 128 + number
            return
        timeout_s = self._deployment.drain_timeout_s
        self._drain_until_s = time.monotonic() + timeout_s
        if self._children[GATEWAY].phase is not Phase.READY:
            self._exit_code = 0  # There is no stream to finish.
            return
        self._fleet = None  # What is there is enough for what runs.
        log.info("draining: running streams have %.0f s to finish; once more ends them now", timeout_s)
        self._wire.send(FRONT, Drain())
        self._listener.close()  # The gateway's copy is the last: when it closes it, connections are refused.
        self._write_status()

    def _end_drain_if_due(self) -> None:
        if self._drain_until_s is not None and time.monotonic() > self._drain_until_s:
            log.warning("streams still run after %.0f s; ending them", self._deployment.drain_timeout_s)
            self._exit_code = 0

    def _wait_s(self) -> float:
        waits = [c.start_at_s for c in self._children.values() if c.phase is Phase.WAITING]
        if self._drain_until_s is not None:
            waits.append(self._drain_until_s)
        return min(_MAX_WAIT_S, max(0.0, min(waits) - time.monotonic())) if waits else _MAX_WAIT_S

    def _write_status(self) -> None:
        write_status(self._folder, self.status())


def _children(deployment: Deployment, folder: Path, log_dir: Path | None) -> Iterator[Child]:
    def child(name: str, role: str, module: str, *arguments: str) -> Child:
        log_path = None if log_dir is None else log_dir / f"{name}.log"
        return Child(name, role, [module, *arguments, "--folder", str(folder)], log_path)

    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    # Units first: they take longest.
    for name, role, rank in process_names(deployment):
        unit, _ = unit_of(name)
        if rank is not None:
            yield child(name, role, "hadal.runtime.rank", "--unit", unit, "--role", role, "--rank", str(rank))
        elif units_of(deployment, role).ranks > 1:
            yield child(name, role, "hadal.runtime.leader", "--unit", unit, "--role", role)
        else:
            yield child(name, role, "hadal.runtime.worker", "--unit", unit, "--role", role)
    yield child(GATEWAY, GATEWAY, "hadal.gateway.process")


def _environment(options: Options) -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        # Units share the cores: a thread that spins for work takes them from the unit that has some.
        "OMP_WAIT_POLICY": "PASSIVE",
        API_KEYS: ",".join(options.api_keys),
    }


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@contextmanager
def _run_folder(asked: Path | None) -> Iterator[Path]:
    """Make the folder of sockets and status files, for this user alone."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_heard(asked / f"{SUPERVISOR}.sock"):
            raise ConfigError(f"{asked}: another `hadal serve` uses this run folder. Take another.")
        for left in asked.glob("*.sock"):
            left.unlink()
        yield asked.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="hadal-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_heard(path: Path) -> bool:
    """Whether somebody listens on a Unix socket; a killed process leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
