"""Run a chat template in a separate process, where it can neither hang the server nor exhaust its
memory. The process also checks the grammars of requests.

A template is a program that comes with a model. Jinja's sandbox denies it files and Python's
internals. It prevents neither endless loops nor texts that double until memory is gone, and Jinja
folds constants while it parses. So the process parses and renders under limits enforced by the
kernel: processor time per call, and address space.

    server   ["parse", text] ──►  process   {"ok": ...} or {"error": why}; if a limit ends it,
             ["render", ...] ──►            the socket closes; the next call has a new process

Independent of tokenizers and routes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import msgspec

from hadal.core.errors import CheckpointError, RequestError
from hadal.core.framing import U32
from hadal.gateway.edge.errors import overloaded
from hadal.gateway.text.template_jinja import parsed
from hadal.tokens.escapes import GrammarError
from hadal.tokens.grammars import complaint, forms_of

log = logging.getLogger("hadal.gateway")

CPU_S = 2.0
"""Maximum processor time per call; rendering a chat of 4 MiB takes a few hundredths of this."""
MEMORY_BYTES = 1 << 29
"""Address space of the process. An idle process uses a tenth, a chat of 4 MiB another tenth."""
PATIENCE_S = 3.0
"""Time to wait for an answer before asking another process: this one may have been stopped."""
DEADLINE_S = 30.0
"""Time to wait for the second process: on a busy host it may get little processor time."""
_RESTART_S = 0.75
"""Processor time that a new process takes, for its imports."""
_START_S = 60.0
"""Time to wait for the first answer, which includes the process's imports."""
_ENDING_S = 1.0
"""Time for a process to end after its socket has closed."""
_OF_TEMPLATE = "the chat template's process"
_RUN = """
import sys
sys.path[:] = sys.argv[4:]
from hadal.gateway.text.template import main
main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
"""
"""Program of the process, run with -I: PYTHON variables could load modules, which cost memory."""


class Checked(NamedTuple):
    """Result of the check of a grammar."""

    why: str
    """Reason why the grammar is not supported; "": it is."""
    cpu_s: float
    """Processor time of the check, with that of a new process if this one was ended."""


