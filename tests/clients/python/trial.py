"""What the scripts beside this one share: the questions, the tools, and how a trial is told.

Runs in the clients' own environment, so it imports nothing of Hadal and nothing of a client.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

URL = os.environ["HADAL_URL"]
"""Of the server, without `/v1`."""
KEY = os.environ.get("HADAL_KEY", "none")
MODEL = os.environ.get("HADAL_MODEL", "hadal-tiny")

SUM = "What is 23 plus 19?"
SUM_ANSWER = "42"
PRODUCT = "What is 4817 times 2395? Use the calculator."
"""More than the model can reckon by itself."""
PRODUCT_ANSWER = "11536715"
PERSON = "Ann is 34 years old and lives in Oslo. Give her name, age and city as JSON."


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


def digits(text: object) -> str:
    """The digits of a text, without what separates thousands."""
    return "".join(c for c in str(text) if c.isdigit())


def expect(holds: object, seen: object) -> str:
    """Returns what was seen, shortened, if it is as it must be.

    Raises:
        AssertionError: It is not; the text says what was seen.
    """
    text = " ".join(str(seen).split())[:120]
    if not holds:
        raise AssertionError(f"saw {text!r}")
    return text


def run(client: str, *trials: Callable[[], str]) -> None:
    """Try each once and print a line of JSON of it: client, what was tried, ok, what was seen."""
    for trial in trials:
        what = (trial.__doc__ or trial.__name__).split("\n")[0].rstrip(".")
        try:
            line = {"client": client, "what": what, "ok": True, "seen": trial()}
        except Exception as error:  # Whatever a client raises is what its row says.
            if os.environ.get("HADAL_TRACE"):
                traceback.print_exc(file=sys.stderr)
            line = {
                "client": client,
                "what": what,
                "ok": False,
                "seen": f"{type(error).__name__}: {error}"[:300],
            }
        print(json.dumps(line), flush=True)
