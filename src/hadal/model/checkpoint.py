"""A Hugging Face folder of safetensors, read tensor by tensor out of mapped memory. Knows no
architecture.

Every defect is a CheckpointError that names the file and the tensor. FP8 tensors (E4M3 with
`<name>_scale_inv`) are dequantised straight into where they belong, so a model is never in memory
twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hadal.core.documents import cut, read_json, shown
from hadal.core.errors import CheckpointError
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.placement import EMPTY
from hadal.reference.codec import dequantise, num_scales
from hadal.reference.ops import cos_sin_table
from hadal.reference.params import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAME_CHARS = 200
_MAX_LAYER_DIGITS = 6
_EXPERTS_AT_ONCE = 32
_MAX_AT_ONCE = 4 << 20
"""Values that are converted together: what is needed besides is ten bytes for each."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of one folder by name. Use as a context manager; files are opened when first
    needed.
    """

    def __init__(self, folder: Path, block_size: tuple[int, int] | None) -> None:
        """`block_size`: of the FP8 scales, from config.json; None where no FP8 is expected."""
        self._folder = folder
        self._block_size = block_size
        self._files: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._stack = ExitStack()
        self._file_of_name = self._read_index()
        self._shard_to_path = {shard: folder / shard for shard in self._file_of_name.values()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of_name

    def check_layers(self, num_hidden_layers: int) -> None:
        """Raise CheckpointError if there are layers that the config does not know: it is another
        model.
        """
        for name in self._file_of_name:
            match = re.fullmatch(r"(model\.layers\.([0-9]+)\.)input_layernorm\.weight", name)
            # As text first: a number of five thousand digits is none to Python.
            if match is None or (
                len(match[2]) < _MAX_LAYER_DIGITS and int(match[2]) < num_hidden_layers
            ):
                continue
            if (
                f"{match[1]}eh_proj.weight" not in self._file_of_name
            ):  # MTP modules stand behind the last layer.
                raise CheckpointError(
                    f"{self._path(name)}: holds {cut(name)}, but num_hidden_layers in config.json"
                    f" is {num_hidden_layers}."
                )

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into` with the tensor, converted. Raises CheckpointError: absent, damaged or of
        another shape.
        """
        self.read_each([name], into[None])

    def read_each(self, names: Sequence[str], into: Tensor) -> None:
        """Fill `into` [N, ...] with N tensors of one shape and kind. Together, because the experts
        of a small model are thousands, and each call of torch takes as long as such a matrix.
        """
        at_once = max(1, _MAX_AT_ONCE // max(1, into[0].numel()))
        for first in range(0, len(names), at_once):
            part = names[first : first + at_once]
            tensors = [self._shaped(name, into.shape[1:]) for name in part]
            if tensors[0].dtype != torch.float8_e4m3fn or len({t.dtype for t in tensors}) > 1:
                for index, (name, tensor) in enumerate(zip(part, tensors, strict=True), first):
                    if tensor.dtype == torch.float8_e4m3fn:
                        self._read_fp8([name], [tensor], into[index : index + 1])
                    else:
                        into[index].copy_(tensor)
            else:
                self._read_fp8(part, tensors, into[first : first + len(part)])

    def _shaped(self, name: str, shape: torch.Size) -> Tensor:
        """The tensor as it is stored, which must have this shape and a type that can be read."""
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{self._path(name)}: {name} has shape {list(tensor.shape)}; config.json asks for"
                f" {list(shape)}."
            )
        if tensor.dtype not in _PLAIN and tensor.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{self._path(name)}: {name} is {_dtype(tensor)}; FP32, BF16, FP16 or FP8 E4M3 can"
                " be read."
            )
        return tensor

    def _read_fp8(self, names: Sequence[str], codes: list[Tensor], into: Tensor) -> None:
        """Fill `into` [N, rows, columns]."""
        assert codes, "a model without a tensor was refused before"
        scales = torch.stack(
            [self._scales(name, each) for name, each in zip(names, codes, strict=True)]
        )
        assert self._block_size is not None, "its scales were asked for with it"
        if not bool(torch.isfinite(scales).all()):
            index = int((~torch.isfinite(scales)).flatten(1).any(1).nonzero()[0])
            scale_name = f"{names[index]}_scale_inv"
            raise CheckpointError(
                f"{self._path(scale_name)}: {scale_name} holds values that are not finite."
            )
        stacked = torch.stack([each.view(torch.uint8) for each in codes])
        dequantise(stacked.view(torch.float8_e4m3fn), scales, self._block_size, into)

    def _scales(self, name: str, codes: Tensor) -> Tensor:
        """The scales of an FP8 matrix, in FP32."""
        path = self._path(name)
        if self._block_size is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but config.json has no quantization_config."
            )
        if codes.dim() != 2:
            raise CheckpointError(
                f"{path}: {name} is FP8 with {codes.dim()} dimensions; only matrices can be."
            )
        scale_name = f"{name}_scale_inv"
        if scale_name not in self:
            raise CheckpointError(
                f"{path}: {name} is FP8, but its scales {scale_name} are missing."
            )
        scale_inv, scale_path = self._tensor(scale_name), self._path(scale_name)
        wanted = num_scales((codes.shape[0], codes.shape[1]), self._block_size)
        if scale_inv.shape != wanted:
            raise CheckpointError(
                f"{scale_path}: {scale_name} has shape {list(scale_inv.shape)}; {list(wanted)} is"
                " needed."
            )
        if scale_inv.dtype not in (*_PLAIN, torch.float8_e8m0fnu):
            raise CheckpointError(
                f"{scale_path}: {scale_name} is {_dtype(scale_inv)}; FP32 or E8M0 is needed."
            )
        return scale_inv.float()

    def _tensor(self, name: str) -> Tensor:
        if name not in self:
            raise CheckpointError(
                f"{self._folder}: tensor {name} is missing; config.json says that the model has it."
            )
        path = self._path(name)
        file = self._open(path)
        if name not in self._names[path.name]:
            raise CheckpointError(
                f"{path}: tensor {name} is missing, though {_INDEX} places it there."
            )
        try:
            tensor: Tensor = file.get_tensor(name)
        except (
            SafetensorError,
            OSError,
            ValueError,
            RuntimeError,
            AttributeError,
            KeyError,
        ) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({error}).") from error
        return tensor

    def _path(self, name: str) -> Path:
        return self._shard_to_path[self._file_of_name[name]]

    def _open(self, path: Path) -> Any:
        if path.name not in self._files:
            if not path.is_file():
                raise CheckpointError(f"{path}: this shard is missing; {_INDEX} names it.")
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: damaged or cut off, not a whole safetensors file ({error})."
                ) from error
            self._files[path.name] = file
            self._names[path.name] = frozenset(file.keys())
        return self._files[path.name]

    def _read_index(self) -> dict[str, str]:
        index, single = self._folder / _INDEX, self._folder / _SINGLE
        if not index.exists():
            if not single.exists():
                raise CheckpointError(
                    f"{self._folder}: no weights; neither {_SINGLE} nor {_INDEX} is there."
                )
            self._open(single)
            return dict.fromkeys(self._names[_SINGLE], _SINGLE)
        fields = read_json(index, "weights index", error=CheckpointError)
        if "weight_map" not in fields:
            raise CheckpointError(f"{index}: weight_map is missing.")
        weight_map = fields["weight_map"]
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{index}: weight_map is {shown(weight_map)}; an object is needed."
            )
        seen: set[str] = set()
        for name, file in weight_map.items():
            if isinstance(file, str) and file in seen:
                continue
            if not _is_file_name(file):
                raise CheckpointError(
                    f"{index}: weight_map says that {shown(name)} is in {shown(file)}; a file name"
                    " in this folder is needed."
                )
            seen.add(file)
        return weight_map


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MAX_NAME_CHARS:
        return False
    return value == Path(value).name and value not in ("", ".", "..")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# DeepSeek-V3's tensor names, and how they are fused into ModelWeights. Knows no files; the
