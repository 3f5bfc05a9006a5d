"""One drawn configuration in both implementations: they agree, or the refusal names the key."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hadal.core import model_keys
from hadal.core.errors import CheckpointError
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.model_keys import ConfigKey, Table, Use
from hadal.model.load import load_weights
from hadal.reference import fp8 as codec
from hadal.reference.forward import forward, no_latents
from tests.drawn.cases import CLASS_OF, Case, oracle_config

NUM_TOKENS = 100
TOLERANCE = 1e-4
_NUM_WEIGHTS = 3
"""Draws of weights per configuration. If two experts' scores differ only by rounding,
implementations may choose differently; a misread key shows with all weights.
"""

AGREED, REFUSED = "agreed", "refused"
OBJECTS = {
    "rope": model_keys.ROPE,
    "fp8": model_keys.FP8,
    "compressed": model_keys.COMPRESSED,
    "compressed.group": model_keys.COMPRESSED_GROUP,
    "compressed.weights": model_keys.COMPRESSED_WEIGHTS,
}
"""Name -> table of an object inside config.json."""


@dataclass
class Made:
    """A case's folder, and transformers' results for it."""

    case: Case
    folder: Path
    tokens: torch.Tensor
    logits: torch.Tensor | None = None
    """[T, V]; None: the file must be refused."""
    config: Any = None


def verdict(case: Case, folder: Path) -> str:
    """Return AGREED, REFUSED, or the problem. `folder` must be empty."""
    said = ""
    for attempt in range(_NUM_WEIGHTS):
        inside = folder / str(attempt)
        inside.mkdir()
        said = compare(make(replace(case, seed=case.seed + attempt), inside))
        if said in (AGREED, REFUSED) or "logits" not in said:
            break
    return said


def make(case: Case, folder: Path) -> Made:
    """Write the case's folder as transformers does, with random weights, and compute its logits."""
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(0, 90, (NUM_TOKENS,), generator=generator)
    path = folder / "config.json"
    if case.must_refuse:
        path.write_text(json.dumps(case.fields))
        return Made(case, folder, tokens)
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = oracle_config(case)
    torch.manual_seed(case.seed)
    model = getattr(transformers, f"{CLASS_OF[case.family]}ForCausalLM")(config).float().eval()
    _shake(model)
    quantization = case.fields.get("quantization_config")
    block = None if quantization is None else _block_of(quantization)
    if block is not None:
        _round(model, block)
    with torch.inference_mode():
        logits = model(tokens[None], use_cache=False, return_dict=True).logits[0]
    model.save_pretrained(folder)
    path.write_text(json.dumps(case.fields))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if block is not None:
        names = ("weight_scale_inv", "scale", "qscale_weight")
        is_fp8 = quantization["quant_method"] == "fp8"
        name = names[case.seed % len(names)] if is_fp8 else "weight_scale"
        _store_fp8(folder / "model.safetensors", block, name)
    return Made(case, folder, tokens, logits, config)


def compare(made: Made) -> str:
    """Compare Hadal's reading of the folder; return AGREED, REFUSED, or the problem."""
    case = made.case
    try:
        config = read_model_config(made.folder)
    except CheckpointError as error:
        names = case.must_refuse or case.may_refuse
        is_named = any(name and name in str(error) for name in names)
        return REFUSED if is_named else f"refused for {error}"
    if case.must_refuse:
        return f"served, though {sorted(case.must_refuse)} must be refused"
    if (wrong := _differing_values(config, made.config, case.fields)) is not None:
        return wrong
    try:
        weights = load_weights(made.folder)
        with torch.inference_mode():
            ours, _ = forward(weights, made.tokens, no_latents(weights))
    except (CheckpointError, RuntimeError, IndexError, ValueError) as error:
        return f"not loaded: {error}"
    return _logits_agree(ours, made.logits)


def _logits_agree(ours: torch.Tensor, theirs: torch.Tensor | None) -> str:
    assert theirs is not None
    if not float(theirs.std()) > 0.1:
        return f"logits of transformers are flat: {float(theirs.std()):.3g}"
    apart = float((ours - theirs).abs().max())
    if not apart <= TOLERANCE:
        return f"logits are {apart:.3g} apart"
    best = theirs.topk(2).values
    is_tie = best[:, 0] - best[:, 1] <= 2 * apart
    if not bool(((ours.argmax(-1) == theirs.argmax(-1)) | is_tie).all()):
        return "logits have another best token"
    return AGREED


