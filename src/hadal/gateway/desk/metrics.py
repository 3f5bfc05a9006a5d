"""Metrics for operators: counts and times of requests, and the state of the units, in Prometheus'
text format.

Times are observed once per request. Values that change with every token are plain numbers, read
only at a scrape. Depends on the front's snapshot, not on HTTP.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hadal.core import cache
from hadal.core.balance import shown
from hadal.core.config import ROLES
from hadal.core.messages.snapshot import FrontSnapshot
from hadal.core.messages.units import UnitReport
from hadal.core.overview import Buckets
from hadal.core.plans import LinkBytes
from hadal.gateway.api.reply import Usage
from hadal.gateway.desk.reply import Reply
from hadal.policy.admission import OVERLOADED
from hadal.policy.quotas import BUDGET_CODE, NEVER_CODE, RATE_CODE
from hadal.runtime.ledger.writer import LedgerCounts

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

PICO_PER_USD = 10**12
_REFUSAL_CODES = (OVERLOADED, RATE_CODE, BUDGET_CODE, NEVER_CODE)
"""Codes exported from the start, so that the first refusal shows as an increase."""

_UNIT_GAUGES = {
    "hadal_kv_blocks": ("KV blocks of a unit.", "num_blocks"),
    "hadal_kv_blocks_used": ("KV blocks of a unit that are in use.", "num_blocks_used"),
    "hadal_unit_requests": ("Running requests of a unit.", "num_requests"),
    "hadal_unit_tokens_waiting": (
        "Prompt tokens not yet computed by a unit.",
        "num_tokens_waiting",
    ),
    "hadal_unit_ranks": ("Ranks of a unit that are up.", "num_ranks"),
    "hadal_unit_formation": (
        "Membership version of a unit; increases when a rank is lost or returns.",
        "formation",
    ),
    "hadal_step_ms": ("Smoothed duration of a unit's step.", "step_ms"),
    "hadal_overhead_ms": (
        "Smoothed idle time of a unit per step while it had work.",
        "overhead_ms",
    ),
}
_OF_STEPS = ("hadal_step_ms", "hadal_overhead_ms")
_IDLE_S = 10.0
"""Step measurements of a unit idle for this long are outdated, and are not exported."""
_UNIT_COUNTERS = {
    "hadal_steps": ("Steps of a unit since it started.", "num_steps"),
    "hadal_replicas_moved": (
        "Expert replicas moved between ranks for load balance.",
        "num_replicas_moved",
    ),
    "hadal_layers_flipped": (
        "Changes of a layer's expert placement while serving.",
        "num_layers_flipped",
    ),
    "hadal_requests_moved": (
        "Running requests that were moved to another rank.",
        "num_requests_moved",
    ),
}
_LINK_KINDS = LinkBytes.__struct_fields__
_Cached = dict[str, tuple[str, dict[str, str]]]
"""Metric -> (description, tier -> its name in UnitReport.cache; "" for a metric without tiers)."""
_CACHE_COUNTERS: _Cached = {
    "hadal_cache_hit_tokens": (
        "Prompt tokens found in a unit's KV cache, by tier.",
        {"memory": cache.MEMORY_HIT_TOKENS, "disk": cache.DISK_HIT_TOKENS},
    ),
    "hadal_cache_miss_tokens": ("Prompt tokens that a unit computed.", {"": cache.MISS_TOKENS}),
    "hadal_cache_recomputed_tokens": (
        "Prompt tokens found on disk but computed, because that is faster than reading.",
        {"": cache.RECOMPUTED_TOKENS},
    ),
    "hadal_cache_stored_blocks": (
        "Blocks that a unit stored durably on disk.",
        {"": cache.STORED_BLOCKS},
    ),
    "hadal_cache_skipped_blocks": (
        "Blocks not stored because the disk is full, failing or too slow.",
        {"": cache.SKIPPED_BLOCKS},
    ),
    "hadal_cache_damaged_blocks": (
        "Blocks read from disk with wrong contents.",
        {"": cache.DAMAGED_BLOCKS},
    ),
    "hadal_cache_evicted_blocks": (
        "Evicted blocks, by tier.",
        {"memory": cache.EVICTED_BLOCKS, "disk": cache.DISK_EVICTED_BLOCKS},
    ),
}
_CACHE_GAUGES: _Cached = {
    "hadal_cache_blocks": (
        "Blocks in a unit's prefix cache, by tier.",
        {"memory": cache.MEMORY_BLOCKS, "disk": cache.DISK_BLOCKS},
    ),
}


class Metrics:
    """Counters of the gateway; at each scrape also those of the front and the units."""

    def __init__(
        self,
        snapshot: Callable[[], FrontSnapshot],
        ledger: Callable[[], LedgerCounts] | None = None,
        refused: Mapping[str, Mapping[str, int]] | None = None,
        gateway: str = "",
        charged: Callable[[], Mapping[str, int]] = dict,
        starts: Callable[[], Mapping[str, int]] = dict,
        missing: Callable[[FrontSnapshot], Iterable[str]] = lambda snapshot: (),
    ) -> None:
        """`ledger`: counts of the ledger; None without one. `refused`: process -> (kind of
        connection -> number). `gateway`: label of this gateway's own counts; "" if it is the only
        one. `charged`: tier -> pico-dollars, exported only with a ledger. `starts`: process ->
        number of starts. `missing`: names of wanted units and ranks that are not up.
        """
        self._gateway = gateway
        self._front = _FrontCollector(snapshot, {} if refused is None else refused, starts, missing)
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "hadal_requests",
            "HTTP requests by endpoint and status.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "hadal_time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self.per_token_s = Histogram(
            "hadal_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first.",
            buckets=_PER_TOKEN_S,
            registry=self._registry,
        )
        self.request_s = Histogram(
            "hadal_request_seconds",
            "Time from a request's arrival to its end.",
            buckets=_LATENCY_S,
            registry=self._registry,
        )
        self._usage_tokens = Counter(
            "hadal_usage_prompt_tokens",
            "Prompt tokens in the usage of complete replies, by cache hit or miss.",
            ("cache",),
            registry=self._registry,
        )
        for found in ("hit", "miss"):
            self._usage_tokens.labels(found)
        self.refusals = Counter(
            "hadal_refusals",
            "Refused generation requests, by error code.",
            ("code",),
            registry=self._registry,
        )
        for code in _REFUSAL_CODES:
            self.refusals.labels(code)
        self.unreadable = Counter(
            "hadal_unreadable_items",
            "Reasoning and messages in requests that another server encrypted; they are passed over.",
            registry=self._registry,
        )
        self.output = OutputTokens()
        self._registry.register(self.output)
        if ledger is not None:
            self._registry.register(_LedgerCollector(ledger, charged))

    def show_connections(self, num_refused: Callable[[], int]) -> None:
        """Export the number of connections refused for want of descriptors."""
        self._registry.register(_ConnectionCollector(num_refused))

    def show_batches(self, lines: Callable[[], tuple[int, int, Mapping[str, int]]]) -> None:
        """Export the lines of batches: `lines` returns (waiting, running, outcome -> number)."""
        self._registry.register(_BatchCollector(lines))

    def count_usage(self, usage: Usage) -> None:
        """Count the usage of a complete reply, also if the client did not ask for `usage`."""
        self._usage_tokens.labels("hit").inc(usage.num_cached_tokens)
        self._usage_tokens.labels("miss").inc(usage.num_prompt_tokens - usage.num_cached_tokens)

    async def counted(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Return this gateway's own counts, for `text` of the front's gateway. A `Page`."""
        families = [
            _Family(
                metric.name,
                metric.documentation,
                metric.type,
                # A gauge may contain a bool, which the other gateway's decoder rejects as a number.
                tuple((one.name, one.labels, float(one.value)) for one in metric.samples),
            )
            for metric in self._registry.collect()
        ]
        return 200, _encode(families)

    def text(self, others: Mapping[str, bytes] = {}) -> bytes:
        """Return Prometheus' text exposition format. `others`: other gateways' counts, by name."""
        registry = CollectorRegistry()
        registry.register(_Collected(self._own(others)))
        registry.register(self._front)
        return generate_latest(registry)

    def latency(self, others: Mapping[str, bytes] = {}) -> dict[str, Buckets]:
        """Return times to first token and per token, of all gateways. `others`: as for `text`."""
        return {
            name: _buckets(f"{metric}_bucket", self._own(others))
            for name, metric in (
                ("first_token", "hadal_time_to_first_token_seconds"),
                ("per_token", "hadal_time_per_output_token_seconds"),
            )
        }

    def _own(self, others: Mapping[str, bytes]) -> list[Metric]:
        metrics = {metric.name: metric for metric in self._registry.collect()}
        if self._gateway:
            for metric in metrics.values():
                metric.samples = [
                    sample._replace(labels={**sample.labels, "gateway": self._gateway})
                    for sample in metric.samples
                ]
        for gateway, body in others.items():
            for family in _decode(body):
                metric = metrics.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for name, labels, value in family.samples:
                    metric.add_sample(name, {**labels, "gateway": gateway}, value)
        return list(metrics.values())


