"""A deployment as one frozen value: which model, how many units, how much of everything.

Read from TOML, checked at birth. Every field has a default; where that is 0 or empty, its comment
says from what the value is derived.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hadal.core.balance import AUTO, NO_MOVES, OFF, TURNS
from hadal.core.documents import MAX_TOML_BYTES, is_folder, parse_toml, problem_of, read_text, shown
from hadal.core.errors import ConfigError

# TOML tables as frozen dataclasses: known names only, of the right type, and an error that says
# where.
#
# A field is an int, float, str or bool, a tuple of one of those (written as an array), or another
# dataclass (a table).


T = TypeVar("T")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError, naming `what` was to be read."""
    return parse_toml(read_text(path, what, MAX_TOML_BYTES), str(path))


def build(kind: type[T], fields: dict[str, Any], where: str, base: T | None = None) -> T:
    """Make a `kind` of what a table says. What it does not say is as in `base`, in inner tables
    too, or without one as by default. Raises ConfigError.
    """
    types = get_type_hints(kind)
    known = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in fields:
        if name not in known:
            raise ConfigError(f"{where}: unknown field {shown(name)}. Known: {', '.join(known)}.")
    values = {
        name: _value(types[name], value, where, name, getattr(base, name, None))
        for name, value in fields.items()
    }
    if base is not None:
        return dataclasses.replace(base, **values)  # type: ignore[type-var]
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if not has_default and each.name not in fields:
            raise ConfigError(f"{where}: {each.name} is missing.")
    return kind(**values)


def _value(kind: Any, value: Any, where: str, name: str, base: Any = None) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {name} must be a table.")
        return build(kind, value, f"{where}: {name}", base)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {name} is {shown(value)}; an array is needed.")
        return tuple(_value(get_args(kind)[0], one, where, name) for one in value)
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(
            f"{where}: {name} is {shown(value)}; a value of type {kind.__name__} is needed."
        )
    if (problem := problem_of(value)) is not None:
        raise ConfigError(f"{where}: {name} {problem}.")
    return float(value) if kind is float else value


PREFILL = "prefill"
DECODE = "decode"
ROLES = (PREFILL, DECODE)
"""What units are for, by the names of their tables in a deployment."""
RANK_BEAT_S = 0.25
"""Period of a rank's heartbeat to its leader."""
GATEWAY_BEAT_S = 0.25
"""A gateway tells its supervisor so often that its event loop turns, and the one with the front
tells the others.
"""


@dataclass(frozen=True)
class UnitsConfig:
    """Deployment units of one kind, prefill or decode."""

    units: int = 1
    ranks: int = 1
    """Ranks of a unit: processes (GPUs) that step together, over which its experts are spread."""
    ranks_per_node: int = 8
    redundant_experts: int = 0
    """Replicas beyond one of each expert, in every layer."""
    overlap: str = "auto"
    """"sequential", "prefill_dual" or "decode_five"; "auto": whichever is cheapest for the step, by
    price.
    """
    min_split_tokens: int = 32
    """A step with fewer tokens on its busiest rank is not split into two micro-batches."""
    mode: str = ""
    """How tokens travel to experts: "normal" (one copy per rank, counts first) or "low_latency"
    (fixed buffers). Empty: normal in prefill, low-latency in decode.
    """
    expert_balance: str = AUTO
    """"auto": replicas move and split anew while it serves, when that pays; "off": they stay as
    they were placed.
    """
    request_balance: str = AUTO
    """Over the unit's ranks. Prefill: "auto" cuts steps by cost, "off" by token budgets. Decode:
    "auto" places by KV and counts and moves running requests when that pays, "no_moves" only
    places, "off" goes by counts alone. "turns", in both: round-robin, to compare with.
    """
    threads: int = 0
    """CPU threads of a rank. 0: the cores divided by the unit's ranks."""
    kv_blocks: int = 0
    """KV blocks of a rank, 64 tokens each. 0: from `kv_memory_mb`."""
    kv_memory_mb: int = 256
    max_requests: int = 64
    """Requests a rank works on at once (decode: slots)."""
    max_waiting: int = 256
    """Requests a unit's leader queues beyond those; more are returned to the front."""


