"""Conversations as a browser stores them, and reading them back."""

import pytest

from hadal.apps.console.conversation import (
    ChatAnswer,
    ChatTurn,
    Conversation,
    KeptChat,
    read,
    read_list,
    to_json,
)


def test_a_list_is_read_the_latest_first() -> None:
    found = [
        {"id": "a", "title": "first", "changed_ms": 1},
        {"id": "b", "title": "half \ud83d", "changed_ms": 2.5},
    ]
    assert read_list(found) == [KeptChat("b", "half ?", 2.5), KeptChat("a", "first", 1)]
    for other in (None, "x", [{"title": "no id"}], [3]):
        assert read_list(other) == []


def test_a_conversation_is_read_as_it_was_kept() -> None:
    answers = [ChatAnswer(content="4", finish="stop"), ChatAnswer(error="The server is gone.")]
    kept = Conversation("a", "sum", turns=[ChatTurn("2 + 2?", answers)])
    assert read("a", to_json(kept)) == kept
    for other in ("", "{", '{"id": 3}', '{"id": "a", "title": "\ud83d"}'):
        assert read("a", other) is None


@pytest.mark.promise(
    "An answer is stored while it arrives. If you leave or reload the page, the part "
    "that has arrived stays."
)
def test_an_answer_whose_page_went_is_a_stopped_one() -> None:
    """Read a conversation with an unfinished answer, which was stored while it arrived."""
    kept = Conversation("a", turns=[ChatTurn("Count.", [ChatAnswer(content="1 2")])])
    found = read("b", to_json(kept))
    assert found is not None
    assert found.id == "b", "what it is kept under"
    assert found.turns[0].answers == [ChatAnswer(content="1 2", finish="stopped")]
    assert found.messages()[-1] == {"role": "assistant", "content": "1 2"}
