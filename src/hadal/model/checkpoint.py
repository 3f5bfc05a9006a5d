"""A Hugging Face folder of safetensors, mapped into memory. Knows no architecture.

What is asked for as it is stored stays where it is: pages of the files, which all processes of a
host share. Every defect is a CheckpointError that names the file and the tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hadal.core.documents import cut, read_json, shown
from hadal.core.errors import CheckpointError
from hadal.core.model_config import SCALE_BLOCK, ModelConfig, read_model_config
from hadal.core.placement import EMPTY
from hadal.reference.fp8 import num_scales
from hadal.reference.params import (
    FP8,
    AttentionWeights,
    Experts,
    IndexerWeights,
    LayerWeights,
    Matrix,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    MtpWeights,
)
from hadal.reference.rope import cos_sin_table

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_NAME_CHARS = 200
_MAX_LAYER_DIGITS = 6
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """The tensors of one folder by name. Use as a context manager; files are opened when first
    needed.
    """

    def __init__(
        self,
        folder: Path,
        block_size: tuple[int, int] | None,
        scale_names: tuple[str, ...] = ("weight_scale_inv",),
    ) -> None:
        """`block_size`: of the FP8 scales, from config.json; None where no FP8 is expected.
        `scale_names`: the last parts that the scales' names may have, first choice first.
        """
        self._folder = folder
        self._block_size = block_size
        self._scale_names = scale_names
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

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor that is not a matrix, or one that is needed exactly, in FP32 and in memory of
        its own. Raises CheckpointError: absent, damaged or of another shape.
        """
        tensor = self._shaped(name, shape)
        if tensor.dtype == FP8:
            raise CheckpointError(f"{self._path(name)}: {name} is FP8; only matrices can be.")
        values = tensor.to(torch.float32, copy=True)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{self._path(name)}: {name} holds values that are not finite. The file is damaged:"
                " copy or convert it again."
            )
        return values

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """A weight as it is stored; FP16 becomes FP32. Raises CheckpointError: absent, damaged or
        of another shape.
        """
        values = self._shaped(name, shape)
        if values.dtype == FP8:
            scales, block = self._scales(name, values)
            return Matrix(values, scales, block)
        return Matrix(values if values.dtype != torch.float16 else values.float())

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor as it is stored, which must have this shape and a type that can be read."""
        tensor = self._tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self._path(name)}: {name} has shape {list(tensor.shape)}; config.json asks for"
                f" {list(shape)}."
            )
        if tensor.dtype not in (*_PLAIN, FP8):
            raise CheckpointError(
                f"{self._path(name)}: {name} is {_dtype(tensor)}; FP32, BF16, FP16 or FP8 E4M3 can"
                " be read."
            )
        return tensor

    def _scales(self, name: str, codes: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The scales of an FP8 matrix, in FP32, and the blocks that they belong to."""
        path = self._path(name)
        if self._block_size is None:
            raise CheckpointError(
                f"{path}: {name} is FP8, but config.json has no quantization_config."
            )
        prefix = name.removesuffix("weight")
        names = [f"{prefix}{each}" for each in self._scale_names]
        scale_name = next((each for each in names if each in self), None)
        if scale_name is None:
            raise CheckpointError(f"{path}: {name} is FP8, but its scales {names[0]} are missing.")
        scale_inv, scale_path = self._tensor(scale_name), self._path(scale_name)
        if scale_inv.dtype == torch.uint8:  # How files store E8M0 that know no type for it.
            scale_inv = scale_inv.view(torch.float8_e8m0fnu)
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
        if not bool(torch.isfinite(scale_inv.float()).all()):
            raise CheckpointError(f"{scale_path}: {scale_name} holds values that are not finite.")
        return scale_inv.float(), self._block_size

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


# DeepSeek-V3's tensor names, and what they are in ModelWeights. Knows no files; the
# Checkpoint does.
#
# Names and shapes are those of the released model (its README_WEIGHTS and modeling code). Shapes: D
# hidden, V vocabulary, H heads, Q q_lora_rank, C kv_lora_rank, R qk_rope, N qk_nope, W v_head, J
# index heads, X index_head_dim, F FFN width, E experts, I expert width, L MoE layers, S expert slots
# of a rank.


Advance = Callable[[float, float], None]


