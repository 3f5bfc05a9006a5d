"""Compare every published point with the step model's value: `docs/calibration.md`.

    python -m bench.calibration [--write]

Points are in bench/calibration_points; each is priced by the command given with it. With the silicon table (folder
HADAL_SHARED_DATA) its rows are priced as well. --write needs that table, so that the page stays complete.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from typer.testing import CliRunner

from bench.balance_loads import ROOT
from bench.calibration_points import (
    AIM,
    DECODE_PROFILE,
    LOW_LATENCY,
    LOW_LATENCY_H100,
    NORMAL,
    NOT_PRICED,
    POINTS,
    PROFILE,
    TRAINING_PROFILE,
    Point,
)
from bench.calibration_silicon import silicon
from bench.shared_data import SILICON, find, why_missing
from bench.tables import parser_of
from hadal.cli import app
from hadal.lab.perf.constants import BOUNDS, CONSTANTS
from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.layer import Layer, MicroBatchLoad
from hadal.lab.perf.links import Links, expected_holders
from hadal.lab.perf.roofline import CURVES, Roofline
from hadal.lab.perf.step import StepModel
from hadal.perf.shapes import DEEPSEEK_V3, causal_pairs

PAGE = ROOT / "docs" / "calibration.md"
SILICON_HEAD = "## Silicon rows\n"
_PROFILE_SMS = 112
_WIDTH = 120
"""Columns of the page's text."""


@functools.cache
def priced(command: str) -> dict[str, Any]:
    """Return the result of `hadal step COMMAND --json`. Raises ValueError with the command's error message if
    it fails.
    """
    result = CliRunner().invoke(app, ["step", *shlex.split(command), "--json"])
    if result.exit_code:
        raise ValueError(f"hadal step {command}: {result.stderr}")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def ours(point: Point) -> float:
    """Return the model's value of a point."""
    value = float(priced(point.command)[point.field])
    return value / float(priced(point.over)[point.field]) if point.over else value


def error(point: Point) -> float:
    """Return the relative error: positive if our value is larger."""
    return ours(point) / point.published - 1.0


def page(with_silicon: bool) -> str:
    """Return the whole page as Markdown; the silicon rows are last."""
    parts = [_HEAD, _systems(), _not_priced(), _profile(), _training(), _links(), _constants()]
    data = find(SILICON) if with_silicon else None
    if data is not None:
        parts.append(SILICON_HEAD + "\n" + silicon(data))
    return "\n".join(parts)


_HEAD = """# Calibration of the step model

For engineers who use prices of `hadal step`, `hadal plan` or `hadal simulate` and want to know their error. The page
compares published measurements of DeepSeek-V3/R1 with the step model's values.

## To price a point

```sh
hadal step --phase prefill --ep 32 --tokens 16384 --prompt 4096 --expert-imbalance 1      # point C1
python -m bench.calibration                                                               # prints this page
python -m bench.calibration --write                                                       # writes this page
```

`python -m bench.calibration --write` writes the page; a test compares this page with what the command prints. The
[commands](#commands) list has the command of every point. Each point has a role:

- *aim*: a limit is tested.
- *set on it*: a constant of the model was set on this value.
- *hold-out*: neither. No constant and no curve was fitted to a hold-out.

Two choices of the model's form were made when some hold-outs were known:

- The padding of grouped GEMM on other hardware is scaled by HBM bandwidth instead of the number of SMs (H20 and the
  silicon rows of B200 and GB200).
- Prefill within one NVLink domain does not keep expert groups on nodes (C10).

The InferSim column has the error of InferSim's prediction for the same point, if InferSim was run on it.
"""


def _systems() -> str:
    lines = [
        "## Systems\n",
        _row("point", "what", "published", "ours", "error", "role", "InferSim"),
        _rule(7),
    ]
    for point in POINTS:
        role = (
            f"{point.role}, {point.within:.0%}"
            if point.role == AIM and point.within
            else point.role
        )
        what = point.what + (f" ({point.note})" if point.note else "")
        lines.append(
            _row(
                point.id,
                what,
                f"{_short(point.published)} {point.unit}",
                _short(ours(point)),
                f"{error(point):+.1%}",
                role,
                point.infersim,
            )
        )
    lines += ["\n## Commands\n", "In the order of the points; a ratio has two.\n", "```"]
    for point in POINTS:
        lines.append(f"{point.id:<6} hadal step {point.command}")
        if point.over:
            lines.append(f"{'over':>6} hadal step {point.over}")
    sources = [f"- {source}" for source in dict.fromkeys(point.source for point in POINTS)]
    return "\n".join([*lines, "```\n", "Sources, in the order of the points:\n", *sources, ""])


