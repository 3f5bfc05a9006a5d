"""Messages of the supervisor with the node provider, and with the agents, one on each node."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hadal.core.messages.base import Message


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Address of a process for other hosts, valid for the process of `epoch_number`."""

    epoch_number: int
    endpoint: Annotated[str, Meta(pattern="^tcp://")]
    """Address in zmq's form: tcp://10.0.0.1:40001."""


class KeepNodes(Message, frozen=True):
    """Supervisor -> node provider, repeatedly: run an agent on every node of these groups,
    and on no other. The nodes of a group are acquired together or not at all.
    """

    groups: tuple[tuple[int, ...], ...]


class NodesKept(Message, frozen=True):
    """Node provider -> supervisor, repeatedly: state of the nodes it provides."""

    complaint: str
    """Reason for which wanted nodes are not found; empty if they are found, or may be soon."""
    found: tuple[tuple[int, ...], ...] = ()
    """Groups with all nodes found; an agent is expected on each node."""
    is_superseded: bool = False
    """True if another supervisor has taken over the run."""


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,40}(\.[0-9]{1,6})?\Z")]
"""Name of a process, safe as a part of file names."""
NodeNumber = Annotated[int, Meta(ge=0)]
"""Index of a node among those of a deployment, from 0."""


class ProcessOrder(msgspec.Struct, frozen=True, array_like=True):
    """Process that a node must run."""

    name: Name
    epoch_number: int
    arguments: tuple[str, ...]
    """Module and its arguments, without folder and epoch number."""
    threads: int
    signal: Annotated[int, Meta(ge=0, le=64)] = 0
    """Signal to send to it: the last one requested, but SIGKILL stays; 0: none."""


class NodeOrders(Message, frozen=True):
    """Complete list of a node's processes, sent at changes and every AGENT_BEAT_S. A running
    process that is not listed is killed. So a node that returns after it was declared lost kills
    the processes that were replaced on other nodes.
    """

    processes: tuple[ProcessOrder, ...]
    addresses: dict[Name, Address] | None = None
    """Addresses of other nodes' processes that this node's processes may use; None: unchanged."""
    is_over: bool = False
    """True if the run ends or another agent has replaced this one: end all processes and exit."""
    num_rollouts: int = 0
    """Number of rollouts. After a change, new processes run the code that is installed at that time."""


class ProcessNews(msgspec.Struct, frozen=True, array_like=True):
    """State of a process on a node."""

    name: Name
    epoch_number: int
    pid: int
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    waited_s: float = 0.0
    """Seconds in which threads of the process were ready to run but had no processor."""
    address: Address | None = None
    """Address at which the process listens on the wire; None while it does not."""


class NodeNews(Message, frozen=True):
    """State of a node, sent by its agent every AGENT_BEAT_S, and at once after a change."""

    node: NodeNumber
    boot: Name
    """Random name drawn by the agent's process at its start."""
    agent: Address
    host: str
    """Host name of the node."""
    processes: tuple[ProcessNews, ...]
    versions: dict[str, str]


class Printed(Message, frozen=True):
    """Lines printed by a process of a node."""

    node: NodeNumber
    process: Name
    epoch_number: int
    lines: tuple[bytes, ...]
