"""Compare measured serving rows of DeepSeek-R1/V3 (InferenceX, from aiconfigurator-core 0.12) with priced
decode steps.

Only rows that the model describes are used: disaggregated decode, data-parallel attention over the same ranks
as the experts, known requests per rank, and enough concurrency to fill them. The table does not record drafts
(speculative tokens), so rows measured with drafts look faster than any step. Use the comparison as a check of
the whole model, not for fitting.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.step import StepModel

SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200"}
_FILLED = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """One measured decode point."""

    hardware: str
    backend: str
    precision: str
    num_ranks: int
    requests_per_rank: float
    input_tokens: float
    output_tokens: float
    tpot_ms: float

    def error(self) -> float:
        """Return the relative error of the priced step against the measured time per token."""
        model = StepModel(self.num_ranks, HARDWARE[self.hardware], expert_dtype=self.precision)
        price = model.decode(self.requests_per_rank, self.input_tokens + self.output_tokens / 2)
        return price.seconds * 1e3 / self.tpot_ms - 1.0


def rows(path: Path) -> Iterator[Row]:
    """Yield the rows that can be priced, without duplicates."""
    seen = set()
    with path.open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            row = _row(record)
            if row is not None and row not in seen:
                seen.add(row)
                yield row


def _row(record: dict[str, str]) -> Row | None:
    fields = ("moe_ep_size", "attention_dp_size", "tp_size", "batch_size", "num_workers")
    names = [f"decode_{field}" for field in fields]
    if (
        record["system"] not in SYSTEMS
        or record["mode"] != "disagg"
        or not all(record[name] for name in names)
    ):
        return None
    ranks, attention, tensor, batch, workers = (float(record[name]) for name in names)
    if ranks != attention or tensor != 1.0 or ranks < 4:
        return None
    # If a row's concurrency does not fill its batch, it was measured at another batch than it
    # states.
    source = record["silicon_data_source"]
    concurrency = float(source.split("silicon_concurrency=")[1].split(";")[0])
    if concurrency < _FILLED * batch * ranks * workers:
        return None
    return Row(
        SYSTEMS[record["system"]],
        record["backend"],
        record["precision"],
        int(ranks),
        batch,
        float(record["isl"]),
        float(record["osl"]),
        float(record["silicon_tpot_ms"]),
    )


def silicon(path: Path) -> str:
    """Return a Markdown table of errors by hardware, engine and precision."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows(path):
        groups.setdefault((row.hardware, row.backend, row.precision), []).append(row.error())
    lines = [
        (
            "Decode steps compared with the measured time per output token of 2025 and 2026"
            " (InferenceX rows in\naiconfigurator-core 0.12.0). The rows have data-parallel"
            " attention, experts over the same ranks, and known and filled\nbatches. Drafts are"
            " not recorded. All rows are hold-outs. Positive: ours is slower.\n"
        ),
        "| hardware | engine | experts | rows | median | median of absolute |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (hardware, backend, precision), errors in sorted(groups.items()):
        median, absolute = statistics.median(errors), statistics.median(map(abs, errors))
        lines.append(
            f"| {hardware} | {backend} | {precision} | {len(errors)} | {median:+.1%} |"
            f" {absolute:.1%} |"
        )
    return "\n".join(lines) + "\n"
