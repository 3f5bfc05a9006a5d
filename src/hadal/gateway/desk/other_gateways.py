"""The other gateways of a deployment, as the gateway with the front knows them: present or ended, and the
generations that each has open.

Knows their wire messages, and no front.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hadal.core.config import GATEWAY_HEARTBEAT_S
from hadal.core.messages.gateways import Delivered
from hadal.core.messages.generation import Generation
from hadal.gateway.desk.link import FrontWire
from hadal.gateway.desk.mailbox import Outbox

EXPECTED_S = 8 * GATEWAY_HEARTBEAT_S
"""How long a new front expects to hear of the other gateways: what they had open under the one
before is this one's.
"""


class OtherGateways:
    """All gateways besides the one with the front."""

    def __init__(self, names: Iterable[str], wire: FrontWire) -> None:
        self._wire = wire
        self._outboxes = {name: Outbox() for name in names}
        self._expected = set(self._outboxes)
        """Gateways that may be there, and were not heard yet."""
        self._present: dict[str, int] = {}
        """Gateways that were heard and have not ended -> the process of each."""
        self._ended: dict[str, int] = {}
        """Gateway -> its process that ended last: messages of that process may arrive later."""

    def __contains__(self, name: str) -> bool:
        return name in self._outboxes

    @property
    def names(self) -> Collection[str]:
        """Names of all, whether they are there or not."""
        return self._outboxes.keys()

    @property
    def present(self) -> list[str]:
        """Names of the gateways that are there, sorted."""
        return sorted(self._present)

    @property
    def is_expected(self) -> bool:
        """A gateway may be there that was not heard yet."""
        return bool(self._expected)

    @property
    def are_gone(self) -> bool:
        """No gateway is there, and none is expected."""
        return not self._present and not self._expected

    def expect_no_more(self) -> None:
        """Take every gateway that was not heard for absent."""
        self._expected.clear()

    def heard(self, name: str, pid: int) -> bool:
        """Take a heartbeat. Return whether it is of a process that has not ended."""
        self._expected.discard(name)
        if pid == self._ended.get(name):
            return False
        self._present[name] = pid
        return True

    def open(self, name: str, generations: Collection[Generation], log_id: str) -> Outbox:
        """Return the outbox of a gateway, which has these generations open from now on."""
        outbox = self._outboxes[name]
        outbox.open_ids |= {generation.request_id: log_id for generation in generations}
        return outbox

    def open_ids(self, name: str, request_ids: Collection[str]) -> list[str]:
        """Return those of the ids that the gateway has open, sorted."""
        return sorted(self._outboxes[name].open_ids.keys() & request_ids)

    def ended(self, name: str) -> list[str]:
        """Forget a gateway that ended. Return the ids of the generations that it had open, sorted."""
        left, self._outboxes[name] = self._outboxes[name], Outbox()
        self._expected.discard(name)
        if name in self._present:
            self._ended[name] = self._present.pop(name)
        return sorted(left.open_ids)

    def deliver(self) -> None:
        """Send each gateway what came for its generations."""
        for name, outbox in self._outboxes.items():
            if delivers := outbox.take():
                self._wire.send(name, Delivered(delivers))
