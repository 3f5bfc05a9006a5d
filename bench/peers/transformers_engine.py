"""transformers' DeepseekV3ForCausalLM as a Subject: greedy decoding with its own cache, the loop `generate` runs.

    python -m bench.peers.transformers_engine MODEL_FOLDER THREADS
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.subject import answer, prompts


class TransformersSubject:
    """Grouped-GEMM experts and SDPA attention: the fastest of its options for this architecture on a CPU."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
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
            token.tolist()  # A server would have to send it.
        return time.perf_counter() - start

    def _prompts(self, batch: int, num_tokens: int) -> torch.Tensor:
        self._seed += 1
        return torch.tensor(prompts(batch, num_tokens, self._vocab_size, self._seed))


if __name__ == "__main__":
    answer(lambda: TransformersSubject(sys.argv[1], int(sys.argv[2])))
