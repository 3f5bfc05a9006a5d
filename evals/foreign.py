"""The probe of foreign wordings (foreign.txt, foreign_tools.jsonl) as examples: written before
the generators of new wordings, but by the same hand, and never trained on. What they measure is not
how strangers ask.
"""

import json
from pathlib import Path
from typing import Any

from evals.smalltalk import CANNOT
from evals.tasks import Example

_FOLDER = Path(__file__).parent
_TOOLS: dict[str, tuple[str, str, dict[str, dict[str, Any]]]] = {
    "calc": (
        "calc",
        "Evaluates an arithmetic expression.",
        {"expression": {"type": "string", "description": "For instance 3 * 14."}},
    ),
    "weather": (
        "weather",
        "Current temperature of a city in degrees.",
        {"city": {"type": "string", "description": "City whose temperature is wanted."}},
    ),
    "units": (
        "units",
        "Turns an amount of one unit into another unit.",
        {"amount": {"type": "number"}, "source": {"type": "string"}, "target": {"type": "string"}},
    ),
    "shop": (
        "shop",
        "Price of a product in our shop.",
        {"product": {"type": "string", "description": "The product's name."}},
    ),
}


def foreign_examples() -> list[Example]:
    """All of them, in the order of the files."""
    rows = (_FOLDER / "foreign.txt").read_text(encoding="utf-8").splitlines()
    examples = [_chat(row) for row in rows if row and not row.startswith("#")]
    for row in (_FOLDER / "foreign_tools.jsonl").read_text(encoding="utf-8").splitlines():
        fields = json.loads(row)
        examples += _with_schema(fields) if "schema" in fields else _with_tools(fields)
    return examples


def _chat(row: str) -> Example:
    task, asked, *answers = (part.strip().replace("\\n", "\n") for part in row.split(" | "))
    turns = asked.split(" >> ")
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))
    answer = CANNOT if answers == ["*"] else answers[0]
    return Example(messages, "", answer, task, (), also_right=tuple(answers[1:]))


def _with_tools(fields: dict[str, Any]) -> list[Example]:
    """The call that is due, and the answer from what the tools returned."""
    tools = tuple(_tool(name) for name in fields["tools"])
    calls = tuple((name, arguments) for name, arguments in fields["calls"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": fields["ask"]}]
    if not calls:
        return [Example(tuple(messages), "", fields["answer"][0], "tools", (), tools)]
    found = [Example(tuple(messages), "", "", "tools", (), tools, calls)]
    if fields["answer"]:
        made = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": n, "arguments": json.dumps(a)},
            }
            for i, (n, a) in enumerate(calls)
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        for call, result in zip(made, fields["results"], strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        first = fields["answer"][0]
        also = tuple(f"{first} {c[1]['target']}" for c in calls if "target" in c[1])
        found.append(Example(tuple(messages), "", first, "tools", (), tools, also_right=also))
    return found


def _tool(name: str) -> dict[str, Any]:
    name, description, properties = _TOOLS[name]
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _with_schema(fields: dict[str, Any]) -> list[Example]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in fields["schema"].items()},
        "required": list(fields["schema"]),
        "additionalProperties": False,
    }
    message = {"role": "user", "content": fields["ask"]}
    return [Example((message,), "", json.dumps(fields["json"]), "schema", (), schema=schema)]
