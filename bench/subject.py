"""One engine under measurement, in a process of its own that takes orders over a pipe. Uses the standard library
only.

The process's Python may have another torch and none of our packages, so both ends exchange JSON lines. Processes
stay alive between measurements, so that the repetitions of several engines can be interleaved.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]


class Subject(Protocol):
    """Calls that an engine's process answers. Times in seconds."""

    def prefill(self, num_tokens: int) -> float:
        """Return the time from a fresh prompt of `num_tokens` to its first token."""
        ...

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the time of `steps` decode steps, one token per prompt each, after the prefill of
        `batch` different prompts of `context` tokens.
        """
        ...


def prompts(batch: int, num_tokens: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return different random prompts, the same for every engine."""
    generator = random.Random(seed)
    return [
        [generator.randrange(16, vocab_size - 16) for _ in range(num_tokens)] for _ in range(batch)
    ]


def answer(make: Any) -> None:
    """Serve `make()`'s Subject over stdin and stdout until stdin closes. Prints go to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    subject: Subject = make()
    reply({"ready": True, "note": getattr(subject, "note", "")})
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply({"seconds": getattr(subject, call.pop("call"))(**call)})
        except NotImplementedError as error:
            reply({"unsupported": str(error)})
        except (RuntimeError, ValueError, subprocess.SubprocessError) as error:
            reply({"error": f"{type(error).__name__}: {error}"})


class SubjectFailed(RuntimeError):
    """The engine's process ended, reported an error, or timed out."""


class SubjectUnsupported(RuntimeError):
    """The engine does not support this measurement."""


class SubjectProcess:
    """Parent's end of an engine's process. The constructor waits until the model is loaded."""

    def __init__(
        self, name: str, command: list[str], log: Path, env: dict[str, str], start_timeout_s: float
    ) -> None:
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                text=True,
                encoding="utf-8",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.note = str(self._reply(start_timeout_s).get("note", ""))

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, call: str, timeout_s: float = 600.0, **arguments: int) -> float:
        """Return the seconds of one measurement. Raises SubjectFailed or SubjectUnsupported."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SubjectFailed(f"{self.name} ended; see {self._log}") from error
        reply = self._reply(timeout_s)
        if "unsupported" in reply:
            raise SubjectUnsupported(reply["unsupported"])
        if "error" in reply:
            raise SubjectFailed(f"{self.name}: {reply['error']}")
        return float(reply["seconds"])

    def close(self) -> None:
        """End the process: close its stdin, and kill it after 20 s."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise SubjectFailed(
                f"{self.name} said nothing for {timeout_s:.0f} s; see {self._log}"
            ) from None
        if not line:
            raise SubjectFailed(f"{self.name} ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        return reply
