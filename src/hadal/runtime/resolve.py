"""Turns what was asked into what will run: every derived field of a deployment filled in, every
early mistake named.

Looks at the model's folder and at this machine; starts nothing and loads no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from hadal.core.balance import OFF
from hadal.core.config import (
    DECODE,
    PREFILL,
    ROLES,
    ClusterConfig,
    Deployment,
    LedgerConfig,
    UnitsConfig,
    num_cache_layers,
)
from hadal.core.documents import is_folder
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.families import why_no_folder
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import (
    ModelConfig,
    check_accepted,
    read_model_config,
    unknown_keys,
)
from hadal.kernels.build import PLAIN, BuildError, instruction_set, runs_plain
from hadal.kv.names import VERSION
from hadal.runtime.amounts import gb
from hadal.runtime.batches import batches_url
from hadal.runtime.cache_folder import absolute_folder, cache_warnings, make_cache_folder
from hadal.runtime.devices import cpu_kind, gpus
from hadal.runtime.headers import stored_weights
from hadal.runtime.ledger.store import file_of, ledger_url
from hadal.runtime.memory import MemoryPlan, plan_memory, ranks_in_fp32, why_not_fit, with_blocks
from hadal.runtime.pool_sizes import Room
from hadal.runtime.topology import launch_plan, why_not_anywhere, why_not_here
from hadal.runtime.transfer.nixl import require_nixl
from hadal.runtime.transfer.pool import POOL_DTYPE, free_shm_bytes, no_room
from hadal.runtime.weight_check import check_weights
from hadal.stats.prices import micro_usd, price_list

# What KV depends on besides its text, in one word: the model's files, the layout of a block, the
# precision.
#
# Equal fingerprints mean that a block of one deployment may be used by the other. Of a large
# checkpoint a page out of every tensor is read, and one of every PIECE_BYTES of a large tensor, so
# a fine-tune of equal shapes has another fingerprint even if it trained one tensor alone, and 700
# GB take seconds. A few rows changed by hand may pass: rename the file. A file up to WHOLE_BYTES is
# read whole.


FINGERPRINT_BYTES = 16
WHOLE_BYTES = 16 * 1024 * 1024
NUM_SAMPLES = 64
"""Samples that are taken of a larger file, at least: over all of it where it has fewer tensors."""
SAMPLE_BYTES = 4096
PIECE_BYTES = 16 * 1024 * 1024
NUM_THREADS = 16
"""They wait for reads: a disk answers as many at once, and one over a network takes a millisecond
for each.
"""
_HEADER_MAX_BYTES = 100_000_000
"""The format's own limit (safetensors)."""


def fingerprint_of(
    deployment: Deployment, config: ModelConfig, dtype: str, model_digest: str
) -> str:
    """Hex digits. `dtype`: of the pools."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    layout = BLOCK_TOKENS, num_cache_layers(deployment, config), config.entry_dim
    _add(
        digest,
        VERSION,
        repr(layout).encode(),
        dtype.encode(),
        deployment.dispatch_format.encode(),
        deployment.compute.encode(),
        deployment.device.encode(),
        model_digest.encode(),
    )
    if deployment.device == "cpu":  # Plain torch and each instruction set round differently.
        computed = PLAIN if runs_plain() else instruction_set()
        _add(digest, computed.encode(), cpu_kind().encode())
    return digest.hexdigest()


def digest_of_model(folder: Path) -> str:
    """Hex digits of config.json and the weights. Raises CheckpointError if a file cannot be read."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    try:
        _add(digest, (folder / "config.json").read_bytes())
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for of_file in threads.map(_digest_of, files):
                _add(digest, of_file)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be read ({error.strerror})."
        ) from error
    return digest.hexdigest()


def _add(digest: blake2b, *parts: bytes) -> None:
    """Each with its length: what is at the end of one cannot be taken for the beginning of the
    next.
    """
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)


