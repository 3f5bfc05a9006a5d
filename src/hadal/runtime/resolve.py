"""Resolution of a requested deployment: fills in every derived field, and refuses one with a
mistake that can be found before the start.

Inspects the model's folder and this machine; starts nothing and loads no torch.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from dataclasses import dataclass
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
)
from hadal.core.documents import is_folder
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.extras import install_hint, missing_modules
from hadal.core.families import why_no_folder
from hadal.core.model_config import ModelConfig, check_accepted, read_model_config, unknown_keys
from hadal.kernels.build import BuildError, runs_plain
from hadal.runtime.amounts import gb
from hadal.runtime.batches import batches_url
from hadal.runtime.cache_folder import absolute_folder, cache_warnings, make_cache_folder
from hadal.runtime.devices import gpus
from hadal.runtime.fingerprint import digest_of_model, fingerprint_of
from hadal.runtime.headers import stored_weights
from hadal.runtime.host_limits import available_bytes, memory_bytes, num_cores
from hadal.runtime.ledger.address import file_of, ledger_url
from hadal.runtime.memory import MemoryPlan, plan_memory, ranks_in_fp32, why_not_fit, with_blocks
from hadal.runtime.pool_sizes import Room
from hadal.runtime.topology import launch_plan, why_not_anywhere, why_not_here
from hadal.runtime.transfer.nixl import require_nixl
from hadal.runtime.transfer.pool import POOL_DTYPE, free_shm_bytes, no_room
from hadal.runtime.weight_check import check_weights
from hadal.stats.prices import micro_usd, price_list

MODEL_VARIABLE = "HADAL_MODEL"
_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = (_PACKAGE / "models" / "hadal-tiny").resolve()
"""Folder of the shipped model, inside the package, so that a wheel has it. In a checkout it is a
link to the folder beside src/.
"""
_CONFIGS = (_PACKAGE / "configs").resolve()
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
"""Tokenizer files. A model's folder has one or both; the gateway reads the first that exists."""


@dataclass(frozen=True)
class Resolved:
    """A deployment ready to start, with the facts that its banner shows."""

    deployment: Deployment
    config: ModelConfig
    memory: MemoryPlan
    precision: str
    """Precision of the checkpoint by its files; empty if only config.json was read."""
    fingerprint: str = ""
    """Fingerprint of KV (runtime/fingerprint); empty before `with_digests`."""
    model_digest: str = ""
    """Digest of config.json and the weights; empty before `with_digests`."""


def plan(deployment: Deployment, room: Room | None = None) -> Resolved:
    """Fill in the derived fields, from config.json and this machine; needs no weights. `room`:
    memory of another machine; None: of this one.

    Raises ConfigError or CheckpointError, one line that says what to change, if the deployment
    cannot work anywhere.
    """
    check_accepted(deployment.accept_config)
    folder = model_folder(deployment.model)
    config = read_model_config(folder, deployment.accept_config)
    found = gpus() if deployment.device == "cuda" else ()
    # "auto" never takes a GPU, for which Hadal has only plain torch ops yet.
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
            f"transport {transport!r} needs GPUs, and this machine has none. Use tcp or gloo."
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
    """Return the deployment without drafts if there is no MTP module to make them; `why`: reason
    its tensors are unreadable. Raises ConfigError if drafts are requested by number.
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
    """Return a sentence that lists the model's unknown keys; empty if there are none."""
    names = unknown_keys(Path(deployment.model), deployment.accept_config)
    if not names:
        return ()
    return (f"config.json has keys that Hadal does not know and ignores: {', '.join(names)}.",)


def _why_no_module(config: ModelConfig, why: str) -> str:
    return why or "its config.json has num_nextn_predict_layers 0"


def _named(deployment: Deployment) -> ClusterConfig:
    """Return the cluster with its name filled in."""
    cluster = deployment.cluster
    name = cluster.name or f"{socket.gethostname()}:{deployment.port}"
    return msgspec.structs.replace(cluster, name=name) if cluster.spans_hosts else cluster


def _ledger(deployment: Deployment) -> LedgerConfig:
    """Return the ledger with its URL filled in and its prices checked. Raises ConfigError."""
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
    """Raise ConfigError if gateways on other hosts would have to write to a file of this host."""
    if deployment.gateway.nodes and url != OFF and (path := file_of(url)) is not None:
        raise ConfigError(
            f"{what} a file of this host, {path}, and gateways on nodes write to it"
            f" as well (gateway.nodes). Set {table}.url to postgresql://... or to 'off'."
        )


def why_not_run(resolved: Resolved) -> list[str]:
    """Return why a valid plan cannot run on this host, or on its cluster if it spans hosts, one
    sentence each; empty if it can.
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
    """Return whether a model's folder has a tokenizer file."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def _why_not_read(folder: Path) -> str | None:
    """Return a sentence if a model's folder lacks a tokenizer; else None."""
    if has_tokenizer(folder):
        return None
    return (
        f"{folder / TOKENIZERS[0]}: not found, nor {TOKENIZERS[1]}; the gateway needs one of them to"
        " read prompts."
    )


