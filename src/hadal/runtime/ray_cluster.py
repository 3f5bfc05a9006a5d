"""The node provider: asks Ray for nodes, starts an agent on each, and replaces lost nodes.

    placement group   nodes of one unit, or one node shared by small units: all of them or none
    actor             one per bundle; it starts the agent as its own child process and ends with it
    floor             all nodes the cluster should have, for an autoscaler: groups are requested one
                      by one, but their nodes boot together
    run               its settings for the nodes and its supervisor, in Ray's own store: the next
                      supervisor takes the run over
    Ray's head        must keep its state on disk or in Redis; otherwise all nodes end with it

Messages of serving do not go through Ray. Ray notices a dead node after seconds to a minute; Hadal
has given it up long before (roles/nodes), and the node provider only replaces it. Groups and actors are
detached. So this process may end and restart, e.g. with its Ray node: the run continues, and is
found again by its name. Only this module imports ray.

    python -m hadal.runtime.ray_cluster --folder RUN_FOLDER --epoch-number 1
    python -m hadal.runtime.ray_cluster --find NAME --address ADDRESS      prints the record of a run
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
from hadal.core.messages.base import NODE_PROVIDER, SUPERVISOR
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
"""Program that sends a Ray head a request without a token. Its argument is the head's address."""
_ASK_S = 60.0
log = logging.getLogger("hadal.ray")

NAMESPACE = "hadal"
_NAMESPACE = NAMESPACE.encode()
"""Namespace of the records of runs."""
_STORAGE_TAG = b"extra_usage_tag_gcs_storage"
"""Key under which the head stores the kind of its storage, even if usage reports are off."""
_IN_MEMORY = "memory"
_NODE_ID = "ray.io/node-id"
"""Label of every Ray node."""
_LOOK_S = 0.1
"""Time between two requests to Ray for its progress."""
_TELL_S = 1.0
"""Time between the node provider's reports to the supervisor."""
LEASES_MAX = 10
"""Successive leases without contact to the supervisor, after which an unreachable supervisor's
nodes are released.
"""
_FLOOR_S = 30.0
"""Time between repeats of the floor to the autoscaler: other callers of its API overwrite it, and a
restarted head has forgotten it. Also the time between checks for groups removed in Ray.
"""
_LAST_S = 10.0
"""Longest wait for the supervisor to end this process once a successor has taken over."""
_AGAIN_S = 2.0
"""Pause between an agent's end and the start of the next one."""

Group = tuple[int, ...]
"""Nodes of the deployment that are provided together or not at all."""


