"""A deployment as one frozen value: which model, how many units, how much of everything.

Read from TOML, checked at birth. Every field has a default; where that is 0 or empty, its comment
says from what the value is derived.
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

# What a field may hold: at most far more than anybody has, and still answered in seconds.
_DAY_S = 86_400.0
_MOST_S = 31 * _DAY_S
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Positive = Annotated[int, Meta(ge=1, le=1 << 40)]
Units = Annotated[int, Meta(ge=0, le=1 << 12)]
Ranks = Annotated[int, Meta(ge=1, le=1 << 11)]
Seconds = Annotated[float, Meta(gt=0, le=_MOST_S)]
PartOfADay = Annotated[float, Meta(gt=0, le=_DAY_S)]
"""The fleet looks no further than a day: then another like it begins."""
Share = Annotated[float, Meta(gt=0, le=1)]
Rate = Annotated[float, Meta(ge=0, lt=1e15)]
Text = Annotated[str, Meta(max_length=4096)]
"""A name or a path, as long as Linux has it."""
_MOST_RANKS = 1 << 17
"""Most ranks of all units together: DeepSeek's published day had 2,200 GPUs at its peak."""


def _one_of(*names: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


Switch = Annotated[str, _one_of(AUTO, OFF)]
LOCAL, RAY = "local", "ray"
"""Where units run."""
TENANT_PROMISE = 2.0
"""Default of `UnitsConfig.tenant_promise`; `python -m bench rows` prints what each value costs."""
DRAFTS_MAX = 3
DRAFTS_AUTO = 2
"""Most drafts where they are chosen by price: buffers have room for so many."""


class ConfigTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a deployment. Its fields are checked at birth, whether it was read or made."""

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first field that cannot be."""
        for name, kind in _kinds(type(self)).items():
            value = converted(getattr(self, name), kind, name=name)
            if isinstance(value, str) and not value.isprintable():
                raise ConfigError(
                    f"{name} is {shown(value)}; it holds a line's end or a zero byte."
                )


@functools.cache
def _kinds(table: type[ConfigTable]) -> dict[str, Any]:
    return {each.name: each.type for each in structs.fields(table)}


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError, naming `what` was to be read."""
    return parse_toml(read_text(path, what, MAX_TOML_BYTES), str(path))


PREFILL = "prefill"
DECODE = "decode"
ROLES = (PREFILL, DECODE)
"""What units are for, by the names of their tables in a deployment."""
RANK_HEARTBEAT_S = 0.25
"""Period of a rank's heartbeat to its leader."""
AGENT_BEAT_S = 0.25
"""How often the agent of a node says that it is there, and is told what to run."""
GATEWAY_HEARTBEAT_S = 0.25
"""A gateway tells its supervisor so often that its event loop turns, and the one with the front
tells the others.
"""


class UnitsConfig(ConfigTable, frozen=True):
    """Deployment units of one kind, prefill or decode."""

    units: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    ranks: Ranks = 1
    """Ranks of a unit: processes (GPUs) that step together, over which its experts are spread."""
    ranks_per_node: Ranks = 8
    redundant_experts: Annotated[int, Meta(ge=0, le=1 << 14)] = 0
    """Replicas beyond one of each expert, in every layer."""
    overlap: Annotated[str, _one_of("auto", "sequential", "prefill_dual", "decode_five")] = "auto"
    """"sequential", "prefill_dual" or "decode_five"; "auto": whichever is cheapest for the step, by
    price.
    """
    min_split_tokens: Count = 32
    """A step with fewer tokens on its busiest rank is not split into two micro-batches."""
    mode: Annotated[str, _one_of("", "normal", "low_latency")] = ""
    """How tokens travel to experts: "normal" (one copy per rank, counts first) or "low_latency"
    (fixed buffers). Empty: normal in prefill, low-latency in decode.
    """
    expert_balance: Switch = AUTO
    """"auto": replicas move and split anew while it serves, when that pays; "off": they stay as
    they were placed.
    """
    request_balance: Annotated[str, _one_of(AUTO, NO_MOVES, OFF, TURNS)] = AUTO
    """How requests are balanced over the unit's ranks. Prefill: "auto" cuts steps by cost, "off" by
    token budgets. Decode: "auto" places by KV and counts and moves running requests when that pays,
    "no_moves" only places, "off" goes by counts alone. "turns", in both: round-robin, to compare
    with.
    """
    drafts: Annotated[str, _one_of(AUTO)] | Annotated[int, Meta(ge=0, le=DRAFTS_MAX)] = 0
    """Decode: most tokens that the model's MTP module drafts a pass for each request, 0 to 3. "auto":
    as many of 0, 1 and 2 as pay, by measured times and by how often drafts are right; 0 for a model
    without the module. No draft changes a token.
    """
    tenant_promise: Annotated[float, Meta(ge=1, le=1000)] = TENANT_PROMISE
    """Decode: steps of the tenant with the fewest requests take at most so many times as long beside
    others' requests as alone, and never longer than equal shares give; the others take turns. 1000: no
    request takes turns.
    """
    threads: Units = 0
    """CPU threads of a rank. 0: the cores divided by the unit's ranks."""
    kv_blocks: Annotated[int, Meta(ge=0, le=1 << 48)] = 0
    """KV blocks of a rank, 64 tokens each. 0: from `kv_memory_mb`."""
    kv_memory_mb: Annotated[str, _one_of(AUTO)] | Annotated[int, Meta(ge=0, le=1 << 32)] = AUTO
    """KV pool of a rank, MiB; never less than one whole context. "auto": on CPUs of this host, pools
    share a quarter of the memory that weights leave (runtime/pool_sizes); else 256.
    """
    max_requests: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    """Requests a rank works on at once (decode: slots)."""
    max_waiting: Count = 256
    """Requests a unit's leader queues beyond those; more are returned to the front."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ConfigError(
                f"ranks is {self.ranks}, which does not fill nodes of {self.ranks_per_node}. Take a"
                " multiple, or change ranks_per_node."
            )
        if self.redundant_experts and self.ranks == 1:
            raise ConfigError(
                f"redundant_experts is {self.redundant_experts} with one rank: there is no second"
                " rank to hold a replica. Raise ranks or leave it 0."
            )

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node that each rank of a unit is on, counted within the unit."""
        return tuple(rank // self.ranks_per_node for rank in range(self.ranks))

    def beside(self, rank: int) -> range:
        """The ranks of a unit that are on the node of `rank`, itself among them."""
        first = rank - rank % self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, self.ranks))


