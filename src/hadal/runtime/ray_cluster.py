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
from collections.abc import Sequence
from dataclasses import replace
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
from hadal.progress import PERIOD_S
from hadal.runtime.agent import Joining
from hadal.runtime.process import entry
from hadal.runtime.topology import place_units

log = logging.getLogger("hadal.ray")

NAMESPACE = "hadal"
_STORAGE_TAG = b"extra_usage_tag_gcs_storage"
"""Where the head writes down what it keeps its state in, whether or not it tells anybody."""
_IN_MEMORY = "memory"
_LOOK_S = 0.1


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


class RayCluster:
    """A Lender (runtime/nodes)."""

    def __init__(self, deployment: Deployment) -> None:
        """Join the cluster as a client. Raises ConfigError if it is not there, or not to be relied
        upon.
        """
        self._deployment = deployment
        self._groups: list[PlacementGroup] = []
        self._actors: list[Any] = []
        asked = deployment.cluster.address
        if asked.startswith("ray://"):
            raise ConfigError(
                f"cluster.address is {asked!r}: `hadal serve` runs on a node of the cluster. Give"
                " the head's address and port, or 'auto'."
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
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

    def lend(self, joining: Joining) -> None:
        """Start an agent on each node of the deployment. Raises ConfigError if nodes are
        missing.
        """
        started_s = time.monotonic()
        groups = {nodes: [self._bundle(node) for node in nodes] for nodes in self._node_groups()}
        missing = sum(map(len, groups))
        # The largest first, one by one: several small ones could take a place of each large one.
        for nodes, bundles in sorted(groups.items(), key=_size, reverse=True):
            group = self._group(bundles)
            self._groups.append(group)
            self._await(group, bundles, missing, started_s)
            missing -= len(nodes)
            for index, (node, bundle) in enumerate(zip(nodes, bundles, strict=True)):
                placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                actor = ray.remote(NodeActor).options(
                    scheduling_strategy=placed,
                    num_cpus=0,
                    num_gpus=bundle.get("GPU", 0),
                    max_restarts=-1,
                    max_task_retries=0,
                )
                told = _joining(joining, node, joining.address)
                self._actors.append(actor.remote(msgspec.json.encode(told)))
        log.info("Ray found %d nodes in %.1f s", len(self._actors), time.monotonic() - started_s)

    def close(self) -> None:
        """Give all nodes back. Idempotent."""
        for actor in self._actors:
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []
        ray.shutdown()

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

    def _node_groups(self) -> list[tuple[int, ...]]:
        """Nodes that are had together or not at all: those of a large unit, or one that small
        units share.
        """
        return list(dict.fromkeys(unit.nodes for unit in place_units(self._deployment)))

    def _bundle(self, node: int) -> dict[str, float]:
        """What a node must have: its ranks' GPUs, or their threads."""
        needed: Counter[str] = Counter()
        for unit in place_units(self._deployment):
            units = units_of(self._deployment, unit.role)
            num_ranks = min(unit.num_ranks, units.ranks_per_node) if node in unit.nodes else 0
            if self._deployment.device == "cuda":
                needed["GPU"] += num_ranks
            else:
                needed["CPU"] = max(needed["CPU"], num_ranks * units.threads)
        return {name: float(count) for name, count in needed.items()}

    def _group(self, bundles: Sequence[dict[str, float]]) -> PlacementGroup:
        key, _, value = self._deployment.cluster.label.partition("=")
        made: PlacementGroup = placement_group(
            list(bundles),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{key: value}] * len(bundles) if key else None,
        )
        return made

    def _await(
        self,
        group: PlacementGroup,
        bundles: Sequence[dict[str, float]],
        missing: int,
        started_s: float,
    ) -> None:
        """Wait for the nodes of a group; `missing`: nodes that are looked for, these among them.
        Raises ConfigError if it takes too long.
        """
        timeout_s = self._deployment.cluster.place_timeout_s
        told_s = started_s
        while placement_group_table(group)["state"] != "CREATED":
            now_s = time.monotonic()
            text = (
                f"{missing} nodes are not found yet. {len(bundles)} of them need"
                f" {_resources(bundles[0])} free each{self._of_label()}; the cluster has"
                f" {self._what_is_there()}"
            )
            if now_s - started_s > timeout_s:
                raise ConfigError(
                    f"after {timeout_s:g} s (cluster.place_timeout_s) {text}. Add nodes, or take a"
                    " smaller deployment."
                )
            if now_s - told_s > PERIOD_S:
                told_s = now_s
                log.info("%s", text)
            time.sleep(_LOOK_S)

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


def _size(group: tuple[tuple[int, ...], list[dict[str, float]]]) -> tuple[int, float]:
    """How hard a group is to place."""
    nodes, bundles = group
    return len(nodes), sum(bundles[0].values())


def _joining(asked: Joining, node: int, address: str) -> Joining:
    """The same for another node."""
    return Joining(node, address, asked.supervisor, replace(asked.run, address=address))


def _ray_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in found.items())
