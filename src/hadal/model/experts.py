"""Routed experts of a rank: the replica in each expert slot, replaced in all layers together or
layer by layer.

A layer's replicas are one immutable record; a layer changes by replacing its record. `install`
replaces the records of all layers when the unit forms with a new placement. `stage` builds one
layer's record in another thread while steps run, and `flip` swaps it in between two steps:

    background   | stage: reuse unchanged, fetch or read new replicas |                   | the next stage frees the old
    compute       step  step  step  step  step  step  step  step  step  | flip | step  step

Independent of tokens; ranks occur only as sources in a Fetch and as rows of a flip. A record holds
references: unchanged replicas are not copied. Replicas from the checkpoint are mapped from its
files if weights are held in their stored format. Replicas from a peer need extra memory: the old
ones are freed only when the next layer is staged.

Shapes: L MoE layers, R ranks, S expert slots.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hadal.core.errors import HadalError, InvariantError
from hadal.core.model_config import ModelConfig
from hadal.core.placement import EMPTY, flip_arrays
from hadal.core.plans import LayerFlip, Source, Staged, StagePlan
from hadal.kernels.weights import describe
from hadal.model.checkpoint import Checkpoint
from hadal.model.load import AS_FP32, Conversion, read_expert
from hadal.reference.params import Experts, MlpWeights, ModelWeights

_log = logging.getLogger(__name__)
Bring = Callable[[int], MlpWeights]
"""Expert -> its weights."""
Fetch = Callable[[int, Source, MlpWeights], bool]
"""(MoE layer, source, weights to fill) -> False if the source did not provide the expert."""


class Overtaken(HadalError):
    """Error of a cancelled stage: the unit formed again meanwhile, or the process ends."""


@dataclass(frozen=True, slots=True)
class _HeldLayer:
    """Record of a layer's replicas."""

    slot_to_expert: tuple[int, ...]
    experts: Experts
    expert_to_slot: dict[int, int]

    @classmethod
    def of(cls, slots: Iterable[int], experts: Experts) -> _HeldLayer:
        slots = tuple(slots)
        if len(slots) != len(experts):
            raise ValueError(f"{len(slots)} slots for the weights of {len(experts)} experts.")
        filled = {expert: slot for slot, expert in enumerate(slots) if expert != EMPTY}
        # Register the weights with the kernels here, where no step waits: that takes 4 ms for 256
        # experts, which would otherwise inflate the measured time of the first step.
        describe(experts)
        return cls(slots, experts, filled)

    def weights(self, expert: int) -> MlpWeights | None:
        """Return an expert's weights; None if it has no slot here."""
        slot = self.expert_to_slot.get(expert)
        return None if slot is None else self.experts[slot]


