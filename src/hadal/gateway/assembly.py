"""Build a gateway from its deployment, with the front in its process or with a link to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.messages.base import FRONT
from hadal.core.messages.requests import Charged
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.cache_pages import PATH as EXPLAINED
from hadal.gateway.desk.cache_pages import CachePages
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.desk import Desk
from hadal.gateway.desk.explanations import CacheExplainer, cache_explainer
from hadal.gateway.desk.far_host import FarHost
from hadal.gateway.desk.front_pages import COUNTS, pages_of
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.health import missing_of
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.kept import PATH as KEPT
from hadal.gateway.desk.kept import Responses, kept_responses
from hadal.gateway.desk.keys import PATH, FetchedKeys, KeysFile
from hadal.gateway.desk.link import FrontLink, FrontWire
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.pages import Page
from hadal.gateway.desk.readiness import GatewayReadiness
from hadal.gateway.desk.run_status import RunStatus
from hadal.gateway.desk.service import Service, read_served_model
from hadal.gateway.desk.tenancy import KeysChanged, Tenancy, has_budgets
from hadal.gateway.edge.intake import Intake, Patience
from hadal.gateway.edge.streams import Streams
from hadal.roles.front.front import Front
from hadal.roles.front.names import FrontNames
from hadal.roles.front.unit import Unit
from hadal.roles.recording import MadeFront
from hadal.runtime.ledger.address import ledger_url, outbox_of, shown
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import Store
from hadal.runtime.ledger.writer import LedgerWriter
from hadal.runtime.process.forks import API_KEYS, API_KEYS_FILE
from hadal.runtime.recorder import recorded
from hadal.runtime.topology import GATEWAY, gateway_names

log = logging.getLogger("hadal.gateway")

_KEYS_S = 2.0
"""Maximum wait of a gateway without the front for an answer with the keys; then it asks again."""


@dataclass(frozen=True)
class _KeysSource:
    """Keys at the start, and the source of later ones."""

    keys: Keys
    changed: KeysChanged | None = None
    page: Page | None = None
    """Page through which the other gateways fetch the keys."""


def make_gateway(
    deployment: Deployment,
    wire: FrontWire,
    environment: Mapping[str, str],
    fingerprint: str = "",
    run_id: str = "",
    *,
    name: str = GATEWAY,
    has_served: bool = False,
    folder: Path | None = None,
) -> Gateway:
    """Return a complete gateway. `fingerprint`: as for roles/front/front. `run_id`: id of the run,
    for a recording. `name`: the process's name. `has_served`: the run could serve requests before
    this process started. `folder`: run folder with the supervisor's status. Raises ConfigError.
    """
    path = Path(deployment.model)
    model = read_served_model(path, deployment.model_name or path.name, deployment.accept_config)
    clock, run_status = GatewayClock(), RunStatus(folder)
    gateways = tuple(gateway_names(deployment))
    host: Host | None = None
    link: FrontLink
    units: Callable[[], Mapping[str, Unit]] = dict
    if name == GATEWAY:
        made = MadeFront(os.urandom(8).hex(), model.context_tokens, fingerprint)
        front = Front(
            deployment, epoch=made.epoch, max_context=made.max_context, fingerprint=fingerprint
        )
        calls = recorded(front, FRONT, made, run_id, deployment)
        link = host = Host(
            front, wire, clock.now, epoch=made.epoch, others=gateways[1:], calls=calls
        )
        names, units = front.names, lambda: front.units.by_name
    else:  # `units` stays empty: the front's gateway records their uptime.
        names = FrontNames(deployment.cache, fingerprint)
        link = FarHost(name, wire, clock.now, names)
    source = _keys_source(environment, link)
    follows = bool(environment.get(API_KEYS_FILE)) or has_budgets(source.keys)
    accounting = _accounting(
        deployment, model.name, units, clock, link.charged if follows else None
    )
    if host is not None and accounting is not None:
        host.unit_listeners.append(accounting.look)
    metrics = Metrics(
        link.snapshot,
        (lambda: accounting.counts) if accounting else None,
        host.process_to_refused if host is not None else {},
        name if len(gateways) > 1 else "",
        lambda: accounting.tier_to_pico_usd if accounting else {},
        run_status.starts,
        partial(missing_of, deployment),
    )
    limits, patience = deployment.limits, Patience(keep_alive_s=deployment.keep_alive_s)
    explainer = cache_explainer(deployment.gateway, model.vocabulary, clock)
    service = Service(model, limits, names, explainer=explainer)
    gateway = Gateway(
        deployment=deployment,
        clock=clock,
        created=int(clock.unix_time()),
        service=service,
        link=link,
        intake=Intake(limits, patience),
        tenancy=_tenancy(source, link, clock, explainer, has_ledger=accounting is not None),
        readiness=GatewayReadiness(deployment, link, run_status, patience, was_ready=has_served),
        desk=Desk(service, link, metrics, accounting, clock, patience),
        metrics=metrics,
        responses=Responses(kept_responses(deployment.gateway, clock.now), link, name, gateways),
        streams=Streams(clock.now),
        cache_pages=CachePages(explainer, link, name),
        bound_host=deployment.host,
    )
    pages: dict[str, Page] = {KEPT: gateway.responses.page, EXPLAINED: gateway.cache_pages.page}
    if host is not None:
        pages |= pages_of(gateway, host, run_status, source.page)
    else:
        pages[COUNTS] = metrics.counted
    link.pages.table |= pages
    return gateway


def _keys_source(environment: Mapping[str, str], link: FrontLink) -> _KeysSource:
    """Return the keys at the start, and the source of later ones. If the keys file is unreadable,
    no key is accepted until it can be read. Raises ConfigError.
    """
    given = [key.strip() for key in environment.get(API_KEYS, "").split(",")]
    path = environment.get(API_KEYS_FILE, "")
    if not path:
        return _KeysSource(Keys(given))
    unknown = Keys(is_closed=True, is_known=False)
    if not link.has_front:
        fetched = FetchedKeys(lambda query: link.pages.ask(FRONT, PATH, query, _KEYS_S))
        return _KeysSource(unknown, fetched.changed)
    file = KeysFile(given, Path(path))

    async def changed() -> Keys | None:
        return file.changed()

    try:
        keys = file.changed() or Keys()
    except ConfigError as error:
        log.error("no API keys are accepted: %s", error)
        keys = unknown
    return _KeysSource(keys, changed, file.page)


def _tenancy(
    source: _KeysSource,
    link: FrontLink,
    clock: GatewayClock,
    explainer: CacheExplainer | None,
    *,
    has_ledger: bool,
) -> Tenancy:
    """Return the keys in force. What `explainer` keeps of a key goes with the key."""
    retain = None if explainer is None else explainer.retain
    return Tenancy(
        source.keys, link, clock, has_ledger=has_ledger, changed=source.changed, retain=retain
    )


def _accounting(
    deployment: Deployment,
    model_name: str,
    units: Callable[[], Mapping[str, Unit]],
    clock: GatewayClock,
    on_charged: Callable[[Charged], None] | None,
) -> Accounting | None:
    """Return the accounting of a deployment with a ledger; None without one."""
    url = ledger_url(deployment.ledger.url)
    if not url:
        return None
    return Accounting(deployment, model_name, open_ledger(url), units, clock, on_charged)


def open_ledger(url: str) -> LedgerWriter:
    """Start a writer of the ledger, which retries while its database is down. Raises LedgerError if
    the database has other content.
    """
    writer = LedgerWriter(Store(url), LedgerOutbox(outbox_of(url)))
    writer.start()
    log.info("ledger opened: %s", shown(url))
    return writer
