"""Bytes of a row that travels between ranks, by format. For plans; the codec itself is in reference/codec."""

from __future__ import annotations

_SCALE_GROUP = 128
"""Channels with one FP32 scale (DeepSeek-V3 technical report, 3.3.2: tiles of 1 x 128)."""


def row_bytes(hidden_size: int, row_format: str) -> int:
    """Bytes of a row of `hidden_size` values. Raises ValueError on an unknown format."""
    match row_format:
        case "fp32":
            return 4 * hidden_size
        case "bf16":
            return 2 * hidden_size
        case "fp8" | "fp8_pow2":
            # The scales behind the codes are read as FP32, so they begin at a multiple of four.
            return -(-hidden_size // 4) * 4 + 4 * -(-hidden_size // _SCALE_GROUP)
    raise ValueError(f"{row_format!r} is no row format. Known: fp32, bf16, fp8, fp8_pow2.")
