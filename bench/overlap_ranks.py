"""Rank processes of a run, for their coordinator: start them, ask all of them at once, end them.

A question is one line of JSON to every rank's stdin, an answer one line back. Every answer has a deadline; a
rank that dies, fails or is late ends the run, with its log in the message. Independent of the measurements.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from bench.checkpoints import ROOT

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
STACKS_S = 0.5
LEAD_S = 0.03
"""Seconds from a question to its start time: enough for the question to reach every rank."""

Answer = dict[str, Any]


class RankFailed(RuntimeError):
    """A rank died, was late or answered with an error; the message holds the end of its log."""


class Ranks:
    """Rank processes, as a context manager: `with Ranks(2) as ranks:`. Ranks listen on `addresses`;
    `prefixes` are put before their commands, to run them as another host.
    """

    def __init__(
        self, num_ranks: int, addresses: Sequence[str] = (), prefixes: Sequence[Sequence[str]] = ()
    ) -> None:
        addresses = addresses or ["127.0.0.1"] * num_ranks
        prefixes = prefixes or [[]] * num_ranks
        self._ranks: list[_Rank] = []
        self._generation = 0
        atexit.register(self.close)
        try:
            for rank in range(num_ranks):
                self._ranks.append(_Rank(rank, addresses[rank], prefixes[rank]))
            self._members = [rank.answer(START_TIMEOUT_S)["member"] for rank in self._ranks]
            self._form()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._ranks)

    def _form(self) -> None:
        self._generation += 1
        self.ask(
            {"do": "form", "generation": self._generation, "members": self._members},
            START_TIMEOUT_S,
        )

    def ask(self, question: Answer, timeout_s: float = 60.0) -> list[Answer]:
        """Send every rank the question. Return the answers in rank order. Raises RankFailed."""
        for rank in self._ranks:
            rank.tell(question)
        return [rank.answer(timeout_s) for rank in self._ranks]

    def run(self, question: Answer, timeout_s: float = 60.0) -> list[Answer]:
        """Start a question on all ranks at the same time. Add `elapsed_s` to each answer: seconds until the
        last rank has ended.
        """
        start_s = time.perf_counter() + LEAD_S
        answers = self.ask({"do": "run", "start_s": start_s, **question}, timeout_s)
        elapsed_s = max(answer["end_s"] for answer in answers) - start_s
        return [{**answer, "elapsed_s": elapsed_s} for answer in answers]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        atexit.unregister(self.close)


class _Rank:
    def __init__(self, rank: int, address: str, prefix: Sequence[str]) -> None:
        self._name = f"rank {rank}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        module = [*prefix, sys.executable, "-m", "bench.overlap_rank"]
        told = ["--rank", str(rank), "--address", address, "--parent", str(os.getpid())]
        # One compute thread per rank leaves the other cores to the other ranks and the links.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        }
        self._process = subprocess.Popen(
            [*module, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def tell(self, question: Answer) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise RankFailed(f"{self._name} is gone.\n{self._tail()}") from None

    def answer(self, timeout_s: float) -> Answer:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            # On this signal the rank writes its threads' stacks to its log.
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)
            raise RankFailed(
                f"{self._name} did not answer within {timeout_s:.0f} s.\n{self._tail()}"
            ) from None
        if not line:
            raise RankFailed(f"{self._name} ended.\n{self._tail()}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise RankFailed(f"{self._name}: {answer['error']}\n{self._tail()}")
        return answer

    def close(self) -> None:
        """End the process: close its stdin, and kill it after STOP_TIMEOUT_S."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # The process may have ended already.
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._process.stdout.close()
        self._log.close()

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:].decode(errors="replace")
