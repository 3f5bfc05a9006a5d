"""The decided end of a run: its exit code, the deadline of streams, and its urgency.

Independent of processes, messages and clocks. Several parts request the end; the loop acts on it.
"""

from __future__ import annotations

EXIT_GAVE_UP = 1


class RunEnd:
    """End of a run as far as it is decided."""

    def __init__(self) -> None:
        self._exit_code: int | None = None
        self._drain_until_s: float | None = None
        self._is_at_once = False
        self._is_superseded = False

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the run goes on."""
        return self._exit_code

    @property
    def drain_until_s(self) -> float | None:
        """Time until which streams may finish; None unless the run drains."""
        return self._drain_until_s

    @property
    def is_draining(self) -> bool:
        return self._drain_until_s is not None

    @property
    def is_at_once(self) -> bool:
        """True if children are killed at once, without time to end by themselves."""
        return self._is_at_once

    @property
    def is_superseded(self) -> bool:
        """True if another supervisor owns the processes on the nodes."""
        return self._is_superseded

    def drain(self, until_s: float) -> None:
        """Drain the run: streams may finish until `until_s`."""
        self._drain_until_s = until_s

    def exit(self, code: int) -> None:
        """End the run at the loop's next check. The last code counts."""
        self._exit_code = code

    def exit_at_once(self, code: int) -> None:
        """End the run, and kill every child."""
        self._exit_code = code
        self._is_at_once = True

    def supersede(self) -> None:
        """End the run, but leave the processes on the nodes alone."""
        self.exit_at_once(EXIT_GAVE_UP)
        self._is_superseded = True
