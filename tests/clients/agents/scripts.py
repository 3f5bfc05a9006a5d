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
_NAME = re.compile(f"(?<={CALL}).+?(?={SEPARATOR})")
_TASK = re.compile(r"Task (one|two|three|four):")


def called(*calls: tuple[str, dict[str, Any]]) -> str:
    """Return calls in the form of the model's tokens."""
    return CALLS + "".join(_call(*call) + CALL_END for call in calls) + CALLS_END


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"{CALL}{name}{SEPARATOR}{json.dumps(arguments)}"


def _cut(name: str, arguments: dict[str, Any]) -> str:
    """Return a call that ends within a text of its arguments."""
    return CALLS + _call(name, arguments)[:-4]


def _script(needed: str, steps: dict[str, list[str]]) -> Answer:
    """Return the answers of an agent that offers the tool `needed` ("" if it has none)."""

    def answer(head: str, users: list[str], num_turns: int) -> str:
        found = [task for text in users for task in _TASK.findall(text)]
        if not found or (needed and not _offered(head, needed)):
            return OTHER
        task = found[-1]
        replies = steps.get(task, [])
        if num_turns >= len(replies):
            return DONE.format(task)
        # A server may offer a tool under a name that begins with its namespace.
        return _NAME.sub(lambda name: _offered(head, name[0]) or name[0], replies[num_turns])

    return answer


def _offered(head: str, name: str) -> str:
    """Return the name under which the prompt's head offers a tool; "" if it does not."""
    found = re.search(rf'"name": "((?:\w+__)?{name})"', head)
    return found[1] if found else ""


def _tools(
    writes: tuple[str, dict[str, Any]],
    reads: tuple[str, dict[str, Any]],
    edits: tuple[str, dict[str, Any]],
    lists: tuple[str, dict[str, Any]],
) -> Answer:
    """Return the script of an agent with these calls."""
    return _script(
        lists[0],
        {
            "one": ["I write the file." + called(writes), ""],
            "two": [called(reads, lists), called((lists[0] + UNKNOWN, {"text": "x"}))],
            "three": [called(reads), called(edits), _cut(*reads)],
            "four": ["Hello."],
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


def _shell(command: str) -> tuple[str, dict[str, Any]]:
    return "exec_command", {"cmd": command}


def _codex(edits: tuple[str, dict[str, Any]] = _shell(f"sed -i s/alpha/beta/ {FILE}")) -> Answer:
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

    def program(command: str) -> tuple[str, dict[str, Any]]:
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
            "one": ["I write the file.\n\n" + block("", "alpha\n")],
            "two": ["It has one line."],
            "three": [block("alpha\n", "beta\n")],
            "four": ["Hello."],
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
