"""Off-peak ("valley") work for a Ray cluster: it fills free nodes, and releases them when another job
asks for nodes.

    a node is free             -> a placement group that takes the whole node, and a worker in it
    a worker is idle           -> the next piece of work
    groups of others wait      -> as many workers as those groups need finish their pieces and leave

    python examples/valley.py --address 10.0.0.1:6379

Hadal gets its nodes through placement groups, too (runtime/ray_cluster). Ray gives a waiting
group the first free node, and this job takes no node while a group waits. So Hadal's fleet comes
first, and waits for one piece at most. Copy this file and put your work into `work`. A piece should
take seconds and its result should be small. A piece is done once, or again if its node dies.

The example counts primes. It ends when it has counted those below `--limit`, or, after SIGTERM or
Ctrl-C, when the current pieces are done.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOOK_S = 1.0
"""Seconds between two checks for waiting groups."""
NAME = "valley"
"""Prefix of the placement groups' names. Give another job that uses this file another prefix."""
NODE_LABEL = "ray.io/node-id"
"""Ray's own label of a node."""
_WAIT = ("PENDING", "RESCHEDULING")
_TAKEN = ("CREATED", "PREPARED", "RESCHEDULING")
_WHOLE = ("CPU", "GPU")
"""Resources of a node that its placement group takes completely."""

Piece = tuple[int, int]
"""Range of numbers: (first, end), without the end."""