@dataclass(frozen=True)
class CacheConfig:
    """KV that outlives its request, found again by what it contains."""

    memory: str = AUTO
    """"auto": blocks stay in the pools of prefill ranks until their room is needed; "off": they are
    freed at once.
    """
    folder: str = ""
    """Where KV is kept on disk; any mounted file system, and several deployments may share one.
    Empty: nowhere.
    """
    disk_mb: int = 4096
    """Most that this deployment keeps there."""
    recompute: str = AUTO
    """"auto": what is on disk and cheaper to compute than to read is computed, by measured times;
    "off": it is read.
    """

    @property
    def is_on(self) -> bool:
        """Whether blocks are named at all."""
        return self.memory != OFF or bool(self.folder)


@dataclass(frozen=True)
class LedgerConfig:
    """What is written down of every request, for `hadal report`."""

    url: str = AUTO
    """A path (SQLite) or postgresql://..., "off"; "auto": $HADAL_LEDGER, else a file in the user's
    state folder.
    """
    prices: str = "deepseek-reasoner"
    """Price list (stats/prices) by name, or dollars per million tokens as "HIT/MISS/OUT"."""
    gpu_hour_usd: float = 2.0
    """Price of one rank for an hour, be it a GPU or a process on a CPU."""
    gpu: str = ""
    """What a rank runs on. Empty: the device."""


@dataclass(frozen=True)
class FleetConfig:
    """Units that come and go with the demand (policy/scaling). `units` of each role is the
    floor.
    """

    mode: str = OFF
    """"off": as many units as `units` says; "auto": units are started and drained while it
    serves.
    """
    prefill_max: int = 0
    """Most prefill units. 0: prefill.units, so that they never grow."""
    decode_max: int = 0
    bundle_prefill: int = 0
    """Units of a bundle, in which both roles then grow; 0 for both: each role by itself."""
    bundle_decode: int = 0
    prefill_tokens_per_s: float = 0.0
    """Of a unit that keeps what is promised on latency. 0: what units measure of themselves."""
    decode_tokens_per_s: float = 0.0
    prefill_use: float = 0.7
    """How busy units may be on average before another is started."""
    decode_use: float = 0.8
    start_s: float = 60.0
    """From the start of a unit until it works."""
    period_s: float = 5.0
    """Between decisions."""
    hold_s: float = 600.0
    """A unit is given up if it was not needed for so long."""
    drain_timeout_s: float = 120.0
    """How long what a drained unit holds may go on there; what is left then goes on elsewhere."""

    @property
    def is_on(self) -> bool:
        return self.mode != OFF


@dataclass(frozen=True)
class GatewayConfig:
    """Who may ask the gateway from where, and what it writes down of it."""

    processes: int = 1
    """Gateway processes, which take requests on one port. The first of them holds the front."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beyond this machine's own by which a server without keys on a loopback address may be
    asked.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins, as "https://chat.example", whose pages a browser lets read the answers; "*": any. A
    server without keys on a loopback address also answers pages of this machine.
    """
    open_metrics: bool = True
    """/metrics needs no key. False: it needs one that has the right to operate, as /audit and
    /trace do.
    """
    access_log: str = "on"
    """A line for each request: "on" or "off"."""


@dataclass(frozen=True)
class LimitsConfig:
    """What one client may ask for. Beyond a limit the reply is 400, 413 or 429, never a crash."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int = 0
    """0: the model's context less one."""
    max_output_tokens: int = 0
    """0: the model's context."""
    default_output_tokens: int = 2048
    max_n: int = 8
    max_running: int = 256
    """Generations the front works on at once; more wait."""
    max_queued: int = 512
    """Generations that wait at the front, or a tenant's equal share of so many while others wait as
    well; more get 429 and Retry-After.
    """
    max_retries: int = 8
    """Retries of one request that lost a unit. Preemptions do not count."""
    request_timeout_s: float = 600.0


