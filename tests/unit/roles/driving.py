"""Helpers to drive a role by hand: make requests, pick effects, answer for the Runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from hadal.core.balance import AUTO, OFF
from hadal.core.config import DECODE, PREFILL, CacheConfig, Deployment, LimitsConfig, UnitsConfig
from hadal.core.messages.generation import Deliver, Generation
from hadal.core.messages.units import Decode, KvLease, Prefill
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.plans import DecodePlan, PrefillPlan, Sampling, StepDone
from hadal.core.seams import Effect, Execute, Send
from hadal.kv.blocks import blocks_for
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.prefill.leader import PrefillLeader
from hadal.runtime.resolve import model_folder
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


MODEL = replace(
    read_model_config(model_folder("")), max_position_embeddings=1000, num_hidden_layers=0
)
_UNITS = {
    "num_blocks": "kv_blocks",
    "num_ranks": "ranks",
    "num_slots": "max_requests",
    "num_requests_max": "max_requests",
    "num_waiting_max": "max_waiting",
    "overlap": "overlap",
    "min_split_tokens": "min_split_tokens",
    "request_balance": "request_balance",
    "promise": "tenant_promise",
    "drafts": "drafts",
}
"""Option of the helpers below -> field of the unit's table in the deployment."""


def deployment_of(role: str, options: dict[str, Any]) -> tuple[Deployment, ModelConfig]:
    """Return a deployment and a model with these options, and remove them from `options`."""
    units = {_UNITS[name]: options.pop(name) for name in [*options] if name in _UNITS}
    num_layers, num_moe_layers = options.pop("num_layers", 0), options.pop("num_moe_layers", 0)
    config = replace(
        MODEL,
        max_position_embeddings=options.pop("max_context", 1000),
        num_hidden_layers=num_layers,
        first_k_dense_replace=num_layers - num_moe_layers,
    )
    keeps = (
        options.pop("keeps_blocks", True)
        if role == PREFILL
        else options.pop("offers_blocks", False)
    )
    cache = CacheConfig(
        folder="/kv" if options.pop("has_disk", False) else "",
        memory=AUTO if keeps else OFF,
        recompute=options.pop("recompute", AUTO),
    )
    names = ("chunk_tokens", "lease_s", "heartbeat_s")
    fields = {name: options.pop(name) for name in names if name in options}
    if "heartbeat_s" in fields:  # 0: send a heartbeat at each event.
        fields |= {"heartbeat_s": max(fields["heartbeat_s"], 1e-300), "unit_timeout_s": 1e6}
    limits = LimitsConfig(burst_tokens=options.pop("burst", 0))
    deployment = Deployment(
        model="m",
        cache=cache,
        limits=limits,
        **{role: UnitsConfig(**units)},
        **fields,
    )
    return deployment, config


def decode_leader(num_blocks: int = 17, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    """Return a leader that has not started."""
    fields: dict[str, Any] = {
        "num_blocks": num_blocks,
        "num_ranks": num_ranks,
        "num_slots": 4,
        "num_waiting_max": 4,
        "heartbeat_s": 0.5,
        **options,
    }
    return DecodeLeader("decode-0", "e1", *deployment_of(DECODE, fields), **fields)


def prefill_leader(num_blocks: int = 9, num_ranks: int = 1, **options: Any) -> PrefillLeader:
    """Return a leader that has not started."""
    fields: dict[str, Any] = {
        "num_blocks": num_blocks,
        "num_ranks": num_ranks,
        "chunk_tokens": 64,
        "num_requests_max": 4,
        "num_waiting_max": 4,
        "lease_s": 2.0,
        "heartbeat_s": 0.5,
        **options,
    }
    pool = "pool" if num_ranks == 1 else ""
    return PrefillLeader("prefill-0", "e1", *deployment_of(PREFILL, fields), pool, **fields)


def sent(effects: Iterable[Effect], kind: type[T]) -> list[T]:
    """Return the messages of one type among the effects."""
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def to(effects: Iterable[Effect], kind: type) -> list[str]:
    """Return the receivers of messages of one type among the effects."""
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


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


def prefill(name: str = "a", prompt: int = 10, **options: Any) -> Prefill:
    return Prefill(generation(name, prompt, **options))


def decode(name: str = "a", prompt: int = 10, *, output: int = 1, **options: Any) -> Decode:
    request = generation(name, prompt, output=output, **options)
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
    """Return (request, status) of every final Deliver; status None: it has no error."""
    ends = [effect for effect in of(effects, Deliver) if effect.final]
    return [(end.request_id, None if end.error is None else end.error_status) for end in ends]