def work(piece: Piece) -> int:
    """Do a piece: return the number of primes in it."""
    begin, end = max(piece[0], 2), piece[1]
    is_prime = bytearray([1]) * max(0, end - begin)
    for divisor in range(2, int(end**0.5) + 1):
        first = max(divisor * divisor, -(-begin // divisor) * divisor)
        is_prime[first - begin :: divisor] = bytes(len(range(first, end, divisor)))
    return sum(is_prime)


class Worker:
    """Ray actor that has a node to itself."""

    def do(self, piece: Piece, piece_s: float) -> int:
        """Return the piece's result, after at least `piece_s`, as if it had taken that long."""
        begun_s = time.monotonic()
        result = work(piece)
        time.sleep(max(0.0, begun_s + piece_s - time.monotonic()))
        return result


@dataclass
class Lent:
    """A node that this job has, or has asked for."""

    group: PlacementGroup
    asked_s: float
    actor: Any = None
    """Handle of the node's worker; None until Ray grants the node."""
    piece: Piece | None = None
    result: Any = None
    """Ray's reference to the result of `piece`."""
    is_leaving: bool = False


class Valley:
    """All pieces, and the nodes that compute them."""

    def __init__(self, limit: int, piece_size: int, piece_s: float) -> None:
        self._todo: deque[Piece] = deque(
            (begin, min(begin + piece_size, limit)) for begin in range(0, limit, piece_size)
        )
        self._piece_s = piece_s
        self._own = f"{NAME}-{ray.get_runtime_context().get_job_id()}-"
        """Prefix of this run's groups; it has the job's id, because Ray requires unique names."""
        self._num_asked = 0
        self.results: dict[Piece, int] = {}
        self.nodes: dict[str, Lent] = {}
        """Ray's node id -> node."""
        self.node_s = 0.0
        """Node-seconds used so far."""
        self._counted_s = time.monotonic()
        self.is_ending = False

    @property
    def num_working(self) -> int:
        """Number of nodes with a worker of this job."""
        return sum(lent.actor is not None for lent in self.nodes.values())

    @property
    def is_done(self) -> bool:
        """True if no piece is under way and none will follow."""
        return not self.nodes and (self.is_ending or not self._todo)

    def look(self) -> None:
        """Request free nodes, and mark nodes for release while other groups wait."""
        table = list(placement_group_table().values())
        others = [group for group in table if not group["name"].startswith(self._own)]
        num_wanted = sum(len(group["bundles"]) for group in others if group["state"] in _WAIT)
        taken = {
            node
            for group in others
            if group["state"] in _TAKEN
            for node in group["bundles_to_node_id"].values()
        }
        # Nodes marked for release count as free below; nodes that this job has asked for do not.
        free = [
            node
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in taken | self.nodes.keys() and whole(node)
        ]
        num_leaving = sum(lent.is_leaving for lent in self.nodes.values())
        num_spare = len(free) + num_leaving - num_wanted
        if self.is_ending or not self._todo:
            num_spare = -len(self.nodes)
        for node in free[: max(0, min(num_spare, len(free)))]:
            self._num_asked += 1
            group = take(node, f"{self._own}{self._num_asked}")
            self.nodes[node["NodeID"]] = Lent(group, time.monotonic())
        staying = [lent for lent in self.nodes.values() if not lent.is_leaving]
        for lent in staying[: max(0, -num_spare)]:
            lent.is_leaving = True

    def go_on(self, timeout_s: float) -> None:
        """Collect results and hand out pieces for `timeout_s` seconds, or until all work is done."""
        until_s = time.monotonic() + timeout_s
        while True:
            for node, lent in list(self.nodes.items()):
                self._move(node, lent)
            self._count()
            left_s = until_s - time.monotonic()
            if left_s <= 0.0 or self.is_done:
                return
            results = [lent.result for lent in self.nodes.values() if lent.result is not None]
            if results:
                ray.wait(results, timeout=min(left_s, 0.2))
            else:
                time.sleep(min(left_s, 0.2))

    def _move(self, node: str, lent: Lent) -> None:
        """Take a node's result if it is ready; give its worker another piece, or release the
        node.
        """
        if lent.result is not None:
            assert lent.piece is not None
            done, _ = ray.wait([lent.result], timeout=0)
            if not done:
                return
            try:
                assert lent.piece not in self.results, f"{lent.piece} was done twice"
                self.results[lent.piece] = ray.get(lent.result)
            except RayActorError:  # The node is gone: another node gets the piece.
                print(f"{lent.piece} is done again, for its node is gone", flush=True)
                self._todo.appendleft(lent.piece)
                lent.is_leaving = True
            lent.piece = lent.result = None
        is_there = lent.actor is not None or _state(lent.group) == "CREATED"
        # Another group got the node first.
        was_taken = not is_there and time.monotonic() - lent.asked_s > LOOK_S
        if lent.is_leaving or not self._todo or was_taken:
            remove_placement_group(lent.group)  # Also ends the worker.
            del self.nodes[node]
            return
        if not is_there:
            return
        lent.actor = lent.actor or start(lent.group)
        lent.piece = self._todo.popleft()
        lent.result = lent.actor.do.remote(lent.piece, self._piece_s)

    def _count(self) -> None:
        now_s = time.monotonic()
        self.node_s += (now_s - self._counted_s) * self.num_working
        self._counted_s = now_s


def whole(node: dict[str, Any]) -> dict[str, float]:
    """Return the resources of a whole node; empty for a node without CPUs and GPUs."""
    return {name: node["Resources"][name] for name in _WHOLE if node["Resources"].get(name)}


def take(node: dict[str, Any], name: str) -> PlacementGroup:
    """Ask for this node and no other, so that no autoscaler starts one for work that can wait."""
    bundle, label = whole(node), {NODE_LABEL: node["NodeID"]}
    return placement_group([bundle], name=name, bundle_label_selector=[label])


def _state(group: PlacementGroup) -> str:
    return str(placement_group_table(group)["state"])


def start(group: PlacementGroup) -> Any:
    """Start a worker with all resources of its node."""
    (bundle,) = group.bundle_specs
    actor = ray.remote(Worker).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
    )
    return actor.remote()


def main() -> int:
    """Run until all pieces are done; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--limit", type=int, default=10**9, help="primes below this are counted")
    parser.add_argument("--piece-size", type=int, default=10**6, help="numbers of a piece")
    parser.add_argument("--piece-s", type=float, default=0.0, help="least seconds of a piece")
    asked = parser.parse_args()
    ray.init(address=asked.address, namespace=NAME, log_to_driver=False)
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    valley, shown = Valley(asked.limit, asked.piece_size, asked.piece_s), -1
    while not valley.is_done:
        valley.is_ending = ending.is_set()
        valley.look()
        valley.go_on(LOOK_S)
        if valley.num_working != shown:
            shown = valley.num_working
            told = {"unix_s": round(time.time(), 1), "nodes": shown, "pieces": len(valley.results)}
            print(json.dumps(told), flush=True)
    told = {
        "pieces": sorted(valley.results),
        "primes": sum(valley.results.values()),
        "node_minutes": round(valley.node_s / 60.0, 2),
    }
    print(json.dumps(told), flush=True)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