class CacheConfig(ConfigTable, frozen=True):
    """KV that outlives its request, found again by what it contains."""

    memory: Switch = AUTO
    """"auto": blocks stay in the pools of prefill ranks until their room is needed; "off": they are
    freed at once.
    """
    folder: Text = ""
    """Where KV is kept on disk; any mounted file system, and several deployments may share one.
    Empty: nowhere.
    """
    disk_mb: Positive = 4096
    """Most that this deployment keeps there."""
    recompute: Switch = AUTO
    """"auto": what is on disk and cheaper to compute than to read is computed, by measured times;
    "off": it is read.
    """

    @property
    def is_on(self) -> bool:
        """Whether blocks are named at all."""
        return self.memory != OFF or bool(self.folder)


class LedgerConfig(ConfigTable, frozen=True):
    """What is written down of every request, for `hadal report`."""

    url: Text = AUTO
    """A path (SQLite) or postgresql://..., "off"; "auto": $HADAL_LEDGER, else a file in the user's
    state folder.
    """
    prices: Text = "deepseek-reasoner"
    """Price list (stats/prices) by name, or dollars per million tokens as "HIT/MISS/OUT"."""
    gpu_hour_usd: Annotated[float, Meta(ge=0, lt=1e6)] = 2.0
    """Price of one rank for an hour, be it a GPU or a process on a CPU."""
    gpu: Text = ""
    """What a rank runs on. Empty: the device."""
    batch_prices: Text = ""
    """Price list of batches. Empty: half of `prices`."""


