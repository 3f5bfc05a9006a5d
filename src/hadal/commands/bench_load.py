"""Load for a server that speaks OpenAI's API, and what it took: which requests, when, how long until
each token.

Open load comes at its own times, whether earlier requests are done or not (Poisson, or a trace's
times), and is measured from when a request was due, so that a client that is late hides nothing.
Closed load keeps so many open, each followed by the next. Knows the API's streams; prompts are made
of common words, of which a calibration says how many make a token at this server.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from httpx_sse import EventSource, SSEError
from numpy.random import Generator

from hadal.core.documents import MAX_TABLE_BYTES, read_text, shown
from hadal.core.errors import ConfigError, HadalError
from hadal.sim.plan.traces import MOONCAKE_PART_TOKENS, azure, mooncake_rows

# What is asked for: lengths by a distribution, or a trace's requests.


MAX_TOKENS = 1_000_000
_LENGTHS = (
    "a number (200), a range (100-400), normal:MEAN:SPREAD, lognormal:MEAN:VARIATION or"
    " exponential:MEAN"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of tokens, from `parse_lengths`."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: Generator, size: int) -> list[int]:
        """So many lengths, each at least 1."""
        match self.kind:
            case "range":
                drawn = rng.integers(int(self.first), int(self.second) + 1, size).astype(float)
            case "normal":
                drawn = rng.normal(self.first, self.second, size)
            case "lognormal":
                sigma2 = np.log1p(self.second**2)
                drawn = rng.lognormal(np.log(self.first) - sigma2 / 2, np.sqrt(sigma2), size)
            case _:
                drawn = rng.exponential(self.first, size)
        return [int(value) for value in np.clip(np.rint(drawn), 1, MAX_TOKENS)]


def parse_lengths(text: str, option: str) -> Lengths:
    """Read a distribution as one writes it. Raises ConfigError."""
    number = r"([0-9]{1,7}(?:\.[0-9]{1,6})?)"
    word = text.strip().lower()
    found: Lengths | None = None
    if one := re.fullmatch("([0-9]{1,7})", word):
        found = Lengths("range", float(one[1]), float(one[1]))
    elif two := re.fullmatch("([0-9]{1,7})-([0-9]{1,7})", word):
        found = Lengths("range", float(two[1]), float(two[2]))
    elif named := re.fullmatch(f"(normal|lognormal):{number}:{number}", word):
        found = Lengths(named[1], float(named[2]), float(named[3]))
    elif named := re.fullmatch(f"(exponential):{number}", word):
        found = Lengths(named[1], float(named[2]))
    if (
        found is None
        or not 1 <= found.first <= MAX_TOKENS
        or (found.kind == "range" and not found.first <= found.second <= MAX_TOKENS)
    ):
        raise ConfigError(f"{option} is {shown(text)}; {_LENGTHS} is needed, in tokens.")
    return found


@dataclass(frozen=True, slots=True)
class BenchAsk:
    """One request before it is text."""

    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...] = ()
    """Numbers of its 512-token parts, where a trace has them: equal numbers are equal text."""


@dataclass(frozen=True)
class TraceLoad:
    """The requests of a trace file, in order."""

    asks: tuple[BenchAsk, ...]
    at_s: tuple[float, ...]
    """Since the first arrival."""


def read_trace(path: Path, scale: float = 1.0) -> TraceLoad:
    """Mooncake's .jsonl or .jsonl.gz, or Azure's .csv; lengths are multiplied by `scale`. Raises
    ConfigError.
    """
    name = path.name.lower()
    if not name.endswith((".jsonl", ".jsonl.gz", ".csv", ".csv.gz")):
        raise ConfigError(
            f"{path}: a trace is Mooncake's .jsonl or .jsonl.gz, or Azure's .csv or .csv.gz."
        )
    lines = read_text(path, "trace", MAX_TABLE_BYTES).splitlines()
    try:
        if ".csv" in name:
            work = azure(lines)
            rows: list[tuple[float, int, int, tuple[int, ...]]] = [
                (float(at), int(before), int(after), ())
                for at, before, after in zip(
                    work.arrival_s, work.tokens_in, work.tokens_out, strict=True
                )
            ]
        else:
            rows = sorted(tuple(row) for row in mooncake_rows(lines))  # type: ignore[misc]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: there is no request in it.")
    asks = tuple(
        BenchAsk(max(1, round(scale * before)), max(1, round(scale * after)), parts)
        for _, before, after, parts in rows
    )
    return TraceLoad(asks, tuple(at_s - rows[0][0] for at_s, *_ in rows))


_WORDS = """
the of and to in is it was for on that with as be at by this had not are but from or have an
they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also well did many must
before back see through way where get much go good down day long little great people year work
life hand part old house place small found still between name should home big give air line set
own under read last never us left end along while might next sound below saw both few
""".split()  # noqa: SIM905  # A list would be a line a word.
_TRIED = (1, 3)
"""How often all words stand in the prompts of a calibration."""
_TOKENS_PER_WORD = 1.3
"""Where a server does not say how many tokens a prompt has: a word of English at common tokenizers."""


@dataclass(frozen=True)
class Texts:
    """Makes prompts of about so many tokens. The same seed and number make the same words."""

    seed: int
    tokens_per_word: float = _TOKENS_PER_WORD
    tokens_around: float = 0.0
    """What a template puts around a prompt."""
    num_shared: int = 0
    """Tokens with which all prompts begin."""
    part_tokens: int = MOONCAKE_PART_TOKENS
    """Tokens of a part of a trace, scaled as its lengths are."""

    def prompt(self, ask: BenchAsk, number: int) -> str:
        """The text of the request with this number, which no other shares beyond what is asked for."""
        left = max(1, round((ask.tokens_in - self.tokens_around) / self.tokens_per_word))
        words: list[str] = []
        shared = min(left, round(self.num_shared / self.tokens_per_word))
        words += self._words(shared, 0, 0)
        per_part = max(1, round(self.part_tokens / self.tokens_per_word))
        for part in ask.parts:
            words += self._words(min(per_part, left - len(words)), 1, part)
        return " ".join(words + self._words(left - len(words), 2, number))

    def _words(self, size: int, *key: int) -> list[str]:
        if size <= 0:
            return []
        drawn = np.random.default_rng([self.seed, *key]).integers(0, len(_WORDS), size)
        return [_WORDS[index] for index in drawn]


@dataclass(frozen=True)
class Level:
    """A load that is held for a while."""

    kind: str
    """rate, concurrency or trace."""
    value: float

    @property
    def name(self) -> str:
        """As tables have it."""
        return {
            "rate": f"{self.value:g}/s",
            "concurrency": f"{self.value:g} at once",
            "trace": f"trace x{self.value:g}",
        }[self.kind]

    def arrivals(
        self, rng: Generator, trace: TraceLoad | None, end_s: float, num_max: int
    ) -> Iterator[float]:
        """When requests of an open load are due."""
        if self.kind == "trace":
            assert trace is not None
            times: Iterator[float] = (at_s / self.value for at_s in trace.at_s)
        else:
            times = _poisson(rng, self.value)
        for _, at_s in zip(range(num_max), times, strict=False):
            if at_s >= end_s:
                return
            yield at_s


def _poisson(rng: Generator, rate: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1.0 / rate))
        yield at_s


# A request at the server, from its sending to its last token.


class BenchError(HadalError):
    """The server cannot be measured, and why."""


@dataclass(slots=True)
class Sample:
    """What became of a request. Times are seconds since its level began."""

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    """When the last piece with text came."""
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Times between pieces with text."""
    num_pieces: int = 0
    tokens_in: int | None = None
    """As the server counts; None: it does not say."""
    tokens_out: int | None = None
    tokens_cached: int | None = None
    error: str = ""
    """Its kind; empty: none."""


