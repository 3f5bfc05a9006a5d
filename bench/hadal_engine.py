"""Hadal as a Subject (bench/subject): a rank's Runner executes plans like those of the leaders (schedulers),
with sampling, but without the server.

python -m bench.hadal_engine MODEL_FOLDER THREADS [fp32]
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from pathlib import Path
from queue import Queue

import torch

from bench.subject import answer, prompts
from hadal.core.config import Deployment
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import read_model_config
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling, StepDone, StepPlan
from hadal.kernels.library import isa, kernel_team
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.load import AS_FP32, AS_STORED, Conversion, load_weights
from hadal.model.runner import ModelRunner
from hadal.runtime.pinning import LOOK_S, PinnedTeam

MAX_BATCH = 64
MAX_TOKENS = 2304
GREEDY = Sampling(temperature=0.0)
CHUNK_TOKENS = Deployment().chunk_tokens


def _bind(threads: int) -> None:
    """Bind the calling thread's team of kernel threads to cores, as a server does."""
    made: Queue[PinnedTeam] = Queue()

    def look() -> None:
        team = PinnedTeam(lambda allowed: allowed[:threads], kernel_team)
        made.put(team)
        while True:
            team.look(time.monotonic())
            time.sleep(LOOK_S)

    threading.Thread(target=look, daemon=True).start()
    made.get().enter(time.monotonic())


class HadalSubject:
    """Engine that prefills in chunks, as a prefill leader cuts them, and decodes by plans that list only
    changes, as a decode leader sends them.
    """

    def __init__(
        self,
        folder: str,
        threads: int,
        sampling: Sampling = GREEDY,
        held: Conversion = AS_STORED,
    ) -> None:
        torch.set_num_threads(threads)
        _bind(threads)
        self._config = read_model_config(Path(folder))
        self._max_tokens = min(MAX_TOKENS, self._config.max_position_embeddings)
        self._blocks_each = -(-self._max_tokens // BLOCK_TOKENS)
        num_blocks = 1 + MAX_BATCH * self._blocks_each  # Block 0 is scratch.
        weights = load_weights(Path(folder), held=held)
        self.runner = ModelRunner(DeepseekV3(weights, KvCache(self._config, num_blocks)), MAX_BATCH)
        self._step_ids = count()
        self._sampling = sampling
        self._seed = 0
        kind = "as stored" if held.dtype is None else "FP32"
        self.note = f"weights {kind}, {isa()} kernels, chunks of {CHUNK_TOKENS}"

    def prefill(self, num_tokens: int) -> float:
        """Return the seconds that one prompt's prefill takes, chunk after chunk, up to its first token."""
        prompt = self._prompts(1, num_tokens)[0]
        start = time.perf_counter()
        self._prefill(0, prompt)
        return time.perf_counter() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` steps. All requests join in an untimed step before."""
        firsts = [
            self._prefill(slot, prompt) for slot, prompt in enumerate(self._prompts(batch, context))
        ]
        joins = tuple(
            Join(slot, self._blocks(slot), context, token, 1, self._sampling)
            for slot, token in enumerate(firsts)
        )
        self._execute(DecodePlan(next(self._step_ids), (), joins, ()))
        start = time.perf_counter()
        for _ in range(steps):
            self._execute(DecodePlan(next(self._step_ids), (), (), ()))
        seconds = time.perf_counter() - start
        self._execute(DecodePlan(next(self._step_ids), tuple(range(batch)), (), ()))
        return seconds

    def _prefill(self, slot: int, prompt: list[int]) -> int:
        """Prefill a prompt and return its first token."""
        token = -1
        for start in range(0, len(prompt), CHUNK_TOKENS):
            tokens = tuple(prompt[start : start + CHUNK_TOKENS])
            end = start + len(tokens)
            blocks = self._blocks(slot)[: -(-end // BLOCK_TOKENS)]
            is_last = end == len(prompt)
            chunk = Chunk(f"r{slot}", tokens, start, blocks, self._sampling if is_last else None, 0)
            done = self._execute(PrefillPlan(next(self._step_ids), (chunk,)))
            if is_last:
                token = done.tokens[0]
        return token

    def _execute(self, plan: StepPlan) -> StepDone:
        done = self.runner.execute(plan)
        if done.error is not None:
            raise RuntimeError(done.error)
        return done

    def _blocks(self, slot: int) -> tuple[int, ...]:
        first = 1 + slot * self._blocks_each
        return tuple(range(first, first + self._blocks_each))

    def _prompts(self, batch: int, num_tokens: int) -> list[list[int]]:
        self._seed += 1
        if num_tokens >= self._max_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit {self._max_tokens} positions")
        return prompts(batch, num_tokens, self._config.vocab_size, self._seed)


if __name__ == "__main__":
    held = AS_FP32 if sys.argv[3:] == ["fp32"] else AS_STORED
    answer(lambda: HadalSubject(sys.argv[1], int(sys.argv[2]), held=held))
