"""Synthetic conversations like those of DeepSeek's published day, from a few parameters, each with
its meaning and source.

A session is a number of turns with one model. Each turn's prompt is everything before it (without
the model's reasoning) and a new message, sometimes with a document. Between two turns of a sitting
the user reads and types; this time is measured in seconds. A session may also rest for longer; this
time is measured by the load clock, because users come back when they are awake.

    sitting 0               rest           sitting 1
    turn 0 . turn 1 . turn 2 --------------- turn 3 . turn 4
    |answer|think|                                              arrival = begin of the sitting + answers and thinking

Sittings begin at a constant rate by the load clock, first and later ones alike, so every moment is
in the steady state.

Four parameters were fitted, each to one published figure, which `hadal simulate` prints beside
ours: share_r1 to the mean KV length, document_share to input over output, continue_share to the
share of hits, sessions_per_day to the day's input. lead_s was fitted to the hourly shares. All
others are measured elsewhere or marked as assumed. This module does not read those figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from hadal.core.arrays import Bools, Floats, Ints
from hadal.lab.sim.day.clock import DEEPSEEK_SHARES, DemandClock
from hadal.lab.sim.workload import MAX_TURNS, NO_PREFIX, R1, V3, Workload
from hadal.policy.demand import DAY_S

Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution: exp(log(median) + sigma x standard normal), capped at `limit`."""

    median: float
    sigma: float
    limit: float

    def draw(self, rng: Generator, count: int) -> Floats:
        return np.minimum(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.limit)

    def tokens(self, rng: Generator, count: int) -> Ints:
        """Draw numbers of tokens: rounded up, so at least 1."""
        return np.ceil(self.draw(rng, count)).astype(np.int64)


class SystemPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """System prompt of an application, and the share of all sessions with it. 0 tokens: none."""

    share: float
    tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadParams:
    """Parameters of a day's requests (seconds, tokens). Raises ValueError for impossible ones."""

    sessions_per_day: float = 103.0e6
    """Sessions that begin per day. Fitted to the published 608 B tokens in."""
    share_r1: float = 0.533
    """Share of sessions with R1, others with V3. Fitted to the published mean KV length, 4,989."""
    continue_share: float = 0.3187
    """Probability that a first turn is followed by another, mean over sessions. Fitted to the
    published hits, 56.3 % of tokens in.
    """
    continue_samples: float = 5.0
    """Sum of the two parameters of a beta distribution that gives each session's probability of a
    further turn, so long sessions tend to go on. After turns 1 to 6 the probability is 0.32, 0.43,
    0.51, 0.57, 0.62, 0.66, with 1.66 turns per session. In Mooncake's hour of conversations: 0.38,
    0.31, 0.45, 0.53, 0.61, 0.65, and 1.63 turns.
    """
    document_share: float = 0.1465
    """Share of messages with a document. Fitted to the published 608 / 168 tokens in per token out.
    10 % of ServeGen's prompts are longer than 2,000 tokens.
    """
    message: LogNormal = LogNormal(130, 1.2, 8_000)
    """Length of a typed message. ServeGen's prompts to R1 have a median of 187, including documents
    and system prompts; 9 in 10 of them are first turns.
    """
    document: LogNormal = LogNormal(5_000, 0.9, 48_000)
    """Length of a document. 39 % are longer than 6,500 tokens and 6 % longer than 21,000: 5.7 % and
    0.8 % of all messages. ServeGen's prompts have 5 % and 1 %.
    """
    output_v3: LogNormal = LogNormal(350, 0.86, 8_192)
    """Output length of V3: median of Mooncake's conversations, spread of Azure's of 2023, limit of
    the API at that time.
    """
    output_r1: LogNormal = LogNormal(875, 0.97, 32_768)
    """Output length of R1 with reasoning: median and spread of the logarithm from ServeGen's
    DeepSeek-R1, limit of the API at that time.
    """
    reason_short: tuple[float, float, float] = (0.34, 12.0, 18.0)
    """Lower mode of reasoning's share of R1's output, which is bimodal in ServeGen: (share of turns
    in this mode, two parameters of its beta distribution with mean 0.40).
    """
    reason_long: tuple[float, float] = (16.0, 2.8)
    """Upper mode of reasoning's share of R1's output: parameters of a beta distribution with mean
    0.85. Mean of both modes: 0.70.
    """
    think_s: LogNormal = LogNormal(75, 1.5, 12 * 3600)
    """Time from the end of an answer to the next message. Including the time of the answer, 9 in 10
    next messages come within 10 minutes. Mooncake's gaps above 10 s have a median of two minutes.
    Otherwise assumed.
    """
    rest_from_s: float = 600.0
    """Thinking time above which a session rests. Assumed."""
    return_share: float = 0.12
    """Share of further turns that come after a long rest instead. 9 in 10 of the other 0.88 come
    within 10 minutes: the 80 % of reuses within 10 minutes that Alibaba's chat service has (Wang et
    al., "KVCache Cache in the Wild", 2025).
    """
    return_s: LogNormal = LogNormal(8 * 3600, 1.2, 3 * DAY_S)
    """Length of a long rest by the load clock: until later that day or one of the next days.
    Assumed: no public trace has it.
    """
    system_prompts: tuple[SystemPrompt, ...] = (
        SystemPrompt(0.45, 0),
        SystemPrompt(0.20, 200),
        SystemPrompt(0.15, 400),
        SystemPrompt(0.10, 700),
        SystemPrompt(0.06, 1200),
        SystemPrompt(0.04, 2500),
    )
    """System prompt of each tenant, in order. Assumed: a few popular ones; many chats have none."""
    context: int = 65_536
    """Longest prompt and answer together (the API's limit then); a longer turn ends the session."""
    first_token_s: float = 1.5
    """Time to an answer's first token; it delays the next turn."""
    token_s: float = 1 / 21
    """Time per token of an answer, before the next turn. Published: 20 to 22 tokens/s per user."""
    shares: tuple[float, ...] = DEEPSEEK_SHARES
    """Shares of the day's load, by hour from 12:00 Beijing time."""
    lead_s: float = 240.0
    """Time by which sittings begin before the load of `shares`, because on average their tokens
    come later. Fitted to the shares.
    """

    def __post_init__(self) -> None:
        for name in ("share_r1", "continue_share", "document_share", "return_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a probability, 0 to 1."
                )
        if self.sessions_per_day <= 0:
            raise ValueError(f"sessions_per_day is {self.sessions_per_day}; it must be above 0.")
        if self.continue_samples * (1 - self.continue_share) <= 1:
            raise ValueError(
                "continue_samples x (1 - continue_share) must be above 1; otherwise the"
                " mean is infinite."
            )
        if (
            not self.system_prompts
            or abs(sum(prompt.share for prompt in self.system_prompts) - 1) > 1e-6
        ):
            raise ValueError("the shares of the system prompts must add up to 1.")
        for name in ("message", "document", "output_v3", "output_r1", "think_s", "return_s"):
            spread: LogNormal = getattr(self, name)
            if spread.median <= 0 or spread.sigma < 0 or spread.limit <= 0:
                raise ValueError(
                    f"{name} is {spread}; its median and limit must be above 0, and its"
                    " sigma 0 or more."
                )
        share, *short = self.reason_short if len(self.reason_short) == 3 else (-1.0,)
        if not 0 <= share <= 1 or len(self.reason_long) != 2 or min(*short, *self.reason_long) <= 0:
            raise ValueError(
                "reason_short must be a probability and two numbers above 0, and"
                " reason_long two numbers above 0."
            )
        if min(min(prompt.share, prompt.tokens) for prompt in self.system_prompts) < 0:
            raise ValueError(
                "a system prompt must have a share and a number of tokens, both 0 or more."
            )
        if len(self.shares) != 24 or min(self.shares) <= 0:
            raise ValueError(
                f"shares has {len(self.shares)} numbers; give 24 numbers above 0, starting"
                " with the hour from noon."
            )
        if (
            self.context < 2
            or self.token_s <= 0
            or min(self.first_token_s, self.rest_from_s, self.lead_s) < 0
        ):
            raise ValueError(
                "context must be at least 2, token_s above 0, and first_token_s,"
                " rest_from_s and lead_s at least 0."
            )


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns of whole sessions, one session after the other, without the sessions' start times."""

    session: Ints
    turn: Ints
    sitting: Ints
    """Sitting within the session, from 0."""
    tokens_in: Ints
    tokens_out: Ints
    tokens_reasoning: Ints
    tokens_seen: Ints
    tenant: Ints
    model: Ints
    pause_s: Floats
    """Time by the load clock between this turn's sitting and the one before; 0 within a sitting."""
    rested_s: Floats
    """Sum of all pauses of the session so far, by the load clock."""
    wait_s: Floats
    """Time since the previous turn without pauses: its answer, and thinking."""
    lag_s: Floats
    """Sum of all answers and thinking since the session began, seconds."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Times between the turns of whole sessions, without the turns' lengths."""

    num_turns: Ints
    """Number of turns of each session; the other columns are by turn."""
    think_s: Floats
    """Thinking time since the previous answer; 0 in the first turn of a sitting."""
    pause_s: Floats
    """Rest before this turn by the load clock, if it begins a sitting after the first; else 0."""
    rested_s: Floats
    """Sum of all pauses of the session so far, by the load clock."""

    def of(self, wanted: Bools) -> Rhythm:
        """Return the rhythm of the sessions with True in `wanted`."""
        turns = np.repeat(wanted, self.num_turns)
        return Rhythm(
            self.num_turns[wanted], self.think_s[turns], self.pause_s[turns], self.rested_s[turns]
        )