@dataclass(frozen=True)
class Target:
    """A model of a server, and how it is asked."""

    url: str
    """With /v1."""
    model: str
    api_key: str = ""
    endpoint: str = "chat"
    """chat or completions."""
    ignores_eos: bool = False
    timeout_s: float = 120.0

    @property
    def path(self) -> str:
        """The endpoint's, behind /v1."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, prompt: str, tokens_out: int, *, is_streamed: bool) -> dict[str, Any]:
        """What is sent."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": tokens_out}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if is_streamed:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields | ({"ignore_eos": True} if self.ignores_eos else {})


def client_for(target: Target) -> httpx.AsyncClient:
    """A client with as many connections as there are requests."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(target.timeout_s, connect=min(10.0, target.timeout_s)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


async def measure(
    client: httpx.AsyncClient,
    target: Target,
    prompt: str,
    tokens_out: int,
    sample: Sample,
    now: Callable[[], float],
) -> None:
    """Send one request and write down what comes of it. Raises nothing but CancelledError."""
    body = target.body(prompt, tokens_out, is_streamed=True)
    sample.sent_s = now()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            client.stream("POST", target.url + target.path, json=body) as reply,
        ):
            if reply.status_code != 200:
                sample.error = _refusal(reply.status_code, await reply.aread())
            else:
                await _follow(reply, sample, now)
    except (TimeoutError, httpx.TimeoutException):
        sample.error = f"no end within {target.timeout_s:g} s"
    except httpx.ConnectError:
        sample.error = "no connection"
    except (httpx.HTTPError, httpx.StreamError):
        sample.error = "the connection broke"
    sample.end_s = now()


async def _follow(reply: httpx.Response, sample: Sample, now: Callable[[], float]) -> None:
    """Read a stream to its end."""
    is_done = False
    try:
        async with aclosing(EventSource(reply).aiter_sse()) as events:
            async for event in events:
                if event.data == "[DONE]":
                    is_done = True
                    break
                chunk = msgspec.json.decode(event.data)
                if "error" in chunk:
                    sample.error = f"in the stream: {_code(chunk['error'])}"
                    return
                _take_chunk(chunk, sample, now())
    except (SSEError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        sample.error = "not a stream of OpenAI's API"
        return
    if not is_done:
        sample.error = "the stream ended early"
    elif sample.first_s is None:
        sample.error = "no text came"


def _take_chunk(chunk: dict[str, Any], sample: Sample, now_s: float) -> None:
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        if any(delta.get(name) for name in (*_TEXTS, "text")):
            if sample.last_s is None:
                sample.first_s = now_s
            else:
                sample.gaps_s.append(now_s - sample.last_s)
            sample.last_s = now_s
            sample.num_pieces += 1
    if usage := chunk.get("usage"):
        sample.tokens_in, sample.tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        sample.tokens_cached = details.get("cached_tokens", usage.get("prompt_cache_hit_tokens"))


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status} {_code(msgspec.json.decode(body)['error'])}".strip()
    except (msgspec.DecodeError, KeyError, TypeError):
        return str(status)


def _code(error: Any) -> str:
    """A short name of an error, of which there are few: its code, else its type."""
    if not isinstance(error, dict):
        return "error"
    return str(error.get("code") or error.get("type") or "error")[:60]


# Before the load: what is there, and how its tokens are counted.


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The first model that a server lists. Raises BenchError."""
    reply = await _asked(client, url, "GET", "/models")
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{url}/models lists no model; name one with --model.") from None


