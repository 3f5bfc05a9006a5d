"""Traces as workloads: sessions and hits counted by hand; the real traces where they are present."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from hadal.lab.sim.day.cache import replay
from hadal.lab.sim.plan.traces import azure, mooncake
from hadal.lab.sim.workload import Workload
from tests.needs import shared_data


def row(at_ms: int, length: int, ids: list[int], output: int = 100) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": ids}
    )


def found(load: Workload) -> list[int]:
    """Return the tokens found by each request, with unlimited capacity and answers on disk immediately."""
    return replay(
        load, load.arrival_s, int(load.tokens_in.sum() + load.tokens_out.sum()) // 64
    ).tokens_found.tolist()


def test_mooncakes_sessions_by_hand() -> None:
    load = mooncake(
        [
            row(0, 700, [1, 2]),
            row(
                1000, 1100, [1, 3, 4]
            ),  # Continues the first: begins with its full part, and is longer.
            row(
                2000, 1300, [1, 5, 6]
            ),  # Part 1 already had its next turn: another session with the same beginning.
            row(3000, 2000, [1, 3, 7, 8]),  # Continues the second.
            row(4000, 600, [9, 10]),
            row(
                6000, 600, [9, 10]
            ),  # Equal to the request before: too short to contain its answer, so no next turn.
        ]
    )
    assert load.session.tolist() == [0, 0, 2, 0, 4, 5]
    assert load.turn.tolist() == [0, 1, 0, 2, 0, 0]
    assert load.tokens_seen.tolist() == [0, 512, 512, 1024, 0, 600]
    assert load.idle_s.tolist() == [np.inf, 1, 1, 2, np.inf, 2]
    assert found(load) == load.tokens_findable.tolist() == [0, 512, 512, 1024, 0, 576]


def test_mooncakes_rows_have_parts_for_all_their_tokens() -> None:
    with pytest.raises(ValueError, match="1 hash_ids for 513 tokens"):
        mooncake([row(0, 513, [1])])


def test_azures_rows_by_hand() -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    load = azure([head, "2023-11-16 18:15:48.2500000,374,44", "2023-11-16 18:15:46.7500000,9,0"])
    assert load.arrival_s.tolist() == [0.0, 1.5]
    assert load.tokens_in.tolist() == [9, 374]
    assert load.tokens_out.tolist() == [1, 44]
    assert len(set(load.session.tolist())) == 2
    with pytest.raises(ValueError, match="not one of Azure's"):
        azure(["a,b", "1,2"])


@pytest.mark.parametrize(
    ("name", "num", "tokens"),
    [("conversation", 12_031, 144_793_823), ("synthetic", 3_993, 61_194_628)],
)
def test_mooncakes_traces(name: str, num: int, tokens: int) -> None:
    with gzip.open(shared_data(f"mooncake_{name}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        load = mooncake(lines)
    assert (len(load), load.tokens_in.sum()) == (num, tokens)
    first = load.take(np.arange(len(load)) < 300)
    assert found(first) == first.tokens_findable.tolist()


def test_azures_trace() -> None:
    with shared_data("azure2023_conv.csv").open(encoding="utf-8") as lines:
        load = azure(lines)
    assert len(load) == 19_366
    assert load.tokens_in.mean() == pytest.approx(1154.7, abs=0.1)
    assert 3500 < load.arrival_s[-1] < 3600
