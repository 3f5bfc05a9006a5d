"""Read files of foreign origin within bounds: model folders, deployments, traffics, loads.

Every read takes bounded time, and ends with values or with a one-line error that names the file and
the place in it. Values have bounded depth; integers have 64 bits, floats are finite, and texts can
be encoded in UTF-8. The caller checks the meaning.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Meta, structs

from hadal.core.errors import ConfigError

MIB = 1 << 20
MAX_TOML_BYTES = MIB
MAX_JSON_BYTES = 64 * MIB
"""Limit of most JSON files. DeepSeek-V3's index has 8.9 MB; tokenizers have up to 35 MB."""
MAX_CONFIG_BYTES = 4 * MIB
"""Limit of a config.json or a chat template."""
MAX_TABLE_BYTES = 512 * MIB
"""Limit of a trace or a matrix of loads, gunzipped."""
MAX_DEPTH = 64
"""Deepest nesting of lists and tables; a tokenizer.json has six."""
MAX_DIGITS = 19
"""Maximum number of digits of an integer, enough for 64 bits. Python refuses more than 4,300."""
_SHOWN_CHARS = 60

Kind = type[ConfigError]
T = TypeVar("T")


def read_bytes(
    path: Path, what: str, limit: int = MAX_JSON_BYTES, *, error: Kind = ConfigError, hint: str = ""
) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes. `what` (kind of file) and
    `hint` (what to do) are for errors.
    """
    found = None
    try:
        # A read from a pipe would block until another process writes.
        if path.is_file() or not path.exists():
            with path.open("rb") as file:
                found = file.read(limit + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such {what} file.{hint and ' ' + hint}") from None
    except (
        OSError,
        ValueError,
    ) as problem:  # ValueError: the name is invalid on every file system.
        why = getattr(problem, "strerror", None) or str(problem)
        raise error(f"{path}: cannot be read: {why.lower()}.") from problem
    if found is None:
        raise error(f"{path}: not a file; a {what} file is needed.")
    if len(found) > limit:
        raise error(f"{path}: larger than the {limit // MIB} MiB that a {what} file may have.")
    return found


def read_text(
    path: Path, what: str, limit: int = MAX_JSON_BYTES, *, error: Kind = ConfigError, hint: str = ""
) -> str:
    """Return a file's text; see `read_bytes`. A gzipped file unpacks to MAX_TABLE_BYTES at most."""
    data = gunzipped(read_bytes(path, what, limit, error=error, hint=hint), str(path), error=error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{path}: it is not UTF-8 text. Save it as UTF-8.") from None


def read_json(
    path: Path,
    what: str,
    limit: int = MAX_JSON_BYTES,
    *,
    error: Kind = ConfigError,
    hint: str = "",
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Return the object of a JSON file without its `ignored` fields, which may have any values."""
    text = read_text(path, what, limit, error=error, hint=hint)
    fields = parse_json(text, str(path), error=error, ignored=ignored)
    if not isinstance(fields, dict):
        raise error(f"{path}: must hold one JSON object.")
    return fields


def parse_json(
    text: str | bytes, where: str, *, error: Kind = ConfigError, ignored: Collection[str] = ()
) -> Any:
    """Return the value of a JSON text. `where` names its place in errors; `ignored` are fields of
    an object to leave out.
    """
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise error(f"{where}: nests deeper than {MAX_DEPTH} levels.") from None
    except ValueError as problem:
        raise error(f"{where}: cannot be read as JSON ({problem}).") from problem
    if ignored and isinstance(value, dict):
        value = {name: one for name, one in value.items() if name not in ignored}
    check_values(value, where, error=error)
    return value


def parse_toml(text: str, where: str, *, error: Kind = ConfigError) -> dict[str, Any]:
    """Return the tables of a TOML text. `where` names its place in errors."""
    _check_toml(text, where, error)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise error(f"{where}: nests deeper than {MAX_DEPTH} levels.") from None
    except ValueError as problem:
        raise error(f"{where}: not a TOML file ({problem}).") from problem
    check_values(tables, where, error=error)
    return tables


def is_folder(path: Path) -> bool:
    """Return True if the folder exists; False also for a name that is invalid on every file system."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return True if the regular file exists; False also for a name that is invalid on every file system."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def gunzipped(
    data: bytes, where: str, limit: int = MAX_TABLE_BYTES, *, error: Kind = ConfigError
) -> bytes:
    """Return the data, unpacked if it is gzipped. Raise `error` beyond `limit` bytes, because a few
    bytes may unpack to very many.
    """
    if data[:2] != b"\x1f\x8b":
        return data
    pieces, size = [], 0
    try:
        while data[:2] == b"\x1f\x8b":  # A gzip file may be several members, one after the other.
            unzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
            piece = unzip.decompress(data, limit + 1 - size)
            size += len(piece)
            pieces.append(piece)
            if size > limit:
                raise error(f"{where}: unpacks to more than {limit // MIB} MiB.")
            if not unzip.eof:
                raise EOFError
            data = unzip.unused_data
    except (EOFError, zlib.error) as problem:
        raise error(f"{where}: its gzip data is damaged or cut off. Copy it again.") from problem
    return b"".join(pieces)


def check_values(value: Any, where: str, *, error: Kind = ConfigError) -> None:
    """Raise `error`, naming the place, for a value outside the bounds in the module's docstring."""
    if (problem := problem_of(value)) is not None:
        raise error(f"{where}: the value {problem}.")
    level: list[tuple[Any, tuple[Any, ...]]] = [(value, ())]
    for _ in range(MAX_DEPTH):
        below = []
        for holder, path in level:
            for name, one in _items(holder):
                if (problem := problem_of(name) or problem_of(one)) is not None:
                    raise error(f"{where}: {path_text((*path, name))} {problem}.")
                if one and isinstance(one, dict | list):
                    below.append((one, (*path, name)))
        if not below:
            return
        level = below
    raise error(f"{where}: {path_text(level[0][1])} nests deeper than {MAX_DEPTH} levels.")


def converted(
    value: Any, kind: type[T], where: str = "", name: str = "", *, error: Kind = ConfigError
) -> T:
    """Return a plain value converted to `kind`, fully checked by msgspec. The error raised names
    the place and the field (`name`, or one within); if that is known, its value and those allowed.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        text, _, rest = str(problem).partition(" - at `$")
        steps = [
            int(one) if one.isdecimal() else one
            for one in re.findall(r"[^.\[\]]+", rest.partition("`")[0])
        ]
        name = path_text((*filter(None, [name]), *steps))
        if isinstance(problem.__cause__, ValueError):  # A table's own check, which names its field.
            text = f"{name}.{problem.__cause__}" if name else str(problem.__cause__)
        elif text.startswith("Object "):  # The table has an unknown field, or lacks one.
            text = f"{name}: {_lower(text)}" if name else _lower(text)
            text += _known_fields(_kind_at(kind, steps)) if "unknown" in text else ""
        else:
            for step in steps:
                value = value[step]
            allowed = _either(_kind_at(kind, steps))
            text = f"{name} is {shown(value)}; {allowed or _lower(_NAMES.sub(lambda names: _known(names[1]), text))}"
        raise error(f"{where}: {text.rstrip('.')}." if where else f"{text.rstrip('.')}.") from None


_NAMES = re.compile(r"Expected `str` matching regex '\^\((.*)\)\\\\Z'")


def _kind_at(kind: Any, steps: list[int | str]) -> Any:
    """Return the type of a table's field, or None if there is no such field."""
    for step in steps:
        found = structs.fields(kind) if hasattr(kind, "__struct_fields__") else ()
        kind = next((each.type for each in found if each.name == step), None)
    return kind


def _either(kind: Any) -> str:
    """Return the values allowed for a field that is a whole number or a name; "" for any other field."""
    bounds = {
        base: meta
        for base, meta in (get_args(part) for part in get_args(kind) if len(get_args(part)) == 2)
        if isinstance(meta, Meta)
    }
    if bounds.keys() != {int, str}:
        return ""
    names = (bounds[str].pattern or "").removeprefix("^(").removesuffix(r")\Z")
    return f"{_known(names)} and {bounds[int].ge} to {bounds[int].le}"


def _known_fields(kind: Any) -> str:
    known = ", ".join(getattr(kind, "__struct_fields__", ()))
    return f". Known: {known}" if known else ""


def _known(names: str) -> str:
    """Return a text that lists a pattern's alternatives."""
    return f"known are {', '.join(repr(name) for name in names.split('|'))}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def path_text(path: tuple[Any, ...]) -> str:
    """Return the path `("a", "b", 3)` as a.b[3], cut if it is long."""
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).removeprefix(
        "."
    )
    return cut(ascii(text)[1:-1] if problem_of(text) else text)


def shown(value: object) -> str:
    """Return a value as Python writes it, cut if it is long, for one line of an error."""
    return cut(repr(value))


def cut(text: str, most: int = _SHOWN_CHARS) -> str:
    """Return the text on one line, cut to `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 4]} ..."


class _Digits:
    """Stand-in for an integer with too many digits, until `check_values` finds it and can name its place."""

    def __init__(self, number: int) -> None:
        self.number = number


def _integer(text: str) -> int | _Digits:
    digits = len(text.lstrip("-"))
    return int(text) if digits <= MAX_DIGITS else _Digits(digits)


def problem_of(value: Any) -> str | None:
    """Return what is wrong with a value independent of its meaning, or None."""
    if isinstance(value, str):
        try:
            if not value.isascii():
                value.encode()
        except UnicodeEncodeError:
            return "has half of a UTF-16 surrogate pair, which is not a character"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return f"is {value}; a finite number is needed"
    elif isinstance(value, _Digits):
        return f"is a number of {value.number:,} digits; at most {MAX_DIGITS} are allowed"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "is a number beyond 64 bits"
    return None


def _items(holder: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(holder, dict):
        yield from holder.items()
    elif isinstance(holder, list):
        yield from enumerate(holder)


# Matches comments and strings of a TOML text; keys and numbers remain. An unterminated string ends
# with its line or with the text, so that no part is scanned twice.
_QUOTED = re.compile(
    r"""#[^\n]*+|\"\"\"(?:\\.|.)*?(?:\"\"\"|\Z)|\'\'\'.*?(?:\'\'\'|\Z)"""
    r"""|"(?:\\[^\n]|[^"\\\n])*+"?|'[^'\n]*+'?""",
    re.DOTALL,
)
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")
_LONG_NUMBER = re.compile(r"\d[\d_]{400}")


def _check_toml(text: str, where: str, error: Kind) -> None:
    """Raise `error` for a key of more than MAX_DEPTH parts, because 100,000 take tomllib hours, and
    for a number of over 400 digits, which tomllib reports without a line.
    """
    plain = _QUOTED.sub(lambda found: _blank(found[0]), text)
    checks: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
        (_DOTTED, lambda key: f"a key nests deeper than {MAX_DEPTH} levels"),
        (_LONG_NUMBER, lambda key: f"{key} has a number of hundreds of digits"),
    )
    for pattern, what in checks:
        if (found := pattern.search(plain)) is not None:
            line = plain.count("\n", 0, found.start())
            key = cut(plain[: found.end()].split("\n")[line].partition("=")[0].strip() or "it")
            raise error(f"{where}: line {line + 1}: {what(key)}.")


def _blank(token: str) -> str:
    """Return the line breaks of a string or comment, followed by '' for a string."""
    return "\n" * token.count("\n") + ("" if token[0] == "#" else "''")
