"""Settings of a deployment as one frozen value: its model, units, limits and timeouts.

Read from TOML and checked when made. Every field has a default. A field of decode without a
docstring means for decode what the field of prefill before it means for prefill.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, structs

from hadal.core.balance import AUTO, NO_MOVES, OFF, TURNS
from hadal.core.documents import MAX_TOML_BYTES, converted, is_folder, parse_toml, read_text, shown
from hadal.core.errors import ConfigError
from hadal.core.handshake import is_near
from hadal.core.model_config import ModelConfig

# Bounds of fields: far above real deployments, and low enough that any check ends within seconds.
_DAY_S = 86_400.0
_MOST_S = 31 * _DAY_S
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Units = Annotated[int, Meta(ge=0, le=1 << 12)]
Ranks = Annotated[int, Meta(ge=1, le=1 << 11)]
Seconds = Annotated[float, Meta(gt=0, le=_MOST_S)]
PartOfADay = Annotated[float, Meta(gt=0, le=_DAY_S)]
"""Seconds, at most a day: demand is assumed to repeat daily, so the fleet looks no further ahead."""
Share = Annotated[float, Meta(gt=0, le=1)]
Rate = Annotated[float, Meta(ge=0, lt=1e15)]
Text = Annotated[str, Meta(max_length=4096)]
"""Name or path, at most as long as Linux allows."""
_MOST_RANKS = 1 << 17
"""Maximum number of ranks of all units together. DeepSeek's published day had 2,200 GPUs at its peak."""