class BatchesConfig(ConfigTable, frozen=True):
    """/v1/files and /v1/batches: requests for which nobody waits."""

    url: Text = AUTO
    """Where this server keeps them, and no other: a path (SQLite), postgresql://..., "off"; "auto":
    beside the ledger.
    """
    max_file_mb: Annotated[int, Meta(ge=1, le=1024)] = 100
    """Size of a file."""
    max_tenant_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024
    """Of all files of a tenant together."""
    max_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    """Requests of a batch."""
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Requests of all batches that are worked on at once, where the load leaves room."""
    keep_days: Annotated[int, Meta(ge=1, le=3650)] = 30
    """How long files, and batches that have ended, are kept."""


class FleetConfig(ConfigTable, frozen=True):
    """Units that come and go with the demand (policy/scaling). `units` of each role is the
    floor.
    """

    mode: Switch = OFF
    """"off": as many units as `units` says; "auto": units are started and drained while it
    serves.
    """
    prefill_max: Units = 0
    """Most prefill units. 0: prefill.units, so that they never grow."""
    decode_max: Units = 0
    bundle_prefill: Units = 0
    """Units of a bundle, in which both roles then grow; 0 for both: each role by itself."""
    bundle_decode: Units = 0
    prefill_tokens_per_s: Rate = 0.0
    """Speed of a unit that keeps what is promised on latency. 0: what units measure of themselves.
    """
    decode_tokens_per_s: Rate = 0.0
    prefill_use: Share = 0.7
    """How busy units may be on average before another is started."""
    decode_use: Share = 0.8
    start_s: PartOfADay = 60.0
    """Time from the start of a unit until it works."""
    period_s: PartOfADay = 5.0
    """Time between decisions."""
    hold_s: Annotated[float, Meta(ge=0, le=_DAY_S)] = 600.0
    """A unit is given up if it was not needed for so long."""
    drain_timeout_s: PartOfADay = 120.0
    """How long what a drained unit holds may go on there; what is left then goes on elsewhere."""

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
    """Who may ask the gateway from where, and what it writes down of it."""

    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes, which take requests on one port. The first of them holds the front."""
    nodes: Annotated[int, Meta(ge=0, le=64)] = 0
    """Gateways on as many nodes of a cluster besides, each at its node's address and the same port:
    for a Service or a proxy, which spreads requests over all of them.
    """
    allowed_hosts: tuple[Text, ...] = ()
    """Names beyond this machine's own by which a server without keys may be asked. One that serves a
    network also answers to any address.
    """
    cors_origins: tuple[Text, ...] = ()
    """Origins, as "https://chat.example", whose pages a browser lets read the answers; "*": any. A
    server without keys on a loopback address also answers pages of this machine.
    """
    open_metrics: bool = True
    """/metrics needs no key. False: it needs one that has the right to operate, as /audit and
    /trace do.
    """
    access_log: Annotated[str, _one_of("on", OFF)] = "on"
    """A line for each request: "on" or "off"."""
    keep_responses_s: Annotated[float, Meta(ge=0, le=86400 * 30)] = 3600.0
    """How long a response of /v1/responses can be asked for and gone on from. 0: none is kept."""
    keep_responses_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 64
    """Most memory that a gateway process keeps them in; beyond it the oldest go of the tenant that
    has most.
    """


class ConsoleConfig(ConfigTable, frozen=True):
    """The pages for people, in a process of their own: a chat, and the deployment at work."""

    mode: Switch = AUTO
    """"auto": they are there; "off": they are not."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8001
    """Of the pages. 0, or if it is in use: a free one."""


class LimitsConfig(ConfigTable, frozen=True):
    """What one client may ask for. Beyond a limit the reply is 400, 413 or 429, never a crash."""

    max_body_bytes: Annotated[int, Meta(ge=1, le=1 << 32)] = 4 * 1024 * 1024
    max_prompt_tokens: Count = 0
    """0: the model's context less one."""
    max_output_tokens: Count = 0
    """0: the model's context."""
    default_output_tokens: Count = 0
    """Of a request that names no limit. 0: what is left of the context."""
    likely_output_tokens: Positive = 2048
    """What such a request puts aside of its tenant's budget. It is charged what it made."""
    max_n: Annotated[int, Meta(ge=1, le=1 << 10)] = 8
    max_running: Positive = 256
    """Generations the front works on at once; more wait."""
    max_queued: Count = 512
    """Generations that wait at the front, or a tenant's equal share of so many while others wait as
    well; more get 429 and Retry-After.
    """
    burst_tokens: Count = 8192
    """Work, in tokens of a prompt, by which a tenant that was away may go before those that wait
    (policy/fairness).
    """
    max_retries: Count = 8
    """Retries of one request that lost a unit. Preemptions do not count."""
    request_timeout_s: Seconds = 3600.0
    """How long a request may wait: in the queue, for its first token, and for each token after. A
    request that makes tokens is ended by its own limits alone.
    """