class NodeActor:
    """Parent of the agent on a node; the agent ends with it."""

    def __init__(self, joining: bytes) -> None:
        """`joining`: a Joining as JSON, without this node's address."""
        self._address = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._agent: subprocess.Popen[bytes] | None = None
        self._joining = self._here(joining)
        self._look_for_successor()
        # The kernel ends the agent when its starting thread ends, so this thread outlives it.
        threading.Thread(target=self._run, daemon=True).start()

    def renew(self, joining: bytes) -> None:
        """Send the agent the joining of a new supervisor, if it has a later epoch."""
        changed = self._here(joining)
        with self._lock:
            if changed.supervisor.epoch_number <= self._joining.supervisor.epoch_number:
                return
            self._joining = changed
            if self._agent is not None and (pipe := self._agent.stdin) is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.write(_line(self._joining))
                    pipe.flush()

    def _here(self, joining: bytes) -> Joining:
        asked = msgspec.json.decode(joining, type=Joining)
        return _for_node(asked, asked.node, self._address)

    def _look_for_successor(self) -> None:
        """Use Ray's record unless it is older: Ray restarts an actor with its first arguments."""
        kept = _kept(self._joining.run.deployment.cluster.name)
        if kept is not None and kept.run.run_id == self._joining.run.run_id:
            changed = _for_node(kept, self._joining.node, self._address)
            with self._lock:
                if changed.supervisor.epoch_number >= self._joining.supervisor.epoch_number:
                    self._joining = changed

    def _run(self) -> None:
        """Run agents one after the other. If an agent ends by itself, exit; Ray then restarts this
        actor, here or elsewhere. An agent that lost its supervisor is followed by another, until
        the supervisor is known to be gone; then the nodes are released. A closed port proves that
        immediately; an unreachable host is given LEASES_MAX leases.
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
                    remove_placement_group(group)  # This actor ends with its group.
            time.sleep(_AGAIN_S)  # Otherwise restarts would follow each other without a pause.
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
class _Provided:
    """A requested group of nodes."""

    group: PlacementGroup
    asked_s: float
    has_agents: bool = False
    """True once the nodes were found and an agent was started on each."""


class RayNodeProvider:
    """Node provider: moves the groups that Ray provides towards the wanted ones, one step per `move`."""

    def __init__(
        self, run: Run, supervisor: Address, api_keys: str = "", api_keys_file: str = ""
    ) -> None:
        """Join the cluster. `api_keys`: for the nodes with gateways. Raises ConfigError if there is
        no cluster, or if it is not safe to use.
        """
        self._deployment = run.deployment
        self._run_id = run.run_id
        self._gateways = gateway_nodes(run.deployment)
        keys = (api_keys, api_keys_file) if self._gateways else ("", "")
        self._joining = Joining(0, "", supervisor, run, *keys)
        self._name = run.deployment.cluster.name
        self._groups: dict[Group, _Provided] = {}
        self._late: dict[Group, str] = {}
        """Group -> why its nodes were not found in time."""
        self._is_kept = False
        self._looked_s = time.monotonic()
        self._floor: list[dict[str, float]] | None = None
        """Floor last sent to the autoscaler; None before the first."""
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
        """Groups with nodes that Ray has found."""
        return tuple(group for group, provided in self._groups.items() if provided.has_agents)

    def keep(self, run: Run) -> None:
        """Record the run in Ray's store, for the next supervisor."""
        if self._is_kept and run == self._joining.run:
            return
        self._joining, self._is_kept = replace(self._joining, run=run), True
        packed = msgspec.json.encode(self._joining)
        _internal_kv_put(self._name.encode(), packed, namespace=_NAMESPACE)

    def _claim(self) -> bool:
        """Claim this supervisor's term; of several claims at the same time, the first succeeds.
        Return False if another supervisor has the term.
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
        """Return whether another supervisor serves under this name."""
        return not self._is_claimed or self._has_later()

    def _has_later(self) -> bool:
        kept = _kept(self._name)
        return kept is not None and kept.run.term > self._joining.run.term

    def end(self) -> None:
        """Release all nodes and delete the run's record, unless another supervisor serves."""
        if not self.is_superseded:
            self.move(())
            _internal_kv_del(self._name.encode(), namespace=_NAMESPACE)
            key = _claim_key(self._name, self._joining.run.term)
            _internal_kv_del(key, namespace=_NAMESPACE)

    def _adopt(self) -> None:
        """Take over the groups that an earlier node provider of this run requested, and send their agents
        the new supervisor.
        """
        prefix = f"{self._run_id}-"
        for asked in placement_group_table().values():
            name = asked["name"]
            if name.startswith(prefix) and asked["state"] != "REMOVED":
                group = tuple(map(int, name.removeprefix(prefix).split("-")))
                self._groups[group] = provided = _Provided(
                    get_placement_group(name), time.monotonic()
                )
                if asked["state"] in ("CREATED", "RESCHEDULING"):  # RESCHEDULING: a node is lost.
                    self._start_all(group, provided)

    def move(self, wanted: Collection[Group]) -> str:
        """Release unwanted groups and request missing ones. Return a complaint as text, or "".

        Groups are placed one at a time, largest first, because several small ones could block a
        large one. The gateways' group follows those of units; groups not found in time come last.
        """
        self._set_floor(wanted)
        self._forget_removed()
        for group in self._groups.keys() - set(wanted):
            self._release(group)
        pending = next(
            (one for one, provided in self._groups.items() if not provided.has_agents), None
        )
        missing = [group for group in wanted if group not in self._groups]
        if pending is not None:
            self._look(pending, self._groups[pending])
        elif missing:
            group = max(missing, key=self._urgency)
            self._groups[group] = _Provided(self._place(group), time.monotonic())
        return next((text for group, text in self._late.items() if group in wanted), "")

    def _urgency(self, group: Group) -> tuple[bool, bool, int]:
        return group not in self._late, group != self._gateways, len(group)

    def _forget_removed(self) -> None:
        """Drop groups that their actors released after a long time without a supervisor."""
        if time.monotonic() - self._looked_s < _FLOOR_S:
            return
        self._looked_s = time.monotonic()
        # Ray lists removed groups too, under the same names as their successors.
        listed = placement_group_table().values()
        there = {asked["name"] for asked in listed if asked["state"] != "REMOVED"}
        for group in list(self._groups):
            if self._name_of(group) not in there:
                log.warning("%s were released by their actors", _nodes(group))
                del self._groups[group]

    def _name_of(self, group: Group) -> str:
        return f"{self._run_id}-{'-'.join(map(str, group))}"

    def _set_floor(self, wanted: Collection[Group]) -> None:
        """Send an autoscaler, if there is one, the list of nodes that the cluster should have."""
        floor = [bundle for group in wanted for bundle in self._bundles(group).values()]
        is_due = bool(floor) and time.monotonic() - self._floor_s > _FLOOR_S
        if floor != self._floor or is_due:
            self._floor, self._floor_s = floor, time.monotonic()
            _ask_autoscaler(floor, self._deployment.cluster.label)

    def _look(self, group: Group, provided: _Provided) -> None:
        """Start agents if the nodes were found; release the group after `place_timeout_s`."""
        waited_s = time.monotonic() - provided.asked_s
        if placement_group_table(provided.group)["state"] == "CREATED":
            self._late.pop(group, None)
            self._start_all(group, provided)
            log.info("Ray found %s in %.1f s", _nodes(group), waited_s)
        elif waited_s > self._deployment.cluster.place_timeout_s:
            self._late[group] = self._why_late(group, waited_s)
            self._release(group)

    def _start_all(self, group: Group, provided: _Provided) -> None:
        for index, (node, bundle) in enumerate(self._bundles(group).items()):
            self._start(node, bundle, provided.group, index)
        provided.has_agents = True

    def _start(
        self, node: int, bundle: dict[str, float], group: PlacementGroup, index: int
    ) -> None:
        """Start an agent on a node; send a running agent the current supervisor's Joining."""
        joining = msgspec.json.encode(_for_node(self._joining, node, ""))
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
        """Release a group and kill its actors. Otherwise Ray would keep the actors, to restart them
        in a group that no longer exists.
        """
        log.info("releasing %s to Ray", _nodes(group))
        provided = self._groups.pop(group).group
        for index in range(len(group)):
            with contextlib.suppress(ValueError):  # The actor does not exist yet.
                ray.kill(ray.get_actor(_actor_name(provided, index)))
        remove_placement_group(provided)

    def _refuse_open_ray(self) -> None:
        if not _lets_anybody_in():
            return
        text = (
            "the Ray cluster requires no token: any client of its ports may run code on every node and read"
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
        """Return node -> resources it must have: GPUs or threads of its ranks, or a gateway's core."""
        if group == self._gateways:
            return {node: {"CPU": 1} for node in group}
        needed: dict[int, Counter[str]] = {node: Counter() for node in group}
        for unit in place_units(self._deployment):
            units = units_of(self._deployment, unit.role)
            num_ranks = min(unit.num_ranks, units.ranks_per_node)
            for node in set(unit.nodes) & needed.keys():
                # Units on one node share its cores in turn; a GPU belongs to one rank.
                if self._deployment.device == "cuda":
                    needed[node]["GPU"] += num_ranks
                else:
                    threads = max(needed[node]["CPU"], num_ranks * units.threads)
                    needed[node]["CPU"] = threads
        return {node: dict(counted) for node, counted in needed.items()}

    def _place(self, group: Group) -> PlacementGroup:
        # The supervisor's gateways already use the port on this host.
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
    """Connect to the cluster as a client. Raises ConfigError if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r} ({error}). Start one with `ray start --head` here and"
            " `ray start --address HEAD:6379` on the other nodes; see docs/cluster.md."
        ) from error


def _lets_anybody_in() -> bool:
    """Return whether the head answers a process without a token. A child process asks, because a
    process reads Ray's mode only once. Raises ConfigError if the head does not answer.
    """
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-c", _ASK, address]
    try:
        code = subprocess.run(command, env=environment, timeout=_ASK_S, check=False).returncode
    except subprocess.TimeoutExpired:
        code = -1
    if code not in (_ANSWERED, _REFUSED):
        raise ConfigError(f"the Ray head at {address} does not report whether it requires a token.")
    return code == _ANSWERED


def _actor_name(group: PlacementGroup, index: int) -> str:
    """Return the name of the actor in a bundle, the same for every node provider. It contains the group's
    id, because actors of removed groups may keep their names.
    """
    return f"{group.id.hex()}-{index}"


def _selectors(
    num_bundles: int, label: str, more: Mapping[str, str] | None = None
) -> list[dict[str, str]] | None:
    """Return the labels that each of `num_bundles` nodes must have."""
    key, _, value = label.partition("=")
    labels = ({key: value} if key else {}) | dict(more or {})
    return [labels] * num_bundles if labels else None


def _ask_autoscaler(floor: list[dict[str, float]], label: str) -> None:
    """Ask the cluster's autoscaler to keep nodes for all of these bundles in total, whether or not
    they are used. A cluster without autoscaler stores the request and does nothing. This is only a
    hint: a pending placement group requests its nodes itself.
    """
    try:
        request_resources(bundles=floor, bundle_label_selectors=_selectors(len(floor), label))
    except RpcError as error:  # The head is unreachable; the request is repeated.
        log.warning("the list of wanted nodes could not be sent to the autoscaler: %s", error)


def _for_node(asked: Joining, node: int, address: str) -> Joining:
    """Return the Joining for a node; it includes API keys only if the node has a gateway."""
    is_gateways = node in gateway_nodes(asked.run.deployment)
    run = replace(asked.run, address=address)
    keys = (asked.api_keys, asked.api_keys_file) if is_gateways else ("", "")
    return Joining(node, address, asked.supervisor, run, *keys)


def _line(joining: Joining) -> bytes:
    return msgspec.json.encode(joining) + b"\n"


def _kept(name: str) -> Joining | None:
    """Return the record of the run of this name; None if the run has ended or there was none.
    Raises ConfigError if another version of Hadal wrote it.
    """
    found = _internal_kv_get(name.encode(), namespace=_NAMESPACE)
    try:
        return msgspec.json.decode(found, type=Joining) if found else None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"Ray's record under cluster.name {name!r} is of another version of Hadal ({error}); set"
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
    """Print the record of a run, if there is one."""
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
    """Provide nodes until SIGTERM or until another supervisor serves; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--find")
    parser.add_argument("--address")
    if (found := parser.parse_known_args()[0]).find:
        return _find(found.find, found.address)
    add_epoch_arguments(parser)
    asked = parser.parse_args()
    run = enter_child(NODE_PROVIDER, asked.folder)
    # Only the supervisor, on this host, sends it messages.
    wire = ZmqWire(NODE_PROVIDER, asked.folder, epoch_number=asked.epoch_number)
    ending = threading.Event()
    try:
        supervisor = read_address(address_path(asked.folder, SUPERVISOR))
        provider = RayNodeProvider(
            run, supervisor, os.environ.get(API_KEYS, ""), os.environ.get(API_KEYS_FILE, "")
        )
        signal.signal(signal.SIGTERM, lambda *_: ending.set())
        wanted: tuple[Group, ...] | None = None
        """Wanted groups; None until the supervisor's first message: until then all groups stay."""
        complaint = ""
        told_s = -math.inf
        while not ending.is_set():
            for message in wire.receive(_LOOK_S):
                if isinstance(message, KeepNodes):
                    wanted = message.groups
            is_due = time.monotonic() - told_s >= _TELL_S
            if is_due and provider.is_superseded:
                wire.send(SUPERVISOR, NodesKept(complaint, is_superseded=True))
                ending.wait(_LAST_S)  # The supervisor ends this process.
                return 0
            if wanted is not None:
                complaint = provider.move(wanted)
            if is_due:
                told_s = time.monotonic()
                wire.send(SUPERVISOR, NodesKept(complaint, provider.found))
                provider.keep(read_run(asked.folder))  # A rollout changes the run.
        provider.end()
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    finally:
        wire.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