def _digest_of(path: Path) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        _add(digest, path.name.encode(), struct.pack("<Q", size))
        if size <= WHOLE_BYTES:
            _add(digest, path.read_bytes())
            return digest.digest()
        start = os.pread(file.fileno(), 8, 0)
        header_bytes = min(struct.unpack("<Q", start)[0], _HEADER_MAX_BYTES, size - 8)
        header = os.pread(file.fileno(), header_bytes, 8)
        _add(digest, header)
        for offset in _sample_offsets(header, size):
            _add(digest, os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()


def _sample_offsets(header: bytes, size: int) -> list[int]:
    """Where to look: in the middle of every piece of every tensor, and over the file where there
    are few of them.
    """
    data_at = 8 + len(header)
    spans: list[tuple[int, int]] = []
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        # Where it is no header, the model's loader will say so, and samples over the whole do.
        spans = [
            (data_at + begin, min(data_at + end, size))
            for entry in json.loads(header).values()
            if "data_offsets" in entry
            for begin, end in [entry["data_offsets"]]
            if 0 <= begin < end
        ]
    offsets = {
        max(at, (at + min(at + PIECE_BYTES, end) - SAMPLE_BYTES) // 2)
        for begin, end in spans
        for at in range(begin, end, PIECE_BYTES)
    }
    num_more = max(0, NUM_SAMPLES - len(offsets))
    offsets |= {data_at + index * (size - data_at) // num_more for index in range(num_more)}
    return sorted(offsets)


MODEL_VARIABLE = "HADAL_MODEL"
_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "models" / "hadal-tiny").resolve()
"""Part of the package, so that a wheel has it; in a checkout a link leads to the folder beside
src/.
"""
_CONFIGS = (_PACKAGE / "configs").resolve()
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
"""A model's folder has one of them, or both; the gateway reads the first that is there."""
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups, of which a process is in one (version 2) or in one for each controller (version 1)."""


@dataclass(frozen=True)
class Resolved:
    """A deployment ready to be started, and what its banner says of it."""

    deployment: Deployment
    config: ModelConfig
    memory: MemoryPlan
    precision: str
    """Precision of the checkpoint, as its files say; empty where only config.json was read."""
    fingerprint: str = ""
    """What KV depends on besides its text; empty where only config.json was read."""
    model_digest: str = ""
    """Of config.json and the weights; empty where only config.json was read."""


def plan(deployment: Deployment, room: Room | None = None) -> Resolved:
    """Fill in what is left to be derived, from config.json and this machine; needs no weights.
    `room`: of another machine; None: of this one.

    Raises ConfigError or CheckpointError, one line that says what to change, if the deployment
    cannot work anywhere.
    """
    check_accepted(deployment.accept_config)
    folder = model_folder(deployment.model)
    config = read_model_config(folder, deployment.accept_config)
    found = gpus() if deployment.device == "cuda" else ()
    # Not a GPU that happens to be there: it has no kernels of ours yet, plain torch ops alone.
    device = "cpu" if deployment.device == "auto" else deployment.device
    transport = deployment.transport
    if transport == "auto":
        transport = (
            "tcp"
            if device == "cpu"
            else "gloo"
            if 0 < len(found) < _most_ranks(deployment)
            else "nccl"
        )
    if device == "cpu" and transport in ("nccl", "deepep"):
        raise ConfigError(
            f"transport {transport!r} needs GPUs, and this machine has none. CPUs take tcp or gloo."
        )
    deployment = msgspec.structs.replace(
        deployment,
        model=str(folder),
        model_name=deployment.model_name or folder.name,
        device=device,
        transport=transport,
        device_memory_gb=deployment.device_memory_gb or min(found, default=0) / 1e9,
        prefill=_with_threads(deployment.prefill),
        decode=_with_threads(deployment.decode),
        cache=msgspec.structs.replace(
            deployment.cache, folder=absolute_folder(deployment.cache.folder)
        ),
        ledger=_ledger(deployment),
        cluster=_named(deployment),
    )
    stored = stored_weights(folder)
    why_no_mtp = check_weights(folder, config) if stored is not None else ""
    asked, deployment = deployment.decode.drafts, _with_drafts(deployment, config, why_no_mtp)
    precision = stored.precision if stored is not None else ""
    try:
        is_plain = runs_plain()
    except BuildError as error:
        raise ConfigError(str(error)) from None
    memory = plan_memory(
        deployment, config, precision, is_plain=is_plain, room=room or _room_here()
    )
    memory = dataclasses.replace(
        memory,
        warnings=(
            *memory.warnings,
            *cache_warnings(deployment, memory),
            *_drafts_warnings(asked, deployment, config, why_no_mtp),
            *unknown_keys_warnings(deployment),
        ),
    )
    return Resolved(with_blocks(deployment, memory), config, memory, precision)


def _with_drafts(deployment: Deployment, config: ModelConfig, why: str) -> Deployment:
    """Return the deployment without drafts where there is no MTP module to make them; `why`: its
    tensors cannot be read. Raises ConfigError if drafts are asked for by number.
    """
    drafts = deployment.decode.drafts
    if not drafts or not (why or not config.num_nextn_predict_layers):
        return deployment
    if not isinstance(drafts, str):
        raise ConfigError(
            f"decode.drafts (--drafts) is {drafts}, and {deployment.model} has no MTP module to make"
            f" them with: {_why_no_module(config, why)}. Set 0 or 'auto', or take a checkpoint that"
            " has it."
        )
    decode = msgspec.structs.replace(deployment.decode, drafts=0)
    return msgspec.structs.replace(deployment, decode=decode)


def _drafts_warnings(
    asked: int | str, deployment: Deployment, config: ModelConfig, why: str
) -> tuple[str, ...]:
    if not asked or deployment.decode.drafts:
        return ()
    return (f"no drafts are made: the model has no MTP module, {_why_no_module(config, why)}.",)


def unknown_keys_warnings(deployment: Deployment) -> tuple[str, ...]:
    """Return a sentence that lists the model's unknown keys; nothing where there are none."""
    names = unknown_keys(Path(deployment.model), deployment.accept_config)
    if not names:
        return ()
    return (f"config.json has keys that Hadal does not know and passes over: {', '.join(names)}.",)


def _why_no_module(config: ModelConfig, why: str) -> str:
    return why or "its config.json says num_nextn_predict_layers 0"


def _named(deployment: Deployment) -> ClusterConfig:
    """The cluster with its name found out."""
    cluster = deployment.cluster
    name = cluster.name or f"{socket.gethostname()}:{deployment.port}"
    return msgspec.structs.replace(cluster, name=name) if cluster.spans_hosts else cluster


def _ledger(deployment: Deployment) -> LedgerConfig:
    """The ledger with its URL found out and its prices tried. Raises ConfigError."""
    ledger = deployment.ledger
    try:
        price_list(ledger.prices)
        if ledger.batch_prices:
            price_list(ledger.batch_prices)
        micro_usd(ledger.gpu_hour_usd)
    except ValueError as error:
        raise ConfigError(f"ledger: {error}") from None
    url = ledger_url(ledger.url) or OFF
    _check_shared(deployment, url, "ledger", "the ledger is")
    try:
        batches = batches_url(deployment.batches.url, ledger.url, deployment.port) or OFF
    except ConfigError as error:
        raise ConfigError(f"batches.url: {error}") from None
    _check_shared(deployment, batches, "batches", "batches are in")
    return msgspec.structs.replace(ledger, url=url)


def _check_shared(deployment: Deployment, url: str, table: str, what: str) -> None:
    """Raise ConfigError for a file of this host where gateways on others write as well."""
    if deployment.gateway.nodes and url != OFF and (path := file_of(url)) is not None:
        raise ConfigError(
            f"{what} a file of this host, {path}, and gateways on nodes write to it"
            f" as well (gateway.nodes). Set {table}.url to postgresql://... or to 'off'."
        )


def why_not_run(resolved: Resolved) -> list[str]:
    """Why this host cannot run a sound plan, one sentence each; empty if it can, or other hosts
    are to.
    """
    deployment, memory = resolved.deployment, resolved.memory
    if deployment.cluster.spans_hosts:
        return [*why_not_anywhere(deployment), *_gpus_of_a_cluster_too_small(resolved)]
    reasons = _why_not_here(deployment)
    if reasons:
        return reasons
    if (reason := _why_not_read(Path(deployment.model))) is not None:
        reasons.append(reason)
    there_bytes = memory_bytes() if deployment.device == "cpu" else None
    if there_bytes is not None and (reason := why_not_fit(memory, there_bytes)):
        reasons.append(reason)
    found = gpus() if deployment.device == "cuda" else ()
    kv_bytes = memory.kv_bytes
    if deployment.device == "cuda":
        prefill, decode = ranks_in_fp32(deployment, resolved.config)
        kv_bytes = memory.num_ranks[0] * prefill.kv_bytes + memory.num_ranks[1] * decode.kv_bytes
        reasons += _gpus_too_small(
            deployment, found, {PREFILL: prefill.total_bytes, DECODE: decode.total_bytes}
        )
    if kv_bytes > free_shm_bytes():
        reasons.append(no_room(kv_bytes))
    return reasons


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder has what it takes to read prompts."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def _why_not_read(folder: Path) -> str | None:
    """What is missing of a model's folder to read prompts."""
    if has_tokenizer(folder):
        return None
    return (
        f"{folder / TOKENIZERS[0]}: not found, nor {TOKENIZERS[1]}; the gateway needs one of them to"
        " read prompts."
    )


def _why_not_here(deployment: Deployment) -> list[str]:
    """What this host lacks of nodes, cores and GPUs."""
    num_gpus = len(gpus()) if deployment.device == "cuda" else 0
    return why_not_here(deployment, num_cores(), num_gpus)


def _gpus_of_a_cluster_too_small(resolved: Resolved) -> list[str]:
    """A rank has a GPU for itself there, of the size that the deployment says."""
    deployment = resolved.deployment
    there = int(deployment.device_memory_gb * 1e9)
    if deployment.device != "cuda" or not there:
        return []
    ranks = zip(ROLES, ranks_in_fp32(deployment, resolved.config), strict=True)
    return [
        f"a {role} rank holds {gb(rank.total_bytes)} in FP32 (plain torch ops), and a GPU has"
        f" {gb(there)}."
        for role, rank in ranks
        if rank.total_bytes > there
    ]


def _gpus_too_small(
    deployment: Deployment, found: tuple[int, ...], role_to_bytes: dict[str, int]
) -> list[str]:
    """Ranks of all units may lie on one GPU; what they hold together must fit."""
    held = [0] * len(found)
    for process in launch_plan(deployment):
        if process.device is not None:
            held[process.device % len(found)] += role_to_bytes[process.role]
    return [
        f"its ranks on GPU {index} hold {gb(needed)} in FP32 (plain torch ops), and the GPU has"
        f" {gb(there)}."
        for index, (needed, there) in enumerate(zip(held, found, strict=True))
        if needed > there
    ]


def _most_ranks(deployment: Deployment) -> int:
    return max(deployment.prefill.ranks, deployment.decode.ranks)


def resolve(deployment: Deployment) -> Resolved:
    """Plan it, and make sure that this host can start it. Raises ConfigError or CheckpointError."""
    resolved = plan(deployment)
    deployment, memory = resolved.deployment, resolved.memory
    is_here = not deployment.cluster.spans_hosts
    if is_here and (reasons := _why_not_here(deployment)):
        raise ConfigError(reasons[0])
    check_complete(resolved)
    if reasons := why_not_run(resolved):
        raise ConfigError(reasons[0])
    if deployment.handover == "nixl":
        require_nixl()
    make_cache_folder(deployment.cache.folder)
    available = available_bytes() if is_here else None
    if deployment.device == "cpu" and available is not None and memory.total_bytes > available:
        text = (
            f"{memory.total_bytes / 2**30:.1f} GiB are needed and {available / 2**30:.1f} GiB are"
            " free: processes may be killed for want of memory."
        )
        memory = dataclasses.replace(memory, warnings=(*memory.warnings, text))
    return with_digests(dataclasses.replace(resolved, memory=memory))


def check_complete(resolved: Resolved) -> None:
    """Raise CheckpointError where a sound plan has no weights or no tokenizer yet."""
    folder = Path(resolved.deployment.model)
    if not resolved.precision:
        raise CheckpointError(f"{folder}: no *.safetensors file in it.")
    if (reason := _why_not_read(folder)) is not None:
        raise CheckpointError(reason)


def with_digests(resolved: Resolved) -> Resolved:
    """The same with what its weights and its KV are known by. Raises CheckpointError."""
    deployment = resolved.deployment
    digest = digest_of_model(Path(deployment.model))
    return dataclasses.replace(
        resolved,
        model_digest=digest,
        fingerprint=fingerprint_of(deployment, resolved.config, POOL_DTYPE, digest),
    )


def model_folder(model: str) -> Path:
    """The folder asked for, else $HADAL_MODEL, else the model that ships with Hadal. Raises
    ConfigError.
    """
    asked = model or os.environ.get(MODEL_VARIABLE, "")
    try:
        folder = Path(asked).expanduser().absolute() if asked else _SHIPPED
    except RuntimeError:
        raise ConfigError(f"{asked}: that user has no home here. Give the whole path.") from None
    if not is_folder(folder):
        if asked and (why := why_no_folder(asked, folder)) is not None:
            raise ConfigError(why)
        if asked:
            raise ConfigError(
                f"{folder}: no such folder. A Hugging Face folder of a DeepSeek-V3 model is needed"
                f"{'' if model else f' ({MODEL_VARIABLE} names this one)'}."
            )
        raise ConfigError(
            f"{folder}: the model that ships with Hadal is not there. Give one with --model."
        )
    return folder


def deployment_file(asked: Path) -> Path:
    """The file asked for; a bare name such as laptop_ep is that of a deployment which ships with
    Hadal.
    """
    shipped = _CONFIGS / f"{asked}.toml"
    return (
        shipped if asked.name == str(asked) and not asked.exists() and shipped.is_file() else asked
    )


def shipped_deployments() -> list[Path]:
    """The deployment files that ship with Hadal."""
    return sorted(_CONFIGS.glob("*.toml"))


def num_cores() -> int:
    """Cores this process may use: its affinity, or fewer where its control groups have less time."""
    cores = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        for said in _limits("cpu", files):
            with contextlib.suppress(ValueError):  # "max".
                quota, period = map(int, said.split())
                cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where that is not known."""
    return _at_most_the_limit(_meminfo("MemAvailable"))


def _room_here() -> Room | None:
    free_bytes = available_bytes()
    return None if free_bytes is None else Room(free_bytes, free_shm_bytes())


def memory_bytes() -> int | None:
    """All memory of this machine, or as much as the process's control groups may use; None where
    that is not known.
    """
    return _at_most_the_limit(_meminfo("MemTotal"))


def _at_most_the_limit(there: int | None) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        for said in _limits("memory", (name,)):
            with contextlib.suppress(ValueError):
                there = int(said) if there is None else min(there, int(said))
    return there


def _limits(controller: str, names: Sequence[str]) -> Iterator[str]:
    """What files of these names say, of the process's control group and of those around it. Seen from
    a container, its own is often the outermost one.
    """
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _GROUPS / controllers
        own = top / path.lstrip("/")
        for group in (own, *own.parents):
            if not group.is_relative_to(top):
                break
            with contextlib.suppress(OSError):
                yield " ".join((group / name).read_text(encoding="ascii") for name in names)


def _meminfo(name: str) -> int | None:
    """A line of proc(5)'s meminfo, in bytes."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _with_threads(units: UnitsConfig) -> UnitsConfig:
    """All cores for the ranks of one unit: units take turns, ranks of a unit work together."""
    num_ranks_here = min(units.ranks, units.ranks_per_node)
    return msgspec.structs.replace(
        units, threads=units.threads or max(1, num_cores() // num_ranks_here)
    )
