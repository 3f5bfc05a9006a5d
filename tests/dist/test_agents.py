"""Real coding agents against `hadal serve` with a scripted model, without a way out of this machine."""

from __future__ import annotations

import pytest

from tests.clients.agents import scripts, trial
from tests.clients.agents.agents import AGENTS
from tests.needs import leave_out

COMMAND = "python -m tests.clients.agents.table --only"
NOT_YET = {"codex-gpt-6.2-sol": "reasoning.context is refused"}
"""Agent -> reason why it is not served."""
UNCACHED = {"claude": "the first block of its system texts changes with the user's first words"}
"""Agent -> reason why a new conversation finds nothing in the prefix cache."""
WITHOUT_TOOLS = "aider"


@pytest.mark.more("agents of others are installed and run")
@pytest.mark.slow("agents of others are installed and run")
@pytest.mark.needs("hosts", "npm")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(name in NOT_YET, reason=NOT_YET.get(name, "")))
        for name in AGENTS
    ],
)
def test_an_agent_works_through_three_turns(name: str) -> None:
    """It edits a file. An unknown tool, a call with its JSON cut and an empty turn end nothing."""
    try:
        program = trial.installed(AGENTS[name])
    except trial.Missing as missing:
        leave_out(f"{name} does not install: {missing}", f"{COMMAND} {name}")
    outcome = trial.run(AGENTS[name], program)
    print(*outcome.turns, sep="\n")
    one, two, three, four = outcome.turns
    assert outcome.file == "beta\n"
    assert outcome.num_good_turns == 3
    assert [text for text in outcome.refused if "HEAD" not in text] == []
    if name != WITHOUT_TOOLS:
        assert (len(one.calls), len(two.calls)) == (1, 3)
        assert len(three.calls) >= 3  # An agent may ask again for the call that was cut.
        assert scripts.DONE.format("two") in two.output
        assert scripts.DONE.format("three") in three.output
    assert "Hello." in four.output
    if name in UNCACHED:
        assert outcome.cached_share < 0.1, UNCACHED[name]
    else:
        assert outcome.cached_share > 0.6
