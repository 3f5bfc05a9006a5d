"""Findings of `hadal model` about a folder, as JSON and as rows: the model, its text processing,
and the shipped deployments.

Reads config.json, the headers of weights and the tokenizer; loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hadal.commands.served import ServedText, read_served_text, why_not_served
from hadal.core.config import ROLES, read_deployment
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.families import FAMILY
from hadal.core.model_config import ModelConfig, check_accepted, read_model_config, unknown_keys
from hadal.runtime.amounts import gb, millions
from hadal.runtime.headers import StoredWeights, stored_weights
from hadal.runtime.host_limits import available_bytes
from hadal.runtime.memory import MemoryPlan, why_not_fit
from hadal.runtime.parameters import Precision, count_parameters, kv_bytes_per_token
from hadal.runtime.plan_rows import Row, pools_text
from hadal.runtime.pool_sizes import Room
from hadal.runtime.resolve import TOKENIZERS, model_folder, plan, shipped_deployments, why_not_run


@dataclass(frozen=True)
class Fit:
    """Plan of a shipped deployment for the folder's model."""

    deployment: str
    memory: MemoryPlan | None
    """Memory of all ranks; None if there is no plan, for the reason in `reason`."""
    reason: str
    """Reason why the machine cannot run the deployment, or why there is no plan; "" if it can."""