def _why_not_here(deployment: Deployment) -> list[str]:
    """Return why this host cannot run the deployment, one sentence each."""
    num_gpus = len(gpus()) if deployment.device == "cuda" else 0
    return why_not_here(deployment, num_cores(), num_gpus)


def _gpus_of_a_cluster_too_small(resolved: Resolved) -> list[str]:
    """Return which ranks exceed a GPU of the cluster, one sentence each. Each rank has its own GPU,
    of the size that the deployment gives.
    """
    deployment = resolved.deployment
    there = int(deployment.device_memory_gb * 1e9)
    if deployment.device != "cuda" or not there:
        return []
    ranks = zip(ROLES, ranks_in_fp32(deployment, resolved.config), strict=True)
    return [
        f"a {role} rank needs {gb(rank.total_bytes)} in FP32 (plain torch ops), and a GPU has"
        f" {gb(there)}."
        for role, rank in ranks
        if rank.total_bytes > there
    ]


def _gpus_too_small(
    deployment: Deployment, found: tuple[int, ...], role_to_bytes: dict[str, int]
) -> list[str]:
    """Return which GPUs are too small for the ranks placed on them, one sentence each. One GPU may
    serve ranks of all units.
    """
    held = [0] * len(found)
    for process in launch_plan(deployment):
        if process.device is not None:
            held[process.device % len(found)] += role_to_bytes[process.role]
    return [
        f"the ranks on GPU {index} need {gb(needed)} in FP32 (plain torch ops), and the GPU has"
        f" {gb(there)}."
        for index, (needed, there) in enumerate(zip(held, found, strict=True))
        if needed > there
    ]


def _most_ranks(deployment: Deployment) -> int:
    return max(deployment.prefill.ranks, deployment.decode.ranks)


def resolve(deployment: Deployment) -> Resolved:
    """Plan and check a deployment; make its cache folder. Raises ConfigError or CheckpointError."""
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
    if deployment.console.mode != OFF and (missing := missing_modules("apps")):
        console = msgspec.structs.replace(deployment.console, mode=OFF)
        deployment = msgspec.structs.replace(deployment, console=console)
        text = f"no pages are served: {install_hint(missing[0])}"
        memory = dataclasses.replace(memory, warnings=(*memory.warnings, text))
    make_cache_folder(deployment.cache.folder)
    available = available_bytes() if is_here else None
    if deployment.device == "cpu" and available is not None and memory.total_bytes > available:
        text = (
            f"{memory.total_bytes / 2**30:.1f} GiB are needed and {available / 2**30:.1f} GiB are"
            " free: processes may be killed for lack of memory."
        )
        memory = dataclasses.replace(memory, warnings=(*memory.warnings, text))
    return with_digests(dataclasses.replace(resolved, deployment=deployment, memory=memory))


def check_complete(resolved: Resolved) -> None:
    """Raise CheckpointError if the weights or the tokenizer of a valid plan are missing."""
    folder = Path(resolved.deployment.model)
    if not resolved.precision:
        raise CheckpointError(f"{folder}: no *.safetensors file in it.")
    if (reason := _why_not_read(folder)) is not None:
        raise CheckpointError(reason)


def with_digests(resolved: Resolved) -> Resolved:
    """Return the plan with the digest of its weights and its fingerprint. Raises CheckpointError."""
    deployment = resolved.deployment
    digest = digest_of_model(Path(deployment.model))
    return dataclasses.replace(
        resolved,
        model_digest=digest,
        fingerprint=fingerprint_of(deployment, resolved.config, POOL_DTYPE, digest),
    )


def model_folder(model: str) -> Path:
    """Return the requested folder, else $HADAL_MODEL, else the shipped one. Raises ConfigError."""
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
    """Return the requested file; the shipped one for a bare name that is no file (laptop_ep)."""
    shipped = _CONFIGS / f"{asked}.toml"
    return (
        shipped if asked.name == str(asked) and not asked.exists() and shipped.is_file() else asked
    )


def shipped_deployments() -> list[Path]:
    """Return the deployment files that ship with Hadal."""
    return sorted(_CONFIGS.glob("*.toml"))


def _room_here() -> Room | None:
    free_bytes = available_bytes()
    return None if free_bytes is None else Room(free_bytes, free_shm_bytes())


def _with_threads(units: UnitsConfig) -> UnitsConfig:
    """Divide the cores among a unit's ranks here: ranks work at the same time, units in turn."""
    num_ranks_here = min(units.ranks, units.ranks_per_node)
    return msgspec.structs.replace(
        units, threads=units.threads or max(1, num_cores() // num_ranks_here)
    )
