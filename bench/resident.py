"""Check that a real checkpoint fits: generated checkpoints of Moonlight's and GigaChat3's shapes, served as stored.

    python -m bench.resident [--model moonlight|gigachat] [--folder FOLDER] [--keep]

Prints seconds from the command to the first token, resident memory of all processes together beside the sizes
of the file and its KV, and tokens/s of prefill and decode beside the bound of reading the weights once.
Moonlight is served in FP8. In BF16 it cannot fit, and the time until its refusal is printed. GigaChat3 is
served in both. Needs 17 or 22 GB of disk and about as much memory; the files are removed at the end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.checkpoints import MODELS, stored_model
from bench.load import random_body
from bench.machine import describe, measure_limits, tree_of
from bench.server import Running, launched, request, wait_for
from bench.tables import parser_of

TIMEOUT_S = 300.0
NUM_DECODED = 12
PROMPTS = (128, 512)
BATCHES = (1, 8)


def main() -> None:
    parser = parser_of("resident", __doc__)
    parser.add_argument("--model", choices=("moonlight", "gigachat"), default="moonlight")
    parser.add_argument("--folder", type=Path, default=MODELS / "big")
    parser.add_argument("--keep", action="store_true", help="leave the files for the next run")
    asked = parser.parse_args()
    console = Console(highlight=False)
    console.print(describe())
    try:
        if asked.model == "moonlight":
            _refused(console, stored_model(asked.model, "hollow", asked.folder / "hollow"))
        for kind in ("fp8",) if asked.model == "moonlight" else ("fp8", "bf16"):
            console.print("writing the checkpoint ...")
            folder = stored_model(asked.model, kind, asked.folder / f"{asked.model}-{kind}")
            _served(console, folder, kind.upper())
            if not asked.keep:
                shutil.rmtree(folder)
    finally:
        if not asked.keep:
            shutil.rmtree(asked.folder, ignore_errors=True)


def _refused(console: Console, folder: Path) -> None:
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "hadal.cli", "serve", "--model", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = (done.stderr or done.stdout).strip().splitlines()
    console.print(
        f"BF16: exit code {done.returncode} after {time.monotonic() - begun_s:.2f} s:"
        f" {said[-1] if said else 'nothing said'}"
    )


def _served(console: Console, folder: Path, kind: str) -> None:
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for path in folder.glob("*.safetensors"):  # Read the files into the page cache.
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    with launched(environment={"HADAL_MODEL": str(folder)}) as running:
        first_s = _first_token_s(running, folder.name)
        console.print(f"{kind}, {num_bytes / 1e9:.1f} GB: first token after {first_s:.1f} s")
        for batch in BATCHES:
            _decode(console, running, folder.name, batch)
        for num_tokens in PROMPTS:
            _prefill(console, running, folder.name, num_tokens)
        resident, shared = _resident_bytes(running)
        kv_bytes = _kv_bytes(running)
        console.print(
            f"resident {resident / 1e9:.2f} GB (proportional set size of all processes), {shared / 1e9:.2f}"
            f" of it shared with others; file and KV {(num_bytes + kv_bytes) / 1e9:.2f} GB:"
            f" {resident / (num_bytes + kv_bytes):.3f}x"
        )
    limits = measure_limits(2)
    console.print(f"this machine reads {limits.read_bytes_per_s / 1e9:.1f} GB/s")


def _body(model: str, num_prompt: int, num_tokens: int) -> dict[str, Any]:
    prompt = [5 + (index * 7919) % 8000 for index in range(num_prompt)]
    return random_body(model, prompt, num_tokens)


def _first_token_s(running: Running, model: str) -> float:
    body = _body(model, 8, 1)

    def is_answered() -> bool:
        return request(running.address, "POST", "/v1/completions", body)[0] == 200

    wait_for(is_answered, running, "a first token")
    return time.monotonic() - running.started_s


def _seconds(running: Running, bodies: list[dict[str, Any]]) -> float:
    """Return the seconds until all of these concurrent requests are answered."""
    begun_s = time.monotonic()
    with ThreadPoolExecutor(len(bodies)) as threads:
        for status, answer in threads.map(
            lambda body: request(running.address, "POST", "/v1/completions", body), bodies
        ):
            if status != 200:
                raise RuntimeError(f"{status}: {answer!r}")
    return time.monotonic() - begun_s


def _decode(console: Console, running: Running, model: str, batch: int) -> None:
    """Print decode speed, from the difference of two output lengths: prefill does not count."""
    short, long = (
        _seconds(running, [_body(model, 8 + i, 2 + more) for i in range(batch)])
        for more in (0, NUM_DECODED)
    )
    rate = batch * NUM_DECODED / (long - short)
    console.print(f"decode, batch {batch}: {rate:.1f} tokens/s, {rate / batch:.2f} steps/s")


def _prefill(console: Console, running: Running, model: str, num_tokens: int) -> None:
    body = _body(model, num_tokens, 1)
    # A different first token per length, so that no block is in the cache.
    body["prompt"][0] = 9 + num_tokens
    console.print(f"prefill of {num_tokens}: {num_tokens / _seconds(running, [body]):.0f} tokens/s")


def _resident_bytes(running: Running) -> tuple[int, int]:
    """Return (proportional set size, bytes mapped by several processes) of all the server's processes."""
    pss = shared = 0
    for pid in tree_of(running.process.pid):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kb = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
        pss += kb["Pss"] * 1024
        shared += (kb["Shared_Clean"] + kb["Shared_Dirty"]) * 1024
    return pss, shared


def _kv_bytes(running: Running) -> int:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob("*hadal*"))


if __name__ == "__main__":
    main()
