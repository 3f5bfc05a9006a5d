"""A Ray cluster of many nodes on one host: one raylet per node, with eight GPUs that do not exist.

The head is a normal one. On the other nodes a shell script replaces the two processes that Ray runs
beside a raylet (the agents for its dashboard and for environments, 120 MB of Python per node). The
script reports that it has no ports. A node then takes 14 MB, plus a process for each actor on it.

    python -m tests.dist.fake_nodes ADDRESS PORT NUM_NODES

Prints a JSON line per second: `ClusterState`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec
import ray
from ray._private import services
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

GPUS = 8
STAND_IN = """
kind=$1
for word; do
    case $word in
    --node-id=*) node=${word#*=} ;;
    --session-dir=*) folder=${word#*=} ;;
    esac
done
say() { printf %s "$2" > "$folder/new-$1_$node" && mv "$folder/new-$1_$node" "$folder/$1_$node"; }
if [ "$kind" = dashboard_agent ]; then
    say metrics_agent_port -1
    say metrics_export_port -1
    say dashboard_agent_listen_port -1
else
    say runtime_env_agent_port 1
fi
exec sleep infinity
"""
"""Shell stand-in for both agents. A raylet reads its agents' ports from files with these names."""


class ClusterState(msgspec.Struct):
    """Report that this process prints once a second about the fake cluster."""

    num_nodes: int
    num_free_gpus: int
    groups: dict[str, list[str]]
    """Name of a placement group -> Ray's ids of its nodes."""


def start(address: str, port: int, num_nodes: int) -> None:
    """Start the head, then the nodes one after another."""
    common = {"node_ip_address": address, "num_cpus": 0, "object_store_memory": 80_000_000}
    head = {"gcs_server_port": port, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    stand_in = Path(tempfile.mkdtemp()) / "stand_in.sh"
    stand_in.write_text(STAND_IN)
    services._build_python_executable_command_memory_profileable = lambda kind, *_, **__: [
        "/bin/sh",
        str(stand_in),
        kind,
    ]
    for _ in range(num_nodes):
        cluster.add_node(wait=False, num_gpus=GPUS, **common)
    ray.init(address=cluster.address, log_to_driver=False)


def state() -> ClusterState:
    """Return the cluster's state as Ray reports it now."""
    groups = {
        group["name"]: list(group["bundles_to_node_id"].values())
        for group in placement_group_table().values()
        if group["state"] != "REMOVED"
    }
    alive = [node for node in ray.nodes() if node["Alive"]]
    return ClusterState(len(alive) - 1, int(ray.available_resources().get("GPU", 0)), groups)


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    while True:
        print(msgspec.json.encode(state()).decode(), flush=True)
        time.sleep(1.0)
