"""Bytes of a row sent between ranks, by format: for plans and for the codec (reference/codec)."""

from __future__ import annotations

SCALE_GROUP = 128
"""Channels with one FP32 scale (DeepSeek-V3 technical report, 3.3.2: tiles of 1 x 128)."""


def row_bytes(hidden_size: int, row_format: str) -> int:
    """Return the bytes of a row of `hidden_size` values. Raises ValueError for an unknown format."""
    match row_format:
        case "fp32":
            return 4 * hidden_size
        case "bf16":
            return 2 * hidden_size
        case "fp8" | "fp8_pow2":
            return codes_bytes(hidden_size) + 4 * -(-hidden_size // SCALE_GROUP)
    raise ValueError(f"{row_format!r} is not a row format; use fp32, bf16, fp8 or fp8_pow2.")


def codes_bytes(hidden_size: int) -> int:
    """Return the bytes of an FP8 row's codes, padded to a multiple of four: the scales after them
    are read as FP32.
    """
    return -(-hidden_size // 4) * 4
