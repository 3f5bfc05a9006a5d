"""Messages between gateways (one runs the front, the router), and from gateways to the supervisor.

    another gateway --Open--> front's gateway --Delivered ...--> another gateway        Leave: its client is gone
    front's gateway --FrontHeartbeat--> another gateway    a new epoch means a new front

If a front dies before it has answered an Open, the Open is sent again to the next front, with the
tokens delivered until then.
"""

from __future__ import annotations

from hadal.core.messages.base import Message
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.requests import Ticket
from hadal.core.messages.snapshot import FrontSnapshot


# ---- gateway -> supervisor; another gateway -> front's gateway ----
class GatewayHeartbeat(Message, frozen=True):
    """Heartbeat of the event loop of a gateway, or of the console, while its port is served. The
    first one marks it as ready.
    """

    gateway: str
    pid: int
    units: tuple[str, ...] = ()
    """Units reported up to the front in this gateway."""


# ---- another gateway -> front's gateway ----
class Open(Message, frozen=True):
    """Generations of one HTTP request. Each is answered by Delivered with a final delivery at the
    end. A generation that is already open is not started twice.
    """

    gateway: str
    generations: tuple[Generation, ...]
    ticket: Ticket = Ticket()
    log_id: str = ""
    """Id of the HTTP request in logs."""


class Leave(Message, frozen=True):
    """Stop these generations, because their client disconnected. Their final deliveries still name
    the units that worked on them.
    """

    gateway: str
    request_ids: tuple[str, ...]


# ---- front's gateway -> another ----
class FrontHeartbeat(Message, frozen=True):
    """Heartbeat of the front, with its state."""

    epoch: str
    snapshot: FrontSnapshot
    gateways: tuple[str, ...] = ()
    """Names of the gateways that are up."""


class Delivered(Message, frozen=True):
    """Several deliveries for generations of one gateway."""

    delivers: tuple[Deliver, ...]


# ---- either way ----
class Query(Message, frozen=True):
    """Request for the page of the other process at `path`, such as "/audit"."""

    gateway: str
    reply_id: int
    path: str
    query: dict[str, str]


class QueryReply(Message, frozen=True):
    """Answer to a Query, as an HTTP status and body."""

    gateway: str
    reply_id: int
    status: int
    body: bytes
