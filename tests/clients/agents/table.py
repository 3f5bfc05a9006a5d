"""The table of agents, and docs/agents.md.

python -m tests.clients.agents.table                    # runs the pinned versions, prints the table
python -m tests.clients.agents.table --newest           # runs the newest versions
python -m tests.clients.agents.table --only codex --keep FOLDER
python -m tests.clients.agents.table --write            # and writes docs/agents.md
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.clients.agents import trial
from tests.clients.agents.agents import AGENTS, Agent

DOCUMENT = trial.ROOT / "docs" / "agents.md"
COLUMNS = ("agent", "version", "turns", "edited", "calls", "refused", "cached in a new one")
HEAD = """\
# Coding agents

For users of coding agents who want to run them with a server. Each agent below was run with the lines that stand here.

## Results

```sh
make clients                                          # the newest versions of all clients and agents
python -m tests.clients.agents.table --write          # the versions below; writes this page, too
```

Each agent is installed from npm or PyPI and run in a network namespace without a way out, with `hadal serve` and a
model that follows a script ([tests/clients/agents](../tests/clients/agents/scripts.py)): three turns of one
conversation, each a new start of the agent, then a new conversation with other words. The script calls tools that write
and edit a file. It also makes mistakes: an empty turn, an unknown tool, and a call with its JSON cut.

A turn counts if the agent ends it without an error. `edited` says whether the file has the right text at the end. The
last column is the cached share of the first prompt of the new conversation, which shows how much of its prompts an
agent keeps equal.
"""
"""Text of docs/agents.md above its table."""
SETTINGS = """\
## Settings

`hadal serve --model-name NAME` sets the model's name, which is `{model}` here; Codex chooses its tools by it. With
tenants, the agent's key is the tenant's key. hadal-tiny is too small for coding; serve a larger model
with `--model FOLDER`. A prompt beyond the context is refused with the number of its tokens.
"""
"""Text of docs/agents.md below its table."""
Row = tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """One agent's outcome, or the reason for having none."""

    agent: Agent
    version: str
    outcome: trial.Outcome | None
    why: str = ""

    @property
    def row(self) -> Row:
        """Cells of the table."""
        head = (self.agent.title, self.version)
        if self.outcome is None:
            return (*head, "0", "no", "", self.why, "")
        counts = Counter(self.outcome.calls)
        calls = ", ".join(f"{name} {num}" if num > 1 else name for name, num in counts.items())
        refused = "; ".join(self.outcome.refused) or "nothing"
        edited = "yes" if self.outcome.is_edited else "no"
        share = f"{self.outcome.cached_share:.1%}"
        return (*head, str(self.outcome.num_good_turns), edited, calls or "none", refused, share)


def tried(agent: Agent, *, is_newest: bool = False, keep: Path | None = None) -> Result:
    """Install the pinned version of an agent, or the newest one, and run it."""
    version = agent.version
    try:
        if is_newest:
            version = trial.newest(agent)
        program = trial.installed(agent, version)
        outcome = trial.run(agent, program, keep)
    except RuntimeError as error:
        return Result(agent, version, None, str(error)[-300:])
    return Result(agent, version, outcome)


def printed(results: Sequence[Result]) -> Table:
    """Return the results as a table for the terminal."""
    table = Table(*COLUMNS)
    for result in results:
        table.add_row(*(cell.replace("[", "\\[") for cell in result.row))
    return table


def as_markdown(results: Sequence[Result]) -> str:
    """Return docs/agents.md."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(result.row for result in results)]
    lines = [
        HEAD,
        *(_line(row) for row in rows),
        "",
        SETTINGS.format(model=next(iter(AGENTS.values())).model),
    ]
    return "\n".join([*lines, *(section(agent) for agent in AGENTS.values())]).rstrip() + "\n"


def section(agent: Agent) -> str:
    """Return an agent's part of docs/agents.md."""
    place = f"`~/{agent.file}`" if agent.file else "the environment"
    setting = agent.setting("http://127.0.0.1:8000").rstrip()
    facts = f"Version {agent.version}, by `{agent.api}`.\nNot served: {agent.not_served}."
    return f"### {agent.title}\n\n{facts}\nSet in {place}:\n\n```\n{setting}\n```\n"


def _line(cells: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def shown(
    console: Console, names: Sequence[str], *, is_newest: bool, keep: Path | None
) -> list[Result]:
    """Run agents one after another and print their table; return the results."""
    results = []
    for name in names:
        agent = AGENTS[name]
        folder = None if keep is None else keep.absolute() / name
        with console.status(f"{agent.title} (the first time, it is installed) ..."):
            results.append(tried(agent, keep=folder, is_newest=is_newest))
    console.print(printed(results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--newest", action="store_true", help="run the newest versions")
    parser.add_argument("--write", action="store_true", help="write docs/agents.md")
    parser.add_argument("--keep", type=Path, help="folder for all requests and replies")
    arguments = parser.parse_args()
    if arguments.write and (arguments.newest or set(arguments.only) != set(AGENTS)):
        parser.error("--write needs the pinned versions of all agents.")
    results = shown(Console(), arguments.only, is_newest=arguments.newest, keep=arguments.keep)
    if arguments.write:
        DOCUMENT.write_text(as_markdown(results), encoding="utf-8")


if __name__ == "__main__":
    main()
