"""The hardware table: complete, with sources, and a clear error for an unknown name."""

from dataclasses import replace

import pytest

from hadal.lab.perf.hardware import H800, HARDWARE, hardware_named


@pytest.mark.parametrize("name", HARDWARE)
def test_every_row_has_a_source_and_sane_ratios(name: str) -> None:
    row = HARDWARE[name]
    assert len(row.source) > 40
    assert row.fp8_flops == pytest.approx(2 * row.bf16_flops, rel=0.01)
    assert row.fp4_flops in (0.0, pytest.approx(2 * row.fp8_flops))
    assert row.nvlink_bytes_per_s > row.nic_bytes_per_s
    assert row.nvlink_domain >= row.gpus_per_node


def test_h800_is_h100_with_narrower_nvlink() -> None:
    h100 = HARDWARE["h100"]
    found = (H800.bf16_flops, H800.hbm_bytes_per_s, H800.nic_bytes_per_s)
    assert found == (h100.bf16_flops, h100.hbm_bytes_per_s, h100.nic_bytes_per_s)
    assert H800.nvlink_bytes_per_s < h100.nvlink_bytes_per_s


def test_names_are_found_in_any_case_and_unknown_ones_list_the_known() -> None:
    assert hardware_named("GB200") is HARDWARE["gb200"]
    with pytest.raises(ValueError, match="'h900' is unknown; use one of h800, h20"):
        hardware_named("h900")


def test_a_row_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="hbm_bytes_per_s"):
        replace(H800, hbm_bytes_per_s=0.0)
