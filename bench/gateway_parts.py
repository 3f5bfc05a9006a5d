"""Measure the gateway's CPU time per token, in microseconds, by module.

    python -m bench.gateway_parts [--model mid] [--streams 32] [--checkout OLD]

All streams run at the same time. The gateway's CPU time is measured first. Then py-spy (of the test tools) samples it
200 times per second, for the share of each module. A sample counts for the innermost of our modules on the stack, so
the kernel's send counts for the module that writes. "event loop": none of our modules is on the stack.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from bench.machine import cpu_seconds, describe, tree_of
from bench.served import FIRST_LOOK_S, LOOK_S, Answer, begin, folder_of, look_until, settle
from bench.servers import Server, hadal_server
from bench.subject import ROOT, prompts
from bench.tables import parser_of, table_of
from hadal.core.model_config import read_model_config

NUM_TOKENS = {"hadal-tiny": 1000, "mid": 300}
LOOKED_S, RATE = 1, 200
LOOP = "event loop"
_OURS = re.compile(r"hadal/([\w/]+)\.py")


def look(pid: int, raw: Path) -> subprocess.Popen[bytes]:
    """Start py-spy on a process. It writes its samples to `raw` after LOOKED_S seconds."""
    spy = [
        str(Path(sys.executable).parent / "py-spy"),
        *["record", "--format", "raw", "--nonblocking"],
    ]
    options = ["--pid", str(pid), "--rate", str(RATE), "--duration", str(LOOKED_S)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*spy, *options, "--output", str(raw)], stdout=quiet, stderr=quiet)


def counted(raw: Path) -> Counter[str]:
    """Return the number of samples in each module."""
    found: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        ours = _OURS.findall(stack)
        found[ours[-1] if ours else LOOP] += int(count)
    return found


def measure(server: Server, folder: Path, num_streams: int, num_tokens: int) -> Mapping[str, float]:
    """Return module -> microseconds per token, '' for all. Raises RuntimeError if py-spy fails or a
    stream ends during the measurement.
    """
    vocab_size, pid = read_model_config(folder).vocab_size, server.roots["gateway"]
    settle(server)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        answers = [
            Answer(stack.enter_context(begin(server, prompt, num_tokens)))
            for prompt in prompts(num_streams, 64, vocab_size, 0)
        ]
        look_until(lambda: all(each.first_s for each in answers), answers, FIRST_LOOK_S)
        before_s, num_before = cpu_seconds(tree_of(pid)), [each.num_events for each in answers]
        until_s = time.monotonic() + LOOKED_S
        look_until(lambda: time.monotonic() > until_s, answers, LOOK_S)
        used_s = cpu_seconds(tree_of(pid)) - before_s
        num_after = [each.num_events for each in answers]
        # py-spy runs after the CPU time is measured, because it uses a core itself.
        spy = look(pid, Path(scratch) / "looks")
        look_until(lambda: spy.poll() is not None, answers, LOOK_S)
        if spy.returncode:
            raise RuntimeError(
                f"py-spy ended with {spy.returncode}: may it look at processes here?"
            )
        if any(each.ended_s for each in answers):
            raise RuntimeError("an answer ended too early: ask for more tokens")
        look_until(lambda: all(each.ended_s for each in answers), answers, LOOK_S)
        # An event can hold the tokens of several passes.
        num = sum(
            (after - before) * num_tokens / each.num_events
            for each, before, after in zip(answers, num_before, num_after, strict=True)
        )
        found = counted(Path(scratch) / "looks")
    all_us, num_looks = 1e6 * used_s / num, sum(found.values())
    return {"": all_us, **{part: all_us * n / num_looks for part, n in found.most_common()}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("gateway_parts", __doc__)
    parser.add_argument("--model", action="append", choices=list(NUM_TOKENS), help="default: both")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(f"[bold]a token's cost to the gateway[/bold]: {describe()}")
    threads = "[prefill]\nthreads = 2\n[decode]\nthreads = 2\n"
    for model in options.model or list(NUM_TOKENS):
        folder = folder_of(model)
        with hadal_server(folder, threads, checkout=options.checkout) as server:
            parts = measure(server, folder, options.streams, NUM_TOKENS[model])
        table = table_of("part|us a token", f"{model}, {options.streams} streams")
        for part, cost_us in parts.items():
            table.add_row(part or "all", f"{cost_us:.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
