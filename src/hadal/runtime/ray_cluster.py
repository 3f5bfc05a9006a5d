"""Nodes from Ray: it places an agent on each, and another where a node is gone.

    placement group   the nodes of one unit, or one that small units share: all of it or nothing
    actor             one in each bundle; it starts the agent as a process of its own and ends with it
    Ray's head        must keep its state on disk or in Redis: else its end is that of every node

Nothing that is said while serving goes through Ray, and nothing here is called again once the nodes
are there. Ray learns of a dead node after seconds to a minute; that it is lost was decided long
before (roles/nodes), and here another is only had. This is the one module that imports ray.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import ray
from ray.experimental.internal_kv import _internal_kv_get
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hadal.core.config import Deployment, units_of
from hadal.core.errors import ConfigError
from hadal.runtime.agent import Joining
from hadal.runtime.process import entry
from hadal.runtime.topology import place_units

log = logging.getLogger("hadal.ray")

NAMESPACE = "hadal"
_STORAGE_TAG = b"extra_usage_tag_gcs_storage"
"""Where the head writes down what it keeps its state in, whether or not it tells anybody."""
_IN_MEMORY = "memory"
_LOOK_S = 0.1
_SLOW_S = 5.0
"""An answer of Ray that takes longer is told of."""
_CLOSE_S = 10.0
_HEAD_AWAY_S = "86400"

Group = tuple[int, ...]
"""Nodes of the deployment that are had together or not at all."""


class NodeActor:
    """Starts a node's agent and ends with it, as the agent does with this."""

    def __init__(self, joining: bytes) -> None:
        """`joining`: as JSON, but for the address of this node."""
        asked = msgspec.json.decode(joining, type=Joining)
        address = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        told = _joining(asked, asked.node, address)
        self._agent = subprocess.Popen(
            [sys.executable, "-P", entry.__file__, str(os.getpid()), "hadal.runtime.agent"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._agent.stdin is not None
        with self._agent.stdin as pipe:
            pipe.write(msgspec.json.encode(told))
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def pid(self) -> int:
        """Of the agent."""
        return self._agent.pid

    def _end_with_it(self) -> None:
        os._exit(min(1, abs(self._agent.wait())))


@dataclass
class _Lent:
    """A group of nodes that was asked for."""

    group: PlacementGroup
    asked_s: float
    actors: list[Any] = field(default_factory=list)
    """Empty until the nodes are found."""


class RayCluster:
    """A Lender (runtime/nodes). Ray is asked in a thread of its own: a head that does not answer
    holds up nothing else.
    """

    def __init__(self, deployment: Deployment) -> None:
        """Join the cluster as a client. Raises ConfigError if it is not there, or not to be relied
        upon.
        """
        self._deployment = deployment
        asked = deployment.cluster.address
        if asked.startswith("ray://"):
            raise ConfigError(
                f"cluster.address is {asked!r}: `hadal serve` runs on a node of the cluster. Give"
                " the head's address and port, or 'auto'."
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Else this process would end with a head that is away for a minute.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _HEAD_AWAY_S)
        try:
            ray.init(
                address=asked,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster at {asked!r} ({error}). Start one with `ray start --head` here and"
                " `ray start --address HEAD:6379` on the other nodes; docs/cluster.md tells the"
                " rest."
            ) from error
        self.address = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._refuse_volatile_head()
        self._joining: Joining | None = None
        self._wanted: frozenset[Group] = frozenset()
        self._lent: dict[Group, _Lent] = {}
        self._late: dict[Group, str] = {}
        """Why those that are looked for in vain are not found."""
        self._asks_since_s: float | None = None
        """Since when Ray is being asked; None: it is not."""
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)

    def begin(self, joining: Joining) -> None:
        """Agents are to join like this, but for their number and address."""
        self._joining = joining
        self._thread.start()

    def keep(self, groups: frozenset[Group]) -> None:
        """Have an agent on every node of these groups, soon, and on no other."""
        self._wanted = groups

    def complaint(self) -> str:
        """Why nodes that are wanted are not there; empty while they are, or may soon be."""
        asks_since_s = self._asks_since_s
        if asks_since_s is not None and time.monotonic() - asks_since_s > _SLOW_S:
            return (
                f"Ray has not answered for {time.monotonic() - asks_since_s:.0f} s; what runs goes"
                " on, and nothing is started on another node until it does"
            )
        return next((text for group, text in self._late.items() if group in self._wanted), "")

    def close(self) -> None:
        """Give all nodes back. Idempotent."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if ray.is_initialized():
            ray.shutdown()

    # ---- in the thread ----
    def _run(self) -> None:
        while not self._is_closing.wait(_LOOK_S):
            try:
                self._asks_since_s = time.monotonic()
                self._move()
            except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
                log.warning("Ray: %s; it is asked again", error)
            self._asks_since_s = None
        for group in list(self._lent):
            self._release(group)

    def _move(self) -> None:
        """Give back what is not wanted, and come nearer to what is. The largest group goes first,
        one at a time: several small ones could take a place of each large one.
        """
        wanted = self._wanted
        for group in self._lent.keys() - wanted:
            self._release(group)
        for group, lent in self._lent.items():
            if not lent.actors:
                self._look(group, lent)
                return
        missing = [group for group in wanted if group not in self._lent]
        if missing:
            # What was looked for in vain goes last.
            group = max(missing, key=lambda one: (one not in self._late, len(one)))
            self._lent[group] = _Lent(self._place(group), time.monotonic())

    def _look(self, group: Group, lent: _Lent) -> None:
        """Start agents if the nodes are found; give up for now if that takes too long."""
        waited_s = time.monotonic() - lent.asked_s
        if placement_group_table(lent.group)["state"] == "CREATED":
            self._late.pop(group, None)
            lent.actors = [
                self._start(node, bundle, lent.group, index)
                for index, (node, bundle) in enumerate(self._bundles(group).items())
            ]
            log.info("Ray found %d nodes in %.1f s", len(group), waited_s)
        elif waited_s > self._deployment.cluster.place_timeout_s:
            self._late[group] = self._why_late(group, waited_s)
            self._release(group)

    def _start(self, node: int, bundle: dict[str, float], group: PlacementGroup, index: int) -> Any:
        assert self._joining is not None
        told = _joining(self._joining, node, self._joining.address)
        return (
            ray.remote(NodeActor)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
                num_cpus=0,
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                max_task_retries=0,
            )
            .remote(msgspec.json.encode(told))
        )

    def _release(self, group: Group) -> None:
        lent = self._lent.pop(group)
        for actor in lent.actors:
            ray.kill(actor)
        remove_placement_group(lent.group)

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
        """What each node must have: its ranks' GPUs, or their threads."""
        needed: dict[int, Counter[str]] = {node: Counter() for node in group}
        for unit in place_units(self._deployment):
            units = units_of(self._deployment, unit.role)
            num_ranks = min(unit.num_ranks, units.ranks_per_node)
            for node in set(unit.nodes) & needed.keys():
                if self._deployment.device == "cuda":
                    needed[node]["GPU"] += num_ranks
                else:
                    threads = max(needed[node]["CPU"], num_ranks * units.threads)
                    needed[node]["CPU"] = threads
        return {node: dict(counted) for node, counted in needed.items()}

    def _place(self, group: Group) -> PlacementGroup:
        key, _, value = self._deployment.cluster.label.partition("=")
        made: PlacementGroup = placement_group(
            list(self._bundles(group).values()),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{key: value}] * len(group) if key else None,
        )
        return made

    def _why_late(self, group: Group, waited_s: float) -> str:
        (bundle, *_) = self._bundles(group).values()
        count = f"{len(group)} nodes were" if len(group) > 1 else "a node was"
        each = " each" if len(group) > 1 else ""
        return (
            f"{count} not found within {waited_s:.0f} s (cluster.place_timeout_s):"
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
        return ", ".join(f"{count} x {text or 'nothing'}" for text, count in counted.items())


def _joining(asked: Joining, node: int, address: str) -> Joining:
    """The same for another node."""
    return Joining(node, address, asked.supervisor, replace(asked.run, address=address))


def _ray_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in found.items())