# Checkpoint does.
#
# Names and shapes are those of the released model (its README_WEIGHTS and modeling code). Shapes: D
# hidden, V vocabulary, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, F
# FFN width, E experts, I expert width, L MoE layers, S expert slots of a rank.


Advance = Callable[[float, float], None]


def load_weights(
    folder: Path,
    *,
    slot_to_expert_LS: NDArray[np.int16] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    with_mtp: bool = False,
    advance: Advance = lambda done, of: None,
) -> ModelWeights:
    """Read the model in `folder`. Only tensors it needs are touched. Raises CheckpointError naming
    file and tensor.

    `advance` is called with how many layers are read, of how many.

    `slot_to_expert_LS`: the expert in each slot of this rank, by MoE layer (EMPTY: none); only
    these are read. None: all experts, in order. An MTP module always has all of its own.
    """
    config = read_model_config(folder)
    with Checkpoint(folder, config.weight_block_size) as checkpoint:
        checkpoint.check_layers(config.num_hidden_layers)
        return _Loader(
            checkpoint, config, slot_to_expert_LS, dtype, torch.device(device), advance
        ).model(with_mtp)


def read_experts(
    checkpoint: Checkpoint, layer_index: int, experts: Sequence[int], gate_up: Tensor, down: Tensor
) -> None:
    """Fill gate_up [N, 2I, D] and down [N, D, I] with routed experts of a layer (index among all
    layers).
    """
    prefixes = [f"model.layers.{layer_index}.mlp.experts.{expert}." for expert in experts]
    read_mlps(checkpoint, prefixes, gate_up, down)


