"""Balancers that decide by load alone, in a test's server.

A live unit moves experts and requests where the seconds gained exceed the seconds spent. Both are
measured on this machine, so whether anything moves depends on how busy it is. Here each step's
expert time is so large that every gain pays, chance gains included. Loads are counted as often as a
prefill unit counts them, and moves of requests use the terms of a unit that has measured nothing
yet. Loads, placements, installations and moves are the server's own.

    start_server(environment=eager.ENVIRONMENT)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hadal.policy.decode_moves import MoveTerms
from hadal.roles.decode import shape
from hadal.roles.experts import experts
from hadal.roles.experts.experts import ExpertBalancer
from hadal.roles.experts.gain import PREFILL_TERMS

VARIABLE = "HADAL_TEST_EAGER"
ENVIRONMENT: Mapping[str, str] = {VARIABLE: "1"}
_GROWING_S = 1.0
"""Assumed time per step of one MoE layer's experts, seconds."""
EAGER_TERMS = replace(PREFILL_TERMS, num_sigmas=0.0, gain_min=0.0, rest_intervals=1)
"""Any gain is enough, chance gains included, and a layer may be balanced again at once."""


def install() -> None:
    """Make the balancers of this process and its forks eager if the environment asks for it."""
    if VARIABLE not in os.environ:
        return
    plan = ExpertBalancer.plan

    def plan_eagerly(self: ExpertBalancer, now_s: float, growing_s: float) -> Any:
        return plan(self, now_s, _GROWING_S)

    def known_terms(kv_s: float, request_s: float, step_s: float, known: MoveTerms) -> MoveTerms:
        return known

    ExpertBalancer.plan = plan_eagerly  # type: ignore[method-assign]
    experts.ExpertTerms = lambda: EAGER_TERMS  # type: ignore[misc, assignment]
    shape.terms_of = known_terms  # type: ignore[attr-defined]
