"""Who may ask, and under which name their share is counted. Holds digests of keys only; knows no route but by its name.

Keys are lines (or comma-separated parts) `name:key`, from a file or the environment. A file is read again when it
changes and on SIGHUP, so that keys rotate without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from service.errors import AdminOff, Forbidden, KeysError, Unauthorized
from service.settings import Settings

log = logging.getLogger("tokenslab.auth")

Headers = Iterable[tuple[bytes, bytes]]

MIN_KEY: Final = 16  # characters; shorter ones can be guessed
ANYBODY: Final = ""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]+")  # visible ASCII but the comma, which parts keys
_CLIENT: Final = re.compile(rb"[\x21-\x7e]{1,64}")
_BEARER: Final = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)


class KeyRing:
    """Named keys, as digests under a secret of this process. A lookup compares with all of them, in constant time."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._salt = secrets.token_bytes(32)
        self._names = {self._digest(key.encode()): name for name, key in keys.items()}

    def __len__(self) -> int:
        return len(self._names)

    def holder(self, key: bytes) -> str | None:
        """The name of the key, None if it is none of these."""
        digest = self._digest(key)
        name = None
        for known, holder in self._names.items():
            if hmac.compare_digest(known, digest):
                name = holder
        return name

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=32, key=self._salt).digest()


class Gate:
    """Decides from a request's headers. `guarded` is False where neither keys nor proxies are configured."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._networks = tuple(ipaddress.ip_network(network) for network in settings.trusted_proxies)
        self._trusts = lru_cache(1024)(self._is_proxy)
        self._stamp = self._stamps()
        self._clients, self._admins = self._read()
        self._note()

    def refresh(self) -> None:
        """Read the files again if they have changed; for a timer."""
        if self._stamps() != self._stamp:
            self.reload()

    def reload(self) -> None:
        """Read the files again; keys that cannot be read leave the old ones in force, and an error in the log."""
        self._stamp = self._stamps()
        try:
            self._clients, self._admins = self._read()
        except KeysError as error:
            log.error("keys not changed: %s", error)
            return
        self._note()
        log.info("keys: %d for clients, %d for admins", len(self._clients), len(self._admins))

    def client(self, headers: Headers, peer: str | None) -> str:
        """The name under which this request's share is counted.

        A trusted proxy may name its client in X-Client-Id. Otherwise it is the name of the key, or nobody's.

        Raises:
            Unauthorized: keys are configured and this request has none of them.
        """
        key, claimed = _presented(headers)
        name = None if key is None else self._clients.holder(key) or self._admins.holder(key)
        if name is None:
            if len(self._clients):
                raise Unauthorized(_refusal(key))
            name = ANYBODY
        if claimed is not None and peer is not None and self._networks and self._trusts(peer):
            return claimed
        return name

    def admin(self, headers: Headers) -> str:
        """The name of the admin key.

        Raises:
            AdminOff: none is configured, so that nobody may do this.
            Unauthorized: this request has no key, or an unknown one.
            Forbidden: its key is a client's.
        """
        if not len(self._admins):
            raise AdminOff("this endpoint is off: it needs admin_keys or admin_keys_file to be set")
        key, _ = _presented(headers)
        name = None if key is None else self._admins.holder(key)
        if name is not None:
            return name
        if key is not None and self._clients.holder(key) is not None:
            raise Forbidden("this endpoint needs an admin key; the key of this request is a client's")
        raise Unauthorized(_refusal(key))

    def operator(self, headers: Headers, peer: str | None) -> None:
        """Raise unless this request may look on: with an admin key where there are any, else as a client."""
        if len(self._admins):
            self.admin(headers)
        elif self.guarded:
            self.client(headers, peer)

    def _note(self) -> None:
        self.guarded = bool(len(self._clients) or self._networks)

    def _read(self) -> tuple[KeyRing, KeyRing]:
        settings = self._settings
        clients = _keys("api_keys", settings.api_keys, settings.api_keys_file)
        admins = _keys("admin_keys", settings.admin_keys, settings.admin_keys_file)
        return KeyRing(clients), KeyRing(admins)

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in (self._settings.api_keys_file, self._settings.admin_keys_file) if path]

    def _is_proxy(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _presented(headers: Headers) -> tuple[bytes | None, str | None]:
    """The request's key, and the client that it claims to come from."""
    key: bytes | None = None
    claimed: str | None = None
    for name, value in headers:
        if name == b"authorization":
            bearer = _BEARER.fullmatch(value)
            key = bearer[1] if bearer else b""
        elif name == b"x-api-key" and key is None:
            key = value.strip()
        elif name == b"x-client-id" and _CLIENT.fullmatch(value):
            claimed = value.decode("ascii")
    return key, claimed


def _refusal(key: bytes | None) -> str:
    if key is None:
        return "no key: send Authorization: Bearer <key>, or X-API-Key: <key>"
    return "the key of this request is not known here"


def _keys(setting: str, given: SecretStr | None, file: Path | None) -> dict[str, str]:
    """Raises KeysError, which names the setting and the line but quotes no part of a key."""
    found: dict[str, str] = {}
    if given is not None:
        _collect(found, setting, given.get_secret_value().split(","))
        if not found:  # a secret that did not arrive must not open the service
            raise KeysError(f"{setting}: no key in it; without keys it is to be unset")
    if file is not None:
        try:
            lines = file.read_text("ascii").splitlines()
        except OSError as cause:
            raise KeysError(f"{setting}_file: {file}: {cause.strerror}") from cause
        except UnicodeDecodeError:
            raise KeysError(f"{setting}_file: {file}: not ASCII") from None
        _collect(found, f"{setting}_file: {file}", lines)
        if not found:
            raise KeysError(f"{setting}_file: {file}: no key in it")
    return found


def _collect(found: dict[str, str], where: str, parts: list[str]) -> None:
    for number, part in enumerate(parts, 1):
        line = part.strip()
        if not line or line.startswith("#"):
            continue
        name, colon, key = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise KeysError(f"{where}: part {number} is not name:key (a name of letters, digits, '.', '_' and '-')")
        if len(key) < MIN_KEY or not _KEY.fullmatch(key):
            raise KeysError(f"{where}: the key of {name!r} must be {MIN_KEY} or more visible characters, no comma")
        if name in found:
            raise KeysError(f"{where}: {name!r} has two keys; give each a name of its own")
        found[name] = key


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino
