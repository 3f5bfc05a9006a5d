"""A pretend GPU: its tensors report cuda:0 as their device, and the CPU computes them.

Every call of torch passes through `_call`, on every thread. If tensors of two devices meet, or a
GPU tensor becomes a numpy array, it raises CUDA's error; the CPU computes all other calls. Streams
and events are replaced: work is done when it is queued. NCCL is replaced by a barrier of threads,
one thread per rank.

Detects code that mixes devices. Does not show times, races, synchronisation or CUDA's kernels.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hadal.reference import fp8 as codec
from tests.waiting import DEADLINE_S

DEVICE = torch.device("cuda:0")
_CPU = torch.device("cpu")


class PretendTensor(Tensor):
    """A tensor of the pretend GPU."""

    real: Tensor
    """CPU tensor with the same memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, dict(kwargs or {}))

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is freed once it has no references."""


class _Mode(TorchFunctionMode):
    """Mode that catches calls without a GPU tensor as argument, such as `torch.zeros(3, device="cuda")`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, dict(kwargs or {}))


def _pretend(real: Tensor) -> PretendTensor:
    made: PretendTensor = Tensor._make_subclass(PretendTensor, real)  # type: ignore[attr-defined]
    made.real = real
    return made


def _real(tensor: Tensor) -> Tensor:
    return tensor.real if isinstance(tensor, PretendTensor) else tensor


def _is_on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, PretendTensor)


def _is_gpu(device: Any) -> bool:
    """Return whether this names the GPU. Raises RuntimeError if it names a second one."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal")
    return bool(device.type == "cuda")


def _unwrapped(values: Sequence[Any], found: list[Tensor]) -> list[Any]:
    """Return the values with the CPU's tensor in place of each GPU tensor; add all tensors to `found`."""
    real: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
            value = _real(value)
        elif type(value) in (tuple, list):
            value = type(value)(_unwrapped(value, found))
        real.append(value)
    return real


def _wrapped(result: Any, given: dict[int, Tensor]) -> Any:
    """Return the result with its tensors on the GPU; input tensors in it are the original objects."""
    if isinstance(result, Tensor):
        return given[id(result)] if id(result) in given else _pretend(result)
    if isinstance(result, tuple | list) and not isinstance(result, torch.Size):
        return type(result)([_wrapped(part, given) for part in result])
    return result


def _call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch with CUDA's rules on devices."""
    special = _SPECIAL.get(func)
    if special is not None and args and isinstance(args[0], Tensor):
        return special(*args, **kwargs)
    tensors: list[Tensor] = []
    real_args = _unwrapped(args, tensors)
    if kwargs:
        kwargs = dict(zip(kwargs, _unwrapped(list(kwargs.values()), tensors), strict=True))
        if kwargs.get("pin_memory"):
            del kwargs["pin_memory"]
    given = {id(tensor.real): tensor for tensor in tensors if isinstance(tensor, PretendTensor)}
    is_made_on_gpu = bool(given)
    if is_made_on_gpu and not all(map(_is_on_gpu, tensors)):
        _check(func.__name__, args, tensors)
    if kwargs.get("device") is not None:
        is_made_on_gpu = _is_gpu(kwargs["device"])
        kwargs["device"] = _CPU
    result = func(*real_args, **kwargs)
    if not is_made_on_gpu:
        return result
    if func in (torch.as_tensor, torch.asarray):
        result = result.clone()  # The result may share CPU memory.
    return _wrapped(result, given)


# Rules on tensors of two devices in one call.


def _check(name: str, args: Sequence[Any], tensors: list[Tensor]) -> None:
    """Raise RuntimeError if a call may not mix these tensors."""
    if name in ("copy_", "set_"):
        return
    first = tensors[0]
    if name in ("__getitem__", "__setitem__"):
        index = args[1]
        if not _is_on_gpu(first) and _has_gpu(index):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if name == "__getitem__" or not _is_list(index):
            return  # An index may lie on the CPU, and slice assignment copies.
        tensors = [first, *(part for part in args[2:] if isinstance(part, Tensor))]
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
    # A CPU scalar is passed with a kernel's arguments.
    is_from_cpu = any(
        not _is_on_gpu(x) and (x.dim() or (is_in_place and x is first)) for x in tensors
    )
    if is_from_cpu and any(map(_is_on_gpu, tensors)):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" cuda:0 and cpu! (when calling {name})"
        )


def _has_gpu(index: Any) -> bool:
    """Return whether part of an index lies on the GPU."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(map(_is_on_gpu, parts))


def _is_list(index: Any) -> bool:
    """Return whether an index lists positions, instead of a slice."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | np.ndarray | list) for part in parts)


