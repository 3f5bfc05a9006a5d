"""Processes that render one template, one per concurrent call: a long chat delays no short ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hadal.core.errors import CheckpointError
from hadal.gateway.edge.errors import overloaded
from hadal.gateway.text.template import ConfinedProcess

log = logging.getLogger(__name__)


class TemplatePool:
    """One process at the start, more when needed. Safe to use from any thread."""

    def __init__(self, make: Callable[[], ConfinedProcess]) -> None:
        """Start the first process. Raises CheckpointError as `make` does for a bad template."""
        self._make = make
        self._lock = threading.Lock()
        self._idle = [make()]
        self._is_closed = False

    def render(
        self, messages: Sequence[Mapping[str, str]], values: Mapping[str, Any], max_chars: int
    ) -> str:
        """Render in an idle process. Raises as `ConfinedProcess.render` does."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self._started()
        try:
            return process.render(messages, values, max_chars)
        finally:
            with self._lock:
                self._idle.append(process)
                is_closed = self._is_closed
            if is_closed:
                process.close()

    def close(self) -> None:
        """End the idle processes; busy ones end after their answer."""
        with self._lock:
            self._is_closed = True
            idle = [*self._idle]
        for process in idle:
            process.close()

    def _started(self) -> ConfinedProcess:
        try:
            return self._make()
        # The template has parsed before: now the machine lacks memory or time.
        except CheckpointError as error:
            log.warning("another process for chat templates failed to start: %s", error)
            raise overloaded(
                503, "The process that renders chats does not start; try again.", 1.0
            ) from error
