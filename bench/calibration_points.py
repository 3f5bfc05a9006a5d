"""Published measurements of DeepSeek-V3/R1 for checking the step model, each with the command that prices it.

A point's command is the part after `hadal step`; the compared value is a field of its JSON. Nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU = "tokens_per_s_gpu"
AIM, SET, HELD = "aim", "set on it", "hold-out"


@dataclass(frozen=True, slots=True)
class Point:
    """One published value. If `over` is set, the compared value is a ratio: `field` as `command` prices it,
    divided by `field` as `over` prices it.
    """

    id: str
    what: str
    published: float
    unit: str
    command: str
    source: str
    role: str = HELD
    """Use: `aim`: the error has a limit; `set on it`: a constant was fitted to it; `hold-out`: neither."""
    within: float | None = None
    field: str = GPU
    over: str | None = None
    infersim: str = ""
    note: str = ""


_LMSYS = "LMSYS 2025-05-05"
PROFILE = "--phase decode --ep 128 --batch 128 --kv 4096 --expert-imbalance 1"
_DRAFT = f"{PROFILE} --mtp-tokens 1 --mtp-accept"
_PREFILL = "--phase prefill --ep 32 --tokens 16384"
_SGLANG = f"{_PREFILL} --hardware h100"
_DECODE_72 = "--phase decode --ep 72 --kv 2050 --hardware h100"
_DAY = "--phase decode --ep 144 --batch 88 --kv 4989"

POINTS: tuple[Point, ...] = (
    Point(
        "C1",
        "DeepSeek's prefill profile, EP32, 4K prompts, balanced routing",
        7839,
        "tokens/s/GPU",
        f"{_PREFILL} --prompt 4096 --expert-imbalance 1",
        f"{_LMSYS}, profile-data",
        AIM,
        0.05,
        infersim="+15.2 %",
    ),
    Point(
        "C2",
        "DeepSeek's decode profile, EP128, 128 requests, 4K, one draft, 74 % accepted",
        2325,
        "tokens/s/GPU",
        f"{_DRAFT} 0.74",
        f"{_LMSYS}, profile-data",
        AIM,
        0.05,
        infersim="+15.1 % (no drafts)",
        note=(
            "74 % follows from 96 ms a step and 2,325 tokens/s, so this row repeats the next one"
        ),
    ),
    Point(
        "C2",
        "the same, a step",
        96.0,
        "ms",
        f"{_DRAFT} 0.74",
        "zdszero.github.io: a reading of decode.json",
        SET,
        field="step_ms",
        note="row_overhead_s",
    ),
    Point(
        "C2",
        "the same, a micro-batch in a layer",
        712.5,
        "us",
        f"{_DRAFT} 0.74",
        "the same reading: 709 by its stages, 716 by 61 layers",
        AIM,
        0.05,
        field="micro_batch_layer_us",
        note=(
            "combine_slowdown was set on its combine; MLA, projections and experts are curves that"
            " have its rows among hundreds of others"
        ),
    ),
    Point(
        "C2",
        "the same, 80 % accepted (DeepSeek's 80-90 %)",
        2325,
        "tokens/s/GPU",
        f"{_DRAFT} 0.8",
        _LMSYS,
    ),
    Point(
        "C2",
        "the same, 60 % accepted (LMSYS' reading)",
        2325,
        "tokens/s/GPU",
        f"{_DRAFT} 0.6",
        _LMSYS,
    ),
    Point(
        "C2",
        "the same without drafts",
        2325,
        "tokens/s/GPU",
        PROFILE,
        _LMSYS,
        note=(
            "the kernels' times contradict this reading: they are those of 128 tokens a micro-batch"
        ),
    ),
    Point(
        "C3",
        "DeepSeek's day, decode at its mean context, no drafts",
        1850,
        "tokens/s/GPU",
        _DAY,
        "inference overview: 14.8k a node, idle hours in",
        infersim="-8.9 %",
    ),
    Point(
        "C3",
        "the same, one draft, 80 % accepted",
        1850,
        "tokens/s/GPU",
        f"{_DAY} --mtp-tokens 1 --mtp-accept 0.8",
        "inference overview",
    ),
    Point(
        "C3",
        "the same, each user",
        21.0,
        "tokens/s",
        f"{_DAY} --mtp-tokens 1 --mtp-accept 0.8",
        "inference overview: 20-22",
        field="tokens_per_s_user",
    ),
    Point(
        "C4",
        "SGLang, 4x8 H100, EP32, 1K prompts, EPLB",
        57674 / 8,
        "tokens/s/GPU",
        f"{_SGLANG} --prompt 1024",
        _LMSYS,
        AIM,
        0.07,
    ),
    Point(
        "C4", "2K prompts", 54543 / 8, "tokens/s/GPU", f"{_SGLANG} --prompt 2048", _LMSYS, AIM, 0.07
    ),
    Point(
        "C4", "4K prompts", 50302 / 8, "tokens/s/GPU", f"{_SGLANG} --prompt 4096", _LMSYS, AIM, 0.07
    ),
    Point(
        "C5",
        "4K prompts, simulated perfect balance",
        59337 / 8,
        "tokens/s/GPU",
        f"{_SGLANG} --prompt 4096 --expert-imbalance 1",
        _LMSYS,
    ),
    Point(
        "C5/C4",
        "gain from perfect balance at 4K",
        59337 / 50302,
        "x",
        f"{_SGLANG} --prompt 4096 --expert-imbalance 1",
        _LMSYS,
        SET,
        over=f"{_SGLANG} --prompt 4096",
        note="prompt_affinity",
    ),
    Point(
        "C6",
        "SGLang, 9x8 H100, EP72, 256 requests, 2K in, 100 out",
        22282 / 8,
        "tokens/s/GPU",
        f"{_DECODE_72} --batch 256",
        _LMSYS,
        AIM,
        0.05,
    ),
    Point(
        "C6",
        "the same by the schedule SGLang names",
        22282 / 8,
        "tokens/s/GPU",
        f"{_DECODE_72} --batch 256 --plan decode_five",
        _LMSYS,
    ),
    Point(
        "C7",
        "gain of two micro-batches over one, prefill, 1K prompts",
        1.31,
        "x",
        f"{_SGLANG} --prompt 1024",
        f"{_LMSYS}: +27 to +35 %",
        over=f"{_SGLANG} --prompt 1024 --plan sequential",
    ),
    Point(
        "C7",
        "gain of two micro-batches over one, decode, 256 requests",
        1.255,
        "x",
        f"{_DECODE_72} --batch 256",
        _LMSYS,
        over=f"{_DECODE_72} --batch 256 --plan sequential",
    ),
    Point(
        "C7",
        "gain of two micro-batches over one, decode, 32 requests",
        0.73,
        "x",
        f"{_DECODE_72} --batch 32 --plan decode_five",
        _LMSYS,
        over=f"{_DECODE_72} --batch 32 --plan sequential",
    ),
    Point(
        "C7",
        "EPLB in prefill",
        1.49,
        "x",
        f"{_SGLANG} --prompt 1024",
        _LMSYS,
        over=f"{_SGLANG} --prompt 1024 --expert-imbalance 2.29",
        note="2.29: SGLang's published loads of 1,024-token prompts on 32 ranks, no balancer",
    ),
    Point(
        "C7",
        "EPLB in decode",
        2.54,
        "x",
        f"{_DECODE_72} --batch 256",
        _LMSYS,
        over=f"{_DECODE_72} --batch 256 --expert-imbalance 3.13",
        note="3.13: SGLang's published loads of 2000/100, no balancer (64 ranks)",
    ),
    Point(
        "C10",
        "SGLang, GB200, prefill, 2K prompts, FP8",
        18471,
        "tokens/s/GPU",
        "--phase prefill --ep 4 --tokens 16384 --prompt 2048 --hardware gb200",
        "LMSYS, GB200 part II",
        note="EP4 and 16K tokens are assumed",
    ),
    Point(
        "C10",
        "the same, NVFP4 experts",
        26156,
        "tokens/s/GPU",
        "--phase prefill --ep 4 --tokens 16384 --prompt 2048 --hardware gb200 --experts-dtype fp4",
        "LMSYS, GB200 part II",
        note="theirs has FP8 attention as well, ours BF16",
    ),
    Point(
        "C11",
        "vLLM, GB200, prefill, 2K prompts, 2 GPUs, NVFP4",
        26214,
        "tokens/s/GPU",
        "--phase prefill --ep 2 --tokens 16384 --prompt 2048 --hardware gb200 --experts-dtype fp4",
        "vLLM 2026-02-03",
        note="16K tokens are assumed; FP8 attention as above",
    ),
    Point(
        "C12",
        "SGLang, H200, 128 requests, 2 drafts over none",
        1.142,
        "x",
        "--phase decode --ep 96 --batch 128 --kv 2050 --hardware h200 --mtp-tokens 2"
        " --mtp-accept 0.8",
        "LMSYS 2025-07-17",
        over="--phase decode --ep 96 --batch 128 --kv 2050 --hardware h200",
        note="acceptance is not published; 80 % is assumed",
    ),
)

NOT_PRICED = {
    "C8": "CloudMatrix384: Ascend is not in the hardware table.",
    "C9": (
        "SGLang on 12 GB200 nodes, 7,583 tokens/s/GPU: requests per GPU are not published. Ours"
        " gives it at about {c9} requests (EP48, 2K)."
    ),
    "C11": "vLLM's decode, 10,108 tokens/s/GPU on 8 GB200: requests per GPU are not published.",
    "C13": (
        "Ant on H20: prefill is TP8, which is not modelled; decode (712 tokens/s/GPU, EP16, 4K) has"
        " FP8 attention and drafts, and neither requests nor acceptance are published. Ours, BF16"
        " and without drafts, gives {c13} at 64 requests."
    ),
    "C14": "Tencent: the number of GPUs is unclear.",
    "C16": (
        "14.76 ms a step is the paper's ceiling for a NIC without latency; no priced exchange is"
        " below its bytes."
    ),
}

DECODE_PROFILE = (
    ("norm, quantise", "attn_in", 4.0),
    ("q_a and kv_a", "attn_in", 13.0),
    ("norms", "attn_in", 2.0),
    ("quantise", "attn_in", 2.0),
    ("q_b", "attn_in", 19.0),
    ("absorb W_UK", "attn_in", 16.0),
    ("rope, write KV", "attn_in", 7.0),
    ("core attention", "attn_core", 255.0),
    ("absorb W_UV", "attn_core", 15.0),
    ("quantise", "attn_core", 5.0),
    ("o_proj", "attn_core", 50.0),
    ("norm, quantise", "gate", 3.0),
    ("gate", "gate", 8.0),
    ("top-k", "gate", 8.0),
    ("dispatch", "dispatch", 187.0),
    ("shared up", "shared", 17.0),
    ("shared SwiGLU", "shared", 4.0),
    ("shared down", "shared", 10.0),
    ("experts up", "experts", 81.0),
    ("experts SwiGLU", "experts", 8.0),
    ("experts down", "experts", 39.0),
    ("combine", "combine", 394.0),
)
"""(kernel, op, us): MoE layer of the decode profile, one micro-batch, as read by a third party
(zdszero.github.io).
"""

TRAINING_PROFILE = (
    ("q_b", 362.0),
    ("kv_b", 241.0),
    ("core attention", 1237.0),
    ("o_proj", 885.0),
    ("shared up", 256.0),
    ("shared down", 140.0),
    ("map rows", 241.0),
    ("expand", 192.0),
    ("experts up", 1863.0),
    ("experts SwiGLU", 160.0),
    ("experts down", 1035.0),
    ("weighted reduce", 319.0),
    ("dispatch", 3360.0),
    ("combine", 6200.0),
)
"""(kernel, us): DeepSeek's training profile, forward, EP64, 4,096 tokens, 112 SMs for computation;
core attention had all 132.
"""

LOW_LATENCY = (
    (8, 77.0, 114.0),
    (16, 118.0, 195.0),
    (32, 155.0, 273.0),
    (64, 173.0, 314.0),
    (128, 192.0, 369.0),
    (256, 194.0, 360.0),
)
"""(ranks, dispatch us, combine us): DeepEP README of June 2025, H800, 128 tokens per rank."""
LOW_LATENCY_H100 = ((16, 45.7, 59.6), (64, 94.0, 160.3), (128, 166.8, 304.7), (256, 301.1, 579.5))
"""(tokens, dispatch us, combine us): H100, EP64, AIConfigurator 0.12 (sglang 0.5.6)."""
NORMAL = ((32, 58.0, 57.0), (64, 51.0, 50.0))
"""(ranks, dispatch GB/s, combine GB/s): DeepEP README, April 2025, H800, 4,096 tokens; includes the copy to
the sender's own node.
"""
