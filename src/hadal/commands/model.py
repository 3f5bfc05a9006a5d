"""`hadal model`: what a model's folder holds, what it takes in memory, and which deployment would
serve it. Reads config.json, the headers of weights and the tokenizer; loads no torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hadal.commands.examples import examples
from hadal.commands.served import ServedText, read_served_text, why_not_served

if TYPE_CHECKING:
    from hadal.core.model_config import ModelConfig
    from hadal.runtime.memory import MemoryPlan, StoredWeights

EXIT_NOT_SERVED = 1
EPILOG = examples(
    ("hadal model", "the model that ships with Hadal"),
    ("hadal model ~/models/Moonlight-16B-A3B-Instruct", "a Hugging Face folder"),
    ("hadal model configs/deepseek_v3", "a config.json is enough; weights are then not looked at"),
    ("hadal model FOLDER --memory-gb 512", "what would fit in another machine"),
    after=(
        "Weights on a CPU stay as they are stored, once for all ranks of a host. More of a deployment says"
        " `hadal serve --config FILE --model FOLDER --dry-run`."
    ),
)


@dataclass(frozen=True)
class Fit:
    """How one of the deployments that ship would go with the model."""

    deployment: str
    memory: MemoryPlan | None
    """Weights and pools of all its ranks; None where it goes with the model nowhere."""
    reason: str
    """Why this machine cannot run it; empty: it can."""


def model(
    folder: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder of the model. [dim]HADAL_MODEL, else hadal-tiny[/dim]",
            show_default=False,
        ),
    ] = "",
    memory_gb: Annotated[
        float | None,
        typer.Option(
            help="Memory to fit it in, 10^9 bytes. [dim]what is free here[/dim]", min=0.001, max=1e6
        ),
    ] = None,
    accept_config: Annotated[
        list[str] | None,
        typer.Option(help="As `hadal serve` has it.", metavar="KEY", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Say what a model's folder holds: which model, parameters, bytes, KV of a token, chat template,
    and which deployment would serve it. The exit code is 0 if `hadal serve` would start.
    """
    from hadal.core.model_config import check_accepted, read_model_config, unknown_keys
    from hadal.runtime.memory import stored_weights
    from hadal.runtime.resolve import available_bytes, model_folder

    accepted = tuple(accept_config or ())
    if memory_gb is not None and math.isnan(memory_gb):
        raise typer.BadParameter("a number is needed.", param_hint="--memory-gb")
    check_accepted(accepted)
    path = model_folder(folder)
    config = read_model_config(path, accepted)
    unknown = unknown_keys(path, accepted)
    stored = stored_weights(path)
    memory_bytes = available_bytes() if memory_gb is None else int(memory_gb * 1e9)
    fits = list(_fits(path, accepted, memory_bytes, is_here=memory_gb is None))
    why = why_not_served(path, accepted, None if memory_gb is None else memory_bytes)
    served = _served_text(path, accepted)
    if as_json:
        found = _as_json(path, config, stored, memory_bytes, fits)
        found |= {"unknown_keys": unknown, "chat": None if served is None else asdict(served)}
        typer.echo(json.dumps({**found, "why_not_served": why}, indent=2))
        sys.exit(EXIT_NOT_SERVED if why else 0)
    for title, rows in _sections(path, config, stored, memory_bytes, fits):
        if title == path.name:
            rows += _text_rows(served)
        if title == path.name and unknown:
            rows.append(("unknown keys", f"{', '.join(unknown)}; Hadal passes them over"))
        typer.echo(f"\n{typer.style(title, bold=True)}")
        for name, text in rows:
            typer.echo(f"  {typer.style(f'{name:<16}', dim=True)}{text}")
    typer.echo()
    if why:
        typer.echo(f"hadal model: `hadal serve` would not start: {why}", err=True)
        sys.exit(EXIT_NOT_SERVED)


def _served_text(folder: Path, accepted: tuple[str, ...]) -> ServedText | None:
    """Return what the gateway reads of the folder; None where it cannot, which `why_not_served`
    tells.
    """
    from hadal.core.errors import CheckpointError

    try:
        return read_served_text(folder, accepted)
    except CheckpointError:
        return None


def _text_rows(text: ServedText | None) -> Iterator[tuple[str, str]]:
    if text is None:
        return
    yield "context", f"{text.context_tokens} tokens of a prompt and its reply"
    yield "chat template", text.template or "none; texts are completed"
    yield "tools", f"calls in the form of {text.tools}" if text.tools else "none are called"
    yield "thinking", "yes" if text.thinks else "no"


def _fits(
    folder: Path, accepted: tuple[str, ...], memory_bytes: int | None, *, is_here: bool
) -> Iterator[Fit]:
    """Each deployment that ships, planned with this model. `is_here`: what else this machine lacks
    counts, too.
    """
    from hadal.core.config import read_deployment
    from hadal.core.errors import ConfigError
    from hadal.runtime.memory import why_not_fit
    from hadal.runtime.pool_sizes import Room
    from hadal.runtime.resolve import plan, shipped_deployments, why_not_run

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


