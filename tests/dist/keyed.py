"""Servers with a keys file, and requests with a key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.dist.serving import Server
from tests.waiting import DEADLINE_S, PATIENCE_S

AUDITOR = "auditor"
CLIENT = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))
"""HTTP client that all threads share: making one takes longer than a request."""


def keys_command(path: Path, *arguments: str) -> str:
    """Return the output of `hadal keys`."""
    command = [sys.executable, "-m", "hadal.cli", "keys", *arguments, "--file", str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def with_keys(*keys: str) -> list[str]:
    """Return server options with these keys, and AUDITOR, an operator key for the pool's audits."""
    return [word for key in (f"{AUDITOR} operator", *keys) for word in ("--api-key", key)]


def model_of(server: Server, key: str) -> str:
    reply = httpx.get(f"{server.url}/v1/models", headers=header(key), timeout=DEADLINE_S)
    return str(reply.json()["data"][0]["id"])


def header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: Server, key: str, model: str, prompt: str = "hi", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    # Every request has a connection of its own, which may reach another gateway.
    headers = {**header(key), "connection": "close"}
    return CLIENT.post(f"{server.url}/v1/completions", json=body | fields, headers=headers)
