"""Measure how much of a conversation is cached in its next turn, and the time to first token of that turn.

    python -m bench.turns [--quick] [--checkout OLD]

One case is a prompt of 600 tokens with an answer of 400, followed by a prompt of both plus three tokens. The other is
an agent's ten turns: each sends all text so far plus 60 tokens, and gets an answer of 80 tokens. Servers: Hadal by
default, with a cache folder, and with configs/laptop_ep.toml; and llama.cpp's server if `make bench-peers` set it up.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.checkpoints import MODELS, SHIPPED, stored_model
from bench.load import random_body
from bench.machine import describe
from bench.peers.installed import LLAMA_SERVER
from bench.server import Address, asked, serving
from bench.servers import llama_server
from bench.subject import ROOT
from bench.tables import parser_of, table_of

Ask = Callable[[Sequence[int], int], tuple[list[int], int, float]]
"""(prompt, requested tokens) -> (answer, cached tokens of the prompt, ms to the first token)."""
NUM_CHATS, NUM_TURNS = 6, 10
REST_S = 0.3
"""Seconds between two turns: people and tools take longer."""


def tokens(rng: random.Random, number: int) -> list[int]:
    """Return `number` random tokens."""
    return [rng.randrange(20, 900) for _ in range(number)]


def hadal(address: Address, prompt: Sequence[int], number: int) -> tuple[list[int], int, float]:
    """Return an Ask's result from our server: one request for one token is timed, another gets the answer."""
    begun_s = time.perf_counter()
    usage = asked(address, "POST", "/v1/completions", random_body("m", prompt, 1))["usage"]
    first_ms = 1e3 * (time.perf_counter() - begun_s)
    body = {**random_body("m", prompt, number), "return_token_ids": True}
    answer = asked(address, "POST", "/v1/completions", body)["choices"][0]["token_ids"]
    return list(answer), usage["prompt_cache_hit_tokens"], first_ms


def llama(address: Address, prompt: Sequence[int], number: int) -> tuple[list[int], int, float]:
    """Return an Ask's result from llama.cpp's server, which reports cached tokens and prefill ms."""
    body = {
        "prompt": list(prompt),
        "n_predict": number,
        "cache_prompt": True,
        "return_tokens": True,
    }
    fields = asked(address, "POST", "/completion", {**body, "temperature": 0, "ignore_eos": True})
    timings = fields["timings"]
    return list(fields["tokens"]), int(timings["cache_n"]), float(timings["prompt_ms"])


def row(name: str, ask: Ask, num_chats: int) -> tuple[str, ...]:
    """Return a table row: cached tokens and ms to the first token, of second turns and of an agent's ten turns."""
    second: list[tuple[int, float]] = []
    for seed in range(num_chats):
        rng = random.Random(seed)
        prompt = tokens(rng, 600)
        prompt += ask(prompt, 400)[0] + tokens(rng, 3)
        time.sleep(REST_S)
        second.append(ask(prompt, 1)[1:])
    rng, prompt, turns, known = random.Random(99), [], [], 0
    for _ in range(1 + NUM_TURNS):
        prompt = prompt + tokens(rng, 200 - 140 * bool(prompt))
        answer, *found = ask(prompt, 80)
        turns.append((*found, known))
        prompt += answer
        known = len(prompt) - 1  # The last token has no KV yet.
        time.sleep(REST_S)
    return (
        name,
        f"{min(num for num, _ in second)} of {600 + 400 - 1}",
        f"{statistics.median(ms for _, ms in second):.1f}",
        f"{sum(num for num, _, _ in turns[1:])} of {sum(known for _, _, known in turns[1:])}",
        f"{statistics.median(ms for _, ms, _ in turns[1:]):.1f}",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("turns", __doc__, "two chats each, hadal-tiny")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another checkout of Hadal")
    options = parser.parse_args(arguments)
    console, num_chats = Console(width=110), 2 if options.quick else NUM_CHATS
    console.print(f"[bold]the next turn[/bold]: {describe()}")
    folder = SHIPPED if options.quick else stored_model("mid", "fp8", MODELS / "mid-fp8")
    model = f'model = "{folder}"\nmodel_name = "m"\n'
    ranks = (options.checkout / "configs" / "laptop_ep.toml").read_text()
    ranks = "\n".join(line for line in ranks.splitlines() if not line.startswith("model"))
    columns = "server|second turn, found|first token, ms|ten turns|first, ms"
    table = table_of(columns, num_left=5)
    with tempfile.TemporaryDirectory() as cache:
        deployments = {
            f"{folder.name}, default": model,
            f"{folder.name}, with a folder": f'{model}[cache]\nfolder = "{cache}"\n',
            "hadal-tiny, laptop_ep": f'model = "{SHIPPED}"\nmodel_name = "m"\n{ranks}\n',
        }
        for name, deployment in deployments.items():
            with serving(deployment, checkout=options.checkout) as running:
                table.add_row(*row(name, partial(hadal, running.address), num_chats))
    if LLAMA_SERVER.exists() and not options.quick:
        plain = stored_model("mid", "bf16", MODELS / "mid-bf16")
        with llama_server(plain, "q8_0", 2) as server:
            ask = partial(llama, server.address)
            table.add_row(*row("llama-server, mid q8_0", ask, num_chats))
    console.print(table)


if __name__ == "__main__":
    main()
