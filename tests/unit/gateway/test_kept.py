"""Kept responses: limits of time and memory, separation of tenants, look-up from other gateways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.errors import RequestError
from hadal.core.messages.base import FRONT
from hadal.core.messages.every import AnyMessage
from hadal.gateway.desk.kept import PATH, KeptResponse, KeptResponses, Responses
from hadal.gateway.desk.pages import Pages
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.asks import PastCall, Turn

GATEWAYS = ("gateway", "gateway-1", "gateway-2")
TURNS = (Turn("user", "a"), Turn("assistant", "b", (PastCall("c", "f", "{}"),)))


def entry(text: str = "", turns: tuple[Turn, ...] = TURNS) -> KeptResponse:
    return KeptResponse(b"{}", b"[]", (*turns, Turn("user", text)))


def id_of(gateway: int, number: int = 0) -> str:
    return f"resp_{gateway}_{number:032x}"


def test_it_is_kept_for_a_time() -> None:
    now_s = 0.0
    kept = KeptResponses(10**6, 60.0, lambda: now_s)
    kept.put("t", "a", entry())
    now_s = 59.0
    kept.put("t", "b", entry())
    assert kept.get("t", "a") == entry()
    now_s = 60.0
    assert kept.get("t", "a") is None
    assert (len(kept), kept.check()) == (1, [])
    now_s = 119.0
    assert kept.get("t", "b") is None
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_who_has_most_loses_its_oldest_first() -> None:
    kept = KeptResponses(20_000, 60.0, lambda: 0.0)
    kept.put("small", "s", entry("x" * 500))
    for number in range(9):
        kept.put("large", f"l{number}", entry("x" * 500))
    assert kept.num_bytes <= 20_000
    assert kept.get("small", "s") is not None
    assert kept.get("large", "l0") is None
    assert kept.get("large", "l8") is not None
    kept.put("large", "huge", entry("x" * 20_000))
    assert kept.get("large", "huge") is None, "longer than all there is"
    assert kept.get("large", "l8") is not None
    assert kept.check() == []


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 4000), st.booleans()),
        max_size=60,
    )
)
def test_it_adds_up_whatever_happens(calls: list[tuple[str, int, int, bool]]) -> None:
    now_s = 0.0
    kept = KeptResponses(30_000, 10.0, lambda: now_s)
    alive: dict[tuple[str, str], float] = {}
    for number, (tenant, which, size, deletes) in enumerate(calls):
        now_s = float(number)
        if deletes:
            kept.delete(tenant, str(which))
            alive.pop((tenant, str(which)), None)
        elif (tenant, str(which)) not in alive:  # A live id is not drawn again.
            kept.put(tenant, str(which), entry("x" * size))
            alive[tenant, str(which)] = now_s + 10.0
        assert kept.num_bytes <= 30_000
        assert kept.check() == []
        for (whose, name), until_s in alive.items():
            assert kept.get(whose, name) is None or until_s > now_s


@dataclass
class FakeHost:
    """Host with only a gateway's pages, on a wire that delivers messages at once."""

    pages: Pages


def gateways(lost: set[str]) -> list[Responses]:
    """Return three gateways on one wire. Messages to a `lost` one are lost."""
    wires: dict[str, FakeHost] = {}

    def sender() -> Callable[[str, AnyMessage], None]:
        def send(to: str, message: AnyMessage) -> None:
            if to not in lost:
                wires[to].pages.take(message)  # type: ignore[arg-type]

        return send

    made = []
    for name in GATEWAYS:
        own = FRONT if name == GATEWAYS[0] else name
        host = FakeHost(Pages(own, sender()))
        wires[own] = host
        responses = Responses(KeptResponses(10**6, 60.0, lambda: 0.0), host, name, GATEWAYS)
        host.pages.table = {PATH: responses.page}
        made.append(responses)
    return made


@pytest.mark.promise("With several gateways, each finds the responses that another one keeps.")
@pytest.mark.promise("One key's responses do not exist for another.")
@pytest.mark.parametrize("owner", range(3))
@pytest.mark.parametrize("asked", range(3))
async def test_any_gateway_finds_what_another_keeps(owner: int, asked: int) -> None:
    all_of_them = gateways(set())
    response_id = id_of(owner)
    assert response_id.startswith(all_of_them[owner].id_prefix)
    all_of_them[owner].own.put("t", response_id, entry("long"))
    there = all_of_them[asked]
    for part in KeptResponse.__struct_fields__:
        found = await there.get("t", response_id, part)
        assert getattr(found, part) == getattr(entry("long"), part)
        if asked != owner:
            assert found is not None
            assert found.num_bytes < entry("long").num_bytes, "the others do not come with it"
    item_id = f"msg_{response_id.removeprefix('resp_')}0001"
    assert await there.bodies_with("t", [item_id, item_id, "msg_1"]) == [entry("long").body]
    assert await there.bodies_with("other", [item_id]) == []
    assert await there.get("other", response_id) is None
    assert await there.get("t", id_of(owner, 1)) is None
    assert (await there.before("t", response_id)).turns == entry("long").turns
    assert await there.get("t", response_id, deletes=True) is not None
    assert await there.get("t", response_id) is None
    with pytest.raises(RequestError, match="not stored for this API key"):
        await there.before("t", response_id)


async def test_items_of_many_responses_are_not_looked_for() -> None:
    """Each response would need a query to another gateway."""
    item_ids = [f"fc_{id_of(2, number).removeprefix('resp_')}0000" for number in range(65)]
    with pytest.raises(RequestError, match="at most 64"):
        await gateways(set())[1].bodies_with("t", item_ids)


@pytest.mark.promise(
    "If that gateway does not answer, the reply is a 503, and the client may retry."
)
@pytest.mark.parametrize("lost", [FRONT, "gateway-2"])
async def test_a_gateway_that_does_not_answer_is_told_from_one_that_keeps_nothing(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hadal.gateway.desk.kept.WAIT_S", 0.05)
    asked = gateways({lost})[1]
    with pytest.raises(ApiError, match="does not answer") as caught:
        await asked.get("t", id_of(2))
    assert (caught.value.status, caught.value.code) == (503, "response_unreachable")


@pytest.mark.parametrize("name", ["", "resp_7_" + "0" * 32, "resp_1_zz", "chatcmpl-1", "x" * 9999])
async def test_no_id_of_ours_is_nowhere(name: str) -> None:
    assert await gateways(set())[0].get("t", name) is None
