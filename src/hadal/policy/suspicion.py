"""Is a silent process frozen, or does it only get no processor? One answer for all who judge: front
and leaders.

Knows no messages and no process: whoever judges says how long nothing was heard, and what the
process's own host saw.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

ASK_SHARE = 0.4
"""A process that is silent for this share of its timeout is suspected: its host is asked what it
sees of it.
"""
UNSEEN = 2.0
"""Timeouts that a process is given while its host has not answered: the host may itself be late."""
TOGETHER = 4.0
"""Timeouts that processes are given which are late all at once: what they share is the host, or the
way to it.
"""
MOST = 20.0
"""Timeouts that a process is given at most, whatever excuses its silence."""
PAUSE_PERIODS = 2.5
"""A judge that was not called for so many of its periods stood still itself."""


@dataclass(frozen=True, slots=True)
class Silence:
    """What is known of one suspected process."""

    silent_s: float
    """Time since it was last heard or seen to move, without the time in which its judge stood
    still.
    """
    starved: float | None = None
    """The part of it, from 0 on, in which it was ready to run and had no processor, as far as its
    host looked; several threads may wait at once. None: its host has not looked twice yet.
    """
    is_stopped: bool = False
    """Its host saw it stopped (SIGSTOP): it will not go on by itself."""


def is_frozen(silence: Silence, timeout_s: float, *, are_all_late: bool = False) -> bool:
    """Whether to give a process up that should be heard of within `timeout_s`."""
    if silence.is_stopped or silence.silent_s > MOST * timeout_s:
        return silence.silent_s > timeout_s
    could_run_s = silence.silent_s * (1.0 - min(silence.starved or 0.0, 1.0))
    patience = UNSEEN if silence.starved is None else 1.0
    return could_run_s > timeout_s * max(patience, TOGETHER if are_all_late else 1.0)


def are_all_late(silent_s: Collection[float], timeout_s: float) -> bool:
    """Whether all of several processes, by how long each is silent, are suspected at once."""
    return len(silent_s) > 1 and min(silent_s) > ASK_SHARE * timeout_s


def pause_s(gap_s: float, period_s: float) -> float:
    """How long a judge that is called every `period_s` stood still, when it was not called for
    `gap_s`.
    """
    return gap_s if gap_s > PAUSE_PERIODS * period_s else 0.0


def start_is_over(elapsed_s: float, waited_s: float, timeout_s: float) -> bool:
    """Whether a process that is not ready should be by now: its limit is on the time that it could
    run in.
    """
    return elapsed_s - min(waited_s, elapsed_s) > timeout_s or elapsed_s > TOGETHER * timeout_s