@dataclass(frozen=True)
class Calibration:
    """What two small requests showed."""

    target: Target
    texts: Texts
    notes: tuple[str, ...]


async def calibrate(client: httpx.AsyncClient, target: Target, texts: Texts) -> Calibration:
    """Learn how many tokens a word is, what a template adds, and whether answers can be made to go
    on to their length. Raises BenchError if the server answers none of it.
    """
    notes, counts = [], []
    going_on = replace(target, ignores_eos=True)
    reply = await _try(client, going_on, texts, _TRIED[0])
    if reply.status_code in (400, 422):
        notes.append(
            "The server does not take ignore_eos: answers end where the model ends them, so they"
            " are shorter than asked for."
        )
        reply = await _try(client, target, texts, _TRIED[0])
    else:
        target = going_on
    for size in _TRIED:
        reply = reply if size == _TRIED[0] else await _try(client, target, texts, size)
        if reply.status_code != 200:
            raise BenchError(
                f"{target.url}{target.path} answered {reply.status_code}: {_message(reply)}"
            )
        try:
            counts.append(int(reply.json()["usage"]["prompt_tokens"]))
        except (ValueError, LookupError, TypeError):
            break
    if len(counts) == 2 and counts[1] > counts[0]:
        per_word = (counts[1] - counts[0]) / (len(_WORDS) * (_TRIED[1] - _TRIED[0]))
        around = counts[0] - per_word * len(_WORDS) * _TRIED[0]
        texts = replace(texts, tokens_per_word=per_word, tokens_around=max(0.0, around))
    else:
        notes.append(
            "The server does not say how many tokens a prompt has: lengths are guessed, at"
            f" {_TOKENS_PER_WORD:g} tokens a word."
        )
    return Calibration(target, texts, tuple(notes))


