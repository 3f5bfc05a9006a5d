"""Requests of agents without their texts: the same fields, types, order and sizes.

    python -m tests.clients.agents.table --keep FOLDER && python -m tests.clients.agents.shapes FOLDER

Writes the longest request of each agent to tests/unit/gateway/agents, which `make test` replays. A
text of the agent becomes "~" and its number of characters; `filled` makes a text of that size from
it. Names, types and values of one word stay, and so do arguments of calls, which the script wrote.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from tests.clients.agents.agents import AGENTS
from tests.clients.agents.trial import ROOT

FOLDER = ROOT / "tests" / "unit" / "gateway" / "agents"
_WORD = re.compile(r"[\w.+:-]{1,64}")
_SIZE = re.compile(r"~(\d+)")
_WORK = re.compile(r"/tmp/hadal-agent-\w+(?:/work)?")
_LEFT_OUT = ("host", "content-length", "connection", "accept-encoding", "authorization")
"""Header fields that a test's own client sets."""
_KEPT = ("accept", "content-type", "anthropic-beta", "anthropic-version")
"""Header fields with values that the API reads."""
_OWN = ("arguments", "input")
"""Fields of calls with the script's arguments."""
_GRAMMAR = "start: TEXT\nTEXT: /[\\s\\S]+/\n"
_WORDS = "a text of an agent "


def shape_of(value: Any, name: str = "", kind: str = "") -> Any:
    """Return a value with sizes in place of texts. `name`, `kind`: its field, and its object's type."""
    if isinstance(value, dict):
        inner = str(value.get("type", ""))
        if inner == "tool_use":
            return value
        return {key: shape_of(each, key, inner) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each, name, kind) for each in value]
    is_call = kind.endswith(("_call", "tool_use")) or name == "arguments"
    if not isinstance(value, str) or _WORD.fullmatch(value) or (name in _OWN and is_call):
        return value
    return f"~{len(value)}"


def filled(value: Any, name: str = "") -> Any:
    """Return a value with texts of the noted sizes."""
    if isinstance(value, dict):
        return {key: filled(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, name) for each in value]
    if not isinstance(value, str) or not (found := _SIZE.fullmatch(value)):
        return value
    size = int(found[1])
    if name == "definition":  # The grammar of a custom tool.
        return _GRAMMAR + "//".ljust(size - len(_GRAMMAR), "x")
    return (_WORDS * (size // len(_WORDS) + 1))[:size]


def num_chars(value: Any) -> int:
    """Return the number of characters of all texts of a value."""
    if isinstance(value, dict):
        return sum(map(num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(num_chars, value))
    return len(value) if isinstance(value, str) else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name in AGENTS:
        kept = folder / name
        path = max(kept.glob("*.json"), key=lambda path: path.stat().st_size)
        asked = json.loads(_WORK.sub("/srv", path.read_text()))
        place, *lines = path.with_suffix(".head").read_text().splitlines()
        fields = dict(line.split(": ", 1) for line in lines)
        shape = {
            "version": AGENTS[name].version,
            "path": place.split()[1],
            "num_chars": num_chars(asked),
            "headers": {
                key: value if key.lower() in _KEPT else shape_of(value)
                for key, value in fields.items()
                if key.lower() not in _LEFT_OUT
            },
            "body": shape_of(asked),
        }
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(
            json.dumps(shape, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