class ExpertStore:
    """Experts of one rank. `install` and `flip` are called by the computing thread, `stage` by one
    background thread, and `expert` by any thread.
    """

    def __init__(
        self,
        folder: Path,
        weights: ModelWeights,
        slot_to_expert_LS: NDArray[np.int16] | None = None,
        held: Conversion = AS_FP32,
    ) -> None:
        """`weights` were loaded from `folder` with `slot_to_expert_LS` (None: all experts, in
        order) and the conversion `held`, which also applies to experts read later.
        """
        self._open = functools.partial(_ExpertReader, folder, weights.config, held)
        self._config = config = weights.config
        moes = [layer.moe for layer in weights.layers if layer.moe is not None]
        module = None if weights.mtp is None else weights.mtp.layer.moe
        # The module's experts move like a layer's, unless `slot_to_expert_LS` lacks a layer for it.
        is_without_module = slot_to_expert_LS is not None and len(slot_to_expert_LS) == len(moes)
        if module is not None and module.experts and not is_without_module:
            moes.append(module)
        all_LS = np.tile(np.arange(config.n_routed_experts, dtype=np.int16), (len(moes), 1))
        slots = (all_LS if slot_to_expert_LS is None else slot_to_expert_LS).tolist()
        self._held = [
            _HeldLayer.of(layer_slots, moe.experts)
            for layer_slots, moe in zip(slots, moes, strict=True)
        ]
        self._lock = threading.Lock()
        """Lock for changes of the next three fields. `_held` needs none: a record is read or
        replaced as one reference.
        """
        self._formation = 0
        self._staged: dict[int, tuple[int, _HeldLayer]] = {}
        """Layer -> (stage id, record). At most one entry: the leader changes one layer at a time,
        and the memory plan has no space for abandoned records.
        """
        self._let_go: list[_HeldLayer] = []
        """Records replaced by flips. The next stage frees them: in a flip that would take too long.
        """

    def expert(self, layer: int, expert: int) -> MlpWeights | None:
        """Return an expert's weights, which are never written again; None if this rank has no
        replica or the layer does not exist. Callable from any thread.
        """
        return self._held[layer].weights(expert) if 0 <= layer < len(self._held) else None

    def install(
        self, weights: ModelWeights, slot_to_expert_LS: NDArray[np.int16], formation: int
    ) -> tuple[ModelWeights, int]:
        """Return the weights with these experts in their slots, and the number of replicas read.
        Unchanged layers cost nothing. Discards staged records and makes stages of other formations
        fail. Raises ValueError for another number of layers, and CheckpointError; the old weights
        stay in force then.
        """
        with self._lock:
            self._formation = formation
            self._staged.clear()
            self._let_go.clear()
        if len(slot_to_expert_LS) != len(self._held):
            raise ValueError(
                f"a placement of {len(slot_to_expert_LS)} MoE layers; the model has {len(self._held)}."
            )
        records = []
        with self._open() as reader:
            for layer, (held, slots) in enumerate(
                zip(self._held, slot_to_expert_LS.tolist(), strict=True)
            ):
                records.append(
                    held
                    if held.slot_to_expert == tuple(slots)
                    else _arrange(held, slots, reader.of_layer(layer))
                )
        self._held = records
        return self._with_records(weights, range(len(records))), reader.num_read

    def stage(
        self, plan: StagePlan, fetch: Fetch, rest: Callable[[], None] = lambda: None
    ) -> Staged:
        """Build the layer's record for a later flip. Experts that no peer provides are read from
        the checkpoint. `rest` is called before each new expert: it may wait, and may raise
        Overtaken. Errors are returned in `Staged.error`, except AcceleratorError, which is
        raised; the layer's current record stays in force.
        """
        start_s = time.perf_counter()
        num_received = 0

        def bring(expert: int) -> MlpWeights:
            nonlocal num_received
            source = sources.get(expert)
            if source is not None and source.port and (like := self._any_expert()) is not None:
                received = like.empty_like()
                if fetch(plan.layer, source, received):
                    num_received += 1
                    return received
            return read(expert)

        def between() -> None:
            self._check(plan)
            rest()

        try:
            with self._open() as reader:
                held = self._begin(plan)
                sources, read = (
                    {source.expert: source for source in plan.sources},
                    reader.of_layer(plan.layer),
                )
                self._keep(plan, _arrange(held, plan.slot_to_expert, bring, between))
        except torch.AcceleratorError:
            raise  # The device's context is lost, so the process must end.
        except Exception as failure:
            level = logging.DEBUG if isinstance(failure, Overtaken) else logging.WARNING
            is_bug = not isinstance(failure, HadalError)
            _log.log(level, "layer %d was not staged: %s", plan.layer, failure, exc_info=is_bug)
            error = f"{type(failure).__name__}: {failure}"
            return Staged(
                plan.formation,
                plan.stage_id,
                plan.layer,
                error,
                elapsed_s=time.perf_counter() - start_s,
            )
        return Staged(
            plan.formation,
            plan.stage_id,
            plan.layer,
            None,
            num_received,
            reader.num_read,
            time.perf_counter() - start_s,
        )

    def flip(self, weights: ModelWeights, flip: LayerFlip, rank: int) -> ModelWeights:
        """Replace a layer's record by the staged one, unless its slots are already those of the
        flip, and return the new weights. Raises InvariantError if the slots differ and were not
        staged under the flip's id, and ValueError if the flip does not fit the model; weights and
        store are unchanged then.
        """
        held = self._layer(flip.layer)
        slot_to_expert_RS, _ = flip_arrays(flip, len(held.slot_to_expert))
        slots = tuple(slot_to_expert_RS[rank].tolist())
        if slots == held.slot_to_expert:
            return weights
        with self._lock:
            stage_id, record = self._staged.get(flip.layer, (None, None))
            if record is None or (stage_id, record.slot_to_expert) != (flip.stage_id, slots):
                raise InvariantError(
                    f"layer {flip.layer} is to flip to stage {flip.stage_id}; staged is {stage_id}"
                    + (", with other slots." if stage_id == flip.stage_id else ".")
                )
            del self._staged[flip.layer]
            self._let_go.append(held)
        self._held[flip.layer] = record
        return self._with_records(weights, (flip.layer,))

    def _any_expert(self) -> MlpWeights | None:
        """Return any expert of this rank, as a template of the storage format; None if there is
        none.
        """
        slots = (mlp for held in self._held for mlp in held.experts.slots)
        return next((mlp for mlp in slots if mlp is not None), None)

    def _layer(self, layer: int) -> _HeldLayer:
        if not 0 <= layer < len(self._held):
            raise ValueError(f"there is no MoE layer {layer}; the model has {len(self._held)}.")
        return self._held[layer]

    def _with_records(self, weights: ModelWeights, changed: Iterable[int]) -> ModelWeights:
        mtp = weights.mtp
        layers = [*weights.layers, *(() if mtp is None else (mtp.layer,))]
        for layer in changed:
            index, held = self._config.first_k_dense_replace + layer, self._held[layer]
            moe = layers[index].moe
            assert moe is not None
            if moe.experts is not held.experts:
                layers[index] = replace(layers[index], moe=replace(moe, experts=held.experts))
        if mtp is not None:
            mtp = replace(mtp, layer=layers.pop())
        return replace(weights, layers=tuple(layers), mtp=mtp)

    def _begin(self, plan: StagePlan) -> _HeldLayer:
        """Free replaced and staged records; return the layer's current record. Raises ValueError if
        the plan does not fit this rank or model, and Overtaken if its formation is over.
        """
        held = self._layer(plan.layer)
        if len(plan.slot_to_expert) != len(held.slot_to_expert):
            raise ValueError(
                f"{len(plan.slot_to_expert)} slots to stage; this rank has {len(held.slot_to_expert)}."
            )
        strange = [
            e
            for e in plan.slot_to_expert
            if e != EMPTY and not 0 <= e < self._config.n_routed_experts
        ]
        if strange:
            raise ValueError(f"the model has no experts {strange[:8]}.")
        self._check(plan)
        with self._lock:
            # Both are freed on return, after the lock is released: a flip may wait for the lock.
            _let_go, self._let_go = self._let_go, []
            _older, self._staged = self._staged, {}
        return held

    def _check(self, plan: StagePlan) -> None:
        if plan.formation != self._formation:
            raise Overtaken(f"staged for formation {plan.formation}; it is {self._formation} now.")

    def _keep(self, plan: StagePlan, record: _HeldLayer) -> None:
        with self._lock:
            self._check(plan)
            self._staged[plan.layer] = (plan.stage_id, record)