def _sections(
    folder: Path,
    config: ModelConfig,
    stored: StoredWeights | None,
    memory_bytes: int | None,
    fits: list[Fit],
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, rows) for people."""
    from hadal.runtime.memory import gb

    yield folder.name, list(_model_rows(folder, config, stored))
    there = "unknown" if memory_bytes is None else gb(memory_bytes)
    rows = [(fit.deployment, fit.reason or _fit_text(fit)) for fit in fits]
    if stored is not None and memory_bytes is not None:
        rows.insert(0, ("as stored", _stored_text(stored, config, memory_bytes)))
    yield f"in {there} of memory", rows


def _model_rows(
    folder: Path, config: ModelConfig, stored: StoredWeights | None
) -> Iterator[tuple[str, str]]:
    from hadal.core.families import FAMILY
    from hadal.runtime.memory import Precision, count_parameters, gb, kv_bytes_per_token
    from hadal.runtime.resolve import TOKENIZERS

    member = FAMILY[config.model_type]
    yield "architecture", f"{member.name} ({config.model_type}, {member.architecture})"
    yield (
        "layers",
        (
            f"{config.num_hidden_layers} of width {config.hidden_size}, the first"
            f" {config.first_k_dense_replace} dense; MTP layers: {config.num_nextn_predict_layers}"
        ),
    )
    yield (
        "experts",
        (
            f"{config.n_routed_experts}, {config.num_experts_per_tok} of them a token, and"
            f" {config.n_shared_experts} shared; groups: {config.n_group}"
        ),
    )
    if config.index_topk is not None:
        yield (
            "indexer",
            (
                f"{config.index_n_heads} heads of width {config.index_head_dim}: a token attends to"
                f" {config.index_topk} positions at most"
            ),
        )
    total, active = count_parameters(config)
    yield "parameters", f"{_count(total)}, {_count(active)} of them for a token (without MTP)"
    if stored is None:
        yield "weights", "none here: config.json alone"
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
    yield (
        "KV",
        (
            f"{per_token / 1e3:.1f} kB a token (FP32), {gb(per_token * context)} for a whole"
            f" context of {context}"
        ),
    )
    found = [name for name in TOKENIZERS if (folder / name).is_file()]
    yield "tokenizer", found[0] if found else "none here; `hadal serve` needs one"


def _stored_text(stored: StoredWeights, config: ModelConfig, memory_bytes: int) -> str:
    from hadal.runtime.memory import gb

    kv_tokens = _kv_tokens_beside(stored, config, memory_bytes)
    if not kv_tokens:
        return f"the weights alone take {gb(stored.num_bytes)}"
    return f"{gb(stored.num_bytes)}, and KV of {kv_tokens} tokens beside one copy of the weights"


def _kv_tokens_beside(stored: StoredWeights, config: ModelConfig, memory_bytes: int) -> int:
    from hadal.runtime.memory import Precision, kv_bytes_per_token

    return max(0, (memory_bytes - stored.num_bytes) // kv_bytes_per_token(config, Precision()))


def _fit_text(fit: Fit) -> str:
    from hadal.runtime.memory import gb, pools_text

    assert fit.memory is not None
    return f"serves it with {gb(fit.memory.total_bytes)}; KV of {pools_text(fit.memory)}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _as_json(
    folder: Path,
    config: ModelConfig,
    stored: StoredWeights | None,
    memory_bytes: int | None,
    fits: list[Fit],
) -> dict[str, Any]:
    from hadal.core.families import FAMILY
    from hadal.runtime.memory import Precision, count_parameters, kv_bytes_per_token

    total, active = count_parameters(config)
    return {
        "folder": str(folder),
        "name": FAMILY[config.model_type].name,
        "model_type": config.model_type,
        "architecture": FAMILY[config.model_type].architecture,
        "num_parameters": total,
        "num_parameters_active": active,
        "stored_bytes": None if stored is None else stored.dtype_to_bytes,
        "kv_bytes_per_token": kv_bytes_per_token(config, Precision()),
        "context_tokens": config.max_position_embeddings,
        "memory_bytes": memory_bytes,
        "kv_tokens_as_stored": (
            None
            if stored is None or memory_bytes is None
            else _kv_tokens_beside(stored, config, memory_bytes)
        ),
        "deployments": [
            {
                "deployment": fit.deployment,
                "needed_bytes": fit.memory.total_bytes if fit.memory is not None else 0,
                "kv_tokens": (
                    {"prefill": fit.memory.prefill.kv_tokens, "decode": fit.memory.decode.kv_tokens}
                    if fit.memory is not None
                    else {}
                ),
                "reason": fit.reason,
            }
            for fit in fits
        ],
    }