def _one_of(*names: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


Switch = Annotated[str, _one_of(AUTO, OFF)]
LOCAL, RAY = "local", "ray"
"""Values of `ClusterConfig.on`: where units run."""
TENANT_PROMISE = 2.0
"""Default of `UnitsConfig.tenant_promise`; `python -m bench rows` prints what each value costs."""
DRAFTS_MAX = 3
DRAFTS_AUTO = 2
"""Maximum number of speculative tokens (drafts) per request and pass: DRAFTS_MAX is the highest
that can be set; DRAFTS_AUTO applies if the number is chosen automatically.
"""


class ConfigTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table of a deployment. Its fields are checked when it is made, by a parser or in code."""

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first invalid field."""
        for name, kind in _kinds(type(self)).items():
            value = converted(getattr(self, name), kind, name=name)
            if isinstance(value, str) and not value.isprintable():
                raise ConfigError(
                    f"{name} is {shown(value)}; remove unprintable characters, such as line breaks."
                )


@functools.cache
def _kinds(table: type[ConfigTable]) -> dict[str, Any]:
    return {each.name: each.type for each in structs.fields(table)}


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError that calls the file a `what` file."""
    return parse_toml(read_text(path, what, MAX_TOML_BYTES), str(path))


PREFILL = "prefill"
DECODE = "decode"
ROLES = (PREFILL, DECODE)
"""Roles of units, by the names of their tables in a deployment."""
RANK_HEARTBEAT_S = 0.25
"""Period of a rank's heartbeat to its leader."""
AGENT_BEAT_S = 0.25
"""Period of a node agent's heartbeats, and of the orders to it, which list the processes to run."""
GATEWAY_HEARTBEAT_S = 0.25
"""Period of a gateway's heartbeat to its supervisor, sent by its event loop. The gateway with the
front also sends it to the other gateways.
"""


class UnitsConfig(ConfigTable, frozen=True):
    """Deployment units of one role, prefill or decode."""

    units: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    ranks: Ranks = 1
    """Ranks of a unit: processes (GPUs) that step together and divide the unit's experts."""
    ranks_per_node: Ranks = 8
    redundant_experts: Annotated[int, Meta(ge=0, le=1 << 14)] = 0
    """Extra replicas of experts per layer, beyond one replica of each expert."""
    overlap: Annotated[str, _one_of("auto", "sequential", "prefill_dual", "decode_five")] = "auto"
    """Overlap of compute and communication in steps: "sequential", "prefill_dual" or "decode_five";
    "auto": the one with the lowest predicted time for the step.
    """
    min_split_tokens: Count = 32
    """Minimum number of tokens, on the busiest rank, of a step that is split into two micro-batches."""
    mode: Annotated[str, _one_of("", "normal", "low_latency")] = ""
    """Way of sending tokens to experts: "normal" (one copy per rank, counts first) or "low_latency"
    (fixed buffers). Empty: normal in prefill, low-latency in decode.
    """
    expert_balance: Switch = AUTO
    """"auto": replicas of experts move, and their shares of tokens change, during service when that
    pays; "off": they stay as first placed.
    """
    request_balance: Annotated[str, _one_of(AUTO, NO_MOVES, OFF, TURNS)] = AUTO
    """Balancing of requests over the unit's ranks. Prefill: "auto" cuts steps by cost, "off" by
    token budgets. Decode: "auto" places by KV and counts and moves running requests when that pays,
    "no_moves" only places, "off" places by counts alone. "turns", in both roles: round-robin, as a
    baseline.
    """
    drafts: Annotated[str, _one_of(AUTO)] | Annotated[int, Meta(ge=0, le=DRAFTS_MAX)] = 0
    """Decode: most speculative tokens (drafts) that the model's MTP module makes per request and
    pass, 0 to 3. "auto": 0, 1 or 2, whichever pays by measured times and acceptance rate; 0 for a
    model without the module. Drafts never change the output.
    """
    tenant_promise: Annotated[float, Meta(ge=1, le=1000)] = TENANT_PROMISE
    """Decode: largest slowdown of steps for the tenant with the fewest requests, compared with
    serving it alone. To stay within it, requests of other tenants take turns; each tenant still
    gets an equal share (policy/rows). 1000: only requests of batches take turns.
    """
    threads: Units = 0
    """CPU threads of a rank. 0: a host's cores divided by the ranks that one unit has on it."""
    kv_blocks: Annotated[int, Meta(ge=0, le=1 << 48)] = 0
    """KV blocks of a rank, 64 tokens each. 0: from `kv_memory_mb`."""
    kv_memory_mb: Annotated[str, _one_of(AUTO)] | Annotated[int, Meta(ge=0, le=1 << 32)] = AUTO
    """KV pool of a rank, MiB; never less than one whole context. "auto": on CPUs of this host,
    pools share up to a quarter of the memory that weights and buffers leave (runtime/pool_sizes);
    otherwise 256.
    """
    max_requests: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    """Maximum number of requests that a rank serves at once (decode: slots)."""
    max_waiting: Count = 256
    """Maximum number of requests that a unit's leader (scheduler) queues, beyond the number
    that its ranks can start at once; further ones are returned to the front.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ConfigError(
                f"ranks is {self.ranks}, which does not fill nodes of {self.ranks_per_node}. Take a"
                " multiple, or change ranks_per_node."
            )
        if self.redundant_experts and self.ranks == 1:
            raise ConfigError(
                f"redundant_experts is {self.redundant_experts} with one rank: a replica needs a"
                " second rank. Raise ranks, or set it to 0."
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node index of each rank, counted within the unit."""
        return tuple(rank // self.ranks_per_node for rank in range(self.ranks))

    def beside(self, rank: int) -> range:
        """Return the ranks of a unit on the node of `rank`, including `rank` itself."""
        first = rank - rank % self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.ranks))


class CacheConfig(ConfigTable, frozen=True):
    """Prefix cache: KV that outlives its request and is found again by its content."""

    memory: Switch = AUTO
    """"auto": blocks stay in the pools of prefill ranks until their space is needed; "off": they
    are freed at once.
    """
    folder: Text = ""
    """Folder for KV on disk, on any mounted file system; several deployments may share it. Empty:
    no KV on disk.
    """
    disk_mb: Positive = 4096
    """Maximum MiB that this deployment stores in `folder`."""
    recompute: Switch = AUTO
    """"auto": blocks on disk that are cheaper to compute than to read, by measured times, are
    computed; "off": they are read.
    """

    @property
    def is_on(self) -> bool:
        """True if blocks are cached at all, in memory or on disk."""
        return self.memory != OFF or bool(self.folder)


