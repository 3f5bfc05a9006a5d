"""Check, by names, shapes and types of tensors, that the weights in a folder can be loaded.

The list of tensors must equal the one that model/load reads;
tests/unit/runtime/test_weight_check.py compares the two. Loads no torch and reads no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadal.core.documents import cut, read_json, shown
from hadal.core.errors import CheckpointError
from hadal.core.model_config import ModelConfig
from hadal.runtime.headers import TensorEntry, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PLAIN, _FP8 = frozenset({"F32", "BF16", "F16"}), "F8_E4M3"
_SCALES = _PLAIN | {"F8_E8M0", "U8"}


@dataclass(frozen=True)
class Wanted:
    """A tensor that the model reads."""

    name: str
    shape: tuple[int, ...]
    is_matrix: bool = True
    """True if FP8 may store it. Other tensors must be FP32, BF16 or FP16."""


def check_weights(folder: Path, config: ModelConfig) -> str:
    """Raise CheckpointError, naming file and tensor, if the model cannot be loaded. Return why its
    MTP module cannot be loaded; empty if it can, or if config.json has none.
    """
    stored = _Stored(folder, config)
    for wanted in model_tensors(config):
        stored.check(wanted)
    try:
        for wanted in mtp_tensors(config):
            stored.check(wanted)
    except CheckpointError as error:
        return str(error).rstrip(".")
    return ""


def model_tensors(config: ModelConfig) -> Iterator[Wanted]:
    """Yield the tensors of the model without MTP modules."""
    dim = config.hidden_size
    yield Wanted("model.embed_tokens.weight", (config.vocab_size, dim))
    for index in range(config.num_hidden_layers):
        yield from _layer(config, index)
    yield Wanted("model.norm.weight", (dim,), is_matrix=False)
    yield Wanted("lm_head.weight", (config.vocab_size, dim))


def mtp_tensors(config: ModelConfig) -> Iterator[Wanted]:
    """Yield the tensors of the first MTP module; none if config.json has none."""
    if not config.num_nextn_predict_layers:
        return
    index, dim = config.num_hidden_layers, config.hidden_size
    prefix = f"model.layers.{index}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Wanted(f"{prefix}{name}.weight", (dim,), is_matrix=False)
    yield Wanted(f"{prefix}eh_proj.weight", (dim, 2 * dim))
    yield from _layer(config, index)


def _layer(c: ModelConfig, index: int) -> Iterator[Wanted]:
    prefix, dim = f"model.layers.{index}.", c.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Wanted(f"{prefix}{name}.weight", (dim,), is_matrix=False)
    yield from _attention(c, f"{prefix}self_attn.")
    if not c.is_moe(index):
        yield from _mlp(f"{prefix}mlp.", dim, c.intermediate_size)
        return
    experts = c.n_routed_experts
    yield Wanted(f"{prefix}mlp.gate.weight", (experts, dim), is_matrix=False)
    yield Wanted(f"{prefix}mlp.gate.e_score_correction_bias", (experts,), is_matrix=False)
    width = c.moe_intermediate_size
    yield from _mlp(f"{prefix}mlp.shared_experts.", dim, c.n_shared_experts * width)
    for expert in range(experts):
        yield from _mlp(f"{prefix}mlp.experts.{expert}.", dim, width)


def _attention(c: ModelConfig, prefix: str) -> Iterator[Wanted]:
    heads, dim, rank = c.num_attention_heads, c.hidden_size, c.q_lora_rank
    if rank:
        yield Wanted(f"{prefix}q_a_proj.weight", (rank, dim))
        yield Wanted(f"{prefix}q_a_layernorm.weight", (rank,), is_matrix=False)
    name = "q_b_proj" if rank else "q_proj"
    yield Wanted(f"{prefix}{name}.weight", (heads * c.qk_head_dim, rank or dim))
    yield Wanted(f"{prefix}kv_a_proj_with_mqa.weight", (c.latent_dim, dim))
    yield Wanted(f"{prefix}kv_a_layernorm.weight", (c.kv_lora_rank,), is_matrix=False)
    both = heads * (c.qk_nope_head_dim + c.v_head_dim)
    yield Wanted(f"{prefix}kv_b_proj.weight", (both, c.kv_lora_rank))
    yield Wanted(f"{prefix}o_proj.weight", (dim, heads * c.v_head_dim))
    if c.index_n_heads is None or c.index_head_dim is None or rank is None:
        return
    width, indexer = c.index_head_dim, f"{prefix}indexer."
    yield Wanted(f"{indexer}wq_b.weight", (c.index_n_heads * width, rank))
    yield Wanted(f"{indexer}wk.weight", (width, dim))
    yield Wanted(f"{indexer}k_norm.weight", (width,), is_matrix=False)
    yield Wanted(f"{indexer}k_norm.bias", (width,), is_matrix=False)
    yield Wanted(f"{indexer}weights_proj.weight", (c.index_n_heads, dim))


def _mlp(prefix: str, dim: int, width: int) -> Iterator[Wanted]:
    yield Wanted(f"{prefix}gate_proj.weight", (width, dim))
    yield Wanted(f"{prefix}up_proj.weight", (width, dim))
    yield Wanted(f"{prefix}down_proj.weight", (dim, width))


class _Stored:
    """Tensors in the headers of a folder's files."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._config = config
        self._headers: dict[str, Mapping[str, TensorEntry]] = {}
        self._name_to_file = read_index(folder)

    def check(self, wanted: Wanted) -> None:
        """Raise CheckpointError if the tensor cannot be read."""
        name, (path, entry) = wanted.name, self._entry(wanted.name)
        if entry.shape != wanted.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(entry.shape)}; config.json asks for"
                f" {list(wanted.shape)}."
            )
        if entry.dtype == _FP8 and not wanted.is_matrix:
            raise CheckpointError(f"{path}: {name} is FP8; only matrices can be.")
        if entry.dtype not in _PLAIN and entry.dtype != _FP8:
            raise CheckpointError(
                f"{path}: {name} is {cut(entry.dtype)}; FP32, BF16, FP16 or FP8 E4M3 can be read."
            )
        if entry.dtype == _FP8:
            self._check_scales(name, entry, path)

    def _check_scales(self, name: str, codes: TensorEntry, path: Path) -> None:
        block = self._config.weight_block_size
        if block is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but config.json has no quantization_config."
            )
        prefix = name.removesuffix("weight")
        names = [f"{prefix}{each}" for each in self._config.scale_names]
        found = next((each for each in names if each in self._name_to_file), None)
        if found is None:
            raise CheckpointError(f"{path}: {name} is FP8, but its scales {names[0]} are missing.")
        scale_path, scales = self._entry(found)
        wanted = tuple(-(-size // part) for size, part in zip(codes.shape, block, strict=True))
        if scales.shape != wanted or scales.dtype not in _SCALES:
            raise CheckpointError(
                f"{scale_path}: {found} is {cut(scales.dtype)} of shape {list(scales.shape)};"
                f" {list(wanted)} in FP32 or E8M0 is needed."
            )

    def _entry(self, name: str) -> tuple[Path, TensorEntry]:
        file = self._name_to_file.get(name)
        if file is None:
            raise CheckpointError(
                f"{self._folder}: tensor {name} is missing; config.json says that the model has it."
            )
        path = self._folder / str(file)
        if file not in self._headers:
            if not path.is_file():
                raise CheckpointError(f"{path}: this shard is missing; {INDEX} names it.")
            self._headers[file] = read_header(path)
        entry = self._headers[file].get(name)
        if entry is None:
            raise CheckpointError(
                f"{path}: tensor {name} is missing, though {INDEX} places it there."
            )
        return path, entry


def read_index(folder: Path) -> dict[str, str]:
    """Return tensor -> name of its file. Raises CheckpointError."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.exists():
        if not single.exists():
            raise CheckpointError(f"{folder}: no weights; neither {SINGLE} nor {INDEX} is there.")
        return dict.fromkeys(read_header(single), SINGLE)
    fields: dict[str, Any] = read_json(index, "weights index", error=CheckpointError)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is {shown(weight_map)}; an object is needed.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file.isprintable():
            raise CheckpointError(
                f"{index}: weight_map says that {shown(name)} is in {shown(file)}; a file name in this"
                " folder is needed."
            )
    return weight_map
