"""Stop the gateway of a server while streams run, and kill it: what becomes of the streams.

    python -m bench.gateway_stop [--quick] [--config laptop_ep]

A gateway that is stopped for some seconds (SIGSTOP) and goes on loses no stream, and each has the text
of an undisturbed one. A gateway that is killed loses its streams. Clients then send their prompts with
the text that they had; the time until each has its next token includes the new start of the gateway.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from rich.console import Console

from bench.claims import Claim, print_claims
from bench.server import Running, launched, wait_ready
from bench.subject import ROOT

NUM_STREAMS = 12
NUM_TOKENS, NUM_QUICK_TOKENS = 1500, 600
STOP_S = 6.0
BEGUN_S = 1.0
"""From the first request to the strike."""
AGAIN_S = 0.05
"""Between two tries while no gateway listens."""
GIVE_UP_S = 120.0


def pieces(running: Running, prompt: str, num_tokens: int) -> Iterator[str]:
    """Yield the text of a greedy stream as it comes. Raises OSError or HTTPException if it breaks off."""
    body = {
        **{"model": "hadal-tiny", "prompt": prompt, "max_tokens": num_tokens},
        **{"temperature": 0, "ignore_eos": True, "stream": True},
    }
    headers = {"Content-Type": "application/json"}
    with closing(http.client.HTTPConnection(*running.address, timeout=GIVE_UP_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ConnectionError(f"answered with {reply.status}")
        for line in reply:
            if line.startswith(b"data: {"):
                yield str(json.loads(line[6:])["choices"][0]["text"])


def read(running: Running, prompt: str, num_tokens: int) -> str:
    """Return as much of a stream's text as comes."""
    text = ""
    try:
        for piece in pieces(running, prompt, num_tokens):
            text += piece
    except (OSError, http.client.HTTPException):
        pass  # It broke off.
    return text


def next_token_s(running: Running, prompt: str, since_s: float) -> float:
    """Return the seconds since a time until a prompt has its first token. Raises TimeoutError."""
    while time.monotonic() < since_s + GIVE_UP_S:
        try:
            next(pieces(running, prompt, 2))
            return time.monotonic() - since_s
        except (OSError, http.client.HTTPException):
            time.sleep(AGAIN_S)
    raise TimeoutError("no gateway answers")


def measure(deployment: str, num_tokens: int) -> tuple[int, list[float]]:
    """Return how many streams outlived a stopped gateway with the same text, and after how many seconds
    each client of a killed one had its next token.
    """
    prompts = [f"What is {number} + 30?" for number in range(NUM_STREAMS)]
    with launched(deployment) as running, ThreadPoolExecutor(NUM_STREAMS) as pool:
        wait_ready(running)
        undisturbed = [*pool.map(lambda prompt: read(running, prompt, num_tokens), prompts)]
        asked = [pool.submit(read, running, prompt, num_tokens) for prompt in prompts]
        time.sleep(BEGUN_S)
        pid = running.pids()["gateway"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)
        texts = [one.result() for one in asked]
        num_same = sum(map(str.__eq__, texts, undisturbed))
        asked = [pool.submit(read, running, prompt, num_tokens) for prompt in prompts]
        time.sleep(BEGUN_S)
        os.kill(running.pids()["gateway"], signal.SIGKILL)
        killed_s = time.monotonic()
        again = [prompt + one.result() for prompt, one in zip(prompts, asked, strict=True)]
        return num_same, [*pool.map(lambda text: next_token_s(running, text, killed_s), again)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gateway_stop", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK_TOKENS} tokens a stream")
    parser.add_argument("--config", default="laptop", help="a deployment that ships (laptop)")
    options = parser.parse_args(arguments)
    path = ROOT / "configs" / f"{options.config}.toml"
    deployment = path.read_text(encoding="utf-8").replace("port = 8000\n", "")
    deployment = "" if options.config == "laptop" else deployment
    console = Console()
    num_same, seconds = measure(deployment, NUM_QUICK_TOKENS if options.quick else NUM_TOKENS)
    console.print(
        f"{num_same} of {NUM_STREAMS} streams outlived a gateway stopped for {STOP_S:g} s, with the same"
        f" text; after a kill the clients had their next tokens after {min(seconds):.1f} to"
        f" {max(seconds):.1f} s"
    )
    share = num_same / NUM_STREAMS
    print_claims(console, [Claim("streams outlive a stopped gateway", share, "all streams", 1.0)])


if __name__ == "__main__":
    main()
