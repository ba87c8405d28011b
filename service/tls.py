"""TLS, through uvicorn: what its options are made of, checked before anything is loaded."""

from __future__ import annotations

import ssl
from typing import Any

from service.errors import TlsError
from service.settings import Settings


def tls_options(settings: Settings) -> dict[str, Any]:
    """uvicorn's `ssl_*` options; none without a certificate.

    Raises:
        TlsError: the files cannot be used; the message names the setting and no password.
    """
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None or settings.ssl_ca_certs is not None:
            raise TlsError("ssl_certfile: missing; ssl_keyfile and ssl_ca_certs need it")
        return {}
    password = None if settings.ssl_keyfile_password is None else settings.ssl_keyfile_password.get_secret_value()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password where none is set, or OpenSSL would ask for one on the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password or "")
    except OSError as cause:  # ssl.SSLError is one
        raise TlsError(f"ssl_certfile, ssl_keyfile: {settings.ssl_certfile}: {_reason(cause)}") from cause
    options: dict[str, Any] = {
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
        "ssl_keyfile_password": password,
    }
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except OSError as cause:
            raise TlsError(f"ssl_ca_certs: {settings.ssl_ca_certs}: {_reason(cause)}") from cause
        options |= {"ssl_ca_certs": str(settings.ssl_ca_certs), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _reason(cause: OSError) -> str:
    return cause.strerror or str(cause)