def _buckets(name: str, metrics: Iterable[Metric]) -> Buckets:
    """Return a histogram's cumulative counts, summed over gateways."""
    bound_to_count: dict[float, float] = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name == name:
                bound = float(sample.labels["le"])
                bound_to_count[bound] = bound_to_count.get(bound, 0.0) + sample.value
    bounds = sorted(bound_to_count)
    return Buckets(tuple(bounds[:-1]), tuple(bound_to_count[bound] for bound in bounds))


class _Family(msgspec.Struct, frozen=True, array_like=True):
    """Metric with its samples (name, labels, value), as sent to another gateway."""

    name: str
    documentation: str
    type: str
    samples: tuple[tuple[str, dict[str, str], float], ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Family]).decode


class _Collected(Collector):
    """Metrics already collected, from this gateway and others."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


class OutputTokens(Collector):
    """Output tokens of a gateway, as `usage` and the ledger count them: all tokens that replies
    received, also if the client left or a stop string ended the reply.

    Running replies are added up at each scrape, so that a token costs nothing and a rate is smooth.
    """

    def __init__(self) -> None:
        self._running: set[Reply] = set()
        self._num_counted = 0

    def begin(self, reply: Reply) -> None:
        """Count a reply's tokens from now on."""
        self._running.add(reply)

    def end(self, reply: Reply) -> None:
        """Add the count of an ended reply. Does nothing for a reply without `begin`."""
        if reply in self._running:
            self._running.remove(reply)
            self.add(reply.usage.num_output_tokens)

    def add(self, num_tokens: int) -> None:
        """Count tokens of a batch's line, when it is charged."""
        self._num_counted += num_tokens

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        running = sum(reply.usage.num_output_tokens for reply in self._running)
        yield CounterMetricFamily(
            "hadal_output_tokens",
            "Output tokens of replies, as counted in usage and the ledger. Those of a batch request"
            " count when it is charged.",
            self._num_counted + running,
        )


