"""A template's process renders as Jinja does, and ends any template at a limit, with an error of
one line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jinja2
import pytest

from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.template import ConfinedProcess
from tests.processes import children_of
from tests.waiting import DEADLINE_S

from .model_folder import BOS, EOS, TEMPLATE

MESSAGES = [{"role": "user", "content": "2 + 2? 你好 🙂"}]
VALUES: dict[str, Any] = {
    "add_generation_prompt": True,
    "bos_token": BOS,
    "eos_token": EOS,
    "tools": None,
}


def made(template: str, **limits: float) -> closing[ConfinedProcess]:
    return closing(ConfinedProcess(template, "x.jinja", **limits))  # type: ignore[arg-type]


def processes() -> list[int]:
    """Return the template processes of this test process, oldest first."""
    return children_of(os.getpid(), b"hadal.gateway.text.template")


@pytest.fixture(autouse=True)
def before() -> Iterator[list[int]]:
    """Yield the template processes of other tests; at the end there must be no more."""
    pids = processes()
    yield pids
    assert processes() == pids


def test_it_renders_as_jinja_does() -> None:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    plain = environment.from_string(TEMPLATE).render(messages=MESSAGES, **VALUES)
    with made(TEMPLATE) as template:
        assert [template.render(MESSAGES, VALUES, 1000) for _ in range(3)] == [plain] * 3


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set t = namespace(x='x') %}{% for i in range(60) %}{% set t.x = t.x ~ t.x %}{% endfor %}{{"
    " t.x }}"
)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (ENDLESS, r"takes more than 0.3 s of processor time"),
        (
            "{{ 7 ** (n * n) % 2 }}",
            r"takes more than 0.3 s of processor time",
        ),  # One operation cannot be interrupted.
        (DOUBLING, r"takes more than 256 MiB of memory"),
        ("{{ 'x' * n * n * n }}", r"takes more than 256 MiB of memory"),
        ("{{ '%999999999d' % n }}", r"takes more than 256 MiB of memory"),
    ],
)
def test_what_a_template_takes_has_limits(template: str, why: str) -> None:
    cpu_s = 0.3 if "processor" in why else 10.0
    with made(template, cpu_s=cpu_s, memory_bytes=1 << 28, patience_s=DEADLINE_S) as hostile:
        for _ in range(2):  # Refused again, by a working process.
            with pytest.raises(RequestError, match=why) as caught:
                hostile.render(MESSAGES, {"n": 9999}, 1000)
            assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template", ["{{ 'x' * 99999999 }}", "{{ 9 ** 99 ** 99 }}", "{{ " + "(" * 5000 + " }}"]
)
def test_parsing_has_them_too(template: str) -> None:
    """Jinja folds constants while it parses."""
    with pytest.raises(
        CheckpointError, match=r"^x\.jinja: the chat template does not parse \(.*\)\.$"
    ):
        ConfinedProcess(template, "x.jinja", cpu_s=0.5, memory_bytes=1 << 28)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_one_that_stands_still_or_was_killed_is_replaced(
    before: list[int], number: signal.Signals
) -> None:
    with made("{{ messages[0]['content'] }}", patience_s=0.5) as template:
        (pid,) = set(processes()) - set(before)
        os.kill(pid, number)
        assert template.render(MESSAGES, {}, 1000) == MESSAGES[0]["content"]
        assert pid not in processes()


def test_one_that_is_killed_whenever_it_is_asked_is_not_the_clients_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = ConfinedProcess._ask

    def killed_and_asked(self: ConfinedProcess, call: Any, deadline_s: float) -> str:
        if call[0] == "render":
            os.kill(processes()[-1], signal.SIGKILL)
        return ask(self, call, deadline_s)

    with made("{{ messages[0]['content'] }}") as template:
        monkeypatch.setattr(ConfinedProcess, "_ask", killed_and_asked)
        with pytest.raises(ApiError, match="try again") as caught:
            template.render(MESSAGES, {}, 1000)
        assert caught.value.status == 503
        monkeypatch.undo()
        assert template.render(MESSAGES, {}, 1000) == MESSAGES[0]["content"]


def test_numbers_that_do_not_travel_are_named() -> None:
    with made("{{ n }}") as template:
        with pytest.raises(RequestError, match="more than 64 bits"):
            template.render(MESSAGES, {"n": 10**30}, 1000)
        assert template.render(MESSAGES, {"n": 1}, 1000) == "1"


def test_the_servers_secrets_are_not_in_its_environment(
    before: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADAL_API_KEYS", "sk-secret")
    with made("{{ messages }}"):
        (pid,) = set(processes()) - set(before)
        assert b"HADAL_" not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize(
    "expression",
    [r"'\ud800'", r"raise_exception('a\udfff')", "'%c' % 56000", r"'\ud83d' ~ '\ude00'"],
)
def test_half_a_surrogate_pair_is_refused_by_a_process_that_lives(
    before: list[int], expression: str
) -> None:
    with made(f"{{% if n %}}{{{{ {expression} }}}}{{% endif %}}a") as template:
        (pid,) = set(processes()) - set(before)
        with pytest.raises(RequestError, match=r"half of a surrogate pair \(U\+d"):
            template.render(MESSAGES, {"n": 1}, 1000)
        assert template.render(MESSAGES, {"n": 0}, 1000) == "a"
        assert pid in processes()


def test_generation_marks_what_an_assistant_says() -> None:
    with made("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}") as template:
        assert template.render(MESSAGES, {}, 1000) == MESSAGES[0]["content"]