def draw_rhythm(params: WorkloadParams, num_sessions: int, rng: Generator) -> Rhythm:
    """Draw the rhythm of `num_sessions` sessions from their first turn to their last."""
    num_turns = _draw_lengths(params, num_sessions, rng)
    session, begin, is_first = _layout(num_turns)
    think_s = params.think_s.draw(rng, len(session))
    is_return = rng.random(len(session)) < params.return_share
    think_s[is_return] = params.return_s.draw(rng, int(is_return.sum()))
    rests = ~is_first & (is_return | (think_s > params.rest_from_s))
    pause_s = np.where(rests, think_s, 0.0)
    return Rhythm(
        num_turns,
        np.where(rests | is_first, 0.0, think_s),
        pause_s,
        _running(pause_s, begin, session),
    )


def draw_turns(params: WorkloadParams, rhythm: Rhythm, rng: Generator) -> Turns:
    """Draw the turns of the sessions of a rhythm. All columns are equally long."""
    session, begin, is_first = _layout(rhythm.num_turns)
    num_sessions, count = len(begin), len(session)
    turn = np.arange(count) - begin[session]
    model = np.where(rng.random(num_sessions) < params.share_r1, R1, V3)[session]
    edges = np.cumsum([prompt.share for prompt in params.system_prompts])[:-1]
    tenant = np.searchsorted(edges, rng.random(num_sessions), side="right")[session]
    system = np.array([prompt.tokens for prompt in params.system_prompts])[tenant]

    message = params.message.tokens(rng, count)
    has_document = rng.random(count) < params.document_share
    message[has_document] += params.document.tokens(rng, int(has_document.sum()))
    output, reasoning = _draw_outputs(params, model, rng)
    # The prompt grows by the last answer without its reasoning, and by the next message.
    tokens_in = system + _running(message + _before(output - reasoning, is_first), begin, session)
    seen = np.where(reasoning > 0, tokens_in, tokens_in + output - 1)
    tokens_seen = np.where(is_first, system, _before(seen, is_first))
    answer_s = np.asarray(params.first_token_s + output * params.token_s, dtype=np.float64)
    wait_s = np.asarray(_before(answer_s, is_first) + rhythm.think_s, dtype=np.float64)
    sitting = _running((rhythm.pause_s > 0).astype(np.int64), begin, session)

    too_long = np.where(tokens_in + output > params.context, turn, MAX_TURNS + 1)
    stays = turn < np.minimum.reduceat(too_long, begin)[session] if count else is_first
    columns = (
        session,
        turn,
        sitting,
        tokens_in,
        output,
        reasoning,
        tokens_seen,
        tenant,
        model,
        rhythm.pause_s,
        rhythm.rested_s,
        wait_s,
        _running(wait_s, begin, session),
    )
    return Turns(*[np.asarray(column)[stays] for column in columns])


def generate(
    params: WorkloadParams,
    start_s: float,
    end_s: float,
    rng: Generator,
    scale: float = 1.0,
    *,
    history_s: float = 6 * DAY_S,
) -> Workload:
    """Draw all requests that arrive in [start_s, end_s), of one session in `scale`.

    Later turns of sessions that began up to `history_s` earlier are included, so the first second
    is like any other. With the default, one token in a thousand is missing. Drawing sessions at
    1/`scale` of the rate equals sampling them by a hash of their numbers (Workload.sample), because
    the numbers are arbitrary. Raises ValueError for an empty window or a scale below 1.
    """
    if not start_s < end_s or scale < 1:
        raise ValueError(
            f"the window [{start_s}, {end_s}) is empty, or the scale {scale} is below 1."
        )
    shape = DemandClock(params.shares)
    first, last = (
        float(shape.load_s(at_s + params.lead_s)) for at_s in (start_s - history_s, end_s)
    )
    num_sessions = int(rng.poisson(params.sessions_per_day / scale * (last - first) / DAY_S))
    begins = rng.uniform(first, last, num_sessions)
    rhythm = draw_rhythm(params, num_sessions, rng)
    # Most earlier sessions are over at start_s; their lengths need not be drawn.
    sitting_s = np.repeat(begins, rhythm.num_turns) + rhythm.rested_s
    counts = (sitting_s >= float(shape.load_s(start_s - MAX_SITTING_S))) & (sitting_s < last)
    wanted = np.zeros(num_sessions, dtype=np.bool_)
    wanted[np.repeat(np.arange(num_sessions), rhythm.num_turns)[counts]] = True
    turns = draw_turns(params, rhythm.of(wanted), rng)
    load_s = begins[wanted][turns.session] + turns.rested_s
    rows = np.flatnonzero(load_s < last)
    return placed(params, turns, rows, load_s[rows], shape, start_s, end_s)