async def _try(
    client: httpx.AsyncClient, target: Target, texts: Texts, size: int
) -> httpx.Response:
    words = np.random.default_rng([texts.seed, 3]).permutation(_WORDS * size)
    body = target.body(" ".join(words), 1, is_streamed=False)
    return await _asked(client, target.url, "POST", target.path, body)


async def _asked(
    client: httpx.AsyncClient, url: str, method: str, path: str, body: Any = None
) -> httpx.Response:
    try:
        async with asyncio.timeout(client.timeout.read):
            reply = await client.request(method, url + path, json=body)
    except TimeoutError:
        raise BenchError(f"{url}{path} has not answered in time; --timeout is how long.") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(
            f"{url} cannot be reached ({str(error) or type(error).__name__}). Is there a server?"
            " Start one with `hadal serve`."
        ) from error
    if reply.status_code in (401, 403, 404) or reply.status_code >= 500:
        raise BenchError(f"{url}{path} answered {reply.status_code}: {_message(reply)}")
    return reply


def _message(reply: httpx.Response) -> str:
    if reply.status_code == 401:
        return "it wants an API key that it knows: give --api-key, or HADAL_API_KEY"
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return reply.text[:200] or "nothing"


# The load itself.


MAX_OPEN = 4096
"""Requests of an open load that may be open at once; what is due beyond them is an error of its own."""
FULL = f"not sent: {MAX_OPEN} were open"
LATE = "not sent: this client was late by more than a request may take"
STOPPED = "stopped"
"""What was open when somebody pressed Ctrl-C: no error of the server's."""


@dataclass
class LevelRun:
    """What was measured at a level, so far."""

    level: Level
    samples: list[Sample] = field(default_factory=list)
    num_open: int = 0
    elapsed_s: float = 0.0
    """From its start to its last end, or to now; of a rate that was held, its whole time at least."""


@dataclass(frozen=True)
class LoadPlan:
    """What every level is given."""

    duration_s: float
    """Nothing is sent later than this after its start."""
    num_requests: int
    """No more than so many are sent."""
    tokens_in: Lengths
    tokens_out: Lengths
    trace: TraceLoad | None = None
    seed: int = 0

    def asks(self, rng: Generator) -> Iterator[BenchAsk]:
        """Requests without end: a trace's begin again when they are through."""
        while True:
            if self.trace is not None:
                yield from self.trace.asks
            else:
                sizes = (lengths.draw(rng, 64) for lengths in (self.tokens_in, self.tokens_out))
                yield from (BenchAsk(*both) for both in zip(*sizes, strict=True))


