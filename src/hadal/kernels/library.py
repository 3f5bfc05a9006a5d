"""Compiled kernels as Python uses them: loading, thread teams, checks, errors.

Depends on the C ABI of cpu/api.cpp, not on models. Uses the best instruction set of the processor,
or the one in `HADAL_KERNELS`. Where there is no library (no compiler, `HADAL_KERNELS=plain`), the
reason is logged once and every op runs its plain torch twin. Calls release the GIL. A team's
threads do not survive a fork: a process that has used the kernels must not fork children that do.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hadal.kernels.build import PLAIN, BuildError, OnElapsed, build, check_asked, instruction_set
from hadal.reference.params import Matrix

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_teams: dict[int, int] = {}
_on_elapsed: list[OnElapsed] = []
"""Callbacks during a compilation; empty in processes that report no start-up progress."""
_STATUS = {
    1: "a token id is outside the vocabulary",
    2: "a position or length is negative or beyond the model's last position",
    3: "a block table names a block that the cache does not have, or is too short for its length",
    4: "an expert id is out of range, or the expert has no replica",
    6: "a row or slot is out of range, or a slot appears twice",
    7: "a row cannot draft at a position without an earlier one to attend to",
}
_OUT_OF_MEMORY = 5


# One letter per argument of a C function: p pointer, i int32, l int64, f float.
_ABI = {
    "hadal_team_new": ("i", ctypes.c_void_p),
    "hadal_team_thread": ("pi", ctypes.c_int64),
    "hadal_team_pinned": ("pi", None),
    "hadal_linear": ("ppiipip", ctypes.c_int),
    "hadal_experts": ("ppiipiippip", ctypes.c_int),
    "hadal_rms_norm": ("ppiipfp", ctypes.c_int),
    "hadal_gate": ("ppiipiiiifpp", ctypes.c_int),
    "hadal_mla_decode": ("pppiiii" + "piiiiplp" + "piifp", ctypes.c_int),
    "hadal_select_positions": ("pppiii" + "piiiiplp" + "iip", ctypes.c_int),
    "hadal_encode": ("ppiipiipl", ctypes.c_int),
    "hadal_decode": ("ppliiip", ctypes.c_int),
    "hadal_weighted_sum": ("ppiiipppiip", ctypes.c_int),
    "hadal_route": ("p" * 12, ctypes.c_int),
    "hadal_pack": ("p" * 12, ctypes.c_int),
    "hadal_unpack": ("p" * 11, ctypes.c_int),
    "hadal_heads_in": ("ppll" + "iiipiiip", ctypes.c_int),
    "hadal_heads_out": ("ppiiipiiip", ctypes.c_int),
    "hadal_sample": ("ppliii" + "ppppippp" + "pp" + "ippppp", ctypes.c_int),
    "hadal_step_new": ("pppp", ctypes.c_void_p),
    "hadal_step_free": ("p", None),
    "hadal_step_run": ("pppiipppl" + "ppp", ctypes.c_int),
    "hadal_note": ("pi" + "ppppip", ctypes.c_int),
    "hadal_draft": ("ppppii" + "ppppl" + "pp", ctypes.c_int),
    "hadal_isa": ("", ctypes.c_char_p),
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


class _Tell:
    """Callback that logs the first call, and forwards the elapsed time to `_on_elapsed`."""

    _is_logged = False

    def __call__(self, elapsed_s: float) -> None:
        if not self._is_logged:
            self._is_logged = True
            _log.info(
                "the kernels are being compiled for this machine; this is done once and takes about"
                " 30 s of one core"
            )
        for on_elapsed in _on_elapsed:
            on_elapsed(elapsed_s)


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """Return the library; None if plain torch is requested, or if the library cannot be built or
    is not of the requested instruction set.
    """
    try:
        if instruction_set() == PLAIN:
            _log.info("HADAL_KERNELS=plain: every op runs in plain torch")
            return None
        library = ctypes.CDLL(str(build(_Tell())))
        _declare(library)
        check_asked(library.hadal_isa().decode())
    except (BuildError, OSError) as error:
        _log.warning(
            "there are no CPU kernels, and every op runs in plain torch, slower: %s", error
        )
        return None
    return library


def _declare(library: ctypes.CDLL) -> None:
    for name, (arguments, result) in _ABI.items():
        function = getattr(library, name)
        function.argtypes = [_TYPES[letter] for letter in arguments]
        function.restype = result


def prepare(on_elapsed: OnElapsed) -> None:
    """Load the library at the start of a process. `on_elapsed` is called repeatedly with
    the seconds so far while the library is compiled, here or by another process.
    """
    _on_elapsed[:] = [on_elapsed]
    load()


def isa() -> str:
    """Return the instruction set of the kernels: amx, avx512, avx2, generic, or plain without kernels."""
    library = load()
    return library.hadal_isa().decode() if library is not None else "plain"


def team(num_threads: int | None = None) -> int:
    """Return the handle of the team of `num_threads` (None: as torch has), started on first use."""
    library = load()
    assert library is not None, "ask load() first"
    count = torch.get_num_threads() if num_threads is None else num_threads
    if count < 1:
        raise ValueError(f"num_threads is {count}; it must be positive.")
    handle = _teams.get(count)
    if handle is None:
        with _lock:
            handle = _teams.get(count) or library.hadal_team_new(count)
            if not handle:
                raise RuntimeError(f"{count} threads could not be started.")
            _teams[count] = handle
    return handle


class KernelTeam:
    """Team with torch's number of threads, in the form that runtime/pinning expects."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._handle = library, team()
        count = range(1, torch.get_num_threads())
        self.threads = tuple(library.hadal_team_thread(self._handle, index) for index in count)

    def set_pinned(self, is_pinned: bool) -> None:
        self._library.hadal_team_pinned(self._handle, is_pinned)


def kernel_team() -> KernelTeam | None:
    """Return the team that the calling thread computes with; None without kernels."""
    library = load()
    return None if library is None else KernelTeam(library)


def fits(*tensors: Tensor) -> bool:
    """Return True if the kernels can read all tensors: FP32, on the CPU, contiguous."""
    return all(
        x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors
    )


def check_shape(name: str, tensor: Tensor | Matrix, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has this shape: C++ could read past its end."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; {list(shape)} is needed.")


def check_array(name: str, values: np.ndarray, length: int, dtype: npt.DTypeLike) -> None:
    """Raise ValueError unless the array has `length` contiguous values of `dtype`."""
    if values.shape != (length,) or values.dtype != dtype or not values.flags.c_contiguous:
        raise ValueError(f"{name} must be {length} contiguous values of {dtype}.")


def as_int(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same integers, contiguous on the CPU; the tensor itself if it already is."""
    # Avoid torch ops: each releases the GIL, and the step waits to get it back.
    if tensor.dtype is dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return tensor.to(device="cpu", dtype=dtype).contiguous()


def check_status(status: int) -> None:
    """Raise MemoryError or ValueError for a kernel's return code other than 0."""
    if status == _OUT_OF_MEMORY:
        raise MemoryError("a kernel's working memory could not be allocated.")
    if status:
        raise ValueError(f"{_STATUS.get(status, f'kernel status {status}')}.")
