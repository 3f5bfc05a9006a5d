"""Responses kept for a while, so that a client can fetch one again or continue from it.

    resp_1_0f3a...    kept by the second gateway, in its memory, for its tenant alone

Each gateway keeps its own responses, and the number in an id names that gateway. The gateway with
the front asks other gateways directly for theirs; the others ask through it. A gateway that ends
loses its responses; nothing is written to a disk. Above the limit of bytes, the tenant with the
most bytes loses its oldest response first.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from hadal.core.config import GatewayConfig
from hadal.core.errors import RequestError
from hadal.core.messages.base import FRONT
from hadal.gateway.api.responses.reply import response_id_of
from hadal.gateway.api.responses.request import ResponseAsk
from hadal.gateway.api.responses.tools import ResponseTool
from hadal.gateway.desk.pages import Pages
from hadal.gateway.edge.errors import ApiError, overloaded
from hadal.gateway.text.asks import Turn
from hadal.runtime.topology import GATEWAY

PATH = "/responses"
"""Path of the page through which gateways fetch responses from each other."""
WAIT_S = 5.0
_ID = re.compile(r"resp_(\d{1,3})_[0-9a-f]{32}")
_MAX_NAMED = 64
"""Maximum number of kept responses to which the item references of one request may point."""
_ENTRY_BYTES = 512
"""Approximate memory of an entry besides its texts, bytes."""
_MAX_SENT_BYTES = 16 << 20
"""Largest response that is kept: a larger one could not be sent to another gateway."""


class KeptResponse(msgspec.Struct, frozen=True):
    """One response. `turns`: the conversation including the response, without instructions."""

    body: bytes
    input: bytes
    """Items of the response's own input, as JSON."""
    turns: tuple[Turn, ...]
    tools: tuple[ResponseTool, ...] = ()
    """Tools in items of the conversation, which are still offered when it goes on."""

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        calls = (call for turn in self.turns for call in turn.calls)
        return (
            _ENTRY_BYTES
            + len(self.body)
            + len(self.input)
            + sum(4 * len(turn.content + turn.reasoning) + 100 for turn in self.turns)
            + len(msgspec.msgpack.encode(self.tools))
            + sum(4 * (len(call.arguments) + len(call.name)) + 200 for call in calls)
        )


@dataclass(frozen=True)
class _KeptEntry:
    response: KeptResponse
    num_bytes: int
    until_s: float


_NOTHING = KeptResponse(b"", b"", ())


class KeptResponses:
    """Responses kept by one gateway. Used by the event loop's thread."""

    def __init__(self, max_bytes: int, keep_s: float, now: Callable[[], float]) -> None:
        """`max_bytes` or `keep_s` 0: nothing is kept."""
        self.max_bytes = max_bytes
        self.keep_s = keep_s if max_bytes else 0.0
        self.num_bytes = 0
        self._now = now
        self._entries: OrderedDict[tuple[str, str], _KeptEntry] = OrderedDict()
        """(tenant, id) -> entry; the entries that expire first come first."""
        self._tenant_to_ids: dict[str, OrderedDict[str, None]] = {}
        self._tenant_to_bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, response_id: str, response: KeptResponse) -> None:
        """Store a response, unless it is too large."""
        num_bytes = response.num_bytes
        if num_bytes > min(self.max_bytes, _MAX_SENT_BYTES):
            return
        self._entries[tenant, response_id] = _KeptEntry(
            response, num_bytes, self._now() + self.keep_s
        )
        self._tenant_to_ids.setdefault(tenant, OrderedDict())[response_id] = None
        self._tenant_to_bytes[tenant] += num_bytes
        self.num_bytes += num_bytes
        self._expire()
        while self.num_bytes > self.max_bytes:
            most = max(self._tenant_to_bytes, key=lambda name: self._tenant_to_bytes[name])
            self.delete(most, next(iter(self._tenant_to_ids[most])))

    def get(self, tenant: str, response_id: str) -> KeptResponse | None:
        """Return a tenant's response; None if it is not kept for this tenant."""
        self._expire()
        entry = self._entries.get((tenant, response_id))
        return entry.response if entry is not None else None

    def delete(self, tenant: str, response_id: str) -> None:
        """Remove the response."""
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return
        self.num_bytes -= entry.num_bytes
        self._tenant_to_bytes[tenant] -= entry.num_bytes
        del self._tenant_to_ids[tenant][response_id]
        if not self._tenant_to_ids[tenant]:
            del self._tenant_to_ids[tenant], self._tenant_to_bytes[tenant]

    def check(self) -> list[str]:
        """Return inconsistencies between the entries and their totals."""
        by_tenant: Counter[str] = Counter()
        for (tenant, response_id), entry in self._entries.items():
            by_tenant[tenant] += entry.num_bytes
            if response_id not in self._tenant_to_ids.get(tenant, {}):
                return [f"{response_id} is missing from its tenant's responses"]
        is_sound = by_tenant == self._tenant_to_bytes and by_tenant.total() == self.num_bytes
        return (
            [] if is_sound else ["the sizes of the stored responses do not add up to their total"]
        )

    def _expire(self) -> None:
        now_s = self._now()
        while self._entries:
            (tenant, response_id), entry = next(iter(self._entries.items()))
            if entry.until_s > now_s:
                return
            self.delete(tenant, response_id)