def _not_priced() -> str:
    batch = 64
    model = StepModel(48, HARDWARE["gb200"])
    while model.decode(batch, 2050).tokens_per_s_gpu < 7583:
        batch += 16
    h20 = StepModel(16, HARDWARE["h20"]).decode(64, 4096).tokens_per_s_gpu
    lines = [
        textwrap.fill(
            f"- {name}: {why.format(c9=batch, c13=f'{h20:.0f}')}",
            _WIDTH,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for name, why in NOT_PRICED.items()
    ]
    return "\n".join(["## Points without a price\n", *lines, ""])


def _profile() -> str:
    found = priced(f"{PROFILE} --mtp-tokens 1")
    by_name = {(stage["op"], stage["name"]): stage["micro_batch_us"] for stage in found["stages"]}
    lines = [
        "## The decode profile, kernel by kernel\n",
        (
            "H800, EP128, 128 tokens a micro-batch (64 requests, one draft each), 4K, one MoE"
            " layer; us.\n"
        ),
        _row("op", "kernel", "published", "ours", "error"),
        _rule(5),
    ]
    for name, op, published_us in DECODE_PROFILE:
        lines.append(_kernel_row(op, name, published_us, by_name[op, name]))
    total = sum(us for *_, us in DECODE_PROFILE)
    lines.append(
        _kernel_row("", "sum", total, sum(by_name[op, name] for name, op, _ in DECODE_PROFILE))
    )
    return "\n".join([*lines, ""])


def _training() -> str:
    hardware, model = HARDWARE["h800"], DEEPSEEK_V3
    batch = MicroBatchLoad(4096, causal_pairs(4096, 0), 4096, 4096)
    links = Links(model, hardware, 64)
    links_s = links.normal_s(4096, 1.0, is_overlapped=True)
    some, all_sms = (
        {
            kernel.name: kernel.seconds
            for kernel in Layer(model, 4).prefill(
                Roofline(hardware, sm_share=share, is_sustained=True),
                batch,
                links_s,
                links.received_ranks,
            )
        }
        for share in (_PROFILE_SMS / hardware.num_sms, 1.0)
    )
    lines = [
        "## The training profile, forward\n",
        (
            "H800, EP64, 4,096 tokens, 112 SMs for computation (core attention: 132), one MoE"
            " layer; us.\nThe elementwise kernels set elementwise_efficiency, the links"
            " prefill_link_share.\n"
        ),
        _row("op", "kernel", "published", "ours", "error"),
        _rule(5),
    ]
    for name, published_us in TRAINING_PROFILE:
        seconds = (all_sms if name == "core attention" else some)[name]
        lines.append(_kernel_row("", name, published_us, seconds * 1e6))
    return "\n".join([*lines, ""])


def _links() -> str:
    lines = [
        "## Links\n",
        "Compared with DeepEP's own tests: microseconds for low-latency kernels, GB/s of logical bytes for"
        " normal kernels.\n",
        _row("mode", "where", "published", "ours", "error"),
        _rule(5),
    ]
    for ranks, *published in LOW_LATENCY:
        found = Links(DEEPSEEK_V3, HARDWARE["h800"], ranks).low_latency_s(
            128, 1.0, is_overlapped=False
        )
        for name, value, seconds in zip(("dispatch", "combine"), published, found, strict=True):
            lines.append(
                _kernel_row(
                    f"low-latency {name}", f"H800, EP{ranks}, 128 tokens", value, seconds * 1e6
                )
            )
    for tokens, *published in LOW_LATENCY_H100:
        found = Links(DEEPSEEK_V3, HARDWARE["h100"], 64).low_latency_s(
            tokens, 1.0, is_overlapped=False
        )
        for name, value, seconds in zip(("dispatch", "combine"), published, found, strict=True):
            what = f"H100, EP64, {tokens} tokens (hold-out)"
            lines.append(_kernel_row(f"low-latency {name}", what, value, seconds * 1e6))
    for ranks, *published in NORMAL:
        found = Links(DEEPSEEK_V3, HARDWARE["h800"], ranks).normal_s(4096, 1.0, is_overlapped=False)
        copies = 4096 * expected_holders(DEEPSEEK_V3, ranks / 8)
        for name, value, seconds, size in zip(
            ("dispatch", "combine"), published, found, (7456, 14336), strict=True
        ):
            rate = copies * size / seconds / 1e9
            lines.append(
                _kernel_row(f"normal {name}", f"H800, EP{ranks}, 4,096 tokens", value, rate)
            )
    return "\n".join([*lines, ""])


def _constants() -> str:
    lines = [
        "## Constants, curves and hardware\n",
        "All free constants:\n",
        _row("constant", "value", "physical range", "how it was set"),
        _rule(4),
    ]
    for field in fields(CONSTANTS):
        bound, value = BOUNDS[field.name], getattr(CONSTANTS, field.name)
        span = f"{bound.low:g} to {bound.high:g} {bound.unit}"
        lines.append(_row(f"`{field.name}`", f"{value:g}", span, bound.how))
    lines += [
        (
            "\nKernel curves, fitted to published tables by relative error (residual: median of"
            " |log|):\n"
        ),
        _row("curve", "efficiency", "bandwidth", "launch us", "residual", "source"),
        _rule(6),
    ]
    for name, curve in CURVES.items():
        lines.append(
            _row(
                name,
                f"{curve.efficiency:.3f}",
                f"{curve.bandwidth:.3f}",
                f"{curve.launch_s * 1e6:.1f}",
                f"{curve.residual:.1%}",
                curve.source,
            )
        )
    lines += ["\nHardware:\n", _row("name", "source"), _rule(2)]
    lines += [_row(row.name, row.source) for row in HARDWARE.values()]
    return "\n".join([*lines, ""])


def _kernel_row(op: str, name: str, published: float, value: float) -> str:
    return _row(op, name, _short(published), _short(value), f"{value / published - 1:+.1%}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(num: int) -> str:
    return "|" + " --- |" * num


def _short(value: float) -> str:
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3g}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, or write it."""
    parser = parser_of("calibration", __doc__)
    parser.add_argument("--write", action="store_true", help="write docs/calibration.md")
    options = parser.parse_args(arguments)
    if options.write and find(SILICON) is None:
        sys.exit(f"The silicon rows are part of the page: {why_missing(SILICON)}.")
    text = page(with_silicon=True)
    if options.write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
