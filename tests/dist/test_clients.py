"""Other people's clients and suites against hadal-tiny as it ships; `python -m tests.clients`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.clients.__main__ import CLIENTS, served, tried

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

REFUSED = {
    "Image Input",  # The models have no eyes.
    "test_completions",  # Fields for audio and images, and stored chats.
    "test_responses",  # Compaction, background runs, tools that a vendor runs.
    "test_models",  # Deletes models.
}
"""What other people's suites try and is not served, with the reason."""


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
    wrong = [trial for trial in trials if not trial.ok and trial.what not in REFUSED]
    assert not wrong, "\n".join(f"{t.client}, {t.what}: {t.seen}" for t in wrong)
