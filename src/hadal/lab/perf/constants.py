"""All free constants of the step model, each with its unit, its physical bounds and its source.

Other numbers in lab/perf are model dimensions, hardware rows, published measurements, or curves
fitted to published kernel tables, with their residual (lab/perf/roofline, lab/perf/links).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

MAX_CONSTANTS = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """Physical bounds of a constant, and the source of its value."""

    low: float
    high: float
    unit: str
    how: str
    """Meaning of the constant, and how its value was set."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Values of all constants. Raises ValueError if one is outside its physical bounds."""

    step_overhead_s: float = 1.0e-3
    row_overhead_s: float = 23e-6
    small_kernel_s: float = 2.0e-6
    elementwise_efficiency: float = 0.70
    prefill_link_share: float = 0.72
    combine_slowdown: float = 1.15
    sustained_clock: float = 0.875
    prompt_affinity: float = 1.4

    def __post_init__(self) -> None:
        for field in fields(self):
            value, bound = getattr(self, field.name), BOUNDS[field.name]
            if not bound.low <= value <= bound.high:
                raise ValueError(
                    f"{field.name} is {value:g} {bound.unit}; the physical range is"
                    f" {bound.low:g} to {bound.high:g}."
                )


BOUNDS: dict[str, Bound] = {
    "step_overhead_s": Bound(
        0.0,
        10e-3,
        "s",
        "Between two steps on the host: planning, graph launch, reading tokens back. Set with"
        " row_overhead_s.",
    ),
    "row_overhead_s": Bound(
        0.0,
        50e-6,
        "s",
        "Per row that is sampled: the draw over 129,280 logits and the host's bookkeeping. Set"
        " together with step_overhead_s: the published decode profile ends at 96 ms a step, of"
        " which layers take 87.3 ms and head and draft layer what the model prices.",
    ),
    "small_kernel_s": Bound(
        0.5e-6,
        10e-6,
        "s",
        "A kernel that moves next to nothing, in a CUDA graph: norm, quantise and activation rows"
        " of the decode profile take 2-5 us.",
    ),
    "elementwise_efficiency": Bound(
        0.3,
        0.95,
        "of HBM bandwidth",
        "Mean of three kernels of DeepSeek's training profile, achieved share of HBM bandwidth: expand 0.73, SwiGLU"
        " with quantisation 0.63, weighted reduction 0.80.",
    ),
    "prefill_link_share": Bound(
        0.4,
        1.0,
        "of stand-alone rate",
        "DeepEP's normal kernels while computation runs beside them: 31 GB/s and 33 GB/s in"
        " DeepSeek's training profile against 44.6 GB/s in the unit test (same remote bytes).",
    ),
    "combine_slowdown": Bound(
        1.0,
        1.6,
        "of stand-alone transfer time",
        "DeepEP's low-latency combine while core attention streams KV: 394 us in the decode profile"
        " where the stand-alone curve gives 346 us. The dispatch of the same profile shows none.",
    ),
    "sustained_clock": Bound(
        0.75,
        1.0,
        "of the clock of a short benchmark",
        "Prefill keeps tensor cores busy for seconds, and the GPU throttles: 865 of 989 TFLOPS"
        " (FlashMLA deep-dive). DeepSeek's training profile against the curves of isolated kernels"
        " gives 0.88 for its seven GEMMs and 0.91 with core attention. Applied only to prefill on"
        " power-limited hardware: decode's own profile rows lie on the curves.",
    ),
    "prompt_affinity": Bound(
        0.3,
        3.0,
        "relative standard deviation",
        "Of one prompt's load over experts, around the workload's mean. Set on one ratio: SGLang's"
        " prefill of 4K prompts with simulated perfect balance over the same with EPLB (59,337 /"
        " 50,302).",
    ),
}
CONSTANTS = Constants()