class ConfinedProcess:
    """Process under limits that renders one template and checks grammars. It is replaced if it
    ended or does not answer, and ends with its creator. Any thread may call.
    """

    def __init__(
        self,
        template: str,
        source: str,
        *,
        cpu_s: float = CPU_S,
        memory_bytes: int = MEMORY_BYTES,
        patience_s: float = PATIENCE_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Start the process. Raises CheckpointError if the template does not parse or the process
        does not answer; `source` names the template's file.
        """
        self._template = template
        self._limits = (str(cpu_s), str(memory_bytes))
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: (
            weakref.finalize[[socket.socket, subprocess.Popen[bytes]], ConfinedProcess] | None
        ) = None
        try:
            with self._lock:
                self._start()
        except (_RefusedError, _LostError) as error:
            raise CheckpointError(
                f"{source}: the chat template does not parse ({error})."
            ) from None

    def render(
        self, messages: Sequence[Mapping[str, str]], values: Mapping[str, Any], max_chars: int
    ) -> str:
        """Render messages. Raises RequestError if the template refuses them, or if a limit or
        `max_chars` is exceeded; ApiError 503 if two processes in a row have ended or do not answer.
        """
        try:
            return self._answer(["render", messages, values, max_chars])
        except _RefusedError as error:
            raise RequestError(
                f"The chat template cannot render these messages: {error}.", "messages"
            ) from None

    def check(self, grammar: str, prefix: str = "") -> Checked:
        """Check a grammar (tokens/grammars). Raises ApiError as `render` does."""
        try:
            cpu_s, _, why = self._answer(["check", grammar, prefix]).partition(":")
        except _RefusedError as error:  # The check itself failed or exceeded a limit.
            return Checked(str(error), float(self._limits[0]) + _RESTART_S)
        return Checked(why, float(cpu_s))

    def forms_of(self, syntax: str, definition: str) -> tuple[str, str, float]:
        """Return a client's grammar in its JSON form and its plain form (tokens/grammars), and the
        processor time in seconds. Raises GrammarError, also if a limit is exceeded, and ApiError as
        `render` does.
        """
        try:
            cpu_s, _, forms = self._answer(["forms", syntax, definition]).partition(":")
        except _RefusedError as error:
            raise GrammarError(str(error)) from None
        escaped, plain = json.loads(forms)
        return escaped, plain, float(cpu_s)

    def _answer(self, call: list[Any]) -> str:
        what = _OF_TEMPLATE if call[0] == "render" else "the process that checks formats"
        with self._lock:
            try:
                try:
                    return self._answered(call, self._patience_s)
                except _LostError as error:
                    log.warning("%s is replaced: %s", what, error)
                    return self._answered(call, self._deadline_s)
            except _LostError as error:
                log.warning("%s failed again: %s", what, error)
                raise overloaded(
                    503, f"{what[0].upper()}{what[1:]} does not answer; try again.", 1.0
                ) from None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _answered(self, call: Any, deadline_s: float) -> str:
        if self._socket is None:
            self._start()
        return self._ask(call, deadline_s)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # HADAL_ variables contain keys and addresses, which the process must not have.
            environment = {
                name: value for name, value in os.environ.items() if not name.startswith("HADAL_")
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _RUN, str(theirs.fileno()), *self._limits, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        self._socket = ours
        self._end = weakref.finalize(self, _end, ours, self._process)
        try:
            self._ask(["parse", self._template], _START_S)
        except (_RefusedError, _LostError):
            self._stop()
            raise

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._socket = self._end = None

    def _ask(self, call: Any, deadline_s: float) -> str:
        assert self._socket is not None
        try:
            packed = msgspec.msgpack.encode(call)
        except OverflowError:
            raise _RefusedError(
                "a number among chat_template_kwargs has more than 64 bits"
            ) from None
        self._socket.settimeout(deadline_s)
        try:
            _send(self._socket, packed)
            reply = _receive(self._socket)
        except TimeoutError:
            self._stop()
            raise _LostError(f"it did not answer in {deadline_s:g} s") from None
        except OSError:
            reply = None
        if reply is None:
            raise self._ended()
        if "error" in reply:
            raise _RefusedError(reply["error"])
        return str(reply["ok"])

    def _ended(self) -> Exception:
        """Return the error for a process that ended by itself."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        code = self._process.returncode
        self._stop()
        if code == -signal.SIGPROF:
            return _RefusedError(f"it takes more than {self._limits[0]} s of processor time")
        if code == -signal.SIGABRT:  # Native code aborts if memory is refused.
            return _RefusedError(f"it takes more than {int(self._limits[1]) >> 20} MiB of memory")
        return _LostError(f"it ended ({code})")


class _RefusedError(Exception):
    """Refusal of a call by the template's process, or a limit that the call exceeded."""


class _LostError(Exception):
    """Process that ended or does not answer, for reasons other than the call."""


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the process. Closing the socket ends an idle one; a busy or stopped one is killed."""
    connection.close()
    process.kill()
    process.wait()


def _send(connection: socket.socket, packed: bytes) -> None:
    connection.sendall(U32.pack(len(packed)) + packed)


def _receive(connection: socket.socket) -> Any:
    """Return the next message; None if the other end is closed."""
    head = _exactly(connection, U32.size)
    body = _exactly(connection, U32.unpack(head)[0]) if head else b""
    return msgspec.msgpack.decode(body) if body else None


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes; none if the other end is closed. Unlike runtime/transfer/peers.fill
    it allocates as bytes arrive, because the template's process may announce any length.
    """
    received = bytearray()
    while len(received) < num_bytes:
        piece = connection.recv(min(num_bytes - len(received), 1 << 20))
        if not piece:
            return b""
        received += piece
    return bytes(received)


# ---- in the process ----
def main(fd: int, cpu_s: float, memory_bytes: int) -> None:
    """Answer calls until the server closes its end."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: jinja2.Template | None = None
    with socket.socket(fileno=fd) as connection:
        while call := _receive(connection):
            # SIGPROF ends the process at once by default, even within a single huge operation.
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                if call[0] == "parse":
                    template, reply = parsed(call[1]), {"ok": ""}
                elif call[0] == "render":
                    assert template is not None
                    reply = {"ok": _rendered(template, *call[1:])}
                else:
                    begun_s, is_check = time.process_time(), call[0] == "check"
                    found = complaint(*call[1:]) if is_check else json.dumps(forms_of(*call[1:]))
                    reply = {"ok": f"{time.process_time() - begun_s:.6f}:{found or ''}"}
            except RecursionError:
                reply = {"error": "it nests too deeply"}
            except MemoryError:
                reply = {"error": f"it takes more than {memory_bytes >> 20} MiB of memory"}
            except Exception as error:  # A template is a program: it may raise anything.
                reply = {"error": str(error)[:1000] or type(error).__name__}
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            with contextlib.suppress(BrokenPipeError):
                _send(connection, _packed(reply))


def _packed(reply: dict[str, str]) -> bytes:
    """Encode a reply. Half of a surrogate pair is not text: a template writing one is refused."""
    try:
        return msgspec.msgpack.encode(reply)
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
        return msgspec.msgpack.encode(
            {"error": f"it writes half of a surrogate pair (U+{half[:4]})"}
        )


def _rendered(
    template: jinja2.Template,
    messages: list[dict[str, str]],
    values: dict[str, Any],
    max_chars: int,
) -> str:
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(**values, messages=messages):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise ValueError("the prompt would be too long")
    return "".join(pieces)