class LedgerConfig(ConfigTable, frozen=True):
    """Record of every request, for `hadal report`."""

    url: Text = AUTO
    """Path (SQLite), postgresql://... or "off"; "auto": $HADAL_LEDGER, else a file in the user's
    state folder.
    """
    prices: Text = "deepseek-reasoner"
    """Price list (stats/prices) by name, or dollars per million tokens as "HIT/MISS/OUT"."""
    gpu_hour_usd: Annotated[float, Meta(ge=0, lt=1e6)] = 2.0
    """Price of one rank for an hour, whether a GPU or a process on a CPU."""
    gpu: Text = ""
    """Name of the hardware that a rank runs on. Empty: the value of `device`."""
    batch_prices: Text = ""
    """Price list of batches. Empty: half of `prices`."""


class BatchesConfig(ConfigTable, frozen=True):
    """/v1/files and /v1/batches: requests that run when the load leaves capacity."""

    url: Text = AUTO
    """Database of this server alone, never shared: a path (SQLite), postgresql://... or "off";
    "auto": next to the ledger.
    """
    max_file_mb: Annotated[int, Meta(ge=1, le=1024)] = 100
    """Largest size of one file, MiB."""
    max_tenant_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Largest total size of a tenant's files, MiB."""
    max_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    """Maximum number of requests in one batch."""
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Maximum number of requests of all batches that run at once, if the load leaves capacity."""
    keep_days: Annotated[int, Meta(ge=1, le=3650)] = 30
    """Days for which files and ended batches are kept."""


class FleetConfig(ConfigTable, frozen=True):
    """Units that start and stop with demand (policy/scaling). `units` of each role is the minimum."""

    mode: Switch = OFF
    """"off": the number of units stays at `units`; "auto": units are started and drained during service."""
    prefill_max: Units = 0
    """Maximum number of prefill units. 0: prefill.units, so that the number never grows."""
    decode_max: Units = 0
    bundle_prefill: Units = 0
    """Prefill units of a bundle; both roles then grow by whole bundles. 0 for both roles: each role
    grows by itself.
    """
    bundle_decode: Units = 0
    prefill_tokens_per_s: Rate = 0.0
    """Throughput of a unit that meets its latency targets. 0: as measured by the units."""
    decode_tokens_per_s: Rate = 0.0
    prefill_use: Share = 0.7
    """Average utilisation of units above which another one is started."""
    decode_use: Share = 0.8
    start_s: PartOfADay = 60.0
    """Time from the start of a unit until it serves."""
    period_s: PartOfADay = 5.0
    """Time between decisions."""
    hold_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 600.0
    """Time for which a unit must not have been needed before it is stopped."""
    drain_timeout_s: PartOfADay = 120.0
    """Time in which requests on a drained unit may finish there; the rest then continue on other units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.bundle_prefill) != bool(self.bundle_decode):
            raise ConfigError(
                f"bundle_prefill is {self.bundle_prefill} and bundle_decode {self.bundle_decode}: a"
                " bundle has units of both roles. Set both, or neither."
            )

    @property
    def is_on(self) -> bool:
        return self.mode != OFF


class GatewayConfig(ConfigTable, frozen=True):
    """Access to the gateway: processes, hosts and origins allowed, and what is logged."""

    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes that accept requests on one port. The first of them runs the front (router)."""
    nodes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Number of further gateways on nodes of the cluster, each at its node's address and the same
    port. A Service or proxy spreads requests over all of them.
    """
    allowed_hosts: tuple[Text, ...] = ()
    """Host names, beyond this machine's own, that a server without keys accepts. A server bound to
    a network also accepts any IP address.
    """
    cors_origins: tuple[Text, ...] = ()
    """Origins, as "https://chat.example", for which browsers let pages read the answers; "*": any.
    A server without keys on a loopback address also answers pages of this machine.
    """
    open_metrics: bool = True
    """True: /metrics needs no key. False: it needs a key with the right to operate, like /audit."""
    access_log: Annotated[str, _one_of("on", OFF)] = "on"
    """Log line for each request: "on" or "off"."""
    unasked_thinking: Annotated[str, _one_of(OFF, "model")] = OFF
    """Thinking for a request of /v1/messages without `thinking`. "off": none, as in Anthropic's
    service; a model that always thinks does not show it. "model": the chat template decides, as in
    DeepSeek's service.
    """
    keep_responses_s: Annotated[float, Meta(ge=0, le=86400 * 30)] = 3600.0
    """Time for which a response of /v1/responses can be read and continued. 0: responses are not kept."""
    keep_responses_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 64
    """Maximum memory for kept responses, MiB per gateway process. Beyond it, the oldest responses
    of the tenant with the most are dropped.
    """
    explain_cache_mb: Annotated[int, Meta(ge=0, le=1 << 10)] = 16
    """Maximum memory for recent prompts that explain why a prompt was not cached, MiB per gateway
    process. Beyond it, the oldest are dropped. 0: no prompt is kept, and nothing is explained.
    """


