"""Messages between the supervisor and the agents, one on each node of a cluster."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from hadal.core.messages.base import Message


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens for those of other hosts, in the process of `epoch_number`."""

    epoch_number: int
    endpoint: Annotated[str, Meta(pattern="^tcp://")]
    """As zmq writes it: tcp://10.0.0.1:40001."""


class KeepNodes(Message, frozen=True):
    """Supervisor -> lender, again and again: have an agent on every node of these groups, and on no
    other. The nodes of a group are had together or not at all.
    """

    groups: tuple[tuple[int, ...], ...]


class NodesKept(Message, frozen=True):
    """Lender -> supervisor, again and again: it looks after the nodes."""

    complaint: str
    """Why nodes that are wanted are not found; empty while they are, or may soon be."""
    found: tuple[tuple[int, ...], ...] = ()
    """Groups whose nodes were found, so that an agent may be expected on each."""
    is_superseded: bool = False
    """Another supervisor has taken the run over."""


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,40}(\.[0-9]{1,6})?\Z")]
"""Of a process, where it becomes part of a file's name."""
NodeNumber = Annotated[int, Meta(ge=0)]
"""Of the nodes that a deployment takes, from 0 on."""


class ProcessOrder(msgspec.Struct, frozen=True, array_like=True):
    """A process that a node is to run."""

    name: Name
    epoch_number: int
    arguments: tuple[str, ...]
    """A module, and what it is given besides its folder and its epoch number."""
    threads: int
    signal: Annotated[int, Meta(ge=0, le=64)] = 0
    """The last that it is to get; 0: none."""


class NodeOrders(Message, frozen=True):
    """All that a node is to run, at every change and every beat: what runs and is not named is
    killed. So a node that was given up and comes back ends what others do by now.
    """

    processes: tuple[ProcessOrder, ...]
    addresses: dict[Name, Address] | None = None
    """Of all processes elsewhere that its own may speak to; None: as it was said last."""
    is_over: bool = False
    """The run ends, or another agent has taken this one's place: it is to end all and leave."""
    num_rollouts: int = 0
    """At another number than before, what is started runs the code that is installed by then."""


class ProcessNews(msgspec.Struct, frozen=True, array_like=True):
    """How a process of a node fares."""

    name: Name
    epoch_number: int
    pid: int
    code: int | None = None
    """Its exit code, negative: by that signal; None while it runs."""
    waited_s: float = 0.0
    """How long its threads were ready to run and had no processor."""
    address: Address | None = None
    """Of the name that it has on the wire; None while it does not listen."""


class NodeNews(Message, frozen=True):
    """How a node fares: its agent says it every AGENT_BEAT_S, and at once when something changed."""

    node: NodeNumber
    boot: Name
    """Drawn by the agent's process when it starts."""
    agent: Address
    host: str
    """The node's name."""
    processes: tuple[ProcessNews, ...]
    versions: dict[str, str]


class Printed(Message, frozen=True):
    """Lines that a process of a node has printed."""

    node: NodeNumber
    process: Name
    epoch_number: int
    lines: tuple[bytes, ...]
