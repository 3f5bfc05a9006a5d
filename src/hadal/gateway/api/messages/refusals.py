"""Refusal of a prompt that is too long, in the words by which Anthropic's clients know it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hadal.core.errors import RequestError
from hadal.gateway.text.lengths import PromptTooLong


@contextmanager
def in_anthropics_words() -> Iterator[None]:
    """Reword the refusal of a prompt that is too long. Clients read the numbers from its text, and
    shorten the conversation.
    """
    try:
        yield
    except PromptTooLong as error:
        raise RequestError(
            f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum",
            error.param,
            error.code,
        ) from None
