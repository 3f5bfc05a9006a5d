"""The lender: asks Ray for nodes, has an agent started on each, and asks for another where a node is
gone.

    placement group   the nodes of one unit, or one that small units share: all of it or nothing
    actor             one in each bundle; it starts the agent as a process of its own and ends with it
    floor             what the cluster is to have in all, for an autoscaler: groups are asked for one by
                      one, and their nodes boot together
    run               what it is to the nodes and who supervises it, in Ray's own store: the next
                      supervisor takes it over
    Ray's head        must keep its state on disk or in Redis: else its end is that of every node

Nothing that is said while serving goes through Ray. Ray learns of a dead node after seconds to a
minute. Hadal gave it up long before (roles/nodes); the lender only replaces it. Groups
and actors are detached, so this process may end and be started again, as it does with the Ray node
that it is on: what runs goes on, and is found again by its name. This is the one module that imports
ray.

    python -m hadal.runtime.ray_cluster --folder RUN_FOLDER --epoch-number 1
    python -m hadal.runtime.ray_cluster --find NAME --address ADDRESS      prints what is kept of a run
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RpcError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hadal.core.config import units_of
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.base import LENDER, SUPERVISOR
from hadal.core.messages.nodes import Address, KeepNodes, NodesKept
from hadal.runtime.addresses import address_path, read_address
from hadal.runtime.agent import Joining
from hadal.runtime.kept_run import is_open
from hadal.runtime.process import entry
from hadal.runtime.process.forks import API_KEYS, API_KEYS_FILE
from hadal.runtime.process.process import (
    EXIT_LEASE,
    Run,
    add_epoch_arguments,
    enter_child,
    read_run,
)
from hadal.runtime.topology import gateway_nodes, place_units, ranges
from hadal.runtime.wire import ZmqWire

_ANSWERED, _REFUSED = 0, 3
_ASK = f"""
import sys
from ray.exceptions import AuthenticationError
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"", 10)
except AuthenticationError:
    sys.exit({_REFUSED})
"""
"""Program that asks a head without a token. Its argument is the head's address."""
_ASK_S = 60.0
log = logging.getLogger("hadal.ray")

NAMESPACE = "hadal"
_NAMESPACE = NAMESPACE.encode()
"""Of what is kept of runs."""
_STORAGE_TAG = b"extra_usage_tag_gcs_storage"
"""Where the head writes down what it keeps its state in, whether or not it tells anybody."""
_IN_MEMORY = "memory"
_NODE_ID = "ray.io/node-id"
"""Label of every Ray node."""
_LOOK_S = 0.1
"""How often Ray is asked how far it is."""
_TELL_S = 1.0
"""How often the supervisor is told that nodes are looked after."""
LEASES_MAX = 10
"""Of a supervisor that cannot be reached, one after the other, before its nodes are given back."""
_FLOOR_S = 30.0
"""How often the autoscaler is told again what the cluster is to have: whoever else says something of the
kind takes this word's place, and a head that was started again has forgotten it.
"""
_LAST_S = 10.0
"""How long the supervisor may take to end this, once it was told that another serves."""
_AGAIN_S = 2.0
"""Between an agent's end and the next one's start."""

Group = tuple[int, ...]
"""Nodes of the deployment that are had together or not at all."""


