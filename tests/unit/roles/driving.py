"""Short ways to drive a role by hand in these tests: make a request, pick effects out, answer for
the Runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from hadal.core.messages import Decode, Generation, KvLease, Prefill
from hadal.core.plans import DecodePlan, PrefillPlan, Sampling, StepDone
from hadal.core.seams import Deliver, Effect, Execute, Send
from hadal.kv.blocks import blocks_for
from hadal.roles.decode.leader import DecodeLeader
from tests.columns import attempt_id_of

T = TypeVar("T")


def generation(
    name: str = "a",
    prompt: int = 10,
    *,
    output: int = 0,
    max_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    attempt: int = 0,
    min_tokens: int = 0,
    sampling: Sampling | None = None,
) -> Generation:
    return Generation(
        name,
        tuple(range(100, 100 + prompt)),
        tuple(range(output)),
        max_tokens,
        stop_ids,
        min_tokens,
        sampling or Sampling(),
        attempt,
        attempt_id=attempt_id_of(name, attempt),
    )


def decode_leader(num_blocks: int, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    """One that has started. Few slots, and no heartbeat while a test runs."""
    fields: dict[str, Any] = {
        "num_slots": 3,
        "num_waiting_max": 9,
        "max_context": 2000,
        "heartbeat_s": 100.0,
    }
    unit = DecodeLeader("decode-0", "e1", num_blocks, num_ranks=num_ranks, **fields | options)
    unit.start(0.0)
    return unit


def sent(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    """Messages of one type among the effects."""
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def of(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def prefill_plans(effects: Iterable[Effect]) -> list[PrefillPlan]:
    return [
        e.plans[0]
        for e in effects
        if isinstance(e, Execute) and isinstance(e.plans[0], PrefillPlan)
    ]


def decode_plans(effects: Iterable[Effect]) -> list[DecodePlan]:
    return [
        e.plans[0] for e in effects if isinstance(e, Execute) and isinstance(e.plans[0], DecodePlan)
    ]


def prefill(name: str = "a", prompt: int = 10, **options: int) -> Prefill:
    return Prefill(generation(name, prompt, **options))  # type: ignore[arg-type]


def decode(
    name: str = "a",
    prompt: int = 10,
    *,
    output: int = 1,
    max_tokens: int = 5,
    stop_ids: tuple[int, ...] = (),
    attempt: int = 0,
    min_tokens: int = 0,
    sampling: Sampling | None = None,
) -> Decode:
    request = generation(
        name,
        prompt,
        output=output,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        attempt=attempt,
        min_tokens=min_tokens,
        sampling=sampling,
    )
    num_tokens = prompt + output - 1
    blocks = tuple(range(1, 1 + blocks_for(num_tokens)))
    return Decode(request, KvLease("pool", blocks, (0,) * len(blocks), num_tokens))


def done(
    step_id: int,
    tokens: dict[int, int] | None = None,
    error: str | None = None,
    failed: dict[int, str] | None = None,
) -> StepDone:
    tokens = tokens or {}
    return StepDone(step_id, tuple(tokens), tuple(tokens.values()), {}, 0.01, error, failed or {})


def finals(effects: Iterable[Effect]) -> list[tuple[str, int | None]]:
    """(request, status) of every last Deliver; None where it finished."""
    ends = [effect for effect in of(effects, Deliver) if effect.final]
    return [(end.request_id, None if end.error is None else end.error_status) for end in ends]