class _LedgerCollector(Collector):
    """Ledger metrics, read from its writer at each scrape."""

    def __init__(
        self, counts: Callable[[], LedgerCounts], charged: Callable[[], Mapping[str, int]]
    ) -> None:
        self._counts = counts
        self._charged = charged

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        facts = CounterMetricFamily(
            "hadal_ledger_facts",
            "Ledger facts by outcome: written to the database, same (already written), refused (another"
            " fact has the id), delayed (waited for the database), lost.",
            labels=("outcome",),
        )
        for outcome in ("written", "same", "refused", "delayed", "lost"):
            facts.add_metric((outcome,), getattr(counts, f"num_{outcome}"))
        yield facts
        yield GaugeMetricFamily(
            "hadal_ledger_waiting", "Ledger facts that are only in memory.", counts.num_waiting
        )
        yield GaugeMetricFamily(
            "hadal_ledger_down", "1 while the ledger's database accepts no writes.", counts.is_down
        )
        charged = CounterMetricFamily(
            "hadal_charged_dollars",
            "Dollars charged since this process started, by tier.",
            labels=("tier",),
        )
        for tier, pico_usd in self._charged().items():
            charged.add_metric((tier,), pico_usd / PICO_PER_USD)
        yield charged


class _ConnectionCollector(Collector):
    """Connections refused by the gateway's limit, read at each scrape."""

    def __init__(self, num_refused: Callable[[], int]) -> None:
        self._num_refused = num_refused

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "hadal_connections_over_limit",
            "Connections refused because the gateway is near its limit of open files.",
            self._num_refused(),
        )


