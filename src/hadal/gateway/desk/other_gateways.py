"""Other gateways of a deployment, as the gateway with the front sees them: present or ended, and
the open generations of each.

Depends on their wire messages, not on a front.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hadal.core.config import GATEWAY_HEARTBEAT_S
from hadal.core.messages.gateways import Delivered
from hadal.core.messages.generation import Generation
from hadal.gateway.desk.link import FrontWire
from hadal.gateway.desk.mailbox import Outbox

EXPECTED_S = 8 * GATEWAY_HEARTBEAT_S
"""Time for which a new front expects a first heartbeat from the other gateways: it takes over the
generations that they had open under the previous front.
"""


class OtherGateways:
    """All gateways besides the one with the front."""

    def __init__(self, names: Iterable[str], wire: FrontWire) -> None:
        self._wire = wire
        self._outboxes = {name: Outbox() for name in names}
        self._expected = set(self._outboxes)
        """Gateways that may be running, but have sent no heartbeat yet."""
        self._present: dict[str, int] = {}
        """Gateways that sent heartbeats and have not ended -> the process id of each."""
        self._ended: dict[str, int] = {}
        """Gateway -> id of its last ended process, from which messages may still arrive."""

    def __contains__(self, name: str) -> bool:
        return name in self._outboxes

    @property
    def names(self) -> Collection[str]:
        """Names of all other gateways, present or not."""
        return self._outboxes.keys()

    @property
    def present(self) -> list[str]:
        """Names of the present gateways, sorted."""
        return sorted(self._present)

    @property
    def is_expected(self) -> bool:
        """True if a gateway may be running that has sent no heartbeat yet."""
        return bool(self._expected)

    @property
    def are_gone(self) -> bool:
        """True if no gateway is present and none is expected."""
        return not self._present and not self._expected

    def expect_no_more(self) -> None:
        """Treat every gateway without a heartbeat so far as absent."""
        self._expected.clear()

    def note_alive(self, name: str, pid: int) -> bool:
        """Accept a heartbeat. Return True if it is from a process that has not ended."""
        self._expected.discard(name)
        if pid == self._ended.get(name):
            return False
        self._present[name] = pid
        return True

    def open(self, name: str, generations: Collection[Generation], log_id: str) -> Outbox:
        """Return the gateway's outbox, with these generations open in it from now on."""
        outbox = self._outboxes[name]
        outbox.open_ids |= {generation.request_id: log_id for generation in generations}
        return outbox

    def open_ids(self, name: str, request_ids: Collection[str]) -> list[str]:
        """Return the ids in `request_ids` that the gateway has open, sorted."""
        return sorted(self._outboxes[name].open_ids.keys() & request_ids)

    def ended(self, name: str) -> list[str]:
        """Forget a gateway that ended. Return the ids of its open generations, sorted."""
        left, self._outboxes[name] = self._outboxes[name], Outbox()
        self._expected.discard(name)
        if name in self._present:
            self._ended[name] = self._present.pop(name)
        return sorted(left.open_ids)

    def deliver(self) -> None:
        """Send each gateway the deliveries for its generations."""
        for name, outbox in self._outboxes.items():
            if delivers := outbox.take():
                self._wire.send(name, Delivered(delivers))