@dataclass(frozen=True)
class Conversion:
    """How a stored matrix is held."""

    dtype: torch.dtype | None = None
    """None: as it is stored."""
    device: torch.device | str = "cpu"
    is_rounding_inputs: bool = False

    def __call__(self, stored: Matrix) -> Matrix:
        dtype = self.dtype
        is_fp8 = stored.scales is not None
        if dtype is None and is_fp8 and stored.block != SCALE_BLOCK:
            # No kernel takes it, and the twin would convert it in every step.
            dtype = torch.float32
        if dtype is not None:
            # A copy in any case: what is converted does not hang on the file.
            stored = Matrix(stored.dense(dtype).to(self.device, copy=stored.values.dtype == dtype))
        return replace(stored, is_rounding_inputs=is_fp8 and self.is_rounding_inputs)

    @property
    def vector_dtype(self) -> torch.dtype:
        return self.dtype or torch.float32


AS_FP32 = Conversion(torch.float32)
AS_STORED = Conversion()


def load_weights(
    folder: Path,
    *,
    slot_to_expert_LS: NDArray[np.int16] | None = None,
    held: Conversion = AS_FP32,
    with_mtp: bool = False,
    with_mtp_experts: bool = True,
    advance: Advance = lambda done, of: None,
    config: ModelConfig | None = None,
) -> ModelWeights:
    """Read the model in `folder`. Only tensors it needs are touched. Raises CheckpointError naming
    file and tensor.

    `with_mtp_experts`: or the module without them, which writes its KV and drafts nothing.

    `advance` is called with how many layers are read, of how many.

    `slot_to_expert_LS`: the expert in each slot of this rank, by MoE layer (EMPTY: none); only
    these are read. None: all experts, in order, as an MTP module has for which there is no layer in
    it.

    `config`: the folder's config.json, if it has been read already.
    """
    config = read_model_config(folder) if config is None else config
    with Checkpoint(folder, config.weight_block_size, config.scale_names) as checkpoint:
        checkpoint.check_layers(config.num_hidden_layers)
        loader = _Loader(
            checkpoint, config, slot_to_expert_LS, held, advance, with_mtp_experts=with_mtp_experts
        )
        return loader.model(with_mtp)


def read_expert(
    checkpoint: Checkpoint, config: ModelConfig, layer_index: int, expert: int, held: Conversion
) -> MlpWeights:
    """A routed expert of a layer (index among all layers)."""
    prefix = f"model.layers.{layer_index}.mlp.experts.{expert}."
    return read_mlp(checkpoint, prefix, config.hidden_size, config.moe_intermediate_size, held)


def read_mlp(
    checkpoint: Checkpoint, prefix: str, dim: int, width: int, held: Conversion
) -> MlpWeights:
    """The network [F = `width`] whose tensors' names begin with the prefix."""
    return MlpWeights(
        held(checkpoint.matrix(f"{prefix}gate_proj.weight", (width, dim))),
        held(checkpoint.matrix(f"{prefix}up_proj.weight", (width, dim))),
        held(checkpoint.matrix(f"{prefix}down_proj.weight", (dim, width))),
    )


