"""One HTTP request of a swarm world, as the gateway handles it: choices of a prompt, stop strings,
a client that may leave, and the bill.

The gateway's own code reads the front's deliveries (gateway/desk/reply.Reply,
gateway/text/stream.Assembler) and writes the facts (gateway/desk/accounting). The correct bill is
computed here independently, from the tokens that the request must get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from hadal.core.facts import CANCELLED, Fact, NodesFact, RequestFact, micros
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.units import Cancel
from hadal.core.plans import Sampling
from hadal.gateway.desk.accounting import Accounting
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.mailbox import Mailbox
from hadal.gateway.desk.reply import Reply, Times
from hadal.gateway.desk.service import Choice, Work
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.edge.intake import Patience
from hadal.gateway.text.asks import CommonFields
from hadal.gateway.text.stream import Assembler, TextReading
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.runtime.ledger.writer import LedgerCounts
from tests.sim.client import Client
from tests.sim.engine import VOCAB

LETTERS = "".join(chr(ord("A") + number) for number in range(VOCAB))
"""Text of each token: one letter."""
VOCABULARY = Vocabulary(
    {
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "vocab": {letter: number for number, letter in enumerate(LETTERS)},
            "merges": [],
        },
    },
    "letters",
)
MODEL = "a model"


class Sink:
    """Sink of the gateway's facts."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestFact] = {}
        self.nodes: dict[tuple[str, str], NodesFact] = {}

    def add(self, fact: Fact) -> None:
        if isinstance(fact, RequestFact):
            assert fact.request_id not in self.requests, f"{fact.request_id} is billed twice"
            self.requests[fact.request_id] = fact
            return
        before = self.nodes.get((fact.unit, fact.epoch))
        # A restarted front begins later, so the ledger takes the widest interval.
        if before is not None:
            assert before.to_s <= fact.to_s, "node-hours run backwards"
            fact = msgspec.structs.replace(fact, from_s=min(before.from_s, fact.from_s))
        self.nodes[fact.unit, fact.epoch] = fact

    @property
    def counts(self) -> LedgerCounts:
        return LedgerCounts(num_added=len(self.requests))

    def close(self, timeout_s: float) -> None:
        pass


def cut_at_stop(tokens: list[int], stops: tuple[str, ...], first: int) -> tuple[int, bool]:
    """Return (number of tokens up to the first stop after the first `first` tokens, whether there is one)."""
    text = "".join(LETTERS[token] for token in tokens)
    for num in range(first + 1, len(tokens) + 1):
        if any(stop in text[first:num] for stop in stops):
            return num, True
    return len(tokens), False


