"""Real coding agents against `hadal serve` with a scripted model, without a way out of this machine."""

from __future__ import annotations

import functools

import pytest

from tests.clients.agents import scripts, table, trial
from tests.clients.agents.agents import AGENTS
from tests.needs import leave_out

pytestmark = [
    pytest.mark.more("agents of others are installed and run"),
    pytest.mark.slow("agents of others are installed and run"),
    pytest.mark.needs("hosts", "npm"),
]
COMMAND = "python -m tests.clients.agents.table --only"
NOT_YET = {"codex-gpt-6.2-sol": "reasoning.context"}
"""Agent -> field of its requests that is refused."""
UNCACHED = {
    "claude": "the first block of its system texts differs with the first words of the user"
}
"""Agents of which a new conversation finds nothing in the prefix cache."""


@functools.cache
def outcome(name: str) -> trial.Outcome:
    """Return what came of an agent's turns; skip the running test if it does not install."""
    try:
        program = trial.installed(AGENTS[name])
    except trial.Missing as missing:
        leave_out(f"{name} does not install: {missing}", f"{COMMAND} {name}")
    return trial.run(AGENTS[name], program)


def seen(name: str) -> str:
    """Return all turns of an agent, for an error message."""
    return "\n".join(map(str, outcome(name).turns))


SERVED = [
    pytest.param(
        name, marks=pytest.mark.xfail(name in NOT_YET, reason=NOT_YET.get(name, ""), strict=True)
    )
    for name in AGENTS
]


@pytest.mark.parametrize("name", SERVED)
def test_an_agent_edits_a_file_in_three_turns(name: str) -> None:
    found = outcome(name)
    assert found.file == "beta\n", seen(name)
    assert found.num_good_turns == 3, seen(name)
    assert not [text for text in found.refused if "HEAD" not in text], seen(name)


@pytest.mark.parametrize("name", SERVED)
def test_an_agent_goes_on_after_mistakes_of_the_model(name: str) -> None:
    """An unknown tool, a call with its JSON cut, and an empty turn end no conversation."""
    one, two, three, four = outcome(name).turns
    assert scripts.DONE.format("two") in two.output or name == "aider", seen(name)
    assert scripts.DONE.format("three") in three.output or name == "aider", seen(name)
    assert "Hello." in four.output, seen(name)
    if name != "aider":
        assert (len(one.calls), len(two.calls), len(three.calls) >= 3) == (1, 3, True), seen(name)


@pytest.mark.parametrize("name", SERVED)
def test_a_new_conversation_finds_the_prompt_of_another(name: str) -> None:
    share = outcome(name).cached_share
    assert share < 0.1 if name in UNCACHED else share > 0.6, seen(name)


def test_the_table_has_a_row_for_each_agent() -> None:
    row = table.Result(AGENTS["opencode"], "1", outcome("opencode")).row
    assert len(row) == len(table.COLUMNS)
    assert row[2] == "3"
    assert "write" in row[3]
