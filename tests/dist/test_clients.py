"""Third-party clients and test suites against the shipped hadal-tiny; see `python -m tests.clients`."""

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
]
OFFICIAL = ("openai", "anthropic", "standard")
"""Clients that `make test-more` tries; `make test-all` tries all others."""

CLIENT = "python -m tests.clients"

REFUSED = {
    ("", "Image Input"),  # The models take no images.
    # Reasoning events have the names that OpenAI's clients expect.
    ("open-responses", "Streaming Response"),
    ("open-responses", "Streaming Usage"),
    ("open-responses", "Compaction Endpoint"),
    ("open-responses", "Compaction Missing Required Model"),
}
"""Trials of third-party suites that are not served: part of the client's name, and the trial."""
_NOT_THERE = {"retrieve", "list_with_all_params"}
REFUSED_CALLS = {
    "test_models": {"delete"},
    # Fields for audio and images; stored chats.
    "chat/test_completions": {"create_with_all_params", "delete", "list", "update", *_NOT_THERE},
    "test_completions": {"create_with_all_params"},
    # Calls without a body, compaction, and responses that do not exist.
    "test_responses": {
        *("cancel", "compact", "compact_with_all_params", "create", "create_with_all_params"),
        *("delete", "retrieve", "retrieve_with_all_params"),
    },
    # Files without requests, and files that do not exist.
    "test_files": {"create", "create_with_all_params", "delete", "retrieve_content", *_NOT_THERE},
    "test_batches": {"cancel", "create", "create_with_all_params", *_NOT_THERE},
}
"""File of openai-python's tests -> calls that are not served or that name a missing object."""
_OWN_WORDS = {
    # Its schemas permit arguments that they do not name: hadal-tiny adds some, or calls twice.
    *("tool_calling", "tool_calling_async", "tool_calling_with_no_arguments"),
    "unicode_tool_call_integration",  # hadal-tiny knows no Chinese.
}
"""Tests of LangChain that fail by the words of hadal-tiny in a valid call."""
_OTHER_JSON = {"json_mode"}
"""Tests of LangChain that ask in words for JSON with certain keys: hadal-tiny takes others."""
STANDARD_FAILS = {
    "ChatOpenAI": _OWN_WORDS | _OTHER_JSON,
    "ChatOpenAIResponses": _OWN_WORDS | _OTHER_JSON,
    "ChatDeepSeek": _OWN_WORDS | _OTHER_JSON,
    "ChatAnthropic": _OWN_WORDS,
}
"""Client of LangChain's standard tests -> tests that fail."""
ALLOWED = {**REFUSED_CALLS, **STANDARD_FAILS}


def is_refused(trial: Trial) -> bool:
    """Return whether a trial fails only in calls that are refused on purpose, or in known tests."""
    passed, _, failed = trial.seen.partition(" passed; not: ")
    if failed and trial.what in ALLOWED:
        calls = {re.sub(r"_overload_\d+$", "", call) for call in failed.split(", ")}
        return int(passed) > 0 and calls <= ALLOWED[trial.what]
    return any(client in trial.client and what == trial.what for client, what in REFUSED)


@pytest.fixture(scope="module")
def tiny() -> Iterator[str]:
    with served() as url:
        yield url


@pytest.mark.promise(
    'Any OpenAI client with base_url="http://127.0.0.1:8000/v1" works with the '
    "server; Anthropic's clients use the URL without /v1."
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in OFFICIAL else pytest.mark.full) for n in CLIENTS],
)
def test_what_a_client_tries_works(tiny: str, name: str) -> None:
    """Every trial works, except those of calls that are refused on purpose, and known tests."""
    model = httpx.get(f"{tiny}/v1/models", timeout=DEADLINE_S).json()["data"][0]["id"]
    trials = tried(name, tiny, model)
    assert trials
    for trial in trials:
        if trial.what == "installs" and not trial.ok:
            leave_out(f"{name} does not install: {trial.seen}", f"{CLIENT} --only {name}")
    wrong = [trial for trial in trials if not trial.ok and not is_refused(trial)]
    assert not wrong, "\n".join(f"{t.client}, {t.what}: {t.seen}" for t in wrong)
