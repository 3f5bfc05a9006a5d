"""Schemas and tools that others wrote, from collections that are not kept here: answers are valid
whatever is drawn. Each is skipped where no variable says where it lies, and at small sizes.

    HADAL_SCHEMAS   a folder of JSON schemas, such as `data` of guidance-ai/jsonschemabench
    HADAL_TOOLS     a folder of lists of functions, such as BFCL's (bfcl_eval/data of gorilla)
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from hadal.gateway.tools import FORMATS
from hadal.runtime.resolve import model_folder
from tests.dist.conftest import starting
from tests.dist.serving import Server
from tests.dist.test_tool_calls import model_with_marks
from tests.needs import leave_out

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow("hundreds of answers"),
    pytest.mark.timeout(3600),
]
NUM_SCHEMAS, NUM_LISTS = 500, 300
NUM_DRAWN = 3
"""Answers of each schema."""
MAX_TOKENS = 400
TEMPERATURE = 1.2
_KINDS = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Of BFCL's types those that JSON Schema calls otherwise."""


def files_of(variable: str) -> list[Path]:
    folder = os.environ.get(variable)
    if not folder:
        leave_out(f"{variable} names no folder", f"{variable}=FOLDER make test-all")
    return sorted(Path(folder).rglob("*.json"))


def likely_ends() -> dict[str, float]:
    """A bias for what ends strings, lists and objects: a model that knows no JSON draws on in one
    until no token is left.
    """
    fields = json.loads((model_folder("") / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    return {str(token): 5.0 for text, token in vocab.items() if set(text) <= set('"]}')}


def check(answer: Any, schema: dict[str, Any]) -> None:
    """By the schema, whatever may be wrong with that: some name a value twice where they may not."""
    jsonschema.validators.validator_for(schema)(schema).validate(answer)


async def ask_each(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    gate, model = asyncio.Semaphore(24), server.model
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:

        async def one(body: dict[str, Any]) -> httpx.Response:
            async with gate:
                return await client.post(path, json={"model": model, **body})

        return list(await asyncio.gather(*map(one, bodies)))


@pytest.mark.promise(
    "The sampler draws only tokens after which the text can still become what the schema "
    "allows, and an end only where it is complete"
)
def test_schemas(request: pytest.FixtureRequest) -> None:
    """Those that cannot be followed are refused before anything is computed."""
    paths = files_of("HADAL_SCHEMAS")
    server = request.getfixturevalue("server")
    random.Random(1).shuffle(paths)
    schemas = [json.loads(path.read_text()) for path in paths[: 2 * NUM_SCHEMAS]]
    schemas = [one for one in schemas if isinstance(one, dict)][:NUM_SCHEMAS]
    bodies = [
        {
            "prompt": "Write JSON: ",
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "logit_bias": likely_ends(),
            "seed": seed,
            "n": NUM_DRAWN,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            },
        }
        for seed, schema in enumerate(schemas)
    ]
    told: Counter[str] = Counter()
    for schema, reply in zip(
        schemas, asyncio.run(ask_each(server, "/v1/completions", bodies)), strict=True
    ):
        if reply.status_code == 400:
            assert reply.json()["error"]["param"] == "response_format", reply.text
            told["refused"] += 1
            continue
        if reply.status_code == 422:
            # Its masks would have held up everybody's steps (hadal.tokens.grammars).
            assert "cannot be held to its format any further" in reply.text
            told["too costly"] += 1
            continue
        assert reply.status_code == 200, reply.text
        for choice in reply.json()["choices"]:
            told[choice["finish_reason"]] += 1
            if choice["finish_reason"] == "stop":
                check(json.loads(choice["text"]), schema)
    print("schemas:", len(schemas), dict(told))
    assert told["refused"] < 0.2 * len(schemas)
    assert told["too costly"] < 0.01 * len(schemas)
    assert told["stop"] > 0.2 * NUM_DRAWN * len(schemas)


def as_schema(given: Any) -> Any:
    """BFCL's parameters in JSON Schema's words."""
    if isinstance(given, list):
        return [as_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    made = {name: as_schema(each) for name, each in given.items() if name not in ("optional",)}
    kind = made.get("type")
    if isinstance(kind, str) and kind.lower() in _KINDS:
        made["type"] = _KINDS[kind.lower()]
        if made["type"] is None:
            del made["type"]
    return made


def tool_lists() -> list[list[dict[str, Any]]]:
    lists = []
    for path in files_of("HADAL_TOOLS"):
        for line in path.read_text().splitlines():
            functions = {
                each["name"].replace(".", "_")[:64]: as_schema(each["parameters"])
                for each in json.loads(line)["function"]
            }
            lists.append(
                [
                    {
                        "type": "function",
                        "function": {"name": name, "parameters": parameters, "strict": True},
                    }
                    for name, parameters in functions.items()
                ]
            )
    random.Random(2).shuffle(lists)
    return lists


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls(tmp_path: Path, name: str) -> None:
    lists = [each for each in tool_lists() if each][:NUM_LISTS]
    bodies = [
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": tools,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "thinking": False,
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "logit_bias": likely_ends(),
            "seed": seed,
        }
        for seed, tools in enumerate(lists)
    ]
    told: Counter[str] = Counter()
    with starting() as start:
        server = start(model=str(model_with_marks(tmp_path, FORMATS[name])))
        replies = asyncio.run(ask_each(server, "/v1/chat/completions", bodies))
    for tools, reply in zip(lists, replies, strict=True):
        if reply.status_code == 400:
            told[reply.json()["error"]["message"][:60]] += 1
            continue
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        told[choice["finish_reason"]] += 1
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[call["function"]["name"]])
    print("lists:", len(lists), told.most_common(6))
    assert told["tool_calls"] > 0.5 * len(lists)