def _differing_values(config: ModelConfig, theirs: Any, fields: dict[str, Any]) -> str | None:
    """Return a difference in values that a forward pass of 100 tokens does not show, or None."""
    ends = theirs.eos_token_id
    ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    num_mtp = config.num_nextn_predict_layers
    if config.model_type == model_keys.V3:  # Other classes have no default.
        num_mtp = theirs.num_nextn_predict_layers
    elif "num_nextn_predict_layers" in fields:
        num_mtp = fields["num_nextn_predict_layers"]
    is_moe = fields.get("mtp_is_moe", config.model_type != model_keys.JOYAI)
    for name, ours, other in (
        ("eos_token_id", config.eos_token_ids, ends),
        (
            "max_position_embeddings",
            config.max_position_embeddings,
            theirs.max_position_embeddings,
        ),
        ("num_nextn_predict_layers", config.num_nextn_predict_layers, num_mtp),
        ("mtp_is_moe", config.mtp_is_moe, is_moe),
    ):
        if ours != other:
            return f"{name} is {ours}, and transformers has {other}"
    return None


def _shake(model: Any) -> None:
    """Draw all weights so large that every key shows in the logits."""
    for name, parameter in model.named_parameters():
        if name.endswith("k_norm.bias"):
            parameter.data.normal_(0.0, 0.2)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0.0, 0.9 / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0.0, 0.2)


def _block_of(quantization: dict[str, Any]) -> tuple[int, int]:
    found = quantization.get("weight_block_size", [128, 128])
    if quantization["quant_method"] != "fp8":
        group = quantization["config_groups"]["group_0"]
        found = group["weights"]["block_structure"]
    rows, columns = found.split("x") if isinstance(found, str) else found
    return int(rows), int(columns)


def _is_stored_fp8(name: str) -> bool:
    return "_proj" in name and "weights_proj" not in name


def _round(model: Any, block: tuple[int, int]) -> None:
    """Round each matrix to values that FP8 with a scale per block can represent."""
    for name, parameter in model.named_parameters():
        if not _is_stored_fp8(name):
            continue
        # Experts are stacked, with gate and up in one.
        whole = parameter.data if parameter.dim() == 3 else parameter.data[None]
        halves = 2 if "gate_up" in name else 1
        for part in (piece for one in whole for piece in one.chunk(halves)):
            codes, scales = codec.quantise(part, block)
            codec.dequantise(codes[None], scales[None], block, part[None])


def _store_fp8(path: Path, block: tuple[int, int], scale_name: str) -> None:
    """Rewrite the file's matrices as codes, with scales under this ending."""
    tensors = load_file(path)
    for name in [name for name in tensors if _is_stored_fp8(name)]:
        codes, scales = codec.quantise(tensors[name], block)
        tensors[name] = codes
        tensors[f"{name.removesuffix('weight')}{scale_name}"] = scales
    save_file(tensors, path, metadata={"format": "pt"})


Counts = Counter[tuple[str, str]]


def count_keys(counts: Counts, case: Case) -> None:
    """Count the keys of the case's file with a value other than the table's default, as (family,
    key).
    """
    fields = case.fields
    family = fields.get("model_type", case.family)

    def add(found: Any, table: Table, prefix: str) -> None:
        for key, row in table.items() if isinstance(found, dict) else ():
            # A list in the file is a tuple in the table.
            same = found.get(key) == row.default or found.get(key) == _listed(row.default)
            is_other = key in found and not (same and row.use is not Use.SAME)
            if is_other or (key in found and row.default is model_keys.REQUIRED):
                counts[family, f"{prefix}{key}"] += 1

    add(fields, model_keys.CONFIG[family], "")
    for name in ("rope_parameters", "rope_scaling"):
        add(fields.get(name), model_keys.ROPE, "rope.")
    found = fields.get("quantization_config") or {}
    if found.get("quant_method") == "fp8":
        add(found, model_keys.FP8, "fp8.")
    for group in found.get("config_groups", {}).values():
        add(found, model_keys.COMPRESSED, "compressed.")
        add(group, model_keys.COMPRESSED_GROUP, "compressed.group.")
        add(group["weights"], model_keys.COMPRESSED_WEIGHTS, "compressed.weights.")


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def has_key(case: Case, name: str, key: str) -> bool:
    """Return whether the case's file has a key of the table `name` with a value other than its
    default.
    """
    counts: Counts = Counter()
    count_keys(counts, case)
    if name in model_keys.CONFIG:
        return bool(counts[name, key])
    return any(found == f"{name}.{key}" for _, found in counts)


@contextlib.contextmanager
def ignoring(table: Table, key: str) -> Iterator[None]:
    """Read files as if the key were absent."""
    row = table[key]
    table[key] = ConfigKey(Use.INERT, "ignored by a test", row.default)
    try:
        yield
    finally:
        table[key] = row


def read_keys() -> Iterator[tuple[str, Table, str]]:
    """Yield each read key as (family or object, table, key)."""
    for name, table in {**model_keys.CONFIG, **OBJECTS}.items():
        for key, row in list(table.items()):
            if row.use not in (Use.INERT, Use.SELECTS):
                yield name, table, key


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory if there is one: thousands of small checkpoints are written to it."""
    shm = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
