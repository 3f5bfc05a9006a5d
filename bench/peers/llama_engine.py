"""llama.cpp as a Subject: its own llama-batched-bench, one run per measurement. KV is FP32 with
FP32 weights, and F16 (its default) with smaller ones.

    python -m bench.peers.llama_engine MODEL.gguf THREADS

Its timings do not include loading. It feeds random tokens and samples none, so its figures do not include sampling.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.subject import ROOT, answer

BIN = ROOT / ".peers" / "llama-build" / "bin"
TIMEOUT_S = 600
ATTEMPTS = 10
"""Attempts per measurement: the program prints through a thread that it does not join, so a short
run sometimes ends before its result is printed.
"""


class LlamaSubject:
    """llama.cpp with flash attention as the program chooses, and with micro-batches of 512 tokens, its default."""

    def __init__(self, gguf: str, threads: int) -> None:
        self._gguf = Path(gguf)
        self._threads = threads
        if not self._gguf.exists():
            raise FileNotFoundError(f"{gguf}: convert the model first")
        kind = self._gguf.stem.rsplit("-", 1)[1]
        self._kv = "f32" if kind == "f32" else "f16"
        self.note = f"batched-bench, {kind} weights, {self._kv} KV"

    def prefill(self, num_tokens: int) -> float:
        return self._run(1, num_tokens, 1)["t_pp"]

    def decode(self, batch: int, context: int, steps: int) -> float:
        return self._run(batch, context, steps)["t_tg"]

    def _run(self, batch: int, context: int, steps: int) -> dict[str, float]:
        size = batch * (context + steps) + 256
        command = [
            str(BIN / "llama-batched-bench"),
            "-m",
            str(self._gguf),
            "-t",
            str(self._threads),
            "-c",
            str(size),
            "-b",
            "2048",
            "-ub",
            "512",
            "-ctk",
            self._kv,
            "-ctv",
            self._kv,
            "-npp",
            str(context),
            "-ntg",
            str(steps),
            "-npl",
            str(batch),
            "--output-format",
            "jsonl",
        ]
        for _ in range(ATTEMPTS):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    row: dict[str, float] = json.loads(line)
                    return row
        raise RuntimeError(f"no result from {Path(command[0]).name}: {done.stderr[-300:]}")


if __name__ == "__main__":
    answer(lambda: LlamaSubject(sys.argv[1], int(sys.argv[2])))
