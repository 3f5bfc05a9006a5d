"""Run one agent through its turns, in a network namespace of its own; see `trial`.

Prints a JSON line: the fields of `trial.Outcome`. The server, the relay and the agent are all in
this process's namespaces, so all end with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.server import Running, launched, wait_ready
from tests.clients.agents import scripted, scripts
from tests.clients.agents.agents import AGENTS, Agent
from tests.clients.agents.relay import Exchange, Relay
from tests.clients.agents.trial import Outcome, Turn, read_calls, read_refusal, read_usage
from tests.waiting import DEADLINE_S

SITE = Path(__file__).resolve().parent / "site"
DEPLOYMENT = """
model = "{model}"
model_name = "{name}"
[prefill]
threads = 1
kv_memory_mb = 512
[decode]
threads = 1
kv_memory_mb = 512
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agent", choices=AGENTS)
    parser.add_argument("program", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the exchanges and the outputs")
    arguments = parser.parse_args()
    outcome = tried(AGENTS[arguments.agent], arguments.program, arguments.keep)
    print(json.dumps(dataclasses.asdict(outcome)))


def tried(agent: Agent, program: Path, keep: Path | None) -> Outcome:
    """Run the agent through all tasks and return the outcome."""
    with tempfile.TemporaryDirectory(prefix="hadal-agent-") as name:
        folder = Path(name)
        home, work = folder / "home", folder / "work"
        home.mkdir(), work.mkdir()
        model = scripted.write_folder(folder / "model")
        python_path = os.pathsep.join((str(SITE), os.environ.get("PYTHONPATH", "")))
        place = {
            scripted.VARIABLE: agent.name,
            scripts.WORK: str(work),
            "PYTHONPATH": python_path,
        }
        deployment = DEPLOYMENT.format(model=model, name=agent.model)
        with launched(deployment, place) as server:
            wait_ready(server)
            with Relay(server.address[1]).running() as relay:
                url = f"http://127.0.0.1:{relay.port}"
                environment = _environment(agent, home, url)
                turns = []
                for index, task in enumerate(scripts.PROMPTS):
                    first, before = len(relay.exchanges), _usage(server)
                    arguments = agent.again if 0 < index < 3 else agent.turn
                    command = [str(program), *arguments]
                    command[command.index("{prompt}")] = scripts.PROMPTS[task]
                    code, output = _run(command, work, environment)
                    exchanges = relay.exchanges[first:]
                    if keep is not None:
                        _keep(keep, task, output, exchanges)
                    after = _usage(server)
                    used = after[0] - before[0], after[1] - before[1]
                    turns.append(_turn(task, code, output, exchanges, used))
            if keep is not None:
                (keep / "server.log").write_bytes(server.log.read_bytes())
        path = work / scripts.FILE
        written = path.read_text() if path.exists() else ""
    return Outcome(agent.name, turns, written)


def _environment(agent: Agent, home: Path, url: str) -> dict[str, str]:
    """Write the agent's setting and return its environment."""
    setting = agent.setting(url)
    lines = list(agent.environment)
    if agent.file:
        path = home / agent.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(setting)
    else:
        lines += setting.splitlines()
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **dict(line.split("=", 1) for line in lines),
    }


def _run(command: list[str], work: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a turn; return its exit status (124 at the deadline) and the end of its output."""
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def _usage(server: Running) -> tuple[int, int]:
    """Return the prompt tokens of all replies so far, and the cached ones among them."""
    samples = server.metrics()
    hit, miss = (
        int(samples.get(f'hadal_usage_prompt_tokens_total{{cache="{name}"}}', 0))
        for name in ("hit", "miss")
    )
    return hit + miss, hit


def _turn(
    task: str, code: int, output: str, exchanges: list[Exchange], used: tuple[int, int]
) -> Turn:
    """Return the results of a turn. `used`: all its prompt tokens and the cached ones, which stand in for
    an agent that asks for no usage.
    """
    return Turn(
        task,
        code,
        output[-2000:],
        [each.status for each in exchanges],
        [name for each in exchanges for name in read_calls(each)],
        [text for each in exchanges if (text := read_refusal(each))],
        [usage for each in exchanges if (usage := read_usage(each))[0]] or [used],
    )


def _keep(folder: Path, task: str, output: str, exchanges: list[Exchange]) -> None:
    """Write all that a turn sent and received."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.out").write_text(output)
    for index, each in enumerate(exchanges):
        path = folder / f"{task}.{index}"
        path.with_suffix(f".{index}.head").write_text(
            f"{each.method} {each.path} -> {each.status}\n"
            + "".join(f"{name}: {value}\n" for name, value in each.headers.items())
        )
        path.with_suffix(f".{index}.json").write_text(json.dumps(each.asked, indent=1))
        path.with_suffix(f".{index}.reply").write_bytes(each.reply)


if __name__ == "__main__":
    sys.exit(main())