@dataclass(frozen=True)
class Deployment:
    """Everything `hadal serve` needs to know."""

    model: str = ""
    """Folder of the model. Empty: hadal-tiny, which ships with Hadal."""
    model_name: str = ""
    """Name in the API. Empty: the folder's name."""
    host: str = "127.0.0.1"
    port: int = 8000
    chunk_tokens: int = 512
    """Token budget of a rank in a prefill step."""
    wire: str = "fp32"
    """What tokens are on their way to experts: "fp32" both ways, or "fp8" / "fp8_pow2": FP8 E4M3
    out with a scale per 128 channels (any FP32 / a power of two), BF16 back.
    """
    transport: str = "auto"
    """Between the ranks of a unit: "tcp", "gloo", "nccl" or "deepep"; "auto": tcp on CPUs, nccl on
    GPUs, gloo where ranks of a unit share one.
    """
    handover: str = "auto"
    """How KV gets from prefill to decode: "shm" (one host), "nixl" (UCX) or "tcp"; "auto": the best
    that both ends can do.
    """
    early_pull: str = AUTO
    """"auto": a long prompt's KV is pulled while the rest of it is being computed; "off": when it
    is done.
    """
    device: str = "auto"
    """"cpu", "cuda"; "auto": cpu, for a GPU runs plain torch ops so far."""
    device_memory_gb: float = 0.0
    """Memory of a GPU that weights, KV and buffers must fit in, 10^9 bytes. 0: what the GPUs of
    this machine have.
    """
    lease_s: float = 30.0
    """How long prefilled KV is held for the decode side."""
    heartbeat_s: float = 0.5
    rank_timeout_s: float = 1.5
    """A rank silent or stuck in one op for this long, though it could run, is dropped from its unit
    and restarted.
    """
    collective_timeout_s: float = 10.0
    """Deadline of one exchange between ranks."""
    unit_timeout_s: float = 2.0
    """A unit silent for this long, though it could run, is given up and restarted."""
    drain_timeout_s: float = 120.0
    keep_alive_s: float = 10.0
    """A waiting stream gets a comment this often."""
    prefill: UnitsConfig = field(default_factory=UnitsConfig)
    decode: UnitsConfig = field(default_factory=UnitsConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)

    def __post_init__(self) -> None:
        check(self)

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
    return build(Deployment, fields, str(path))


def check(deployment: Deployment) -> None:
    """Raise ConfigError naming the first field that cannot work."""
    _check_sizes(deployment, "")
    if not 0 <= deployment.port <= 65535:
        raise ConfigError(f"port is {deployment.port}; 0 to 65535 is allowed (0 picks a free one).")
    for name in _POSITIVE:
        if getattr(deployment, name) <= 0:
            raise ConfigError(f"{name} is {getattr(deployment, name)}; it must be positive.")
    if deployment.device_memory_gb < 0:
        raise ConfigError(
            "device_memory_gb cannot be negative; 0 takes what the GPUs of this machine have."
        )
    for name, known in _NAMES.items():
        _check_name(name, getattr(deployment, name), known)
    if deployment.device == "cpu" and deployment.transport in ("nccl", "deepep"):
        raise ConfigError(
            f"transport {deployment.transport!r} needs GPUs, and device is 'cpu'. CPUs take tcp or"
            " gloo."
        )
    if deployment.gateway.processes < 1:
        raise ConfigError(
            f"gateway.processes is {deployment.gateway.processes}; it must be at least 1."
        )
    _check_name("gateway.access_log", deployment.gateway.access_log, ("on", OFF))
    for name in ("memory", "recompute"):
        _check_name(f"cache.{name}", getattr(deployment.cache, name), (AUTO, OFF))
    if deployment.cache.disk_mb < 1:
        raise ConfigError(
            f"cache.disk_mb is {deployment.cache.disk_mb}; leave cache.folder empty for no disk"
            " cache."
        )
    if not 0 <= deployment.ledger.gpu_hour_usd < 1e6:
        raise ConfigError(
            f"ledger.gpu_hour_usd is {deployment.ledger.gpu_hour_usd}; 0 to 1e6 dollars are"
            " allowed."
        )
    _check_deadlines(deployment)
    _check_fleet(deployment)
    for kind in ROLES:
        _check_units(kind, getattr(deployment, kind))
    total = sum(deployment.num_units_max(kind) * units_of(deployment, kind).ranks for kind in ROLES)
    if total > _MOST_RANKS:
        raise ConfigError(
            f"prefill and decode: their units have {total:,} ranks together; {_MOST_RANKS:,}"
            " can be."
        )
    for name in (
        "max_body_bytes",
        "default_output_tokens",
        "max_n",
        "max_running",
        "request_timeout_s",
    ):
        if getattr(deployment.limits, name) <= 0:
            raise ConfigError(
                f"limits.{name} is {getattr(deployment.limits, name)}; it must be positive."
            )
    for limit in dataclasses.fields(deployment.limits):
        if getattr(deployment.limits, limit.name) < 0:
            raise ConfigError(f"limits.{limit.name} cannot be negative.")


