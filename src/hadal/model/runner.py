"""Runner of one rank: executes step plans on a model, one at a time, and returns the drawn tokens.

Independent of requests and of the wire. A failed step returns its error; the thread goes on, unless
the device's context is lost. In a unit of several ranks all ranks execute every plan together, even
ranks without work. If one rank fails, the formation ends, and further steps fail immediately until
a FormPlan has formed the unit again.
"""

from __future__ import annotations

import logging
import time

import torch

from hadal.core.plans import (
    FLIP,
    NO_LINK_BYTES,
    NO_WAIT,
    Formed,
    FormPlan,
    PrefillPlan,
    StepDone,
    StepPlan,
)
from hadal.model.decode_steps import DecodeSteps
from hadal.model.deepseek import DeepseekV3
from hadal.model.execute import ComputeProgress, Recorder
from hadal.model.membership import Membership, log_failure
from hadal.model.mtp import MtpModule
from hadal.model.prefill_steps import PrefillSteps
from hadal.model.sampler import Sampler
from hadal.tokens.grammars import Grammars

_log = logging.getLogger(__name__)


class ModelRunner:
    """Implementation of core.seams.Runner over a model and its cache. Any thread may call `abort`
    and read `num_ops`, `is_computing` and `lost`.
    """

    def __init__(
        self,
        model: DeepseekV3,
        max_slots: int,
        membership: Membership | None = None,
        num_drafts_max: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        """`max_slots`: slots of a decode step, and chunks of a prefill step that draw a token.

        `membership`: None for a single rank; its comm is the model's. `num_drafts_max`: most drafts
        of a slot in a step; if not 0, `model` must have its MTP module and the cache a layer for
        it. `grammars`: None refuses requests with a grammar.
        """
        self._model = model
        self._membership = membership
        module = MtpModule(model) if num_drafts_max else None
        vocab_size, device = model.config.vocab_size, model.cache.cache_PLSD.device

        def new_sampler() -> Sampler:
            return Sampler(max_slots, vocab_size, device, grammars)

        # Prefill and decode have separate samplers, because their slot numbers differ in meaning.
        self._prefill = PrefillSteps(model, max_slots, module, new_sampler)
        self._decode = DecodeSteps(
            model,
            max_slots,
            module,
            num_drafts_max,
            new_sampler,
            has_peers=membership is not None,
        )
        self._progress = ComputeProgress()
        self._is_stepping = False

    def execute(self, plan: StepPlan | FormPlan) -> StepDone | Formed:
        """Run a step or a FormPlan. After an error the leader returns all requests of the step to
        the router, otherwise only those in `failed`. Raises AcceleratorError if the device's
        context is lost during a step.
        """
        if isinstance(plan, FormPlan):
            return self._form(plan)
        start_s = time.perf_counter()
        recorder = Recorder(
            self._progress,
            rank=0 if self._membership is None else self._membership.rank,
            is_traced=plan.is_traced,
        )
        self._is_stepping = True
        try:
            if self._membership is not None:
                self._membership.check()
            self._flip(plan, recorder)
            run = (
                self._prefill.run(plan, recorder)
                if isinstance(plan, PrefillPlan)
                else self._decode.run(plan, recorder)
            )
            keys, drawn = run
        except torch.AcceleratorError:
            # The device's context and memory are lost; only a new process gets a new context.
            raise
        except Exception as error:
            log_failure(f"step {plan.step_id} failed", error)
            if self._membership is not None:
                self._membership.note_lost(error)
            elapsed_s = time.perf_counter() - start_s
            return StepDone(plan.step_id, (), (), {}, elapsed_s, f"{type(error).__name__}: {error}")
        finally:
            self._is_stepping = self._progress.is_waiting = False
        for reason in drawn.failed.values():
            _log.error("a request of step %d cannot continue: %s", plan.step_id, reason)
        elapsed_s = time.perf_counter() - start_s
        return StepDone(
            plan.step_id,
            tuple(keys),
            tuple(drawn.tokens.tolist()),
            drawn.draws,
            elapsed_s,
            failed=drawn.failed,
            scores=drawn.scores,
            drafts=drawn.drafts,
            op_times=recorder.op_times(),
            events=tuple(recorder.events),
            expert_slot_counts=self._expert_slot_counts(plan),
            link_bytes=NO_LINK_BYTES
            if self._model.comm is None
            else self._model.comm.take_link_bytes(),
            waited=NO_WAIT if self._membership is None else self._membership.take_waits(),
        )

    def abort(self) -> None:
        """End the current formation. Does nothing for a single rank, which never waits for peers."""
        if self._membership is not None:
            self._membership.abort()

    def close(self) -> None:
        if self._membership is not None:
            self._membership.close()

    @property
    def num_ops(self) -> int:
        """Number of ops begun since the process started."""
        return self._progress.num_ops

    @property
    def is_computing(self) -> bool:
        """True if a step runs and does not wait for a peer, so that `num_ops` must grow."""
        return self._is_stepping and not self._progress.is_waiting

    @property
    def lost(self) -> tuple[int, ...]:
        """Peers that caused the last failure or have a broken connection."""
        return () if self._membership is None else self._membership.lost

    def _form(self, plan: FormPlan) -> Formed:
        assert self._membership is not None, "a rank by itself has no peers to form with"
        self._decode.restart()
        self._prefill.restart()
        return self._membership.form(plan, self._model)

    def _flip(self, plan: StepPlan, recorder: Recorder) -> None:
        for flip in plan.flips:
            if self._membership is None:
                raise ValueError(
                    f"layer {flip.layer} flips, but a rank by itself holds every expert"
                )
            recorder.begin(FLIP)
            self._membership.flip(flip, self._model)
            recorder.end(FLIP)

    def _expert_slot_counts(self, plan: StepPlan) -> bytes:
        comm = self._model.comm
        return comm.take_counts().numpy().tobytes() if plan.is_counted and comm is not None else b""
