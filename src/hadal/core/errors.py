"""The tree of errors. An error that a user can cause says what to do about it; the gateway maps
each class to an HTTP status.
"""

EXIT_CONFIG = 2
"""Exit code if the model or the configuration cannot work, so that a restart would not help."""
_MAX_CHARS = 1000
"""Characters at which a ConfigError's message is cut, because it may quote a file. Characters that
cannot be printed are written as escapes afterwards, which take more.
"""


class HadalError(Exception):
    """Base class of Hadal's own errors."""


class ConfigError(HadalError, ValueError):
    """Wrong deployment file, model folder or flag. The message names the file and the field, on one
    line that is printable for any contents of the file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class CheckpointError(ConfigError):
    """Checkpoint that is damaged or of another architecture. The message names the file and the
    tensor or field.
    """


class RequestError(HadalError, ValueError):
    """Malformed request: HTTP 400. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvariantError(HadalError, AssertionError):
    """A ledger does not add up: a bug in Hadal, never the user's mistake."""


def _one_line(text: str) -> str:
    text = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 4]} ..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
