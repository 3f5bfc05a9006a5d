"""Explanations of cache misses by a running server: they agree with what its units found, in memory,
on disk and after an eviction, for each tenant alone, and `hadal explain-cache` prints them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hadal.core.messages.base import BLOCK_TOKENS
from tests.dist.cached import cache_fields, settle
from tests.dist.keyed import CLIENT, header, model_of, with_keys
from tests.dist.segments import names_on_disk
from tests.dist.serving import Server, StartServer
from tests.waiting import DEADLINE_S, wait_until

ANN, BEN = "ann-key", "ben-key"
WORDS = ("river", "stone", "tall", "house", "garden", "walks", "under", "seven", "lamp", "winter")
PATH = "/v1/explain_cache"


def text_of(seed: int, num_words: int = 150) -> str:
    return " ".join(Random(seed).choices(WORDS, k=num_words)) + "."


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ask(server: Server, *messages: dict[str, str], key: str = "", **fields: Any) -> dict[str, Any]:
    """Return a chat's explanation and its reply's id. It agrees with the tokens that were found."""
    body = {
        "model": model_of(server, key or "none"),
        "messages": [*messages],
        "max_tokens": 2,
        "explain_cache": True,
        **fields,
    }
    # A connection of its own, which may reach another gateway.
    headers = {"connection": "close", **(header(key) if key else {})}
    reply = CLIENT.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    [found] = usage["cache_explanation"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert found["found_blocks"] * BLOCK_TOKENS == cached
    assert found["reusable_blocks"] == (usage["prompt_tokens"] - 1) // BLOCK_TOKENS
    return {"id": reply.json()["id"], **found}


def command(server: Server, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HADAL_API_KEY": key}
    return subprocess.run(
        [sys.executable, "-m", "hadal.cli", "explain-cache", *arguments, "--url", server.url],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment,
    )


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": text_of(len(name), 40),
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }


@pytest.mark.promise("`hadal explain-cache REQUEST_ID` prints the reason of one request")
def test_five_prompts_that_differ_in_known_ways(borrow: StartServer) -> None:
    server = borrow(*with_keys(ANN, BEN))
    rules, question, more = text_of(1), text_of(2), text_of(3)

    def asked(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
        return ask(server, *messages, key=ANN, **fields)

    system, user = message("system", f"{rules} It is Monday. {more}"), message("user", question)
    asked(system, user)
    # A date.
    date = asked(message("system", f"{rules} It is Tuesday. {more}"), user)
    assert (date["reason"], date["message"]) == ("differs", {"role": "system", "index": 0})
    assert "Tuesday." in date["text"]
    assert "Monday." in date["kept_text"]
    assert date["position"] // BLOCK_TOKENS == date["found_blocks"] > 0
    # A random suffix of the system text.
    suffix = asked(message("system", f"{system['content']} id 7f3a"), user)
    assert (suffix["reason"], suffix["message"]["role"]) == ("differs", "system")
    assert "7f3a" in suffix["text"]
    # A list at the end of the system text, which has grown.
    tasks = asked(message("system", f"{system['content']} id 7f3a, then wash"), user)
    assert "wash" in tasks["text"]
    assert tasks["common_tokens"] > suffix["common_tokens"]
    # Tools in another order.
    tools = [tool("find_rain"), tool("find_sun")]
    asked(system, user, tools=tools)
    order = asked(system, user, tools=tools[::-1])
    assert (order["reason"], order["message"]) == ("differs", {"role": "tools"})
    assert "sun" in order["text"]
    # A line of billing before everything.
    billing = asked(message("system", f"bill 1234: {system['content']}"), user)
    assert (billing["reason"], billing["found_blocks"]) == ("differs", 0)
    assert billing["position"] < BLOCK_TOKENS
    assert "bill" in billing["text"]

    done = command(server, date["id"], key=ANN)
    assert done.returncode == 0, done.stderr
    for part in (
        "differs",
        "Tuesday.",
        "Monday.",
        f"token {date['position']}",
        "message 0 (system)",
    ):
        assert part in done.stdout
    whole = json.loads(command(server, date["id"], "--json", key=ANN).stdout)
    assert {"id": whole["id"], **whole["prompts"][0]} == date
    assert billing["id"] in command(server, key=ANN).stdout
    for request_id, key, said in (
        (date["id"], BEN, "not known for this API key"),
        ("chatcmpl-unknown", ANN, "not known for this API key"),
        (date["id"], "wrong", "not valid"),
    ):
        refused = command(server, request_id, key=key)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert said in refused.stderr


@pytest.mark.promise("Only the key that sent a request reads its texts")
def test_two_tenants_never_see_each_others_text(borrow: StartServer) -> None:
    server = borrow(*with_keys(ANN, BEN))
    secret = message("system", text_of(11) + " The word is zebra.")
    user = message("user", text_of(12))
    ask(server, secret, user, key=ANN)
    of_ben = ask(server, message("system", text_of(11) + " The word is lion."), user, key=BEN)
    again = ask(server, message("system", text_of(11) + " The word is tiger."), user, key=BEN)
    assert again["reason"] == "differs"
    assert "lion" in again["kept_text"]
    seen = [of_ben, again]
    for key in (BEN, "auditor"):
        listed = CLIENT.get(f"{server.url}{PATH}", headers=header(key))
        assert listed.status_code == 200
        seen += listed.json()["data"]
    assert any(one.get("tenant") for one in seen)
    assert "zebra" not in json.dumps(seen)


@pytest.mark.promise("`explain_cache_mb = 0` turns it off")
def test_0_turns_it_off(borrow: StartServer) -> None:
    server = borrow(gateway={"explain_cache_mb": 0})
    body = {"model": server.model, "messages": [message("user", "hi")], "max_tokens": 2}
    url = f"{server.url}/v1/chat/completions"
    refused = CLIENT.post(url, json={**body, "explain_cache": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "explain_cache")
    reply = CLIENT.post(url, json=body)
    assert reply.status_code == 200
    done = command(server, reply.json()["id"])
    assert done.returncode == 2
    assert "explain_cache_mb is 0" in done.stderr


def test_blocks_on_disk_and_evicted_blocks_are_told_apart(
    start_server: StartServer, folder: Path
) -> None:
    """The pool holds one prompt: the next one evicts it, and the disk has it."""
    few = {"kv_blocks": 1 + 14, "kv_memory_mb": 0}
    server = start_server(prefill=few, decode=few, **cache_fields(folder))
    first, second = (message("user", text_of(seed, 450)) for seed in (21, 22))
    assert ask(server, first)["reason"] == "first"
    wait_until(lambda: names_on_disk(folder), "blocks are on disk")
    settle(server)
    assert ask(server, second)["reason"] == "differs"
    settle(server)
    again = ask(server, first)
    assert again["reason"] == "cached", "blocks that are read from disk are found"


def test_without_a_disk_evicted_blocks_are_named(borrow: StartServer) -> None:
    few = {"kv_blocks": 1 + 14, "kv_memory_mb": 0}
    server = borrow(prefill=few, decode=few)
    first, second = (message("user", text_of(seed, 450)) for seed in (31, 32))
    ask(server, first)
    ask(server, second)
    again = ask(server, first)
    assert again["reason"] == "evicted"
    assert again["found_blocks"] < again["common_tokens"] // BLOCK_TOKENS


def test_another_gateway_finds_what_one_has_served(borrow: StartServer) -> None:
    """Each gateway compares with the prompts that it served; any of them answers for all."""
    server = borrow("--gateways", "2")
    asked = [ask(server, message("user", text_of(40 + number))) for number in range(4)]
    for one in asked:
        for _ in range(4):
            reply = CLIENT.get(f"{server.url}{PATH}/{one['id']}", headers={"connection": "close"})
            assert reply.status_code == 200, reply.text
            assert reply.json()["id"] == one["id"]
    listed = CLIENT.get(f"{server.url}{PATH}", headers={"connection": "close"}).json()["data"]
    assert {one["id"] for one in asked} <= {one["id"] for one in listed}
