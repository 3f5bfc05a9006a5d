"""The node provider with agents that run nothing: an actor reports its node once, then rests.

The serving agent imports torch before it is asked to start anything. One host has no memory for
hundreds of such agents. Everything else is the node provider's own.

    python -m tests.dist.light_provider --folder RUN_FOLDER --epoch-number 1
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.nodes import Address, NodeNews
from hadal.roles.nodes import agent_name
from hadal.runtime import ray_cluster
from hadal.runtime.addresses import write_address
from hadal.runtime.agent import Joining
from hadal.runtime.wire import ZmqWire
from hadal.runtime.wire_sockets import Network

NUM_AGENTS = "HADAL_AGENTS"
"""Environment variable: nodes below this number have an actor. Each is a process of about 50 MB."""


class LightActor:
    """Stand-in for both NodeActor and the node's agent."""

    def __init__(self, joining: bytes) -> None:
        asked = msgspec.json.decode(joining, type=Joining)
        folder, boot = Path(tempfile.mkdtemp()), str(os.getpid())
        address = str(ray_cluster.get_node_ip_address())
        network = Network(address, asked.run.secret)
        self._wire = ZmqWire(agent_name(asked.node, boot), folder, network=network)
        write_address(folder, SUPERVISOR, asked.supervisor)
        listens = Address(0, self._wire.endpoint)
        self._wire.send(SUPERVISOR, NodeNews(asked.node, boot, listens, address, (), {}))

    def renew(self, joining: bytes) -> None:
        """Do nothing: no other supervisor follows."""


class LightProvider(ray_cluster.RayNodeProvider):
    """Node provider that starts actors on the first NUM_AGENTS nodes only, as many as this machine can bear."""

    def _start(self, node: int, *where: object) -> None:
        if node < int(os.environ[NUM_AGENTS]):
            super()._start(node, *where)  # type: ignore[arg-type]


if __name__ == "__main__":
    ray_cluster.NodeActor = LightActor  # type: ignore[misc, assignment]
    ray_cluster.RayNodeProvider = LightProvider  # type: ignore[misc]
    sys.exit(ray_cluster.main())
