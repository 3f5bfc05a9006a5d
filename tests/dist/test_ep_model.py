"""Runners of several rank processes over TCP give the plain loop's tokens at every width and in
every way.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

from hadal.core.model_config import read_model_config
from hadal.overlap.plan import SCHEDULES
from hadal.runtime.resolve import model_folder
from tests.dist.ep_ranks import Rank, Script, Served, Way, serve_ways
from tests.dist.oracle import FULL, Case, everyday_cases
from tests.levels import LEVEL, MORE
from tests.unit.comm.groups import run_processes

NUM_TOKENS = 24 if FULL else 16 if MORE else 8
NUM_CASES = 40 if FULL else 8 if MORE else 4
WIDTHS = (2, 4, 8) if FULL else (2, 4)
WIDER = (
    pytest.mark.more("units of two ranks stay in `make test`"),
    pytest.mark.slow("every rank computes on two cores"),
)
FP8 = Way(dispatch_format="fp8", schedule="decode_five")
FP8_BOUND = 2**-4
"""Largest mean change of a logit, as a share of the logits' spread. E4M3 has three fraction bits,
so a dispatched value is off by at most 1/16; the returned BF16 adds 1/512. Experts are nearly
linear in so small a change, and the residual stream carries more than they add.
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return everyday_cases(NUM_CASES, seed=5)


@pytest.fixture(scope="module")
def script(cases: list[Case]) -> Script:
    return Script(
        tuple(c.prompt for c in cases), tuple(min(NUM_TOKENS, len(c.output)) for c in cases)
    )


def merge(ranks: list[Served]) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """Return outputs and the logits after each prompt, by prompt."""
    outputs = {n: tuple(output) for served in ranks for n, output in served.outputs.items()}
    logits = {n: row for served in ranks for n, row in served.first_logits.items()}
    return [outputs[n] for n in sorted(outputs)], torch.stack([logits[n] for n in sorted(logits)])


def serve(
    num_ranks: int, folder: Path, script: Script, ways: tuple[Way, ...]
) -> list[list[Served]]:
    """Return results as [way][rank]."""
    if num_ranks == 1:
        torch.set_num_threads(1)
        return [[Rank(folder, None, script, 1, way).serve()] for way in ways]
    return [
        list(ranks)
        for ranks in zip(
            *run_processes(num_ranks, serve_ways, str(folder), script, ways), strict=True
        )
    ]


def ways_of(num_ranks: int) -> tuple[Way, ...]:
    redundant = (0, 8 * num_ranks)
    every = [
        Way(count, mode, schedule)
        for count, mode, schedule in itertools.product(
            redundant, ("normal", "low_latency"), SCHEDULES
        )
    ]
    if FULL:
        return (*every, Way(num_micro_batches=1))
    if not MORE:
        return (
            every[0],
            every[4],
            every[11],
        )  # Each schedule, both modes, with and without replicas.
    # Each schedule, both modes with and without replicas, and a single micro-batch.
    return (every[0], every[4], every[8], every[9], Way(mode="low_latency", num_micro_batches=1))


def fp8_ways_of(num_ranks: int) -> tuple[Way, ...]:
    return (FP8, Way(8 * num_ranks, "low_latency", "prefill_dual", dispatch_format="fp8"))


@cache
def serve_all(num_ranks: int, folder: Path, script: Script) -> dict[Way, list[Served]]:
    """Return the results of all ways at one width, computed by one set of processes for all tests."""
    ways = (*ways_of(num_ranks), *(fp8_ways_of(num_ranks) if LEVEL != "test" else ()))
    return dict(zip(ways, serve(num_ranks, folder, script, ways), strict=True))


@pytest.mark.campaign("more ways")
@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=WIDER) for n in WIDTHS[1:])])
@pytest.mark.slow("each rank imports torch, and the plain loop computes too")
@pytest.mark.needs("compiler")
def test_tokens_are_the_plain_loops(
    folder: Path, cases: list[Case], script: Script, num_ranks: int
) -> None:
    ways = ways_of(num_ranks)
    config = read_model_config(folder)
    num_layers = config.num_hidden_layers - config.first_k_dense_replace
    expected = [case.output[:NUM_TOKENS] for case in cases]
    first: torch.Tensor | None = None
    way_to_ranks = serve_all(num_ranks, folder, script)
    for way in ways:
        ranks = way_to_ranks[way]
        outputs, logits = merge(ranks)
        assert outputs == expected, way
        first = logits if first is None else first
        assert torch.equal(first, logits), f"{way}: other bits than {ways[0]}"
        per_rank = num_layers * (256 + way.num_redundant) // num_ranks
        assert [served.num_loaded for served in ranks] == [per_rank] * num_ranks, (
            "a rank reads its replicas alone"
        )


@pytest.mark.more("tests/unit/model/test_block.py holds it in one process")
@pytest.mark.slow("it serves at each width")
def test_fp8_dispatch_gives_the_same_bits_at_every_width(
    folder: Path, cases: list[Case], script: Script
) -> None:
    rounded, plain = serve(1, folder, script, (FP8, Way()))
    expected, logits = merge(rounded)
    for num_ranks in WIDTHS:
        way_to_ranks = serve_all(num_ranks, folder, script)
        for way in fp8_ways_of(num_ranks):
            outputs, seen = merge(way_to_ranks[way])
            assert outputs == expected
            assert torch.equal(seen, logits)
    _, exact = merge(plain)
    difference = (logits - exact).abs()
    print(
        f"fp8 dispatch: logits off by {difference.mean() / exact.std():.4f} of their spread,"
        f" {difference.max():.3f} most"
    )
    assert 0 < float(difference.mean()) < FP8_BOUND * float(exact.std())