def _arrange(
    held: _HeldLayer, slots: Iterable[int], bring: Bring, between: Callable[[], None] = lambda: None
) -> _HeldLayer:
    """Make a layer's record: reuse replicas in `held`, and get each other expert with `between()`,
    then `bring(expert)`. An expert in several slots is in memory once.
    """
    slots = tuple(slots)
    found: dict[int, MlpWeights | None] = {EMPTY: None}
    for expert in slots:
        if expert not in found:
            found[expert] = held.weights(expert)
            if found[expert] is None:
                between()
                found[expert] = bring(expert)
    return _HeldLayer.of(slots, Experts(tuple(found[expert] for expert in slots)))


class _ExpertReader:
    """Reader of experts from the checkpoint, which the first read opens. Raises CheckpointError."""

    def __init__(self, folder: Path, config: ModelConfig, held: Conversion) -> None:
        self.num_read = 0
        self._as_held = held
        self._folder = folder
        self._config = config
        self._checkpoint: Checkpoint | None = None
        self._stack = ExitStack()

    def __enter__(self) -> _ExpertReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of_layer(self, layer: int) -> Bring:
        def read(expert: int) -> MlpWeights:
            if self._checkpoint is None:
                self._checkpoint = self._stack.enter_context(
                    Checkpoint(
                        self._folder, self._config.weight_block_size, self._config.scale_names
                    )
                )
            index = self._config.first_k_dense_replace + layer
            self.num_read += 1
            return read_expert(self._checkpoint, self._config, index, expert, self._as_held)

        return read
