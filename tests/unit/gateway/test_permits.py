"""Permits for requests: tenants' shares of them, and bodies that do not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from hadal.gateway.edge.bodies import Bodies
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.edge.permits import Permits

T = TypeVar("T")


class Turns(asyncio.SelectorEventLoop):
    """Event loop in simulated time: if nothing is ready, it skips to the next timer."""

    _simulated_s = 0.0

    def time(self) -> float:
        return self._simulated_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._simulated_s = max(self._simulated_s, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def play(scene: Coroutine[Any, Any, T]) -> T:
    """Run a scene in simulated time, and return its result."""
    with asyncio.Runner(loop_factory=Turns) as runner:
        return runner.run(scene)


def test_a_tenant_alone_takes_all_and_leaves_another_its_share() -> None:
    permits = Permits(6, retry_after_s=2.0)
    with ExitStack() as held:
        for _ in range(6):
            held.enter_context(permits.take("a"))
        for _ in range(3):
            held.enter_context(permits.take("b"))
        for tenant in ("a", "b"):
            with pytest.raises(ApiError) as refused, permits.take(tenant):
                pass
            assert (refused.value.status, refused.value.headers["Retry-After"]) == (429, "2")
        assert len(permits) == 9
    assert len(permits) == 0
    with permits.take("a"), pytest.raises(ZeroDivisionError), permits.take("b"):
        raise ZeroDivisionError
    assert len(permits) == 0


def test_what_is_begun_and_given_up_takes_permits_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hadal.gateway.edge.permits.LEFT_S", 0.1)

    async def scene() -> None:
        permits = Permits(6, retry_after_s=2.0)
        permits.left("a", 4)
        with permits.take("a"), permits.take("a"):
            with pytest.raises(ApiError), permits.take("a"):
                pass
            with permits.take("b"):
                assert len(permits) == 3, "what was given up is not worked on"
        await asyncio.sleep(0.15)
        with ExitStack() as held:
            for _ in range(6):
                held.enter_context(permits.take("a"))

    play(scene())


def test_one_body_too_many_pushes_out_its_own_tenant_s_oldest() -> None:
    async def scene() -> list[str]:
        bodies, told = Bodies(2), []

        async def body(name: str, wait_s: float) -> None:
            try:
                async with bodies.wait(name[0], deadline_s=0.2):
                    await asyncio.sleep(wait_s)
                told.append(f"{name} came")
            except ApiError as error:
                told.append(f"{name} {error.status}")

        tasks = []
        for name, wait_s in (
            ("a1", 9.0),
            ("a2", 9.0),
            ("a3", 9.0),
            ("b1", 0.1),
            ("a4", 9.0),
            ("b2", 0.0),
        ):
            tasks.append(asyncio.create_task(body(name, wait_s)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        assert len(bodies) == 0
        return sorted(told)

    assert play(scene()) == ["a1 429", "a2 429", "a3 408", "a4 408", "b1 429", "b2 came"]


def test_a_body_comes_in_the_very_moment_in_which_the_oldest_one_s_time_is_over() -> None:
    async def scene() -> list[str]:
        bodies, told = Bodies(1), []

        async def body(name: str, deadline_s: float, num_turns: int) -> None:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            try:
                async with bodies.wait("a", deadline_s):
                    await asyncio.sleep(0.05)
                told.append(f"{name} came")
            except ApiError as error:
                told.append(f"{name} {error.status}")

        # The deadline of a1 passes one turn of the event loop after its begin; its task is notified
        # one turn later.
        await asyncio.gather(body("a1", 0.0, 0), body("a2", 9.0, 1))
        assert len(bodies) == 0
        return told

    assert play(scene()) == ["a1 408", "a2 came"]