def kept_responses(settings: GatewayConfig, now: Callable[[], float]) -> KeptResponses:
    """Return an empty store for responses, with the limits of size and time from the settings."""
    return KeptResponses(settings.keep_responses_mb << 20, settings.keep_responses_s, now)


class _HasPages(Protocol):
    @property
    def pages(self) -> Pages: ...


class Responses:
    """Responses kept by all gateways, as seen from one of them."""

    def __init__(
        self, own: KeptResponses, host: _HasPages, name: str, gateways: tuple[str, ...]
    ) -> None:
        """`name`: this gateway's name. `gateways`: all names; the first gateway has the front."""
        self.own = own
        self._host = host
        self._name = name
        self._gateways = gateways

    @property
    def id_prefix(self) -> str:
        """Prefix of this gateway's response ids."""
        return f"resp_{self._gateways.index(self._name)}_"

    async def get(
        self, tenant: str, response_id: str, part: str = "", *, deletes: bool = False
    ) -> KeptResponse | None:
        """Return a tenant's response from the gateway that keeps it, or None. From another gateway
        only the fields named in `part` are sent; other fields are empty. `deletes`: also remove it. Raises
        ApiError 503 if the gateway that keeps it does not answer.
        """
        found = _ID.fullmatch(response_id)
        owner = (
            self._gateways[int(found[1])] if found and int(found[1]) < len(self._gateways) else ""
        )
        if not owner:
            return None
        if owner == self._name:
            response = self.own.get(tenant, response_id)
            if deletes:
                self.own.delete(tenant, response_id)
            return response
        has_front = self._name == GATEWAY
        query = {
            "id": response_id,
            "tenant": tenant,
            "part": part,
            "deletes": "1" if deletes else "",
        }
        answer = await self._host.pages.ask(owner if has_front else FRONT, PATH, query, WAIT_S)
        if answer is None or answer.status == 503:
            raise overloaded(
                503,
                "The gateway that stores this response does not answer; try again.",
                1.0,
                "response_unreachable",
            )
        return msgspec.msgpack.decode(answer.body, type=KeptResponse) if answer.body else None

    async def before(self, tenant: str, response_id: str | None) -> KeptResponse:
        """Return the turns and tools of the conversation up to and including a response; none
        without an id. Raises RequestError if the response is not kept, and ApiError as `get` does.
        """
        if response_id is None:
            return _NOTHING
        kept = await self.get(tenant, response_id, "turns,tools")
        if kept is None:
            raise _not_kept(response_id, self.own.keep_s)
        return kept

    async def bodies_with(self, tenant: str, item_ids: Iterable[str]) -> list[bytes]:
        """Return the bodies of kept responses that contain these items. Raises RequestError for
        items of more than _MAX_NAMED responses, and ApiError as `get` does.
        """
        response_ids = dict.fromkeys(filter(None, map(response_id_of, item_ids)))
        if len(response_ids) > _MAX_NAMED:
            raise RequestError(
                f"input references items of {len(response_ids)} responses; at most {_MAX_NAMED} are"
                " allowed. Send the items themselves, or continue from a response with"
                " previous_response_id.",
                "input",
            )
        kept = await asyncio.gather(
            *(self.get(tenant, response_id, "body") for response_id in response_ids)
        )
        return [response.body for response in kept if response is not None]

    def keeper(
        self,
        tenant: str,
        response_id: str,
        before: KeptResponse,
        asked: ResponseAsk,
        items: bytes,
    ) -> Callable[[bytes, Turn], None] | None:
        """Return a function that stores a response when it has ended; None if it is not to be
        stored. `items`: the response's input items, as JSON.
        """
        if asked.request.store is False or not self.own.keep_s:
            return None
        turns, tools = (*before.turns, *asked.chat.turns), asked.tools.staying

        def keep(body: bytes, turn: Turn) -> None:
            self.own.put(tenant, response_id, KeptResponse(body, items, (*turns, turn), tools))

        return keep

    async def page(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Answer another gateway. The response may be kept by a third gateway."""
        try:
            part = query["part"]
            response = await self.get(
                query["tenant"], query["id"], part, deletes=bool(query.get("deletes"))
            )
        except ApiError as error:
            return error.status, b""
        if response is None:
            return 200, b""
        # Only the requested fields: a conversation may be megabytes.
        wanted = {name: getattr(response, name) for name in filter(None, part.split(","))}
        return 200, msgspec.msgpack.encode(msgspec.structs.replace(_NOTHING, **wanted))


def _not_kept(response_id: str, keep_s: float) -> RequestError:
    """Return the error for a client that continues from a response that is not kept."""
    how_long = (
        f"Responses are stored for {keep_s:g} s, or shorter if there are many or their gateway"
        " ends; send the conversation itself as input."
        if keep_s
        else "This server stores no responses; send the conversation itself as input."
    )
    return RequestError(
        f"previous_response_id: {response_id[:80]!r} is not stored for this API key. {how_long}",
        "previous_response_id",
        "previous_response_not_found",
    )
