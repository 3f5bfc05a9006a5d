"""What FP8 out and BF16 back save: bytes between ranks, counted beside the formula, and time where
the link is the limit.

    python -m bench.dispatch_bytes [--quick] [--tokens 256]

Bytes need nothing. Time needs root and `tc`: two ranks in network namespaces, FP32 communication
about 4 times computation, both formats run in turn, repetitions kept by the rule of
bench/overlap_gate.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from bench.overlap_gate import Series, Timed, foreign_share, is_quiet, read_usage, spread
from bench.overlap_model import ModelCase
from bench.overlap_net import hosts, why_not
from bench.overlap_ranks import Ranks
from bench.overlap_real import PAYLOAD_SHARE, QUIET_PAUSE_S, calibrate
from bench.overlap_variants import PREFILL, TWO, Variant
from hadal.comm.layout import DISPATCH_FORMATS, MODES

LINK_OVER_COMPUTE = 4.0
FORMULA_TOLERANCE = 0.02
RUNS = (TWO, PREFILL)


def count(ranks: Ranks, case: ModelCase) -> tuple[int, int]:
    """Return (bytes the mesh sent, bytes by the formula) of one step, all ranks together."""
    ranks.ask({"do": "model", "case": asdict(case)})
    answers = ranks.run(TWO.question())
    return sum(a["sent_bytes"] for a in answers), sum(a["formula_bytes"] for a in answers)


def show_bytes(console: Console, case: ModelCase) -> None:
    """Every mode and format, on loopback."""
    table = Table(
        title=f"EP2, {case.hidden_size} channels, top {case.top_k} of {case.num_experts}, one step"
    )
    for name in ("mode", "dispatch", "kB counted", "kB by formula", "difference", "of fp32"):
        table.add_column(name, justify="right")
    with Ranks(2) as ranks:
        for mode in MODES:
            fp32_bytes = 0
            for dispatch_format in DISPATCH_FORMATS:
                counted, formula = count(
                    ranks, replace(case, mode=mode, dispatch_format=dispatch_format)
                )
                fp32_bytes = fp32_bytes or counted
                difference = counted / formula - 1.0
                mark = "" if abs(difference) <= FORMULA_TOLERANCE else " (!)"
                table.add_row(
                    mode,
                    dispatch_format,
                    f"{counted / 1e3:.1f}",
                    f"{formula / 1e3:.1f}",
                    f"{difference:+.2%}{mark}",
                    f"{counted / fp32_bytes:.1%}",
                )
    console.print(table)


def show_time(console: Console, case: ModelCase, num_pairs: int, limit_s: float) -> None:
    """Both formats in turn on a link that FP32 fills."""
    reason = why_not()
    if reason is not None:
        console.print(f"[yellow]time on a limited link is skipped: {reason}[/yellow]")
        return
    series = Series()
    with hosts(2) as net, Ranks(2, net.addresses, [net.prefix(0), net.prefix(1)]) as ranks:
        compute_s, step_bytes = calibrate(ranks, case, net)
        for dispatch_format in ("fp32", "fp8"):
            ranks.ask(
                {
                    "do": "model",
                    "work": dispatch_format,
                    "case": asdict(replace(case, dispatch_format=dispatch_format)),
                }
            )
        rate = step_bytes / (LINK_OVER_COMPUTE * compute_s)
        net.limit(rate / PAYLOAD_SHARE)
        for dispatch_format in ("fp32", "fp8"):
            answers = ranks.run({"work": dispatch_format, **TWO.question()})
            payload, on_link = (
                sum(a[key] for a in answers) for key in ("sent_bytes", "kernel_bytes")
            )
            console.print(
                f"{dispatch_format}: {payload / 1e6:.2f} MB sent a step, {on_link / 1e6:.2f} MB left by the"
                " links"
            )
        end_s = time.monotonic() + limit_s
        keys = [
            (dispatch_format, variant) for variant in RUNS for dispatch_format in ("fp32", "fp8")
        ]
        while time.monotonic() < end_s and len(series.ratios(*_names(PREFILL))) < num_pairs:
            if not is_quiet(os.cpu_count() or 1):
                time.sleep(QUIET_PAUSE_S)
                continue
            series.rounds.append(
                {
                    f"{dispatch_format} {variant.name}": _timed(ranks, dispatch_format, variant)
                    for dispatch_format, variant in keys
                }
            )
    console.print(
        f"link {rate / 1e6:.0f} MB/s, FP32 communication {LINK_OVER_COMPUTE:g}x of computation:"
    )
    for variant in RUNS:
        ratios = series.ratios(*_names(variant))
        verdict = (
            spread(ratios) + "x" if len(ratios) >= num_pairs else f"not measured ({spread(ratios)})"
        )
        console.print(
            f"  {variant.name}: FP8 out and BF16 back over FP32 {verdict}, {len(ratios)} clean"
            f" pairs of {len(series.rounds)}"
        )


def _names(variant: Variant) -> tuple[str, str]:
    return f"fp32 {variant.name}", f"fp8 {variant.name}"


def _timed(ranks: Ranks, dispatch_format: str, variant: Variant) -> Timed:
    ours_s, before = time.process_time(), read_usage()
    answers = ranks.run({"work": dispatch_format, **variant.question()})
    after = read_usage()
    own_s = time.process_time() - ours_s + sum(answer["cpu_s"] for answer in answers)
    return Timed(answers[0]["elapsed_s"], foreign_share(before, after, own_s, os.cpu_count() or 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.dispatch_bytes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="three clean pairs, half a minute at most"
    )
    parser.add_argument(
        "--tokens", type=int, default=256, help="of a micro-batch of a rank, a multiple of 128"
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="at most")
    options = parser.parse_args(arguments)
    console, case = Console(), ModelCase(num_tokens=options.tokens)
    show_bytes(console, case)
    show_time(
        console, case, 3 if options.quick else 10, 30.0 if options.quick else 60.0 * options.minutes
    )


if __name__ == "__main__":
    main()
