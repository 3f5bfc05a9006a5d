"""Process of a rank in which heavy ops last as long as on a device of its own; messages, weights and tokens are real.

    python -m bench.balance_device serve --config FILE --run-folder FOLDER
    python -m bench.balance_device --unit decode-0 --role decode --rank 2 --folder RUN_FOLDER

The first command is `hadal serve` with such processes for ranks: the supervisor starts every process by a
module's name, and the ranks get this module. Leader (scheduler), gateway, and a unit of one rank run as always.

Ranks that share cores take the same total time however the work is spread over them. So on one machine balance
changes no time. Here the op of the routed experts lasts in proportion to the rows that the rank received, and
attention in proportion to the positions that its tokens attend to: the thread computes, then sleeps until the
op's time is over. The slowest rank decides when a step ends, as on GPUs. The figures show the value of balance
for such op times, not the speed of any hardware. After every SAY_EVERY ops the log reports how many ops computed
for longer than their time.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from hadal.cli import app
from hadal.comm.group import Interval
from hadal.model.batch import DecodeBatch, PrefillBatch
from hadal.model.block import OPS, MicroBatch, Op
from hadal.overlap.plan import ATTN_CORE, EXPERTS
from hadal.reference.params import LayerWeights
from hadal.runtime import unit
from hadal.runtime.process.child import Child
from hadal.runtime.supervisor import supervisor

log = logging.getLogger("bench.device")

DEVICE = "bench.balance_device"
COSTS = "HADAL_BENCH_DEVICE"
"""Environment variable with DeviceCosts as JSON."""
SAY_EVERY = 1000


@dataclass(frozen=True)
class DeviceCosts:
    """Cost of work in one layer, microseconds."""

    row_us: float
    """Microseconds per row that a routed expert computes."""
    position_us: float
    """Microseconds per (token, position) pair that attention computes."""

    def environment(self) -> dict[str, str]:
        return {COSTS: msgspec.json.encode(asdict(self)).decode()}


@dataclass
class Overruns:
    """Count of ops that computed for longer than the device would have needed."""

    num_ops: int = 0
    num_late: int = 0

    def note(self, *, is_late: bool) -> None:
        """Count one op."""
        self.num_ops += 1
        self.num_late += is_late
        if self.num_ops % SAY_EVERY == 0:
            log.info(
                "%d of %d ops computed for longer than the device", self.num_late, self.num_ops
            )


def num_rows(state: MicroBatch) -> int:
    """Return the number of rows that this rank's experts are about to compute."""
    return 0 if state.received is None else len(state.received.row_M)


def num_positions(state: MicroBatch) -> int:
    """Return the number of (token, position) pairs that attention is about to compute in this layer."""
    if not len(state.hidden_TD):
        return 0
    if isinstance(state.batch, DecodeBatch):
        return int(state.batch.lengths_B.sum())
    assert isinstance(state.batch, PrefillBatch)
    lengths_T = state.batch.lengths_T
    # In the last layer only rows with requested logits are left.
    return int(
        (
            lengths_T
            if len(lengths_T) == len(state.hidden_TD)
            else lengths_T[state.batch.final_rows]
        ).sum()
    )


def lasting(op: Op, count: Callable[[MicroBatch], int], seconds: float, overruns: Overruns) -> Op:
    """Return an op that runs `op`, then sleeps until `seconds` times the number that `count` returns have
    passed since its start. If `op` itself takes longer, it does not sleep and is counted in `overruns`.
    """

    def run(state: MicroBatch, layer: LayerWeights, layer_index: int) -> Interval | None:
        start_s, number = time.perf_counter(), count(state)
        interval = op(state, layer, layer_index)
        left_s = start_s + seconds * number - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        if number:
            overruns.note(is_late=left_s <= 0)
        return interval

    return run


class DeviceChild(Child):
    """A child process of the supervisor. A rank's process runs this module instead of the one in its
    arguments.
    """

    def __init__(self, name: str, role: str, arguments: Sequence[str], *more: Any) -> None:
        module, *rest = arguments
        super().__init__(name, role, [DEVICE if "--rank" in rest else module, *rest], *more)


def serve() -> None:
    """Run `hadal serve` with virtual devices as ranks."""
    supervisor.Child = DeviceChild  # type: ignore[assignment, attr-defined]
    app()


def main() -> int:
    """Run `hadal.runtime.unit` with a device's ops."""
    costs = msgspec.json.decode(os.environ[COSTS], type=DeviceCosts)
    overruns = Overruns()
    OPS[EXPERTS] = lasting(OPS[EXPERTS], num_rows, 1e-6 * costs.row_us, overruns)
    OPS[ATTN_CORE] = lasting(OPS[ATTN_CORE], num_positions, 1e-6 * costs.position_us, overruns)
    return unit.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        sys.exit(main())
