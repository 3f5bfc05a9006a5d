"""Added tokens of a model's folder: texts, ids and flags, as transformers 5 loads them.
`tokenizer.json` lists added tokens. `tokenizer_config.json`, and the older
`special_tokens_map.json` and `added_tokens.json`, add more and change flags. transformers 5 applies
them in a fixed order. The `tokenizers` library gives every text its id in the vocabulary, or else
the next free id; ids in the files are ignored. Source: transformers 5.23,
`PreTrainedTokenizerBase._from_pretrained` and `TokenizersBackend.__init__`; tokenizers 0.23,
`AddedVocabulary::add_tokens`. tests/unit/gateway/test_same_tokens.py compares both with this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hadal.core import documents
from hadal.core.documents import shown
from hadal.core.errors import CheckpointError

CONFIG = "tokenizer_config.json"
IGNORED = frozenset({"model_max_length", "max_len"})
"""Fields of tokenizer_config.json without effect on ids; a value of 10**30 means "no limit"."""
_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
"""Special tokens that every tokenizer of transformers may have, in its order."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_ID_DIGITS = 9


@dataclass(frozen=True)
class AddedToken:
    """Text that is always one token."""

    content: str
    single_word: bool = False
    """True if the token matches only without a word character directly before or after it."""
    lstrip: bool = False
    """True if the token includes the white space before it."""
    rstrip: bool = False
    """True if the token includes the white space after it."""
    normalized: bool = False
    """True if the token's normalised form is searched in the normalised text."""
    special: bool = False
    """True if the token controls the model and has no text in an answer."""


