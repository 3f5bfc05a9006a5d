"""Compare the speed of engines alone (bare) with their speed behind their own servers, in turns in one run.

    python -m bench.served [--quick] [--model mid] [--streams 8 ...] [--engine hadal ...]

Several streams run together, each a greedy completion. The time between two tokens is measured
while all streams run, the time to first token from just before the first request is sent. The client reads
its sockets only every few milliseconds, because it shares the cores with the server. Peers are
those of `make bench-peers`. `--checkout OLD` also measures another checkout of Hadal.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.checkpoints import MODELS, PEERS, SHIPPED, shipped_model_fp32, stored_model
from bench.claims import Claim, print_claims
from bench.engine_report import CONTEXT
from bench.machine import CpuWatch
from bench.peers.installed import LLAMA_BENCH, LLAMA_SERVER, VLLM_VENV, Engine, hadal, llama, vllm
from bench.servers import Server, hadal_server, llama_server, vllm_server
from bench.subject import SubjectProcess, prompts
from bench.tables import parser_of, table_of
from hadal.core.model_config import read_model_config

STREAMS = (1, 8, 32, 64)
NUM_TOKENS = 300
"""Tokens of each answer, and steps of the bare engine, so that contexts have equal lengths."""
NUM_TIMES = {"mid": 1, "hadal-tiny": 6}
"""Measurements per round; hadal-tiny needs more, because its answers take little time."""
BARS = {
    "mid": {1: 1.12, 8: 1.12, 32: 1.12, 64: 1.12},
    "hadal-tiny": {1: 1.6, 8: 1.3, 32: 1.45, 64: 1.45},
}
"""Largest ratio of served to bare time between tokens, by number of streams."""
LOOK_S, FIRST_LOOK_S = 0.005, 0.001
TIMEOUT_S = 300.0
SETTLE_S, REST_S, RESTING = 30.0, 2.0, 0.1
"""A server is at rest if its processes together used at most RESTING of a core for REST_S seconds.
The wait for that ends after SETTLE_S seconds.
"""
_EVENT, _END = b"data: {", b"data: [DONE]"


@dataclass
class Answer:
    """State of one stream's answer."""

    connection: socket.socket
    first_s: float = 0.0
    """Time of its first token; 0: none yet."""
    ended_s: float = 0.0
    num_events: int = 0
    looks: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of events received until then), one per read with data."""
    tail: bytes = b""

    def look(self) -> None:
        """Read the available data. Raises RuntimeError if the stream fails or ends early."""
        if self.ended_s:
            return
        try:
            piece = self.connection.recv(1 << 20)
        except BlockingIOError:
            return
        now_s, text = time.perf_counter(), self.tail + piece
        if _END in text:
            self.ended_s = now_s
        elif not piece or not (self.looks or b" 200 " in text[:16]):
            raise RuntimeError(f"a stream failed: {text[-300:]!r}")
        self.num_events += text.count(_EVENT)
        if self.num_events and not self.first_s:
            self.first_s = now_s
        self.tail = text[text.rfind(b"\n") + 1 :]
        self.looks.append((now_s, self.num_events))

    def num_at(self, time_s: float) -> int:
        """Return the number of events received until then."""
        return max((num for then_s, num in self.looks if then_s <= time_s), default=0)


@dataclass(frozen=True)
class Measured:
    """Figures of streams, or of a bare engine."""

    step_ms: float
    """Milliseconds between two tokens of a stream, while all streams ran."""
    first_ms: float = 0.0
    """Milliseconds to the first token, median of the streams."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """Cores that each process kept busy while all streams ran."""
    others: float = 0.0
    """Cores that processes other than the server and the benchmark kept busy."""


def ask(server: Server, folder: Path, num_streams: int, num_tokens: int, seed: int) -> Measured:
    """Run `num_streams` streams together and measure them."""
    vocab_size = read_model_config(folder).vocab_size
    watch = CpuWatch()
    watch.start(server.roots.values())
    with ExitStack() as stack:
        sent_s = time.perf_counter()
        answers = [
            Answer(stack.enter_context(begin(server, prompt, num_tokens)))
            for prompt in prompts(num_streams, CONTEXT, vocab_size, seed)
        ]
        look_until(lambda: all(each.first_s for each in answers), answers, FIRST_LOOK_S)
        before, from_s = server.cpu_s(), time.perf_counter()
        look_until(lambda: any(each.ended_s for each in answers), answers, LOOK_S)
        after, until_s = server.cpu_s(), time.perf_counter()
        look_until(lambda: all(each.ended_s for each in answers), answers, LOOK_S)
    first_s = max(each.first_s for each in answers)
    ended_s = min(each.ended_s for each in answers)
    # With drafts an event can have several tokens.
    num = sum(
        (each.num_at(ended_s) - each.num_at(first_s)) * num_tokens / each.num_events
        for each in answers
    )
    return Measured(
        1e3 * (ended_s - first_s) * num_streams / num,
        1e3 * statistics.median(each.first_s - sent_s for each in answers),
        {name: (after[name] - before[name]) / (until_s - from_s) for name in before},
        watch.stop(),
    )


def begin(server: Server, prompt: Sequence[int], num_tokens: int) -> socket.socket:
    """Send a completion request; return its non-blocking connection."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": num_tokens, "stream": True}
    content = json.dumps({**body, "temperature": 0.0, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(server.address, timeout=TIMEOUT_S)
    connection.sendall(head.encode() + content)
    connection.setblocking(False)
    return connection


def look_until(is_over: Callable[[], bool], answers: Sequence[Answer], every_s: float) -> None:
    """Read all streams every `every_s` seconds until `is_over()`. Raises TimeoutError."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_over():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the streams took more than {TIMEOUT_S:.0f} s")
        time.sleep(every_s)
        for answer in answers:
            answer.look()


@dataclass(frozen=True)
class Pair:
    """An engine and its server."""

    name: str
    bare: Engine | None
    """The bare engine; None: the pair shares the engine of the pair before it."""
    serve: Callable[[], AbstractContextManager[Server]]
    beside: int = 0
    """Number of processes that only use CPU time while the server is measured."""


def folder_of(model: str) -> Path:
    """Return the folder of the model in FP8; makes it if it is missing."""
    return SHIPPED if model == "hadal-tiny" else stored_model(model, "fp8", MODELS / f"{model}-fp8")


def pairs(model: str, threads: int, checkout: Path | None, tables: str) -> Iterator[Pair]:
    """Yield the pairs that can be measured here on a model. `tables`: deployment of our server;
    empty: one unit of each role with `threads` threads.
    """
    folder = folder_of(model)
    plain = f"[prefill]\nthreads = {threads}\n[decode]\nthreads = {threads}\n"
    yield Pair("hadal", hadal(folder, threads), partial(hadal_server, folder, tables or plain))
    if model == "hadal-tiny" and not tables:
        drafting = partial(hadal_server, folder, f'{plain}drafts = "auto"\n')
        yield Pair("hadal, drafts", None, drafting)
    if checkout is not None:
        old = partial(hadal_server, folder, tables or plain, checkout=checkout)
        yield Pair("old", hadal(folder, threads, "old", checkout=checkout), old)
    if model == "hadal-tiny":
        plain, kind, dtype = shipped_model_fp32(), "f32", "float32"
        assert plain is not None, "hadal-tiny is in the repository"
    else:
        plain = stored_model(model, "bf16", MODELS / f"{model}-bf16")
        kind, dtype = "q8_0", "bfloat16"
    if LLAMA_BENCH.exists() and LLAMA_SERVER.exists():
        engine = llama(f"llama.cpp {kind}", plain, str(threads), kind)
        yield Pair(engine.name, engine, partial(llama_server, plain, kind, threads))
    if (VLLM_VENV / ".ok").exists():
        engine = vllm("vllm", plain, str(threads), dtype, quick=False)
        yield Pair(engine.name, engine, partial(vllm_server, plain, dtype, threads))


Results = dict[tuple[str, int, str], list[Measured]]
"""(pair's name, number of streams, "bare" or "served") -> its measurements."""


def bare(
    pair: Pair, folder: Path, streams: Sequence[int], num_times: int, results: Results
) -> None:
    """Measure a pair's bare engine and add the figures to `results`; a pair without a bare engine adds none."""
    engine = pair.bare
    if engine is None:
        return
    log = PEERS / "logs" / f"{engine.name.replace(' ', '-')}-{folder.name}.log"
    process = SubjectProcess(engine.name, engine.command, log, engine.env, engine.start_timeout_s)
    try:
        for number in streams:
            process.ask("decode", batch=number, context=CONTEXT, steps=NUM_TOKENS // 10)
            for _ in range(num_times):
                seconds = process.ask("decode", batch=number, context=CONTEXT, steps=NUM_TOKENS)
                results[pair.name, number, "bare"].append(Measured(1e3 * seconds / NUM_TOKENS))
    finally:
        process.close()


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Run `number` busy processes inside the block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def served(
    pair: Pair, folder: Path, streams: Sequence[int], num_times: int, results: Results
) -> None:
    """Measure a pair's server and add the figures to `results`."""
    with pair.serve() as server, busy(pair.beside):
        ask(server, folder, 1, NUM_TOKENS // 4, seed=0)
        settle(server)
        for number in streams:
            for turn in range(num_times):
                point = ask(server, folder, number, NUM_TOKENS, seed=100 * turn + number)
                results[pair.name, number, "served"].append(point)


def settle(server: Server) -> None:
    """Wait until the server rests, but at most SETTLE_S: some of its processes still start when the first
    requests are answered.
    """
    until_s = time.monotonic() + SETTLE_S
    busy_s = SETTLE_S
    while busy_s > RESTING * REST_S and time.monotonic() < until_s:
        before_s = sum(server.cpu_s().values())
        time.sleep(REST_S)
        busy_s = sum(server.cpu_s().values()) - before_s


def measure(
    model: str, found: Sequence[Pair], streams: Sequence[int], rounds: int, console: Console
) -> Results:
    """Measure all pairs in rounds, each round starting with another pair."""
    folder = folder_of(model)
    results: Results = defaultdict(list)
    for turn in range(rounds):
        for index in range(len(found)):
            pair = found[(index + turn) % len(found)]
            bare(pair, folder, streams, NUM_TIMES[model], results)
            served(pair, folder, streams, NUM_TIMES[model], results)
            console.print(f"  [dim]{time.strftime('%H:%M:%S')} {pair.name}, round {turn + 1}[/dim]")
    return results


def median(points: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    """Return the median of a figure over rounds."""
    return statistics.median(map(of, points))


def table(model: str, found: Sequence[Pair], streams: Sequence[int], results: Results) -> Table:
    """Return a table with the medians of the rounds."""
    out = table_of(
        "engine|streams|bare|served|served / bare|first token ms|cores",
        f"{model}: ms between tokens of a stream",
    )
    for pair in found:
        for number in streams:
            points = results[pair.name, number, "served"]
            step_ms = median(points, lambda each: each.step_ms)
            bare_ms = bare_of(pair, found, number, results)
            cores = ", ".join(
                f"{name} {median(points, lambda each, name=name: each.cores[name]):.2f}"
                for name in points[0].cores
            )
            out.add_row(
                pair.name,
                str(number),
                f"{bare_ms:.2f}",
                f"{step_ms:.2f}",
                f"{step_ms / bare_ms:.2f}",
                f"{median(points, lambda each: each.first_ms):.1f}",
                f"{cores}, others {median(points, lambda each: each.others):.2f}",
            )
    return out


def bare_of(pair: Pair, found: Sequence[Pair], number: int, results: Results) -> float:
    """Return a bare engine's ms per step; a pair without one uses the engine of the pair before."""
    at = next(index for index, each in enumerate(found) if each is pair)
    name = next(each.name for each in reversed(found[: at + 1]) if each.bare is not None)
    return median(results[name, number, "bare"], lambda each: each.step_ms)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("served", __doc__, "one round of Hadal, 1 and 8 streams")
    parser.add_argument("--model", action="append", choices=list(BARS), help="default: both")
    parser.add_argument("--streams", type=int, nargs="+", help="default: 1 8 32 64")
    parser.add_argument("--engine", action="append", help="default: all that are installed")
    parser.add_argument(
        "--checkout", type=Path, help="another checkout of Hadal, measured as `old`"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--config", type=Path, help="deployment file: the tables of our server's")
    parser.add_argument(
        "--beside", type=int, default=0, help="processes that compute beside servers"
    )
    parser.add_argument("--rounds", type=int, default=0, help="default: 3, or 1 with --quick")
    options = parser.parse_args(arguments)
    console = Console(width=max(140, Console().width))
    streams = options.streams or (STREAMS[:2] if options.quick else STREAMS)
    # Skip the file's settings before its first table: the benchmark sets its own model and port.
    tables = "[" + options.config.read_text().partition("\n[")[2] if options.config else ""
    only = options.engine or (["hadal"] if options.quick else [])
    for model in options.model or list(BARS):
        console.print(f"[bold]served, {model}[/bold]")
        found = [
            replace(pair, beside=options.beside)
            for pair in pairs(model, options.threads, options.checkout, tables)
            if not only or pair.name in only
        ]
        rounds = options.rounds or (1 if options.quick else 3)
        results = measure(model, found, streams, rounds, console)
        console.print(table(model, found, streams, results))
        of = {pair.name: pair for pair in found}
        print_claims(
            console,
            [
                Claim(
                    f"{model}, {number} streams",
                    median(results["hadal", number, "served"], lambda each: each.step_ms)
                    / bare_of(of["hadal"], found, number, results),
                    "the bare engine's time",
                    bar,
                    is_most=True,
                )
                for number, bar in BARS[model].items()
                if number in streams and "hadal" in of
            ],
        )


if __name__ == "__main__":
    main()