class _BatchCollector(Collector):
    """Metrics of the batch worker, read at each scrape."""

    def __init__(self, lines: Callable[[], tuple[int, int, Mapping[str, int]]]) -> None:
        self._lines = lines

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        num_waiting, num_running, outcomes = self._lines()
        yield GaugeMetricFamily(
            "hadal_batch_lines_waiting", "Unanswered requests of batches.", num_waiting
        )
        yield GaugeMetricFamily(
            "hadal_batch_lines_running", "Running requests of batches.", num_running
        )
        lines = CounterMetricFamily(
            "hadal_batch_lines",
            "Requests of batches by outcome. A request that failed in the server is retried.",
            labels=("outcome",),
        )
        for outcome, number in outcomes.items():
            lines.add_metric((outcome,), number)
        yield lines


class _FrontCollector(Collector):
    """Metrics of the front, and of processes' reports to the gateway, read at each scrape."""

    def __init__(
        self,
        snapshot: Callable[[], FrontSnapshot],
        refused: Mapping[str, Mapping[str, int]],
        starts: Callable[[], Mapping[str, int]],
        missing: Callable[[FrontSnapshot], Iterable[str]],
    ) -> None:
        self._snapshot = snapshot
        self._refused = refused
        self._starts = starts
        self._missing = missing

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that the registry does not collect in order to register."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        totals = snapshot.totals
        yield CounterMetricFamily(
            "hadal_prompt_tokens", "Prompt tokens of accepted requests.", totals.tokens_in
        )
        answered = CounterMetricFamily(
            "hadal_answered_prompt_tokens",
            "Prompt tokens of generations with at least one token, by cache hit or"
            " miss. Each choice of a prompt counts.",
            labels=("cache",),
        )
        answered.add_metric(("hit",), totals.tokens_hit)
        answered.add_metric(("miss",), totals.tokens_miss)
        yield answered
        yield CounterMetricFamily(
            "hadal_retries",
            "Attempts that ended before their generation, including preemptions.",
            totals.retries,
        )
        yield CounterMetricFamily(
            "hadal_preemptions", "Attempts requeued because KV blocks ran out.", totals.preemptions
        )
        yield CounterMetricFamily(
            "hadal_gave_way",
            "Attempts preempted for other tenants' requests: those of batches, or of tenants above"
            " their share. They are not retries.",
            totals.requeued,
        )
        ended = CounterMetricFamily(
            "hadal_generations", "Ended generations, by end.", labels=("end",)
        )
        for end in ("finished", "cancelled", "failed", "refused"):
            ended.add_metric((end,), getattr(totals, end))
        yield ended
        states = GaugeMetricFamily(
            "hadal_generations_now", "Generations in the front by state.", labels=("state",)
        )
        for state, number in snapshot.state_to_count.items():
            states.add_metric((str(state),), number)
        yield states
        yield GaugeMetricFamily(
            "hadal_draining",
            "1 while the server is draining and accepts no new requests.",
            snapshot.is_draining,
        )
        yield from self._by_role(snapshot)
        refused = CounterMetricFamily(
            "hadal_refused_connections",
            "Connections that failed to authenticate as part of this deployment, by kind.",
            labels=("process", "kind"),
        )
        for process, kind_to_num in self._refused.items():
            for kind, number in kind_to_num.items():
                refused.add_metric((process, kind), number)
        yield refused
        starts = CounterMetricFamily(
            "hadal_process_starts",
            "Starts of a process by the supervisor; more than one means restarts.",
            labels=("process",),
        )
        for process, number in self._starts().items():
            starts.add_metric((process,), number)
        yield starts
        yield from _unit_metrics(snapshot.unit_to_report)

    def _by_role(self, snapshot: FrontSnapshot) -> Iterator[Metric]:
        up = GaugeMetricFamily("hadal_units_up", "Units that are up.", labels=("role",))
        missing = GaugeMetricFamily(
            "hadal_missing",
            "Missing units, and missing ranks of units that are up, as listed by /health.",
            labels=("role",),
        )
        role_to_num = Counts(name.split("-")[0] for name in self._missing(snapshot))
        for role in ROLES:
            up.add_metric((role,), len(snapshot.role_to_units.get(role, {})))
            missing.add_metric((role,), role_to_num[role])
        yield from (up, missing)