class ConsoleConfig(ConfigTable, frozen=True):
    """Web pages for people, in a process of their own: a chat, and the deployment at work."""

    mode: Switch = AUTO
    """"auto": the pages are served if the extra "apps" is installed; "off": they are not."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8001
    """Port of the pages. 0, or if the port is in use: a free one."""


class LimitsConfig(ConfigTable, frozen=True):
    """Limits on requests and their queue. A refused request gets a reply with 400, 413 or 429."""

    max_body_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 4 * 1024 * 1024
    max_prompt_tokens: Count = 0
    """Maximum number of tokens of a prompt. 0: the model's context less one."""
    max_output_tokens: Count = 0
    """Maximum number of output tokens of a request. 0: the model's context."""
    default_output_tokens: Count = 0
    """Limit on output for a request that sets none. 0: the rest of the context."""
    likely_output_tokens: Positive = 2048
    """Output tokens reserved from the tenant's budget for a request without a limit. Only the
    tokens that it made are charged.
    """
    max_n: Annotated[int, Meta(ge=1, le=1 << 10)] = 8
    max_running: Positive = 256
    """Maximum number of generations that the front runs at once; more are queued."""
    max_queued: Count = 512
    """Maximum number of generations queued at the front; while other tenants queue too, a tenant's
    limit is its equal share. Beyond it the reply is 429 with Retry-After.
    """
    burst_tokens: Count = 8192
    """Head start, in prompt tokens of work, that a tenant has over queued tenants when it returns
    after a pause (policy/fairness).
    """
    max_retries: Count = 8
    """Maximum number of retries of one request after its units failed. Preemptions do not count."""
    request_timeout_s: Seconds = 3600.0
    """Longest time without a new token from decode: from the request's arrival to the first one, and
    between later ones. It does not limit a request that keeps making tokens.
    """


class ClusterConfig(ConfigTable, frozen=True):
    """Hosts of the units' processes: this host, or the nodes of a Ray cluster."""

    on: Annotated[str, _one_of(LOCAL, RAY)] = LOCAL
    """"local": all on this host; "ray": units, and `gateway.nodes` gateways, on nodes of Ray."""
    address: Text = "auto"
    """Address of the Ray cluster, such as "10.0.0.1:6379"; "auto": the cluster of this host."""
    name: Text = ""
    """Name under which `hadal serve` finds processes that a dead predecessor left running on the
    nodes. Empty: derived from its host's name and port.
    """
    label: Annotated[str, Meta(pattern=r"^([^=]+=[^=]+)?\Z")] = ""
    """Label, "key=value", of the Ray nodes that units may use. Empty: any node."""
    volatile_head: Annotated[str, _one_of("refuse", "allow")] = "refuse"
    """Policy for a Ray head that keeps its state in memory only: if that head dies, Ray ends the
    processes on every node a minute later. "refuse" such a cluster, or "allow" it.
    """
    open_ray: Annotated[str, _one_of("refuse", "allow")] = "refuse"
    """Policy for a Ray cluster without a token: anyone with access to its ports may run code on
    every node and read this deployment's secret. "refuse" such a cluster, or "allow" it.
    """
    place_timeout_s: Seconds = 60.0
    """Longest search for nodes before the server gives up starting."""
    node_timeout_s: Seconds = 1.5
    """Heartbeat timeout of a node: after it the node is lost, and its units continue without it."""
    lease_s: Seconds = 60.0
    """Seconds without a message from the supervisor after which a node ends its processes."""

    @property
    def spans_hosts(self) -> bool:
        """True if processes run on hosts other than this one."""
        return self.on != LOCAL


