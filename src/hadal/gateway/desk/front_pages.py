"""Pages of the process with the front, for its own endpoints and for the other gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from hadal.core.config import ROLES, units_of
from hadal.core.overview import EXPERTS_MAX
from hadal.gateway.api.shapes import AuditReply
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.keys import PATH as KEYS_PATH
from hadal.gateway.desk.pages import COUNTING, Page
from hadal.gateway.desk.run_status import RunStatus
from hadal.gateway.desk.trace import answer_trace

AUDIT_TIMEOUT_S = 5.0
COUNTS = "/counts"
"""Page of a gateway without the front: its counts, for the metrics of the front's gateway."""
COUNTS_TIMEOUT_S = 1.0


def pages_of(
    gateway: Gateway, host: Host, run_status: RunStatus, keys_page: Page | None = None
) -> dict[str, Page]:
    """Return path -> page of the gateway with the front. `keys_page`: page with the API keys, for
    the other gateways only; None: they already have the keys.
    """

    async def metrics(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, gateway.metrics.text(await host.ask_others(COUNTS, COUNTS_TIMEOUT_S))

    async def audit(query: Mapping[str, str]) -> tuple[int, bytes]:
        problems, audits = await host.audit(host.snapshot().unit_to_report, AUDIT_TIMEOUT_S)
        units = {
            audit.unit: {
                "num_blocks_used": audit.num_blocks_used,
                "num_requests": audit.num_requests,
            }
            for audit in audits
        }
        return 500 if problems else 200, msgspec.json.encode(AuditReply(problems, units))

    async def counting(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, msgspec.json.encode(host.counting_refusal(query["tenant"]))

    async def trace(query: Mapping[str, str]) -> tuple[int, bytes]:
        return 200, msgspec.json.encode(
            await answer_trace(host, host.snapshot().unit_to_report, query)
        )

    async def status(query: Mapping[str, str]) -> tuple[int, bytes]:
        units = [unit for unit in query.get("experts", "").split(",") if unit][:EXPERTS_MAX]
        return 200, await _overview(gateway, host, run_status, units)

    pages: dict[str, Page] = {
        "/metrics": metrics,
        "/audit": audit,
        "/trace": trace,
        "/status": status,
        COUNTING: counting,
    }
    return pages if keys_page is None else {**pages, KEYS_PATH: keys_page}


async def _overview(
    gateway: Gateway, host: Host, run_status: RunStatus, units: Sequence[str]
) -> bytes:
    """Return an Overview (core/overview) as JSON. `units`: units that shall report their experts;
    their reports are passed on unparsed.
    """
    snapshot, deployment = host.snapshot(), gateway.deployment
    roles = snapshot.role_to_units.items()
    wide = {unit for role, up in roles if units_of(deployment, role).ranks > 1 for unit in up}
    asked = [unit for unit in units if unit in wide]
    others, experts = await asyncio.gather(
        host.ask_others(COUNTS, COUNTS_TIMEOUT_S), host.questions.experts(asked, COUNTS_TIMEOUT_S)
    )
    _, health = gateway.readiness.health(snapshot)
    return msgspec.json.encode(
        {
            "unix_s": gateway.clock.unix_time(),
            "model": gateway.service.model.name,
            "status": health["status"],
            "missing": health["missing"],
            "units_wanted": health["units_wanted"],
            "ranks_wanted": {role: units_of(deployment, role).ranks for role in ROLES},
            "ranks_per_node": {role: units_of(deployment, role).ranks_per_node for role in ROLES},
            "cores": run_status.cores(),
            "snapshot": snapshot,
            "latency": gateway.metrics.latency(others),
            "experts": {unit: msgspec.Raw(body) for unit, body in experts.items()},
        }
    )
