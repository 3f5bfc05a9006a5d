"""The keys file: the meaning of its lines, how it is written, and how gateways notice changes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hadal.cli import app
from hadal.core.errors import ConfigError
from hadal.core.messages.gateways import QueryReply
from hadal.core.messages.requests import Quota
from hadal.gateway.desk.auth import RIGHTS, Keys, Tenant, hashed, parse_key
from hadal.gateway.desk.keys import FetchedKeys, KeysFile, add_line, follow, read_lines, remove_name
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.edge.errors import ApiError
from tests.fresh import fresh

LINE = (
    "name=alice weight=2.5 tokens_per_minute=600 requests=3 dollars_per_day=0.5 model=m model=n"
    " priority"
)
ALICE = Tenant(
    salt_of(b"secret"),
    frozenset({"priority"}),
    "alice",
    2.5,
    frozenset({"m", "n"}),
    Quota("alice", 600, 3, 500_000_000_000),
)


@pytest.mark.parametrize("key", ["secret", hashed("secret")])
def test_a_line_says_all_of_a_tenant(key: str) -> None:
    """A key and its hash give the tenant the same salt. So its cached KV is still found when the
    file's line gets the hash in place of the key.
    """
    keys = Keys((f"{key} {LINE}", "other"))
    assert keys.check("Bearer secret") == ALICE
    assert keys.check("Bearer secret").name == "alice"
    assert keys.quotas == (ALICE.quota,)
    assert (ALICE.may_ask("m"), ALICE.may_ask("o"), Tenant(b"").may_ask("o")) == (True, False, True)


def test_a_plain_line_may_have_a_quota_and_keeps_its_name() -> None:
    digest, tenant = parse_key("secret requests=2")
    assert tenant.quota == Quota(Tenant(salt_of(b"secret")).name, requests=2)
    assert digest == parse_key("secret")[0] == parse_key(f"{hashed('secret')} name=x")[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (hashed("secret"), "needs a name"),
        ("sha256:abc name=x", "64 hex digits"),
        ("secret name=x name=y", "twice"),
        ("secret name=everyone", "name is"),
        ("secret name=t-0123456789", "begins with t-"),
        ("secret name=a/b", "name is"),
        ("secret weight=0", "0.001"),
        ("secret weight=nan", "weight is"),
        ("secret tokens_per_minute=0", "at least 1"),
        ("secret tokens_per_minute=1.5", "whole number"),
        ("secret requests=-1", "whole number"),
        ("secret dollars_per_day=0.0000001", "6 decimals"),
        ("secret dollars_per_day=0", "0.000001"),
        ("secret dollars_per_day=1e9", "0.000001"),
        ("secret model=", "empty"),
        ("secret colour=blue", "an unknown word"),
        ("secret prioritY", "an unknown word"),
    ],
)
def test_a_bad_line_is_an_error_that_does_not_show_the_key(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_key(line)
    assert "secret" not in str(caught.value)


def test_whatever_a_file_holds_is_read_or_refused(tmp_path: Path) -> None:
    random, path = fresh(), keys_file(tmp_path)
    good = f"# ours\nplain priority\n{hashed('secret')} {LINE}\n".encode()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(random.randint(1, 6)):
            at = random.randrange(len(data))
            data[at : at + random.randint(0, 3)] = random.randbytes(random.randint(0, 3))
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            Keys(read_lines(path), is_closed=True)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfsk-first\r\nsk-second operator")
    path.chmod(0o600)
    assert read_lines(path) == ("sk-first", "sk-second operator")


def test_keys_and_names_are_one_tenant_s() -> None:
    for lines in (("a name=x", "b name=x"), ("a name=x", "a name=y"), ("a", "a requests=1")):
        with pytest.raises(ConfigError, match=r"two keys|twice"):
            Keys(lines)
    assert Keys(("a operator", "a priority", "b")).check("Bearer a").rights == RIGHTS
    assert Keys(("a name=x",)).check("Bearer a").rights == frozenset(), "it may not be for long"


def test_closed_is_not_open() -> None:
    for keys, status in ((Keys(is_closed=True), 401), (Keys(is_known=False), 503)):
        assert keys.is_open is (status == 503)
        with pytest.raises(ApiError) as caught:
            keys.check("Bearer a")
        assert caught.value.status == status


def keys_file(folder: Path, *lines: str) -> Path:
    path = folder / "keys.txt"
    path.touch(0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.promise(
    "hadal keys add prints the key, 256 random bits, only this once. The file has its SHA-256"
)
def test_the_command_adds_lists_and_revokes(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "# ours", "sk-old priority")
    run = CliRunner().invoke
    given = ["alice", "--file", str(path), "--requests", "2", "--dollars-per-day", "1.5"]
    added = run(
        app, ["keys", "add", *given, "--weight", "2", "--model", "m", "--right", "operator"]
    )
    key = added.stdout.split()[-1]
    assert added.exit_code == 0
    assert key.startswith("sk-hadal-")
    assert len(key) > 50
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    tenant = Keys(read_lines(path), is_closed=True).check(f"Bearer {key}")
    assert (tenant.name, tenant.weight, tenant.rights) == ("alice", 2.0, frozenset({"operator"}))
    assert tenant.quota == Quota("alice", requests=2, day_pico_usd=1_500_000_000_000)
    listed = run(app, ["keys", "list", "--file", str(path)]).stdout
    assert "alice: weight 2, 2 at once, 1.5 dollars a day, only m, operator" in listed
    assert "sk-old" not in listed
    as_json = json.loads(run(app, ["keys", "list", "--file", str(path), "--json"]).stdout)
    assert [one["is_hashed"] for one in as_json] == [False, True]
    twice = run(app, ["keys", "add", *given])
    assert (twice.exit_code, "already has a key with the name" in twice.stderr) == (2, True)
    assert run(app, ["keys", "revoke", "alice", "--file", str(path)]).exit_code == 0
    assert path.read_text() == "# ours\nsk-old priority\n# revoked: alice\n"
    gone = run(app, ["keys", "revoke", "alice", "--file", str(path)])
    assert (gone.exit_code, "no key has the name" in gone.stderr) == (2, True)


def test_the_command_refuses_what_no_file_can_hold(tmp_path: Path) -> None:
    run = CliRunner().invoke
    file = ["--file", str(tmp_path / "k")]
    for more, words in (
        (["a b"], "the name"),
        (["a", "--right", "king"], "--right is 'king'"),
        (["a", "--right", "weight=5"], "--right is"),
        (["a", "--model", "m operator"], "--model is 'm operator'"),
        (["a", "--model", ""], "--model is"),
        (["a", "--dollars-per-day", "x"], "dollars"),
    ):
        refused = run(app, ["keys", "add", *more, *file])
        assert (refused.exit_code, words in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "k").exists()
    absent = run(app, ["keys", "add", "a", "--file", str(tmp_path / "no" / "k")])
    assert (absent.exit_code, "its folder cannot be opened" in absent.stderr) == (2, True)
    assert run(app, ["keys", "add", "a", *file]).exit_code == 0, "it is made"
    (tmp_path / "k").chmod(0o644)
    assert run(app, ["keys", "list", *file]).exit_code == 2


@pytest.mark.promise(
    "within three seconds or so all gateways, those on other hosts too, admit a new "
    "key and refuse a revoked one; running requests continue"
)
def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "one")
    file = KeysFile(("given",), path)
    first = file.changed()
    assert first is not None
    assert first.check("Bearer one").name != first.check("Bearer given").name
    assert file.changed() is None
    add_line(path, f"{hashed('two')} name=two")
    assert file.changed() is None, "somebody may be writing it"
    second = file.changed()
    assert second is not None
    assert second.check("Bearer two").name == "two"
    path.write_text("one,two\n")
    assert file.changed() is None
    with pytest.raises(ConfigError, match="line 1"):
        file.changed()
    assert file.changed() is None, "said once"
    path.write_text("")
    assert file.changed() is None
    path.write_text("given name=x\nthree\n")
    assert file.changed() is None, "it is another once more"
    for text, words in (
        ("", "no key"),
        ("# nothing but this\n", "no key"),
        ("three\nfour name=four\n", "none of its former tenants"),
        ("\x01\x1c\x02\n", "control character"),
        ("two name=two\nth\x1free\n", "line 2: control characters"),
    ):
        path.write_text(text)
        assert file.changed() is None
        with pytest.raises(ConfigError, match=words):
            file.changed()
        assert file.changed() is None, "said once"
    path.unlink()
    assert file.changed() is None
    with pytest.raises(ConfigError, match="cannot be read"):
        file.changed()


def test_another_tenant_takes_over_by_the_command_alone(tmp_path: Path) -> None:
    path = keys_file(tmp_path, f"{hashed('one')} name=old")
    file = KeysFile((), path)
    assert file.changed() is not None
    with pytest.raises(ConfigError, match="only old has keys"):
        remove_name(path, "old")
    assert not add_line(path, f"{hashed('two')} name=new")
    remove_name(path, "old")
    assert file.changed() is None
    keys = file.changed()
    assert keys is not None
    assert [tenant.name for tenant in keys.tenants] == ["new"]
    assert add_line(path, f"{hashed('three')} name=old"), "the name was another's"


@pytest.mark.needs("root")
def test_root_leaves_a_file_to_the_server_that_reads_it(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "one")
    os.chown(path, 4321, 1234)
    add_line(path, "two")
    remove_name(path, parse_key("one")[1].name)
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 4321, 1234)
    add_line(tmp_path / "new.txt", "three")
    for each in (path, tmp_path / "new.txt"):
        found = each.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (4321, 1234, 0o600)


@pytest.mark.promise(
    "within three seconds or so all gateways, those on other hosts too, admit a new "
    "key and refuse a revoked one; running requests continue"
)
async def test_others_hear_of_the_keys_by_asking(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "one")
    file = KeysFile((), path)
    asked: list[int] = []

    async def ask(query: object) -> QueryReply | None:
        if not asked:
            asked.append(0)
            return None  # The front is not up yet.
        status, body = await file.page(query)  # type: ignore[arg-type]
        asked.append(status)
        return QueryReply("front", 1, status, body)

    heard = FetchedKeys(ask)
    file.changed()
    assert await heard.changed() is None
    keys = await heard.changed()
    assert keys is not None
    assert keys.check("Bearer one").salt == salt_of(b"one")
    assert await heard.changed() is None
    add_line(path, "two")
    remove_name(path, parse_key("one")[1].name)
    file.changed()
    file.changed()
    keys = await heard.changed()
    assert keys is not None
    with pytest.raises(ApiError):
        keys.check("Bearer one")
    assert asked == [0, 200, 304, 200]


async def test_following_goes_on_after_an_error() -> None:
    taken: list[Keys] = []
    steps = iter([None, ConfigError("bad"), Keys(("a",))])

    async def changed() -> Keys | None:
        step = next(steps)
        if isinstance(step, ConfigError):
            raise step
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hadal.gateway.desk.keys.FOLLOW_S", 0.0)
        with pytest.raises(RuntimeError):  # `steps` is used up.
            await follow(changed, taken.append)
    assert len(taken) == 1
