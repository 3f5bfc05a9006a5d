"""Limits on the length of prompts: texts far too long are refused before they are tokenised whole.

Two checks precede tokenising. A text of N characters has at least N / (longest token) tokens; this
check is free. That bound is weak for a vocabulary with long tokens (DeepSeek's has one of 128
spaces). So a long text is first tokenised in pieces, until they have twice the allowed tokens. Cuts
add few tokens per piece, so permitted texts pass. At most about 4 times the limit is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable

from hadal.core.errors import RequestError


class PromptTooLong(RequestError):
    """Refusal of a prompt of at least `num_tokens` tokens, where `max_tokens` are allowed."""

    def __init__(self, num_tokens: int, max_tokens: int, field: str) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens or more; at most {max_tokens} are allowed. Shorten"
            f" {field}.",
            field,
            "context_length_exceeded",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


PIECE_CHARS = 16 * 1024
"""Length of a piece, in characters."""
USUAL_CHARS = 4
"""Characters per allowed token; a text of up to this ratio is tokenised whole, without pieces."""
FAR = 2
"""Multiple of the allowed tokens beyond which the pieces refuse a text."""


def check_length(num_tokens: int, max_tokens: int, field: str) -> None:
    """Raise RequestError if a prompt of at least `num_tokens` tokens is empty or too long."""
    if not num_tokens:
        raise RequestError(f"{field} has no tokens; send some text.", field)
    if num_tokens > max_tokens:
        raise PromptTooLong(num_tokens, max_tokens, field)


def encode_within(
    encode: Callable[[str], list[int]], text: str, max_tokens: int, field: str
) -> list[int]:
    """Return the ids of a text. Raise RequestError for a text of far more than `max_tokens` before
    all of it is tokenised. The caller checks the exact number.
    """
    if len(text) > USUAL_CHARS * max_tokens + PIECE_CHARS:
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARS):
            num_tokens += len(encode(text[begin : begin + PIECE_CHARS]))
            if num_tokens > FAR * max_tokens:
                check_length(max(num_tokens // FAR, max_tokens + 1), max_tokens, field)
    return encode(text)
