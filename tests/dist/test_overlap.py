"""Schedules over rank processes change no bit of a model, and send the bytes of the formulas.

Whether communication hides behind computation is a question of times: `make bench-quick` measures
it, and tests/unit/test_overlap_bench.py asserts it in simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from bench.overlap_model import ModelCase
from bench.overlap_ranks import Ranks
from bench.overlap_variants import DECODE, PREFILL, TWO
from hadal.comm.layout import DISPATCH_FORMATS, MODES
from tests.waiting import DEADLINE_S

SMALL = ModelCase(num_tokens=128, num_layers=2, expert_size=64)
FIRST = MODES[0]
OTHERS = [
    pytest.param(mode, marks=pytest.mark.more("another mode of the same exchanges"))
    for mode in MODES
    if mode != FIRST
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


@pytest.mark.parametrize("mode", [FIRST, *OTHERS])
def test_schedules_change_no_bit_of_a_real_model(ranks: Ranks, mode: str) -> None:
    """Runs the same micro-batches under every schedule, with real ops, tokens and experts' rows
    over the mesh.
    """
    ranks.ask({"do": "model", "case": asdict(replace(SMALL, mode=mode))}, DEADLINE_S)
    digests = [
        [answer["digest"] for answer in ranks.run(variant.question(), DEADLINE_S)]
        for variant in (TWO, PREFILL, DECODE)
    ]
    assert digests[1:] == digests[:1] * 2


@pytest.mark.parametrize("mode", [FIRST, *OTHERS])
def test_dispatched_bytes_are_the_formulas(ranks: Ranks, mode: str) -> None:
    """Compares the bytes that the mesh sent with the formula for the chosen experts. FP8 with BF16
    takes at most 40 % of FP32.
    """
    sent: dict[str, int] = {}
    for dispatch_format in DISPATCH_FORMATS:
        case = replace(SMALL, mode=mode, dispatch_format=dispatch_format)
        ranks.ask({"do": "model", "case": asdict(case)}, DEADLINE_S)
        answers = ranks.run(TWO.question(), DEADLINE_S)
        sent[dispatch_format] = sum(answer["sent_bytes"] for answer in answers)
        formula_bytes = sum(answer["formula_bytes"] for answer in answers)
        assert sent[dispatch_format] == pytest.approx(formula_bytes, rel=0.02)
        share = 1.0 if dispatch_format == "fp32" else 0.4
        assert sent[dispatch_format] <= share * sent["fp32"], f"{mode} {dispatch_format}: {sent}"
