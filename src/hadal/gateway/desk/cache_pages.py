"""Explanations of cache misses from all gateways, as seen from one of them.

A request may have been served by any gateway, so each asks the others for its tenant's
explanations: the gateway with the front asks them directly, the others ask through it. A gateway
that does not answer in time counts as one without explanations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from hadal.core.messages.base import FRONT
from hadal.gateway.api.shapes import CacheReport
from hadal.gateway.desk.auth import OPERATOR, Tenant
from hadal.gateway.desk.explanations import MAX_RECENT, CacheExplainer
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.edge.errors import ApiError

PATH = "/explain_cache"
"""Path of the page through which gateways ask each other."""
_WAIT_S = 3.0
"""Longest wait for a gateway's own explanations; the front, which waits for all, has twice the time."""
_MAX_ID_CHARS = 200


class CachePages:
    """Explanations of all gateways."""

    def __init__(self, own: CacheExplainer | None, link: FrontLink, name: str) -> None:
        """`own`: explanations of this gateway, `name`; None: no gateway explains."""
        self._own = own
        self._link = link
        self._name = name

    async def report(self, tenant: Tenant, request_id: str) -> CacheReport:
        """Return the explanations of a tenant's request. Raises ApiError 404."""
        found = await self._found(tenant, request_id[:_MAX_ID_CHARS], sees_all=False)
        if not found:
            raise ApiError(
                404,
                f"The request {request_id[:80]!r} is not known for this API key: only the key that sent"
                " a request reads its explanations. They go with the oldest prompts, and with the"
                " gateway that served the request. A request without a token has none.",
                param="request_id",
                code="request_not_found",
            )
        return found[0]

    async def recent(self, tenant: Tenant) -> list[CacheReport]:
        """Return the latest explanations of a tenant's requests, the latest first. An operator also
        gets those of other tenants, without the texts of prompts. Raises ApiError 404.
        """
        found = await self._found(tenant, "", sees_all=OPERATOR in tenant.rights)
        return sorted(found, key=lambda report: -report.unix_s)[:MAX_RECENT]

    async def _found(self, tenant: Tenant, request_id: str, *, sees_all: bool) -> list[CacheReport]:
        if self._own is None:
            raise ApiError(
                404,
                "This server explains no cache misses: explain_cache_mb is 0.",
                code="explain_cache_off",
            )
        query = {
            "owner": tenant.key_digest.hex(),
            "id": request_id,
            "sees_all": "1" if sees_all else "",
            "from": self._name,
        }
        own = self._of_this(query)
        return own if request_id and own else [*own, *await self._of_others(query)]

    def _of_this(self, query: Mapping[str, str]) -> list[CacheReport]:
        if self._own is None:
            return []
        owner = bytes.fromhex(query["owner"])
        if query["id"]:
            report = self._own.report(owner, query["id"])
            return [] if report is None else [report]
        return self._own.recent(owner, sees_all=bool(query["sees_all"]))

    async def _of_others(self, query: Mapping[str, str]) -> list[CacheReport]:
        """Return explanations of the gateways that have not answered yet."""
        link = self._link
        asked, wait_s = [FRONT], 2 * _WAIT_S
        if link.has_front:
            wait_s = _WAIT_S
            asked = [name for name in link.gateways if name not in (self._name, query["from"])]
        answers = await asyncio.gather(
            *(link.pages.ask(name, PATH, query, wait_s) for name in asked)
        )
        return [
            report
            for answer in answers
            if answer is not None and answer.status == 200
            for report in msgspec.json.decode(answer.body, type=list[CacheReport])
        ]

    async def page(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Answer another gateway: with the front, also for the gateways behind it."""
        own = self._of_this(query)
        if self._link.has_front and not (query["id"] and own):
            own += await self._of_others(query)
        return 200, msgspec.json.encode(own)
