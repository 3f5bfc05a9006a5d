"""What schemathesis is told of this server: which model there is, and to ask for short replies.

Two requests of three name the model that is served, since one drawn at random is refused before
anything else is looked at; and where a chat may be empty as far as its type says, it is not.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

MODEL = "HADAL_TESTED_MODEL"
MAX_TOKENS = 4
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and len(repr(body)) % 3:
        body["model"] = os.environ[MODEL]
    for name in ("messages", "input"):
        if body.get(name) == []:
            body[name] = [{"role": "user", "content": "hi"}]
    for name in _LIMITS:
        value = body.get(name)
        if type(value) is int and MAX_TOKENS < value < 2**63:  # Beyond it is no number of theirs.
            body[name] = MAX_TOKENS
