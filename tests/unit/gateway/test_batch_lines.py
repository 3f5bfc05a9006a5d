"""Lines of a batch's file, and numbers of a body, that no reader of JSON takes as they are."""

from __future__ import annotations

import json

import pytest

from hadal.core.errors import RequestError
from hadal.gateway import openai
from hadal.gateway.batches import _line_of

URL = "/v1/chat/completions"


def line_of(body: str, custom_id: str = "a") -> object:
    raw = f'{{"custom_id":{json.dumps(custom_id)},"method":"POST","url":"{URL}","body":{body}}}'
    return _line_of(raw.encode(), 1, URL, 1 << 20)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (line_of("[" * 5000), "invalid_json_line"),
        (line_of("{}", "a\0b"), "invalid_custom_id"),
        (line_of("[]"), "invalid_body"),
    ],
)
def test_what_no_line_can_be_is_an_error_of_the_file(found: object, code: str) -> None:
    assert isinstance(found, dict)
    assert found["code"] == code


def test_numbers_beyond_all_are_the_client_s_fault() -> None:
    with pytest.raises(RequestError, match=r"."):
        openai.check_served(b'{"verbosity": 1e999}', is_chat=True)
    with pytest.raises(RequestError, match=r"."):
        openai.schema_format("a", b'{"maximum": 1e999}', "response_format")
