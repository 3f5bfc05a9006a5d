"""`hadal step`: predicted time of a unit's step, by stage. Imports the step model when called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hadal.commands.examples import examples

if TYPE_CHECKING:
    from hadal.lab.perf.explain import StepPrice
    from hadal.lab.perf.step import StepModel

EPILOG = examples(
    (
        "hadal step --phase decode --ep 144 --batch 88 --kv 4989 --hardware h800",
        "price DeepSeek's decode unit at its published mean context",
    ),
    (
        (
            "hadal step --phase decode --ep 128 --batch 128 --kv 4096 \\\n"
            "    --mtp-tokens 1 --mtp-accept 0.74 --expert-imbalance 1"
        ),
        "price DeepSeek's published decode profile, where routing was balanced artificially",
    ),
    (
        (
            "hadal step --phase prefill --ep 32 --tokens 16384 --prompt 4096 \\\n   "
            " --expert-imbalance 1"
        ),
        "price DeepSeek's published prefill profile",
    ),
    (
        "hadal step --batch 88 --plan sequential --trace step.json",
        "a decode step without overlap, as a trace for ui.perfetto.dev",
    ),
    after=(
        "For the sources of the model and its errors against published systems:"
        " docs/calibration.md."
    ),
)
_TIMELINE_WIDTH = 96
_TRACED_LAYERS = 8
_MAX_SIZE = 1e9
"""Largest batch size or length in tokens: far above real values, but times stay finite."""


def step(
    phase: Annotated[str, typer.Option(help="Phase: decode or prefill.")] = "decode",
    ep: Annotated[
        int | None, typer.Option(help="Number of ranks of the unit. [dim]144, prefill 32[/dim]")
    ] = None,
    batch: Annotated[
        float | None, typer.Option(help="Decode: requests per rank. [dim]88[/dim]", max=_MAX_SIZE)
    ] = None,
    kv: Annotated[
        float | None,
        typer.Option(help="Decode: mean context in tokens. [dim]4989[/dim]", max=_MAX_SIZE),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(help="Prefill: tokens computed per rank. [dim]16384[/dim]", max=_MAX_SIZE),
    ] = None,
    prompt: Annotated[
        float | None,
        typer.Option(help="Prefill: tokens per prompt. [dim]4096[/dim]", max=_MAX_SIZE),
    ] = None,
    cached: Annotated[
        float | None,
        typer.Option(help="Prefill: cached tokens per prompt. [dim]0[/dim]", max=_MAX_SIZE),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="GPU type: h800, h20, h100, h200, b200 or gb200.")
    ] = "h800",
    mtp_tokens: Annotated[
        int | None,
        typer.Option(
            help="Decode: speculative tokens per request and step. [dim]0[/dim]", min=0, max=16
        ),
    ] = None,
    mtp_accept: Annotated[
        float | None,
        typer.Option(
            help="With --mtp-tokens: chance that a speculative token is accepted if"
            " all before it were. [dim]0.8[/dim]"
        ),
    ] = None,
    plan: Annotated[
        str,
        typer.Option(
            help="Schedule: sequential, prefill_dual, decode_five, or auto (the fastest of them)."
        ),
    ] = "auto",
    redundant: Annotated[
        int | None,
        typer.Option(
            help="Redundant expert replicas, beyond one per expert. [dim]32 if all divide evenly over the ranks[/dim]"
        ),
    ] = None,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            help=(
                "Expert tokens of the busiest rank, divided by the mean; 1 is balanced."
                " [dim]expected with random routing[/dim]"
            )
        ),
    ] = None,
    attention_imbalance: Annotated[
        float,
        typer.Option(help="Core attention time of the busiest rank, divided by the mean."),
    ] = 1.0,
    experts_dtype: Annotated[
        str, typer.Option(help="Type of the routed experts' weights: fp8 or fp4.")
    ] = "fp8",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON: step_ms, stages and more.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace file for Perfetto or chrome://tracing.")
    ] = None,
) -> None:
    """Price one step of a DeepSeek-V3/R1 unit from first principles: the time of each stage, and
    the share of transfers hidden behind compute.
    """
    from hadal.lab.perf.hardware import hardware_named
    from hadal.lab.perf.step import MTP_ACCEPT, StepModel

    decode_only = {
        "--batch": batch,
        "--kv": kv,
        "--mtp-tokens": mtp_tokens,
        "--mtp-accept": mtp_accept,
    }
    prefill_only = {"--tokens": tokens, "--prompt": prompt, "--cached": cached}
    _check_options(phase, {"decode": decode_only, "prefill": prefill_only})
    num_ranks = ep if ep is not None else 144 if phase == "decode" else 32
    model = StepModel(
        num_ranks, hardware_named(hardware), num_redundant=redundant, expert_dtype=experts_dtype
    )

    def priced(imbalance: float | None) -> StepPrice:
        if phase == "decode":
            return model.decode(
                _or(batch, 88.0),
                _or(kv, 4989.0),
                mtp_tokens or 0,
                plan,
                mtp_accept=_or(mtp_accept, MTP_ACCEPT),
                expert_imbalance=imbalance,
                attention_imbalance=attention_imbalance,
            )
        return model.prefill(
            _or(tokens, 16384.0),
            _or(prompt, 4096.0),
            cached or 0.0,
            plan,
            expert_imbalance=imbalance,
            attention_imbalance=attention_imbalance,
        )

    price, balanced = priced(expert_imbalance), priced(1.0)
    if trace is not None:
        _write_trace(price, f"{phase} EP{num_ranks} {hardware}", trace)
    if as_json:
        typer.echo(json.dumps(as_object(price, balanced)))
        return
    _show(price, balanced, model)
    if trace is not None:
        typer.echo(f"Written to {trace}; open it at ui.perfetto.dev.")


def _check_options(phase: str, own: dict[str, dict[str, float | None]]) -> None:
    if phase not in own:
        raise ValueError(f"--phase is {phase!r}; use decode or prefill.")
    for other, options in own.items():
        for name, value in options.items():
            if other != phase and value is not None:
                raise ValueError(f"{name} does not apply to --phase {phase}; omit it.")
    if own["decode"]["--mtp-accept"] is not None and not own["decode"]["--mtp-tokens"]:
        raise ValueError("--mtp-accept needs speculative tokens: give --mtp-tokens as well.")


def as_object(price: StepPrice, balanced: StepPrice) -> dict[str, Any]:
    """Return the output of --json. `balanced`: price of the step with an expert imbalance of 1."""
    return {
        "step_ms": price.seconds * 1e3,
        "tokens_per_s_gpu": price.tokens_per_s_gpu,
        "tokens_per_s_user": price.tokens_per_s_user,
        "phase": price.phase,
        "plan": price.schedule.name,
        "num_micro_batches": len(price.micro_batches),
        "micro_batch_layer_us": price.micro_batch_layer_s * 1e6,
        "expert_imbalance": price.micro_batches[0].expert_imbalance,
        "balanced_step_ms": balanced.seconds * 1e3,
        "balanced_tokens_per_s_gpu": balanced.tokens_per_s_gpu,
        "exposed_ms": price.walked.exposed_s * 1e3,
        "hbm_gb": price.hbm_bytes / 1e9,
        "stages": [
            {
                "op": stage.op,
                "name": stage.name,
                "micro_batch_us": stage.micro_batch_s * 1e6,
                "step_ms": stage.seconds * 1e3,
                "bound": stage.bound,
                "exposed_ms": stage.exposed_s * 1e3,
                "share": stage.exposed_s / price.seconds,
            }
            for stage in price.stages
        ],
        "extrapolated": list(price.extrapolated),
    }


def _show(price: StepPrice, balanced: StepPrice, model: StepModel) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from hadal.overlap.trace import legend, timeline

    console = Console(highlight=False)
    parts = f"{len(price.micro_batches)} micro-batch{'es' if len(price.micro_batches) > 1 else ''}"
    title = (
        f"{price.phase}, EP{model.num_ranks} on {model.hardware.name}, {price.schedule.name},"
        f" {parts}"
    )
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_edge=False,
    )
    for name in ("stage", "what", "bound"):
        table.add_column(name, no_wrap=True)
    for name in ("us/layer", "ms/step", "exposed", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for stage in price.stages:
        if before and stage.op != before:
            table.add_section()
        op, before = ("" if stage.op == before else stage.op), stage.op
        layer = "" if stage.op == "step" else f"{stage.micro_batch_s * 1e6:.1f}"
        table.add_row(
            op,
            stage.name,
            stage.bound,
            layer,
            f"{stage.seconds * 1e3:.2f}",
            f"{stage.exposed_s * 1e3:.2f}",
            f"{stage.exposed_s / price.seconds:.1%}",
        )
    table.add_section()
    table.add_row("all", "", "", "", "", f"{price.seconds * 1e3:.2f}", "100.0%")
    console.print(table)
    user = (
        ""
        if price.tokens_per_s_user is None
        else f", {price.tokens_per_s_user:.1f} tokens/s per user"
    )
    console.print(
        f"[bold]{price.seconds * 1e3:.2f} ms per step: {price.tokens_per_s_gpu:,.0f}"
        f" tokens/s/GPU{user}.[/bold] A micro-batch takes"
        f" {price.micro_batch_layer_s * 1e6:.0f} us per layer; the busiest rank receives"
        f" {price.micro_batches[0].expert_imbalance:.2f}x the mean (--expert-imbalance)."
    )
    if balanced.seconds < price.seconds:
        console.print(
            "With balanced routing, as simulated in DeepSeek's profiles:"
            f" {balanced.seconds * 1e3:.2f} ms, {balanced.tokens_per_s_gpu:,.0f}"
            " tokens/s/GPU."
        )
    used = price.hbm_bytes / model.hardware.hbm_bytes
    note = "; [red]it does not fit[/red]" if used > 1.0 else ""
    console.print(f"Weights and KV take {price.hbm_bytes / 1e9:.1f} GB, {used:.0%} of HBM{note}.")
    steady = price.traced(_TRACED_LAYERS)
    console.print(timeline(steady.events, 0, 5, _TIMELINE_WIDTH), markup=False, soft_wrap=True)
    console.print(f"[dim]in {_TRACED_LAYERS} layers: {legend(steady.events, 0)}[/dim]")
    for flag in price.extrapolated:
        console.print(f"[yellow]extrapolated[/yellow] {flag}")


def _write_trace(price: StepPrice, unit: str, path: Path) -> None:
    from hadal.overlap.trace import chrome_trace

    try:
        path.write_text(json.dumps(chrome_trace(unit, [price.traced()])), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--trace {path} cannot be written: {(error.strerror or '').lower()}."
        ) from error


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