class Deployment(ConfigTable, frozen=True):
    """All settings of `hadal serve`."""

    model: Text = ""
    """Folder of the model. Empty: hadal-tiny, which ships with Hadal."""
    model_name: Text = ""
    """Name in the API. Empty: the folder's name."""
    accept_config: tuple[Text, ...] = ()
    """Unknown keys of the model's JSON files to ignore, by the names that the refusal gives:
    "rope_parameters.KEY", "generation_config.KEY".
    """
    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port of the API. 0: a free one."""
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 512
    """Maximum number of tokens of a rank in a prefill step. If steps are cut by cost, the mean is
    about two thirds of it.
    """
    dispatch_format: Annotated[str, _one_of("fp32", "fp8", "fp8_pow2")] = "fp32"
    """Number format of tokens sent to experts and back: "fp32" both ways, or "fp8" / "fp8_pow2":
    FP8 E4M3 out with a scale per 128 channels (any FP32 / a power of two), BF16 back.
    """
    compute: Annotated[str, _one_of("fp32", "fp8")] = "fp32"
    """Format of activations multiplied by a matrix that the checkpoint holds in FP8: "fp32":
    unrounded; "fp8", DeepSeek-V3's own recipe: rounded to E4M3 with a scale per 128 channels.
    """
    transport: Annotated[str, _one_of("auto", "tcp", "gloo", "nccl", "deepep")] = "auto"
    """Transport for token exchange between a unit's ranks: "tcp", "gloo", "nccl" or "deepep";
    "auto": tcp on CPUs, nccl on GPUs, gloo if ranks of a unit share a GPU.
    """
    handover: Annotated[str, _one_of("auto", "shm", "nixl", "tcp")] = "auto"
    """KV transfer from prefill to decode: "shm" (one host), "nixl" (UCX) or "tcp"; "auto": the best
    that both ends support.
    """
    device: Annotated[str, _one_of("auto", "cpu", "cuda")] = "auto"
    """"cpu", "cuda"; "auto": cpu, because on a GPU Hadal runs plain torch ops so far."""
    device_memory_gb: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Memory of a GPU for weights, KV and buffers, 10^9 bytes. 0: that of the smallest GPU here."""
    lease_s: Seconds = 30.0
    """Time for which prefilled KV is leased to the decode side."""
    heartbeat_s: Seconds = 0.5
    rank_timeout_s: Seconds = 1.5
    """A rank that is silent or stuck in one op for this long, although it could run, is dropped
    from its unit and restarted.
    """
    slow_host_rest_s: Annotated[float, Meta(ge=0, le=600)] = 30.0
    """Seconds for which a unit first continues without a host that slows all others (the host
    rests). 0: hosts never rest (policy/slow_hosts).
    """
    collective_timeout_s: Seconds = 10.0
    """Deadline of one exchange between ranks."""
    unit_timeout_s: Seconds = 2.0
    """A unit that is silent for this long, although it could run, is declared dead and restarted."""
    gateway_timeout_s: Seconds = 10.0
    """A gateway that is silent for this long, although it could run, is killed and restarted. Its
    streams are then lost; streams of a gateway that only paused continue.
    """
    drain_timeout_s: Seconds = 120.0
    keep_alive_s: Seconds = 10.0
    """Period of keep-alive comments on a stream without new tokens."""
    prefill: UnitsConfig = UnitsConfig()
    decode: UnitsConfig = UnitsConfig()
    gateway: GatewayConfig = GatewayConfig()
    console: ConsoleConfig = ConsoleConfig()
    limits: LimitsConfig = LimitsConfig()
    cache: CacheConfig = CacheConfig()
    ledger: LedgerConfig = LedgerConfig()
    batches: BatchesConfig = BatchesConfig()
    fleet: FleetConfig = FleetConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device == "cpu" and self.transport in ("nccl", "deepep"):
            raise ConfigError(
                f"transport {self.transport!r} needs GPUs, and device is 'cpu'. Use tcp or gloo."
            )
        if self.prefill.request_balance == NO_MOVES:
            raise ConfigError(
                "prefill.request_balance is 'no_moves', which only decode has. Use 'auto', 'off'"
                " or 'turns'."
            )
        if self.prefill.drafts:
            raise ConfigError(
                f"prefill.drafts is {shown(self.prefill.drafts)}; drafts are made in decode. Set"
                " decode.drafts."
            )
        if self.prefill.tenant_promise != TENANT_PROMISE:
            raise ConfigError(
                f"prefill.tenant_promise is {self.prefill.tenant_promise}; it applies to decode"
                " only. Set decode.tenant_promise."
            )
        if self.cluster.spans_hosts:
            _check_cluster(self)
        if self.gateway.nodes:
            _check_gateways_on_nodes(self)
        _check_deadlines(self)
        for role in ROLES:
            most, units = getattr(self.fleet, f"{role}_max"), units_of(self, role).units
            if 0 < most < units:
                raise ConfigError(
                    f"fleet.{role}_max ({most}) is less than {role}.units, the minimum ({units})."
                    " Raise the maximum."
                )
        total = sum(self.num_units_max(role) * units_of(self, role).ranks for role in ROLES)
        if total > _MOST_RANKS:
            raise ConfigError(
                f"prefill and decode: their units have {total:,} ranks together; at most"
                f" {_MOST_RANKS:,} are possible."
            )

    def num_units_max(self, role: str) -> int:
        """Return how many units of a role may exist at once."""
        units, most = (
            (self.prefill.units, self.fleet.prefill_max)
            if role == PREFILL
            else (self.decode.units, self.fleet.decode_max)
        )
        return max(units, most) if self.fleet.is_on else units


