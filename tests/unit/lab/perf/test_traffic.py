"""Dispatch and combine: distinct nodes by counting, bytes by hand, DeepEP's rows, and monotonicity."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.calibration_points import LOW_LATENCY, LOW_LATENCY_H100, NORMAL
from hadal.core.plans import NO_LINK_BYTES
from hadal.lab.perf.hardware import H800, HARDWARE
from hadal.lab.perf.links import Links, expected_holders, remote_holders
from hadal.perf.shapes import DEEPSEEK_V3


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
def test_distinct_nodes_are_those_of_every_choice_of_groups(num_nodes: int) -> None:
    """Count over all 70 equally likely choices of 4 out of 8 groups."""
    per_node = 8 // num_nodes
    choices = list(itertools.combinations(range(8), 4))
    counted = sum(len({group // per_node for group in chosen}) for chosen in choices) / len(choices)
    assert expected_holders(DEEPSEEK_V3, num_nodes) == pytest.approx(counted)


def test_the_published_figures_of_ep32() -> None:
    assert expected_holders(DEEPSEEK_V3, 4) == pytest.approx(3.14, abs=0.005)
    assert remote_holders(DEEPSEEK_V3, 4) == pytest.approx(2.36, abs=0.005)
    assert expected_holders(DEEPSEEK_V3, 32) == pytest.approx(7.0)
    assert expected_holders(DEEPSEEK_V3, 1e9) == pytest.approx(DEEPSEEK_V3.num_experts_per_tok)


@settings(derandomize=True)
@given(st.floats(1.0, 320.0), st.floats(1.0, 2.0))
def test_more_places_are_reached_where_there_are_more(num_holders: float, by: float) -> None:
    few = expected_holders(DEEPSEEK_V3, num_holders)
    many = expected_holders(DEEPSEEK_V3, num_holders * by)
    assert few <= many + 1e-9
    assert many <= min(num_holders * by, DEEPSEEK_V3.num_experts_per_tok) + 1e-9


def test_low_latency_is_within_seven_percent_of_deepeps_rows() -> None:
    for ranks, dispatch_us, combine_us in LOW_LATENCY:
        dispatch_s, combine_s = Links(DEEPSEEK_V3, H800, ranks).low_latency_s(
            128, 1.0, is_overlapped=False
        )
        assert dispatch_s * 1e6 == pytest.approx(dispatch_us, rel=0.07)
        assert combine_s * 1e6 == pytest.approx(combine_us, rel=0.07)


def test_low_latency_holds_on_another_cluster_at_other_sizes() -> None:
    for tokens, dispatch_us, combine_us in LOW_LATENCY_H100:
        dispatch_s, combine_s = Links(DEEPSEEK_V3, HARDWARE["h100"], 64).low_latency_s(
            tokens, 1.0, is_overlapped=False
        )
        assert dispatch_s * 1e6 == pytest.approx(dispatch_us, rel=0.12)
        assert combine_s * 1e6 == pytest.approx(combine_us, rel=0.12)


def test_normal_is_within_five_percent_of_deepeps_rows() -> None:
    for ranks, dispatch_gb_s, combine_gb_s in NORMAL:
        dispatch_s, combine_s = Links(DEEPSEEK_V3, H800, ranks).normal_s(
            4096, 1.0, is_overlapped=False
        )
        copies = 4096 * expected_holders(DEEPSEEK_V3, ranks / 8)
        assert copies * 7456 / dispatch_s / 1e9 == pytest.approx(dispatch_gb_s, rel=0.05)
        assert copies * 14336 / combine_s / 1e9 == pytest.approx(combine_gb_s, rel=0.05)


def test_no_exchange_is_faster_than_its_bytes() -> None:
    """Compare with the ceiling of arXiv 2505.09343: remote bytes over the NIC's bandwidth."""
    for ranks in (16, 72, 144, 320):
        found = Links(DEEPSEEK_V3, H800, ranks).low_latency_s(32, 1.0, is_overlapped=False)
        for seconds, size in zip(found, (7408, 14336), strict=True):
            assert seconds > 32 * 8 * size * (1 - 8 / ranks) / H800.nic_bytes_per_s


def test_one_rank_exchanges_nothing_and_one_nvlink_domain_uses_no_nic() -> None:
    assert Links(DEEPSEEK_V3, H800, 1).low_latency_s(128, 1.0, is_overlapped=True) == (0.0, 0.0)
    assert Links(DEEPSEEK_V3, H800, 1).normal_s(128, 1.0, is_overlapped=True) == (0.0, 0.0)
    domain = Links(DEEPSEEK_V3, HARDWARE["gb200"], 72).low_latency_s(128, 1.0, is_overlapped=False)
    nodes = Links(DEEPSEEK_V3, HARDWARE["b200"], 72).low_latency_s(128, 1.0, is_overlapped=False)
    assert domain[0] < nodes[0] / 2
    assert domain[1] < nodes[1] / 2


@settings(derandomize=True)
@given(
    st.integers(2, 320),
    st.floats(1.0, 4096.0),
    st.floats(1.0, 3.0),
    st.booleans(),
    st.sampled_from(list(HARDWARE)),
)
def test_more_tokens_and_more_imbalance_take_longer(
    ranks: int, tokens: float, imbalance: float, is_overlapped: bool, name: str
) -> None:
    links = Links(DEEPSEEK_V3, HARDWARE[name], ranks)
    for way in (links.low_latency_s, links.normal_s):
        less = way(tokens, 1.0, is_overlapped=is_overlapped)
        more = way(tokens, imbalance, is_overlapped=is_overlapped)
        most = way(2 * tokens, imbalance, is_overlapped=is_overlapped)
        for a, b, c in zip(less, more, most, strict=True):
            assert a <= b < c


def test_bytes_within_the_domain_and_between() -> None:
    """Each of 16 ranks gets 1/16 of all decode messages: the sender, 7 others on its node, 8 on the
    other node.
    """
    found = Links(DEEPSEEK_V3, H800, 16).link_bytes("decode", 1600)
    sent = 1600 * 8 / 16
    assert found.dispatch == (sent * 7 * 7408, sent * 8 * 7408)
    assert found.combine == (sent * 7 * 14336, sent * 8 * 14336)
    normal = Links(DEEPSEEK_V3, H800, 32).link_bytes("prefill", 1000)
    assert normal.combine[1] == pytest.approx(2.357 * 1000 * 14336, rel=1e-3)
    assert normal.combine[0] > normal.combine[1]
    assert Links(DEEPSEEK_V3, H800, 8).link_bytes("prefill", 1000).dispatch[1] == 0
    assert Links(DEEPSEEK_V3, H800, 1).link_bytes("decode", 1600) == NO_LINK_BYTES
