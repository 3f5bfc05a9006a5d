"""What a decode step consists of, part by part, without a server around it. Prints one JSON object
of milliseconds.

    python -m bench.step_parts MODEL_FOLDER THREADS BATCH CONTEXT STEPS

compute and sampling are the Runner's two halves; planning is the decode leader's answer to a
finished step; wire is a step's tokens from the unit's socket to the front's, encoding and decoding
included.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.hadal_engine import HadalSubject
from hadal.core.messages import BLOCK_TOKENS, Decode, Generation, KvLease, Tokens
from hadal.core.plans import DecodePlan, KvPulled, Sampling, StepDone
from hadal.core.seams import Effect, Execute, Pull
from hadal.roles.decode.leader import DecodeLeader
from hadal.runtime.wire import ZmqWire

SAMPLING = Sampling(temperature=0.6, top_p=0.95, seed=7)
"""What DeepSeek recommends for R1; greedy would flatter the sampler."""


class Stopwatch:
    """Adds up the time spent inside a callable."""

    def __init__(self, timed: Callable[..., Any]) -> None:
        self._timed = timed
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._timed(*arguments)
        finally:
            self.seconds += time.perf_counter() - start


def runner_parts(
    folder: str, threads: int, batch: int, context: int, steps: int
) -> dict[str, float]:
    """The Runner's step: the model's decode, the sampler's draw, and what is around them."""
    subject = HadalSubject(folder, threads, SAMPLING)
    subject.decode(batch, context, steps // 4)
    runner: Any = subject.runner
    decode = runner._model.decode = Stopwatch(runner._model.decode)
    draw = runner._decode_sampler.draw = Stopwatch(runner._decode_sampler.draw)
    total = subject.decode(batch, context, steps)
    # The untimed joining step went through the stopwatches too.
    scale = steps / (steps + 1)
    return {
        "compute": 1e3 * decode.seconds * scale / steps,
        "sampling": 1e3 * draw.seconds * scale / steps,
        "step": 1e3 * total / steps,
    }


def planning(batch: int, context: int, steps: int) -> float:
    """Milliseconds a decode leader takes per finished step with `batch` requests, blocks growing as
    they do.
    """
    leader = DecodeLeader(
        "decode-0",
        "epoch",
        2 + batch * (2 + (context + steps) // BLOCK_TOKENS),
        num_slots=batch,
        num_waiting_max=batch,
        max_context=context + 2 * steps,
        heartbeat_s=0.5,
    )
    plans: list[DecodePlan] = []
    blocks = tuple(range(1, 2 + (context - 1) // BLOCK_TOKENS))
    for index in range(batch):
        formation = Generation(f"r{index}", (5,) * context, (6,), 2 * steps, (1,), 0, SAMPLING, 0)
        lease = KvLease("pool", blocks, (0,) * len(blocks), context)
        accepted = leader.handle(0.0, Decode(formation, lease))
        plans += _plans(accepted)
        for effect in accepted:
            if isinstance(effect, Pull):
                pulled = leader.handle(0.0, KvPulled(effect.request_id, effect.attempt, None))
                plans += _plans(pulled)
    slots: set[int] = set()
    seconds, counted = 0.0, 0
    for number in range(steps):
        plan = plans.pop(0)
        slots = (slots - set(plan.leaves)) | {join.slot for join in plan.joins}
        keys = tuple(sorted(slots))
        done = StepDone(plan.step_id, keys, (9,) * len(keys), {}, 0.005)
        start = time.perf_counter()
        effects = leader.handle(0.01 * number, done)
        if len(keys) == batch:
            seconds += time.perf_counter() - start
            counted += 1
        plans += _plans(effects)
    return 1e3 * seconds / counted


def _plans(effects: Sequence[Effect]) -> list[DecodePlan]:
    return [
        plan
        for effect in effects
        if isinstance(effect, Execute)
        for plan in effect.plans
        if isinstance(plan, DecodePlan)
    ]


def wire(batch: int, rounds: int) -> float:
    """Milliseconds a step's tokens take from `send` to having been received as messages."""
    with tempfile.TemporaryDirectory(prefix="hadal-b-") as folder:
        unit, front = ZmqWire("decode-0", Path(folder)), ZmqWire("front", Path(folder))
        try:
            column = np.arange(batch).tobytes()
            message = Tokens("decode-0", column, column, column)
            start = time.perf_counter()
            for index in range(rounds + 1):
                if index == 1:
                    start = time.perf_counter()  # The first one connects.
                unit.send("front", message)
                while not front.receive(1.0):
                    pass
            return 1e3 * (time.perf_counter() - start) / rounds
        finally:
            unit.close()
            front.close()


def main() -> None:
    folder, threads, batch, context, steps = sys.argv[1], *map(int, sys.argv[2:6])
    parts = runner_parts(folder, threads, batch, context, steps)
    print(
        json.dumps({**parts, "planning": planning(batch, context, 400), "wire": wire(batch, 400)})
    )


if __name__ == "__main__":
    main()