_MOST_S = 31 * 86_400.0
_MOST: dict[str, float] = {
    "units": 1 << 12,
    "prefill_max": 1 << 12,
    "decode_max": 1 << 12,
    "bundle_prefill": 1 << 12,
    "bundle_decode": 1 << 12,
    "ranks": 1 << 11,
    "ranks_per_node": 1 << 11,
    "redundant_experts": 1 << 14,
    "threads": 1 << 12,
    "chunk_tokens": 1 << 20,
    "max_requests": 1 << 16,
    "kv_blocks": 1 << 48,
    "kv_memory_mb": 1 << 32,
    "device_memory_gb": 1e6,
    "prefill_tokens_per_s": 1e15,
    "decode_tokens_per_s": 1e15,
    "max_n": 1 << 10,
    "max_body_bytes": 1 << 32,
    "processes": 64,
}
"""Of fields by their names, wherever they stand: far more than anybody has, and still answered in
seconds.
"""
_MOST_OTHERS = 1 << 40
_MOST_RANKS = 1 << 17
"""Of all units together: DeepSeek's published day had 2,200 GPUs at its peak."""
_MOST_CHARS = 4096
"""Of a name or a path, as Linux has it."""


def _check_sizes(table: Any, where: str) -> None:
    """Raise ConfigError for the first value that nobody can mean: no number, no time, no size of
    this world.
    """
    for one in dataclasses.fields(table):
        name, value = f"{where}{one.name}", getattr(table, one.name)
        if dataclasses.is_dataclass(value):
            _check_sizes(value, f"{name}.")
        elif isinstance(value, str) and (len(value) > _MOST_CHARS or not value.isprintable()):
            raise ConfigError(
                f"{name} is {shown(value)}; it is too long, or holds a line's end or a zero byte."
            )
        elif isinstance(value, int | float):
            most = _MOST.get(one.name, _MOST_S if one.name.endswith("_s") else _MOST_OTHERS)
            if not abs(value) <= most:  # So that nan is refused as well.
                raise ConfigError(f"{name} is {shown(value)}; {most:,.0f} can be at most.")


_POSITIVE = (
    "chunk_tokens",
    "lease_s",
    "heartbeat_s",
    "rank_timeout_s",
    "collective_timeout_s",
    "unit_timeout_s",
    "drain_timeout_s",
    "keep_alive_s",
)
_NAMES: dict[str, tuple[str, ...]] = {
    "wire": ("fp32", "fp8", "fp8_pow2"),
    "transport": ("auto", "tcp", "gloo", "nccl", "deepep"),
    "device": ("auto", "cpu", "cuda"),
    "handover": ("auto", "shm", "nixl", "tcp"),
    "early_pull": (AUTO, OFF),
}
_UNIT_NAMES: dict[str, tuple[str, ...]] = {
    "overlap": ("auto", "sequential", "prefill_dual", "decode_five"),
    "mode": ("", "normal", "low_latency"),
    "expert_balance": (AUTO, OFF),
    "request_balance": (AUTO, NO_MOVES, OFF, TURNS),
}


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{name} is {shown(value)}; known are {', '.join(repr(one) for one in known)}."
        )


