"""Test a rank's log lines about its peers: one line for a lost process, however it was noticed."""

import logging
import re
from typing import Any

import pytest

from hadal.core.messages.ranks import RankForm, RankStep, RankUp
from hadal.core.plans import FormPlan, Member, PrefillPlan
from hadal.roles.ranks.rank import RankProgress, RankRole
from hadal.runtime.rank.news import News, Noticing

LINE = re.compile(r"rank (\d+) is lost: (.+)")


class Runner:
    """Stand-in for the part of a ModelRunner that news read."""

    num_ops = 12
    is_computing = True
    lost: tuple[int, ...] = ()


def form(formation: int, *epochs: str) -> FormPlan:
    """Return a FormPlan; each rank with an epoch is a member."""
    members = tuple(
        Member(rank, epoch, "127.0.0.1", 1) for rank, epoch in enumerate(epochs) if epoch
    )
    return FormPlan(formation, len(epochs), members, b"", 0)


@pytest.fixture
def woken(caplog: pytest.LogCaptureFixture) -> tuple[News, list[int]]:
    caplog.set_level(logging.WARNING)
    news, wakes = News(), []
    news.wake = lambda: wakes.append(1)
    return news, wakes


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    found = [LINE.fullmatch(record.getMessage()) for record in caplog.records]
    lines = [line for line in found if line is not None]
    assert len(lines) == len(found)
    return [(int(line[1]), line[2]) for line in lines]


def test_a_lost_peer_is_told_once_and_wakes_the_host(
    woken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    news, wakes = woken
    news.forming(form(1, "a", "b", "c"))
    news.peer_lost(2)
    news.peer_lost(2, "again")
    news.take(Runner())  # type: ignore[arg-type]
    assert [rank for rank, _ in told(caplog)] == [2]
    assert wakes == [1]


def test_what_only_the_leader_saw_is_told_when_it_forms_anew(
    woken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    news, _ = woken
    news.forming(form(1, "a", "b", "c"))
    news.forming(form(2, "a", "b", ""))
    news.forming(form(2, "a", "b", ""))
    news.forming(form(1, "a", "b", "c"))
    assert told(caplog) == [(2, "the leader continues without it")]


def test_a_replacement_may_be_lost_too(woken: Any, caplog: pytest.LogCaptureFixture) -> None:
    news, _ = woken
    news.forming(form(1, "a", "b", "c"))
    news.peer_lost(2)
    news.forming(form(2, "a", "b", ""))
    news.peer_lost(2)  # Late, from the group's thread: rank 2 is no member any more.
    news.forming(form(3, "a", "b", "d"))
    news.forming(form(4, "a", "b", "e"))
    assert [rank for rank, _ in told(caplog)] == [2, 2]


def test_progress_is_the_runners_and_its_losses_are_told(
    woken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    news, _ = woken
    news.forming(form(1, "a", "b", "c"))
    runner = Runner()
    assert news.take(runner) == RankProgress(12, True, ())  # type: ignore[arg-type]
    runner.lost = (0,)
    assert news.take(runner) == RankProgress(12, True, (0,))  # type: ignore[arg-type]
    assert news.take(runner).lost == (0,)  # type: ignore[arg-type]
    assert [rank for rank, _ in told(caplog)] == [0]


def test_peers_that_go_while_everything_is_stopped_are_no_news(
    woken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    news, _ = woken
    news.forming(form(1, "a", "b"))
    news.peer_lost(0)
    news.is_stopping = lambda: (
        True
    )  # The stop signal came at the same time; the host has seen it since.
    news.take(Runner())  # type: ignore[arg-type]
    assert told(caplog) == []


def test_a_role_is_told_of_generations_after_the_news(
    woken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    news, _ = woken
    role = RankRole(RankUp("decode-0", 1, "b", "127.0.0.1", 1, "pool"))
    noticing = Noticing(role, news)
    noticing.handle(0.0, RankForm(form(1, "a", "b", "c")))
    assert role.formation == 1
    noticing.handle(0.0, RankForm(form(2, "", "b", "c")))
    noticing.handle(0.0, RankStep(9, PrefillPlan(0, ())))
    assert [rank for rank, _ in told(caplog)] == [0]
    assert role.num_stale == 1
