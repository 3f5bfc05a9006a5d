"""Expert parallelism changes when a token arrives, never which. Tested: widths, placements,
schedules, modes and dispatch formats.

With FP32 dispatch every deployment gives the tokens of the plain single-request loop. FP8 dispatch
and BF16 combine round activations, so tokens may differ from the loop's. They are equal for every
width, because the rounding does not depend on an expert's rank.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.dist import gate
from tests.dist.oracle import FULL, Case, complete_all, differences, everyday_cases, make_cases
from tests.dist.serving import Server, StartServer, metric
from tests.fresh import fresh
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_for, wait_until

NUM_CASES, NUM_FRESH = (200, 50) if FULL else (20, 4)
FEW = 6


def units(ranks: int, redundant: int = 0, overlap: str = "auto", mode: str = "") -> dict[str, Any]:
    """Return fields of [prefill] or [decode]. The small steps of tests are split too, from two
    tokens on.
    """
    return {
        "ranks": ranks,
        "redundant_experts": redundant,
        "overlap": overlap,
        "mode": mode,
        "min_split_tokens": 2,
        "kv_memory_mb": 32,
        "max_requests": max(8, 32 // ranks),
    }


DEPLOYMENTS = {
    "dual_five_redundant": (
        {**units(2, 64, "prefill_dual"), "request_balance": "off"},
        units(4, 64, "decode_five"),
    ),
    "ep2_ep4": (units(2), units(4)),
    "ep1_ep2": (units(1), units(2)),
    "ep4_ep8": (units(4), units(8)),
    "ep8_ep1": (units(8), units(1)),
    "five_dual": (units(2, 0, "decode_five"), units(2, 32, "prefill_dual")),
    "modes_swapped": (
        units(4, 32, "prefill_dual", "low_latency"),
        units(2, 128, "decode_five", "normal"),
    ),
    "one_rank_split": (units(1, 0, "prefill_dual"), units(1, 0, "decode_five")),
    "much_redundancy": (units(4, 256, "sequential"), units(4, 512, "sequential")),
}


def deployed(borrow: StartServer, name: str) -> Server:
    prefill, decode = DEPLOYMENTS[name]
    return borrow(prefill=prefill, decode=decode, chunk_tokens=128, collective_timeout_s=PATIENCE_S)


MARKS = {"dual_five_redundant": pytest.mark.more("one deployment stays in `make test`")}
"""Marks of a deployment; all others run at full sizes."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Return fixed and fresh prompts; the fresh seed is printed if a test fails."""
    seed = fresh().randrange(2**31)
    print(f"fresh prompts: seed {seed}")
    return everyday_cases(NUM_CASES - NUM_FRESH, seed=17) + make_cases(NUM_FRESH, seed=seed)


def test_units_of_two_and_four_ranks_give_the_plain_loops_tokens(ranked: Server) -> None:
    cases = everyday_cases(FEW, seed=17)
    assert differences(cases, asyncio.run(complete_all(ranked.url, ranked.model, cases))) == []

    def scraped() -> str:
        return httpx.get(f"{ranked.url}/metrics", timeout=DEADLINE_S).text

    of_decode = 'hadal_link_bytes_total{kind="dispatch",nodes="within",unit="decode-0"}'
    wait_until(lambda: of_decode in scraped(), "bytes between ranks are counted")


async def trace(server: Server, unit: str) -> set[tuple[str, int]]:
    """Return (schedule, micro-batches) of a unit's next steps."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        reply = await client.get("/trace", params={"unit": unit, "steps": 10, "wait_s": 60})
    assert reply.status_code == 200, reply.text
    return {
        (schedule, num_micro_batches)
        for _, schedule, num_micro_batches, *_ in reply.json()["steps"]
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.full)) for name in DEPLOYMENTS]
)
def test_fp32_dispatch_gives_the_plain_loops_tokens(
    borrow: StartServer, cases: list[Case], name: str
) -> None:
    prefill, decode = DEPLOYMENTS[name]
    server = deployed(borrow, name)
    server.gate.hold(gate.PREFILL)
    server.gate.hold(gate.DECODE)
    seen: dict[str, set[tuple[str, int]]] = {}

    async def watch() -> None:
        traces = {
            unit: asyncio.ensure_future(trace(server, unit)) for unit in ("prefill-0", "decode-0")
        }
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            for _ in range(3):  # The gateway receives the traces before it answers these.
                await client.get("/health")
        server.gate.hold(gate.PREFILL, after=10**6)
        # Steps with few requests are not split.
        await wait_for(
            lambda: metric(server, "hadal_generations_now", 'state="decoding"') >= 16,
            "many answers are in decode",
        )
        server.gate.open()
        seen.update({unit: await found for unit, found in traces.items()})

    outputs = asyncio.run(complete_all(server.url, server.model, cases, while_running=watch))
    assert differences(cases, outputs) == []
    for unit, fields in (("prefill-0", prefill), ("decode-0", decode)):
        if fields["overlap"] in ("prefill_dual", "decode_five"):
            assert (fields["overlap"], 2) in seen[unit], (
                f"{unit} never ran the schedule this test is about"
            )


def logprobs_of(server: Server, case: Case) -> list[float]:
    """Return log-probabilities of a prompt's greedy tokens. The prompt runs alone, so that its
    steps are equal at every width.
    """
    body = {
        "model": server.model,
        "prompt": list(case.prompt),
        "temperature": 0,
        "max_tokens": 24,
        "logprobs": 1,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    found: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


ROUNDINGS = [{"dispatch_format": "fp8", "compute": "fp8"}]
if FULL:
    ROUNDINGS += [{"dispatch_format": "fp8"}, {"dispatch_format": "fp8_pow2"}, {"compute": "fp8"}]
FP8_WIDTHS = [(1, 1), (2, 2), (4, 4), (8, 8)] if FULL else [(1, 1), (2, 4)]


@pytest.mark.promise(
    "Rounding therefore depends on neither width (number of ranks), placement, mode "
    "nor arrival order: with the same kernels the results are the same bits."
)
@pytest.mark.more("test_ep_model and tests/unit/model hold it without a server")
@pytest.mark.slow("a server of each width")
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda fields: "-".join(fields.values()))
def test_what_is_rounded_gives_the_same_tokens_at_every_width(
    borrow: StartServer, cases: list[Case], rounding: dict[str, str]
) -> None:
    """`dispatch_format` rounds tokens on their way to experts; `compute` rounds all inputs of FP8
    matrices.
    """
    widths, logprobs = [], []
    exact = deployed(borrow, "dual_five_redundant")
    for prefill_ranks, decode_ranks in FP8_WIDTHS:
        server = borrow(
            prefill=units(prefill_ranks),
            decode=units(decode_ranks),
            chunk_tokens=128,
            **rounding,
        )
        widths.append(asyncio.run(complete_all(server.url, server.model, cases)))
        logprobs.append(logprobs_of(server, cases[0]))
    # Tokens rarely show that rounding happened; log-probabilities do.
    assert all(of_width == logprobs[0] for of_width in logprobs[1:])
    assert logprobs_of(exact, cases[0]) != logprobs[0], "nothing was rounded"
    narrow = [Case(case.prompt, output) for case, output in zip(cases, widths[0], strict=True)]
    for outputs in widths[1:]:
        assert differences(narrow, outputs) == []
    same = sum(case.output == output for case, output in zip(cases, widths[0], strict=True))
    print(f"{rounding}: {same} of {len(cases)} answers equal those in FP32")
    assert same > len(cases) // 2, "rounding changed most answers: the codec is suspect"
