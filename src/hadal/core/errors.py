"""The tree of errors. What a user can cause says what to do about it; the gateway maps each class
to a status.
"""

EXIT_CONFIG = 2
"""Exit code where the model or the configuration cannot work: starting again would not help."""
_MAX_CHARS = 1000
"""Most characters of what is said of a mistake: it may quote a file."""


class HadalError(Exception):
    """Anything Hadal raises on purpose."""


class ConfigError(HadalError, ValueError):
    """A deployment file, a model folder or a flag is wrong. Names the file and the field, in one
    line that can be printed whatever stands in the file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class CheckpointError(ConfigError):
    """A checkpoint is not this architecture, or is damaged. Names the file and the tensor or
    field.
    """


class RequestError(HadalError, ValueError):
    """A request is malformed: HTTP 400. `param` names the field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvariantError(HadalError, AssertionError):
    """A ledger does not add up. A bug of ours, never the user's."""


def _one_line(text: str) -> str:
    text = text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 4]} ..."
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
