"""The quantization_config of a config.json: number formats of weights and names of their scales.

Supported are E4M3 codes with a scale per block of a matrix: as DeepSeek writes them (`quant_method`
"fp8", transformers' FineGrainedFP8Config) and as compressed-tensors does ("float-quantized",
strategy "block"). Both mean code * scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from hadal.core import model_keys
from hadal.core.documents import converted, shown
from hadal.core.errors import CheckpointError
from hadal.core.families import OWN_WEIGHTS
from hadal.core.key_checks import check_object
from hadal.core.model_keys import Table, Use

_Side = Annotated[int, Meta(ge=1, le=1 << 16)]
_METHODS = {
    "aqlm": "AQLM, 2-bit codes",
    "auto-round": "AutoRound, 4-bit integers",
    "awq": "AWQ, 4-bit integers",
    "bitnet": "BitNet, ternary weights",
    "bitsandbytes": "bitsandbytes, 4 or 8 bits",
    "compressed-tensors": "compressed-tensors, such as the INT4 of Kimi-K2-Thinking",
    "eetq": "EETQ, 8-bit integers",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FP8 with a scale per row",
    "fp_quant": "FP-Quant, such as NVFP4",
    "gguf": "GGUF",
    "gptq": "GPTQ, 4-bit integers",
    "higgs": "HIGGS",
    "hqq": "HQQ, 1 to 8 bits",
    "mlx": "MLX",
    "modelopt": "NVIDIA's ModelOpt, such as NVFP4",
    "modelopt_fp4": "NVIDIA's ModelOpt, NVFP4",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "AMD's Quark, such as MXFP4",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_READ = (
    "plain weights, 'fp8' with a scale per block, and compressed-tensors' 'float-quantized' with"
    " strategy 'block' can be read"
)


@dataclass(frozen=True)
class Quantization:
    """Storage format of FP8 matrices."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    scale_names: tuple[str, ...]
    """Names that the scales of `X.weight` may have, each after the prefix `X.`."""


_NAMES_OF_FP8 = ("weight_scale_inv", "scale", "qscale_weight")
"""Names of FP8 scales. FineGrainedFP8HfQuantizer reads the last two like the first."""


def parse_quantization(
    found: Any, source: str, accepted: Collection[str] = ()
) -> Quantization | None:
    """Return the storage format of FP8 matrices from a file's quantization_config; None if all
    weights are unquantised. Raises CheckpointError that names the key.
    """
    if found is None:
        return None
    found = converted(found, dict[str, Any], source, "quantization_config", error=CheckpointError)
    reader = _FormatReader(source, accepted)
    method = found.get("quant_method")
    if method == "fp8":
        reader.check(found, "quantization_config", model_keys.FP8)
        block = reader.used(found, "quantization_config", model_keys.FP8, "weight_block_size")
        return Quantization(reader.block(block, "weight_block_size"), _NAMES_OF_FP8)
    if method == "compressed-tensors" and found.get("format") == "float-quantized":
        return Quantization(reader.block_of_groups(found), ("weight_scale",))
    if method is None and "bits" in found:
        method = "mlx"  # MLX's config has no quant_method.
    what = f" ({_METHODS[method]})" if isinstance(method, str) and method in _METHODS else ""
    key, value = ("quant_method", method)
    if method == "compressed-tensors":
        key, value = ("format", found.get("format"))
    raise CheckpointError(
        f"{source}: quantization_config.{key} is {shown(value)}{what}; {_READ}. {OWN_WEIGHTS}."
    )


@dataclass(frozen=True)
class _FormatReader:
    """Checker of the objects of one file against their tables."""

    source: str
    accepted: Collection[str]

    def check(self, found: Any, path: str, table: Table) -> None:
        """Raise CheckpointError for an unknown key or an unsupported value."""
        check_object(found, path, table, self.source, self.accepted)

    def used(self, found: Mapping[str, Any], path: str, table: Table, key: str) -> Any:
        row = table[key]
        value = found.get(key, row.default) if row.use is Use.USED else row.default
        if value is model_keys.REQUIRED:
            raise CheckpointError(f"{self.source}: {path}.{key} is missing.")
        return value

    def block(self, value: Any, key: str) -> tuple[int, int]:
        path = f"quantization_config.{key}"
        if isinstance(value, str):  # An early compressed-tensors wrote "128x128".
            sides = value.split("x")
            value = [int(side) for side in sides] if all(map(str.isdecimal, sides)) else value
        return converted(value, tuple[_Side, _Side], self.source, path, error=CheckpointError)

    def block_of_groups(self, found: Mapping[str, Any]) -> tuple[int, int]:
        path = "quantization_config"
        self.check(found, path, model_keys.COMPRESSED)
        groups = self.used(found, path, model_keys.COMPRESSED, "config_groups")
        path = f"{path}.config_groups"
        groups = converted(
            groups, dict[str, dict[str, Any]], self.source, path, error=CheckpointError
        )
        blocks: set[tuple[int, int]] = set()
        for name, group in groups.items():
            inside = f"{path}.{name}"
            self.check(group, inside, model_keys.COMPRESSED_GROUP)
            weights = self.used(group, inside, model_keys.COMPRESSED_GROUP, "weights")
            inside = f"{inside}.weights"
            self.check(weights, inside, model_keys.COMPRESSED_WEIGHTS)
            block = self.used(weights, inside, model_keys.COMPRESSED_WEIGHTS, "block_structure")
            key = f"config_groups.{name}.weights.block_structure"
            blocks.add(self.block(block, key))
        if len(blocks) != 1:
            raise CheckpointError(
                f"{self.source}: {path} has {len(blocks)} different blocks of scales; one is needed."
            )
        return blocks.pop()
