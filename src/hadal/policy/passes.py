"""How many tokens of each request one decode plan makes, so that no rank waits for its leader.

    plan of one pass    rank   | 1 |      | 2 |      | 3 |       a small model's pass takes a fifth of a
                        leader     | plan | | plan | | plan |    millisecond, a plan's way there longer
    plan of four        rank   | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
                        leader   |  plan  |    |  plan  |

Passes are not seen from outside but in time: requests join, leave or are cancelled between plans.
"""

from __future__ import annotations

PLAN_S = 0.008
"""Longest plan of several passes, seconds: several times what a leader on a busy core takes for one (LOG,
2026-11-29, served as fast as the engine).
"""
PASSES_MAX = 8
"""More bring no more speed."""


def passes_of(pass_s: float) -> int:
    """Return how many passes the next plan is to have. `pass_s`: what one took of late, 0 if none was
    seen.
    """
    return max(1, min(int(PLAN_S / pass_s), PASSES_MAX)) if pass_s > 0.0 else 1
