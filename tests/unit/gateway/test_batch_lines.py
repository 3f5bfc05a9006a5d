"""Lines of a batch's input file: each is an error of the file or a request. Besides: numbers too
large for JSON readers are the client's error.
"""

from __future__ import annotations

import json

import pytest

from hadal.core.errors import RequestError
from hadal.gateway.api import base, field_table, fields
from hadal.gateway.desk.batch_lines import _line_of, _lines_of

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
        fields.check_fields(b'{"audio": 1e999}', field_table.CHAT)
    with pytest.raises(RequestError, match=r"."):
        base.schema_format("a", b'{"maximum": 1e999}', "response_format")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_a_file_comes(size: int) -> None:
    raw = b"one\n\ntwo is longer\n\n\nthree"
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert list(_lines_of(iter(pieces))) == raw.split(b"\n")
    assert list(_lines_of(iter([raw + b"\n"]))) == raw.split(b"\n")
    assert list(_lines_of(iter([]))) == []