def read_mlps(
    checkpoint: Checkpoint, prefixes: Sequence[str], gate_up: Tensor, down: Tensor
) -> None:
    """Fill gate_up [N, 2F, D] and down [N, D, F] with the networks whose tensors' names begin with
    the prefixes.
    """
    width = down.shape[2]
    for name, into in (
        ("gate_proj", gate_up[:, :width]),
        ("up_proj", gate_up[:, width:]),
        ("down_proj", down),
    ):
        checkpoint.read_each([f"{prefix}{name}.weight" for prefix in prefixes], into)


def _runs(held: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """(expert slot, expert) pairs, cut where a slot between is empty."""
    runs: list[list[tuple[int, int]]] = []
    for pair in held:
        if runs and runs[-1][-1][0] == pair[0] - 1:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


class _Loader:
    """Reads tensors into newly made, already fused destinations."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        slot_to_expert_LS: NDArray[np.int16] | None,
        dtype: torch.dtype,
        device: torch.device,
        advance: Advance,
    ) -> None:
        self._advance = advance
        self._checkpoint = checkpoint
        self._config = config
        self._slot_to_expert_LS = slot_to_expert_LS
        self._dtype = dtype
        self._device = device

    def model(self, with_mtp: bool) -> ModelWeights:
        config = self._config
        with_mtp = with_mtp and config.num_nextn_predict_layers > 0
        return ModelWeights(
            config=config,
            embed_VD=self._one("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
            layers=tuple(self._layer(index) for index in range(config.num_hidden_layers)),
            norm_D=self._one("model.norm.weight", config.hidden_size),
            head_VD=self._one("lm_head.weight", config.vocab_size, config.hidden_size),
            mtp=self._mtp() if with_mtp else None,
            cos_sin=cos_sin_table(config).to(self._device),
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        is_moe = config.is_moe(index)
        return LayerWeights(
            attn_norm_D=self._one(f"{prefix}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{prefix}self_attn."),
            ffn_norm_D=self._one(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            mlp=None if is_moe else self._mlp(f"{prefix}mlp.", config.intermediate_size),
            moe=self._moe(index, f"{prefix}mlp.") if is_moe else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c = self._config
        heads, dim, latent = c.num_attention_heads, c.hidden_size, c.kv_lora_rank
        q_rows = heads * c.qk_head_dim if c.q_lora_rank is None else c.q_lora_rank
        q_name = "q_proj" if c.q_lora_rank is None else "q_a_proj"
        qkv_a = self._empty(q_rows + latent + c.qk_rope_head_dim, dim)
        self._checkpoint.read(f"{prefix}{q_name}.weight", qkv_a[:q_rows])
        self._checkpoint.read(f"{prefix}kv_a_proj_with_mqa.weight", qkv_a[q_rows:])
        # Per head N rows of W_UK, then W rows of W_UV.
        kv_b = self._one(
            f"{prefix}kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), latent
        )
        w_uk, w_uv = torch.split(
            kv_b.view(heads, -1, latent), [c.qk_nope_head_dim, c.v_head_dim], dim=1
        )
        has_lora = c.q_lora_rank is not None
        return AttentionWeights(
            qkv_a=qkv_a,
            q_a_norm_Q=self._one(f"{prefix}q_a_layernorm.weight", q_rows) if has_lora else None,
            q_b=self._one(f"{prefix}q_b_proj.weight", heads * c.qk_head_dim, q_rows)
            if has_lora
            else None,
            kv_a_norm_C=self._one(f"{prefix}kv_a_layernorm.weight", latent),
            w_uk_HNC=w_uk.contiguous(),
            w_uv_HWC=w_uv.contiguous(),
            o=self._one(f"{prefix}o_proj.weight", dim, heads * c.v_head_dim),
        )

    def _mlp(self, prefix: str, width: int) -> MlpWeights:
        mlp = MlpWeights(
            self._empty(2 * width, self._config.hidden_size),
            self._empty(self._config.hidden_size, width),
        )
        read_mlps(self._checkpoint, [prefix], mlp.gate_up[None], mlp.down[None])
        return mlp

    def _moe(self, index: int, prefix: str) -> MoeWeights:
        c = self._config
        slots: Sequence[int] = range(c.n_routed_experts)
        if self._slot_to_expert_LS is not None and index < c.num_hidden_layers:
            slots = self._slot_to_expert_LS[index - c.first_k_dense_replace].tolist()
        moe = MoeWeights(
            # The gate stays FP32 whatever the rest is: a rounded score sends a token elsewhere.
            router_ED=self._one(
                f"{prefix}gate.weight", c.n_routed_experts, c.hidden_size, dtype=torch.float32
            ),
            router_bias_E=self._one(
                f"{prefix}gate.e_score_correction_bias", c.n_routed_experts, dtype=torch.float32
            ),
            gate_up_E=self._empty(len(slots), 2 * c.moe_intermediate_size, c.hidden_size),
            down_E=self._empty(len(slots), c.hidden_size, c.moe_intermediate_size),
            shared=self._mlp(
                f"{prefix}shared_experts.", c.n_shared_experts * c.moe_intermediate_size
            ),
        )
        held = [(slot, expert) for slot, expert in enumerate(slots) if expert != EMPTY]
        for first in range(0, len(held), _EXPERTS_AT_ONCE):
            self._advance(index + first / len(held), c.num_hidden_layers)
            part = held[first : first + _EXPERTS_AT_ONCE]
            # Expert slots that are filled follow each other, all but a few.
            for run in _runs(part):
                where = slice(run[0][0], run[-1][0] + 1)
                experts = [expert for _, expert in run]
                read_experts(
                    self._checkpoint, index, experts, moe.gate_up_E[where], moe.down_E[where]
                )
        return moe

    def _mtp(self) -> MtpWeights:
        """The first MTP module; after the last layer. Its embedding and head are copies of the
        model's: not read.
        """
        index, dim = self._config.num_hidden_layers, self._config.hidden_size
        prefix = f"model.layers.{index}."
        return MtpWeights(
            enorm_D=self._one(f"{prefix}enorm.weight", dim),
            hnorm_D=self._one(f"{prefix}hnorm.weight", dim),
            eh_proj=self._one(f"{prefix}eh_proj.weight", dim, 2 * dim),
            layer=self._layer(index),
            head_norm_D=self._one(f"{prefix}shared_head.norm.weight", dim),
        )

    def _one(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._empty(*shape, dtype=dtype)
        self._checkpoint.read(name, tensor)
        return tensor

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