MAX_SITTING_S = DAY_S / 4
"""Longest sitting considered. Hardly any is longer, so earlier sittings are taken to be over."""


def placed(
    params: WorkloadParams,
    turns: Turns,
    rows: Ints,
    load_s: Floats,
    shape: DemandClock,
    start_s: float,
    end_s: float,
) -> Workload:
    """Return the requests of the turns at `rows` that arrive in [start_s, end_s), by arrival.
    `load_s`: beginning of each row's sitting by the load clock.
    """
    lag_s = turns.lag_s[rows]
    arrival_s = shape.at_s(load_s) - params.lead_s + lag_s
    inside = (arrival_s >= start_s) & (arrival_s < end_s)
    rows, load_s, arrival_s = rows[inside], load_s[inside], arrival_s[inside]
    order = np.argsort(arrival_s, kind="stable")
    rows, load_s, arrival_s = rows[order], load_s[order], arrival_s[order]
    is_first = turns.turn[rows] == 0
    before_s = (
        shape.at_s(load_s - turns.pause_s[rows])
        - params.lead_s
        + turns.lag_s[rows]
        - turns.wait_s[rows]
    )
    tenant = turns.tenant[rows]
    system = np.array([prompt.tokens for prompt in params.system_prompts])[tenant]
    return Workload(
        arrival_s,
        turns.session[rows],
        turns.turn[rows],
        turns.tokens_in[rows],
        turns.tokens_out[rows],
        turns.tokens_reasoning[rows],
        np.where(system > 0, tenant, NO_PREFIX),
        system,
        turns.tokens_seen[rows],
        np.where(is_first, np.inf, arrival_s - before_s),
        tenant,
        turns.model[rows],
    )


def _layout(num_turns: Ints) -> tuple[Ints, Ints, Bools]:
    """Return (session of each turn, first turn of each session, True for turns that are first)."""
    begin = np.cumsum(num_turns) - num_turns
    session = np.repeat(np.arange(len(num_turns)), num_turns)
    is_first = np.zeros(len(session), dtype=np.bool_)
    is_first[begin] = True
    return session, begin, is_first


def _draw_lengths(params: WorkloadParams, num_sessions: int, rng: Generator) -> Ints:
    """Draw the number of turns of each session: geometric, with a probability per session."""
    if not params.continue_share:
        return np.ones(num_sessions, dtype=np.int64)
    yes, no = (
        params.continue_share * params.continue_samples,
        (1 - params.continue_share) * params.continue_samples,
    )
    return np.minimum(rng.geometric(rng.beta(no, yes, num_sessions)), MAX_TURNS)


def _draw_outputs(params: WorkloadParams, model: Ints, rng: Generator) -> tuple[Ints, Ints]:
    """Draw (output tokens, reasoning tokens among them): none for V3, never all for R1."""
    is_r1 = model == R1
    num_r1 = int(is_r1.sum())
    output = np.empty(len(model), dtype=np.int64)
    output[is_r1] = params.output_r1.tokens(rng, num_r1)
    output[~is_r1] = params.output_v3.tokens(rng, len(model) - num_r1)
    share, yes, no = params.reason_short
    parts = np.where(
        rng.random(num_r1) < share, rng.beta(yes, no, num_r1), rng.beta(*params.reason_long, num_r1)
    )
    reasoning = np.zeros(len(model), dtype=np.int64)
    reasoning[is_r1] = np.minimum(output[is_r1] * parts, output[is_r1] - 1)
    return output, reasoning


def _before(values: NDArray[Number], is_first: Bools) -> NDArray[Number]:
    """Return the value of the previous turn; 0 in a session's first turn."""
    before = np.roll(values, 1)
    before[is_first] = 0
    return before


def _running(values: NDArray[Number], begin: Ints, session: Ints) -> NDArray[Number]:
    """Return running sums within each session, including this turn's value."""
    total: NDArray[Number] = np.cumsum(values, dtype=values.dtype)
    return np.asarray(total - (total - values)[begin][session], dtype=values.dtype)
