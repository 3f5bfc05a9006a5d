"""Other people's clients and suites against hadal-tiny as it ships; `python -m tests.clients`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.clients.__main__ import CLIENTS, Trial, served, tried
from tests.needs import leave_out
from tests.waiting import DEADLINE_S

pytestmark = [
    pytest.mark.more("clients of others are installed and tried"),
    pytest.mark.slow("clients of others are installed and tried"),
    pytest.mark.timeout(1800),
]
OFFICIAL = ("openai", "anthropic")
"""Tried by `make test-more`; all others by `make test-all`."""

CLIENT = "python -m tests.clients"

REFUSED = {
    ("", "Image Input"),  # The models have no eyes.
    # Events of reasoning have the names that OpenAI's clients know.
    ("open-responses", "Streaming Response"),
    ("open-responses", "Streaming Usage"),
    ("open-responses", "Compaction Endpoint"),
    ("open-responses", "Compaction Missing Required Model"),
}
"""What other people's suites try and is not served: part of the client's name, and the trial."""
_NOT_THERE = {"retrieve", "list_with_all_params"}
REFUSED_CALLS = {
    "test_models": {"delete"},
    # Fields for audio and images; chats that are stored.
    "chat/test_completions": {"create_with_all_params", "delete", "list", "update", *_NOT_THERE},
    "test_completions": {"create_with_all_params"},
    # Calls without a body, and compaction; responses that are not there.
    "test_responses": {
        *("cancel", "compact", "compact_with_all_params", "create", "create_with_all_params"),
        *("delete", "retrieve", "retrieve_with_all_params"),
    },
    # Files that hold no requests, and that are not there.
    "test_files": {"create", "create_with_all_params", "delete", "retrieve_content", *_NOT_THERE},
    "test_batches": {"cancel", "create", "create_with_all_params", *_NOT_THERE},
}
"""Calls in openai-python's tests that are not served, or what they name is not there, by file."""


def is_refused(trial: Trial) -> bool:
    """Whether it tries what is refused on purpose, and nothing else failed."""
    passed, _, failed = trial.seen.partition(" passed; not: ")
    if failed and trial.what in REFUSED_CALLS:
        calls = {re.sub(r"_overload_\d+$", "", call) for call in failed.split(", ")}
        return int(passed) > 0 and calls <= REFUSED_CALLS[trial.what]
    return any(client in trial.client and what == trial.what for client, what in REFUSED)


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.mark.promise(
    'Any OpenAI client with base_url="http://127.0.0.1:8000/v1" talks to it, and '
    "Anthropic's without the /v1"
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in OFFICIAL else pytest.mark.full) for n in CLIENTS],
)
def test_what_a_client_tries_works(tiny: str, name: str) -> None:
    """Every row says works, but those that try what is refused on purpose."""
    model = httpx.get(f"{tiny}/v1/models", timeout=DEADLINE_S).json()["data"][0]["id"]
    trials = tried(name, tiny, model)
    assert trials
    for trial in trials:
        if trial.what == "installs" and not trial.ok:
            leave_out(f"{name} does not install: {trial.seen}", f"{CLIENT} --only {name}")
    wrong = [trial for trial in trials if not trial.ok and not is_refused(trial)]
    assert not wrong, "\n".join(f"{t.client}, {t.what}: {t.seen}" for t in wrong)
