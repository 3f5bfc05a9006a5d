"""Measure how much communication hides under computation: virtual devices on a paced link, then
real FP32 compute on limited links.

    python -m bench.overlap [--quick] [--tokens 256] [--minutes 4] [--dispatch-format fp32]
                            [--only real]

The first part has no requirements: ops are timed sleeps, messages are real. The second part needs root and
`tc`: ranks in network namespaces, a model's real ops, communication about 0.5, 1 and 2 times computation. It
runs until enough repetitions were not disturbed by other processes, or for `--minutes` per link; on a busy
machine it prints "not measured".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from bench.claims import print_claims
from bench.machine import describe
from bench.overlap_device import BALANCED, DECODE_LIKE, claims, measure_virtual
from bench.overlap_model import ModelCase
from bench.overlap_net import hosts, why_not
from bench.overlap_ranks import Ranks
from bench.overlap_real import as_json, calibrate, measure, show
from bench.tables import parser_of, write

LINK_OVER_COMPUTE = (0.5, 1.0, 2.0)
NUM_PAIRS, QUICK_PAIRS = 10, 3
PARTS = ("virtual", "real")


def virtual(console: Console, *, quick: bool) -> list[str]:
    """Measure virtual devices with EP2 and EP4 (quick: EP2), in the balanced and the decode-like case. Return
    results and claims as lines of text.
    """
    lines = []
    for num_ranks in (2,) if quick else (2, 4):
        with Ranks(num_ranks) as ranks:
            for case in (BALANCED, DECODE_LIKE):
                result = measure_virtual(ranks, replace(case, num_layers=8), 3 if quick else 7)
                lines.append(f"{result}")
                console.print(lines[-1])
                stated = claims(result)
                print_claims(console, stated)
                lines += map(str, stated)
    return lines


def real(
    console: Console,
    case: ModelCase,
    num_pairs: int,
    limit_s: float,
    ratios: Sequence[float],
) -> list[dict[str, Any]]:
    """Calibrate once, then measure on each link in turn, for at most `limit_s` per link. Return a report per
    link; none if links cannot be made here.
    """
    reason = why_not()
    if reason is not None:
        console.print(f"[yellow]real compute is skipped: {reason}[/yellow]")
        return []
    reports = []
    num_cores = os.cpu_count() or 1
    with (
        hosts() as net,
        Ranks(2, net.addresses, [net.prefix(rank) for rank in range(2)]) as ranks,
    ):
        compute_s, step_bytes = calibrate(ranks, case, net)
        console.print(
            f"a step of two micro-batches: {compute_s * 1e3:.0f} ms of compute,"
            f" {step_bytes / 1e6:.1f} MB sent a rank"
        )
        for ratio in ratios:
            with console.status("") as status:
                result = measure(
                    ranks,
                    case,
                    net,
                    ratio,
                    compute_s,
                    step_bytes,
                    num_pairs=num_pairs,
                    limit_s=limit_s,
                    num_cores=num_cores,
                    progress=lambda text: status.update(f"link {ratio:g}x: {text}"),
                )
            show(console, result, num_pairs)
            reports.append(as_json(result, num_pairs))
    return reports


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("overlap", __doc__, "a minute or two, rough figures")
    parser.add_argument(
        "--tokens", type=int, default=256, help="of a micro-batch of a rank, a multiple of 128"
    )
    parser.add_argument("--dispatch-format", default="fp32", choices=("fp32", "fp8", "fp8_pow2"))
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="at most, for each of the three links"
    )
    parser.add_argument(
        "--pairs", type=int, default=0, help=f"clean ones a link needs; default {NUM_PAIRS}"
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args(arguments)
    if options.tokens < 128 or options.tokens % 128:
        parser.error("--tokens is a multiple of 128.")
    console = Console(width=None if sys.stdout.isatty() else 140)
    report: dict[str, Any] = {"machine": describe()}
    if options.only != "real":
        report["virtual"] = virtual(console, quick=options.quick)
    if options.only != "virtual":
        report["real"] = real(
            console,
            ModelCase(num_tokens=options.tokens, dispatch_format=options.dispatch_format),
            options.pairs or (QUICK_PAIRS if options.quick else NUM_PAIRS),
            60 * (min(options.minutes, 0.5) if options.quick else options.minutes),
            (1.0,) if options.quick else LINK_OVER_COMPUTE,
        )
    write(console, "overlap", report)


if __name__ == "__main__":
    main()