class NodeActor:
    """Keeps an agent on a node, which ends with this."""

    def __init__(self, joining: bytes) -> None:
        """`joining`: as JSON, but for the address of this node."""
        self._address = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._agent: subprocess.Popen[bytes] | None = None
        self._joining = self._here(joining)
        self._look_for_successor()
        # The thread that starts an agent has to outlive it: the kernel ends the agent with it.
        threading.Thread(target=self._run, daemon=True).start()

    def renew(self, joining: bytes) -> None:
        """Another supervisor may have taken the run over: tell the agent."""
        told = self._here(joining)
        with self._lock:
            if told.supervisor.epoch_number <= self._joining.supervisor.epoch_number:
                return
            self._joining = told
            if self._agent is not None and (pipe := self._agent.stdin) is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.write(_line(self._joining))
                    pipe.flush()

    def _here(self, joining: bytes) -> Joining:
        asked = msgspec.json.decode(joining, type=Joining)
        return _told(asked, asked.node, self._address)

    def _look_for_successor(self) -> None:
        """Ray starts this anew with what it was given at first, whoever supervises by now."""
        kept = _kept(self._joining.run.deployment.cluster.name)
        if kept is not None and kept.run.run_id == self._joining.run.run_id:
            told = _told(kept, self._joining.node, self._address)
            with self._lock:
                if told.supervisor.epoch_number >= self._joining.supervisor.epoch_number:
                    self._joining = told

    def _run(self) -> None:
        """Have an agent until one ends by itself, whereupon Ray starts this anew elsewhere, or here.
        One that ends for want of a supervisor is followed by another until the supervisor is known
        to be gone: then the nodes are given back. A closed port says so at once; one that cannot be
        reached says nothing, and is waited for.
        """
        lease_s = self._joining.run.deployment.cluster.lease_s
        num_leases = 0
        while True:
            begun_s = time.monotonic()
            code = self._start().wait()
            group = ray.util.get_current_placement_group()
            self._look_for_successor()
            if code == EXIT_LEASE and group is not None:
                has_heard = time.monotonic() - begun_s > 2.0 * lease_s
                num_leases = 1 if has_heard else num_leases + 1
                if num_leases == LEASES_MAX or is_open(self._joining.supervisor.endpoint) is False:
                    _ask_autoscaler([], "")
                    remove_placement_group(group)  # And this with it.
            time.sleep(_AGAIN_S)  # Else both would be started at once, and without a limit.
            if code != EXIT_LEASE:
                os._exit(1)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            agent = self._agent = subprocess.Popen(
                [sys.executable, "-P", entry.__file__, str(os.getpid()), "hadal.runtime.agent"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            assert agent.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(_line(self._joining))
                agent.stdin.flush()
        return agent


@dataclass
class _Lent:
    """A group of nodes that was asked for."""

    group: PlacementGroup
    asked_s: float
    has_agents: bool = False
    """The nodes were found."""


class RayLender:
    """Moves Ray nearer to what the supervisor wants, a little at each call."""

    def __init__(
        self, run: Run, supervisor: Address, api_keys: str = "", api_keys_file: str = ""
    ) -> None:
        """Join the cluster. `api_keys`: for the nodes with gateways. Raises ConfigError if it is not
        there, or not to be relied upon.
        """
        self._deployment = run.deployment
        self._run_id = run.run_id
        self._gateways = gateway_nodes(run.deployment)
        keys = (api_keys, api_keys_file) if self._gateways else ("", "")
        self._joining = Joining(0, "", supervisor, run, *keys)
        self._name = run.deployment.cluster.name
        self._lent: dict[Group, _Lent] = {}
        self._late: dict[Group, str] = {}
        """Why those that are looked for in vain are not found."""
        self._is_kept = False
        self._looked_s = time.monotonic()
        self._floor: list[dict[str, float]] | None = None
        """What the autoscaler was told last; None: nothing yet."""
        self._floor_s = -math.inf
        _join(run.deployment.cluster.address)
        self._refuse_open_ray()
        self._refuse_volatile_head()
        self._is_claimed = not self._has_later() and self._claim()
        if self._is_claimed:
            self.keep(run)
            self._adopt()

    @property
    def found(self) -> tuple[Group, ...]:
        """Groups whose nodes are there."""
        return tuple(group for group, lent in self._lent.items() if lent.has_agents)

    def keep(self, run: Run) -> None:
        """Have the next supervisor find it."""
        if self._is_kept and run == self._joining.run:
            return
        self._joining, self._is_kept = replace(self._joining, run=run), True
        packed = msgspec.json.encode(self._joining)
        _internal_kv_put(self._name.encode(), packed, namespace=_NAMESPACE)

    def _claim(self) -> bool:
        """Be the one supervisor of its term: of several that start at once the first is. False: another
        is.
        """
        term, claim = self._joining.run.term, self._joining.supervisor.endpoint.encode()
        key = _claim_key(self._name, term)
        _internal_kv_put(key, claim, overwrite=False, namespace=_NAMESPACE)
        is_mine = bool(_internal_kv_get(key, namespace=_NAMESPACE) == claim)
        if is_mine:
            _internal_kv_del(_claim_key(self._name, term - 1), namespace=_NAMESPACE)
        return is_mine

    @property
    def is_superseded(self) -> bool:
        """Whether another supervisor serves under this name."""
        return not self._is_claimed or self._has_later()

    def _has_later(self) -> bool:
        kept = _kept(self._name)
        return kept is not None and kept.run.term > self._joining.run.term

    def end(self) -> None:
        """Give all back, and leave nothing for a next supervisor."""
        if not self.is_superseded:
            self.move(())
            _internal_kv_del(self._name.encode(), namespace=_NAMESPACE)
            key = _claim_key(self._name, self._joining.run.term)
            _internal_kv_del(key, namespace=_NAMESPACE)

    def _adopt(self) -> None:
        """Take over what a lender of this run before this one asked for, and tell agents who
        supervises now.
        """
        prefix = f"{self._run_id}-"
        for asked in placement_group_table().values():
            name = asked["name"]
            if name.startswith(prefix) and asked["state"] != "REMOVED":
                group = tuple(map(int, name.removeprefix(prefix).split("-")))
                self._lent[group] = lent = _Lent(get_placement_group(name), time.monotonic())
                if asked["state"] in ("CREATED", "RESCHEDULING"):  # Of the latter, a node is gone.
                    self._start_all(group, lent)

    def move(self, wanted: Collection[Group]) -> str:
        """Give back what is not wanted, and come nearer to what is. Returns what there is to
        complain of.

        The largest group goes first, one at a time: several small ones could take a place of each
        large one. What was looked for in vain goes last.
        """
        self._set_floor(wanted)
        self._forget_removed()
        for group in self._lent.keys() - set(wanted):
            self._release(group)
        pending = next((one for one, lent in self._lent.items() if not lent.has_agents), None)
        missing = [group for group in wanted if group not in self._lent]
        if pending is not None:
            self._look(pending, self._lent[pending])
        elif missing:
            group = max(missing, key=self._urgency)
            self._lent[group] = _Lent(self._place(group), time.monotonic())
        return next((text for group, text in self._late.items() if group in wanted), "")

    def _urgency(self, group: Group) -> tuple[bool, bool, int]:
        return group not in self._late, group != self._gateways, len(group)

    def _forget_removed(self) -> None:
        """Groups that their agents gave back, as those do that hear of no supervisor for long."""
        if time.monotonic() - self._looked_s < _FLOOR_S:
            return
        self._looked_s = time.monotonic()
        # Ray lists removed groups too, under the same names as their successors.
        listed = placement_group_table().values()
        there = {asked["name"] for asked in listed if asked["state"] != "REMOVED"}
        for group in list(self._lent):
            if self._name_of(group) not in there:
                log.warning("%s were given back by their agents", _nodes(group))
                del self._lent[group]

    def _name_of(self, group: Group) -> str:
        return f"{self._run_id}-{'-'.join(map(str, group))}"

    def _set_floor(self, wanted: Collection[Group]) -> None:
        """Tell an autoscaler, if there is one, which nodes the cluster is to have."""
        floor = [bundle for group in wanted for bundle in self._bundles(group).values()]
        is_due = bool(floor) and time.monotonic() - self._floor_s > _FLOOR_S
        if floor != self._floor or is_due:
            self._floor, self._floor_s = floor, time.monotonic()
            _ask_autoscaler(floor, self._deployment.cluster.label)

    def _look(self, group: Group, lent: _Lent) -> None:
        """Start agents if the nodes are found; give up for now if that takes too long."""
        waited_s = time.monotonic() - lent.asked_s
        if placement_group_table(lent.group)["state"] == "CREATED":
            self._late.pop(group, None)
            self._start_all(group, lent)
            log.info("Ray found %s in %.1f s", _nodes(group), waited_s)
        elif waited_s > self._deployment.cluster.place_timeout_s:
            self._late[group] = self._why_late(group, waited_s)
            self._release(group)

    def _start_all(self, group: Group, lent: _Lent) -> None:
        for index, (node, bundle) in enumerate(self._bundles(group).items()):
            self._start(node, bundle, lent.group, index)
        lent.has_agents = True

    def _start(
        self, node: int, bundle: dict[str, float], group: PlacementGroup, index: int
    ) -> None:
        """Have an agent on a node; one that is there already hears who supervises now."""
        joining = msgspec.json.encode(_told(self._joining, node, ""))
        actor: Any = (
            ray.remote(NodeActor)
            .options(
                name=_actor_name(group, index),
                get_if_exists=True,
                lifetime="detached",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
                num_cpus=0,
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
            )
            .remote(joining)
        )
        actor.renew.remote(joining)

    def _release(self, group: Group) -> None:
        """Give a group back, and end its actors: Ray would keep them, to be started again in a group
        that is not there any more.
        """
        log.info("giving %s back to Ray", _nodes(group))
        lent = self._lent.pop(group).group
        for index in range(len(group)):
            with contextlib.suppress(ValueError):  # There is none yet.
                ray.kill(ray.get_actor(_actor_name(lent, index)))
        remove_placement_group(lent)

    def _refuse_open_ray(self) -> None:
        if not _lets_anybody_in():
            return
        text = (
            "the Ray cluster asks for no token: who reaches its ports may run code on every node, and read"
            " the secret of this deployment. Start it on all nodes with RAY_AUTH_MODE=token and one"
            " RAY_AUTH_TOKEN, and set both here (docs/cluster.md)"
        )
        if self._deployment.cluster.open_ray == "refuse":
            raise ConfigError(f"{text}, or set cluster.open_ray to 'allow'.")
        log.warning("%s.", text)

    def _refuse_volatile_head(self) -> None:
        found = _internal_kv_get(_STORAGE_TAG, namespace=b"usage_stats")
        storage = found.decode() if found else _IN_MEMORY
        if storage != _IN_MEMORY:
            return
        text = (
            "the Ray head keeps its state in memory alone: if it ends, Ray ends every process of"
            " this deployment on every node a minute later. Start the head with Redis"
            " (RAY_REDIS_ADDRESS) or on a volume (RAY_gcs_storage=rocksdb,"
            " RAY_gcs_storage_path=FOLDER)"
        )
        if self._deployment.cluster.volatile_head == "refuse":
            raise ConfigError(f"{text}, or set cluster.volatile_head to 'allow'.")
        log.warning("%s.", text)

    def _bundles(self, group: Group) -> dict[int, dict[str, float]]:
        """What each node must have: its ranks' GPUs or their threads, or a gateway's core."""
        if group == self._gateways:
            return {node: {"CPU": 1} for node in group}
        needed: dict[int, Counter[str]] = {node: Counter() for node in group}
        for unit in place_units(self._deployment):
            units = units_of(self._deployment, unit.role)
            num_ranks = min(unit.num_ranks, units.ranks_per_node)
            for node in set(unit.nodes) & needed.keys():
                # Units on one node take turns on its cores; a GPU is one rank's.
                if self._deployment.device == "cuda":
                    needed[node]["GPU"] += num_ranks
                else:
                    threads = max(needed[node]["CPU"], num_ranks * units.threads)
                    needed[node]["CPU"] = threads
        return {node: dict(counted) for node, counted in needed.items()}

    def _place(self, group: Group) -> PlacementGroup:
        # The supervisor's gateways have the port on this host already.
        elsewhere = {}
        if group == self._gateways:
            elsewhere = {_NODE_ID: f"!{ray.get_runtime_context().get_node_id()}"}
        made: PlacementGroup = placement_group(
            list(self._bundles(group).values()),
            strategy="STRICT_SPREAD",
            name=self._name_of(group),
            lifetime="detached",
            bundle_label_selector=_selectors(len(group), self._deployment.cluster.label, elsewhere),
        )
        return made

    def _why_late(self, group: Group, waited_s: float) -> str:
        (bundle, *_) = self._bundles(group).values()
        each = " each" if len(group) > 1 else ""
        return (
            f"{_nodes(group)} not found within {waited_s:.0f} s (cluster.place_timeout_s):"
            f" {_resources(bundle)} are needed free{each}{self._of_label()}, and the cluster has"
            f" {self._what_is_there()}. Add nodes, or take a smaller deployment"
        )

    def _of_label(self) -> str:
        label = self._deployment.cluster.label
        return f" and the label {label}" if label else ""

    def _what_is_there(self) -> str:
        alive = [node["Resources"] for node in _ray_nodes() if node["Alive"]]
        counted = Counter(
            _resources({name: found[name] for name in ("CPU", "GPU") if name in found})
            for found in alive
        )
        return ", ".join(
            f"{count} x {text or 'nothing'}" for text, count in sorted(counted.items())
        )


def _join(address: str) -> None:
    """Be a client of the cluster. Raises ConfigError if it is not there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r} ({error}). Start one with `ray start --head` here and"
            " `ray start --address HEAD:6379` on the other nodes; docs/cluster.md tells the rest."
        ) from error


def _lets_anybody_in() -> bool:
    """Return whether the head answers a process without a token. Another process asks, since a process
    reads Ray's mode once. Raises ConfigError if the head does not answer.
    """
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", _ASK, address]
    try:
        code = subprocess.run(command, env=environment, timeout=_ASK_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code not in (_ANSWERED, _REFUSED):
        raise ConfigError(f"the Ray head at {address} does not say whether it asks for a token.")
    return code == _ANSWERED


def _actor_name(group: PlacementGroup, index: int) -> str:
    """Of the actor in a bundle, whichever lender asks. No group's is another's: the name of an actor
    whose group was removed may be taken for good.
    """
    return f"{group.id.hex()}-{index}"


def _selectors(
    num_bundles: int, label: str, more: Mapping[str, str] | None = None
) -> list[dict[str, str]] | None:
    """The labels that each node of so many must have."""
    key, _, value = label.partition("=")
    labels = ({key: value} if key else {}) | dict(more or {})
    return [labels] * num_bundles if labels else None


def _ask_autoscaler(floor: list[dict[str, float]], label: str) -> None:
    """Have the cluster's autoscaler keep nodes for all of these bundles, whoever uses them; a cluster
    without one keeps the word and does nothing. This is a hint: what it does not bring, the groups
    that wait for nodes ask for.
    """
    try:
        request_resources(bundles=floor, bundle_label_selectors=_selectors(len(floor), label))
    except RpcError as error:  # The head is away; it is told again.
        log.warning("the autoscaler was not told which nodes are wanted: %s", error)


def _told(asked: Joining, node: int, address: str) -> Joining:
    """The same for another node, which hears of API keys if it has a gateway."""
    is_gateways = node in gateway_nodes(asked.run.deployment)
    run = replace(asked.run, address=address)
    keys = (asked.api_keys, asked.api_keys_file) if is_gateways else ("", "")
    return Joining(node, address, asked.supervisor, run, *keys)


def _line(joining: Joining) -> bytes:
    return msgspec.json.encode(joining) + b"\n"


def _kept(name: str) -> Joining | None:
    """What is kept of the run of this name: its supervisor and what it tells processes. None: it has
    ended, or there was none.
    """
    found = _internal_kv_get(name.encode(), namespace=_NAMESPACE)
    try:
        return msgspec.json.decode(found, type=Joining) if found else None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"what Ray keeps under cluster.name {name!r} is of another version of Hadal ({error}); give"
            " another name."
        ) from error


def _claim_key(name: str, term: int) -> bytes:
    return f"{name}/{term}".encode()


def _ray_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in found.items())


def _nodes(group: Group) -> str:
    return f"node {group[0]}" if len(group) == 1 else f"nodes {ranges(group)}"


def _find(name: str, address: str) -> int:
    """Print what is kept of a run, if anything is."""
    try:
        _join(address)
        kept = _kept(name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    if kept is not None:
        sys.stdout.buffer.write(_line(kept))
    return 0


def main() -> int:
    """Lend nodes until told to end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find")
    parser.add_argument("--address")
    if (found := parser.parse_known_args()[0]).find:
        return _find(found.find, found.address)
    add_epoch_arguments(parser)
    asked = parser.parse_args()
    run = enter_child(LENDER, asked.folder)
    # Nobody speaks to it but the supervisor, on this host.
    wire = ZmqWire(LENDER, asked.folder, epoch_number=asked.epoch_number)
    ending = threading.Event()
    try:
        supervisor = read_address(address_path(asked.folder, SUPERVISOR))
        lender = RayLender(
            run, supervisor, os.environ.get(API_KEYS, ""), os.environ.get(API_KEYS_FILE, "")
        )
        signal.signal(signal.SIGTERM, lambda *_: ending.set())
        wanted: tuple[Group, ...] | None = None
        """Not known yet: what the lender before had is kept until the supervisor spoke."""
        complaint = ""
        told_s = -math.inf
        while not ending.is_set():
            for message in wire.receive(_LOOK_S):
                if isinstance(message, KeepNodes):
                    wanted = message.groups
            is_due = time.monotonic() - told_s >= _TELL_S
            if is_due and lender.is_superseded:
                wire.send(SUPERVISOR, NodesKept(complaint, is_superseded=True))
                ending.wait(_LAST_S)  # The supervisor ends it.
                return 0
            if wanted is not None:
                complaint = lender.move(wanted)
            if is_due:
                told_s = time.monotonic()
                wire.send(SUPERVISOR, NodesKept(complaint, lender.found))
                lender.keep(read_run(asked.folder))  # A rollout changes it.
        lender.end()
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    finally:
        wire.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
