"""Computed sizes: DeepSeek-V3's messages and buffers, and the saving by FP8 out and BF16 back."""

import pytest

from hadal.comm.layout import (
    MessageLayout,
    deepep_buffer_bytes,
    low_latency_buffers,
    mean_rows,
    most_pairs,
)

V3 = 7168


@pytest.mark.parametrize("dispatch_format", ["fp8", "fp8_pow2"])
def test_v3_messages(dispatch_format: str) -> None:
    """Compare with DeepEP's: 16 bytes of header, 7168 codes, 56 scales; 7168 BF16 values back."""
    layout = MessageLayout(dispatch_format, V3)
    assert (layout.row_bytes, layout.message_bytes, layout.back_bytes) == (7_392, 7_408, 14_336)


def test_ragged_rows() -> None:
    layout = MessageLayout("fp8", 193)
    assert layout.row_bytes == 196 + 2 * 4
    assert layout.back_bytes == 386
    assert MessageLayout("fp32", 193).row_bytes == MessageLayout("fp32", 193).back_bytes == 772


def test_deepep_low_latency_buffer() -> None:
    """Check EP144 with 288 replicas: 2.15 GB for 128 tokens, twice that for 256."""
    assert deepep_buffer_bytes(128, V3, 288) / 1e9 == pytest.approx(2.15, abs=0.005)
    assert deepep_buffer_bytes(256, V3, 288) / 1e9 == pytest.approx(4.29, abs=0.005)


def test_own_low_latency_buffers_of_v3() -> None:
    """Size buffers for two expert slots and a frame per peer: DeepEP's bytes less the rank's own."""
    buffers = low_latency_buffers(MessageLayout("fp8", V3), 128, 8, 144, 2)
    assert buffers.recv == 143 * (16 + 128 * 2 * 7_408)
    assert buffers.send == 144 * 16 + 128 * 8 * 7_408
    assert buffers.recv_back == 128 * 8 * 14_336
    assert buffers.total == 2 * (
        buffers.send + buffers.recv + buffers.send_back + buffers.recv_back + buffers.decoded
    )
    assert most_pairs(128, 8, 2) == 256
    assert most_pairs(128, 8, 9) == 1024


def test_bytes_of_a_step() -> None:
    layout = MessageLayout("fp8", V3)
    found = layout.expected_bytes("low_latency", [128, 0], [256, 0])
    assert found == (2 * 16 + 256 * 7_408, 256 * 14_336)
    found = layout.expected_bytes("normal", [128, 0], [256, 0])
    assert found == (2 * 16 + 256 * 8 + 128 * 7_392, 256 * 14_336)


@pytest.mark.parametrize("hidden", [1024, V3])
def test_low_precision_saves(hidden: int) -> None:
    """Add the bytes of both directions, FP8 out and BF16 back, as a share of FP32's.

    The share is at most 40 % in low-latency mode, and in normal mode if a token has few experts on
    one rank (EP32 and wider). In narrower units a token travels once for several rows back, so BF16
    weighs more (EP4: 42 %). Of plain all-to-all (FP32, a copy per pair) it is always at most 40 %.
    """

    def share(mode: str, num_ranks: int, top_k: int, plain_mode: str) -> float:
        tokens = 4096
        rows, pairs = round(mean_rows(tokens, top_k, num_ranks)), tokens * top_k // num_ranks
        fp8 = MessageLayout("fp8", hidden).expected_bytes(mode, [rows], [pairs])
        fp32 = MessageLayout("fp32", hidden).expected_bytes(plain_mode, [rows], [pairs])
        return sum(fp8) / sum(fp32)

    for num_ranks in (2, 4, 8, 32, 144):
        assert share("low_latency", num_ranks, 8, "low_latency") <= 0.40
        assert share("normal", num_ranks, 8, "low_latency") <= 0.40
    for num_ranks in (32, 144):
        assert share("normal", num_ranks, 8, "normal") <= 0.40
    assert 0.40 < share("normal", 4, 8, "normal") < 0.44


def test_unknown_dispatch_format() -> None:
    with pytest.raises(ValueError, match="fp4"):
        MessageLayout("fp4", 8)