def load_added_tokens(folder: Path, fields: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Return the entries of `added_tokens`, by ascending id, for a folder with a tokenizer.json.
    `fields` is its content, `source` its name for errors. Raises CheckpointError.
    """
    listed = [
        _token(each, f"{source}: added_tokens[{index}]")
        for index, each in enumerate(fields.get("added_tokens") or [])
    ]
    named = _OtherFiles.read(folder, listed, fields)
    vocab = fields["model"]["vocab"]
    id_to_token: dict[int, AddedToken] = {}
    _add(id_to_token, listed, vocab)
    _add(id_to_token, named.to_add({token.content for token in listed}), vocab)
    return [{"id": token_id, **asdict(token)} for token_id, token in sorted(id_to_token.items())]


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Return name ("bos_token") -> text of a folder's special tokens, for chat templates. Raises
    CheckpointError.
    """
    return _OtherFiles.read(folder, [], {}).texts()


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the content of a tokenizer file, empty if it is absent. Raises CheckpointError."""
    path = folder / name
    if not path.exists():
        return {}
    return documents.read_json(path, "tokenizer", error=CheckpointError, ignored=IGNORED)


@dataclass(frozen=True)
class _OtherFiles:
    """Tokens of the folder's files other than tokenizer.json."""

    decoder: list[AddedToken]
    """Tokens of `added_tokens_decoder`, by ascending key."""
    names: dict[str, AddedToken | str]
    """Special tokens by name; a plain text has no flags of its own."""
    extra: list[AddedToken | str]
    """Special tokens without a name; a plain text has no flags of its own."""

    @staticmethod
    def read(folder: Path, listed: list[AddedToken], fields: Mapping[str, Any]) -> _OtherFiles:
        """Read the files. `listed`: added tokens of tokenizer.json; `fields`: its content."""
        path, config = folder / CONFIG, read_config(folder)
        if config.get("additional_special_tokens") and not config.get("extra_special_tokens"):
            config["extra_special_tokens"] = config["additional_special_tokens"]
        entries: dict[int, AddedToken]
        if "added_tokens_decoder" in config:
            entries = _decoder(config["added_tokens_decoder"], path)
        else:
            older = read_config(folder, "special_tokens_map.json")
            config.update(_older_names(older, folder, has_extra="extra_special_tokens" in config))
            entries = _older_decoder(folder, config)
            for each, token in zip(fields.get("added_tokens") or [], listed, strict=True):
                entries[each["id"]] = token
        text_to_token = {token.content: token for token in entries.values()}
        names = {
            name: text_to_token.get(_text(value), value) if name in _NAMES else value
            for name, value in _special_names(config, path).items()
        }
        extra = config.get("extra_special_tokens") or []
        if not isinstance(extra, list | dict):
            raise CheckpointError(
                f"{path}: extra_special_tokens is {shown(extra)}; a list or an object is needed."
            )
        listed_extra = extra if isinstance(extra, list) else []
        return _OtherFiles(
            [entries[key] for key in sorted(entries)],
            names,
            [_token_or_text(each, f"{path}: extra_special_tokens") for each in listed_extra],
        )

    def texts(self) -> dict[str, str]:
        """Return name -> text of the named special tokens."""
        return {name: _text(value) for name, value in self.names.items()}

    def to_add(self, known: set[str]) -> list[AddedToken]:
        """Return the tokens to add after tokenizer.json's own, which have the texts `known`."""
        found: list[AddedToken | str] = list(self.decoder)
        known = known | {token.content for token in self.decoder}
        for value in (*self.names.values(), *self.extra):
            if _text(value) not in known and value not in found:
                found.append(value)
        named = set(self.texts().values())
        return [
            AddedToken(value, special=True)
            if isinstance(value, str)
            else replace(value, special=value.special or value.content in named)
            for value in found
        ]


def _add(
    id_to_token: dict[int, AddedToken], tokens: Iterable[AddedToken], vocab: Mapping[str, int]
) -> None:
    """Add tokens to `id_to_token` as the tokenizers library does."""
    text_to_id = {token.content: token_id for token_id, token in id_to_token.items()}
    next_id = max(len(vocab), max(id_to_token, default=-1) + 1)
    for token in tokens:
        if not token.content:
            continue
        token_id = text_to_id.get(token.content, vocab.get(token.content))
        if token_id is None:
            token_id, next_id = next_id, next_id + 1
        text_to_id[token.content] = token_id
        id_to_token[token_id] = token


def _special_names(config: Mapping[str, Any], path: Path) -> dict[str, AddedToken | str]:
    """Return the named special tokens, in transformers' order."""
    extra = config.get("extra_special_tokens")
    given = {name: value for name, value in config.items() if name.endswith("_token")}
    for name in _NAMES:
        if not isinstance(given.get(name), str | dict | None):
            raise CheckpointError(
                f"{path}: {name} is {given[name]!r}; a text or an object with its content is needed."
            )
    own = {name: value for name, value in given.items() if isinstance(value, str | dict)}
    # Objects precede texts, and named tokens of extra_special_tokens are last.
    others = [name for name in own if name not in _NAMES]
    others.sort(key=lambda name: isinstance(own[name], str))
    if isinstance(extra, dict):
        own |= extra
        others += [name for name in extra if name not in others]
    return {
        name: _token_or_text(own[name], f"{path}: {name}")
        for name in (*_NAMES, *others)
        if own.get(name) is not None
    }


def _older_names(older: dict[str, Any], folder: Path, *, has_extra: bool) -> dict[str, Any]:
    """Return the fields of special_tokens_map.json that replace fields of tokenizer_config.json."""
    path = folder / "special_tokens_map.json"
    found: dict[str, Any] = {}
    for name, value in older.items():
        if name in ("additional_special_tokens", "extra_special_tokens"):
            if not has_extra:
                found["extra_special_tokens"] = value
        elif isinstance(value, dict):
            found[name] = {**value, "special": True}
        elif isinstance(value, str) or value is None:
            found[name] = value
        else:
            raise CheckpointError(f"{path}: {name} is {shown(value)}; a text is needed.")
    return found


def _older_decoder(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json by id."""
    path = folder / "added_tokens.json"
    given = read_config(folder, path.name)
    special = {_text(value) for value in _special_names(config, folder / CONFIG).values()}
    extra = config.get("extra_special_tokens")
    special |= {_text(each) for each in extra or [] if isinstance(each, str)}
    found: dict[int, AddedToken] = {}
    for text, token_id in given.items():
        if type(token_id) is not int:
            raise CheckpointError(f"{path}: {shown(text)} is {shown(token_id)}; an id is needed.")
        found[token_id] = AddedToken(text, normalized=text not in special, special=text in special)
    return found


def _decoder(value: Any, path: Path) -> dict[int, AddedToken]:
    """Return the tokens of `added_tokens_decoder` by key."""
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: added_tokens_decoder is {shown(value)}; an object is needed."
        )
    found: dict[int, AddedToken] = {}
    for key, token in value.items():
        where = f"{path}: added_tokens_decoder[{shown(key)}]"
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise CheckpointError(f"{where}: the key must be an id.")
        found[int(key)] = _token(token, where)
    return found


def _token_or_text(value: Any, where: str) -> AddedToken | str:
    return value if isinstance(value, str) else _token(value, where)


def _token(value: Any, where: str) -> AddedToken:
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise CheckpointError(
            f"{where} is {shown(value)}; it must be an object with a text as content."
        )
    flags = {name: value.get(name) for name in FLAGS}
    for name, flag in flags.items():
        if flag is not None and not isinstance(flag, bool):
            raise CheckpointError(f"{where}: {name} is {shown(flag)}; true or false is needed.")
    if flags["normalized"] is None:
        flags["normalized"] = not flags["special"]
    return AddedToken(content, **{name: bool(flag) for name, flag in flags.items()})


def _text(value: AddedToken | str) -> str:
    return value if isinstance(value, str) else value.content
