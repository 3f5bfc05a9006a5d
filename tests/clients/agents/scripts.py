"""Answers of the scripted model, for each agent: four tasks, and a model's mistakes.

one    text before a call that writes a file; then an empty turn
two    two calls in a turn; then a call of an unknown tool
three  a call that edits the file; then a call with its JSON cut
four   an answer without calls, in a new conversation
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.agents.scripted import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR, Answer

WORK = "HADAL_TEST_WORK"
"""Environment variable: folder in which the agent works."""
FILE = "notes.txt"
PROMPTS = {
    "one": "Task one: write the line alpha into notes.txt.",
    "two": "Task two: read notes.txt, and list the files.",
    "three": "Task three: replace alpha by beta in notes.txt.",
    "four": "Task four: greet me.",
}
"""Task -> the user's words."""
UNKNOWN = "_x"
"""Ending of an unknown tool's name. Where a grammar bars it, the tool without it is called."""
DONE = "Task {} is done."
OTHER = "Notes"
"""Answer to requests that an agent makes for itself, such as a conversation's title."""
Call = tuple[str, dict[str, Any]]
"""Tool and arguments."""
_TASK = re.compile(r"Task (one|two|three|four):")


@dataclass(frozen=True)
class Reply:
    """An answer: text, then calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    num_cut: int = 0
    """Number of characters that are missing at the end."""

    def spelled(self, head: str) -> str:
        """Return the text of the model's tokens. `head`: the tools, as the template lists them."""
        if not self.calls:
            return self.text
        calls = CALL_END.join(_spelled(head, *call) for call in self.calls)
        end = CALL_END + CALLS_END
        return self.text + CALLS + (calls[: -self.num_cut] if self.num_cut else calls + end)


def _spelled(head: str, name: str, arguments: dict[str, Any]) -> str:
    """Return a call under the tool's offered name, with arguments in its schema's order."""
    name = _offered(head, name) or name
    tools = (json.loads(line) for line in head.splitlines() if f'"name": "{name}"' in line)
    schema = next((tool["function"]["parameters"] for tool in tools), {})
    order = [*schema.get("properties", ()), *arguments]
    ordered = {key: arguments[key] for key in order if key in arguments}
    return f"{CALL}{name}{SEPARATOR}{json.dumps(ordered)}"


def _script(needed: str, steps: dict[str, list[Reply]]) -> Answer:
    """Return the answers of an agent that offers the tool `needed` ("" if it has none)."""

    def answer(head: str, users: list[str], num_turns: int) -> str:
        found = [task for text in users for task in _TASK.findall(text)]
        if not found or (needed and not _offered(head, needed)):
            return OTHER
        task = found[-1]
        replies = steps.get(task, [])
        return replies[num_turns].spelled(head) if num_turns < len(replies) else DONE.format(task)

    return answer


def _offered(head: str, name: str) -> str:
    """Return the name under which the prompt's head offers a tool; "" if it does not. A server may
    put the name of its namespace before it.
    """
    found = re.search(rf'"name": "((?:\w+__)?{name})"', head)
    return found[1] if found else ""


def _tools(writes: Call, reads: Call, edits: Call, lists: Call) -> Answer:
    """Return the script of an agent with these calls."""
    return _script(
        lists[0],
        {
            "one": [Reply("I write the file.", (writes,)), Reply()],
            "two": [
                Reply(calls=(reads, lists)),
                Reply(calls=((lists[0] + UNKNOWN, {"text": "x"}),)),
            ],
            "three": [Reply(calls=(reads,)), Reply(calls=(edits,)), Reply("", (reads,), 4)],
            "four": [Reply("Hello.")],
        },
    )


def _file() -> str:
    return str(Path(os.environ.get(WORK, "/")) / FILE)


def _claude() -> Answer:
    path = {"file_path": _file()}
    return _tools(
        ("Write", {**path, "content": "alpha\n"}),
        ("Read", path),
        ("Edit", {**path, "old_string": "alpha", "new_string": "beta"}),
        ("Bash", {"command": "ls", "description": "Lists"}),
    )


def _opencode() -> Answer:
    path = {"filePath": _file()}
    return _tools(
        ("write", {**path, "content": "alpha\n"}),
        ("read", path),
        ("edit", {**path, "oldString": "alpha", "newString": "beta"}),
        ("bash", {"command": "ls", "description": "Lists"}),
    )


def _qwen() -> Answer:
    path = {"file_path": _file()}
    return _tools(
        ("write_file", {**path, "content": "alpha\n"}),
        ("read_file", path),
        ("edit", {**path, "old_string": "alpha", "new_string": "beta"}),
        ("run_shell_command", {"command": "ls", "is_background": False}),
    )


def _shell(command: str) -> Call:
    return "exec_command", {"cmd": command}


def _codex(edits: Call | None = None) -> Answer:
    edits = edits or _shell(f"sed -i s/alpha/beta/ {FILE}")
    return _tools(_shell(f"echo alpha > {FILE}"), _shell(f"cat {FILE}"), edits, _shell("ls"))


def _patching() -> Answer:
    """Return the script of Codex with its custom tool `apply_patch`."""
    lines = (
        "*** Begin Patch",
        f"*** Update File: {FILE}",
        "@@",
        "-alpha",
        "+beta",
        "*** End Patch",
    )
    return _codex(("apply_patch", {"input": "\n".join(lines) + "\n"}))


def _nested() -> Answer:
    """Return the script of Codex with its custom tool `exec`: its input is a program."""

    def program(command: str) -> Call:
        return "exec", {"input": f"text(await tools.exec_command({json.dumps({'cmd': command})}))"}

    return _tools(
        program(f"echo alpha > {FILE}"),
        program(f"cat {FILE}"),
        program(f"sed -i s/alpha/beta/ {FILE}"),
        program("ls"),
    )


def _aider() -> Answer:
    """Return the script of aider, which has no tools: edits are blocks of text."""

    def block(old: str, new: str) -> str:
        return f"{FILE}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"

    return _script(
        "",
        {
            "one": [Reply("I write the file.\n\n" + block("", "alpha\n"))],
            "two": [Reply("It has one line.")],
            "three": [Reply(block("alpha\n", "beta\n"))],
            "four": [Reply("Hello.")],
        },
    )


SCRIPTS = {
    "codex": _codex(),
    "codex-gpt-5.5": _patching(),
    "codex-gpt-6.2-sol": _nested(),
    "claude": _claude(),
    "opencode": _opencode(),
    "qwen": _qwen(),
    "aider": _aider(),
}
"""Agent -> its script."""
