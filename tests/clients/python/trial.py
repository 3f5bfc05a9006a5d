"""Shared parts of the scripts in this folder: questions, tools, and the output of trials.

Runs in the clients' own environments. It imports nothing of Hadal, and of other packages only
Pydantic, which all clients need.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from importlib.metadata import version as version  # Scripts call it as trial.version.

from pydantic import BaseModel

URL = os.environ["HADAL_URL"]
"""The server's URL without `/v1`."""
KEY = os.environ.get("HADAL_KEY", "none")
MODEL = os.environ.get("HADAL_MODEL", "hadal-tiny")

SUM = "What is 23 plus 19?"
SUM_ANSWER = "42"
PRODUCT = "What is 4817 times 2395? Use the calculator."
"""Question that the model cannot answer without the tool."""
PRODUCT_ANSWER = "11536715"
PERSON = "Ann is 34 years old and lives in Oslo. Give her name, age and city as JSON."


class Person(BaseModel):
    name: str
    age: int
    city: str


def calculate(a: int, operator: str, b: int) -> int:
    """Compute with two whole numbers.

    Args:
        a: The first number.
        operator: One of +, -, *.
        b: The second number.
    """
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


CALCULATE = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "operator": {"type": "string", "enum": ["+", "-", "*"]},
        "b": {"type": "integer"},
    },
    "required": ["a", "operator", "b"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute with two whole numbers.",
        "parameters": CALCULATE,
    },
}


def user(text: str) -> list[dict]:
    """Return the messages of a new chat."""
    return [{"role": "user", "content": text}]


def digits(text: object) -> str:
    """Return the digits of a text, without separators of thousands."""
    return "".join(c for c in str(text) if c.isdigit())


def expect(holds: object, seen: object) -> str:
    """Return the first 120 characters of `seen` as text if `holds` is true.

    Raises:
        AssertionError: `holds` is false; the message has that text.
    """
    text = " ".join(str(seen).split())[:120]
    if not holds:
        raise AssertionError(f"saw {text!r}")
    return text


def run(client: str) -> None:
    """Try each public function of the script once. Print a JSON line for each: client, what was
    tried, ok, and what was seen.
    """
    script = vars(sys.modules["__main__"])
    for name, trial in script.items():
        if name.startswith("_") or not inspect.isfunction(trial) or trial.__module__ != "__main__":
            continue
        line = {"client": client, "what": (trial.__doc__ or name).split("\n")[0].rstrip(".")}
        try:
            line |= {"ok": True, "seen": trial()}
        except Exception as error:  # Any error of a client is its row's result.
            if os.environ.get("HADAL_TRACE"):
                traceback.print_exc(file=sys.stderr)
            line |= {"ok": False, "seen": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(line), flush=True)
