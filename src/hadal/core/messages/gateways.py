"""Messages of gateways to the supervisor and, where there are several, to the one with the front.

    another gateway --Open--> front's gateway --Delivered ...--> another gateway        Leave: its client is gone
    front's gateway --FrontHeartbeat--> another gateway    a new epoch: it is another front

An Open that a front does not live to answer is sent again to the next front, with the tokens delivered
so far.
"""

from __future__ import annotations

from hadal.core.messages.base import Message
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.requests import Ticket
from hadal.core.messages.snapshot import FrontSnapshot


# ---- gateway -> supervisor, and the others' to the front's ----
class GatewayHeartbeat(Message, frozen=True):
    """The event loop of a gateway, or of the console, turns, and its port is served. The first one
    says that it is ready.
    """

    gateway: str
    pid: int
    units: tuple[str, ...] = ()
    """Those that the front here heard to be up."""


# ---- another gateway -> front's gateway ----
class Open(Message, frozen=True):
    """Generations of one HTTP request. Each is answered by Delivered, its last delivery being
    final; one that is open already is not begun twice.
    """

    gateway: str
    generations: tuple[Generation, ...]
    ticket: Ticket = Ticket()
    log_id: str = ""
    """The HTTP request's id, by which logs name it."""


class Leave(Message, frozen=True):
    """Nobody waits for these generations any more: stop them. Their last deliveries say where they
    were worked on.
    """

    gateway: str
    request_ids: tuple[str, ...]


# ---- front's gateway -> another ----
class FrontHeartbeat(Message, frozen=True):
    """The front lives."""

    epoch: str
    snapshot: FrontSnapshot
    gateways: tuple[str, ...] = ()
    """Names of the gateways that are there."""


class Delivered(Message, frozen=True):
    """What a batch of messages brought the generations of one gateway."""

    delivers: tuple[Deliver, ...]


# ---- either way ----
class Query(Message, frozen=True):
    """What does the other process have under this path, such as "/audit"?"""

    gateway: str
    reply_id: int
    path: str
    query: dict[str, str]


class QueryReply(Message, frozen=True):
    """The answer as HTTP has it."""

    gateway: str
    reply_id: int
    status: int
    body: bytes
