"""Each CPU kernel beside its limits: the GEMM rate, the memory's read rate, and plain torch doing
the same.

`python -m bench.kernels [threads]`. Every figure is the best of many calls; limits are measured in
the same run, because a shared machine is not the same twice. Knows nothing of requests or servers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from bench.machine import Limits, describe, measure_limits
from hadal.core.model_config import SCALE_BLOCK
from hadal.kernels import library
from hadal.kernels.attention import mla_decode, select_positions
from hadal.kernels.experts import experts
from hadal.kernels.products import linear
from hadal.kernels.weights import describe as describe_weights
from hadal.reference import attention as mla_twin
from hadal.reference import experts as experts_twin
from hadal.reference.fp8 import E4M3_MAX, num_scales
from hadal.reference.params import FP8, Experts, Matrix, MlpWeights

SECONDS = 0.5
EXPERT_SHAPES = {  # hidden, width, experts, chosen
    "tiny": (192, 32, 256, 8),
    "mid": (512, 256, 64, 8),
}


def best(work: Callable[[], object], seconds: float = SECONDS) -> float:
    """The fastest of the calls that fit into `seconds`, at least three."""
    work()
    fastest, end, calls = float("inf"), time.perf_counter() + seconds, 0
    while time.perf_counter() < end or calls < 3:
        start = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - start)
        calls += 1
    return fastest


def show(
    name: str, seconds: float, plain_s: float, num_bytes: float, flops: float, limits: Limits
) -> None:
    """One line: rates, the bound that applies, and how much of it is reached."""
    bound = max(num_bytes / limits.read_bytes_per_s, flops / limits.gemm_flops_per_s)
    print(
        f"{name:34s} {seconds * 1e6:9.0f} us {num_bytes / seconds / 1e9:7.1f} GB/s"
        f" {flops / seconds / 1e9:7.0f} GFLOP/s {bound / seconds:6.0%} of the bound   plain torch"
        f" {plain_s / seconds:5.1f}x"
    )


def as_stored(w_NK: torch.Tensor) -> dict[str, Matrix]:
    """The matrix in each form that a checkpoint may have; FP8 once more for compute = "fp8"."""
    rows, columns = w_NK.shape
    scale = float(w_NK.abs().max()) / E4M3_MAX
    scales = torch.full(num_scales((rows, columns), SCALE_BLOCK), scale)
    codes = Matrix((w_NK / scale).to(FP8), scales)
    return {
        "FP32": Matrix(w_NK),
        "BF16": Matrix(w_NK.bfloat16()),
        "FP8": codes,
        "FP8, tokens too": replace(codes, is_rounding_inputs=True),
    }


def bench_linear(limits: Limits) -> None:
    """256 MiB of weights, more than any cache, then 4 MiB, which stay in it."""
    for rows, k in ((65536, 1024), (2048, 512)):
        w_NK = torch.randn(rows, k)
        kind_to_matrix = as_stored(w_NK)
        for m in (1, 2, 4, 8, 16, 32, 64, 512):
            if rows * m > 1 << 23:
                continue
            x_MK = torch.randn(m, k)
            plain = best(lambda: F.linear(x_MK, w_NK))
            for kind, w in kind_to_matrix.items():
                ours, num_bytes = best(lambda: linear(x_MK, w)), sum(x.nbytes for x in w.parts)
                name = f"linear {kind} {m} x {k} x {rows}"
                show(name, ours, plain, num_bytes, 2 * m * rows * k, limits)


def bench_experts(limits: Limits) -> None:
    """Random routing; bytes are those of the experts that were hit. And what it takes to tell the
    kernels of a layer's experts.
    """
    for name, (dim, width, num_experts, top_k) in EXPERT_SHAPES.items():
        shapes = ((width, dim), (width, dim), (dim, width))
        all_stored = [
            [as_stored(torch.randn(*shape)) for shape in shapes] for _ in range(num_experts)
        ]
        kind_to_held = {
            kind: Experts(
                tuple(MlpWeights(*(matrix[kind] for matrix in stored)) for stored in all_stored)
            )
            for kind in all_stored[0][0]
        }
        for kind, held in kind_to_held.items():
            start_s = time.perf_counter()
            describe_weights(held)
            took_s = time.perf_counter() - start_s
            print(f"experts {kind} {name}, all {num_experts} described{took_s * 1e6:16.0f} us")
        for num_tokens in (1, 8, 32, 128, 512, 2048):
            x_TD, weights_TK = torch.randn(num_tokens, dim), torch.rand(num_tokens, top_k)
            ids_TK = torch.rand(num_tokens, num_experts).topk(top_k).indices
            flops, hit = 6 * num_tokens * top_k * dim * width, ids_TK.unique().tolist()
            plain = best(
                lambda: experts_twin.experts(x_TD, kind_to_held["FP32"], ids_TK, weights_TK)
            )
            for kind, held in kind_to_held.items():
                ours = best(lambda: experts(x_TD, held, ids_TK, weights_TK))
                num_bytes = sum(part.nbytes for expert in hit for part in held[expert].parts)
                title = f"experts {kind} {name}, {num_tokens} tokens"
                show(title, ours, plain, num_bytes, flops, limits)


def bench_mla_decode(limits: Limits) -> None:
    """Heads and latents of the mid model and of DeepSeek-V3."""
    for heads, c, r in ((8, 128, 32), (128, 512, 64)):
        for batch, length in ((1, 512), (1, 8192), (16, 1024)):
            num_blocks = length // 64
            cache_PLSD = torch.randn(batch * num_blocks, 2, 64, c + r)
            table_BM = torch.randperm(batch * num_blocks).view(batch, num_blocks).int()
            lengths_B = torch.full((batch,), length)
            q = torch.randn(batch, heads, c), torch.randn(batch, heads, r)
            ours = best(lambda: mla_decode(*q, cache_PLSD, 1, table_BM, lengths_B, 0.1))
            plain = best(lambda: mla_twin.mla_decode(*q, cache_PLSD, 1, table_BM, lengths_B, 0.1))
            flops = 2 * batch * heads * length * (2 * c + r)
            show(
                f"mla {heads} heads, {batch} x {length}",
                ours,
                plain,
                4 * batch * length * (c + r),
                flops,
                limits,
            )


def bench_sparse_attention(limits: Limits) -> None:
    """DeepSeek-V3.2's shapes: the indexer over a whole context, and attention to what it selects."""
    heads, c, r, index_heads, width, num_selected = 128, 512, 64, 64, 128, 2048
    for length in (4096, 32768):
        num_blocks = length // 64
        cache_PLSD = torch.randn(num_blocks, 1, 64, c + r + width)
        seen = cache_PLSD, 0, torch.randperm(num_blocks)[None].int(), torch.tensor([length])
        q_1JX, weights_1J = torch.randn(1, index_heads, width), torch.randn(1, index_heads)
        ours = best(lambda: select_positions(q_1JX, weights_1J, *seen, num_selected))
        plain = best(lambda: mla_twin.select_positions(q_1JX, weights_1J, *seen, num_selected))
        num_bytes, flops = 4 * length * width, 2 * length * index_heads * width
        name = f"select {num_selected} of {length}"
        show(name, ours, plain, num_bytes, flops, limits)
        selected_1K = select_positions(q_1JX, weights_1J, *seen, num_selected)
        q = torch.randn(1, heads, c), torch.randn(1, heads, r)
        ours = best(lambda: mla_decode(*q, *seen, 0.1, selected_1K))
        plain = best(lambda: mla_twin.mla_decode(*q, *seen, 0.1, selected_1K))
        num_bytes, flops = 4 * num_selected * (c + r), 2 * heads * num_selected * (2 * c + r)
        show(f"mla {heads} heads, those of {length}", ours, plain, num_bytes, flops, limits)
        ours = best(lambda: mla_decode(*q, *seen, 0.1))
        plain = best(lambda: mla_twin.mla_decode(*q, *seen, 0.1))
        num_bytes, flops = 4 * length * (c + r), 2 * heads * length * (2 * c + r)
        show(f"mla {heads} heads, all of {length}", ours, plain, num_bytes, flops, limits)


def main() -> None:
    """Print everything for the number of threads asked for (torch's own if none)."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    threads = torch.get_num_threads()
    limits = measure_limits(threads)
    print(describe())
    print(
        f"kernels {library.isa()}, {threads} threads; limits: read"
        f" {limits.read_bytes_per_s / 1e9:.1f} GB/s, GEMM {limits.gemm_flops_per_s / 1e9:.0f}"
        " GFLOP/s (a bound above 100 % is a cache or a faster kernel)"
    )
    bench_linear(limits)
    bench_experts(limits)
    bench_mla_decode(limits)
    bench_sparse_attention(limits)


if __name__ == "__main__":
    main()