class ClusterConfig(ConfigTable, frozen=True):
    """Where the processes of the units run: on this host, or on the nodes of a Ray cluster."""

    on: Annotated[str, _one_of(LOCAL, RAY)] = LOCAL
    """"local": all on this host; "ray": gateways here, units on nodes that Ray places them on."""
    address: Text = "auto"
    """Of the Ray cluster, "10.0.0.1:6379"; "auto": the one that this host is a node of."""
    name: Text = ""
    """By which `hadal serve` finds what one before it, that died, left running on the nodes. Empty: by
    its host's name and port.
    """
    label: Annotated[str, Meta(pattern=r"^([^=]+=[^=]+)?\Z")] = ""
    """Label, "key=value", of the Ray nodes that units may lie on. Empty: any."""
    volatile_head: Annotated[str, _one_of("refuse", "allow")] = "refuse"
    """What to do about a Ray head that keeps its state in memory alone: if it dies, Ray ends the
    processes on every node a minute later. "refuse" such a cluster, or "allow" it.
    """
    open_ray: Annotated[str, _one_of("refuse", "allow")] = "refuse"
    """What to do about a Ray cluster that asks for no token: who reaches its ports may run code on every
    node, and read this deployment's secret. "refuse" such a cluster, or "allow" it.
    """
    place_timeout_s: Seconds = 60.0
    """How long nodes may take to be found before the server gives up starting."""
    node_timeout_s: Seconds = 1.5
    """A node that says nothing for this long is lost: its units go on without it."""
    lease_s: Seconds = 60.0
    """A node that hears nothing of the supervisor for this long ends what it runs."""

    @property
    def spans_hosts(self) -> bool:
        """Whether processes run on other hosts than this one."""
        return self.on != LOCAL


