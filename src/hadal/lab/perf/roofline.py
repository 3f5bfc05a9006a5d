"""Seconds of a kernel from its FLOPs and bytes, as smooth functions without table look-ups or
jumps.

    seconds = launch + (compute^s + memory^s)^(1/s)

compute = FLOPs of padded shapes over the reached rate of tensor cores, plus a floor for the loop
over k; memory = bytes over the reached bandwidth; s = sharpness. Each curve has few parameters,
fitted to published H800 tables, with their residual. On other hardware two parts scale separately:
tensor cores (up to TENSOR_SHARE of their peak) with FLOP/s, and the work of CUDA cores (scaling,
softmax, epilogues) with the number of SMs. Times grow with rows, lengths and experts, so a larger
step is never cheaper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hadal.lab.perf.constants import CONSTANTS, Constants
from hadal.lab.perf.hardware import H800, Hardware
from hadal.perf.shapes import BF16_BYTES, FP8_BYTES

COMPUTE, MEMORY, LINK, LAUNCH = "compute", "memory", "link", "launch"
FP4, FP8, BF16 = "fp4", "fp8", "bf16"
DTYPE_BYTES = {FP4: 0.5 + 1 / 16, FP8: float(FP8_BYTES), BF16: float(BF16_BYTES)}
"""Bytes per weight. NVFP4 has an FP8 scale per 16 values."""
TENSOR_SHARE = 0.875
"""Sustained share of peak FLOP/s: 865 of 989 TFLOPS on a throttled H800 (FlashMLA deep-dive)."""
COOL_TENSOR_SHARE = 0.95
"""Sustained share of peak FLOP/s on GPUs that are not power-limited (H20)."""
TILE_ROWS = 32.0
"""Average rows per group that 64-row tiles waste. `pad_rows` beyond it model waits for weights."""


class Timed(NamedTuple):
    """Time of a kernel, and the resource that bounds it."""

    seconds: float
    bound: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Fitted parameters of a family of kernels on H800."""

    efficiency: float
    """Share of peak FLOP/s."""
    bandwidth: float
    """Share of peak HBM bandwidth."""
    launch_s: float
    sharpness: float
    """Exponent s of the soft maximum."""
    pad_rows: float = 0.0
    """Fixed cost of a group, in rows on H800. Beyond TILE_ROWS it scales with HBM, not FLOP/s."""
    pad_k: float = 0.0
    """Cost of a tile's prologue and epilogue, in channels of k (FP8)."""
    floor_s_per_k: float = 0.0
    """Minimum time of a tile's loop over k, seconds per channel."""
    pad_pairs: float = 0.0
    """Positions that tiles add to each row's context."""
    source: str = ""
    """Tables that the parameters were fitted to."""
    residual: float = 0.0
    """Median of |log(ours / table)|."""


DENSE = Curve(
    0.762,
    0.781,
    3.2e-6,
    8.0,
    pad_rows=40.0,
    pad_k=382.0,
    floor_s_per_k=0.86e-9,
    source="InferSim's 110 H800 GEMM rows, DeepGEMM's README (18), the decode profile (5)",
    residual=0.067,
)
MASKED = Curve(
    0.707,
    0.908,
    6.3e-6,
    4.0,
    pad_rows=137.0,
    pad_k=380.0,
    floor_s_per_k=0.75e-9,
    source="InferSim's 94 H800 rows of masked grouped GEMM, the decode profile's up and down",
    residual=0.040,
)
CONTIGUOUS = Curve(
    0.733,
    0.746,
    3.2e-6,
    8.0,
    pad_rows=124.0,
    pad_k=380.0,
    floor_s_per_k=0.86e-9,
    source="InferSim's 48 H800 rows of contiguous grouped GEMM, DeepGEMM's README (4)",
    residual=0.041,
)
MLA_DECODE = Curve(
    0.645,
    0.824,
    20.5e-6,
    4.0,
    pad_pairs=18.0,
    source="InferSim's 41 H800 rows of FlashMLA, the decode profile",
    residual=0.035,
)
MHA_PREFILL = Curve(
    0.652,
    0.824,
    10e-6,
    4.0,
    pad_pairs=309.0,
    source="InferSim's 5 H800 rows of FlashAttention 3 at 192/128, DeepSeek's training profile (1)",
    residual=0.023,
)
CURVES = {
    "dense": DENSE,
    "masked": MASKED,
    "contiguous": CONTIGUOUS,
    "mla": MLA_DECODE,
    "mha": MHA_PREFILL,
}


