"""Keys: who is let in, under which name, what rotates, and that no key is ever quoted."""

from __future__ import annotations

import hmac
import logging
import os
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from service.auth import Gate, KeyRing
from service.errors import AdminOff, Forbidden, KeysError, Unauthorized
from service.settings import Settings

ALICE, BOB, ROOT = "a" * 20, "b" * 24, "r" * 32


def gate(**settings: Any) -> Gate:
    return Gate(Settings(**settings))


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key.encode())]


def guarded() -> Gate:
    return gate(api_keys=SecretStr(f"alice:{ALICE},bob:{BOB}"), admin_keys=SecretStr(f"root:{ROOT}"))


def test_without_keys_everyone_may_ask_and_nobody_may_change_anything() -> None:
    open_gate = gate()
    assert not open_gate.guarded
    assert open_gate.client([], "10.0.0.1") == ""
    with pytest.raises(AdminOff, match="admin_keys"):
        open_gate.admin(bearer(ROOT))


def test_a_key_is_a_name_in_either_header() -> None:
    keys = guarded()
    assert keys.client(bearer(ALICE), None) == "alice"
    assert keys.client([(b"authorization", b"bearer  " + BOB.encode())], None) == "bob"
    assert keys.client([(b"x-api-key", BOB.encode())], None) == "bob"
    assert keys.client(bearer(ROOT), None) == "root", "an admin may ask too"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("x" * 20),
        bearer(ALICE[:-1]),
        bearer(ALICE + "a"),
        [(b"authorization", b"Basic " + ALICE.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer x"), (b"x-api-key", ALICE.encode())],
    ],
    ids=["none", "unknown", "short", "long", "basic", "empty", "the first counts"],
)
def test_anything_else_is_unauthorized(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthorized) as refused:
        guarded().client(headers, None)
    assert ALICE[:8] not in str(refused.value)


def test_an_admin_needs_an_admins_key() -> None:
    keys = guarded()
    assert keys.admin(bearer(ROOT)) == "root"
    with pytest.raises(Forbidden, match="is a client's"):
        keys.admin(bearer(ALICE))
    for headers in ([], bearer("x" * 20)):
        with pytest.raises(Unauthorized):
            keys.admin(headers)


def test_every_lookup_compares_with_every_key_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing({f"n{i}": str(i) * 20 for i in range(5)})
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert ring.holder(b"0" * 20) == "n0"
    assert ring.holder(b"x") is None
    assert len(compared) == 10
    assert {len(side) for pair in compared for side in pair} == {32}


@given(st.dictionaries(st.sampled_from("abcdef"), st.text(string.ascii_letters, min_size=1), min_size=1), st.binary())
def test_a_ring_knows_its_own_keys_and_no_other(keys: dict[str, str], other: bytes) -> None:
    ring = KeyRing(keys)
    for key in keys.values():
        holder = ring.holder(key.encode())
        assert holder is not None
        assert keys[holder] == key
    if other.decode("latin-1") not in keys.values():
        assert ring.holder(other) is None


def test_a_client_id_is_believed_only_from_a_trusted_proxy() -> None:
    claim = [(b"x-client-id", b"tenant-7")]
    trusting = gate(trusted_proxies="10.0.0.0/8, ::1")
    assert trusting.guarded
    assert trusting.client(claim, "10.1.2.3") == "tenant-7"
    assert trusting.client(claim, "::1") == "tenant-7"
    assert trusting.client(claim, "11.0.0.1") == ""
    assert trusting.client(claim, "unix") == ""
    assert trusting.client(claim, None) == ""
    assert trusting.client([(b"x-client-id", b"a b")], "10.1.2.3") == "", "it would go into metrics and logs"
    assert guarded().client([*claim, *bearer(ALICE)], "10.1.2.3") == "alice"
    both = gate(trusted_proxies=("10.0.0.1",), api_keys=SecretStr(f"proxy:{ALICE}"))
    assert both.client([*claim, *bearer(ALICE)], "10.0.0.1") == "tenant-7"
    with pytest.raises(Unauthorized):
        both.client(claim, "10.0.0.1")


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="trusted_proxies"):
        Settings(trusted_proxies=("10.0.0.0/33",))


def test_a_file_rotates_when_it_changes_and_a_broken_one_leaves_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# clients\nalice:{ALICE}\n\n")
    keys = gate(api_keys_file=file)
    assert keys.client(bearer(ALICE), None) == "alice"
    file.write_text(f"bob:{BOB}\n")
    os.utime(file, ns=(1, 1))
    keys.refresh()
    assert keys.client(bearer(BOB), None) == "bob"
    with pytest.raises(Unauthorized):
        keys.client(bearer(ALICE), None)
    file.write_text("no key at all " + ROOT)
    os.utime(file, ns=(2, 2))
    with caplog.at_level(logging.ERROR):
        keys.refresh()
        keys.refresh()
    assert keys.client(bearer(BOB), None) == "bob"
    assert len(caplog.records) == 1, "once a change, not once a look"
    file.unlink()
    keys.reload()
    assert keys.client(bearer(BOB), None) == "bob", "a secret that is missing for a moment opens nothing"
    assert ROOT not in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALICE, "part 1 is not name:key"),
        (f"alice:{ALICE},:{BOB}", "part 2 is not name:key"),
        ("alice:short", "must be 16 or more"),
        (f"alice:{ALICE} {BOB}", "visible characters"),
        (f"alice:{ALICE},alice:{BOB}", "'alice' has two keys"),
    ],
)
def test_keys_that_cannot_be_used_are_named_and_not_quoted(text: str, message: str) -> None:
    with pytest.raises(KeysError, match=message) as failed:
        gate(api_keys=SecretStr(text))
    assert not {ALICE, BOB, "short"} & set(str(failed.value).split())


def test_a_file_without_keys_does_not_open_the_gate(tmp_path: Path) -> None:
    for content in (None, "", "# nothing\n"):
        file = tmp_path / "keys"
        if content is not None:
            file.write_text(content)
        with pytest.raises(KeysError, match="api_keys_file"):
            gate(api_keys_file=file)


@pytest.mark.parametrize("value", ["", " , ", "# none"])
@pytest.mark.parametrize("setting", ["api_keys", "admin_keys"])
def test_a_variable_without_keys_does_not_open_the_gate_either(setting: str, value: str) -> None:
    with pytest.raises(KeysError, match=f"{setting}: no key in it"):
        gate(**{setting: value})


def test_no_setting_or_error_shows_a_key() -> None:
    settings = Settings(api_keys=SecretStr(f"alice:{ALICE}"))
    with pytest.raises(ValidationError) as wrong:
        Settings(api_keys=SecretStr(f"alice:{ALICE}"), port=-1)
    with pytest.raises(ValidationError) as bad:
        Settings.model_validate({"api_keys": [ALICE]})
    for text in (repr(settings), str(settings), settings.model_dump_json(), str(wrong.value), str(bad.value)):
        assert ALICE not in text
