"""Rows of the console's list of requests."""

from __future__ import annotations

from hadal.apps.console.requests_panel import rows_of
from hadal.gateway.api.shapes import CacheExplanation, CacheReport, PromptPlace


def explanation(**fields: object) -> CacheExplanation:
    known = {"reason": "differs", "detail": "", "block_tokens": 64, "reusable_blocks": 7}
    return CacheExplanation(**{**known, "found_blocks": 3, "common_tokens": 227, **fields})  # type: ignore[arg-type]


def test_a_request_has_a_row_for_each_of_its_prompts() -> None:
    there = explanation(
        position=227, message=PromptPlace("system", 0), text="Tuesday", kept_text="Monday"
    )
    tools = explanation(position=5, message=PromptPlace("tools"))
    whole = explanation(reason="cached", found_blocks=7)
    report = CacheReport("chatcmpl-1", 3600.0, "ann", [there, tools, whole])
    first = ("01:00:00", "ann", "chatcmpl-1")
    assert rows_of(report, 3601.0) == [
        (*first, "differs", "system 0", "Tuesday", "Monday", "227", "3 of 7"),
        (*first, "differs", "tools", "", "", "5", "3 of 7"),
        (*first, "cached", "", "", "", "", "7 of 7"),
    ]
