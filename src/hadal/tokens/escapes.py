"""Patterns of texts, as patterns of what JSON writes for these texts, or of the texts themselves.

    /a.*"/   joined    /a(?:[^"\\\\\\x00-\\x1f]|\\\\["\\\\bfrt])*\\\\"/
             split     /a/ ( /[^"\\\\\\x00-\\x1f]|\\\\["\\\\bfrt]/ )* /\\\\"/

Only characters and classes of characters change; groups, alternatives and repetitions stay, in the
joined form within the regex, in the split form as Lark's. Does not know the rules of a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable

StartsWith = Callable[[str], frozenset[str]]
"""Function that returns the ASCII characters with which a match of a regex may begin."""
_CHAR_TO_ESCAPE = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Character -> the letter after the backslash with which JSON writes it."""
_PLAIN = r'[^"\\\x00-\x1f]'
"""Characters that JSON writes as they are. Other control characters cannot be written: arguments
may not contain \\u escapes (tokens/grammars).
"""
_ALL = r'/(?:[^"\\\x00-\x1f]|\\["\\bfnrt])*/'
"""Terminal of all texts in their JSON form."""
_ATOM = re.compile(
    r"\((?:\?(?:P?<\w+>|[a-zA-Z-]*:?))?"  # The beginning of a group, or flags.
    r"|\{\d*,?\d*\}\??|[*+?]\??"  # A repetition. Lazy ones allow the same texts.
    r"|\\(?:[pP](?:\{[^}]*\}|.)|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[xuU]\{[^}]*\}|.)"
    r"|.",
    re.DOTALL,
)
_OPERATORS = frozenset(r"\.+*?()|[]{}^$#&-~")
"""Characters with a meaning in regexes. Others have none, but may have one after a backslash."""
_CLASS_LETTERS = "dDsSwWpP"
_CONTROL_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


class GrammarError(ValueError):
    """Grammar that cannot be followed. Its text says why, for the client."""


