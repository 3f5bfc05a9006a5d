"""Salts depend on the key alone, and do not contain it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hadal.gateway.desk.salts import EVERYONE, name_of, salt_of, salt_within
from hadal.kv.names import PUBLIC


def test_salts_differ_and_stay() -> None:
    keys = [b"", b"one", b"two", b"public", "kéy".encode()]
    salts = [salt_of(key) for key in keys]
    within = [
        salt_within(salt, user)
        for salt in salts
        for user in ("", "one", "two", "public", "é" * 256)
    ]
    assert len({*salts, *within, PUBLIC}) == len(salts) + len(within) + 1
    assert {len(salt) for salt in (*salts, *within)} == {32}, (
        "a key for the hashes of names: at most 64 bytes"
    )
    assert not any(key and key in salt for key, salt in zip(keys, salts, strict=True))
    # Another process has other seeds of hash(): salts must find blocks on disk after a restart.
    code = (
        "from hadal.gateway.desk.salts import *; print(salt_within(salt_of(b'one'), 'two').hex())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7"},
    )
    assert done.stdout.strip() == salt_within(salt_of(b"one"), "two").hex()


@pytest.mark.promise(
    "A tenant is an API key. Its name is the one in the keys file; a key without a "
    "name there gets t- and ten hex digits, which are a hash of a hash of the key."
)
def test_names_differ_stay_and_tell_nothing() -> None:
    salts = [salt_of(key) for key in (b"", b"one", b"two")]
    names = [name_of(salt) for salt in salts]
    assert names[0] == EVERYONE
    assert len(set(names)) == 3
    assert names[1] == "t-9c40169ff5", "the same after a restart, so that a ledger goes on"
    assert not any(name[2:] in salt.hex() for name, salt in zip(names, salts, strict=True))
