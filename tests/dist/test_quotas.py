"""A served keys file: added and revoked keys, quotas, a budget that survives a killed gateway, and
the cost of one tenant's flood to the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.recorder import RECORD, read_recordings
from tests.dist import gate
from tests.dist.keyed import AUDITOR, ask, keys_command, model_of, with_keys
from tests.dist.postgres import postgres
from tests.dist.serving import Server, StartServer, metric
from tests.dist.test_ledger_serving import rows, wait_for_rows
from tests.dist.test_replay import check as replayed
from tests.waiting import wait_until

ANSWERED = re.compile(r"^\S+ (gateway\S*) .*POST /v1/completions", re.M)
"""Matches the gateway of a line of the log."""
LIVE = pytest.mark.more("tests/unit has each of it without a server; one case of two tenants stays")
PRICES = "1/1/2"
PLAIN, SPENDER = "sk-plain", "sk-spender"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(f"{PLAIN} name=plain\n{SPENDER} name=spender dollars_per_day=0.0005\n")
    path.chmod(0o600)
    return path


def twofold(mortal: StartServer, keys_file: Path) -> Server:
    """Borrow a server of two gateways."""
    path = ("--api-keys-file", str(keys_file))
    return mortal(*with_keys(), *path, "--gateways", "2", ledger={"prices": PRICES})


@pytest.mark.promise(
    "The front (router) checks quotas over all gateways, and a request above one gets "
    "429 with retry-after."
)
@pytest.mark.promise(
    "within three seconds or so all gateways, those on other hosts too, admit a new "
    "key and refuse a revoked one; running requests continue"
)
@LIVE
@pytest.mark.slow("gateways look at the file every two seconds")
def test_keys_are_added_and_revoked_while_two_gateways_serve(
    mortal: StartServer, keys_file: Path
) -> None:
    path, first, server = keys_file, PLAIN, twofold(mortal, keys_file)
    model = model_of(server, first)

    def statuses(key: str) -> set[int]:
        """Send requests until the log shows that both gateways answered one; return the statuses."""
        begin, found = len(server.log()), set[int]()
        while len({*ANSWERED.findall(server.log()[begin:])}) < 2:
            found.add(ask(server, key, model, max_tokens=1).status_code)
        return found

    assert statuses("sk-nobody") == {401}
    second = keys_command(path, "add", "second", "--requests", "3", "--tokens-per-minute", "100000")
    wait_until(lambda: statuses(second) == {200}, "both gateways know the new key")
    for _ in range(12):
        headers = ask(server, second, model, max_tokens=1).headers
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-limit-tokens"] == "100000"
        assert int(headers["x-ratelimit-remaining-tokens"]) < 100_000
    assert ask(server, second, model, n=3).status_code == 200
    for _ in range(6):
        refused = ask(server, second, model, n=4)
        assert refused.status_code == 400, "it never could"
        assert "retry-after" not in refused.headers
    path.write_text(f"{path.read_text()}bad,line\n")
    wait_until(lambda: "the API keys were not changed" in server.log(), "the line is read")
    assert statuses(second) == {200}, "a file that cannot be read changes nothing"
    path.write_text(path.read_text().replace("bad,line\n", ""))
    keys_command(path, "revoke", "second")
    wait_until(lambda: statuses(second) == {401}, "both gateways forgot the key")
    assert statuses(first) == {200}
    old_pid = server.kill("gateway")
    server.wait_restarted("gateway", old_pid)
    assert statuses(second) == {401}
    assert statuses(first) == {200}
    assert not [key for key in (first, second, SPENDER) if key in server.log()]


@pytest.fixture
def budgeted(
    request: pytest.FixtureRequest, mortal: StartServer, start_server: StartServer, keys_file: Path
) -> Iterator[tuple[Server, str]]:
    """A server, and its ledger as `--ledger` takes it."""
    if request.param == "sqlite":
        server = twofold(mortal, keys_file)
        yield server, str(server.folder.parent / "ledger.sqlite")
        return
    with postgres() as database:
        ledger = {"url": database.url, "prices": PRICES}
        path = ("--api-keys-file", str(keys_file))
        yield start_server(*with_keys(), *path, ledger=ledger), database.url


@pytest.mark.promise(
    "With dollars_per_day a request is admitted if the budget covers the most that it "
    "can cost, beside all running requests"
)
@pytest.mark.promise(
    "The written charges of a day do not exceed the budget: for each running request, "
    "the most that it can cost is reserved."
)
@LIVE
@pytest.mark.parametrize("budgeted", ["sqlite", "postgresql"], indirect=True)
def test_a_budget_is_kept_over_the_end_of_the_gateway(budgeted: tuple[Server, str]) -> None:
    """The spending in the ledger never exceeds the budget. After kill -9 only the rest is left, not
    a new budget.
    """
    server, ledger = budgeted
    # A prompt token costs 1 micro-dollar and an output token 2: at most 10 + 2 x 4 per request.
    budget_micro_usd = 500
    key, other = SPENDER, PLAIN
    model = model_of(server, other)
    engine = sa.create_engine(ledger_url(ledger), poolclass=sa.NullPool)

    def spent_micro_usd() -> int:
        query = "SELECT sum(income_pico_usd) FROM hadal_requests WHERE tenant = 'spender'"
        with engine.connect() as connection:
            return int(connection.execute(sa.text(query)).scalar() or 0) // 10**6

    def spend(until: Callable[[], bool] = lambda: False) -> Counter[int]:
        """Send requests until `until` is true or the budget is spent for the day; return how often
        each status came.
        """
        statuses: Counter[int] = Counter()

        def one(number: int) -> None:
            while not until():
                try:
                    reply = ask(server, key, model, f"n {number} {sum(statuses.values())}")
                except httpx.TransportError:
                    continue
                statuses[reply.status_code] += 1
                if reply.status_code == 429:
                    assert reply.json()["error"]["code"] == "insufficient_quota"
                    if float(reply.headers["retry-after"]) > 2:
                        return  # The budget is spent until tomorrow.

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, range(4)))
        return statuses

    spend(lambda: spent_micro_usd() > budget_micro_usd // 3)
    before = spent_micro_usd()
    assert before < budget_micro_usd
    server.gate.hold(gate.DECODE)
    old_pid = server.pids()["gateway"]
    with ThreadPoolExecutor(1) as spender:
        spending = spender.submit(spend)
        try:
            wait_until(
                lambda: metric(server, "hadal_generations_now", key=AUDITOR), "some are under way"
            )
            server.kill("gateway")
        finally:
            server.gate.open()
        server.wait_restarted("gateway", old_pid)
        assert spending.result()[429] > 0
    wait_until(lambda: spent_micro_usd() >= budget_micro_usd - 30, "facts are written")
    spent = spent_micro_usd()
    assert spent <= budget_micro_usd
    old_pid = server.kill("gateway")
    server.wait_restarted("gateway", old_pid)
    refused = wait_until(
        lambda: (reply := ask(server, key, model)).status_code == 429 and reply, "it is read"
    )
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert ask(server, other, model).status_code == 200
    # A shorter prompt may have fitted into the remaining budget.
    assert spent <= spent_micro_usd() <= budget_micro_usd


@LIVE
def test_what_quotas_decided_is_decided_again(start_server: StartServer, folder: Path) -> None:
    path = folder / "keys.txt"
    key = keys_command(
        path, "add", "a", "--requests", "2", "--tokens-per-minute", "400", "--dollars-per-day", "1"
    )
    server = start_server(
        "--api-keys-file",
        str(path),
        ledger={"url": str(folder / "l.sqlite")},
        environment={RECORD: str(folder / "recorded")},
    )
    wait_until(lambda: ask(server, key, "?").status_code != 503, "the ledger is read")
    model = model_of(server, key)
    with ThreadPoolExecutor(4) as pool:
        statuses = Counter(
            pool.map(lambda n: ask(server, key, model, f"{n}").status_code, range(60))
        )
    assert ask(server, key, model, n=3).status_code == 400
    assert statuses[200] > 0
    server.stop()
    report = replayed(read_recordings(folder / "recorded"))
    assert report.events["Quotas"] >= 1
    assert report.events["Spent"] == 1
    assert report.events["Charged"] >= statuses[200]


NUM_FLOOD, NUM_OTHER, NUM_OUT = 40, 4, 12
"""Requests of the flood, requests of each other tenant, and tokens of each request."""


@pytest.mark.slow("a flood of requests is answered")
def test_a_flood_has_its_share_and_no_more_while_others_wait(
    borrow: StartServer, folder: Path
) -> None:
    """The test counts served requests, not seconds. 40 requests of one tenant wait for 4 slots,
    before 4 requests of each of three other tenants. All wait before a slot becomes free.
    """
    path, others = folder / "keys.txt", ("sk-a", "sk-b", "sk-c")
    flood = keys_command(path, "add", "flood")
    server = borrow(
        *with_keys(*(f"{key} name={key}" for key in others)),
        *("--api-keys-file", str(path)),
        decode={"max_requests": 4},
        limits={"max_queued": 1000},
    )
    ledger = server.folder.parent / "ledger.sqlite"
    model = model_of(server, flood)

    def asks(key: str, number: int) -> None:
        reply = ask(server, key, model, f"number {number}", max_tokens=NUM_OUT)
        assert reply.status_code == 200, reply.text

    def num_open() -> float:
        return metric(server, "hadal_generations_now", key=AUDITOR)

    server.gate.hold(gate.DECODE)
    num_all = NUM_FLOOD + NUM_OTHER * len(others)
    with ThreadPoolExecutor(num_all) as pool:
        asking = [pool.submit(asks, flood, number) for number in range(NUM_FLOOD)]
        wait_until(lambda: num_open() == NUM_FLOOD, "the flood is there")
        for key in others:
            asking += [pool.submit(asks, key, number) for number in range(NUM_OTHER)]
        wait_until(lambda: num_open() == num_all, "all are there")
        server.gate.open()
        for one in asking:
            one.result()
    wait_for_rows(ledger, num_all)
    tenants = [name for (name,) in rows(ledger, ORDER)]
    last = max(at for at, name in enumerate(tenants) if name != "flood")
    # The flood gets a quarter of the slots. In prefill and decode, some of its requests began before
    # the other tenants' requests arrived.
    had = tenants[:last].count("flood")
    print("the flood had", had, "and each other", NUM_OTHER)
    assert had <= 4 * NUM_OTHER


ORDER = "SELECT tenant FROM hadal_requests ORDER BY completed_us"
