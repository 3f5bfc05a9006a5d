"""Two rank processes of a unit, led by the test: experts travel between them while they live,
freeze and die.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.messages import (
    AnyMessage,
    RankDone,
    RankForm,
    RankFormed,
    RankStage,
    RankStaged,
    RankStep,
    RankUp,
)
from hadal.core.placement import Placement
from hadal.core.plans import (
    Chunk,
    FormPlan,
    LayerFlip,
    Member,
    PrefillPlan,
    Sampling,
    Source,
    Staged,
    StagePlan,
)
from hadal.roles.leaders import first_placement
from hadal.runtime.process.process import Run, write_run
from hadal.runtime.resolve import plan
from hadal.runtime.transfer.pool import remove_shared_memory
from hadal.runtime.wire import ZmqWire
from tests.dist.served import fork_module
from tests.waiting import DEADLINE_S, wait_until

UNIT = "prefill-0"
NUM_SWAPPED = 16
PROMPT = tuple(range(5, 45))
T = TypeVar("T", bound=AnyMessage)
Slots = NDArray[np.int16]


class Unit:
    """A leader's wire and two ranks' processes."""

    def __init__(self, folder: Path) -> None:
        units = UnitsConfig(ranks=2, kv_blocks=4, max_requests=2, threads=1, mode="low_latency")
        resolved = plan(
            Deployment(
                device="cpu", chunk_tokens=64, prefill=units, decode=UnitsConfig(kv_blocks=4)
            )
        )
        self.run_id = f"teststaging{os.getpid()}"
        write_run(folder, Run(self.run_id, resolved.deployment))
        self.placement: Placement = first_placement(resolved.deployment, resolved.config, "prefill")
        self.wire = ZmqWire(UNIT, folder)
        self._unread: list[AnyMessage] = []
        self.processes = [
            fork_module(
                "hadal.runtime.unit",
                f"--unit {UNIT} --role prefill --rank {rank} --folder {folder}".split(),
                os.environ,
            )
            for rank in range(2)
        ]

    def form(self) -> None:
        found: dict[int, RankUp] = {}
        while len(found) < 2:  # They repeat themselves.
            up = self.receive(RankUp)
            found[up.rank] = up
        self.ups = [found[0], found[1]]
        members = tuple(Member(up.rank, up.epoch, up.host, up.port) for up in self.ups)
        form = FormPlan(1, 2, members, self.placement.to_bytes(), self.placement.num_expert_slots)
        for rank in range(2):
            self.send(rank, RankForm(form))
        assert {self.receive(RankFormed).formed.error for _ in range(2)} == {None}

    def send(self, rank: int, message: AnyMessage) -> None:
        self.wire.send(f"{UNIT}.{rank}", message)

    def receive(self, kind: type[T]) -> T:
        """Return the next message of this kind; others wait, but for heartbeats, which are dropped."""

        def come() -> bool:
            if any(isinstance(message, kind) for message in self._unread):
                return True
            lasting = RankDone | RankFormed | RankStaged
            self._unread = [m for m in self._unread if isinstance(m, lasting)]
            self._unread += self.wire.receive(0.5)
            return False

        wait_until(come, f"{kind.__name__} comes")
        found = next(message for message in self._unread if isinstance(message, kind))
        self._unread.remove(found)
        return found

    def swapped(self, layer: int) -> Slots:
        """The layer's slots [R, S] with the first ones of both ranks exchanged."""
        slot_to_expert_RS: Slots = self.placement.slot_to_expert_LRS[layer].copy()
        slot_to_expert_RS[:, :NUM_SWAPPED] = slot_to_expert_RS[::-1, :NUM_SWAPPED].copy()
        return slot_to_expert_RS

    def begin_stage(self, rank: int, layer: int) -> None:
        slots_S, other = self.swapped(layer)[rank].tolist(), self.ups[1 - rank]
        sources = tuple(
            Source(expert, other.host, other.expert_port) for expert in slots_S[:NUM_SWAPPED]
        )
        self.send(rank, RankStage(StagePlan(1, 7 + layer, layer, tuple(slots_S), sources)))

    def staged(self) -> Staged:
        return self.receive(RankStaged).staged

    def first_token(self, step_id: int, flips: tuple[LayerFlip, ...] = ()) -> int:
        """What rank 0 draws after the prompt."""
        chunk = Chunk("r", PROMPT, 0, (1,), Sampling(temperature=0.0), 0)
        for rank, chunks in enumerate([(chunk,), ()]):
            self.send(rank, RankStep(1, PrefillPlan(step_id, chunks, flips=flips)))
        dones = {done.rank: done.done for done in (self.receive(RankDone) for _ in range(2))}
        assert [done.error for done in dones.values()] == [None, None]
        return dones[0].tokens[0]

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(DEADLINE_S)
            print(process.stdout.read().decode())
            process.stdout.close()
        self.wire.close()
        remove_shared_memory(self.run_id)


@pytest.fixture
def unit() -> Iterator[Unit]:
    with tempfile.TemporaryDirectory(prefix="hadal-w-") as name:
        made = Unit(Path(name))
        try:
            made.form()
            yield made
        finally:
            made.close()


@pytest.mark.more("tests of the stager and of the wire of experts hold it with one process")
def test_experts_travel_between_ranks_and_come_from_the_checkpoint_when_they_cannot(
    unit: Unit,
) -> None:
    assert all(up.expert_port for up in unit.ups)
    undisturbed = unit.first_token(0)
    for rank in range(2):
        unit.begin_stage(rank, layer=1)
    assert unit.first_token(1) == undisturbed, "while they stage"
    for staged in (unit.staged(), unit.staged()):
        assert (staged.error, staged.num_received, staged.num_read) == (None, NUM_SWAPPED, 0)
    flip = LayerFlip(1, 8, unit.swapped(1).tobytes())
    assert unit.first_token(2, (flip,)) == undisturbed, "they lie elsewhere now"
    assert unit.first_token(3) == undisturbed

    other = unit.processes[1]
    other.send_signal(signal.SIGSTOP)
    unit.begin_stage(0, layer=0)
    staged = unit.staged()
    assert (staged.error, staged.num_received, staged.num_read) == (None, 0, NUM_SWAPPED)
    other.kill()
    other.wait(DEADLINE_S)
    unit.begin_stage(0, layer=2)
    staged = unit.staged()
    assert (staged.error, staged.num_received, staged.num_read) == (None, 0, NUM_SWAPPED)

    unit.processes[0].send_signal(signal.SIGTERM)
    assert unit.processes[0].wait(DEADLINE_S) == 0
