"""Plan a placement near today's within a budget of moves, by the search that suits the ranks'
slots.

Independent of time. All layers at once.

Shapes: T steps, L layers, E logical experts, R living ranks, S maximum expert slots of a rank.
"""

from __future__ import annotations

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.core.placement import EMPTY
from hadal.policy.experts.increment import Homes, descend
from hadal.policy.experts.pairs import improve_pairs
from hadal.policy.experts.paths import choose, standing
from hadal.policy.experts.tables import held_by, num_moved
from hadal.policy.experts.windows import judged_by, steadied


def place_near(
    today_LRS: Ints,
    loads_LE: Floats,
    window_TLE: Floats | None,
    ceiling_L: Floats,
    capacity_R: Ints,
    *,
    max_moves: int,
    home_LRE: Bools | None = None,
    may_leave_home: bool = False,
) -> Ints:
    """Return a table [L, R, S] no worse in any layer, at most `max_moves` replicas away from
    today's.

    A layer stops improving at its ceiling. With a window, its steps' maxima decide. `home_LRE`:
    ranks on the node of an expert's group. Replicas move only there; if `may_leave_home`, also
    elsewhere in layers still above their ceiling. Every expert must have a replica today
    (`complete` ensures it).
    """
    held = held_by(today_LRS, loads_LE.shape[1])
    barred = None if home_LRE is None else ~home_LRE
    num_expert_slots = today_LRS.shape[2]
    if (capacity_R == 2).all() and (today_LRS != EMPTY).all() and barred is None:
        found = improve_pairs(today_LRS, loads_LE, ceiling_L, capacity_R, max_moves=max_moves)
        stays = np.zeros(len(found), np.int64)
        paths = [
            standing(today_LRS, loads_LE, stays),
            standing(found, loads_LE, num_moved(today_LRS, found)),
        ]
    else:
        paths = [
            descend(
                today_LRS,
                Homes(held, barred),
                loads_LE,
                ceiling_L,
                capacity_R,
                max_moves=max_moves,
            )
        ]
    if window_TLE is not None:
        paths = [judged_by(path, window_TLE, num_expert_slots) for path in paths]
    table = choose(paths, max_moves).reshape(today_LRS.shape)
    if barred is not None and may_leave_home:
        path = descend(table, Homes(held), loads_LE, ceiling_L, capacity_R, max_moves=max_moves)
        if window_TLE is not None:
            path = judged_by(path, window_TLE, num_expert_slots)
        table = choose([path], max_moves).reshape(today_LRS.shape)
    if window_TLE is None:
        return table
    left = max_moves - int(num_moved(today_LRS, table).sum())
    return steadied(table, window_TLE, home_LRE=held, max_moves=left, barred_LRE=barred)
