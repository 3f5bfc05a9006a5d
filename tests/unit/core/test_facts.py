"""Facts of the ledger: checked when made; their sums of KV lengths equal those token by token."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.facts import NodesFact, PackedFacts, RequestFact, micros, pack, sum_kv_tokens

REQUEST = RequestFact("r", "t", "m", 3, 4, 2, 15, "stop", 1.0, 5.0, 2.0, 4.0)
NODES = NodesFact("decode-0", "e", "decode", 144, 8, 1.0, 2.0)


@given(st.integers(0, 300), st.integers(0, 300))
def test_kv_lengths_add_up_token_by_token(num_prompt: int, num_output: int) -> None:
    assert sum_kv_tokens(num_prompt, num_output) == sum(num_prompt + i for i in range(num_output))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens_hit": -1},
        {"tokens_out": -1},
        {"kv_tokens": -5},
        {"num_retries": -1},
        {"request_id": ""},
        {"tokens_out": 0},
        {"first_token_s": None},
        {"last_token_s": None},
        {"last_token_s": 1.5},
    ],
)
def test_a_request_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="fact"):
        RequestFact(**{**msgspec.structs.asdict(REQUEST), **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"num_ranks": 0}, {"ranks_per_node": 0}, {"gpu_hour_micro_usd": -1}, {"to_s": 0.5}]
)
def test_nodes_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="decode-0"):
        NodesFact(**{**msgspec.structs.asdict(NODES), **change})  # type: ignore[arg-type]


def test_facts_travel_in_bytes() -> None:
    packed = pack([NODES, REQUEST, NODES])
    assert packed == PackedFacts((REQUEST,), (NODES, NODES))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedFacts) == packed


def test_what_bills_nothing_is_told_apart() -> None:
    assert REQUEST.is_billed
    assert REQUEST.tokens_in == 7
    assert not RequestFact("r", "t", "m", 0, 0, 0, 0, "429", 1.0, 1.0).is_billed
    assert RequestFact("r", "t", "m", 0, 0, 1, 9, "503", 1.0, 2.0, 1.5, 1.5).is_billed


def test_microseconds_survive_a_float_of_this_century() -> None:
    for time_us in range(1_795_331_090_000_000, 1_795_331_090_000_100):
        assert micros(time_us / 1e6) == time_us
