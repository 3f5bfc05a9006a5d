"""Launch plan of a deployment: its processes, their nodes and arguments, and whether this host can
run them. Pure arithmetic.

A unit that fills whole nodes gets nodes of its own. Smaller units share nodes: GPUs are counted,
while any number of CPU ranks, which are processes, may share a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hadal.core.balance import OFF
from hadal.core.config import ROLES, Deployment, units_of
from hadal.core.messages.base import FRONT, NODE_PROVIDER

UNIT_MODULE, GATEWAY_MODULE = "hadal.runtime.unit", "hadal.gateway.process"
_PROVIDER_MODULE = "hadal.runtime.ray_cluster"
_CONSOLE_MODULE = "hadal.apps.console.process"
CONSOLE = "console"
"""Role and name of the process that serves the web pages."""
GATEWAY = "gateway"
"""Role of every gateway's process, and the name of the one that holds the front (router)."""


@dataclass(frozen=True)
class UnitNodes:
    """Nodes of one unit's ranks. `first_device`: its first device, on the first node."""

    name: str
    role: str
    num_ranks: int
    nodes: tuple[int, ...]
    first_device: int


def rank_name(unit: str, rank: int) -> str:
    """Return the name of a rank's process on the wire and at the supervisor."""
    return f"{unit}.{rank}"


def gateway_names(deployment: Deployment) -> list[str]:
    """Return the names of the gateways' processes; the first holds the front."""
    num_gateways = deployment.gateway.processes + deployment.gateway.nodes
    return [GATEWAY, *(f"{GATEWAY}-{index}" for index in range(1, num_gateways))]


def gateways_here(deployment: Deployment) -> list[str]:
    """Return the names of the gateways on the supervisor's host, which share a port."""
    return gateway_names(deployment)[: deployment.gateway.processes]


def unit_and_rank(name: str) -> tuple[str, int | None]:
    """Return the unit and the rank of a process's name; rank None: the unit's leader."""
    unit, dot, rank = name.rpartition(".")
    return (unit, int(rank)) if dot else (name, None)


def wire_name(process: str) -> str:
    """Return a process's name on the wire, from its name at the supervisor."""
    return FRONT if process == GATEWAY else process


def judge_of(process: str) -> str:
    """Return the wire name of the failure detector that decides whether a process is frozen: the
    front for a unit, its leader for a rank.
    """
    unit, rank = unit_and_rank(process)
    return FRONT if rank is None else unit


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One process that `hadal serve` starts, here or on a node."""

    name: str
    role: str
    node: int | None
    """Node number in the deployment, from 0; None: the supervisor's host."""
    device: int | None
    """GPU of a rank on that node; None: the process uses no GPU."""
    threads: int
    """Number of computing threads."""
    module: str
    arguments: tuple[str, ...]
    ready_after: tuple[str, ...] = ()
    """Ranks of a leader, which can do nothing before they are ready; empty for other processes."""


def launch_plan(deployment: Deployment) -> tuple[ProcessPlan, ...]:
    """Return the plans of all processes: all possible units, the gateways, the node provider of Ray nodes,
    and the console. Units come first, because they take longest.
    """
    plans = [plan for unit in place_units(deployment) for plan in _unit_plans(deployment, unit)]
    nodes = (*(None for _ in gateways_here(deployment)), *gateway_nodes(deployment))
    for name, node in zip(gateway_names(deployment), nodes, strict=True):
        plans.append(ProcessPlan(name, GATEWAY, node, None, 1, GATEWAY_MODULE, ("--name", name)))
    if deployment.cluster.spans_hosts:
        plans.append(ProcessPlan(NODE_PROVIDER, NODE_PROVIDER, None, None, 1, _PROVIDER_MODULE, ()))
    if deployment.console.mode != OFF:
        plans.append(ProcessPlan(CONSOLE, CONSOLE, None, None, 1, _CONSOLE_MODULE, ()))
    return tuple(plans)


