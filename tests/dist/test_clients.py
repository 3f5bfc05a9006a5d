"""Other people's clients and suites against hadal-tiny as it ships; `python -m tests.clients`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.clients.__main__ import CLIENTS, served, tried

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

REFUSED = {
    ("", "Image Input"),  # The models have no eyes.
    ("openai-python", "test_completions"),  # Fields for audio and images, and stored chats.
    ("openai-python", "test_responses"),  # Compaction, background runs, tools that a vendor runs.
    ("openai-python", "test_models"),  # Deletes models.
    ("openai-python", "test_files"),  # Files that hold no requests, and files that are not there.
    ("openai-python", "test_batches"),  # Of such files.
    # Events of reasoning have the names that OpenAI's clients know.
    ("open-responses", "Streaming Response"),
    ("open-responses", "Streaming Usage"),
    ("open-responses", "Compaction Endpoint"),
    ("open-responses", "Compaction Missing Required Model"),
}
"""What other people's suites try and is not served, with the reason: part of the client's name, and
the trial.
"""


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.mark.parametrize("name", CLIENTS)
def test_what_a_client_tries_works(tiny: str, name: str) -> None:
    """Every row says works, but those that try what is refused on purpose."""
    model = httpx.get(f"{tiny}/v1/models", timeout=30).json()["data"][0]["id"]
    trials = tried(name, tiny, model)
    assert trials
    for trial in trials:
        if trial.what == "installs" and not trial.ok:
            pytest.skip(f"{name} does not install here: {trial.seen}")
    wrong = [
        trial
        for trial in trials
        if not trial.ok
        and not any(client in trial.client and what == trial.what for client, what in REFUSED)
    ]
    assert not wrong, "\n".join(f"{t.client}, {t.what}: {t.seen}" for t in wrong)
