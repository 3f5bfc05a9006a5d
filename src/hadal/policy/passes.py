"""Choose the passes (tokens per request) of a decode plan, so that no rank waits for its leader.

    plan of one pass    rank   | 1 |      | 2 |      | 3 |       a small model's pass takes a fifth of a
                        leader     | plan | | plan | | plan |    millisecond, sending a plan takes longer
    plan of four        rank   | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
                        leader   |  plan  |    |  plan  |

From outside, only timing shows a pass: requests join, leave or are cancelled between plans.
"""

from __future__ import annotations

PLAN_S = 0.008
"""Longest plan of several passes, seconds: several times what a leader on a busy core needs for one
plan (docs/decisions/007).
"""
PASSES_MAX = 8
"""Maximum number of passes of a plan; more bring no more speed."""


def passes_of(pass_s: float) -> int:
    """Return the number of passes of the next plan. `pass_s`: recent seconds per pass, 0 if none
    was measured.
    """
    return max(1, min(int(PLAN_S / pass_s), PASSES_MAX)) if pass_s > 0.0 else 1