def _unit_plans(deployment: Deployment, unit: UnitNodes) -> list[ProcessPlan]:
    """Return the plans of the leader and its ranks, or of the one process that is both."""
    units = units_of(deployment, unit.role)
    of_unit: tuple[str, ...] = ("--unit", unit.name, "--role", unit.role)
    ranks = []
    for rank in range(unit.num_ranks):
        name, arguments, device = unit.name, of_unit, None
        if unit.num_ranks > 1:
            name, arguments = rank_name(unit.name, rank), (*arguments, "--rank", str(rank))
        if deployment.device == "cuda":
            # GPU number on its node. Ranks share GPUs if these are few (runtime/devices.take_gpu).
            device = (unit.first_device + rank) % units.ranks_per_node
            arguments = *arguments, "--device", str(device)
        node = unit.nodes[rank // units.ranks_per_node]
        ranks.append(
            ProcessPlan(name, unit.role, node, device, units.threads, UNIT_MODULE, arguments)
        )
    if unit.num_ranks == 1:
        return ranks
    names = tuple(rank.name for rank in ranks)
    first = unit.nodes[0]
    leader = ProcessPlan(unit.name, unit.role, first, None, 1, UNIT_MODULE, of_unit, names)
    return [leader, *ranks]


def place_units(deployment: Deployment) -> list[UnitNodes]:
    """Place units on nodes in order. A unit that fills two or more nodes, or one node of a cluster,
    gets nodes of its own. A smaller unit gets the first node that no unit fills and that has enough
    free GPUs if the unit needs any: a node has room for any number of CPU ranks.
    """
    placed: list[UnitNodes] = []
    used: list[int] = []
    """Number of used devices, by node."""
    full: set[int] = set()
    """Nodes filled by one unit."""
    for role in ROLES:
        units = units_of(deployment, role)
        per_node = units.ranks_per_node
        num_whole = units.ranks // per_node
        is_counted = deployment.device == "cuda"
        fills = num_whole > 1 or (num_whole == 1 and deployment.cluster.spans_hosts)
        for index in range(deployment.num_units_max(role)):
            name = f"{role}-{index}"
            if fills:
                nodes = tuple(range(len(used), len(used) + num_whole))
                used += [per_node] * num_whole
                full.update(nodes)
                placed.append(UnitNodes(name, role, units.ranks, nodes, 0))
                continue
            roomy = [
                n
                for n, taken in enumerate(used)
                if n not in full and (not is_counted or taken + units.ranks <= per_node)
            ]
            node = roomy[0] if roomy else len(used)
            if node == len(used):
                used.append(0)
            placed.append(UnitNodes(name, role, units.ranks, (node,), used[node]))
            used[node] += units.ranks
    return placed


def num_nodes(units: list[UnitNodes]) -> int:
    """Return the number of nodes that the units occupy."""
    return 1 + max(node for unit in units for node in unit.nodes)


def gateway_nodes(deployment: Deployment) -> tuple[int, ...]:
    """Return the nodes with one gateway each; their numbers follow those of units' nodes."""
    first = num_nodes(place_units(deployment))
    return tuple(range(first, first + deployment.gateway.nodes))


def node_groups(deployment: Deployment) -> tuple[tuple[int, ...], ...]:
    """Return groups of nodes that are provided together or not at all: nodes of one large unit, a
    node shared by small units, and last the gateways' nodes. Nodes of a group are different hosts.
    """
    groups = dict.fromkeys(unit.nodes for unit in place_units(deployment))
    nodes = gateway_nodes(deployment)
    return (*groups, nodes) if nodes else tuple(groups)


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, with runs shortened: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def why_not_anywhere(deployment: Deployment) -> list[str]:
    """Return why no host can run the deployment, one sentence each."""
    if deployment.transport == "deepep":
        return [
            "transport 'deepep' can be planned but not served: Hadal has no DeepEP backend."
            " Take 'nccl', or 'gloo' where ranks share a GPU."
        ]
    if max(deployment.prefill.ranks, deployment.decode.ranks) == 1:
        return []
    if deployment.device == "cuda" and deployment.transport == "tcp":
        return [
            "transport 'tcp' works only for CPUs. For GPUs take 'nccl', or 'gloo' where ranks share"
            " a GPU."
        ]
    return []


def why_not_here(deployment: Deployment, num_cores: int, num_gpus: int) -> list[str]:
    """Return why this host cannot run the deployment, one sentence each; empty if it can."""
    units = place_units(deployment)
    nodes, largest = num_nodes(units), max(unit.num_ranks for unit in units)
    most = max(deployment.prefill.ranks_per_node, deployment.decode.ranks_per_node)
    device = "GPUs" if deployment.device == "cuda" else "ranks"
    host = f"{num_gpus} GPUs" if num_gpus else f"{num_cores} cores and no GPU"
    reasons = []
    if nodes > 1:
        reasons.append(
            f"it needs {nodes} nodes of {most} {device}; this is one host with {host}. A Ray cluster"
            " has more: --on ray:ADDRESS."
        )
    elif deployment.device == "cuda" and not num_gpus:
        reasons.append(f"device is 'cuda'; this host has {host}.")
    elif found := why_not_anywhere(deployment):
        reasons += found
    elif largest > 1 and deployment.transport == "nccl" and num_gpus < largest:
        reasons.append(
            f"a unit needs {largest} GPUs, one per rank (nccl); this host has {host}. With gloo,"
            " ranks may share GPUs."
        )
    return reasons
