"""Time that explanations of cache misses add to a request, beside the request's own time.

    python -m bench.explain_cache [--quick] [--tokens 1000 10000 100000] [--served-up-to 20000]

Microseconds of a core: "traced" in the thread that tokenises, "explained" on the event loop at the first token;
the memory of 16 MiB is full of prompts with the same beginning. "rendered" is the gateway's own time to render and
tokenise the chat, a part of the request's time. The requests are chats of hadal-tiny with a longer context through
`hadal serve`: a new prompt and the same again, which is found in the cache, each for one token; then a next turn, with
REPLY_TOKENS. Attention to 100,000 tokens takes a quarter of an hour on two cores, so longer prompts can be left out.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.checkpoints import SHIPPED
from bench.machine import describe
from bench.server import Address, request, serving
from bench.tables import parser_of, table_of
from hadal.core.config import GatewayConfig
from hadal.core.messages.generation import Generation
from hadal.core.plans import Sampling
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.explanations import CacheExplainer, PromptTrace, cache_explainer
from hadal.gateway.desk.service import ServedModel, read_served_model
from hadal.gateway.text.asks import Turn
from hadal.gateway.text.chat import Prompt

WORDS = ("river", "stone", "tall", "house", "garden", "walks", "under", "seven", "lamp", "winter")
CONTEXT = 131_072
WORDS_PER_TURN = 120
REPLY_TOKENS = 100
NUM_TIMES = 30
TENANT = Tenant(b"salt", given_name="bench")
TIMEOUT_S = 3600.0
"""Longest wait for a chat: attention to 100,000 tokens takes minutes on two cores."""


def longer(folder: Path, scratch: Path) -> Path:
    """Return a copy of a model's folder with a context of CONTEXT tokens."""
    copy = scratch / "model"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return copy


def turns_of(rng: random.Random, num_tokens: int) -> list[Turn]:
    """Return a chat of about `num_tokens` tokens, with a turn for every WORDS_PER_TURN words."""
    num_words = int(num_tokens / 1.45)
    return [
        Turn(
            ("user", "assistant")[number % 2],
            " ".join(rng.choices(WORDS, k=min(WORDS_PER_TURN, num_words - first))),
        )
        for number, first in enumerate(range(0, num_words, WORDS_PER_TURN))
    ]


def added(
    model: ServedModel, rng: random.Random, num_tokens: int
) -> tuple[int, float, float, float]:
    """Return a prompt's tokens, the microseconds for its trace and for its explanation, and the
    milliseconds to render and tokenise it.
    """
    assert model.chat is not None
    turns = turns_of(rng, num_tokens)
    rendered_ms = []
    for _ in range(5):
        begun_s = time.perf_counter()
        prompt = model.chat.prompt(turns, max_tokens=CONTEXT)
        rendered_ms.append(1e3 * (time.perf_counter() - begun_s))
    explainer = cache_explainer(GatewayConfig(), model.vocabulary, GatewayClock())
    assert explainer is not None
    size, serial = len(prompt.ids), 0
    while (before := explainer.num_bytes) < (15 << 20):  # Until the memory is full.
        serial += 1
        first = size * 9 // 10
        other = (*prompt.ids[:first], *rng.choices(range(20, 900), k=size - first))
        traced(explainer, Prompt(other), f"{serial}").computed(0, None, 0.0)
        if explainer.num_bytes <= before:
            break
    trace_us, explain_us = [], []
    for number in range(NUM_TIMES):
        # A prompt that is new: it differs near its end, and replaces the oldest.
        ids = (*prompt.ids[:-60], number, *prompt.ids[-59:])
        asked = dataclasses.replace(prompt, ids=ids)
        begun_s = time.thread_time()  # A busy machine does not change it.
        trace = traced(explainer, asked, f"n{number}")
        traced_s = time.thread_time()
        trace.computed(0, None, 0.0)
        explain_us.append(1e6 * (time.thread_time() - traced_s))
        trace_us.append(1e6 * (traced_s - begun_s))
    median = statistics.median
    return size, median(trace_us), median(explain_us), median(rendered_ms)


def traced(explainer: CacheExplainer, prompt: Prompt, name: str) -> PromptTrace:
    """Return the trace of a prompt."""
    generation = Generation(
        name, prompt.ids, (), 1, (), 0, Sampling(), 0, salt=TENANT.salt, chain=b"x", fingerprint="f"
    )
    return explainer.trace(name, TENANT, generation, prompt)


def request_ms(address: Address, turns: Sequence[Turn], num_tokens: int = 1) -> float:
    """Return the milliseconds of one chat with a reply of `num_tokens`."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    lengths = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    body = {"model": "m", "messages": messages, **lengths}
    begun_s = time.perf_counter()
    status, reply = request(address, "POST", "/v1/chat/completions", body, timeout_s=TIMEOUT_S)
    if status != 200:
        raise RuntimeError(f"the chat was answered with {status}: {reply[:200]!r}")
    return 1e3 * (time.perf_counter() - begun_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("explain_cache", __doc__, "prompts of 1,000 and 3,000 tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--served-up-to", type=int, default=100_000, metavar="TOKENS")
    options = parser.parse_args(arguments)
    sizes = [1000, 3000] if options.quick else options.tokens
    console, rng = Console(width=110), random.Random(7)
    console.print(f"[bold]explanations of cache misses[/bold]: {describe()}")
    columns = "tokens|traced, us|explained, us|rendered, ms"
    columns += "|new prompt, ms|share, %|cached prompt, ms|share, %|next turn, ms|share, %"
    table = table_of(columns, num_left=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = longer(SHIPPED, Path(scratch))
        model = read_served_model(folder, "m")
        memory = "kv_memory_mb = 600"
        deployment = (
            f'model = "{folder}"\nmodel_name = "m"\n[prefill]\n{memory}\n[decode]\n{memory}\n'
        )
        with serving(deployment) as running:
            request_ms(running.address, turns_of(rng, 500))
            for num_tokens in sizes:
                size, trace_us, explain_us, rendered_ms = added(model, rng, num_tokens)
                num_chats = 1 if num_tokens > 20_000 else 5
                num_chats *= num_tokens <= options.served_up_to
                new, again, later = [], [], []
                for _ in range(num_chats):
                    turns = turns_of(rng, num_tokens)
                    new.append(request_ms(running.address, turns))
                    again.append(request_ms(running.address, turns))
                    turns += [Turn("assistant", "Yes."), *turns_of(rng, WORDS_PER_TURN)[:1]]
                    later.append(request_ms(running.address, turns, REPLY_TOKENS))
                both_us = trace_us + explain_us
                cells = [f"{size:,}", f"{trace_us:.0f}", f"{explain_us:.0f}", f"{rendered_ms:.1f}"]
                for times in (new, again, later) if num_chats else ():
                    own_ms = statistics.median(times)
                    cells += [f"{own_ms:,.1f}", f"{0.1 * both_us / own_ms:.2f}"]
                table.add_row(*cells)
                console.print(" ".join(cells))
        assert model.chat is not None
        model.chat.close()
    console.print(table)


if __name__ == "__main__":
    main()
