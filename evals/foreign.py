"""Examples with wordings written by hand (foreign.yaml). The author of the generators wrote them before the
generators. Training never uses them. They do not show how other people ask.
"""

import json
from typing import Any

from evals.calling import messages_of
from evals.frames import load
from evals.smalltalk import CANNOT
from evals.tasks import Example

Fields = dict[str, Any]
_PROBE = load("foreign", Fields)


def foreign_examples() -> list[Example]:
    """Return all examples, in the order of the file."""
    return [
        *map(_chat, _PROBE["chats"].splitlines()),
        *(example for fields in _PROBE["with_tools"] for example in _with_tools(fields)),
        *map(_with_schema, _PROBE["with_schema"]),
    ]


def _chat(row: str) -> Example:
    task, asked, *answers = (part.strip().replace("\\n", "\n") for part in row.split(" | "))
    turns = asked.split(" >> ")
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))
    answer = CANNOT if answers == ["*"] else answers[0]
    return Example(messages, "", answer, task, (), also_right=tuple(answers[1:]))


def _with_tools(fields: Fields) -> list[Example]:
    """Return an example for the calls, and one for the answer from the tools' results."""
    tools = tuple(_tool(name) for name in fields["tools"])
    calls = tuple((name, arguments) for name, arguments in fields["calls"])
    messages: list[Fields] = [{"role": "user", "content": fields["ask"]}]
    if not calls:
        return [Example(tuple(messages), "", fields["answer"][0], "tools", (), tools)]
    found = [Example(tuple(messages), "", "", "tools", (), tools, calls)]
    if fields["answer"]:
        messages += messages_of(calls, fields["results"], "call")
        first = fields["answer"][0]
        also = tuple(f"{first} {c[1]['target']}" for c in calls if "target" in c[1])
        found.append(Example(tuple(messages), "", first, "tools", (), tools, also_right=also))
    return found


def _tool(name: str) -> Fields:
    tool = _PROBE["tools"][name]
    fields = tool["properties"]
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    function = {"name": name, "description": tool["description"], "parameters": parameters}
    return {"type": "function", "function": function}


def _with_schema(fields: Fields) -> Example:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in fields["schema"].items()},
        "required": list(fields["schema"]),
        "additionalProperties": False,
    }
    message = {"role": "user", "content": fields["ask"]}
    return Example((message,), "", json.dumps(fields["json"]), "schema", (), schema=schema)