def units_of(deployment: Deployment, role: str) -> UnitsConfig:
    """Return the settings of one role's units, "prefill" or "decode"."""
    return deployment.prefill if role == PREFILL else deployment.decode


def num_drafts_max(deployment: Deployment, config: ModelConfig) -> int:
    """Return the most drafts (speculative tokens) per request and pass; 0 without an MTP module."""
    if config.num_nextn_predict_layers == 0:
        return 0
    drafts = deployment.decode.drafts
    return DRAFTS_AUTO if isinstance(drafts, str) else drafts


def num_cache_layers(deployment: Deployment, config: ModelConfig) -> int:
    """Return the layers in a KV block: the model's, and the MTP module's if it may draft."""
    return config.num_hidden_layers + (num_drafts_max(deployment, config) > 0)


def read_deployment(path: Path, **overrides: Any) -> Deployment:
    """Read a TOML deployment; `overrides` replace top-level fields, and None is ignored. Raises
    ConfigError. A relative `model` in the file is resolved against the file's folder, then the
    working folder.
    """
    fields = read_toml(path, "deployment")
    model = fields.get("model")
    if isinstance(model, str) and model and is_folder(path.parent / model):
        fields["model"] = str(path.parent / model)
    fields.update({name: value for name, value in overrides.items() if value is not None})
    return converted(fields, Deployment, str(path))


def _check_cluster(deployment: Deployment) -> None:
    """Refuse settings that work on one host only, and deadlines that would end healthy processes."""
    if deployment.handover == "shm":
        raise ConfigError(
            "handover is 'shm', which reaches no other host, and cluster.on is"
            f" {deployment.cluster.on!r}. Take 'auto', 'nixl' or 'tcp'."
        )
    if deployment.cluster.node_timeout_s < 4 * AGENT_BEAT_S:
        raise ConfigError(
            f"cluster.node_timeout_s ({deployment.cluster.node_timeout_s:g}) must be"
            f" {4 * AGENT_BEAT_S:g} s at least: an agent reports every {AGENT_BEAT_S:g} s."
        )
    if deployment.cluster.lease_s < 4 * deployment.cluster.node_timeout_s:
        raise ConfigError(
            f"cluster.lease_s ({deployment.cluster.lease_s:g}) must be four times"
            f" cluster.node_timeout_s ({deployment.cluster.node_timeout_s:g}) at least: otherwise"
            " a node that is cut off briefly ends its processes."
        )