class Call:
    """The gateway's part of one request. `books`: the accounting of one gateway process."""

    def __init__(
        self,
        versions: list[Generation],
        clients: list[Client],
        stops: tuple[str, ...],
        *,
        tenant: Tenant,
        now: Callable[[], float],
        tell_front: Callable[[Cancel], None],
        books: Accounting,
        timeout_s: float,
    ) -> None:
        self.versions = versions
        self.clients = clients
        self.stops = stops
        self.end = ""
        """End of the call: "200", "cancelled", an error status, or "lost" with its gateway; "": open."""
        self.error = ""
        self.mailbox = Mailbox(cast("Any", None))  # No task waits in it: no event loop.
        self.mailbox.open_ids = {one.request_id: index for index, one in enumerate(versions)}
        self._tell_front = tell_front
        self._books = books
        self._tenant = tenant
        ask = CommonFields(
            model=MODEL,
            stream=True,
            include_usage=True,
            n=len(versions),
            max_tokens=versions[0].max_tokens,
            max_name="max_tokens",
            prompt_name="prompt",
            min_tokens=versions[0].min_tokens,
            temperature=None,
            top_p=None,
            top_k=None,
            sampling=Sampling(),
            seed=None,
            stops=stops,
            stop_token_ids=(),
            ignore_eos=False,
            return_token_ids=False,
            stop_repetition=False,
        )
        choices = tuple(
            Choice(
                one,
                Assembler(
                    VOCABULARY, TextReading(sections=False, stops=stops, min_tokens=one.min_tokens)
                ),
            )
            for one in versions
        )
        self.times = Times(now())
        self.work = Work(ask, choices, len(versions[0].prompt))
        self.reply = Reply(
            self.work,
            self.mailbox,
            cast("Any", self),
            cast("Any", None),
            self.times,
            now,
            timeout_s,
            Patience(),
        )

    def cancel(self, mailbox: Mailbox, request_id: str) -> None:
        """Cancel as gateway/desk/host does: drop deliveries, but keep the names of the units."""
        if mailbox.open_ids.pop(request_id, None) is not None:
            self._tell_front(Cancel(request_id, -1))

    def read(self) -> None:
        """Take the mailbox's contents, as the request's task does in its turn."""
        items, self.mailbox._items = self.mailbox._items, []
        if self.end:
            return
        try:
            for index, deliver in items:
                self.reply._assemble(index, deliver)
                name = self.versions[index].request_id
                finish = self.work.choices[index].assembler.finish
                assert finish is None or name not in self.mailbox.open_ids, (
                    f"{name} ended, and still runs"
                )
        except ApiError as error:
            self.error = str(error)
            self._close(str(error.status))
            return
        if not self.reply._num_open:
            self._close("200")

    def leave(self) -> None:
        """End the call: the client leaves."""
        if not self.end:
            self._close(CANCELLED)

    def lose(self) -> None:
        """End the call: the gateway's process dies, and no fact is written."""
        self.end = self.end or "lost"

    def _close(self, end: str) -> None:
        self.end = end
        for request_id in list(self.mailbox.open_ids):
            self.cancel(self.mailbox, request_id)
        meters, closings, start_s = self.reply.meters, self.mailbox.closings, self.times.start_s
        self._books.charge(
            self._books.facts(self.work, meters, closings, start_s, self._tenant, end)
        )

    def check(self, sink: Sink) -> None:
        """Check an ended call: the bill equals what was streamed, and that is what was expected."""
        names = [one.request_id for one in self.versions]
        facts = [sink.requests.get(name) for name in names]
        if self.end == "lost":
            assert not any(facts), f"{names}: billed by a process that died before they ended"
            return
        assert all(facts), f"{names}: not billed"
        usage = self.reply.usage
        billed = [fact for fact in facts if fact is not None]
        assert sum(fact.tokens_out for fact in billed) == usage.num_output_tokens, (
            f"{names}: billed and shown differ"
        )
        num_answered = sum(fact.tokens_out > 0 for fact in billed)
        num_prompt = len(self.versions[0].prompt) if num_answered else 0
        assert sum(fact.tokens_in for fact in billed) == num_prompt, (
            f"{names}: the prompt is not billed once"
        )
        for fact, client in zip(billed, self.clients, strict=True):
            self._check_one(fact, client)

    def _check_one(self, fact: RequestFact, client: Client) -> None:
        name, generation = fact.request_id, client.generation
        taken, stopped = cut_at_stop(
            client.received, self.stops, generation.min_tokens if self.stops else 0
        )
        assert fact.tokens_out <= taken, (
            f"{name}: {fact.tokens_out} tokens billed, {taken} streamed"
        )
        is_whole = client.final is not None and client.final.error is None
        if self.end == "200":
            assert stopped or is_whole, f"{name} ended well and is not whole"
            assert fact.tokens_out == taken, (
                f"{name}: {fact.tokens_out} tokens billed, {taken} streamed"
            )
            assert fact.end in ("stop", "length"), f"{name}: {fact.end}"
            assert not stopped or fact.end == "stop", f"{name}: {fact.end}"
        else:
            # A choice may have ended before its request. Tokens after that must not be billed.
            assert fact.end in (self.end, "stop", "length"), f"{name}: {fact.end}, not {self.end}"
        due = self._books._prices.charge(
            micros(fact.completed_s), fact.tokens_hit, fact.tokens_miss, fact.tokens_out
        )
        assert fact.income_pico_usd == due, f"{name}: charged {fact.income_pico_usd}, not {due}"


def status_of(deliver: Deliver) -> str:
    """Return the status of a last delivery."""
    return "200" if deliver.error is None else str(deliver.error_status)
