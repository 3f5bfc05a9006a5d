"""Other days: a study with one thing changed, to see what it is worth.

Each is a whole study of its own, so it goes through the same stages; what it has in common with the first is not
measured twice (`same_units`, `same_cache`).
"""

from __future__ import annotations

from dataclasses import replace

from hadal.core.balance import OFF, TURNS
from hadal.perf.hardware import hardware_named
from hadal.sim.study import Study


def what_ifs(study: Study) -> list[tuple[str, Study]]:
    """(what is changed, the study), the balancers first."""
    other = "h200" if study.hardware != "h200" else "h800"
    found = [
        ("requests to ranks in turn (round-robin)", replace(
            study, prefill=replace(study.prefill, request_balance=TURNS),
            decode=replace(study.decode, request_balance=TURNS),
        )),
        ("no expert balancer", replace(
            study, prefill=replace(study.prefill, expert_balance=OFF), decode=replace(study.decode, expert_balance=OFF)
        )),
        (f"{other.upper()} at ${hardware_named(other).usd_per_gpu_hour:.2f} an hour", replace(
            study, hardware=other, gpu_hour_usd=hardware_named(other).usd_per_gpu_hour
        )),
        ("a tenth of the cache", replace(study, cache=replace(study.cache, disk_pb=study.cache.disk_pb / 10))),
        ("R1's prices as charged, cheaper at night", replace(study, prices="deepseek-reasoner")),
    ]  # fmt: skip
    if study.mtp_tokens:
        found.append(("no drafts in decode", replace(study, mtp_tokens=0)))
    return found


def same_units(one: Study, other: Study) -> bool:
    """Whether a unit does the same in both."""
    return _units(one) == _units(other)


def same_cache(one: Study, other: Study) -> bool:
    """Whether a cache finds the same in both."""
    return (one.workload, one.cache, one.seed) == (other.workload, other.cache, other.seed)


def _units(study: Study) -> tuple[object, ...]:
    units = tuple(
        (of.ranks, of.redundant_experts, of.max_requests, of.request_balance, of.expert_balance)
        for of in (study.prefill, study.decode)
    )
    return (
        study.hardware, study.chunk_tokens, study.mtp_tokens, study.mtp_accept, units, study.workload, study.window,
        study.seed,
    )  # fmt: skip