def _check_gateways_on_nodes(deployment: Deployment) -> None:
    """Refuse gateways that clients could not reach."""
    if not deployment.cluster.spans_hosts:
        raise ConfigError(
            f"gateway.nodes is {deployment.gateway.nodes}, and cluster.on is"
            f" {deployment.cluster.on!r}: there is one host. Set gateway.processes."
        )
    if is_near(deployment.host):
        raise ConfigError(
            f"host is {deployment.host!r}, and gateway.nodes is {deployment.gateway.nodes}:"
            " clients must reach gateways on other hosts. Set host to 0.0.0.0."
        )
    if deployment.port == 0:
        raise ConfigError(
            "port is 0 (any free port), and gateways on nodes need one port for all. Choose one."
        )


def _check_deadlines(deployment: Deployment) -> None:
    """Refuse deadlines that would pass before a shorter one has had its effect."""
    if deployment.unit_timeout_s <= 2 * deployment.heartbeat_s:
        raise ConfigError("unit_timeout_s must be more than twice heartbeat_s.")
    if deployment.rank_timeout_s < 4 * RANK_HEARTBEAT_S:
        raise ConfigError(
            f"rank_timeout_s is {deployment.rank_timeout_s}; ranks report every {RANK_HEARTBEAT_S}"
            f" s, so it must be {4 * RANK_HEARTBEAT_S:g} at least, or healthy ranks are dropped."
        )
    if deployment.collective_timeout_s <= deployment.rank_timeout_s:
        raise ConfigError(
            f"collective_timeout_s ({deployment.collective_timeout_s:g}) must exceed"
            f" rank_timeout_s ({deployment.rank_timeout_s:g}): a silent rank must be found and"
            " dropped before an exchange times out."
        )
    if deployment.unit_timeout_s <= deployment.rank_timeout_s:
        raise ConfigError(
            "unit_timeout_s must exceed rank_timeout_s, or the loss of a rank ends its unit."
        )


_NOTE_COLUMN = 36


def to_toml(
    value: Any,
    heading: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
    *,
    is_whole: bool = False,
) -> str:
    """Return TOML text that parses to this value: the fields that differ from their defaults. A
    value is a frozen Struct or dataclass (a deployment, a study) of numbers, strings, tables, and
    tuples of these.

    `heading`: lines of a comment at the top. `notes`: field, such as "decode.ranks" -> comment on
    it; a field with a note is written even if it has its default. `is_whole`: all other fields are
    written too.
    """
    lines = [f"# {line}".rstrip() for line in heading]
    lines += ["", *_tables(value, "", notes or {}, is_whole)]
    return "\n".join(lines).strip() + "\n"


def _tables(value: Any, path: str, notes: Mapping[str, str], is_whole: bool) -> Iterator[str]:
    """Yield a table's fields, then its inner tables."""
    inner = []
    for each in _fields(value):
        found, note = getattr(value, each.name), notes.get(path + each.name, "")
        if _is_table(found):
            inner.append((f"{path}{each.name}", found))
        elif is_whole or note or found != each.default:
            line = f"{each.name} = {_text(found)}"
            yield f"{line:<{_NOTE_COLUMN}}# {note}" if note else line
    for name, table in inner:
        lines = list(_tables(table, f"{name}.", notes, is_whole))
        if lines:
            yield from ("", f"[{name}]", *lines)


def _is_table(value: Any) -> bool:
    return isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value)


def _fields(table: Any) -> Sequence[Any]:
    is_struct = isinstance(table, msgspec.Struct)
    return structs.fields(table) if is_struct else dataclasses.fields(table)


def _text(value: Any) -> str:
    """Return a value as TOML on one line."""
    if _is_table(value):
        fields = (f"{each.name} = {_text(getattr(value, each.name))}" for each in _fields(value))
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings and numbers are TOML's.
