"""`hadal trace`: record a live unit's next steps. Has the answer to GET /trace, and the parts
of the command.

The unit's leader (scheduler) marks its next steps as traced; each rank records when its ops ran. A
unit without work takes no steps: the answer is then 504, not an empty trace.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hadal.core.balance import shown
from hadal.core.errors import HadalError
from hadal.core.messages.questions import HostClock, TracedStep
from hadal.core.plans import LinkBytes
from hadal.gateway.desk.fetch import fetch_page
from hadal.gateway.desk.host import Host
from hadal.gateway.edge.errors import ApiError
from hadal.overlap.trace import (
    Share,
    chrome_trace,
    covered_share,
    duration_s,
    is_one_kernel,
    legend,
    shares,
    steps_timeline,
    timeline,
)

MAX_STEPS = 100
MAX_WAIT_S = 300.0
DEFAULT_STEPS = 3
DEFAULT_WAIT_S = 30.0
_LANE_CHARS = 13
"""Width of the lane names, left of a picture."""
_FREE = Path("trace.json")
_MAX_FREE = 999


class TraceReply(msgspec.Struct, frozen=True):
    """Body of GET /trace. A step is an array: id, schedule, micro-batches, tokens, events, balance,
    link_bytes.
    """

    unit: str
    steps: tuple[TracedStep, ...]
    clocks: tuple[HostClock, ...] = ()
    """Clock offsets of the hosts; empty if all ranks are on one host."""


class TraceError(HadalError):
    """Raised if there is no trace; the text is for the user."""


async def answer_trace(host: Host, units: Collection[str], query: Mapping[str, str]) -> TraceReply:
    """Trace the next `steps` of `unit` within `wait_s`. Raises ApiError 400, 404, 429, 504."""
    unit = query.get("unit", "decode-0")
    num_steps = _number(query, "steps", DEFAULT_STEPS, 1, MAX_STEPS)
    wait_s = _number(query, "wait_s", DEFAULT_WAIT_S, 0.0, MAX_WAIT_S)
    if num_steps != int(num_steps):
        raise ApiError(400, f"steps is {num_steps:g}; a whole number is needed.", param="steps")
    if unit not in units:
        known = ", ".join(sorted(units)) or "none: the server is starting"
        if unit.rpartition(".")[0] in units:
            known += ". Send the name of a unit instead of a rank"
        raise ApiError(
            404,
            f"There is no unit {unit[:100]!r}. Known: {known}.",
            param="unit",
            code="unit_not_found",
        )
    trace = await host.questions.trace(unit, int(num_steps), wait_s)
    if trace is not None and not trace.steps:
        raise ApiError(
            429,
            f"{unit} has other traces that wait for steps. Send it requests, then try again.",
            code="too_many_traces",
        )
    if trace is None:
        raise ApiError(
            504,
            f"{unit} did not run {num_steps:g} more steps within {wait_s:g} s. Send it a request"
            " meanwhile: an idle unit runs no steps.",
            code="no_step",
        )
    # JSON has no NaN: it would become null, which is no valid balance.
    return TraceReply(
        unit,
        tuple(replace(step, balance=shown(step.balance)) for step in trace.steps),
        trace.clocks,
    )


def _number(query: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        text = query[name][:100]
        raise ApiError(
            400, f"{name} is {text!r}; a number from {low:g} to {high:g} is needed.", param=name
        )
    return value


def fetch(
    url: str, unit: str, num_steps: int, *, wait_s: float = DEFAULT_WAIT_S, api_key: str = ""
) -> TraceReply:
    """Request a trace from a running server. Raises TraceError, FetchError."""
    params = {"unit": unit, "steps": str(num_steps), "wait_s": str(wait_s)}
    body = fetch_page(url, "/trace", api_key=api_key, query=params, wait_s=wait_s)
    try:
        return msgspec.json.decode(body, type=TraceReply)
    except msgspec.DecodeError as error:
        raise TraceError(f"{url} did not return a trace ({error}).") from error


def describe(reply: TraceReply, width: int = 110) -> str:
    """Return a readable summary of the steps, and a picture of one layer of the last step, or of
    all steps if a rank runs all layers as one kernel. `width`: characters per line.
    """
    lines = [_describe_step(reply.unit, step) for step in reply.steps]
    if reply.clocks:
        errors = (f"{clock.host} to {clock.error_s * 1e3:.2f} ms" for clock in reply.clocks)
        lines.append(f"hosts' clocks are aligned, with these errors: {', '.join(errors)}")
    last = reply.steps[-1]
    room = max(20, width - _LANE_CHARS)
    for share in shares(last.events)[:1]:
        if is_one_kernel(last.events, share.rank):
            picture = steps_timeline(reply.steps, share.rank, room)
        else:
            picture = timeline(last.events, share.rank, width=room)
        meaning = f"step {last.step_id} on rank {share.rank}: {legend(last.events, share.rank)}"
        lines += ["", f"rank {share.rank}, {picture}", *textwrap.wrap(meaning, max(width, room))]
    return "\n".join(lines)


def _describe_step(unit: str, step: TracedStep) -> str:
    head = (
        f"{unit} step {step.step_id}: {step.schedule},"
        f" {_count(step.num_micro_batches, 'micro-batch', 'es')}, "
    )
    head += f"{_count(step.num_tokens, 'token', 's')}, {duration_s(step.events) * 1e3:.2f} ms"
    balance = ", ".join(
        f"{objective} {value:.3f}" for objective, value in shown(step.balance).items()
    )
    balanced = f"balance {balance}" if balance else ""
    parts = (head, _describe_link(step), _describe_bytes(step.link_bytes), balanced)
    return "; ".join(part for part in parts if part)


def _describe_link(step: TracedStep) -> str:
    if not step.events:
        return "its ranks sent no events"
    by_rank = shares(step.events)
    covered = covered_share(step.events)
    if covered is None:
        return f"{_count(len(by_rank), 'rank', 's')}, which sent no bytes, so there are no lanes for links"
    exposed_ms = sum(share.exposed_s for share in by_rank) / len(by_rank) * 1e3
    text = f"{covered:.0%} of link time covered, {exposed_ms:.2f} ms exposed wait"
    if len(by_rank) > 1:
        text += f" (mean of ranks: {', '.join(map(_describe_share, by_rank))})"
    return text


def _describe_bytes(link_bytes: LinkBytes) -> str:
    """Return the bytes sent between ranks, and the share between nodes; "" if none."""
    both = {"dispatch": link_bytes.dispatch, "combine": link_bytes.combine}
    said = [
        f"{kind} {sum(parts) / 1e6:.2f} MB ({parts[1] / sum(parts):.0%} between nodes)"
        for kind, parts in both.items()
        if any(parts)
    ]
    return ", ".join(said)


def _describe_share(share: Share) -> str:
    covered = "-" if share.covered is None else f"{share.covered:.0%}"
    return f"{share.rank}: {covered} {share.exposed_s * 1e3:.2f} ms"


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def write(reply: TraceReply, asked: Path | None) -> Path:
    """Write the trace for ui.perfetto.dev or chrome://tracing. Return the path: `asked`, or the
    first unused name of trace.json, trace-2.json ... Raises TraceError.
    """
    content = msgspec.json.encode(chrome_trace(reply.unit, reply.steps, reply.clocks))
    output = asked or _FREE
    try:
        if asked is not None:
            asked.write_bytes(content)
            return asked
        for number in range(1, _MAX_FREE + 1):
            output = _FREE if number == 1 else _FREE.with_stem(f"{_FREE.stem}-{number}")
            with contextlib.suppress(FileExistsError), output.open("xb") as file:
                file.write(content)
                return output
    except OSError as error:
        raise TraceError(f"{output} cannot be written ({error.strerror or error}).") from error
    raise TraceError(f"{_FREE} to {output} all exist. Remove some, or choose a path with --output.")