class _Loader:
    """Finds tensors by the model's names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        slot_to_expert_LS: NDArray[np.int16] | None,
        held: Conversion,
        advance: Advance,
        *,
        with_mtp_experts: bool,
    ) -> None:
        self._with_mtp_experts = with_mtp_experts
        self._advance = advance
        self._checkpoint = checkpoint
        self._config = config
        self._slot_to_expert_LS = slot_to_expert_LS
        self._held = held

    def model(self, with_mtp: bool) -> ModelWeights:
        config = self._config
        with_mtp = with_mtp and config.num_nextn_predict_layers > 0
        return ModelWeights(
            config=config,
            embed=self._matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size),
            layers=tuple(self._layer(index) for index in range(config.num_hidden_layers)),
            norm_D=self._vector("model.norm.weight", config.hidden_size),
            head=self._matrix("lm_head.weight", config.vocab_size, config.hidden_size),
            mtp=self._mtp() if with_mtp else None,
            cos_sin=cos_sin_table(config).to(self._held.device),
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        is_moe = config.is_moe(index)
        return LayerWeights(
            attn_norm_D=self._vector(f"{prefix}input_layernorm.weight", config.hidden_size),
            attention=self._attention(f"{prefix}self_attn."),
            ffn_norm_D=self._vector(f"{prefix}post_attention_layernorm.weight", config.hidden_size),
            mlp=None if is_moe else self._mlp(f"{prefix}mlp.", config.intermediate_size),
            moe=self._moe(index, f"{prefix}mlp.") if is_moe else None,
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c = self._config
        heads, dim, rank = c.num_attention_heads, c.hidden_size, c.q_lora_rank
        queries, both = heads * c.qk_head_dim, heads * (c.qk_nope_head_dim + c.v_head_dim)
        q_b_name = "q_b_proj" if rank else "q_proj"
        return AttentionWeights(
            q_a=self._matrix(f"{prefix}q_a_proj.weight", rank, dim) if rank else None,
            q_a_norm_Q=self._vector(f"{prefix}q_a_layernorm.weight", rank) if rank else None,
            q_b=self._matrix(f"{prefix}{q_b_name}.weight", queries, rank or dim),
            kv_a=self._matrix(f"{prefix}kv_a_proj_with_mqa.weight", c.latent_dim, dim),
            kv_a_norm_C=self._vector(f"{prefix}kv_a_layernorm.weight", c.kv_lora_rank),
            # The absorbed form multiplies the other way, too; what it multiplies stays as it is.
            kv_b=replace(
                self._matrix(f"{prefix}kv_b_proj.weight", both, c.kv_lora_rank),
                is_rounding_inputs=False,
            ),
            o=self._matrix(f"{prefix}o_proj.weight", dim, heads * c.v_head_dim),
            indexer=self._indexer(f"{prefix}indexer."),
        )

    def _indexer(self, prefix: str) -> IndexerWeights | None:
        c = self._config
        heads, width, rank = c.index_n_heads, c.index_head_dim, c.q_lora_rank
        if heads is None or width is None or rank is None:
            return None
        return IndexerWeights(
            q_b=self._matrix(f"{prefix}wq_b.weight", heads * width, rank),
            k=self._matrix(f"{prefix}wk.weight", width, c.hidden_size),
            k_norm_X=self._vector(f"{prefix}k_norm.weight", width),
            k_norm_bias_X=self._vector(f"{prefix}k_norm.bias", width),
            head_weights=self._matrix(f"{prefix}weights_proj.weight", heads, c.hidden_size),
        )

    def _mlp(self, prefix: str, width: int) -> MlpWeights:
        return read_mlp(self._checkpoint, prefix, self._config.hidden_size, width, self._held)

    def _moe(self, index: int, prefix: str) -> MoeWeights:
        c = self._config
        slots: Sequence[int] = range(c.n_routed_experts)
        moe_layer = index - c.first_k_dense_replace
        if self._slot_to_expert_LS is not None and moe_layer < len(self._slot_to_expert_LS):
            slots = self._slot_to_expert_LS[moe_layer].tolist()
        elif index >= c.num_hidden_layers and not self._with_mtp_experts:
            slots = ()
        self._advance(index, c.num_hidden_layers)
        held = tuple(
            None if expert == EMPTY else read_expert(self._checkpoint, c, index, expert, self._held)
            for expert in slots
        )
        gate = self._checkpoint.vector(f"{prefix}gate.weight", (c.n_routed_experts, c.hidden_size))
        bias_E = self._checkpoint.vector(
            f"{prefix}gate.e_score_correction_bias", (c.n_routed_experts,)
        )
        shared_width = c.n_shared_experts * c.moe_intermediate_size
        return MoeWeights(
            router=Matrix(gate.to(self._held.device)),
            router_bias_E=bias_E.to(self._held.device),
            experts=Experts(held),
            shared=self._mlp(f"{prefix}shared_experts.", shared_width),
        )

    def _mtp(self) -> MtpWeights:
        """The first MTP module; after the last layer. Its embedding and head are copies of the
        model's: not read.
        """
        index, dim = self._config.num_hidden_layers, self._config.hidden_size
        prefix = f"model.layers.{index}."
        return MtpWeights(
            enorm_D=self._vector(f"{prefix}enorm.weight", dim),
            hnorm_D=self._vector(f"{prefix}hnorm.weight", dim),
            eh_proj=self._matrix(f"{prefix}eh_proj.weight", dim, 2 * dim),
            layer=self._layer(index),
            head_norm_D=self._vector(f"{prefix}shared_head.norm.weight", dim),
        )

    def _matrix(self, name: str, rows: int, columns: int) -> Matrix:
        return self._held(self._checkpoint.matrix(name, (rows, columns)))

    def _vector(self, name: str, size: int) -> Tensor:
        vector = self._checkpoint.vector(name, (size,))
        return vector.to(self._held.vector_dtype).to(self._held.device)