@dataclass(frozen=True)
class FolderReport:
    """Contents of a model's folder, and plans for a machine with `memory_bytes`."""

    folder: Path
    config: ModelConfig
    stored: StoredWeights | None
    """Sizes of the stored weights; None if the folder has no weights."""
    memory_bytes: int | None
    """Memory available for the model; None if this machine's is unknown."""
    fits: list[Fit]
    unknown_keys: tuple[str, ...]
    text: ServedText | None
    """Tokenizer and templates; None if the gateway cannot read them."""
    why_not_served: str
    """Reason why `hadal serve` would not start; empty if it would."""

    @property
    def kv_tokens_as_stored(self) -> int | None:
        """Tokens of KV that fit into memory with one copy of the weights; None if unknown."""
        if self.stored is None or self.memory_bytes is None:
            return None
        per_token = kv_bytes_per_token(self.config, Precision())
        return max(0, (self.memory_bytes - self.stored.num_bytes) // per_token)


def read_folder(folder: str, accepted: tuple[str, ...], memory_gb: float | None) -> FolderReport:
    """Read a model's folder. `memory_gb`: memory of another machine; None: this one's available
    memory. Raises ConfigError.
    """
    check_accepted(accepted)
    path = model_folder(folder)
    config = read_model_config(path, accepted)
    unknown = unknown_keys(path, accepted)
    stored = stored_weights(path)
    is_here = memory_gb is None
    memory_bytes = available_bytes() if memory_gb is None else int(memory_gb * 1e9)
    fits = list(_fits(path, accepted, memory_bytes, is_here=is_here))
    why = why_not_served(path, accepted, None if is_here else memory_bytes)
    try:
        text = read_served_text(path, accepted)
    except CheckpointError:  # `why` has the reason.
        text = None
    return FolderReport(path, config, stored, memory_bytes, fits, unknown, text, why)


def _fits(
    folder: Path, accepted: tuple[str, ...], memory_bytes: int | None, *, is_here: bool
) -> Iterator[Fit]:
    """Yield the plan of each shipped deployment. `is_here` False (another machine): for a CPU
    deployment, check only the memory.
    """
    room = None if is_here or memory_bytes is None else Room(memory_bytes, memory_bytes)
    for file in shipped_deployments():
        try:
            asked = read_deployment(file, model=str(folder), accept_config=accepted or None)
            resolved = plan(asked, room)
        except ConfigError as error:
            yield Fit(file.stem, None, str(error))
            continue
        is_on_cpu = resolved.deployment.device == "cpu"
        reasons = why_not_run(resolved) if is_here or not is_on_cpu else []
        if is_on_cpu and memory_bytes is not None:
            reasons = [why_not_fit(resolved.memory, memory_bytes), *reasons]
        yield Fit(file.stem, resolved.memory, next(filter(None, reasons), ""))


def sections(found: FolderReport) -> Iterator[tuple[str, list[Row]]]:
    """Yield (title, rows) of each section of the printed report."""
    yield found.folder.name, [*_model_rows(found), *_text_rows(found)]
    memory_bytes, stored = found.memory_bytes, found.stored
    rows = [(fit.deployment, fit.reason or _fit_text(fit)) for fit in found.fits]
    if stored is not None and memory_bytes is not None:
        num_tokens, weights = found.kv_tokens_as_stored, gb(stored.num_bytes)
        text = f"{weights}, and KV of {num_tokens} tokens beside one copy of the weights"
        rows.insert(0, ("as stored", text if num_tokens else f"the weights alone take {weights}"))
    yield f"in {'unknown' if memory_bytes is None else gb(memory_bytes)} of memory", rows


def _fit_text(fit: Fit) -> str:
    assert fit.memory is not None
    return f"serves it with {gb(fit.memory.total_bytes)}; KV of {pools_text(fit.memory)}"


def _model_rows(found: FolderReport) -> Iterator[Row]:
    config, stored = found.config, found.stored
    member = FAMILY[config.model_type]
    yield "architecture", f"{member.name} ({config.model_type}, {member.architecture})"
    dense, modules = config.first_k_dense_replace, config.num_nextn_predict_layers
    shape = f"{config.num_hidden_layers} of width {config.hidden_size}"
    yield "layers", f"{shape}, the first {dense} dense; MTP layers: {modules}"
    routed = f"{config.n_routed_experts}, {config.num_experts_per_tok} of them per token"
    yield "experts", f"{routed}, and {config.n_shared_experts} shared; groups: {config.n_group}"
    if config.index_topk is not None:
        heads = f"{config.index_n_heads} heads of width {config.index_head_dim}"
        yield "indexer", f"{heads}: a token attends to {config.index_topk} positions at most"
    total, active = count_parameters(config)
    yield (
        "parameters",
        (f"{millions(total)}, {millions(active)} of them active per token (without MTP)"),
    )
    if stored is None:
        yield "weights", "none: the folder has only config.json"
    else:
        kinds = sorted(stored.dtype_to_bytes.items(), key=lambda entry: -entry[1])
        parts = ", ".join(
            f"{gb(num_bytes)} {dtype}"
            for dtype, num_bytes in kinds
            if num_bytes > stored.num_bytes / 1000
        )
        files = "file" if stored.num_files == 1 else "files"
        yield "weights", f"{gb(stored.num_bytes)} in {stored.num_files} {files}: {parts}"
    per_token = kv_bytes_per_token(config, Precision())
    context = config.max_position_embeddings
    whole = f"{gb(per_token * context)} for a full context of {context} tokens"
    yield "KV", f"{per_token / 1e3:.1f} kB per token (FP32), {whole}"
    names = [name for name in TOKENIZERS if (found.folder / name).is_file()]
    yield "tokenizer", names[0] if names else "none; `hadal serve` needs one"


def _text_rows(found: FolderReport) -> Iterator[Row]:
    if (text := found.text) is not None:
        yield "context", f"{text.context_tokens} tokens, prompt and reply together"
        yield "chat template", text.template or "none; only text completion"
        yield "tools", f"calls in the format of {text.tools}" if text.tools else "no"
        yield "thinking", "yes" if text.thinks else "no"
    if found.unknown_keys:
        yield "unknown keys", f"{', '.join(found.unknown_keys)}; ignored"


def as_json(found: FolderReport) -> dict[str, Any]:
    """Return the report for --json, sizes in bytes."""
    config, stored = found.config, found.stored
    total, active = count_parameters(config)
    return {
        "folder": str(found.folder),
        "name": FAMILY[config.model_type].name,
        "model_type": config.model_type,
        "architecture": FAMILY[config.model_type].architecture,
        "num_parameters": total,
        "num_parameters_active": active,
        "stored_bytes": None if stored is None else stored.dtype_to_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(config, Precision()),
        "context_tokens": config.max_position_embeddings,
        "memory_bytes": found.memory_bytes,
        "kv_tokens_as_stored": found.kv_tokens_as_stored,
        "deployments": [
            {
                "deployment": fit.deployment,
                "needed_bytes": fit.memory.total_bytes if fit.memory is not None else 0,
                "kv_tokens": (
                    {role: fit.memory.of(role).kv_tokens for role in ROLES}
                    if fit.memory is not None
                    else {}
                ),
                "reason": fit.reason,
            }
            for fit in found.fits
        ],
        "unknown_keys": found.unknown_keys,
        "chat": None if found.text is None else asdict(found.text),
        "why_not_served": found.why_not_served,
    }
