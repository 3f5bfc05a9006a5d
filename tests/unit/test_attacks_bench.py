"""The bench of attacks: each attack continues when it is refused, and the bench's table has the
results. tests/dist runs it with a server.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from bench import attacks
from bench.attacks import ATTACKS, Attack, Seen
from tests.waiting import wait_for


def test_what_was_seen_is_counted() -> None:
    seen = Seen((0.1, 0.3, 0.2), (429, 0))
    assert (seen.answered, seen.median_s, seen.worst_s) == ("3 of 5", 0.2, attacks.WAIT_S)
    assert Seen((0.1, 0.3), (429,)).worst_s == 0.3
    assert Seen((), (0,)).median_s == float("inf")


@pytest.mark.parametrize("name", list(ATTACKS))
def test_every_attack_asks_a_server_that_turns_it_away_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse an attack three times: it must continue, as an attack that ended would measure
    nothing.
    """
    monkeypatch.setattr(attacks, "BYTE_AFTER_S", 0.05)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # Also one that the test ends before the attack sends.
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )

    async def run(attack: Attack) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        attacking = asyncio.create_task(
            attacks.attack_for_ever(server.sockets[0].getsockname(), attack)
        )
        await wait_for(lambda: len(heads) >= 3, "the attack has asked three times")
        assert not attacking.done()
        attacking.cancel()
        server.close()

    attack = ATTACKS[name]
    asyncio.run(run(Attack(name, attack.what, attack.task, 2)))
    assert all(b"Bearer " in head for head in heads)


def test_a_row_says_who_was_refused_with_what(capsys: pytest.CaptureFixture[str]) -> None:
    attacks.show([(ATTACKS["dribble"], Seen((0.1, 0.1), ()), Seen((0.25,), (429, 0)))])
    shown = capsys.readouterr().out
    for what in (
        "790 bodies that never end",
        "100 ms",
        "1 of 3",
        "250 ms",
        "2.5",
        "30,000 ms",
        "no answer, 429",
    ):
        assert what in shown