async def warm_up(
    client: httpx.AsyncClient, found: Calibration, plan: LoadPlan, num_requests: int
) -> None:
    """Requests that count for nothing, all at once. Raises BenchError if none of them is answered."""
    asks = plan.asks(np.random.default_rng([plan.seed, 1 << 20]))
    samples = [Sample(0.0) for _ in range(num_requests)]
    await asyncio.gather(
        *(
            measure(
                client,
                found.target,
                found.texts.prompt(ask, (1 << 40) + number),
                ask.tokens_out,
                sample,
                time.monotonic,
            )
            for number, (ask, sample) in enumerate(zip(asks, samples, strict=False))
        )
    )
    if samples and all(sample.error for sample in samples):
        raise BenchError(
            f"none of the {num_requests} requests of the warm-up was answered: {samples[0].error}."
        )


async def run_level(
    client: httpx.AsyncClient, found: Calibration, plan: LoadPlan, number: int, run: LevelRun
) -> None:
    """Hold level `number` for its time. What is measured is in `run` at once, also when this is
    cancelled.
    """
    rng = np.random.default_rng([plan.seed, number])
    asks, start_s = plan.asks(rng), time.monotonic()

    def now() -> float:
        return time.monotonic() - start_s

    async def send(due_s: float) -> None:
        ask = next(asks)
        sample = Sample(due_s)
        run.samples.append(sample)
        run.num_open += 1
        prompt = found.texts.prompt(ask, (number << 24) + len(run.samples))
        try:
            await measure(client, found.target, prompt, ask.tokens_out, sample, now)
        except asyncio.CancelledError:
            sample.error, sample.end_s = STOPPED, now()
            raise
        finally:
            run.num_open -= 1
            run.elapsed_s = now()

    async def stay() -> None:
        while now() < plan.duration_s and len(run.samples) < plan.num_requests:
            await send(now())

    async with asyncio.TaskGroup() as tasks:
        if run.level.kind == "concurrency":
            for _ in range(min(int(run.level.value), plan.num_requests)):
                tasks.create_task(stay())
        else:
            for due_s in run.level.arrivals(rng, plan.trace, plan.duration_s, plan.num_requests):
                await asyncio.sleep(max(0.0, due_s - now()))
                is_late = now() > due_s + found.target.timeout_s
                if is_late or run.num_open >= MAX_OPEN:
                    error = LATE if is_late else FULL
                    run.samples.append(Sample(due_s, sent_s=now(), end_s=now(), error=error))
                else:
                    tasks.create_task(send(due_s))
    if run.level.kind == "rate" and len(run.samples) < plan.num_requests:
        # Time in which nothing happened to come was offered, too.
        run.elapsed_s = max(run.elapsed_s, plan.duration_s)


async def run_levels(
    target: Target,
    texts: Texts,
    plan: LoadPlan,
    levels: Sequence[Level],
    num_warm_up: int,
    runs: list[LevelRun],
    notes: list[str],
    tell: Callable[[str, float], None],
) -> str:
    """All levels, one after the other; `runs` and `notes` are filled as it goes, `tell` hears what is
    done and how many seconds of the load are over. Returns the model's name. Raises BenchError.
    """
    async with client_for(target) as client:
        tell("asking what is there", 0.0)
        if not target.model:
            target = replace(target, model=await first_model(client, target.url))
        found = await calibrate(client, target, texts)
        notes += found.notes
        tell(f"warming up with {num_warm_up} requests", 0.0)
        await warm_up(client, found, plan, num_warm_up)
        for number, level in enumerate(levels):
            run = LevelRun(level)
            runs.append(run)
            telling = asyncio.create_task(_tell(run, number, plan, tell))
            try:
                await run_level(client, found, plan, number, run)
            finally:
                telling.cancel()
    return target.model


async def _tell(
    run: LevelRun, number: int, plan: LoadPlan, tell: Callable[[str, float], None]
) -> None:
    start_s = time.monotonic()
    while True:
        passed_s = time.monotonic() - start_s
        num_done = len(run.samples) - run.num_open
        tell(
            f"{run.level.name}: {num_done} done, {run.num_open} open",
            number * plan.duration_s + min(passed_s, plan.duration_s),
        )
        await asyncio.sleep(0.25)
