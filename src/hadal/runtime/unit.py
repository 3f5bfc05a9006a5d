"""Process of a unit: its leader (scheduler) with its only rank, its leader alone if the ranks are
separate processes, or one of those ranks.

python -m hadal.runtime.unit --unit decode-0 --role decode [--rank 2] [--device 2] --folder RUN_FOLDER

A leader alone holds no model and needs no torch.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from pathlib import Path

from hadal.core.config import units_of
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.messages.ranks import RankDone
from hadal.core.messages.units import UnitReport
from hadal.core.model_config import read_model_config
from hadal.core.seams import Effect, Event, Send
from hadal.roles.ranks.notes import Routine
from hadal.roles.ranks.ranks import RankedLeader, make_ranked_leader
from hadal.roles.recording import MadeLeader, RecordedRole
from hadal.roles.unit.report import with_overhead
from hadal.runtime.compute import IDLE
from hadal.runtime.host import STEP_DEADLINE_S, SWITCH_INTERVAL_S, UnitHost, run_host
from hadal.runtime.process.clock import LiveClock
from hadal.runtime.process.logs import tell_doing
from hadal.runtime.process.process import Run, enter_unit, new_epoch, unit_arguments
from hadal.runtime.recorder import recorded
from hadal.runtime.side_work import SideParts
from hadal.runtime.store.view import make_view
from hadal.runtime.topology import rank_name
from hadal.runtime.wire import open_wire

log = logging.getLogger("hadal.leader")

_SMOOTHING = 0.1
_WITH_RUNNER = "hadal.runtime.rank.host"
"""Module that only processes with a Runner need: it loads torch."""


def main() -> int:
    """Run the process. Return the exit code: 0 after SIGTERM, EXIT_CONFIG if a restart would not
    help, else EXIT_FATAL.
    """
    asked = unit_arguments(__doc__)
    name = asked.unit if asked.rank is None else rank_name(asked.unit, asked.rank)
    try:
        run = enter_unit(name, asked)
    except ConfigError as error:
        log.critical("%s", error)
        return EXIT_CONFIG
    if asked.rank is None and units_of(run.deployment, asked.role).ranks > 1:
        return run_host(
            lambda: make_host(run, asked.unit, asked.role, asked.folder, asked.epoch_number)
        )
    make = importlib.import_module(_WITH_RUNNER).make_host
    return run_host(
        lambda: make(
            run, asked.unit, asked.role, asked.rank, asked.device, asked.folder, asked.epoch_number
        )
    )


def make_host(
    run: Run, unit: str, role: str, folder: Path, epoch_number: int = 0
) -> tuple[UnitHost, list[Effect]]:
    """Make the leader of several ranks; return its host and first effects. Raises ConfigError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    epoch = new_epoch()
    config = read_model_config(Path(run.deployment.model), run.deployment.accept_config)
    ranked = make_ranked_leader(
        run.deployment, config, unit, role, epoch, fingerprint=run.fingerprint
    )
    made = MadeLeader(role, epoch, run.fingerprint, config)
    leader = Spoken(ranked, recorded(ranked, unit, made, run.run_id, run.deployment))
    gc.collect()
    gc.freeze()  # The current objects stay, so no collection needs to scan them.
    clock = LiveClock()
    tell_doing("waits for its ranks")
    host = UnitHost(
        leader,
        None,
        open_wire(run, unit, folder, epoch_number),
        SideParts(make_view=lambda wake: make_view(run, wake)),
        clock,
        step_deadline_s=STEP_DEADLINE_S,
    )
    return host, leader.start(clock.now())


class Spoken:
    """RankedLeader that logs its notes and adds its ranks' idle time to its reports."""

    def __init__(self, leader: RankedLeader, calls: RecordedRole) -> None:
        """`calls` is called instead of the leader, and may record the calls (runtime/recorder)."""
        self._leader = leader
        self._calls = calls
        self._idle_ms = 0.0

    def start(self, now_s: float) -> list[Effect]:
        return self._calls.start(now_s)

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Handle one event and return the effects, in order."""
        if isinstance(event, RankDone):
            for op_time in event.done.op_times:
                if op_time.op == IDLE:
                    self._idle_ms += _SMOOTHING * (1000.0 * op_time.seconds - self._idle_ms)
        effects = [self._measured(effect) for effect in self._calls.handle(now_s, event)]
        for note in self._leader.take_notes():
            log.log(logging.INFO if isinstance(note, Routine) else logging.WARNING, "%s", note)
        return effects

    def _measured(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.message, UnitReport):
            return Send(effect.to, with_overhead(effect.message, self._idle_ms))
        return effect


if __name__ == "__main__":
    sys.exit(main())
