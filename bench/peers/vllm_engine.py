"""vLLM's CPU build as a Subject: its own engine loop, stepped from here so that prefill and decode are timed apart.

    VLLM_ENV/bin/python -m bench.peers.vllm_engine MODEL_FOLDER THREADS [float32|bfloat16] [compiled]

Runs in its own environment (see setup.py beside this file) and imports nothing of Hadal.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from bench.subject import answer, prompts

MAX_BATCH = 64
ENVIRONMENT = {
    "VLLM_MLA_DISABLE": "1",  # vLLM's MLA kernels support the released head size only.
    "VLLM_CPU_KVCACHE_SPACE": "2",
    # Run the engine in this process: a queue would add to the times.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmSubject:
    """vLLM with greedy sampling, no prefix cache, and token ids in and out. `compiled` adds torch.compile (a
    minute at the start).
    """

    def __init__(self, folder: str, threads: int, dtype: str, *, compiled: bool) -> None:
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads))
        # vLLM reads the environment at import, so this import comes after setting it.
        from vllm import LLM, SamplingParams

        self._params: Any = SamplingParams
        self._llm: Any = LLM(
            folder,
            dtype=dtype,
            enforce_eager=not compiled,
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=MAX_BATCH,
            enable_prefix_caching=False,
            max_num_batched_tokens=8192,
            disable_log_stats=True,
        )
        self._vocab_size = int(self._llm.llm_engine.model_config.get_vocab_size())
        self._seed = 0
        self.note = f"{dtype}, {'compiled' if compiled else 'eager'}"

    def prefill(self, num_tokens: int) -> float:
        self._add(1, num_tokens, max_tokens=1)
        start = time.perf_counter()
        self._run()
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        self._add(batch, context, max_tokens=steps + 1)
        produced = dict.fromkeys(range(batch), 0)
        while (
            min(produced.values()) < 1
        ):  # Prefill may take several steps: time decode from when every request has a token.
            for out in self._llm.llm_engine.step():
                produced[int(out.request_id.split("-")[1])] = len(out.outputs[0].token_ids)
        done = sum(produced.values()) - batch
        start = time.perf_counter()
        self._run()
        # If prefill took several steps, some requests decoded during it. Those tokens are not in
        # the measured time, so scale it to all tokens.
        return (time.perf_counter() - start) * (batch * steps) / (batch * steps - done)

    def _add(self, batch: int, num_tokens: int, max_tokens: int) -> None:
        self._seed += 1
        params = self._params(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        for index, prompt in enumerate(prompts(batch, num_tokens, self._vocab_size, self._seed)):
            self._llm.llm_engine.add_request(
                f"{self._seed}-{index}", {"prompt_token_ids": prompt}, params
            )

    def _run(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


if __name__ == "__main__":
    answer(
        lambda: VllmSubject(
            sys.argv[1], int(sys.argv[2]), sys.argv[3], compiled=sys.argv[4:] == ["compiled"]
        )
    )
