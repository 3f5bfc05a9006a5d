"""A budget of reasoning tokens on a running server: equal tokens up to the budget, then the mark
that ends the reasoning. With drafts the tokens are the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.dist.answers import ask_all
from tests.dist.serving import Server, StartServer

CHATS = "/v1/chat/completions"
ASKED = ("What is 12 + 30?", "Which word is longer: sea or ocean?")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WANTED: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
]
BUDGETS = (0, 1, 7)


def bodies_of(budget: int) -> list[dict[str, Any]]:
    """Return chats that think; a budget of -1 is no budget."""
    return [
        {
            "messages": [{"role": "user", "content": text}],
            "enable_thinking": True,
            "thinking_budget": budget,
            "return_token_ids": True,
            "max_tokens": 60,
            "temperature": temperature,
            "seed": 5,
            **wanted,
        }
        for text in ASKED
        for temperature in (0, 1.5)
        for wanted in WANTED
    ]


def ids_of(server: Server, budget: int) -> list[list[int]]:
    """Return the tokens of each reply, after checking that schemas hold."""
    bodies = bodies_of(budget)
    answers = asyncio.run(ask_all(server, CHATS, bodies))
    for body, (choice,) in zip(bodies, answers, strict=True):
        if "response_format" in body and choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"])["a"], int)
    return [choice["token_ids"] for (choice,) in answers]


def check_budget(free: list[list[int]], bounded: list[list[int]], budget: int) -> int:
    """Return the token that ended reasoning at its budget; -1 if no reasoning reached it."""
    ends = set()
    for one, other in zip(bounded, free, strict=True):
        assert one[:budget] == other[:budget], "the same tokens up to there"
        if one != other:
            ends.add(one[budget])
    assert len(ends) <= 1
    return ends.pop() if ends else -1


@pytest.mark.promise("after N reasoning tokens it can draw only the end mark")
def test_reasoning_ends_within_its_budget(server: Server) -> None:
    free = ids_of(server, -1)
    ends = {check_budget(free, ids_of(server, budget), budget) for budget in BUDGETS}
    assert len(ends - {-1}) == 1, "one mark, whatever the budget"


@pytest.mark.more("drafts, with a server of its own; tests/unit/tokens has the masks")
@pytest.mark.parametrize("drafts", [2, pytest.param(3, marks=pytest.mark.full)])
def test_drafts_change_nothing(server: Server, mortal: StartServer, drafts: int) -> None:
    expected = [ids_of(server, budget) for budget in BUDGETS]
    drafting = mortal(decode={"drafts": drafts})
    assert [ids_of(drafting, budget) for budget in BUDGETS] == expected
