"""Real coding agents against `hadal serve` with a scripted model, without a way out of this machine."""

from __future__ import annotations

import pytest

from tests.clients.agents import scripts, trial
from tests.clients.agents.agents import AGENTS
from tests.clients.installs import Missing
from tests.needs import leave_out

COMMAND = "python -m tests.clients.agents.table --only"
WITHOUT_TOOLS = "aider"


@pytest.mark.more("agents of others are installed and run")
@pytest.mark.slow("agents of others are installed and run")
@pytest.mark.needs("hosts", "npm")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_works_through_three_turns(name: str) -> None:
    """It edits a file. An unknown tool, a call with its JSON cut and an empty turn end nothing."""
    try:
        program = trial.installed(AGENTS[name])
    except Missing as missing:
        leave_out(f"{name} does not install: {missing}", f"{COMMAND} {name}")
    outcome = trial.run(AGENTS[name], program)
    print(*outcome.turns, sep="\n")
    one, two, three, four = outcome.turns
    assert outcome.is_edited
    assert outcome.num_good_turns == 3
    assert outcome.refused == []
    if name != WITHOUT_TOOLS:
        num_calls = 3 if AGENTS[name].is_parallel else 2
        assert (len(one.calls), len(two.calls)) == (1, num_calls)
        assert len(three.calls) >= 3  # An agent may ask again for the call that was cut.
        assert scripts.DONE.format("two") in two.output
        assert scripts.DONE.format("three") in three.output
    assert "Hello." in four.output
    assert outcome.cached_share > (0.6 if name == WITHOUT_TOOLS else 0.9)