class Deployment(ConfigTable, frozen=True):
    """Everything `hadal serve` needs to know."""

    model: Text = ""
    """Folder of the model. Empty: hadal-tiny, which ships with Hadal."""
    model_name: Text = ""
    """Name in the API. Empty: the folder's name."""
    accept_config: tuple[Text, ...] = ()
    """Keys of the model's JSON files that are passed over although Hadal does not know them, by the
    names that a refusal gives: "rope_parameters.KEY", "generation_config.KEY".
    """
    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: a free one."""
    chunk_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 512
    """Most tokens of a rank in a prefill step. Where steps are cut by cost, the mean is about two thirds."""
    dispatch_format: Annotated[str, _one_of("fp32", "fp8", "fp8_pow2")] = "fp32"
    """What tokens are on their way to experts and back: "fp32" both ways, or "fp8" / "fp8_pow2":
    FP8 E4M3 out with a scale per 128 channels (any FP32 / a power of two), BF16 back.
    """
    compute: Annotated[str, _one_of("fp32", "fp8")] = "fp32"
    """What a matrix that the checkpoint holds in FP8 is multiplied by: "fp32", the activations as
    they are, or "fp8", DeepSeek-V3's own recipe: rounded to E4M3 with a scale per 128 channels.
    """
    transport: Annotated[str, _one_of("auto", "tcp", "gloo", "nccl", "deepep")] = "auto"
    """What the ranks of a unit exchange tokens by: "tcp", "gloo", "nccl" or "deepep"; "auto": tcp
    on CPUs, nccl on GPUs, gloo where ranks of a unit share one.
    """
    handover: Annotated[str, _one_of("auto", "shm", "nixl", "tcp")] = "auto"
    """How KV gets from prefill to decode: "shm" (one host), "nixl" (UCX) or "tcp"; "auto": the best
    that both ends can do.
    """
    device: Annotated[str, _one_of("auto", "cpu", "cuda")] = "auto"
    """"cpu", "cuda"; "auto": cpu, for a GPU runs plain torch ops so far."""
    device_memory_gb: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Memory of a GPU that weights, KV and buffers must fit in, 10^9 bytes. 0: what the GPUs of
    this machine have.
    """
    lease_s: Seconds = 30.0
    """How long prefilled KV is held for the decode side."""
    heartbeat_s: Seconds = 0.5
    rank_timeout_s: Seconds = 1.5
    """A rank silent or stuck in one op for this long, though it could run, is dropped from its unit
    and restarted.
    """
    slow_host_rest_s: Annotated[float, Meta(ge=0, le=600)] = 30.0
    """A host that slows all others of its unit rests for this long at first: the unit goes on without
    it. 0: none ever rests (policy/slow_hosts).
    """
    collective_timeout_s: Seconds = 10.0
    """Deadline of one exchange between ranks."""
    unit_timeout_s: Seconds = 2.0
    """A unit silent for this long, though it could run, is given up and restarted."""
    gateway_timeout_s: Seconds = 10.0
    """A gateway silent for this long, though it could run, is killed and restarted. Its streams are lost
    then, while those of one that stood still and goes on continue.
    """
    drain_timeout_s: Seconds = 120.0
    keep_alive_s: Seconds = 10.0
    """A waiting stream gets a comment this often."""
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
                f"transport {self.transport!r} needs GPUs, and device is 'cpu'. CPUs take tcp or"
                " gloo."
            )
        if self.prefill.request_balance == NO_MOVES:
            raise ConfigError(
                "prefill.request_balance is 'no_moves'; prompts never move. Take 'auto', 'off' or"
                " 'turns'."
            )
        if self.prefill.drafts:
            raise ConfigError(
                f"prefill.drafts is {shown(self.prefill.drafts)}; drafts are made in decode. Set"
                " decode.drafts."
            )
        if self.prefill.tenant_promise != TENANT_PROMISE:
            raise ConfigError(
                f"prefill.tenant_promise is {self.prefill.tenant_promise}; it is about steps of"
                " decode. Set decode.tenant_promise."
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
                    f"fleet.{role}_max is {most}, and {role}.units, the floor, is {units}. Raise the"
                    " first."
                )
        total = sum(self.num_units_max(role) * units_of(self, role).ranks for role in ROLES)
        if total > _MOST_RANKS:
            raise ConfigError(
                f"prefill and decode: their units have {total:,} ranks together; {_MOST_RANKS:,}"
                " can be."
            )

    def num_units_max(self, role: str) -> int:
        """Units of a role that there may ever be at once."""
        units, most = (
            (self.prefill.units, self.fleet.prefill_max)
            if role == PREFILL
            else (self.decode.units, self.fleet.decode_max)
        )
        return max(units, most) if self.fleet.is_on else units


def units_of(deployment: Deployment, role: str) -> UnitsConfig:
    """The units of one role, "prefill" or "decode"."""
    return deployment.prefill if role == PREFILL else deployment.decode


def num_drafts_max(deployment: Deployment, config: ModelConfig) -> int:
    """Most drafts of a request in a step. 0 where the model has no MTP module."""
    if config.num_nextn_predict_layers == 0:
        return 0
    drafts = deployment.decode.drafts
    return DRAFTS_AUTO if isinstance(drafts, str) else drafts


def num_cache_layers(deployment: Deployment, config: ModelConfig) -> int:
    """Layers of a KV block: the model's, and behind them the MTP module's where it drafts."""
    return config.num_hidden_layers + (num_drafts_max(deployment, config) > 0)


def read_deployment(path: Path, **overrides: Any) -> Deployment:
    """Read a TOML deployment; `overrides` (None is ignored) replace top-level fields. Raises
    ConfigError.

    A relative `model` in the file is looked for beside the file, then in the working folder.
    """
    fields = read_toml(path, "deployment")
    model = fields.get("model")
    if isinstance(model, str) and model and is_folder(path.parent / model):
        fields["model"] = str(path.parent / model)
    fields.update({name: value for name, value in overrides.items() if value is not None})
    return converted(fields, Deployment, str(path))