def _to(own: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    rest, device = list(args), kwargs.pop("device", None)
    if rest and isinstance(rest[0], Tensor):
        device, rest[0] = DEVICE if _is_on_gpu(rest[0]) else _CPU, rest[0].dtype
    elif rest and isinstance(rest[0], str | torch.device | int):
        device = rest.pop(0)
    is_to_gpu = _is_on_gpu(own) if device is None else _is_gpu(device)
    real = _real(own)
    result = real.to(*rest, **kwargs) if rest or kwargs else real
    if is_to_gpu == _is_on_gpu(own):
        return own if result is real else _pretend(result) if is_to_gpu else result
    result = result.clone() if result is real else result
    return _pretend(result) if is_to_gpu else result


def _numpy(own: Tensor, **kwargs: Any) -> Any:
    _check_array(own)
    return own.numpy(**kwargs)


def _array(own: Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_array(own)
    return own.__array__(*args, **kwargs)


def _check_array(own: Tensor) -> None:
    """Raise TypeError if a GPU tensor would become a numpy array."""
    if _is_on_gpu(own):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor"
            " to host memory first."
        )


_SPECIAL: dict[Any, Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.cpu: lambda own, *_, **__: _to(own, "cpu"),
    Tensor.cuda: lambda own, *_, **__: _to(own, "cuda"),
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.is_pinned: lambda own, *_: False,
    Tensor.get_device: lambda own: 0 if _is_on_gpu(own) else -1,
    Tensor.device.__get__: lambda own, *_: DEVICE if _is_on_gpu(own) else _CPU,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda own, *_: _is_on_gpu(own),  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda own, *_: not _is_on_gpu(own),  # type: ignore[attr-defined]
}


# Streams, events and NCCL.


class _Stream:
    """A stream or an event. Work is done when it is queued, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = DEVICE

    def query(self) -> bool:
        return True

    def nothing(self, *args: Any) -> None:
        return

    record = wait = synchronize = wait_stream = wait_event = nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()


@contextmanager
def _on_stream(stream: _Stream) -> Iterator[None]:
    yield


class _Meeting:
    """One NCCL communicator."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)
        self.sent: dict[tuple[int, int], Tensor] = {}
        """(sender, receiver) -> the rows between them."""


class PretendNccl:
    """NCCL's part of `torch.distributed`, for ranks that are threads. A thread has one group."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._meetings: list[_Meeting] = []

    def init_process_group(
        self, backend: str, *, store: Any, rank: int, world_size: int, **kwargs: Any
    ) -> None:
        assert (backend, kwargs["device_id"]) == ("nccl", DEVICE)
        if rank == 0:
            self._meetings.append(_Meeting(world_size))
            store.set("meeting", str(len(self._meetings) - 1))
        self._of_thread.group = self._meetings[int(store.get("meeting"))], rank

    def is_initialized(self) -> bool:
        return hasattr(self._of_thread, "group")

    def destroy_process_group(self) -> None:
        del self._of_thread.group

    def abort(self) -> None:
        self._of_thread.group[0].barrier.abort()

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
    ) -> None:
        """See torch.distributed. Raises BrokenBarrierError if a rank is missing or aborts."""
        assert output.is_cuda
        assert input.is_cuda
        meeting, rank = self._of_thread.group
        num_ranks = meeting.barrier.parties
        sizes = input_split_sizes or [len(input) // num_ranks] * num_ranks
        for peer, part in enumerate(torch.split(input, sizes)):
            meeting.sent[rank, peer] = part.clone()
        meeting.barrier.wait()
        arrived = [meeting.sent[peer, rank] for peer in range(num_ranks)]
        meeting.barrier.wait()
        if output_split_sizes is not None:
            assert [len(part) for part in arrived] == output_split_sizes
        output.copy_(torch.cat(arrived))


def on_gpu(value: Any) -> Any:
    """Return a model's weights with each tensor on the pretend GPU."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        return tuple(on_gpu(part) for part in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value)]
    return dataclasses.replace(value, **{name: on_gpu(getattr(value, name)) for name in names})


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Give torch the pretend GPU, in this thread and in threads started within the block."""
    run_thread = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Mode():
            run_thread(thread)

    nccl = PretendNccl()
    stream = _Stream()
    replaced = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda *_: None,
            "Stream": _Stream,
            "Event": _Stream,
            "stream": _on_stream,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0),
        },
        dist: {
            "init_process_group": nccl.init_process_group,
            "is_initialized": nccl.is_initialized,
            "destroy_process_group": nccl.destroy_process_group,
            "all_to_all_single": nccl.all_to_all_single,
        },
        dist.distributed_c10d: {"_abort_process_group": nccl.abort},
        threading.Thread: {"run": run},
    }
    with pytest.MonkeyPatch.context() as patch, _Mode():
        for owner, attributes in replaced.items():
            for name, value in attributes.items():
                patch.setattr(owner, name, value)
        try:
            yield
        finally:
            codec.e4m3_values.cache_clear()  # A pretend GPU's table must not reach a real one.