def _unit_metrics(loads: dict[str, UnitReport]) -> Iterator[Metric]:
    at_work = {unit: load for unit, load in loads.items() if load.idle_s < _IDLE_S}
    for name, (text, field) in _UNIT_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("unit",))
        for unit, load in loads.items():
            counter.add_metric((unit,), getattr(load, field))
        yield counter
    for name, (text, field) in _UNIT_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=("unit",))
        for unit, load in (at_work if name in _OF_STEPS else loads).items():
            gauge.add_metric((unit,), getattr(load, field))
        yield gauge
    for kind, metrics in (
        (CounterMetricFamily, _CACHE_COUNTERS),
        (GaugeMetricFamily, _CACHE_GAUGES),
    ):
        yield from _cache_metrics(kind, metrics, loads)
    yield from _draft_metrics(loads)
    yield _link_metric(loads)
    balance = GaugeMetricFamily(
        "hadal_balance",
        "Mean load divided by maximum load of a unit's ranks, smoothed; 1 is balanced.",
        labels=("unit", "objective"),
    )
    for unit, load in at_work.items():
        for objective, value in shown(load.balance).items():
            balance.add_metric((unit, objective), value)
    yield balance


def _link_metric(loads: dict[str, UnitReport]) -> Metric:
    """Return the bytes between ranks. Kinds of bytes that a unit does not send have no series."""
    link_bytes = CounterMetricFamily(
        "hadal_link_bytes",
        "Bytes sent between ranks, by kind (dispatch to experts, combine, KV copied from other ranks)"
        " and by whether they stay within a node.",
        labels=("unit", "kind", "nodes"),
    )
    for unit, load in loads.items():
        for kind in _LINK_KINDS:
            both = getattr(load.link_bytes, kind)
            if any(both):
                for nodes, number in zip(("within", "between"), both, strict=True):
                    link_bytes.add_metric((unit, kind, nodes), number)
    return link_bytes


def _draft_metrics(loads: dict[str, UnitReport]) -> Iterator[Metric]:
    """Yield speculative decoding metrics. A unit that never drafts has no series."""
    drafting = {unit: load for unit, load in loads.items() if load.drafts_tried}
    if not drafting:
        return
    now = GaugeMetricFamily(
        "hadal_drafts",
        "Speculative tokens per request in a unit's last step.",
        labels=("unit",),
    )
    for unit, load in drafting.items():
        now.add_metric((unit,), load.num_drafts)
    yield now
    for name, text, field in (
        (
            "hadal_drafts_tried",
            "Verified speculative tokens, by place: 1 is the next token after the last.",
            "drafts_tried",
        ),
        ("hadal_drafts_accepted", "Accepted speculative tokens, by place.", "drafts_accepted"),
    ):
        counter = CounterMetricFamily(name, text, labels=("unit", "place"))
        for unit, load in drafting.items():
            for place, number in enumerate(getattr(load, field), 1):
                counter.add_metric((unit, str(place)), number)
        yield counter


def _cache_metrics(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    metrics: _Cached,
    loads: dict[str, UnitReport],
) -> Iterator[Metric]:
    """Yield cache metrics. Counts that a unit does not report have no series."""
    for name, (text, tier_to_field) in metrics.items():
        tiers = ("tier",) if len(tier_to_field) > 1 else ()
        family = kind(name, text, labels=("unit", *tiers))
        for unit, load in loads.items():
            for tier, field in tier_to_field.items():
                if field in load.cache:
                    family.add_metric((unit, tier) if tiers else (unit,), load.cache[field])
        yield family
