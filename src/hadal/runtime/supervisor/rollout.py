"""The fleet of a run, and its rollouts, which replace all units by ones of another model or code.

Owns the fleet and the progress of the last rollout. The fleet's role (roles/fleet) decides which
units to start and stop; runtime/fleet does it.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import msgspec

from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.fleet import Demand, Rollout
from hadal.core.messages.units import UnitUp
from hadal.roles.fleet.fleet import make_fleet
from hadal.roles.recording import MadeFleet
from hadal.runtime.fleet import FleetExecutor
from hadal.runtime.process.child import Child
from hadal.runtime.process.process import messages_digest, rollout_arguments
from hadal.runtime.process.status import RolloutStatus
from hadal.runtime.recorder import recorded
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.run_files import RunFiles
from hadal.runtime.supervisor.starter import Starter
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")


class Rollouts:
    """Rollouts and fleet of a run, from when all running processes are known until it drains."""

    def __init__(
        self,
        files: RunFiles,
        wire: ZmqWire,
        children: Children,
        starter: Starter,
        status: StatusWriter,
        end: RunEnd,
    ) -> None:
        self._files = files
        self._wire = wire
        self._children = children
        self._starter = starter
        self._status = status
        self._end = end
        self._fleet: FleetExecutor | None = None
        self._num_reviews = 0
        """Number of the fleet's decisions when fleet.json was written last."""
        self._rollout: RolloutStatus | None = None
        self._last_rollout = Rollout()

    def make_fleet_if_due(self) -> None:
        """Make the fleet once all running processes are known."""
        is_due = self._children.is_known and not self._end.is_draining
        if is_due and self._fleet is None and self._files.run.deployment.fleet.is_on:
            self._fleet = self._make_fleet()

    def _make_fleet(self) -> FleetExecutor:
        now_s, run = time.monotonic(), self._files.run
        made = MadeFleet(time.time() - now_s)
        fleet = make_fleet(run.deployment, made.day_s)
        calls = recorded(fleet, SUPERVISOR, made, run.run_id, run.deployment)
        return FleetExecutor(fleet, calls, self._children.by_name, self._wire.send, now_s)

    def stop(self) -> None:
        """End the fleet, so that it decides nothing any more."""
        self._fleet = None

    def tell(self, message: Demand | UnitUp) -> None:
        """Pass a message to the fleet, if the run has a fleet."""
        if self._fleet is not None:
            self._fleet.tell(time.monotonic(), message)

    def ended(self, child: Child, now_s: float, reason: str) -> bool:
        """Report a unit's end to the fleet. Return True if the process was asked to end."""
        if self._fleet is None:
            return False
        if child.name in self._fleet.units:
            return self._fleet.ended(now_s, child.name, reason)
        return not child.is_wanted

    def has_unit(self, unit: str) -> bool:
        """Return True if there is a fleet with this unit."""
        return self._fleet is not None and unit in self._fleet.units

    def has_other(self, unit: str) -> bool:
        """Return True if another unit of the same role is ready."""
        return self._fleet is not None and self._fleet.has_other(unit)

    def look(self) -> None:
        """Let the fleet decide, and update the progress of the rollout."""
        if self._fleet is None:
            return
        self._fleet.tick(time.monotonic())
        if self._fleet.num_reviews != self._num_reviews:
            self._num_reviews = self._fleet.num_reviews
            self._files.write_fleet(self._fleet.seen(time.monotonic()))
        self._look_at_rollout(self._fleet)

    def roll_out(self, message: Rollout) -> None:
        """Begin to replace all units, including units that an earlier rollout has not replaced yet.
        From now on there is a fleet, even if the number of units is fixed.
        """
        now_s = time.monotonic()
        if self._end.is_draining:
            return
        if self._fleet is None:
            self._fleet = self._make_fleet()
        if not message.model:
            message = self._last_rollout  # Keep the model of the last rollout.
        try:
            self._files.replace_run(dataclasses.replace(self._files.run, rollout=message))
        except OSError as error:
            folder = self._files.folder
            log.error("the rollout was not begun: %s cannot be written to (%s)", folder, error)
            return
        self._last_rollout = message
        self._starter.renew_code()
        number = self._rollout.number + 1 if self._rollout is not None else 1
        model = message.model or self._files.run.deployment.model
        log.info("replacing all units with units that serve %s", model)
        self._fleet.roll_out(now_s, message, rollout_arguments(message, messages_digest()))
        num_left = self._fleet.num_unreplaced
        self._rollout = RolloutStatus(number, model, num_left, num_left)
        self._status.show_rollout(self._rollout)

    def resume_if_due(self) -> None:
        """Resume the rollout of an earlier supervisor, once all running processes are known."""
        begun = self._files.run.rollout if self._rollout is None else None
        if begun is not None and self._children.is_known and not self._end.is_draining:
            log.info("resuming the rollout of the previous supervisor")
            self.roll_out(begun)

    def _look_at_rollout(self, fleet: FleetExecutor) -> None:
        """Update the progress of the rollout, and end it after the last unit."""
        if self._rollout is None or not self._rollout.num_left:
            return
        num_left, num_failed = fleet.num_unreplaced, fleet.num_failed
        if (num_left, num_failed) == (self._rollout.num_left, self._rollout.num_failed):
            return
        self._rollout = dataclasses.replace(self._rollout, num_left=num_left, num_failed=num_failed)
        if not num_left:
            self._end_rollout()
        self._status.show_rollout(self._rollout)

    def _end_rollout(self) -> None:
        """Change the run to the model that the new units serve."""
        new = self._last_rollout
        run = dataclasses.replace(self._files.run, rollout=None)
        if new.model:
            run = dataclasses.replace(
                run,
                deployment=msgspec.structs.replace(run.deployment, model=new.model),
                model_digest=new.model_digest,
                fingerprint=new.fingerprint,
            )
        self._files.change_run(run)
