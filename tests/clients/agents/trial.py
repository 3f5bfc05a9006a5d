"""Install an agent, run it in a network namespace of its own, and read its results."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents.agents import CACHE, Agent
from tests.clients.agents.relay import Exchange
from tests.clients.installs import Missing, called, found, install, install_python
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
NPM = "apt-get install npm"
"""Command that brings npm."""
LEAST_NODE = 20
"""Oldest release of Node.js with which the agents were run."""
_ALONE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Command prefix: namespaces without a network. Their processes end with the first one."""


@dataclass(frozen=True)
class Turn:
    """One start of an agent, for one task."""

    task: str
    exit_code: int
    output: str
    """End of what the agent printed."""
    statuses: list[int]
    """HTTP status of each reply."""
    calls: list[str]
    """Names of the calls that the replies had."""
    refused: list[str]
    """Errors of replies: status, field and message."""
    usages: list[tuple[int, int]]
    """Prompt tokens of each reply, and cached ones among them."""


@dataclass(frozen=True)
class Outcome:
    """Results of an agent's turns."""

    agent: str
    turns: list[Turn]
    file: str
    """Text of the edited file at the end; "" if there is none."""

    @property
    def is_edited(self) -> bool:
        """True if the file is as the tasks ask."""
        return self.file == "beta\n"

    @property
    def calls(self) -> list[str]:
        """Names of the calls of all turns."""
        return [name for turn in self.turns for name in turn.calls]

    @property
    def refused(self) -> list[str]:
        """Errors of all turns, each once."""
        return list(dict.fromkeys(text for turn in self.turns for text in turn.refused))

    @property
    def num_good_turns(self) -> int:
        """Number of tasks in the first conversation after which the agent ended without an error."""
        return sum(turn.exit_code == 0 for turn in self.turns[:-1])

    @property
    def cached_share(self) -> float:
        """Cached share of the longest prompt of the last start, which is a new conversation."""
        num_prompt, num_cached = max(self.turns[-1].usages, default=(0, 0))
        return num_cached / max(1, num_prompt)


def installed(agent: Agent, version: str = "") -> Path:
    """Return an agent's program, installed in CACHE. `version`: "" is the pinned one. Raises Missing."""
    version = version or agent.version
    folder = CACHE / f"{agent.program}-{version}"
    inner = "bin" if agent.is_python else "node_modules/.bin"
    program = folder / inner / agent.program
    stamp = folder / "complete"
    if not agent.is_python:
        _check_node()
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if agent.is_python:
            install_python(folder, f"{agent.package}=={version}")
        else:
            (folder / "package.json").write_text('{"private": true}')
            options = ("--silent", "--no-audit", "--no-fund", f"--prefix={folder}")
            install(found("npm", NPM), "install", *options, f"{agent.package}@{version}")
        stamp.touch()
    return program


def _check_node() -> None:
    """Raise Missing if Node.js is not there, or too old."""
    release = install(found("node", "apt-get install nodejs"), "--version").strip()
    if int(release.removeprefix("v").partition(".")[0]) < LEAST_NODE:
        raise Missing(f"Node.js is {release}; the agents need {LEAST_NODE} or newer")


def newest(agent: Agent) -> str:
    """Return the newest version of an agent. Raises Missing."""
    if agent.is_python:
        # "PACKAGE (VERSION)" and further lines; not all releases of pip can write JSON.
        said = install(sys.executable, "-m", "pip", "index", "versions", agent.package)
        return said.partition("(")[2].partition(")")[0]
    return install(found("npm", NPM), "view", agent.package, "version").strip()


def run(agent: Agent, program: Path, keep: Path | None = None) -> Outcome:
    """Run an agent through its turns, in namespaces without a way out. Needs root. Raises
    RuntimeError if there is no outcome.
    """
    inner = [sys.executable, "-m", "tests.clients.agents", agent.name, str(program)]
    if keep is not None:
        inner += ["--keep", str(keep)]
    command = (*_ALONE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inner)
    place = {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    code, output, errors = called(*command, cwd=ROOT, timeout_s=PATIENCE_S, **place)
    if code:
        raise RuntimeError(f"{agent.name}: {errors[-4000:]}")
    fields = json.loads(output.splitlines()[-1])
    return Outcome(fields["agent"], [Turn(**turn) for turn in fields["turns"]], fields["file"])


def read_refusal(exchange: Exchange) -> str:
    """Return status, field and message of an error; "" if the reply is none."""
    inner = [event.get("response") or event for event in exchange.events]
    error = next((found for each in inner if isinstance(found := each.get("error"), dict)), None)
    if error is None:
        place = f"{exchange.method} {exchange.path.partition('?')[0]}"
        return f"{exchange.status}: {place}" if exchange.status >= 400 else ""
    field = error.get("param") or ""
    return f"{exchange.status} {field}: {error.get('message', '')}"[:300]


def read_calls(exchange: Exchange) -> list[str]:
    """Return the names of the calls in a reply of any of the three formats."""
    return [name for event in exchange.events for name in _names(event) if name]


def read_usage(exchange: Exchange) -> tuple[int, int]:
    """Return the prompt's tokens and the cached ones among them; (0, 0) if the reply has no usage."""
    found = (0, 0)
    for event in exchange.events:
        inner = event.get("response") or event.get("message") or {}
        usage = event.get("usage") or inner.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0))
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
        if "cache_read_input_tokens" in usage:
            prompt += cached + usage.get("cache_creation_input_tokens", 0)
        found = max(found, (prompt, cached))
    return found


def _names(event: dict[str, Any]) -> list[str]:
    names = []
    for choice in event.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or {}
        names += [call.get("function", {}).get("name") for call in part.get("tool_calls") or ()]
    item = event.get("item") if event.get("type") == "response.output_item.done" else None
    blocks = [item] if item else [event.get("content_block")]
    for block in blocks:
        if isinstance(block, dict) and str(block.get("type", "")).endswith(("_call", "tool_use")):
            names.append(f"{block.get('namespace') or ''}.{block.get('name')}".lstrip("."))
    return names