def _check_cluster(deployment: Deployment) -> None:
    """Refuse what works on one host alone, and deadlines that would end what runs."""
    if deployment.handover == "shm":
        raise ConfigError(
            "handover is 'shm', which reaches no other host, and cluster.on is"
            f" {deployment.cluster.on!r}. Take 'auto', 'nixl' or 'tcp'."
        )
    if deployment.cluster.node_timeout_s < 4 * AGENT_BEAT_S:
        raise ConfigError(
            f"cluster.node_timeout_s ({deployment.cluster.node_timeout_s:g}) must be"
            f" {4 * AGENT_BEAT_S:g} s at least: an agent speaks every {AGENT_BEAT_S:g} s."
        )
    if deployment.cluster.lease_s < 4 * deployment.cluster.node_timeout_s:
        raise ConfigError(
            f"cluster.lease_s ({deployment.cluster.lease_s:g}) must be four times"
            f" cluster.node_timeout_s ({deployment.cluster.node_timeout_s:g}) at least: a node that"
            " was cut off for a moment is to find what it ran."
        )


def _check_gateways_on_nodes(deployment: Deployment) -> None:
    """Refuse gateways that nobody could reach."""
    if not deployment.cluster.spans_hosts:
        raise ConfigError(
            f"gateway.nodes is {deployment.gateway.nodes}, and cluster.on is"
            f" {deployment.cluster.on!r}: there is one host. Set gateway.processes."
        )
    if is_near(deployment.host):
        raise ConfigError(
            f"host is {deployment.host!r}, and gateway.nodes is {deployment.gateway.nodes}: whoever"
            " reaches gateways on other hosts is not on this one. Set host to 0.0.0.0."
        )
    if deployment.port == 0:
        raise ConfigError(
            "port is 0, a free one, and gateways on nodes have the same port everywhere. Name one."
        )


def _check_deadlines(deployment: Deployment) -> None:
    """Each must leave the ones below it time to speak first."""
    if deployment.unit_timeout_s <= 2 * deployment.heartbeat_s:
        raise ConfigError("unit_timeout_s must exceed two heartbeats (heartbeat_s).")
    if deployment.rank_timeout_s < 4 * RANK_HEARTBEAT_S:
        raise ConfigError(
            f"rank_timeout_s is {deployment.rank_timeout_s}; ranks report every {RANK_HEARTBEAT_S} s, so"
            f" it must be {4 * RANK_HEARTBEAT_S:g} at least, or ranks that are well are dropped."
        )
    if deployment.collective_timeout_s <= deployment.rank_timeout_s:
        raise ConfigError(
            f"collective_timeout_s ({deployment.collective_timeout_s:g}) must exceed rank_timeout_s"
            f" ({deployment.rank_timeout_s:g}): a silent rank is to be dropped by name before an"
            " exchange gives up."
        )
    if deployment.unit_timeout_s <= deployment.rank_timeout_s:
        raise ConfigError(
            "unit_timeout_s must exceed rank_timeout_s: a unit outlives the loss of a rank."
        )


_NOTE_COLUMN = 36


def to_toml(
    value: Any,
    heading: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
    *,
    is_whole: bool = False,
) -> str:
    """Return TOML text that is read back as this value: the fields that differ from their defaults.
    A value is a frozen Struct or dataclass (a deployment, a study) of numbers, strings, tables, and
    tuples of these.

    `heading`: lines of a comment at the top. `notes`: by field, such as "decode.ranks", what is
    said of it; a field that has a note is written down even if it is as it is by default.
    `is_whole`: so are all other fields.
    """
    lines = [f"# {line}".rstrip() for line in heading]
    lines += ["", *_tables(value, "", notes or {}, is_whole)]
    return "\n".join(lines).strip() + "\n"


def _tables(value: Any, path: str, notes: Mapping[str, str], is_whole: bool) -> Iterator[str]:
    """A table's fields, then the tables in it."""
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
    """A value on one line."""
    if _is_table(value):
        fields = (f"{each.name} = {_text(getattr(value, each.name))}" for each in _fields(value))
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings and numbers are TOML's.