class Roofline:
    """Curves on one kind of GPU, with `sm_share` of its SMs; communication uses the other SMs.

    `is_sustained`: True if tensor cores are busy long enough for a power-limited GPU to lower its
    clock.
    """

    def __init__(
        self,
        hardware: Hardware,
        constants: Constants = CONSTANTS,
        sm_share: float = 1.0,
        is_sustained: bool = False,
    ) -> None:
        if not 0.0 < sm_share <= 1.0:
            raise ValueError(f"sm_share is {sm_share}; it must be above 0 and at most 1.")
        self.hardware = hardware
        clock = constants.sustained_clock if is_sustained and hardware.is_power_limited else 1.0
        self._speed = sm_share * clock
        self._small_s = constants.small_kernel_s
        self._elementwise = 1.0 / (hardware.hbm_bytes_per_s * constants.elementwise_efficiency)
        self._s_per_flop = {
            (id(curve), dtype): self._seconds_per_flop(curve, dtype)
            for curve in CURVES.values()
            for dtype in (FP4, FP8, BF16)
        }
        self._late_s_per_flop = {
            (id(curve), dtype): H800.hbm_bytes_per_s
            / hardware.hbm_bytes_per_s
            / (curve.efficiency * H800.fp8_flops * self._speed)
            * DTYPE_BYTES[dtype]
            for curve in CURVES.values()
            for dtype in (FP4, FP8, BF16)
        }

    def _seconds_per_flop(self, curve: Curve, dtype: str) -> float:
        # FP4 has no H800 table: the work of CUDA cores is assumed to be that of FP8.
        peak = {
            FP4: self.hardware.fp4_flops or self.hardware.fp8_flops,
            FP8: self.hardware.fp8_flops,
            BF16: self.hardware.bf16_flops,
        }[dtype]
        fitted = H800.bf16_flops if dtype == BF16 else H800.fp8_flops
        cuda_cores_s = (
            (1.0 / curve.efficiency - 1.0 / TENSOR_SHARE)
            / fitted
            * H800.num_sms
            / self.hardware.num_sms
        )
        tensor_share = TENSOR_SHARE if self.hardware.is_power_limited else COOL_TENSOR_SHARE
        return (1.0 / (tensor_share * peak) + cuda_cores_s) / self._speed

    def gemm(self, rows: float, n: int, k: int, dtype: str = FP8) -> Timed:
        """Price [rows, k] x [k, n]. Activations: as weights, but at least FP8. Output: BF16."""
        return self._gemms(DENSE, rows, 1.0, 1.0, n, k, dtype)

    def batched(self, rows: float, groups: int, n: int, k: int) -> Timed:
        """Price `groups` BF16 products of `rows` rows each (absorbed projections, one per head)."""
        return self._gemms(DENSE, rows * groups, float(groups), float(groups), n, k, BF16)

    def grouped(
        self, curve: Curve, rows: float, num_experts: int, n: int, k: int, dtype: str = FP8
    ) -> Timed:
        """Price a grouped GEMM: `rows` go to random experts; others' weights are not read."""
        hit = (
            num_experts * -math.expm1(rows * math.log1p(-1.0 / num_experts))
            if num_experts > 1
            else 1.0
        )
        # For less than 1 row (a mean over steps), the formula above exceeds the number of rows.
        hit = min(hit, rows)
        return self._gemms(curve, rows, hit, hit, n, k, dtype)

    def _gemms(
        self, curve: Curve, rows: float, padded: float, read: float, n: int, k: int, dtype: str
    ) -> Timed:
        # pad_k counts FP8 channels. The epilogue stores BF16 in the same time for every weight
        # type; in that time BF16 computes half as many channels, and FP4 twice as many.
        pad_k = curve.pad_k * {FP4: 2.0, FP8: 1.0, BF16: 0.5}[dtype]
        row_flops = 2.0 * (k + pad_k) * n
        tiles = padded * min(curve.pad_rows, TILE_ROWS)
        late = padded * max(curve.pad_rows - TILE_ROWS, 0.0)
        compute_s = row_flops * (
            (rows + tiles) * self._s_per_flop[id(curve), dtype]
            + late * self._late_s_per_flop[id(curve), dtype]
        )
        compute_s += k * curve.floor_s_per_k
        in_bytes = DTYPE_BYTES[dtype]
        moved = read * n * k * in_bytes + rows * (k * max(in_bytes, 1.0) + n * BF16_BYTES)
        return self._soft(curve, compute_s, moved)

    def mla_decode(
        self, rows: float, pairs: float, kv_bytes: float, flops_per_pair: int, row_bytes: int
    ) -> Timed:
        """Price core attention on the latent cache, or an indexer's scores. `pairs`: number of
        (query token, position) pairs; `kv_bytes`: all bytes of KV or index keys that are read.
        """
        flops = flops_per_pair * (pairs + rows * MLA_DECODE.pad_pairs)
        return self._soft(
            MLA_DECODE, flops * self._s_per_flop[id(MLA_DECODE), BF16], kv_bytes + rows * row_bytes
        )

    def mha_prefill(
        self, rows: float, pairs: float, flops_per_pair: int, moved_bytes: float
    ) -> Timed:
        """Price causal attention with expanded keys and values."""
        flops = flops_per_pair * (pairs + rows * MHA_PREFILL.pad_pairs)
        return self._soft(MHA_PREFILL, flops * self._s_per_flop[id(MHA_PREFILL), BF16], moved_bytes)

    def elementwise(self, moved_bytes: float, extra_s: float = 0.0) -> Timed:
        """Price a kernel that is bound by its reads and writes, plus `extra_s`."""
        moving_s = moved_bytes * self._elementwise + extra_s
        return Timed(self._small_s + moving_s, MEMORY if moving_s > self._small_s else LAUNCH)

    def _soft(self, curve: Curve, compute_s: float, moved_bytes: float) -> Timed:
        memory_s = moved_bytes / (self.hardware.hbm_bytes_per_s * curve.bandwidth)
        most, least = max(compute_s, memory_s), min(compute_s, memory_s)
        if most <= 0.0:
            return Timed(curve.launch_s, LAUNCH)
        seconds = most * (1.0 + (least / most) ** curve.sharpness) ** (1.0 / curve.sharpness)
        bound = LAUNCH if seconds < curve.launch_s else COMPUTE if compute_s >= memory_s else MEMORY
        return Timed(curve.launch_s + seconds, bound)