class Forms:
    """JSON forms of strings and regexes, as parts of a Lark grammar."""

    def __init__(self, starts: StartsWith, *, is_split: bool, is_json: bool = True) -> None:
        """`is_split`: each character is a terminal of its own. `is_json` False: the texts are not
        in JSON, so characters and classes stay.
        """
        self.is_split = is_split
        self.negation = (f"({_ALL} & ~", ")") if is_json else ("~", "")
        """Text before and after a part, for all texts other than those of the part."""
        self._is_json = is_json
        self._starts = starts
        self._class_to_form: dict[tuple[str, str], str] = {}
        """(class of characters, flags) -> its JSON form."""

    def string(self, text: str, flags: str) -> str:
        """Return the form of a string; `flags` "i": upper and lower case are equal."""
        return self._whole([self._char(char, flags) for char in text])

    def regex(self, text: str, flags: str) -> str:
        """Return the form of a regex. Raises GrammarError for the flag x."""
        groups = [flags]
        """Flags within each open group."""
        pieces, at = [], 0
        while at < len(text):
            end = _class_end(text, at) if text[at] == "[" else 0
            if not end:
                found = _ATOM.match(text, at)
                assert found is not None, "any character is an atom"
                end = found.end()
            atom, at = text[at:end], end
            if "x" in groups[-1]:
                raise GrammarError("the flag x is not supported in a tool's grammar")
            if atom.startswith("("):
                inner = _flags_after(atom, groups[-1])
                if atom.startswith("(?") and not atom.endswith((":", ">")):
                    groups[-1] = inner  # Flags without a group; its end follows.
                    at += 1
                    continue
                groups.append(inner)
                pieces.append("(" if self.is_split else "(?:")
            elif atom == ")":
                groups.pop()
                pieces.append(atom)
            elif atom[0] in "*+?{":
                pieces.append(atom if len(atom) == 1 else atom.removesuffix("?"))
            elif atom == "|":
                pieces.append(atom)
            elif atom not in "^$":  # A terminal always matches as a whole.
                pieces.append(self._atom(atom, groups[-1]))
        return self._whole(pieces)

    def _whole(self, pieces: list[str]) -> str:
        if self.is_split:
            return f"( {' '.join(pieces)} )"
        return f"/{_with_slashes(''.join(pieces))}/" if pieces else '""'

    def _atom(self, atom: str, flags: str) -> str:
        """Return the form of a character, an escape or a class."""
        if atom == "." or atom[0] == "[":
            return self._class(atom, flags)
        if atom[0] != "\\":
            return self._char(atom, flags)
        letter = atom[1]
        if letter in _CLASS_LETTERS:
            return self._class(atom, flags)
        if letter in "xuU":
            return self._char(chr(int(atom[2:].strip("{}"), 16)), flags)
        if letter.isalnum() and letter not in _CONTROL_LETTERS:
            raise GrammarError(f"{atom} is not supported in a tool's grammar")
        return self._char(_CONTROL_LETTERS.get(letter, letter), flags)

    def _class(self, atom: str, flags: str) -> str:
        """Return the form of a class of characters, of an escape of one, or of a dot."""
        flags = "".join(flag for flag in "is" if flag in flags)
        if not self._is_json:
            return f"(?{flags}:{atom})" if flags else atom
        if (atom, flags) not in self._class_to_form:
            starts = self._starts(f"(?{flags}:{atom})")
            letters = "".join(
                _quoted(letter) for char, letter in _CHAR_TO_ESCAPE.items() if char in starts
            )
            plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
            if all(char >= " " for char in starts) and not letters:
                plain = atom
            # The letters of escapes have one case, even where the flag i is set.
            form = f"{plain}|(?-i:\\\\[{letters}])" if letters else plain
            self._class_to_form[atom, flags] = self._terminal(form, flags)
        return self._class_to_form[atom, flags]

    def _char(self, char: str, flags: str) -> str:
        """Return the form of one character. Raises GrammarError for a control character that JSON
        writes only as a \\u escape.
        """
        if not self._is_json and char < " ":
            return f"\\x{{{ord(char):x}}}"
        if char in _CHAR_TO_ESCAPE and self._is_json:
            return self._terminal(r"\\" + _quoted(_CHAR_TO_ESCAPE[char]), "")
        if char < " ":
            raise GrammarError(f"U+{ord(char):04X} is not supported in a tool's grammar")
        form = f"\\{char}" if char in _OPERATORS else char
        return self._terminal(form, flags if char.isalpha() else "")

    def _terminal(self, form: str, flags: str) -> str:
        flag = "i" if "i" in flags else ""
        if self.is_split:
            return f"/{_with_slashes(form)}/{flag}"
        return f"(?{flag}:{form})" if flag or len(form) > 2 else form


def _quoted(letter: str) -> str:
    return letter if letter.isalpha() else f"\\{letter}"


def _flags_after(group: str, flags: str) -> str:
    """Return the flags within a group that begins with `group`, as in (?i-s: or (?P<name>."""
    if not group.startswith("(?") or group.endswith(">"):
        return flags
    on, _, off = group.strip("(?:").partition("-")
    return "".join(flag for flag in flags + on if flag not in off)


def _class_end(text: str, at: int) -> int:
    """Return the position after the class of characters that begins at `at`."""
    depth, index = 0, at
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 1
        elif char == "[":
            depth += 1
            rest = text[index + 1 : index + 3]
            # A bracket just after the beginning is a character of the class.
            index += 2 if rest == "^]" else 1 if rest[:1] == "]" else 0
        elif char == "]":
            depth -= 1
            if not depth:
                return index + 1
        index += 1
    return len(text)


def _with_slashes(body: str) -> str:
    """Return a regex with escaped slashes: a slash ends a regex of Lark."""
    return re.sub(
        r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], body, flags=re.DOTALL
    )