def _check_deadlines(deployment: Deployment) -> None:
    """Each must leave the ones below it time to speak first."""
    if deployment.unit_timeout_s <= 2 * deployment.heartbeat_s:
        raise ConfigError("unit_timeout_s must exceed two heartbeats (heartbeat_s).")
    if deployment.rank_timeout_s < 4 * RANK_BEAT_S:
        raise ConfigError(
            f"rank_timeout_s is {deployment.rank_timeout_s}; ranks report every {RANK_BEAT_S} s, so"
            f" it must be {4 * RANK_BEAT_S:g} at least, or ranks that are well are dropped."
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


_FLEET_MAX_S = 86_400.0
"""The fleet looks no further than a day: then another like it begins."""


def _check_fleet(deployment: Deployment) -> None:
    fleet = deployment.fleet
    _check_name("fleet.mode", fleet.mode, (AUTO, OFF))
    for name in ("start_s", "period_s", "drain_timeout_s"):
        if not 0 < getattr(fleet, name) <= _FLEET_MAX_S:
            raise ConfigError(
                f"fleet.{name} is {getattr(fleet, name):g}; it must be positive, and"
                f" {_FLEET_MAX_S:g} s at most."
            )
    for kind in ROLES:
        most, units = getattr(fleet, f"{kind}_max"), getattr(deployment, kind).units
        if (
            min(most, getattr(fleet, f"bundle_{kind}")) < 0
            or not 0 <= getattr(fleet, f"{kind}_tokens_per_s") < 1e15
        ):
            raise ConfigError(
                f"fleet: {kind}_max, bundle_{kind} and {kind}_tokens_per_s are numbers from 0 on."
            )
        if most and most < units:
            raise ConfigError(
                f"fleet.{kind}_max is {most}, and {kind}.units, the floor, is {units}. Raise the"
                " first."
            )
        if not 0.0 < getattr(fleet, f"{kind}_use") <= 1.0:
            raise ConfigError(
                f"fleet.{kind}_use is {getattr(fleet, f'{kind}_use'):g}; it is a share, of (0, 1]."
            )
    if not 0 <= fleet.hold_s <= _FLEET_MAX_S:
        raise ConfigError(f"fleet.hold_s is {fleet.hold_s:g}; 0 to {_FLEET_MAX_S:g} s are allowed.")
    if bool(fleet.bundle_prefill) != bool(fleet.bundle_decode):
        raise ConfigError(
            "fleet: a bundle has units of both roles; set bundle_prefill and bundle_decode, or"
            " neither."
        )


def _check_units(kind: str, units: UnitsConfig) -> None:
    if units.units < 1 or units.max_requests < 1 or units.max_waiting < 0:
        raise ConfigError(
            f"{kind}: units and max_requests must be at least 1, max_waiting at least 0."
        )
    for name in ("ranks", "ranks_per_node"):
        if getattr(units, name) < 1:
            raise ConfigError(f"{kind}.{name} is {getattr(units, name)}; it must be at least 1.")
    if units.ranks > units.ranks_per_node and units.ranks % units.ranks_per_node:
        raise ConfigError(
            f"{kind}.ranks is {units.ranks}, which does not fill nodes of {units.ranks_per_node}. "
            f"Take a multiple, or change {kind}.ranks_per_node."
        )
    for name in ("redundant_experts", "min_split_tokens", "threads", "kv_blocks", "kv_memory_mb"):
        if getattr(units, name) < 0:
            raise ConfigError(f"{kind}.{name} cannot be negative.")
    if units.redundant_experts and units.ranks == 1:
        raise ConfigError(
            f"{kind}.redundant_experts is {units.redundant_experts} with one rank: there is no"
            f" second rank to hold a replica. Raise {kind}.ranks or leave it 0."
        )
    for name, known in _UNIT_NAMES.items():
        _check_name(f"{kind}.{name}", getattr(units, name), known)
    if kind == PREFILL and units.request_balance == NO_MOVES:
        raise ConfigError(
            "prefill.request_balance is 'no_moves'; prompts never move. Take 'auto', 'off' or"
            " 'turns'."
        )


# Frozen tables as a TOML file that core/config reads back: what is not as it is by default, or all
# of it.
#
# A deployment, a study: a dataclass whose fields are numbers, strings, tuples of those or of
# dataclasses, or dataclasses.


_NOTE_COLUMN = 36


def to_toml(
    value: Any,
    heading: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
    *,
    is_whole: bool = False,
) -> str:
    """Text that is read as this value.

    `heading`: lines of a comment at the top. `notes`: by field, such as "decode.ranks", what is
    said of it; a field that has a note is written down even if it is as it is by default.
    `is_whole`: and so are all others.
    """
    lines = [f"# {line}".rstrip() for line in heading]
    lines += ["", *_tables(value, "", notes or {}, is_whole)]
    return "\n".join(lines).strip() + "\n"


def _tables(value: Any, path: str, notes: Mapping[str, str], is_whole: bool) -> Iterator[str]:
    """A table's fields, then the tables in it."""
    inner = []
    for each in dataclasses.fields(value):
        found, note = getattr(value, each.name), notes.get(path + each.name, "")
        if dataclasses.is_dataclass(found):
            inner.append((f"{path}{each.name}", found))
        elif is_whole or note or found != each.default:
            line = f"{each.name} = {_text(found)}"
            yield f"{line:<{_NOTE_COLUMN}}# {note}" if note else line
    for name, table in inner:
        lines = list(_tables(table, f"{name}.", notes, is_whole))
        if lines:
            yield from ("", f"[{name}]", *lines)


def _text(value: Any) -> str:
    """A value on one line."""
    if dataclasses.is_dataclass(value):
        fields = (
            f"{each.name} = {_text(getattr(value, each.name))}"
            for each in dataclasses.fields(value)
        )
        return f"{{ {', '.join(fields)} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings and numbers are TOML's.
