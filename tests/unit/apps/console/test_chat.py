"""Text from models, as the chat shows it."""

from __future__ import annotations

import re

import pytest

from hadal.apps.console.answer_view import rendered

CODE = "```python\n__name__ = '<b>'\n# no heading\n"


@pytest.mark.parametrize("end", ["", "```\n", "```\n\n# a heading\n"])
def test_a_block_of_code_is_one_from_its_first_line_on(end: str) -> None:
    found = rendered(CODE + end)
    assert found.count("<pre>") == 1
    code = re.sub("<[^>]*>", "", found.partition("</pre>")[0])
    assert code == "__name__ = '&lt;b&gt;'\n# no heading\n"
    assert found.count("<h1>") == end.count("heading")


@pytest.mark.promise("Answers are markdown; HTML in them is text, and pictures are links.")
def test_html_is_text() -> None:
    said = "A Vec<T>, <style>body { display: none }</style> and <i class='h-stop'>this</i>"
    assert re.findall("<[a-z]+", rendered(said)) == ["<p"]
    assert "Vec&lt;T&gt;" in rendered(said)
    assert "href" not in rendered("[here](javascript:alert(1))")
    assert "<img" not in rendered("![x](http://198.51.100.7/x.png)")


def test_lists_and_tables_come_right_behind_a_line() -> None:
    found = rendered("Two:\n- one\n- two\n\n| a | b |\n| - | - |\n| 1 | 2 |")
    assert re.findall("<(ul|li|table|td)>", found) == ["ul", "li", "li", "table", "td", "td"]
