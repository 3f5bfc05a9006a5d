"""How a run is to end: its exit code, until when streams may finish, and whether there is a hurry.

Knows no process, no message and no clock. Several parts ask for the end; the loop ends on it.
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
        """None while the run goes on."""
        return self._exit_code

    @property
    def drain_until_s(self) -> float | None:
        """None unless it drains."""
        return self._drain_until_s

    @property
    def is_draining(self) -> bool:
        return self._drain_until_s is not None

    @property
    def is_at_once(self) -> bool:
        """Whether children are killed without a time to end by themselves."""
        return self._is_at_once

    @property
    def is_superseded(self) -> bool:
        """Whether what is on the nodes is another supervisor's."""
        return self._is_superseded

    def drain(self, until_s: float) -> None:
        """Let streams finish until then."""
        self._drain_until_s = until_s

    def exit(self, code: int) -> None:
        """End the run when the loop looks next. The last code counts."""
        self._exit_code = code

    def exit_at_once(self, code: int) -> None:
        """End it, and kill every child."""
        self._exit_code = code
        self._is_at_once = True

    def supersede(self) -> None:
        """End it, and leave alone what is on the nodes."""
        self.exit_at_once(EXIT_GAVE_UP)
        self._is_superseded = True
