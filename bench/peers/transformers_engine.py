"""transformers' DeepseekV3ForCausalLM as a Subject: greedy decoding with its own cache, in the loop that
`generate` runs.

    python -m bench.peers.transformers_engine MODEL_FOLDER THREADS [compiled|bf16]

Of its options, grouped-GEMM experts and SDPA attention are the fastest on a CPU at every batch except 1. At
batch 1, torch.compile over a static cache with gathered experts is faster: grouped experts do not compile, and
gathering costs more with every further row. That mode is `compiled`, a peer of its own for that one point.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache

from bench.subject import answer, prompts


class TransformersSubject:
    """transformers in eager mode, with a cache that grows."""

    def __init__(self, folder: str, threads: int, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
        self._model.eval()
        self._model.set_experts_implementation("grouped_mm")
        self._vocab_size = int(self._model.config.vocab_size)
        self._seed = 0
        self.note = "grouped_mm, sdpa, dynamic cache"

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        ids = self._prompts(1, num_tokens)
        start = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        ids = self._prompts(batch, context)
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(steps):
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            token.tolist()  # A server needs the values, to send them.
        return time.perf_counter() - start

    def _prompts(self, batch: int, num_tokens: int) -> torch.Tensor:
        self._seed += 1
        return torch.tensor(prompts(batch, num_tokens, self._vocab_size, self._seed))


class CompiledSubject(TransformersSubject):
    """transformers compiled, for decoding at batch 1 only. Compiling takes most of a minute, in the warm-up."""

    WARM_UP = 3

    def __init__(self, folder: str, threads: int) -> None:
        super().__init__(folder, threads)
        self._model.set_experts_implementation("batched_mm")
        self._step = torch.compile(self._model.forward)
        self.note = "compiled, batched_mm, sdpa, static cache; batch 1 only"

    def prefill(self, num_tokens: int) -> float:
        raise NotImplementedError("decoding only")

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        if batch > 1:
            raise NotImplementedError("batch 1 only")
        cache = StaticCache(
            config=self._model.config, max_cache_len=context + 128
        )  # The same size in every measurement.
        out = self._model(
            self._prompts(1, context), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        token = out.logits[:, -1:].argmax(-1)
        start = 0.0
        for index in range(-self.WARM_UP, steps):
            if index == 0:
                start = time.perf_counter()
            position = torch.tensor([context + self.WARM_UP + index])
            out = self._step(
                input_ids=token,
                past_key_values=cache,
                use_cache=True,
                position_ids=position[None],
                cache_position=position,
            )
            token = out.logits[:, -1:].argmax(-1)
            token.tolist()
        return time.perf_counter() - start


if __name__ == "__main__":
    path, count, asked = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if asked == ["compiled"]:
        answer(lambda: CompiledSubject(path, count))
    else:
        dtype = torch.bfloat16 if asked == ["bf16"] else torch.float32
        answer(lambda: TransformersSubject(path, count, dtype))
